"""Receiving half of a transport: reads the frames of peers, and routes them to their channels."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, Protocol

from dmesh._locks import Lock
from dmesh._log import logger
from dmesh.collectives.backends.tcp.channel import (
    BufferedFrame,
    Channel,
    Channels,
    Deferred,
    FrameSender,
    Peer,
    Receive,
    ReceiveBudget,
    run,
)
from dmesh.collectives.backends.tcp.frames import (
    EAGER_LIMIT,
    HEADER_SIZE,
    SIGNATURE_LIMIT,
    Frame,
    Kind,
    parse_header,
    where,
)
from dmesh.collectives.backends.tcp.tls import Stream
from dmesh.errors import CollectiveError, CollectiveMismatchError

UNEXPECTED_LIMIT = 64 * 1024 * 1024
"""Bytes of unexpected frames that are buffered for each peer."""
FRAME_OVERHEAD = 256
"""Bytes charged for a buffered frame beside its payload and signature: about the size of its objects."""
_BUFFER_SIZE: Final = 128 * 1024
_READ_AT_ONCE: Final = 4 * 1024 * 1024
# Takes unwanted bytes. Its contents mean nothing, so all connections share it.
_DISCARD: Final = memoryview(bytearray(256 * 1024))


class Destination:
    """Memory for the payload of an arriving frame.

    The transport fills it in pieces, each under `guard`, or discards them while `view` is None. Once all
    `size` bytes have come, stored or not, it calls `complete`.
    """

    __slots__ = ("_channel", "_memory", "complete", "guard", "size")

    def __init__(
        self,
        size: int,
        memory: memoryview | None = None,
        complete: Callable[[], None] = lambda: None,
        channel: Channel | None = None,
    ) -> None:
        self.size = size
        self.complete = complete
        self.guard = Lock() if channel is None else channel.guard
        self._memory = memory
        self._channel = channel

    @property
    def view(self) -> memoryview | None:
        """The memory to fill; None if the bytes are not needed (any more). Only valid under `guard`."""
        return None if self._channel is not None and self._channel.revoked else self._memory


class TransportListener(Protocol):
    """Callbacks for events outside of channels; must not block.

    They concern the peers' processes that the transport was last given, and run on its own thread, but for
    the mismatch of a frame that had to wait for its channel: the thread that opens the channel reports it.
    """

    def on_control(self, peer: int, message: bytes) -> None:
        """Take a control message of a peer."""

    def on_peer_lost(self, peer: int, reason: str) -> None:
        """Take note that a peer's connection failed, or ended without a goodbye. Called once per peer."""

    def on_peer_left(self, peer: int) -> None:
        """Take note of a peer's goodbye: it sends nothing more. Called once per peer."""

    def on_mismatch(self, group: int, sequence: int, peer: int, signature: bytes, generation: int) -> None:
        """Take note that a peer's frame has another signature than its channel. Once per channel and peer.

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
                self._budgets.pop(rank, None)
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
            self._notify(lambda listener: listener.on_peer_left(peer))
        else:
            self._notify(lambda listener: listener.on_peer_lost(peer, reason))

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
        self._notify(lambda listener: listener.on_mismatch(group, sequence, peer, signature, generation))
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
            arrived = lambda: self._notify(lambda listener: listener.on_control(peer, bytes(message)))  # noqa: E731
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
            found = None if channel is None else self._chunk_destination(channel, peer, frame)
            if found is None:
                raise CollectiveError(f"a piece of a large payload came that nobody asked for {where(frame)}")
        elif frame.kind is Kind.DATA and channel is not None:
            found = self._data_destination(channel, peer, frame, deferred)
        if found is not None:
            return found
        budget = self._budgets.setdefault(peer, ReceiveBudget(peer))
        cost = frame.payload_length + len(frame.signature) + FRAME_OVERHEAD
        # An empty account takes any frame: one that is larger than the budget would otherwise wait forever.
        if budget.charged and budget.charged + cost > self._unexpected_limit:
            budget.refused = True
            return None
        budget.charged += cost
        buffered = BufferedFrame(budget, cost, frame, bytearray(frame.payload_length))
        memory = memoryview(buffered.payload)
        return Destination(len(memory), memory, lambda: self._deliver(buffered))

    def _data_destination(
        self, channel: Channel, peer: int, frame: Frame, deferred: Deferred
    ) -> Destination | None:
        """Return the destination of a DATA frame; None if its receive is not posted yet."""
        discard = Destination(frame.length)
        if not channel.signature_fits(peer, frame, deferred):
            return discard
        receive = channel.receives.get((peer, frame.step))
        if receive is None:
            return None
        begun = receive.done or receive.claimed
        if begun or channel.failure is not None or not channel.length_fits(receive, frame):
            return discard
        return self._claim(channel, receive, frame.length)

    def _chunk_destination(self, channel: Channel, peer: int, frame: Frame) -> Destination | None:
        """Return the destination of a CHUNK frame; None if it was not asked for."""
        receive = channel.receives.get((peer, frame.step))
        if receive is None:
            return None if channel.failure is None else Destination(frame.length)
        if receive.view.nbytes <= EAGER_LIMIT:
            return None
        end = receive.claimed + frame.length
        if end > receive.view.nbytes:
            raise CollectiveError(f"{end} bytes came for a receive of {receive.view.nbytes} {where(frame)}")
        return self._claim(channel, receive, frame.length)

    def _claim(self, channel: Channel, receive: Receive, size: int) -> Destination:
        view = receive.view[receive.claimed : receive.claimed + size]
        receive.claimed += size
        return Destination(size, view, partial(self._received, channel, receive), channel)

    def _received(self, channel: Channel, receive: Receive) -> None:
        """Count what has been claimed as received: a peer's frames come one after the other."""
        with self.lock:
            if not channel.revoked and receive.claimed == receive.view.nbytes:
                channel.received(receive)

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
                self.keep_early(buffered)
                deferred.append(self.arrivals.ring)
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
            budget = self._budgets.get(peer)
            return 0 if budget is None else budget.charged

    def _notify(self, event: Callable[[TransportListener], None]) -> None:
        """Call the listener; an exception of its own must not end the transport's thread."""
        if self._listener is not None:
            try:
                event(self._listener)
            except Exception:  # noqa: BLE001
                logger.exception("a listener of the transport failed")


class ReadResult(enum.Enum):
    """Outcome of a read."""

    MORE = enum.auto()  # read again when the socket is readable
    STALLED = enum.auto()  # there is no room for the next frame; read again when there is
    ENDED = enum.auto()  # the connection ended, cleanly if a goodbye has come


class FrameReader:
    """Reads the frames of a peer that has proven its identity.

    Headers and small payloads go through a buffer, so that one system call reads many; a large payload is
    read straight into the posted memory, together with the header that follows it. `only_goodbye`: the other
    side, which accepted this connection, may send nothing else on it.
    """

    def __init__(
        self,
        sock: Stream,
        peer: int,
        message_queue: MessageQueue,
        on_goodbye: Callable[[Frame], None],
        *,
        only_goodbye: bool = False,
    ) -> None:
        self._socket = sock
        self._peer = peer
        self._message_queue = message_queue
        self._on_goodbye = on_goodbye
        self._only_goodbye = only_goodbye
        self._buffer = memoryview(bytearray(HEADER_SIZE + SIGNATURE_LIMIT if only_goodbye else _BUFFER_SIZE))
        self._start = 0
        self._end = 0
        self._frame: Frame | None = None  # complete but for its payload, and refused so far
        self._destination: Destination | None = None
        self._filled = 0
        self._ahead = self._buffer
        self._said_goodbye = False

    def read(self) -> ReadResult:
        """Read the available frames, up to a limit that gives other connections their turn.

        Raises CollectiveError if the peer breaks the protocol, and OSError if the connection is broken.
        """
        budget = _READ_AT_ONCE
        while budget > 0:
            if not self._parse():
                return ReadResult.STALLED
            try:
                count = self._receive()
            except (BlockingIOError, InterruptedError):
                return ReadResult.MORE
            if count == 0:
                return ReadResult.ENDED
            budget -= count
        return ReadResult.MORE if self._parse() else ReadResult.STALLED

    def _receive(self) -> int:
        destination = self._destination
        if destination is None:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
            count = self._socket.recv_into(self._buffer[self._end :])
            self._end += count
            return count
        # The buffer is empty, or its bytes would have gone to the destination.
        self._start = self._end = 0
        with destination.guard:
            view = destination.view
            left = destination.size - self._filled
            target = _DISCARD[:left] if view is None else view[self._filled :]
            count = self._socket.recvmsg_into([target, self._ahead])[0]
        payload = min(count, len(target))
        self._end = count - payload
        self._fill(payload)
        return count

    def _parse(self) -> bool:
        """Take everything complete in the buffer; return False if there is no room for a frame."""
        while True:
            if self._destination is not None:
                if self._start == self._end:
                    return True
                self._copy(self._destination)
                continue
            self._frame = self._frame or self._next_frame()
            if self._frame is None:
                return True
            if not self._take(self._frame):
                return False
            self._frame = None

    def _next_frame(self) -> Frame | None:
        available = self._end - self._start
        if available < HEADER_SIZE:
            return None
        frame, signature_length = parse_header(self._buffer, self._start)
        if self._said_goodbye or (self._only_goodbye and frame.kind is not Kind.GOODBYE):
            raise CollectiveError(f"a {frame.kind.name} frame came where none may come")
        size = HEADER_SIZE + signature_length
        if available < size:
            return None
        if signature_length:
            signature = bytes(self._buffer[self._start + HEADER_SIZE : self._start + size])
            frame = frame._replace(signature=signature)
        self._start += size
        return frame

    def _take(self, frame: Frame) -> bool:
        if frame.kind is Kind.GOODBYE:
            self._said_goodbye = True
            self._on_goodbye(frame)
            return True
        destination = self._message_queue.accept(self._peer, frame)
        if destination is None:
            return False
        # The next piece of a large payload probably follows, which should not go through the buffer.
        self._ahead = self._buffer[:HEADER_SIZE] if frame.kind is Kind.CHUNK else self._buffer
        self._destination = destination
        self._filled = 0
        if destination.size == 0:
            self._fill(0)
        return True

    def _copy(self, destination: Destination) -> None:
        count = min(self._end - self._start, destination.size - self._filled)
        with destination.guard:
            view = destination.view
            if view is not None:
                view[self._filled : self._filled + count] = self._buffer[self._start : self._start + count]
        self._start += count
        self._fill(count)

    def _fill(self, count: int) -> None:
        destination = self._destination
        assert destination is not None
        self._filled += count
        if self._filled < destination.size:
            return
        self._destination = None
        destination.complete()


def _printable(signature: bytes) -> str:
    text = signature.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 300 else text[:300] + "...")
