"""What clients write to each other beside the data, and what follows from it."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from dmesh._log import logger
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.messages import Abort, BadMessage, Farewell, Here, State, Where, decode

if TYPE_CHECKING:
    from dmesh.collectives.communicator import Communicator

RELAY_LIMIT = 64
"""Up to this size, members of a group pass on failures that they hear of."""
_COMPLAINTS = 10
"""How many meaningless messages of each client are logged in a generation."""
_REMEMBERED = 256
"""How many failures are kept of groups that this client has not made yet, or not in that generation."""


class Letters:
    """Reads the messages of the other clients.

    Those of an earlier generation than this client's change nothing; failures in a later one are kept until
    it has come there.

    Args:
        communicator: Of this client.
    """

    def __init__(self, communicator: Communicator) -> None:
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
            case Where():
                self._on_where(peer, decoded)
            case Farewell(reason):
                communicator.lose(peer, reason)
            case Here(_, number):
                group = communicator.find(number)
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

    def _on_where(self, peer: int, where: Where) -> None:
        communicator = self._communicator
        group = communicator.find(where.group)
        if where.generation <= communicator.generation and (
            communicator.is_joining or where.generation < communicator.generation
        ):
            # Whom it asks for in that generation will never come.
            communicator.tell(peer, Abort(where.generation, where.group, self._gone_on()))
        elif group is not None and where.generation == communicator.generation:
            group.asked(peer, where)
        else:
            state: State = "unknown" if where.generation == communicator.generation else "behind"
            here = Here(
                where.generation,
                where.group,
                where.pair,
                where.sequence,
                where.question,
                state,
                0,
                "",
                communicator.busy(),
            )
            communicator.tell(peer, here)

    def _gone_on(self) -> Failure:
        """What this client tells those who wait for it in a generation that is over here."""
        communicator = self._communicator
        rank = communicator.rank
        me = communicator.describe(rank)
        if not communicator.is_joining:
            return Failure(
                Cause.RENEWED,
                f"{me} has gone on to generation {communicator.generation} of the collectives, because the "
                "cluster's members have changed. Pass a barrier of all clients to come there too",
                (rank,),
            )
        reason = "another process has taken its seat and takes part from the next barrier of all clients on"
        return Failure(Cause.LOST, f"lost {me}: {reason}", (rank,), reason)

    def aborted(self, peer: int, generation: int, number: int, failure: Failure) -> None:
        """Another client says that a group has failed."""
        communicator = self._communicator
        lost = failure.ranks[0] if failure.cause is Cause.LOST and failure.ranks else None
        failed_us = lost == communicator.rank
        if failed_us:
            reason = f"it has given up on this client ({failure.reason})"
            lost, failure = (
                peer,
                Failure(Cause.LOST, f"lost {communicator.describe(peer)}: {reason}", (peer,), reason),
            )
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
            # Passed on, so that nobody sees this process end before the cause has reached it on another way;
            # in large groups that would be too many messages.
            group.fail(failure, tell=None if group.size <= RELAY_LIMIT else False)
        if lost is not None and current and (lost != peer or failed_us):
            # It is lost to the other groups, too, and this client may have no connection with it that would
            # show it.
            communicator.lose(lost, failure.reason, hearsay=not failed_us)
