"""A call under way, from its number to its end: its turn, its wait, its failure, its result as a future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, count
from typing import Any

from dmesh.collectives.backends.base import Backend, Operation
from dmesh.collectives.control_messages import Position, WhereAreYou
from dmesh.collectives.events import CallRecord
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.generation import Generation
from dmesh.collectives.request import Request, as_called
from dmesh.collectives.roster import NAMED, ranks_text
from dmesh.collectives.services import Services
from dmesh.collectives.skipped import SkippedCalls, skipped_text
from dmesh.collectives.stream import Stream
from dmesh.collectives.tuning import SEND_BUFFER

_ASK_ALL_UP_TO = 64
"""Up to this group size, a waiting rank asks all members where they are."""
_LAST_LOOKS = 0.02
"""Seconds between looks for the last answers, when time has run out."""


class Members:
    """Ranks of a group and its name, as its calls need them.

    Args:
        services: This client.
        ranks: The members, by position.
        label: The group's name for people.
        group: The group's id, the same on all members.
    """

    def __init__(self, services: Services, ranks: tuple[int, ...], label: str, group: int) -> None:
        self.services = services
        self.ranks = ranks
        self.rank = ranks.index(services.rank)
        """This client's position."""
        self.label = label
        self.group = group

    def call_label(self, stream: Stream, sequence: int) -> str:
        """Return number and group of a call, for people."""
        if stream.pair is None:
            return f"collective #{sequence} of {self.label}"
        source, target = (self.ranks[position] for position in stream.pair)
        return f"transfer #{sequence} from rank {source} to rank {target} of {self.label}"

    def call_text(self, stream: Stream, rank: int, text: str) -> str:
        """Return a descriptor as `rank` wrote the call: a transfer is a `send` or a `recv`."""
        return as_called(text, None if stream.pair is None else self.ranks[stream.pair[0]] == rank)

    def of(self, stream: Stream) -> tuple[int, ...]:
        """Return the ranks that take part in a stream's calls."""
        return self.ranks if stream.pair is None else tuple(self.ranks[at] for at in stream.pair)


class Work(Future[Any]):
    """A collective or a transfer under way; the future of its result, if it is asynchronous.

    One thread carries it out; methods may be used by that thread alone unless they say otherwise.

    Args:
        members: Its group.
        generation: The group's generation in which it is made.
        stream: Stream in which it is counted.
        sequence: Its number there, from 1.
        request: The call; None for one that a native endpoint has taken already.
        text: Wire descriptor.
        timeout: Seconds that it may take once it has begun.
        record: Its entry in the event ring.
    """

    def __init__(
        self,
        members: Members,
        generation: Generation,
        stream: Stream,
        sequence: int,
        request: Request | None,
        text: str,
        timeout: float,
        record: CallRecord,
    ) -> None:
        super().__init__()
        self.members = members
        self.generation = generation
        self.stream = stream
        self.sequence = sequence
        self.request = request
        self.text = text
        self.timeout = timeout
        self.record = record
        self._services = members.services
        self._operation: Operation | None = None
        self._deadline = 0.0
        self._question = 0
        self._answers: dict[int, Position] = {}
        self._skipped: SkippedCalls | None = None  # made with the first question: few calls ask any

    def __str__(self) -> str:
        return f"{self.members.call_text(self.stream, self._services.rank, self.text)}, {self.label}"

    @property
    def label(self) -> str:
        """Number and group of the call, for people."""
        return self.members.call_label(self.stream, self.sequence)

    @property
    def started(self) -> bool:
        """True if a backend carries it out already. Any thread."""
        return self._operation is not None

    def waits_for(self) -> tuple[int, ...]:
        """Return the ranks that it waits for. Any thread."""
        operation = self._operation
        return () if operation is None else operation.missing()

    def abort(self, failure: Failure) -> None:
        """End it with the group's failure. Any thread."""
        operation = self._operation
        if operation is not None:
            operation.fail(failure.during(str(self)))

    def answered(self, rank: int, answer: Position) -> None:
        """Take another rank's answer to where it is. Any thread."""
        self._answers[rank] = answer
        if self._skipped is not None:
            self._skipped.answered(rank, answer.question, answer.blocked)

    # -- carrying out ----------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Carry the call out with the first of the group's backends that supports it; return its result.

        Raises:
            CollectiveError: The group has failed.
        """
        request = self.request
        assert request is not None
        self._await_turn(alone=request.device is not None)
        backend = self._choose(request)
        buffers = request.allocate()
        self._drive(backend.start(request, buffers, self))
        return request.out if request.device is not None else request.finish(buffers)

    def resume(self, operation: Operation) -> None:
        """Go on with a call that a native endpoint has begun."""
        self._drive(operation)

    def _choose(self, request: Request) -> Backend:
        for backend in self.generation.backends:
            if backend.supports(request, self.stream, self.sequence):
                return backend
        raise AssertionError(f"no backend supports {self.text}")

    def _await_turn(self, *, alone: bool) -> None:
        """Wait until earlier calls of the stream are over, as far as that is necessary; the time runs."""
        if len(self.members.ranks) == 1:
            return
        self._deadline = self._services.clock() + self.timeout
        if not self.stream.ready(self.sequence, alone=alone):
            self._until(partial(self._has_turn, alone))

    def _has_turn(self, alone: bool, seconds: float) -> bool:
        failed = lambda: self.generation.failure is not None  # noqa: E731
        ready = self.stream.wait(self.sequence, failed, seconds, alone=alone)
        self._check()
        return ready

    def _check(self) -> None:
        failure = self.generation.failure
        if failure is not None:
            raise failure.during(str(self))

    def _drive(self, operation: Operation) -> None:
        with self.generation.lock:
            self._operation = operation
            self._deadline = self._deadline or self._services.clock() + self.timeout
        self._check()  # whoever fails the group from now on sees the operation
        self._until(operation.progress)

    def end(self) -> None:
        """Let go of the operation: no memory of the caller's is touched any more. Idempotent."""
        operation, self._operation = self._operation, None
        self.request = None  # a future that the caller keeps must not keep the arrays
        if operation is not None:
            operation.revoke()

    # -- waiting ---------------------------------------------------------------------------------------------

    def _until(self, attempt: Callable[[float], bool]) -> None:
        """Repeat an attempt until it succeeds; ask, announce and give up in between."""
        services = self._services
        policy, now = services.wait_policy, services.clock
        began = now()
        after = policy.ask_after
        asks = chain(after, count((after[-1] if after else 0.0) + policy.ask_every, policy.ask_every))
        ask_at = began + next(asks)
        announce_at = began + policy.announce_every
        stuck_after = services.stuck_after
        report_at = began + stuck_after if stuck_after > 0 else float("inf")
        reported = False
        try:
            while True:
                time = now()
                until = min(ask_at, announce_at, report_at, self._deadline, time + policy.look_every)
                if attempt(max(until - time, 0.0)):
                    return
                self._check()
                self._look_for_departures()
                self._look_for_skips()
                time = now()
                if time >= self._deadline:
                    self._time_out(attempt)
                    return
                if time >= ask_at:
                    self._ask()
                    ask_at = began + next(asks)
                if time >= announce_at:
                    announce_at += policy.announce_every
                    policy.announce(self._waiting_text(time - began))
                if time >= report_at:
                    report_at = time + stuck_after
                    reported = True
                    services.events.waiting(self.record, self._blocking(), time - began)
        finally:
            if reported:
                services.events.waiting(self.record, (), 0.0)
            self.record.waited += now() - began

    def _look_for_departures(self) -> None:
        departed = self.generation.departed
        if not departed:
            return
        # Their messages have been delivered, but perhaps not what they sent on other connections.
        operation = self._operation
        for rank in self.waits_for():
            if rank in departed and operation is not None and not operation.may_still_come(rank):
                self.generation.lose(rank, departed[rank])
                return

    def _look_for_skips(self) -> None:
        """Fail the group if a rank waits for this one in a barrier, and so will never make the call."""
        services = self._services
        left = self._deadline - services.clock()
        skipped = {} if self._skipped is None else self._skipped.proven(services.barriers, left)
        if not skipped:
            return
        text = self.members.call_text(self.stream, services.rank, self.text)
        running = [rank for rank, answer in list(self._answers.items()) if answer.state == "running"]
        message = (
            f"{self.label}: {ranks_text(sorted((services.rank, *running)))} called {text}, but "
            f"{skipped_text(skipped)}. All ranks must make the same calls in the same order."
        )
        place = next(iter(skipped.values())).barrier
        self.generation.fail(Failure(Cause.MISMATCH, message, (services.rank, *skipped), place))
        self._check()

    def ask_everybody(self) -> None:
        """Ask all others where they are: one of them is not where this rank is."""
        self._ask(everybody=True)

    def _ask(self, *, everybody: bool = False) -> None:
        """Ask the others where they are.

        If ranks called different things, some rank waits for one that called something else: asking those
        that are waited for finds every mismatch. Asking all, in groups where that is cheap, tells who the
        culprit is, too.
        """
        if self._skipped is None:
            self._skipped = SkippedCalls()
        self._question += 1
        question = WhereAreYou(
            self.generation.number,
            self.members.group,
            self.stream.pair,
            self.sequence,
            self._question,
            self.text,
        )
        everybody = everybody or len(self.members.ranks) <= _ASK_ALL_UP_TO
        for rank in self._others() if everybody else self.waits_for():
            self._services.tell(rank, question)

    def _time_out(self, attempt: Callable[[float], bool]) -> None:
        """Hear once more from everybody, so that the error is exact, and fail the group."""
        services = self._services
        self._ask(everybody=True)
        give_up = services.clock() + services.wait_policy.answers_within
        while services.clock() < give_up and self._unanswered():
            if attempt(_LAST_LOOKS):
                return
            self._check()
        blocking = self._blocking()
        text = self.members.call_text(self.stream, services.rank, self.text)
        message = (
            f"{self.label}: rank {services.rank} waited {round(self.timeout, 2):g} s in {text} "
            f"for {ranks_text(blocking)}: {self._details(blocking)}{self._advice()}"
        )
        self.generation.fail(Failure(Cause.TIMEOUT, message, blocking))
        # Another rank's failure may have been first; either way the group has one, and it is raised here.
        failure = self.generation.failure
        if failure is None:  # another thread is failing the group right now, and tells the other members
            failure = Failure(Cause.TIMEOUT, message, blocking)
        raise failure.during(str(self))

    def _advice(self) -> str:
        """Return what to do if two ranks send to each other before they receive."""
        pair = self.stream.pair
        if pair is None or pair[0] != self.members.rank:
            return ""
        answer = self._answers.get(self.members.ranks[pair[1]])
        if answer is None or not answer.busy.startswith("send("):
            return ""
        return (
            f". Both ranks are in send, where arrays of more than {SEND_BUFFER // 1024} KiB wait for recv: "
            "use async_op=True for one of the sends, or permute"
        )

    def _others(self) -> tuple[int, ...]:
        own = self._services.rank
        return tuple(rank for rank in self.members.of(self.stream) if rank != own)

    def _unanswered(self) -> tuple[int, ...]:
        return tuple(
            rank
            for rank in self._others()
            if rank not in self._answers or self._answers[rank].question != self._question
        )

    def _blocking(self) -> tuple[int, ...]:
        """Return the ranks that block this call: not arrived, silent, or with data outstanding."""
        waited_for = self.waits_for()
        silent = self._unanswered()
        found = tuple(
            rank
            for rank in self._others()
            if (rank in silent and rank in waited_for)
            or (rank in self._answers and self._answers[rank].state not in ("running", "finished"))
        )
        return found or waited_for or self._others()

    def _waiting_text(self, seconds: float) -> str:
        blocking = self._blocking()
        return (
            f"rank {self._services.rank} has waited {seconds:.0f} s in {self} "
            f"for {ranks_text(blocking)}: {self._details(blocking)}"
        )

    def _details(self, ranks: Sequence[int]) -> str:
        parts = [self._detail(rank) for rank in ranks[:NAMED]]
        if len(ranks) > NAMED:
            parts.append(f"and {len(ranks) - NAMED} more")
        return "; ".join(parts)

    def _detail(self, rank: int) -> str:
        name = self._services.describe(rank)
        answer = self._answers.get(rank)
        if answer is None:
            return f"{name}, has not answered"
        match answer.state:
            case "behind":
                where = "is still in an earlier generation of the collectives"
            case "unknown":
                where = "has not made this group"
            case "absent":
                where = f"has not called #{self.sequence}"
                if answer.finished:
                    last = self.members.call_text(self.stream, rank, answer.last)
                    where = f"has finished #{answer.finished} ({last}) and {where}"
            case "queued":
                where = f"has called #{self.sequence}, but an earlier asynchronous call is still under way"
            case "running":
                where = f"is at #{self.sequence}, too"
                if answer.waits_for:
                    where += f", and waits for {ranks_text(answer.waits_for)}"
            case "finished":
                where = f"has finished #{self.sequence}"
        if answer.busy and answer.state != "running":
            where += f"; it is in {answer.busy}"
        return f"{name}, {where}"
