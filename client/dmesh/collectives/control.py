"""Control messages of other clients, and their consequences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Protocol

from dmesh._log import logger
from dmesh.collectives.control_messages import (
    NOT_BLOCKED,
    Abort,
    BadMessage,
    Farewell,
    Message,
    Position,
    State,
    WhereAreYou,
    decode,
)
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.skipped import Barriers, blocked_in

RELAY_LIMIT = 64
"""Up to this size, members of a group pass on failures that they hear of."""
_COMPLAINTS = 10
"""Number of invalid messages of each client that are logged in a generation."""
_REMEMBERED = 256
"""Number of failures that are kept of groups that this client has not made yet in that generation."""


class ControlledGroup(Protocol):
    """Parts of a group that control messages change; see `group.Group`."""

    ranks: tuple[int, ...]
    """Its members."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def fail(self, failure: Failure, *, tell: bool | None = True) -> None:
        """Fail the group; see `Generation.fail`."""

    def asked(self, rank: int, question: WhereAreYou, busy: Callable[[], str]) -> None:
        """Answer a member that waits and asks where this rank is."""

    def answered(self, rank: int, answer: Position) -> None:
        """Take a member's answer to where it is."""


class Client(Protocol):
    """Parts of a client that control messages change; see `communicator.Communicator`."""

    rank: int
    """Its id."""
    generation: int
    """Generation that it is in."""
    lock: Lock
    """Guards its groups."""
    barriers: Barriers
    """Barriers of the coordination service in which it waits."""

    @property
    def is_joining(self) -> bool:
        """True if it has taken the place of a lost client, and has not met the others yet."""

    def find(self, number: int) -> ControlledGroup | None:
        """Return the group of an id, if this client has made it; without the lock."""

    def find_locked(self, number: int) -> ControlledGroup | None:
        """Return the group of an id, if this client has made it; with the lock held."""

    def tell(self, rank: int, message: Message) -> None:
        """Send a control message to another client."""

    def describe(self, rank: int) -> str:
        """Return a client's name for people."""

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

    Args:
        communicator: Of this client.
    """

    def __init__(self, communicator: Client) -> None:
        self._communicator = communicator
        self._early: OrderedDict[tuple[int, int], tuple[int, Failure]] = OrderedDict()
        self._complaints: dict[int, int] = {}

    def early_failure(self, generation: int, number: int) -> tuple[int, Failure] | None:
        """Hands out who has said that a group has failed before it was made here, and why.

        With the communicator's lock held.
        """
        return self._early.pop((generation, number), None)

    def begin(self, generation: int) -> list[tuple[int, int, Failure]]:
        """Hands out what was heard early of a generation that begins: from whom, of which group, why.

        With the communicator's lock held.
        """
        heard = [
            (source, number, failure)
            for (of, number), (source, failure) in self._early.items()
            if of == generation
        ]
        self._complaints.clear()
        for key in [key for key in self._early if key[0] <= generation]:
            del self._early[key]
        return heard

    def receive(self, peer: int, message: bytes) -> None:
        """A message came from another client; on the transport's thread."""
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
                group = communicator.find(decoded.group)
                if group is not None:
                    group.answered(peer, decoded)

    def _complain(self, peer: int, error: BadMessage) -> None:
        """Logs a message that makes no sense, but does not let a peer fill the log."""
        count = self._complaints.get(peer, 0) + 1
        if count > _COMPLAINTS:
            return
        self._complaints[peer] = count
        last = "; more of this kind is not reported" if count == _COMPLAINTS else ""
        who = self._communicator.describe(peer)
        logger.warning("a message from %s makes no sense and is ignored: %s%s", who, error, last)

    def _on_question(self, peer: int, question: WhereAreYou) -> None:
        communicator = self._communicator
        group = communicator.find(question.group)
        if question.generation <= communicator.generation and (
            communicator.is_joining or question.generation < communicator.generation
        ):
            # Whom it asks for in that generation will never come.
            communicator.tell(peer, Abort(question.generation, question.group, self._gone_on()))
        elif group is not None and question.generation == communicator.generation:
            group.asked(peer, question, communicator.busy)
        else:
            state: State = "unknown" if question.generation == communicator.generation else "behind"
            here = Position(
                question.generation,
                question.group,
                question.pair,
                question.sequence,
                question.question,
                state,
                0,
                "",
                communicator.busy(),
                blocked=blocked_in(communicator.barriers, (), peer) if state == "unknown" else NOT_BLOCKED,
            )
            communicator.tell(peer, here)

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
        """Another client says that a group has failed."""
        communicator = self._communicator
        lost = failure.ranks[0] if failure.cause is Cause.LOST and failure.ranks else None
        failed_us = lost == communicator.rank
        if failed_us:
            reason = f"it has declared this client lost ({failure.reason})"
            lost, failure = (
                peer,
                Failure(Cause.LOST, f"lost {communicator.describe(peer)}: {reason}", (peer,), reason),
            )
        skipped = failure.cause is Cause.MISMATCH and bool(failure.reason and failure.ranks)
        with communicator.lock:
            if generation < communicator.generation:
                return
            current = generation == communicator.generation
            group = communicator.find_locked(number) if current else None
            if group is None:
                self._early.setdefault((generation, number), (peer, failure))
                while len(self._early) > _REMEMBERED:
                    self._early.popitem(last=False)
        if group is not None:
            if peer not in group.ranks or not set(failure.ranks) <= set(group.ranks):
                return
            # Passed on, so that nobody sees this process end before the cause has reached it on another way;
            # in large groups that would be too many messages.
            group.fail(failure, tell=(skipped or None) if group.size <= RELAY_LIMIT else False)
        if skipped and current:
            self._leave_barriers(failure)
        if lost is not None and current and (lost != peer or failed_us):
            # It is lost to the other groups, too, and this client may have no connection with it that would
            # show it.
            communicator.lose(lost, failure.reason, hearsay=not failed_us)
