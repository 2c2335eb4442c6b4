"""Control messages of other clients, and their consequences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import RLock
from typing import Protocol
from weakref import WeakValueDictionary

from dmesh._log import logger
from dmesh.collectives.control_messages import (
    NOT_BLOCKED,
    Abort,
    BadMessage,
    Blocked,
    Farewell,
    Position,
    State,
    WhereAreYou,
    clean,
    decode,
)
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.group import Group
from dmesh.collectives.position_query import blocked_in
from dmesh.collectives.request import agreed
from dmesh.collectives.services import Pair, Services
from dmesh.collectives.work import Generation, Work

RELAY_LIMIT = 64
"""Up to this size, members of a group pass on failures that they hear of."""
_COMPLAINTS = 10
"""Number of invalid messages of each client that are logged in a generation."""
_REMEMBERED = 256
"""Number of failures that are kept of groups that this client has not made yet in that generation."""


class Client(Services, Protocol):
    """Parts of a client that control messages change; see `communicator.Communicator`."""

    lock: RLock
    """Guards `groups`."""
    groups: WeakValueDictionary[int, Group]
    """Its groups, by id."""

    is_joining: bool
    """True if it has taken the place of a lost client, and has not met the others yet."""

    def finished(self, rank: int, reason: str) -> None:
        """Take note that a client's program has ended normally."""

    def lose(self, rank: int, reason: str, incarnation: int = 0, *, hearsay: bool = False) -> None:
        """Note that another client is lost."""

    def busy(self) -> str:
        """Return the call that this client has been in for longest; empty if there is none."""


class ControlHandler:
    """Reads the messages of the other clients.

    Those of an earlier generation than this client's change nothing; failures in a later one are kept until
    it has come there.
    """

    def __init__(self, communicator: Client) -> None:
        self._communicator = communicator
        self._early: OrderedDict[tuple[int, int], tuple[int, Failure]] = OrderedDict()
        self._ended: OrderedDict[tuple[int, int], Failure] = OrderedDict()
        self._complaints: dict[int, int] = {}

    def remember(self, generation: int, number: int, failure: Failure) -> None:
        """Keep the failure of a group that has another id now, for members that still wait in it."""
        self._ended[generation, number] = failure
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def early_failure(self, generation: int, number: int) -> tuple[int, Failure] | None:
        """Return who said, before a group was made here, that it failed, and why; under the client's lock."""
        return self._early.pop((generation, number), None)

    def begin(self, generation: int) -> list[tuple[int, int, Failure]]:
        """Return from whom, of which group and why failures were heard of a generation that begins now.

        With the client's lock held.
        """
        early = self._early
        heard = [(peer, number, why) for (of, number), (peer, why) in early.items() if of == generation]
        self._complaints.clear()
        for key in [key for key in early if key[0] <= generation]:
            del early[key]
        return heard

    def receive(self, peer: int, message: bytes) -> None:
        """Take a message of another client; on the transport's thread."""
        communicator = self._communicator
        try:
            decoded = decode(message)
        except BadMessage as error:
            self._complain(peer, error)
            return
        match decoded:
            case Abort(generation, number, failure):
                self.aborted(peer, generation, number, failure)
            case WhereAreYou():
                self._on_question(peer, decoded)
            case Farewell(reason, in_order):
                (communicator.finished if in_order else communicator.lose)(peer, reason)
            case Position():
                group = self._find(decoded.group)
                if group is not None and peer in group.ranks:
                    self._on_answer(group.current, peer, decoded)

    def _find(self, number: int) -> Group | None:
        with self._communicator.lock:
            return self._communicator.groups.get(number)

    def _complain(self, peer: int, error: BadMessage) -> None:
        """Log a message that makes no sense, but do not let a peer fill the log."""
        count = self._complaints.get(peer, 0) + 1
        if count > _COMPLAINTS:
            return
        self._complaints[peer] = count
        last = "; more of this kind is not reported" if count == _COMPLAINTS else ""
        who = self._communicator.describe(peer)
        logger.warning("ignoring an invalid message from %s: %s%s", who, error, last)

    def _on_question(self, peer: int, question: WhereAreYou) -> None:
        communicator = self._communicator
        group = self._find(question.group)
        if question.generation <= communicator.generation and (
            communicator.is_joining or question.generation < communicator.generation
        ):
            # Whom it asks for in that generation will never come.
            communicator.send_control(peer, Abort(question.generation, question.group, self._gone_on()))
        elif question.generation != communicator.generation:
            self._answer(peer, question, "behind")
        elif (ended := self._ended.get((question.generation, question.group))) is not None:
            communicator.send_control(peer, Abort(question.generation, question.group, ended))
        elif group is None:
            blocked = blocked_in(communicator.barriers, (), peer)
            self._answer(peer, question, "unknown", blocked=blocked)
        elif peer in group.ranks:
            self._on_members_question(group.current, peer, question)

    def _on_members_question(self, generation: Generation, rank: int, question: WhereAreYou) -> None:
        """Answer a member of a group that waits and asks where this rank is."""
        if question.generation != generation.number:
            return
        with generation.lock:
            failure = generation.failure
            stream = generation.streams.get(question.pair)
            call = None if stream is None else stream.calls.get(question.sequence)
            finished = 0 if stream is None else stream.completed
            last = "" if stream is None else stream.recorded(finished)[0]
            callers = set() if stream is None else set(stream.callers)
            if not question.sequence:  # it may be answered by any call
                finished, last, callers = 0, "", set()
        communicator = self._communicator
        if failure is not None:
            # The asker may have made the group after the others had heard of the failure.
            if failure.cause is not Cause.CLOSED:
                communicator.send_control(rank, Abort(generation.number, question.group, failure))
            return
        state: State = "absent"
        mine = ""
        waits_for: tuple[int, ...] = ()
        if call is not None:
            state = "running" if call.started else "queued"
            mine, waits_for = call.agreed_text, call.waits_for()
        elif stream is not None and 0 < question.sequence <= stream.issued:
            # It is over, or an endpoint has it.
            state = "finished" if question.sequence <= finished else "running"
            mine = stream.recorded(question.sequence)[0]
        if mine and question.signature and agreed(clean(mine)) != agreed(question.signature):
            calls = {communicator.rank: mine, rank: question.signature}
            _fail_mismatch(generation, question.pair, question.sequence, calls)
            return
        blocked = blocked_in(communicator.barriers, callers, rank) if state == "absent" else NOT_BLOCKED
        self._answer(rank, question, state, finished, last, waits_for, blocked)

    def _answer(
        self,
        rank: int,
        question: WhereAreYou,
        state: State,
        finished: int = 0,
        last: str = "",
        waits_for: tuple[int, ...] = (),
        blocked: Blocked = NOT_BLOCKED,
    ) -> None:
        busy = "" if state == "running" else self._communicator.busy()
        at = question.generation, question.group, question.pair, question.sequence, question.question
        self._communicator.send_control(rank, Position(*at, state, finished, last, busy, waits_for, blocked))

    def _on_answer(self, generation: Generation, rank: int, answer: Position) -> None:
        """Take a member's answer to where it is."""
        if answer.generation != generation.number:
            return
        for call in _calls_at(generation, answer.pair, answer.sequence):
            call.answered(rank, answer)

    def mismatched(self, generation: int, number: int, sequence: int, rank: int, text: str) -> None:
        """Fail a group: a member calls something else than this rank under the same number of a stream."""
        communicator = self._communicator
        with communicator.lock:
            groups = list(communicator.groups.values())
        for current in [group.current for group in groups if rank in group.ranks]:
            for stream in tuple(current.streams.values()):
                call = stream.calls.get(sequence)
                if current.number == generation and stream.number == number and call is not None:
                    calls = {communicator.rank: call.text, rank: text}
                    _fail_mismatch(current, stream.pair, sequence, calls)

    def _gone_on(self) -> Failure:
        """Return the failure for ranks that wait for this client in a generation that is over here."""
        communicator = self._communicator
        rank = communicator.rank
        me = communicator.describe(rank)
        if not communicator.is_joining:
            return Failure(
                Cause.RENEWED,
                f"{me} is in generation {communicator.generation} of the collectives already, because the "
                "cluster's members have changed. Call the next barrier of all clients to follow",
                (rank,),
            )
        reason = "another process has replaced it, and can be used after the next barrier of all clients"
        return Failure(Cause.LOST, f"lost {me}: {reason}", (rank,), reason)

    def _leave_barriers(self, failure: Failure) -> None:
        """End the waits in barriers to which a rank does not come, because a call was skipped."""
        barriers, waiting = self._communicator.barriers, failure.ranks[0]
        for wait in barriers.waits():
            if wait.includes(waiting):
                barriers.fail(wait.name, failure.during(f"barrier {wait.name!r}"))

    def aborted(self, peer: int, generation: int, number: int, failure: Failure) -> None:
        """Take note that a group has failed, as another client says."""
        communicator = self._communicator
        lost = failure.ranks[0] if failure.cause is Cause.LOST and failure.ranks else None
        failed_us = lost == communicator.rank
        if failed_us:
            reason = f"it has declared this client lost ({failure.reason})"
            lost = peer
            failure = Failure(Cause.LOST, f"lost {communicator.describe(peer)}: {reason}", (peer,), reason)
        skipped = failure.cause is Cause.MISMATCH and bool(failure.reason and failure.ranks)
        with communicator.lock:
            if generation < communicator.generation:
                return
            current = generation == communicator.generation
            group = communicator.groups.get(number) if current else None
            if group is None:
                self._early.setdefault((generation, number), (peer, failure))
                while len(self._early) > _REMEMBERED:
                    self._early.popitem(last=False)
        if group is not None:
            if peer not in group.ranks or not set(failure.ranks) <= set(group.ranks):
                return
            # Forward the cause, so that no rank sees this process end before the cause has reached it;
            # in large groups that would be too many messages.
            group.fail(failure, notify=(skipped or None) if group.size <= RELAY_LIMIT else False)
        if skipped and current:
            self._leave_barriers(failure)
        if lost is not None and current and (lost != peer or failed_us):
            # It is lost to the other groups, too, and this client may have no connection with it that would
            # show it.
            communicator.lose(lost, failure.reason, hearsay=not failed_us)


def _calls_at(generation: Generation, pair: Pair | None, sequence: int) -> list[Work]:
    """Return the calls under way that Python carries out, of a number; 0 for those without one."""
    with generation.lock:
        if not sequence:
            unnumbered = [stream for stream in generation.streams.values() if not stream.numbered]
            return [call for stream in unnumbered for call in stream.calls.values()]
        stream = generation.streams.get(pair)
        return [] if stream is None or sequence not in stream.calls else [stream.calls[sequence]]


def _fail_mismatch(
    generation: Generation, pair: Pair | None, sequence: int, calls: Mapping[int, str]
) -> None:
    members, ranks = generation.members, sorted(calls)
    sides = ", ".join(
        f"rank {rank} called {members.call_text(pair, rank, clean(calls[rank]))}" for rank in ranks
    )
    message = (
        f"{members.call_label(pair, sequence)}: {sides}. All ranks must make the same calls in the same "
        "order."
    )
    generation.fail(Failure(Cause.MISMATCH, message, tuple(ranks)))
