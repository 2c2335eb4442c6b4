"""Progress of each group's members, put together from their reports."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from dmesh.cli.observing import Picture
from dmesh.coordination.explanation import slowest
from dmesh.v1 import progress_pb2 as pb

STATES = {
    pb.CALL_STATE_QUEUED: "queued",
    pb.CALL_STATE_RUNNING: "running",
    pb.CALL_STATE_WAITING: "waiting",
    pb.CALL_STATE_DONE: "done",
    pb.CALL_STATE_FAILED: "failed",
}
"""Names of how far a call has come."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group, or the transfers of one pair of ranks in it."""

    id: str
    """16 hexadecimal digits."""
    name: str
    """As people call it."""
    size: int
    """Number of ranks that take part."""
    generation: int
    """Generation; sequence numbers of different generations are unrelated."""
    reporting: int
    """Number of them that have reported."""
    first: int
    """Number of the last call that all of those have made."""
    last: int
    """Number of the last call that any of them has made."""
    behind: tuple[int, ...]
    """Ranks that have not made it."""
    waiting: tuple[int, ...]
    """Ranks in a call that waits for others."""
    call: str
    """The last call."""
    nbytes: int
    """Bytes of it."""
    waited_share: float | None
    """Share of the time of recent calls that was spent waiting; None if nothing is known."""
    straggler: int | None
    """Rank that waited least, if the others waited much longer: they waited for it."""


def group_views(picture: Picture) -> list[GroupView]:
    """Returns the groups of a cluster, those first that were last in use."""
    found: dict[tuple[int, int], dict[int, tuple[float, pb.GroupProgress]]] = defaultdict(dict)
    for task, said in picture.reports.items():
        for group in said.report.groups:
            used = group.last.age_us / 1e6 + said.age_ms / 1e3
            found[group.id, group.generation][task.index] = used, group
    ordered = sorted(found.values(), key=lambda members: min(used for used, _ in members.values()))
    return [_view({rank: group for rank, (_, group) in members.items()}) for members in ordered]


def _view(members: dict[int, pb.GroupProgress]) -> GroupView:
    last = max(group.issued for group in members.values())
    latest = next(group for group in members.values() if group.issued == last)
    elapsed = sum(group.elapsed_us for group in members.values())
    waited = sum(group.waited_us for group in members.values())
    slow = slowest(members.items())
    return GroupView(
        id=f"{latest.id:016x}",
        name=latest.name,
        size=latest.size,
        generation=latest.generation,
        reporting=len(members),
        first=min(group.issued for group in members.values()),
        last=last,
        behind=tuple(sorted(rank for rank, group in members.items() if group.issued < last)),
        waiting=tuple(
            sorted(rank for rank, group in members.items() if group.last.state == pb.CALL_STATE_WAITING)
        ),
        call=latest.last.call,
        nbytes=latest.last.nbytes,
        waited_share=round(waited / elapsed, 4) if elapsed else None,
        straggler=None if slow is None else slow[0],
    )


def waited_share(group: pb.GroupProgress) -> float | None:
    """Returns which share of the time of its recent calls a member spent waiting; None if unknown."""
    return group.waited_us / group.elapsed_us if group.elapsed_us else None
