"""Transports: the contract of one, and the receiving half that all of them share."""

from __future__ import annotations

import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from dmesh._log import logger
from dmesh.collectives.backends.tcp.channel import (
    Account,
    BufferedFrame,
    Channel,
    Channels,
    Deferred,
    Destination,
    FrameSender,
    Peer,
    Send,
    run,
    where,
)
from dmesh.collectives.backends.tcp.frames import CONTROL_LIMIT, Frame, Kind
from dmesh.errors import CollectiveError, CollectiveMismatchError, CollectiveValueError

UNEXPECTED_LIMIT = 64 * 1024 * 1024
"""Bytes of unexpected frames that are buffered for each peer."""
FRAME_OVERHEAD = 256
"""Bytes charged for a buffered frame beside its payload and signature: about the size of its objects."""


class TransportListener(Protocol):
    """Callbacks for events outside of channels; must not block.

    They concern the peers' processes that the transport was last given, and run on its own thread, but for
    the mismatch of a frame that had to wait for its channel: the thread that opens the channel reports it.
    """

    def on_control(self, peer: int, message: bytes) -> None:
        """A control message came from a peer."""

    def on_peer_lost(self, peer: int, reason: str) -> None:
        """A peer's connection failed or ended without a goodbye. Called once per peer."""

    def on_peer_left(self, peer: int) -> None:
        """A peer said goodbye: nothing more will come from it. Called once per peer."""

    def on_mismatch(self, group: int, sequence: int, peer: int, signature: bytes, generation: int) -> None:
        """A peer's frame carries another signature than its channel. Called once per channel and peer.

        Afterwards the channel fails with both signatures, unless the listener has failed it already.
        """


class MessageQueue(Channels):
    """Receiving half of a transport, its `sender`: routes arriving frames to their channels.

    Frames without a posted receive are *unexpected* and buffered, within a budget for each peer; beyond it
    `accept` refuses, and the transport stops reading that peer until there is room. Frames of closed channels
    and of earlier generations are dropped; those of a later generation wait for it.
    """

    def __init__(self, rank: int, sender: FrameSender, unexpected_limit: int = UNEXPECTED_LIMIT) -> None:
        super().__init__(rank, sender)
        self._unexpected_limit = unexpected_limit
        self._listener: TransportListener | None = None

    def attach(self, listener: TransportListener, peers: Sequence[Peer], generation: int = 0) -> None:
        """Set the listener, the peers and the generation; once, before anything arrives."""
        self._listener = listener
        self.peers = {peer.rank: peer for peer in peers}
        self.generation = generation

    def renew(self, peers: Sequence[Peer], replaced: Collection[int], generation: int) -> None:
        """Begin a new generation, in which the `replaced` ranks are other processes; see `Transport.renew`.

        The transport has dropped the replaced peers' connections before.
        """
        deferred: Deferred = []
        with self.lock:
            self.peers = {peer.rank: peer for peer in peers}
            self.generation = generation
            for rank in replaced:
                self.departures.pop(rank, None)
                self._accounts.pop(rank, None)
            over = CollectiveError(f"generation {generation} of the collectives has begun meanwhile")
            for channel in self._channels.values():
                channel.fail_locked(over)
            self._channels.clear()
            self._closed.clear()
            self._drop(lambda key, peer: key[0] < generation or peer in replaced, deferred)
        run(deferred)

    def depart(self, peer: int, reason: str | None) -> None:
        """Report to the listener, once, that a peer is lost for a reason or said goodbye (None)."""
        with self.lock:
            if peer in self.departures or self._over is not None:
                return
            self.departures[peer] = "it said goodbye" if reason is None else reason
        if reason is None:
            self._tell(lambda listener: listener.on_peer_left(peer))
        else:
            self._tell(lambda listener: listener.on_peer_lost(peer, reason))

    def gone(self, peer: int) -> str | None:
        """Return why a peer is gone: it is lost or has left; None if it is there."""
        with self.lock:
            return self.departures.get(peer)

    def shut(self, error: BaseException) -> None:
        """Fail all channels, open now or later, and report no more departures."""
        with self.lock:
            if self._over is None:
                self._over = error
            for channel in self._channels.values():
                channel.fail_locked(error)
            self._early.clear()

    def report_mismatch(self, channel: Channel, peer: int, signature: bytes) -> None:
        """Report a peer's other signature to the listener, and fail the channel. Without the lock."""
        group, sequence, generation = channel.group, channel.sequence, channel.generation
        self._tell(lambda listener: listener.on_mismatch(group, sequence, peer, signature, generation))
        # The listener knows more and has failed the channel; if it has not, it must not wait forever.
        channel.fail(
            CollectiveMismatchError(
                f"{self.describe(peer)} takes part in {channel.name} with {_printable(signature)}, "
                f"this rank ({self.rank}) with {_printable(channel.signature)}"
            )
        )

    def accept(self, peer: int, frame: Frame) -> Destination | None:
        """Return the destination of the payload, if any, of a frame; None if there is no room for it now.

        Raises CollectiveError if the frame breaks the protocol: its sender cannot be trusted any more.
        """
        if frame.kind is Kind.CONTROL:
            message = bytearray(frame.length)
            arrived = lambda: self._tell(lambda listener: listener.on_control(peer, bytes(message)))  # noqa: E731
            return Destination(frame.length, memoryview(message), arrived)
        deferred: Deferred = []
        with self.lock:
            found = self._destination(peer, frame, deferred)
        run(deferred)
        return found

    def _destination(self, peer: int, frame: Frame, deferred: Deferred) -> Destination | None:
        if self._is_closed(frame):
            return Destination(frame.payload_length)
        channel, found = self._channel(frame), None
        if frame.kind is Kind.CHUNK:
            found = None if channel is None else channel.chunk_destination(peer, frame)
            if found is None:
                raise CollectiveError(f"a piece of a large payload came that nobody asked for {where(frame)}")
        elif frame.kind is Kind.DATA and channel is not None:
            found = channel.destination(peer, frame, deferred)
        if found is not None:
            return found
        account = self._accounts.setdefault(peer, Account(peer))
        cost = frame.payload_length + len(frame.signature) + FRAME_OVERHEAD
        # An empty account takes any frame: one that is larger than the budget would otherwise wait forever.
        if account.charged and account.charged + cost > self._unexpected_limit:
            account.refused = True
            return None
        account.charged += cost
        buffered = BufferedFrame(account, cost, frame, bytearray(frame.payload_length))
        memory = memoryview(buffered.payload)
        return Destination(len(memory), memory, lambda: self._deliver(buffered))

    def _deliver(self, buffered: BufferedFrame) -> None:
        """Pass a complete, charged frame to its channel, or buffer it until the channel opens."""
        deferred: Deferred = []
        frame = buffered.frame
        with self.lock:
            channel = self._channel(frame)
            if channel is not None:
                channel.match(buffered, deferred)
            elif self._is_closed(frame) or self._over is not None:
                self.refund(buffered, deferred)
            else:
                key = (frame.generation, frame.group, frame.sequence)
                self._early.setdefault(key, []).append(buffered)
        run(deferred)

    def _channel(self, frame: Frame) -> Channel | None:
        """Return the open channel of a frame."""
        if frame.generation != self.generation:
            return None
        return self._channels.get((frame.group, frame.sequence))

    def _is_closed(self, frame: Frame) -> bool:
        """Return True if no receive will ever take a frame."""
        if frame.generation != self.generation:
            return frame.generation < self.generation
        return frame.sequence in self._closed.get(frame.group, ())

    def buffered_bytes(self, peer: int) -> int:
        """Return the bytes charged to a peer's budget."""
        with self.lock:
            account = self._accounts.get(peer)
            return 0 if account is None else account.charged

    def _tell(self, event: Callable[[TransportListener], None]) -> None:
        """Call the listener; an exception of its own must not end the transport's thread."""
        if self._listener is not None:
            try:
                event(self._listener)
            except Exception:  # noqa: BLE001
                logger.exception("a listener of the transport failed")


def _printable(signature: bytes) -> str:
    text = signature.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 300 else text[:300] + "...")


OnDialed = Callable[[socket.socket | None, str], None]
"""Takes a dialed connection, or None and the problem."""


class Connector(ABC):
    """Makes dedicated connections of groups: a peer dials once, under a random number. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[int, int] = {}
        self._arrived: dict[int, socket.socket] = {}
        self._closed = False

    def expect(self, peer: int) -> int:
        """Let a peer dial once; return the number (not 0) by which it must ask. Ends with `claim`."""
        with self._lock:
            while (number := secrets.randbits(32)) == 0 or number in self._expected:
                continue
            self._expected[number] = peer
            return number

    def claim(self, number: int) -> socket.socket | None:
        """Return and forget the connection that has come under a number; None if none has."""
        with self._lock:
            self._expected.pop(number, None)
            return self._arrived.pop(number, None)

    def is_expected(self, peer: int, number: int) -> bool:
        """Return whether a peer may come in under a number."""
        with self._lock:
            return self._expected.get(number) == peer and number not in self._arrived and not self._closed

    def admit(self, number: int, sock: socket.socket) -> None:
        """Take a proven connection that has come under a number."""
        with self._lock:
            if number in self._expected and not self._closed:
                self._arrived[number] = sock
                return
        sock.close()  # nobody waits for it any more

    def close(self) -> None:
        """Close all unclaimed connections, and expect no more."""
        with self._lock:
            self._closed = True
            unclaimed, self._arrived = self._arrived, {}
            self._expected.clear()
        for sock in unclaimed.values():
            sock.close()

    @abstractmethod
    def dial(self, peer: int, number: int, on_dialed: OnDialed) -> None:
        """Connect to a peer that expects it under a number; `on_dialed` is called once, on any thread."""


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

    @abstractmethod
    def transmit(self, peer: int, frame: Frame, send: Send | None, payload: bytes | None = None) -> None:
        """Send a frame; see `FrameSender.transmit`. A CONTROL frame has a `payload` without a `send`."""

    def control(self, peer: int, message: bytes) -> None:
        """Send a small message outside of any channel, in order, without waiting."""
        self.message_queue.peer(peer)
        if len(message) > CONTROL_LIMIT:
            raise CollectiveValueError(
                f"a control message has {len(message)} bytes, at most {CONTROL_LIMIT} are allowed"
            )
        self.transmit(peer, Frame(Kind.CONTROL, length=len(message)), None, bytes(message))

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
