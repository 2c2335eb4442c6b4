"""Contract of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.connection import Connector
from dmesh.collectives.backends.tcp.frames import CONTROL_LIMIT, Frame, Kind
from dmesh.collectives.backends.tcp.message_queue import MessageQueue, TransportListener
from dmesh.errors import CollectiveValueError


class Transport(ABC):
    """Moves bytes between the clients of one cluster."""

    rank: int
    """This client's id."""
    message_queue: MessageQueue
    """Opens channels."""
    connector: Connector | None = None
    """Makes dedicated connections; None if this transport cannot."""

    @abstractmethod
    def start(self, listener: TransportListener, peers: Sequence[Peer], generation: int = 0) -> None:
        """Begin to accept from all other clients and deliver; messages of earlier generations are dropped."""

    def connect_all(self, timeout: float) -> None:
        """Wait until there is a connection with every peer, whose end will show that the peer is dead.

        For clusters without a coordination service. Raises InitializationTimeoutError (with the missing
        ones), PeerAuthenticationError or PeerLostError.
        """
        del timeout

    def watch(self, peer: int) -> None:
        """Make sure, without waiting, that the death of `peer` is noticed, if that takes a connection."""
        del peer

    @abstractmethod
    def renew(self, peers: Sequence[Peer], generation: int, switch: Callable[[], None]) -> None:
        """Begin a new generation, in which some peers may be other processes than before.

        All channels fail. Connections and frames of a peer whose incarnation has changed are dropped, and its
        departure is forgotten; all others stay.

        `peers` have the same ranks as before; `generation` is larger, or the one that was given to `start`.
        `switch` is called at the very moment, on the thread of the listener's callbacks: those before it
        concern the former processes, those after it the new ones. Raises CollectiveError if the transport is
        closed.
        """

    def control(self, peer: int, message: bytes) -> None:
        """Send a small message outside of any channel, in order, without waiting."""
        self.message_queue.peer(peer)
        if len(message) > CONTROL_LIMIT:
            raise CollectiveValueError(
                f"a control message has {len(message)} bytes, at most {CONTROL_LIMIT} are allowed"
            )
        frame = Frame(Kind.CONTROL, length=len(message))
        self.message_queue.sender.transmit(peer, frame, None, bytes(message))

    def sends_to(self, peer: int) -> bool:
        """Return whether a message to `peer` needs no new connection."""
        del peer
        return True

    def hears_from(self, peer: int) -> bool:
        """Return whether the goodbye of `peer`, should it leave, comes by a connection that is there."""
        del peer
        return True

    @abstractmethod
    def close(self, linger: float) -> None:
        """Say goodbye to all, send what is queued (for at most `linger` seconds), stop. Idempotent."""
