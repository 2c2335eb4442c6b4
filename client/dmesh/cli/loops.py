"""Loops of a cluster's program, put together from its members' progress reports by name."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from dmesh.cli.observing import Picture
from dmesh.coordination.explanation.text import ranks_text, seconds_text
from dmesh.v1 import progress_pb2 as pb


@dataclass(frozen=True, slots=True)
class LoopView:
    """A loop under way, on all ranks that are in it."""

    name: str
    """As the program calls it; may be empty."""
    unit: str
    """Unit of the steps, in the plural."""
    total: int
    """Steps in all; 0 if unknown."""
    least: int
    """Steps that the slowest rank has done."""
    most: int
    """Steps that the fastest rank has done."""
    rate: float
    """Steps per second of the slowest rank; 0.0 if unknown."""
    left: float | None
    """Seconds until the last rank is through; None if unknown."""
    ranks: tuple[int, ...]
    """Ranks that are in it."""
    behind: tuple[int, ...]
    """Ranks with the fewest finished steps; empty if all have finished the same number."""

    def describe(self) -> str:
        """Return the loop in a sentence: `train: 1190-1203 of 5000 steps, 12.3/s, 309 s left.`."""
        done = str(self.least) if self.least == self.most else f"{self.least}-{self.most}"
        words = (
            f"{self.name or 'Loop'}: {done}" + (f" of {self.total}" if self.total else "") + f" {self.unit}"
        )
        words += f", {self.rate:.1f}/s" if self.rate else ""
        words += "" if self.left is None else f", {seconds_text(self.left)} left"
        return words + (f"; behind: {ranks_text(self.behind)}." if self.behind else ".")


def loop_views(picture: Picture) -> list[LoopView]:
    """Return the present members' current loops, those with the most ranks first."""
    there = {(member.job, member.index) for member in picture.state.members if not member.state.departed}
    found: dict[tuple[str, int], dict[int, tuple[pb.LoopProgress, float]]] = defaultdict(dict)
    for task, said in picture.reports.items():
        if (task.job, task.index) in there:
            for loop in said.report.loops:
                if not loop.over:
                    found[loop.name, loop.total][task.index] = loop, said.age_ms / 1000
    return [_view(ranks) for ranks in sorted(found.values(), key=len, reverse=True)]


def time_left(loop: pb.LoopProgress, age: float) -> float | None:
    """Return the seconds that a rank needs to get through a loop; None if unknown.

    Args:
        loop: What it said.
        age: How long ago it said so, seconds.
    """
    known = loop.total > 0 and loop.rate > 0 and not loop.over
    return max(0.0, (loop.total - loop.done) / loop.rate - age) if known else None


def _view(entries: dict[int, tuple[pb.LoopProgress, float]]) -> LoopView:
    loops = [loop for loop, _ in entries.values()]
    left = [time_left(loop, age) for loop, age in entries.values()]
    known = [seconds for seconds in left if seconds is not None]
    least, most = min(loop.done for loop in loops), max(loop.done for loop in loops)
    behind = tuple(sorted(rank for rank, (loop, _) in entries.items() if loop.done == least < most))
    return LoopView(
        name=loops[0].name,
        unit=loops[0].unit or "steps",
        total=loops[0].total,
        least=least,
        most=most,
        rate=min((loop.rate for loop in loops if loop.rate > 0), default=0.0),
        left=max(known) if known and len(known) == len(left) else None,
        ranks=tuple(sorted(entries)),
        behind=behind,
    )
