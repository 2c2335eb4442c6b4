"""Contract of a message transport: its channels, its listener, and its dedicated connections.

A collective opens one `Channel` for itself, named by (group, sequence number), and sends and receives bytes
in numbered steps. Every frame carries the channel's *signature* (the operation, dtype, shape and arguments,
as text): a frame with another signature than the receiver's is a mismatch, detected before a byte of it is
stored. Transports know nothing of arrays, operations or schedules.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Peer:
    """Another client."""

    rank: int
    """Its client id."""
    addresses: tuple[str, ...]
    """HOST:PORT at which it listens, most preferred first."""
    incarnation: int
    """Random number of its process; 0 if unknown (no coordination service)."""
    description: str
    """Its name for messages, e.g. `/job:worker/task:2 (host h, pid 9)`."""


class TransportListener(Protocol):
    """Callbacks for events outside of channels; must not block.

    They concern the peers' processes that the transport was last given, by `start` or `renew`, and run on the
    transport's own thread, with one exception: the mismatch of a frame that had to wait for its channel is
    reported by the thread that opens the channel, before `Transport.open` returns.
    """

    def on_control(self, peer: int, message: bytes) -> None:
        """A control message came from a peer."""

    def on_peer_lost(self, peer: int, reason: str) -> None:
        """A peer's connection failed or ended without a goodbye. Called once per peer."""

    def on_peer_left(self, peer: int) -> None:
        """A peer said goodbye: nothing more will come from it. Called once per peer."""

    def on_mismatch(self, group: int, sequence: int, peer: int, signature: bytes, generation: int) -> None:
        """A peer's frame for an open channel carries another signature than the channel's.

        Called once per channel and peer. Afterwards the channel fails with a `CollectiveMismatchError` that
        shows both signatures, unless the listener has failed it already.
        """


class Completion(Protocol):
    """A receive under way."""

    @property
    def done(self) -> bool:
        """True when all bytes are in place."""


class Channel(ABC):
    """The frames of one collective. Used by one thread; failed by any."""

    @abstractmethod
    def send(self, peer: int, step: int, data: memoryview) -> None:
        """Start to send `data` (bytes, C-contiguous); it must not change before `flush` returns.

        Steps are numbered by the sender; a (peer, step) pair is used once per channel and direction.
        """

    @abstractmethod
    def receive(self, peer: int, step: int, into: memoryview) -> Completion:
        """Start to receive exactly `into.nbytes` bytes of that step from `peer`."""

    @abstractmethod
    def wait(self, completions: Sequence[Completion], timeout: float | None) -> bool:
        """Wait until all are done; return False after `timeout` seconds. Raises the channel's failure."""

    @abstractmethod
    def flush(self, timeout: float | None) -> bool:
        """Wait until the system has taken all sends; return False on timeout. Raises like `wait`."""

    @abstractmethod
    def waiting_for(self) -> tuple[int, ...]:
        """Return the ranks whose frames (or readiness to take ours) are still missing, sorted."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Make every pending and later `wait` and `flush` raise `error`. Only the first failure counts."""

    @abstractmethod
    def close(self) -> None:
        """Forget the channel and release its buffers; no memory is touched after it returns."""


OnDialed = Callable[[socket.socket | None, str], None]
"""Takes a dialed connection, or None and the problem."""


class Connector(Protocol):
    """Makes dedicated connections: each belongs to one group. May be used by any thread."""

    def expect(self, peer: int) -> int:
        """Let a peer dial once; return the number (not 0) by which it must ask. Ends with `claim`."""

    def claim(self, number: int) -> socket.socket | None:
        """Return and forget the connection that has come under a number; None if none has."""

    def dial(self, peer: int, number: int, on_dialed: OnDialed) -> None:
        """Connect to a peer that expects it under a number.

        Args:
            peer: Its rank.
            number: The number that it has advertised.
            on_dialed: Called once, on any thread.
        """


class Transport(ABC):
    """Moves bytes between the clients of one cluster."""

    rank: int
    """This client's id."""
    connector: Connector | None = None
    """Makes dedicated connections; None if this transport cannot."""

    @abstractmethod
    def start(self, listener: TransportListener, peers: Sequence[Peer], generation: int = 0) -> None:
        """Begin to accept and deliver.

        Args:
            listener: Its callbacks.
            peers: All other clients.
            generation: The current one; messages of earlier ones are dropped.
        """

    def connect_all(self, timeout: float) -> None:
        """Wait until there is a connection with every peer, where a transport has connections.

        For clusters without a coordination service, in which the end of its connection shows that a peer is
        dead. Raises InitializationTimeoutError (with the missing ones), PeerAuthenticationError or
        PeerLostError.
        """
        del timeout

    def watch(self, peer: int) -> None:
        """Make sure, without waiting, that the death of `peer` is noticed, if that takes a connection."""
        del peer

    @abstractmethod
    def open(self, group: int, sequence: int, signature: bytes, generation: int = 0) -> Channel:
        """Open the channel of one collective. Frames that came before are delivered to it at once.

        Raises CollectiveError if `generation` is not the current one.
        """

    @abstractmethod
    def renew(self, peers: Sequence[Peer], generation: int, switch: Callable[[], None]) -> None:
        """Begin a new generation, in which some peers may be other processes than before.

        All channels fail. Connections and frames of a peer whose incarnation has changed are dropped, and its
        departure is forgotten; all others stay. From now on frames of earlier generations are dropped; those
        of the new one that have already come wait for their channels.

        Args:
            peers: All other clients; the same ranks as before.
            generation: Larger than before, or the same as was given to `start`.
            switch: Called at the very moment, on the thread of the listener's callbacks: those before it
                concern the former processes, those after it the new ones.

        Raises:
            CollectiveError: The transport is closed.
        """

    @abstractmethod
    def control(self, peer: int, message: bytes) -> None:
        """Send a small message (at most 64 KiB) outside of any channel, in order, without waiting."""

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
