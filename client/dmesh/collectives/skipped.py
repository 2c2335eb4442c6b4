"""Detection of a skipped call: a rank waits in a barrier that includes a rank which waits for it in a call.

Both wait for ever, so it is an error at once. It must never be reported of a program that could go on: by
another thread of either rank, or because the barrier gives up before the call does.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from dmesh.collectives.control_messages import NOT_BLOCKED, Blocked
from dmesh.errors import DMeshError

_FOREVER = 0


@dataclass(frozen=True, slots=True)
class BarrierWait:
    """A barrier of the coordination service in which a thread of this process waits."""

    name: str
    """The barrier's name."""
    ranks: frozenset[int] | None
    """The participants; None for all clients."""
    thread: int
    """Id of the thread."""
    gives_up_in: float
    """Seconds after which it gives up; infinite if it never does."""
    leaving: bool
    """Return whether it is the barrier of the shutdown."""

    def includes(self, rank: int) -> bool:
        """Return whether a rank takes part."""
        return self.ranks is None or rank in self.ranks


class Barriers(Protocol):
    """The barriers of this process. Any thread."""

    def waits(self) -> Sequence[BarrierWait]:
        """Return the barriers in which threads of this process wait."""

    def threads(self) -> set[int]:
        """Return the threads that have called barriers."""

    def fail(self, name: str, error: DMeshError) -> None:
        """Make the wait in a barrier raise an error."""


class NoBarriers:
    """The barriers of a process that has no coordination service."""

    def waits(self) -> Sequence[BarrierWait]:
        """See `Barriers.waits`."""
        return ()

    def threads(self) -> set[int]:
        """See `Barriers.threads`."""
        return set()

    def fail(self, name: str, error: DMeshError) -> None:
        """See `Barriers.fail`."""


def blocked_in(barriers: Barriers, callers: Collection[int], asking: int) -> Blocked:
    """Return the barrier that keeps this process from making a call.

    The barrier counts only if no other thread can make the call: the thread in the barrier has made all
    earlier calls of the stream, or, if there are none, no other thread keeps the program running.

    Args:
        barriers: The barriers of this process.
        callers: Threads that have made the earlier calls of the stream.
        asking: Rank that waits in the call; the barrier waits for it.
    """
    for wait in barriers.waits():
        living = _living(callers)
        alone = living == {wait.thread} if living else not _others(wait.thread)
        if alone and wait.includes(asking):
            never = math.isinf(wait.gives_up_in)
            left = _FOREVER if never else max(1, round(wait.gives_up_in * 1000))
            return Blocked(wait.name, left, wait.leaving)
    return NOT_BLOCKED


class SkippedCalls:
    """The ranks that have skipped one call, as the rank that waits in it learns.

    A rank counts once it has said the same in answer to two questions.
    """

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, str]] = {}
        self._confirmed: dict[int, Blocked] = {}

    def answered(self, rank: int, question: int, blocked: Blocked) -> None:
        """Take the answer of a rank that has not made the call."""
        first, barrier = self._first.get(rank, (question, blocked.barrier))
        if not blocked.barrier or barrier != blocked.barrier:
            self._first.pop(rank, None)
            self._confirmed.pop(rank, None)
            return
        self._first[rank] = first, barrier
        if question > first:
            self._confirmed[rank] = blocked

    def proven(self, barriers: Barriers, left: float) -> dict[int, Blocked]:
        """Return the ranks that will never make the call, on the thread that waits in it.

        Unless they leave, the barrier must outlast the call, and no other thread of this process may come to
        it: this thread alone has called barriers.

        Args:
            barriers: The barriers of this process.
            left: Seconds that the call may still take.
        """
        if not self._confirmed:
            return {}
        alone = _living(barriers.threads()) == {threading.get_ident()}
        return {
            rank: blocked
            for rank, blocked in sorted(self._confirmed.items())
            if blocked.leaving
            or (alone and (blocked.gives_up_in == _FOREVER or blocked.gives_up_in > left * 1000))
        }


def skipped_text(skipped: dict[int, Blocked]) -> str:
    """Return for people which ranks have skipped a call, and where they are."""
    return "; ".join(
        f"rank {rank} has not called it and never will: it waits in "
        + ("the shutdown of the system" if blocked.leaving else f"barrier {blocked.barrier!r}")
        for rank, blocked in skipped.items()
    )


def _living(threads: Collection[int]) -> set[int]:
    return set(threads) & sys._current_frames().keys()


def _others(thread: int) -> list[threading.Thread]:
    """Return other threads than one that keep the program running."""
    return [other for other in threading.enumerate() if not other.daemon and other.ident != thread]
