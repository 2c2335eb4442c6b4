"""Matching of arriving frames with posted receives. Independent of how frames travel.

One message queue serves one client. Frames are matched by channel (group, sequence), peer and step. Frames
without a posted receive are *unexpected* and buffered, within a budget for each peer; beyond it
`accept_payload` and `accept_header` refuse, and the transport stops reading that peer until there is room.
Frames of closed channels are dropped.

Channels live in a *generation*. When the next one begins (`renew`), all open channels fail, buffered frames
of earlier generations are dropped, and those of the new one wait for their channels.

Locking: `lock` guards all matching; it is never held while the transport or the listener is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from dmesh._log import logger
from dmesh.collectives.backends.tcp.channel import (
    Deferred,
    Destination,
    FrameSender,
    MessageChannel,
    Send,
    run,
)
from dmesh.collectives.backends.tcp.frames import CONTROL_LIMIT, EAGER_LIMIT, SIGNATURE_LIMIT, Frame, Kind
from dmesh.collectives.backends.tcp.transport import Channel, Peer, TransportListener
from dmesh.collectives.backends.tcp.unexpected import BufferedFrame, ClosedSequences, UnexpectedFrames
from dmesh.errors import CollectiveError, CollectiveMismatchError, CollectiveValueError, PeerLostError

UNEXPECTED_LIMIT = 64 * 1024 * 1024
"""Bytes of unexpected frames that are buffered for each peer."""


class MessageQueue:
    """The receiving half of a transport, and the bookkeeping of its sending half.

    Args:
        rank: This client's id.
        sender: Carries frames away.
        unexpected_limit: Bytes of unexpected frames buffered for each peer.
    """

    def __init__(self, rank: int, sender: FrameSender, unexpected_limit: int = UNEXPECTED_LIMIT) -> None:
        self.rank = rank
        self.sender = sender
        self.lock = threading.Lock()
        self.generation = 0
        self._listener: TransportListener | None = None
        self._peers: dict[int, Peer] = {}
        self._channels: dict[tuple[int, int], MessageChannel] = {}
        self._unexpected = UnexpectedFrames(unexpected_limit)
        self._closed: dict[int, ClosedSequences] = {}
        self._gone: dict[int, str] = {}
        self._over: BaseException | None = None

    # -- peers and generations ---------------------------------------------------------------------

    def attach(self, listener: TransportListener, peers: Sequence[Peer], generation: int = 0) -> None:
        """Set the listener, the peers and the generation; once, before anything arrives."""
        self._listener = listener
        self._peers = {peer.rank: peer for peer in peers}
        self.generation = generation

    def renew(self, peers: Sequence[Peer], replaced: Collection[int], generation: int) -> None:
        """Begin a new generation; see `Transport.renew`.

        The transport has dropped the replaced peers' connections before.

        Args:
            peers: All other clients.
            replaced: Ranks that are other processes than before.
            generation: Its number.
        """
        deferred: Deferred = []
        with self.lock:
            self._peers = {peer.rank: peer for peer in peers}
            self.generation = generation
            for rank in replaced:
                self._gone.pop(rank, None)
            over = CollectiveError(f"generation {generation} of the collectives has begun meanwhile")
            channels, self._channels = self._channels, {}
            for channel in channels.values():
                channel.fail_locked(over)
            self._closed.clear()
            for buffered in self._unexpected.renew(generation, replaced):
                self.refund(buffered, deferred)
        run(deferred)

    def describe(self, rank: int) -> str:
        """Return a peer's name for messages."""
        peer = self._peers.get(rank)
        return f"rank {rank}" if peer is None else f"rank {rank} = {peer.description}"

    def peer(self, rank: int) -> Peer:
        """Return a peer; raise CollectiveValueError if there is none of that rank."""
        peer = self._peers.get(rank)
        if peer is None:
            problem = "is this client itself" if rank == self.rank else "is no peer of this transport"
            raise CollectiveValueError(
                f"rank {rank} {problem}; the peers are {sorted(self._peers) or 'none (not started)'}"
            )
        return peer

    def depart(self, peer: int, reason: str | None) -> None:
        """Report to the listener, once, that a peer is lost for a reason or said goodbye (None)."""
        with self.lock:
            if peer in self._gone or self._over is not None:
                return
            self._gone[peer] = "it said goodbye" if reason is None else reason
            listener = self._listener
        if listener is None:
            return
        if reason is None:
            self._notify(lambda: listener.on_peer_left(peer))
        else:
            self._notify(lambda: listener.on_peer_lost(peer, reason))

    def gone(self, peer: int) -> str | None:
        """Return why a peer is gone: it is lost or has left; None if it is there."""
        with self.lock:
            return self._gone.get(peer)

    def shut(self, error: BaseException) -> None:
        """Fail all channels, open now or later, and report no more departures."""
        with self.lock:
            if self._over is None:
                self._over = error
            for channel in self._channels.values():
                channel.fail_locked(error)
            self._unexpected.clear()

    # -- channels ----------------------------------------------------------------------------------

    def open(self, group: int, sequence: int, signature: bytes, generation: int = 0) -> Channel:
        """Open a channel; see `Transport.open`."""
        if not 0 <= group < 2**64 or not 0 <= sequence < 2**64:
            raise CollectiveValueError(
                f"a channel's group ({group}) and sequence ({sequence}) must be 0 to 2**64 - 1"
            )
        if len(signature) > SIGNATURE_LIMIT:
            raise CollectiveValueError(
                f"a channel's signature has {len(signature)} bytes, at most {SIGNATURE_LIMIT} are allowed"
            )
        key = (group, sequence)
        channel = MessageChannel(self, group, sequence, signature, generation)
        deferred: Deferred = []
        with self.lock:
            if self._over is not None:
                raise self._over
            if generation != self.generation:
                raise CollectiveError(
                    f"channel {sequence} of group {group} is of generation {generation}, "
                    f"but it is generation {self.generation} now"
                )
            closed = self._closed.get(group)
            if key in self._channels or (closed is not None and sequence in closed):
                state = "open" if key in self._channels else "over"
                raise CollectiveError(f"channel {sequence} of group {group} is already {state}")
            self._channels[key] = channel
            for buffered in self._unexpected.take((generation, *key)):
                channel.match(buffered, deferred)
        run(deferred)
        return channel

    def forget(self, channel: MessageChannel, deferred: Deferred) -> None:
        """Remove a channel that closes; with the lock held."""
        key = (channel.group, channel.sequence)
        if self._channels.get(key) is not channel:
            return  # of an earlier generation, of which nothing is known any more
        del self._channels[key]
        closed = self._closed.setdefault(channel.group, ClosedSequences())
        if closed.add(channel.sequence):
            for buffered in self._unexpected.drop(self.generation, channel.group, closed):
                self.refund(buffered, deferred)

    def lost_error(self, peer: int) -> PeerLostError | None:
        """Return the error of a peer that is gone; None if it is not. With the lock held."""
        reason = self._gone.get(peer)
        return None if reason is None else PeerLostError(f"{self.describe(peer)} is gone: {reason}", peer)

    def report_mismatch(self, channel: MessageChannel, peer: int, signature: bytes) -> None:
        """Report a peer's other signature to the listener, and fail the channel."""
        listener = self._listener
        if listener is not None:
            self._notify(
                lambda: listener.on_mismatch(
                    channel.group, channel.sequence, peer, signature, channel.generation
                )
            )
        # The listener knows more and has failed the channel before; if it has not, the channel must not wait
        # forever.
        channel.fail(
            CollectiveMismatchError(
                f"{self.describe(peer)} takes part in {channel.name} with {_printable(signature)}, "
                f"this rank ({self.rank}) with {_printable(channel.signature)}"
            )
        )

    def sent(self, send: Send) -> None:
        """Complete a send whose memory the transport does not need any more."""
        with self.lock:
            send.channel.sent(send)

    # -- arrivals ----------------------------------------------------------------------------------

    def accept_payload(self, peer: int, frame: Frame) -> Destination | None:
        """Return the destination of a DATA or CHUNK frame's payload; None if there is no room for it now.

        Raises:
            CollectiveError: The frame breaks the protocol; its sender cannot be trusted any more.
        """
        if frame.kind is Kind.CHUNK:
            return self._accept_chunk(peer, frame)
        deferred: Deferred = []
        with self.lock:
            if self._is_closed(frame):
                return Destination(frame.length)
            channel = self._channel(frame)
            found = None if channel is None else channel.destination(peer, frame, deferred)
            if found is None:
                account = self._unexpected.charge(peer, frame)
                if account is None:
                    return None
                payload = bytearray(frame.length)
                buffered = BufferedFrame(account, frame, payload)
                found = Destination(frame.length, memoryview(payload), buffered=buffered)
        run(deferred)
        return found

    def payload_received(self, destination: Destination) -> None:
        """Complete a destination: all its bytes have come."""
        if destination.receive is not None:
            assert destination.channel is not None
            with self.lock:
                destination.channel.received(destination.receive, destination.size)
        elif destination.buffered is not None:
            self._deliver(destination.buffered)

    def accept_header(self, peer: int, frame: Frame) -> bool:
        """Take an OFFER, READY or CANCEL frame; return False if there is no room for it now."""
        with self.lock:
            if self._is_closed(frame):
                return True
            account = self._unexpected.charge(peer, frame)
        if account is None:
            return False
        self._deliver(BufferedFrame(account, frame, None))
        return True

    def accept_control(self, peer: int, message: bytes) -> None:
        """Take a control message."""
        listener = self._listener
        if listener is not None:
            self._notify(lambda: listener.on_control(peer, message))

    def check_control(self, peer: int, message: bytes) -> None:
        """Raise CollectiveValueError if a control message to send is too long, or there is no such peer."""
        self.peer(peer)
        if len(message) > CONTROL_LIMIT:
            raise CollectiveValueError(
                f"a control message has {len(message)} bytes, at most {CONTROL_LIMIT} are allowed"
            )

    def _accept_chunk(self, peer: int, frame: Frame) -> Destination:
        with self.lock:
            if self._is_closed(frame):
                return Destination(frame.length)
            channel = self._channel(frame)
            receive = None if channel is None else channel.receives.get((peer, frame.step))
            if channel is not None and receive is None and channel.failure is not None:
                return Destination(frame.length)
            where = f"(group {frame.group}, sequence {frame.sequence}, step {frame.step})"
            if channel is None or receive is None or receive.view.nbytes <= EAGER_LIMIT:
                raise CollectiveError(f"a piece of a large payload came that nobody asked for {where}")
            start, end = receive.claimed, receive.claimed + frame.length
            if end > receive.view.nbytes:
                raise CollectiveError(f"{end} bytes came for a receive of {receive.view.nbytes} {where}")
            receive.started = True
            receive.claimed = end
            return Destination(frame.length, receive.view[start:end], channel, receive)

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
                self._unexpected.add(buffered)
        run(deferred)

    def _channel(self, frame: Frame) -> MessageChannel | None:
        """Return the open channel of a frame."""
        if frame.generation != self.generation:
            return None
        return self._channels.get((frame.group, frame.sequence))

    def _is_closed(self, frame: Frame) -> bool:
        """Return True if no receive will ever take a frame."""
        if frame.generation != self.generation:
            return frame.generation < self.generation
        closed = self._closed.get(frame.group)
        return closed is not None and frame.sequence in closed

    # -- budgets, callbacks ------------------------------------------------------------------------

    def refund(self, buffered: BufferedFrame, deferred: Deferred) -> None:
        """Return a buffered frame's charge; with the lock held."""
        peer = self._unexpected.refund(buffered)
        if peer is not None:
            deferred.append(lambda: self.sender.resume(peer))

    def buffered_bytes(self, peer: int) -> int:
        """Return the bytes charged to a peer's budget."""
        with self.lock:
            return self._unexpected.charged(peer)

    @staticmethod
    def _notify(call: Callable[[], None]) -> None:
        """Call the listener; an exception of its own must not end the transport's thread."""
        try:
            call()
        except Exception:  # noqa: BLE001
            logger.exception("a listener of the transport failed")


def _printable(signature: bytes) -> str:
    text = signature.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 300 else text[:300] + "...")
