"""Query of a waiting call where the other ranks are, their answers, and calls that a rank has skipped.

A rank has skipped a call if it waits in a barrier that includes a rank which waits for it in the call. Both
wait for ever, so it is an error at once. It must never be reported of a program that could go on: by another
thread of either rank, or because the barrier gives up before the call does.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dmesh.collectives.control_messages import NOT_BLOCKED, Blocked, Position, State, WhereAreYou
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.services import NAMED, Barriers, Members, Pair, ranks_text
from dmesh.collectives.tuning import SEND_BUFFER

_ASK_ALL_UP_TO = 16
"""Up to this group size, a waiting rank asks all members where they are; those of larger groups have no
connections with all others."""
_FOREVER = 0
_WHERE: dict[State, str] = {
    "behind": "is still in an earlier generation of the collectives",
    "unknown": "has not made this group",
    "absent": "has not called #{}",
    "queued": "has called #{}, but an earlier asynchronous call is still under way",
    "running": "is at #{}, too",
    "finished": "has finished #{}",
}


@dataclass
class PositionQuery:
    """A waiting call's questions to the other ranks, and their answers; any thread may call `answered`."""

    members: Members
    generation: int
    pair: Pair | None
    sequence: int
    text: str
    """The call's descriptor."""
    waits_for: Callable[[], tuple[int, ...]]
    numbered: bool = True
    """False if the call has no number that the others know; then nothing is compared."""
    compares: bool = True
    """False for a receive without a matched message."""

    def __post_init__(self) -> None:
        members = self.members
        self._services = members.services
        own = members.services.rank
        self._others = tuple(rank for rank in members.of(self.pair) if rank != own)
        self._label = members.call_label(self.pair, self.sequence)
        self._call = members.call_text(self.pair, own, self.text)
        self._question = 0
        self._answers: dict[int, Position] = {}
        self._blocked_since: dict[int, tuple[int, str]] = {}  # first question, and the barrier in its answer

    def ask(self, *, all_ranks: bool = False) -> None:
        """Ask other ranks for their positions.

        If ranks made different calls, some rank waits for one with another call, so asking the ranks for
        which this rank waits finds every mismatch. Asking all ranks, in groups where that is cheap, also
        finds the culprit.
        """
        self._question += 1
        call = (self.pair, self.sequence) if self.numbered else (None, 0)
        text = self.text if self.numbered and self.compares else ""
        question = WhereAreYou(self.generation, self.members.group, *call, self._question, text)
        all_ranks = self.numbered and (all_ranks or len(self.members.ranks) <= _ASK_ALL_UP_TO)
        for rank in self._others if all_ranks else self.waits_for():
            self._services.send_control(rank, question)

    def answered(self, rank: int, answer: Position) -> None:
        """Take a rank's answer."""
        self._answers[rank] = answer
        barrier = answer.blocked.barrier
        if not barrier or self._blocked_since.setdefault(rank, (answer.question, barrier))[1] != barrier:
            self._blocked_since.pop(rank, None)

    def unanswered(self) -> tuple[int, ...]:
        """Return the ranks that have not answered the last question."""
        answers, asked = self._answers, self._question
        others = self._others if self.numbered else self.waits_for()
        return tuple(rank for rank in others if rank not in answers or answers[rank].question != asked)

    def blocking(self) -> tuple[int, ...]:
        """Return the ranks that block this call: not arrived, silent, or with data outstanding."""
        waited_for, silent = self.waits_for(), self.unanswered()
        if not self.numbered:
            return waited_for
        found = tuple(
            rank
            for rank in self._others
            if (rank in silent and rank in waited_for)
            or (rank in self._answers and self._answers[rank].state not in ("running", "finished"))
        )
        return found or waited_for or self._others

    # -- skipped calls ---------------------------------------------------------------------------------------

    def never_come(self, left: float) -> dict[int, Blocked]:
        """Return the ranks that will never make the call, on the thread that waits in it.

        A rank counts once it has said the same in answer to two questions. Unless it leaves, the barrier must
        outlast the `left` seconds of the call, and no other thread of this process may come to it: this
        thread alone has called barriers.
        """
        found = {
            rank: answer.blocked
            for rank, (question, barrier) in sorted(self._blocked_since.items())
            if (answer := self._answers[rank]).question > question and answer.blocked.barrier == barrier
        }
        alone = bool(found) and _living(self._services.barriers.threads()) == {threading.get_ident()}
        return {
            rank: blocked
            for rank, blocked in found.items()
            if blocked.leaving
            or (alone and (blocked.gives_up_in == _FOREVER or blocked.gives_up_in > left * 1000))
        }

    def skipped(self, left: float) -> Failure | None:
        """Return the group's failure, if ranks will never make the call; see `never_come`."""
        found = self.never_come(left) if self._blocked_since else {}
        if not found or not (self.numbered or found.keys() >= set(self.waits_for())):
            return None
        own = self._services.rank
        running = [rank for rank, answer in list(self._answers.items()) if answer.state == "running"]
        skipped = "; ".join(
            f"rank {rank} has not called it and never will: it is waiting in "
            + ("the shutdown of the system" if blocked.leaving else f"barrier {blocked.barrier!r}")
            for rank, blocked in found.items()
        )
        message = (
            f"{self._label}: {ranks_text(sorted((own, *running)))} called {self._call}, but {skipped}. "
            "All ranks must make the same calls in the same order."
        )
        return Failure(Cause.MISMATCH, message, (own, *found), next(iter(found.values())).barrier)

    # -- texts -----------------------------------------------------------------------------------------------

    def waiting_text(self, seconds: float) -> str:
        """Return for people how long this rank has waited, and for whom."""
        return (
            f"rank {self._services.rank} has waited {seconds:.0f} s in {self._call}, {self._label} "
            f"for {self._whom(self.blocking())}"
        )

    def timed_out(self, timeout: float) -> Failure:
        """Return the group's failure, as the call's time has run out."""
        blocking = self.blocking()
        message = (
            f"{self._label}: rank {self._services.rank} waited {round(timeout, 2):g} s in {self._call} "
            f"for {self._whom(blocking)}{self._advice()}"
        )
        return Failure(Cause.TIMEOUT, message, blocking)

    def _advice(self) -> str:
        """Return what to do if two ranks send to each other before they receive."""
        if self.pair is None or self.pair[0] != self.members.rank:
            return ""
        answer = self._answers.get(self.members.ranks[self.pair[1]])
        if answer is None or not answer.busy.startswith("send("):
            return ""
        return (
            f". Both ranks are in send, where arrays of more than {SEND_BUFFER // 1024} KiB, and synchronous "
            "ones, wait for recv: use async_op=True for one of the sends, or permute"
        )

    def _whom(self, ranks: tuple[int, ...]) -> str:
        if not ranks:  # a transfer to this rank or from it
            return "itself: it has not made the call that matches"
        return f"{ranks_text(ranks)}: {self._details(ranks)}"

    def _details(self, ranks: tuple[int, ...]) -> str:
        parts = [self._detail(rank) for rank in ranks[:NAMED]]
        if len(ranks) > NAMED:
            parts.append(f"and {len(ranks) - NAMED} more")
        return "; ".join(parts)

    def _detail(self, rank: int) -> str:
        name = self._services.describe(rank)
        answer = self._answers.get(rank)
        if answer is None:
            return f"{name}, has not answered"
        where = _WHERE[answer.state].format(self.sequence)
        if answer.state == "unknown" and self.members.resets:
            where = "has not called reset()"
        if not self.numbered and answer.state == "absent":
            where = "has not made the call that matches"
        if answer.state == "absent" and answer.finished:
            last = self.members.call_text(self.pair, rank, answer.last)
            where = f"has finished #{answer.finished} ({last}) and {where}"
        if answer.state == "running" and answer.waits_for:
            where += f", and waits for {ranks_text(answer.waits_for)}"
        if answer.busy and answer.state != "running":
            where += f"; it is in {answer.busy}"
        return f"{name}, {where}"


def blocked_in(barriers: Barriers, callers: Collection[int], asking: int) -> Blocked:
    """Return the barrier that keeps this process from making a call.

    The barrier counts only if no other thread can make the call: the thread in the barrier has made all
    earlier calls of the stream (it is the last living one of the `callers`), or, if there are none, no other
    thread keeps the program running. And the barrier waits for the rank that is `asking`.
    """
    for wait in barriers.waits():
        living = _living(callers)
        alone = living == {wait.thread} if living else not _others(wait.thread)
        if alone and wait.includes(asking):
            never = math.isinf(wait.gives_up_in)
            left = _FOREVER if never else max(1, round(wait.gives_up_in * 1000))
            return Blocked(wait.name, left, wait.leaving)
    return NOT_BLOCKED


def _living(threads: Collection[int]) -> set[int]:
    return set(threads) & sys._current_frames().keys()


def _others(thread: int) -> list[threading.Thread]:
    """Return the threads but one that keep the program running."""
    return [other for other in threading.enumerate() if not other.daemon and other.ident != thread]
