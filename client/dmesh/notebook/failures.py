"""Report of a failed cell: the first failure with its traceback, then its consequences.

`dmesh.launcher.diagnosis` decides which failure was the first, as for `dmesh run`. No IO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dmesh.launcher.diagnosis import Outcome, Role, Traceback, rank_failures
from dmesh.launcher.report import failed_alike, group_endings, hint_of, name_ranks

_GAVE_UP = "CollectiveError"
"""Type of the error of a call that another rank aborted."""
RESET = (
    "Groups that were in a call have failed. Before the next collective, call dmesh.collectives.reset() "
    "in a cell on all ranks."
)
INTERRUPTED = (
    "If a collective was interrupted, call dmesh.collectives.reset() in a cell on all ranks before the next "
    "one."
)


@dataclass(frozen=True)
class CellOutcome(Outcome):
    """Outcome of a cell on one client."""

    alive: bool = True
    """False if its process has ended."""
    interrupted: bool = False
    """True if the cell was interrupted on it."""
    line: int | None = None
    """Line of the cell at which it failed or was interrupted; None if unknown."""

    @property
    def role(self) -> Role:
        """Role of the client in the cell's failure."""
        if self.interrupted:
            return Role.ENDED_BY_LAUNCHER
        if self.traceback is not None and self.traceback.type_name == _GAVE_UP and self.alive:
            return Role.LOST_SOMEBODY
        return super().role

    def how(self) -> str:
        """Return how the cell ended on the client, as part of a sentence."""
        if not self.alive:
            return super().how()
        if self.interrupted:
            return "was interrupted" + (f" in line {self.line}" if self.line is not None else "")
        return "failed"


def outcome_of(rank: int, pid: int, order: int, seconds: float, reply: Mapping[str, Any]) -> CellOutcome:
    """Return a client's outcome of a cell from its reply.

    Args:
        rank: The client.
        pid: Its process id.
        order: Number of earlier replies.
        seconds: Duration of the cell on it.
        reply: Its reply.
    """
    error = reply.get("error")
    if error is None:
        return CellOutcome(rank, pid, 0, order, seconds)
    interrupted = error["interrupted"]
    traceback = None if interrupted else Traceback(tuple(error["lines"]), error["exception"])
    return CellOutcome(
        rank, pid, 1, order, seconds, traceback=traceback, interrupted=interrupted, line=error["line"]
    )


def describe(outcomes: Sequence[CellOutcome], cell: str) -> tuple[str, tuple[int, ...]]:
    """Return the report of a failed cell, and the ranks that failed.

    Args:
        outcomes: Outcomes of all ranks that ran the cell.
        cell: The cell's name.
    """
    failures = cast(tuple[CellOutcome, ...], rank_failures(outcomes))
    first = failures[0]
    alike = [
        one for one in failures if one is first or failed_alike(one, first) or _stopped_alike(one, first)
    ]
    followers = [one for one in failures if one not in alike]
    who = name_ranks([one.rank for one in alike]) + (f" (pid {first.pid})" if len(alike) == 1 else "")
    how = first.how()
    if first.interrupted:  # by the user: no rank failed
        how = (f"were {how[4:]}" if len(alike) > 1 else how) + (" of" if first.line is not None else " in")
    else:
        how += " in"
    lines = [f"{who} {how} {cell} after {first.seconds:.1f} s{hint_of(first)}"]
    if first.traceback is not None:
        lines += first.traceback.lines
    else:
        lines += [f"  {line}" for line in first.last_lines]
    rest = [f"  {text}" for text in group_endings(followers)]
    if rest:
        rest.insert(0, "The others:" if first.interrupted else "The others followed:")
    finished = [one.rank for one in outcomes if one.role is Role.SUCCEEDED]
    if finished:
        rest.append(f"Finished: {name_ranks(finished)}.")
    lines += ["", *rest] if rest else []
    in_collective = first.traceback is not None and first.traceback.type_name.startswith("Collective")
    if all(one.alive for one in outcomes):
        if first.interrupted:
            lines += ["", INTERRUPTED]
        elif followers or in_collective:
            lines += ["", RESET]
    return "\n".join(lines), tuple(one.rank for one in failures)


def _stopped_alike(one: CellOutcome, other: CellOutcome) -> bool:
    """Return whether two clients were interrupted at the same line."""
    return one.alive and other.alive and one.interrupted and other.interrupted and one.line == other.line
