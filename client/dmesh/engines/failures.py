"""Results of a launch's ranks, or one error: the first failure, then its consequences."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from dmesh.engines.rank import Failure, Place, Report
from dmesh.errors import RankFailedError
from dmesh.launcher.diagnosis import Outcome, Traceback, rank_failures

_MOST_FOLLOWERS = 8
_MOST_MESSAGE = 200


@dataclass(frozen=True)
class Ended:
    """A rank that has ended."""

    rank: int
    """The rank."""
    place: Place
    """Its last process."""
    report: Report | None
    """Its report; None if its process ended without one."""
    how: str = ""
    """How its process ended, as part of a sentence; empty if it has a report."""
    ended_by: signal.Signals | None = None
    """Signal with which the launcher ended its process; None if it did not."""
    restarts: int = 0
    """Number of earlier starts."""
    lines: tuple[str, ...] = ()
    """Traceback that its process printed, such as that of a crash in native code."""

    @property
    def failure(self) -> Failure | None:
        """Its reported failure; None if there is none."""
        return None if self.report is None else self.report.failure

    @property
    def failed(self) -> bool:
        """True if it has no result."""
        return self.report is None or self.report.failure is not None


def results(ended: Sequence[Ended], running: Sequence[int] = ()) -> list[object]:
    """Return the ranks' results, by rank.

    Args:
        ended: The ranks that have ended, in that order.
        running: Ranks that have not ended although others failed.

    Raises:
        RankFailedError: A rank failed. The error describes the first failure; `failures` lists all of them.
    """
    if not any(rank.failed for rank in ended):
        return [rank.report.value for rank in sorted(ended, key=lambda one: one.rank) if rank.report]
    by_rank = {rank.rank: rank for rank in ended}
    ordered = [
        by_rank[outcome.rank] for outcome in rank_failures(list(map(_outcome, ended, range(len(ended)))))
    ]
    errors = [error_of(rank) for rank in ordered]
    first = errors[0]
    lines = [str(first)]
    if errors[1:]:
        lines.append("the others followed:")
        lines += [f"  {_named(rank)} {_short(_described(rank))}" for rank in ordered[1 : 1 + _MOST_FOLLOWERS]]
        if len(errors) > 1 + _MOST_FOLLOWERS:
            lines.append(f"  and {len(errors) - 1 - _MOST_FOLLOWERS} more")
    if running:
        lines.append(f"still running: rank {', '.join(map(str, running))}")
    first.args = ("\n".join(lines),)
    first.failures = tuple(errors)
    raise first from first.__cause__


def error_of(rank: Ended) -> RankFailedError:
    """Return the error that describes how a rank failed."""
    text = f"{_named(rank)} {_described(rank)}"
    if rank.restarts:
        text += f" after {rank.restarts} restart{'s' if rank.restarts > 1 else ''}"
    lines = rank.lines if rank.failure is None else rank.failure.lines
    text += "".join(f"\n  {line}" for line in lines)
    error = RankFailedError(text, rank.rank, rank.place.host, rank.place.pid)
    error.__cause__ = None if rank.failure is None else rank.failure.error
    return error


def _named(rank: Ended) -> str:
    return f"rank {rank.rank} on host {rank.place.host} (pid {rank.place.pid})"


def _described(rank: Ended) -> str:
    if rank.failure is None:
        return rank.how
    return f"raised {rank.failure.summary}" + (f" and then {rank.how}" if rank.ended_by else "")


def _short(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= _MOST_MESSAGE else f"{line[:_MOST_MESSAGE]}..."


def _outcome(rank: Ended, order: int) -> Outcome:
    """Return a rank's end in the form of `dmesh run`, which then tells cause from consequence."""
    failure = rank.failure
    if failure is not None:
        status = failure.exit_code
    else:
        status = 0 if rank.report is not None else -signal.SIGKILL
    return Outcome(
        rank=rank.rank,
        pid=rank.place.pid,
        status=status,
        order=order,
        seconds=0.0,
        ended_by=rank.ended_by,
        traceback=None if failure is None else Traceback(failure.lines, failure.summary),
        restarts=rank.restarts,
    )
