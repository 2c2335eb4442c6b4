"""What members said of their own progress, of those who still hold their task slots, or held them last."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dmesh_server.core.views import MemberRecord
from dmesh_server.progress import MemberProgress
from dmesh_server.runtime import Runtime
from dmesh_server.web.pacer import Steps


async def all_said(
    runtime: Runtime, cluster: str, steps: Steps
) -> AsyncIterator[tuple[MemberRecord, MemberProgress]]:
    """Yields what members of a cluster said, sorted by task, with pauses.

    Args:
        runtime: Who has it.
        cluster: Name of the cluster.
        steps: When to pause.

    Raises:
        CoreError: There is no such cluster.
    """
    for said in runtime.progress.look(cluster):
        holder = runtime.views.holder(cluster, said.task)
        if holder is not None and holder.incarnation == said.incarnation:
            yield holder, said
        await steps.pause()
