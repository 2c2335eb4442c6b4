"""What members said of their own progress, of those who still hold their seats, or held them last."""

from __future__ import annotations

from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError

from dmesh.v1 import progress_pb2 as pb
from dmesh_server.core.census import Holder
from dmesh_server.progress import MemberProgress
from dmesh_server.runtime import Runtime
from dmesh_server.web.turns import Steps

Said = tuple[Holder, MemberProgress, pb.MemberProgress]
"""Who said something, when and as it came, and as it is on the wire: not cut to what may be shown."""


async def all_said(runtime: Runtime, cluster: str, now: float, steps: Steps) -> AsyncIterator[Said]:
    """Yields what members of a cluster said, sorted by task, with pauses.

    To be read on the wire is many times faster than to be made values of our own, which is left to who shows
    some of it.

    Args:
        runtime: Who has it.
        cluster: Name of the cluster.
        now: As of when ages are told.
        steps: When to pause.

    Raises:
        CoreError: There is no such cluster.
    """
    for member in runtime.progress.members(cluster):
        holder = runtime.census.holder(cluster, member.task)
        if holder is not None and holder.incarnation == member.incarnation:
            age = max(0, round((now - member.received_at) * 1000))
            told = pb.MemberProgress(incarnation=member.incarnation, age_ms=age)
            try:
                told.report.ParseFromString(member.encoded)
            except DecodeError:  # a member may send what it likes
                continue
            yield holder, member, told
        await steps.pause()
