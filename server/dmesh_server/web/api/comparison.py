"""Comparison of the members of a cluster by their reports: the stragglers of each group of collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from dmesh_server.core.model import Task
from dmesh_server.core.views import MemberRecord
from dmesh_server.progress import GroupBrief, MemberProgress
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.reports import all_said
from dmesh_server.web.api.sharing import freshness
from dmesh_server.web.pacer import Pacer, Steps

MOST_STRAGGLERS = 16
"""Stragglers of a group that are named."""


class Row(NamedTuple):
    """Progress of a member in a group, and its sources."""

    holder: MemberRecord
    said: MemberProgress
    at: GroupBrief


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of a group's members."""

    first: GroupBrief
    """Report of the first member, for the fields that all members share."""
    behind: list[Row]
    """Members furthest behind first."""
    latest: int
    stragglers: list[Task]


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Comparison of all members of a cluster."""

    reported: int
    present: int
    """Number of reporting members that have not departed."""
    groups: list[Comparison]
    """The largest first."""


async def compare_all(runtime: Runtime, pacer: Pacer, cluster: str) -> tuple[Comparisons, float]:
    """Compare the members, and say for how long that is good."""
    steps, reported, present = Steps(pacer), 0, 0
    found: dict[tuple[int, int], list[Row]] = {}
    async for holder, said in all_said(runtime, cluster, steps):
        groups = said.brief()
        if groups is not None:
            reported += 1
            present += holder.present
            for at in groups:
                found.setdefault((at.id, at.generation), []).append(Row(holder, said, at))
    order = sorted(found, key=lambda key: (-found[key][0].at.size, found[key][0].at.name, key))
    compared = [await _compare(found[key], steps) for key in order]
    return Comparisons(reported, present, compared), freshness(reported)


async def _compare(rows: list[Row], steps: Steps) -> Comparison:
    """Compare the members of a group; their rows are sorted by task."""
    first, latest = rows[0].at, max(row.at.issued for row in rows)
    waited_for = _waited_for(rows)
    await steps.pause()
    stragglers = _stragglers(rows, waited_for, latest)
    await steps.pause()
    # The sort is stable: equal members stay sorted by task.
    if waited_for:
        behind = sorted(rows, key=lambda row: (row.at.issued, row.at.finished, -waited_for[row.said.task]))
    else:
        behind = sorted(rows, key=lambda row: (row.at.issued, row.at.finished))
    await steps.pause()
    return Comparison(first, behind, latest, stragglers)


def _waited_for(rows: list[Row]) -> Counter[Task]:
    """Return how many members wait for each one."""
    return Counter(
        Task(row.said.task.job, rank)
        for row in rows
        for rank in (row.at.last.waits_for if row.at.last.pending else ())
    )


def _stragglers(rows: list[Row], waited_for: Counter[Task], latest: int) -> list[Task]:
    """Return the stragglers; a rank that is itself waiting is not counted as late."""
    suspects = set(waited_for)
    suspects.update(row.said.task for row in rows if row.at.issued < latest)
    if not suspects:
        return []
    issued = {row.said.task: row.at.issued for row in rows}
    suspects.difference_update(
        row.said.task
        for row in rows
        if row.at.issued == latest and (not row.at.last.pending or row.at.last.waits_for)
    )
    ranked = sorted(suspects, key=lambda task: (issued.get(task, 0), -waited_for[task], _order(task)))
    return ranked[:MOST_STRAGGLERS]


def _order(task: Task) -> tuple[str, int]:
    return task.job, task.index
