"""A group in one generation: its streams, its backends, and its failure."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from dmesh.collectives.backends.base import Backend
from dmesh.collectives.control_messages import Abort
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.services import Services
from dmesh.collectives.stream import Stream
from dmesh.collectives.tuning import SHIPPED, Tuning
from dmesh.native import Endpoint

Counts = tuple[int, int]
"""Number of transfers that were made to a member, and from it."""


class EndpointOpener(Protocol):
    """Opens a group's native endpoints."""

    def open_collectives(self) -> Endpoint:
        """Open this rank's endpoint for collectives."""

    def open_transfers(self, sender: int, receiver: int) -> Endpoint:
        """Open this rank's endpoint for transfers from one position to another, of which it is one."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Outcome of the capability exchange in a group's first call."""

    backends: tuple[Backend, ...] = ()
    """Backends that all members have, the preferred one first."""
    tuning: Tuning = SHIPPED
    """Tuning of the group's first member, which all members use."""
    endpoints: EndpointOpener | None = None
    """Opens native endpoints, if the group has some."""
    inner: tuple[Endpoint, ...] = ()
    """Further native endpoints, of parts of the group."""
    sends_from: tuple[int, ...] = ()
    """For each member, the number of the first transfer to it that goes through an endpoint."""
    receives_from: tuple[int, ...] = ()
    """The same for transfers from it."""


class Generation:
    """A group in one generation.

    Its first failure is the failure of all its calls, on all members: ranks that have lost step cannot find
    it again before the next generation, in which the group begins anew.

    Args:
        services: This client.
        group: The group's id, the same on all members.
        label: The group's name for people.
        ranks: Its members.
        number: The generation's number.
        failure: Why no calls can be made from the beginning, if so.
    """

    def __init__(
        self,
        services: Services,
        group: int,
        label: str,
        ranks: tuple[int, ...],
        number: int,
        failure: Failure | None = None,
    ) -> None:
        self.number = number
        self.lock = threading.Lock()
        self.streams: dict[tuple[int, int] | None, Stream] = {None: Stream(group, None)}
        self.reported = False
        """True if this rank's program knows of the failure."""
        self.tuning = SHIPPED
        """Tuning of the group; until `settle`, the one that all clients have."""
        self.backends: list[Backend] = []
        """Backends of the group, the preferred one first."""
        self.endpoint: Endpoint | None = None
        """Native endpoint for collectives, once the group has one."""
        self.outgoing: list[Endpoint | None] = [None] * len(ranks)
        """Native endpoints for transfers to each member, once there have been some."""
        self.incoming: list[Endpoint | None] = [None] * len(ranks)
        """The same for transfers from each member."""
        self._services = services
        self._group = group
        self._label = label
        self._ranks = ranks
        self._position = ranks.index(services.rank)
        self._failing = threading.RLock()  # held while the group is failed and the other members are told
        self._is_failing = False
        self._told = failure is not None
        self._failure = failure
        self._departed: dict[int, str] = {}
        self._connection: Connection | None = None
        self._frozen = False
        services.events.attach(self.streams[None], label, None)

    @property
    def endpoints(self) -> list[Endpoint]:
        """All native endpoints of the group on this client."""
        found = [s.endpoint for s in tuple(self.streams.values()) if s.endpoint is not None]
        return found if self._connection is None else [*found, *self._connection.inner]

    @property
    def failure(self) -> Failure | None:
        """Reason of its failure; None if it has not failed."""
        return self._failure

    @property
    def departed(self) -> Mapping[int, str]:
        """Members that have said goodbye, and how."""
        return self._departed

    def stream_of(self, endpoint: Endpoint) -> Stream | None:
        """Return the stream of an endpoint; None if it is none of this generation's."""
        return next((s for s in tuple(self.streams.values()) if s.endpoint is endpoint), None)

    # -- streams and backends --------------------------------------------------------------------------------

    def add_stream(self, number: int, pair: tuple[int, int]) -> Stream:
        """Begin to count the transfers of a pair; with the lock held."""
        stream = self.streams[pair] = Stream(number, pair)
        self._services.events.attach(stream, self._label, pair[0] == self._position)
        if self._connection is not None:
            self._settle(stream, self._connection)
        elif self._frozen:
            stream.freeze()
        return stream

    def freeze(self) -> list[Counts]:
        """Let no transfer begin before `settle`; return how many were made to and from each member."""
        with self.lock:
            self._frozen = True
            me, counts = self._position, []
            for other in range(len(self._ranks)):
                streams = [self.streams.get((me, other)), self.streams.get((other, me))]
                to, from_ = (0 if stream is None else stream.freeze() for stream in streams)
                counts.append((to, from_))
            return counts

    def settle(self, connection: Connection) -> None:
        """Use what the group's first call has found out."""
        with self.lock:
            self._connection, self._frozen, self.tuning = connection, False, connection.tuning
            self.backends[:0] = connection.backends
            for stream in self.streams.values():
                self._settle(stream, connection)
            if self._failure is not None or self._departed:
                for endpoint in self.endpoints:
                    endpoint.close()

    def _settle(self, stream: Stream, connection: Connection) -> None:
        opener = connection.endpoints
        first = 2 if connection.backends else 0
        if stream.pair is not None:
            sender, receiver = stream.pair
            sends = sender == self._position
            counts = (connection.sends_from, receiver) if sends else (connection.receives_from, sender)
            first = counts[0][counts[1]] if counts[0] else 0
        if opener is None:
            stream.settle(first, None)
        elif stream.pair is None:
            stream.settle(first, opener.open_collectives)
            self.endpoint = stream.endpoint  # the first call is under way, so it is open already
        else:
            # Not a method: generations are to be freed without the garbage collector's help.
            endpoints, other = (self.outgoing, receiver) if sends else (self.incoming, sender)
            stream.settle(first, partial(_open_transfers, opener, sender, receiver, endpoints, other))

    # -- failure ---------------------------------------------------------------------------------------------

    def refusal(self) -> Failure | None:
        """Return why no new call can be made; None if one can.

        A member that has left is no reason: what it sent before may be all that the call needs of it. A call
        that waits for it fails then.
        """
        return self._failure

    def fail(self, failure: Failure, *, tell: bool | None = True) -> None:
        """Fail the group, unless it has failed before. Any thread.

        If Ctrl-C ends it in the middle, the next one who fails the group does what is left to do.

        Args:
            failure: Why.
            tell: Whether the other members must hear of it from here. None leaves it until somebody may be
                waiting for this rank: at once if calls are under way, else when the next one is refused.
        """
        with self._failing:
            if self._failure is not None or self._is_failing:
                return
            self._is_failing = True
            try:
                with self.lock:
                    waited_for = any(stream.calls for stream in self.streams.values())
                    waited_for = waited_for or any(endpoint.pending for endpoint in self.endpoints)
                self._told = tell is False
                if tell or (tell is None and waited_for):
                    # Before anybody here can see the failure and act on it: withdraw a message, end the
                    # process. The others must hear of the cause before they see its consequences.
                    self._tell_members(failure)
                with self.lock:
                    streams = list(self.streams.values())
                    calls = [call for stream in streams for call in stream.calls.values()]
                    self._failure = failure
                    for endpoint in self.endpoints:
                        endpoint.abort()
            finally:
                self._is_failing = False
        for call in calls:
            call.abort(failure)
        for stream in streams:
            stream.wake()
        for backend in self.backends:
            backend.close(orderly=failure.cause is Cause.CLOSED and not calls)

    def tell_of(self, refusal: Failure) -> None:
        """Tell the other members why, unless they know: they may wait for a call that fails or is refused."""
        with self._failing:
            if self._failure is not None and not self._told:
                self._tell_members(refusal)

    def _tell_members(self, failure: Failure) -> None:
        for rank in self._ranks:
            if rank != self._services.rank:
                self._services.tell(rank, Abort(self.number, self._group, failure))
        self._told = True

    def lose(self, rank: int, reason: str) -> None:
        """Fail the group because a member is gone. Any thread."""
        self.fail(self._lost(rank, reason), tell=None)

    def member_left(self, rank: int, reason: str) -> None:
        """Note a member's goodbye: all that it has sent is here, and no more will come. Any thread."""
        with self.lock:
            self._departed[rank] = reason
            for endpoint in self.endpoints:
                endpoint.close()

    def _lost(self, rank: int, reason: str) -> Failure:
        cause = Cause.LEFT if rank in self._departed else Cause.LOST
        return Failure(cause, f"lost {self._services.describe(rank)}: {reason}", (rank,), reason)


def _open_transfers(
    opener: EndpointOpener, sender: int, receiver: int, endpoints: list[Endpoint | None], other: int
) -> Endpoint:
    endpoint = endpoints[other] = opener.open_transfers(sender, receiver)
    return endpoint
