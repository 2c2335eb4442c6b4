"""Progress reports of the members that hold their task slots, or held them last."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dmesh_server.core.views import MemberRecord
from dmesh_server.progress import MemberProgress
from dmesh_server.runtime import Runtime
from dmesh_server.web.pacer import Steps


async def all_said(
    runtime: Runtime, cluster: str, steps: Steps
) -> AsyncIterator[tuple[MemberRecord, MemberProgress]]:
    """Yield the reports of a cluster's members, sorted by task, with pauses.

    Args:
        runtime: The server's state.
        cluster: Name of the cluster.
        steps: Pauses between the reports.

    Raises:
        CoreError: There is no such cluster.
    """
    for said in runtime.progress.look(cluster):
        holder = runtime.views.holder(cluster, said.task)
        if holder is not None and holder.incarnation == said.incarnation:
            yield holder, said
        await steps.pause()
