"""Connection of frames between two peers: a queue that is written, a reader, and how both ends close it.

Two cases show that a peer's host is gone without a word, powered off or cut off by the network:

* An idle connection: keep-alive probes are not answered (`tune`; the kernel ends the connection).
* Data, or probes of a closed window, are not acknowledged (`is_silent`, to be called from time to time).

TCP_USER_TIMEOUT, the kernel's own limit, is not used: it would also end a connection whose process is alive
but does not read for a while, because it is stopped, or because its buffer for unexpected messages is full.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Callable

from dmesh.collectives.backends.tcp.channel import Send
from dmesh.collectives.backends.tcp.event_loop import EventLoop
from dmesh.collectives.backends.tcp.frame_io import FrameReader, ReadResult, SendQueue, WriteResult
from dmesh.collectives.backends.tcp.frames import Frame, Kind
from dmesh.collectives.backends.tcp.tls import SecureSocket, Stream
from dmesh.collectives.backends.tcp.transport import MessageQueue
from dmesh.errors import CollectiveError

_DISCARD_SIZE = 256 * 1024
_PROBES = 6
_NEAR = 50  # microseconds of round trip, within which the bound still lets 10 gigabytes pass each second
_FLIGHT_BOUND = 256 * 1024  # bytes, which Linux doubles for its bookkeeping
# Of struct tcp_info: state, ca_state, retransmits, probes; ... unacked; ... last_ack_recv.
_FIRST = struct.Struct("=BBBB20xI28xI")
# And, in kernels from 4.6 on: min_rtt.
_SHORTEST = struct.Struct("=148xI")


class Connection:
    """A connection with a peer, on which the dialing side sends all frames but the goodbye.

    `send` and `withdraw` may be used by any thread; frames wait in the queue until the socket is there.
    Everything else happens on the loop's thread. `on_goodbye` takes the other side's goodbye on this
    connection, `on_ended` the reason for which it has ended or broken, also after a goodbye.
    """

    def __init__(
        self,
        loop: EventLoop,
        message_queue: MessageQueue,
        peer: int,
        dialed: bool,
        on_goodbye: Callable[[Connection, Frame], None],
        on_ended: Callable[[Connection, str], None],
    ) -> None:
        self.peer = peer
        self.dialed = dialed
        self.ended = False
        self.goodbye = False
        self._loop = loop
        self._message_queue = message_queue
        self._tell_goodbye = on_goodbye
        self._tell_end = on_ended
        self._queue = SendQueue()
        self._socket: Stream | None = None
        self._reader: FrameReader | None = None
        self._events = 0
        self._leaving = False
        self._reads_on = False

    @property
    def is_open(self) -> bool:
        """True while there is a proven connection."""
        return self._socket is not None

    @property
    def idle(self) -> bool:
        """True if nothing waits to be written."""
        return len(self._queue) == 0

    def send(self, frame: Frame, send: Send | None = None, payload: bytes | None = None) -> None:
        """Queue a frame, and write at once as much as the socket takes."""
        if self._queue.put(frame, send, payload):
            result = None
            try:
                result = self._write()
            finally:
                if result is not WriteResult.EMPTY:
                    self._loop.call(self._flush)  # after Ctrl-C, too: the loop's thread is safe from it

    def withdraw(self, send: Send) -> bool:
        """Stop using the memory of a send; see `FrameSender.withdraw`."""
        return self._queue.withdraw(send)

    def adopt(self, sock: Stream) -> None:
        """Take the proven socket: begin to read, and to write the queued frames."""
        self._socket = sock
        self._reader = FrameReader(
            sock, self.peer, self._message_queue, self._on_goodbye, only_goodbye=self.dialed
        )
        self._queue.attach(sock)
        self._watch(selectors.EVENT_READ)
        self._read_on(sock)
        self._flush()

    def resume(self) -> None:
        """Read again: there is room for the peer's frames."""
        if self._socket is not None and not self._events & selectors.EVENT_READ:
            self._on_readable()

    def check(self, silence: float) -> None:
        """End the connection if the peer's host has not answered for `silence` seconds."""
        if self._socket is not None and is_silent(self._socket, silence):
            self._end(f"its host has not answered for {silence:g} s")

    def leave(self, *, other_follows: bool) -> None:
        """Say goodbye after the queued frames; the connection ends when the peer closes its side, too.

        `other_follows` tells the peer that this client's other connection with it says its own goodbye.
        """
        self._queue.finish(Frame(Kind.GOODBYE, sequence=int(other_follows)))
        self._leaving = True
        if self._socket is not None:
            self._watch(self._events | selectors.EVENT_READ)
            self._flush()

    def drop(self) -> None:
        """Close the connection at once, without telling the owner."""
        self.ended = True
        self._queue.detach()
        sock, self._socket = self._socket, None
        if sock is not None:
            self._loop.watch(sock, 0, self._on_ready)
            sock.close()

    def _on_goodbye(self, frame: Frame) -> None:
        self.goodbye = True
        self._tell_goodbye(self, frame)

    def _on_ready(self, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._on_readable()
        if events & selectors.EVENT_WRITE and self._socket is not None:
            self._flush()

    def _on_readable(self) -> None:
        sock, reader = self._socket, self._reader
        assert sock is not None
        assert reader is not None
        try:
            if self._leaving:
                # Nobody here listens any more, but to close with unread bytes would be a reset for the peer.
                result = ReadResult.MORE if sock.recv(_DISCARD_SIZE) else ReadResult.ENDED
            else:
                result = reader.read()
        except (BlockingIOError, InterruptedError):
            result = ReadResult.MORE
        except OSError as error:
            self._end(f"its connection broke ({error.strerror or error})")
            return
        except CollectiveError as error:
            self._end(f"it broke the protocol: {error}")
            return
        if self._socket is None:
            return  # the frames just read led to the connection's end
        if result is ReadResult.ENDED:
            self._end("its connection was closed without a goodbye")
        elif result is ReadResult.STALLED:
            self._watch(self._events & ~selectors.EVENT_READ)
        else:
            self._watch(self._events | selectors.EVENT_READ)
            self._read_on(sock)

    def _read_on(self, sock: Stream) -> None:
        """Read again after the other connections' turn, if TLS holds bytes that the selector cannot see."""
        if isinstance(sock, SecureSocket) and sock.hidden and not self._reads_on:
            self._reads_on = True
            self._loop.call(self._on_hidden)

    def _on_hidden(self) -> None:
        self._reads_on = False
        if self._events & selectors.EVENT_READ and self._socket is not None:
            self._on_readable()

    def _flush(self) -> None:
        """Write on the loop's thread, and go on when the socket takes more."""
        sock = self._socket
        if sock is None:
            return
        result = self._write()
        if result is WriteResult.BROKEN:
            # Everything that came before the connection broke still counts, a goodbye above all.
            self._watch(self._events & ~selectors.EVENT_WRITE)
            self._on_readable()
            if self._socket is not None and not self.goodbye:
                self._end("its connection broke")
            return
        if result is WriteResult.BLOCKED:
            self._watch(self._events | selectors.EVENT_WRITE)
            return
        self._watch(self._events & ~selectors.EVENT_WRITE)
        if result is WriteResult.ENDED:
            try:
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                self._end("its connection broke")

    def _write(self) -> WriteResult:
        result, finished = self._queue.write()
        for send in finished:
            send.channel.sent(send)
        return result

    def _watch(self, events: int) -> None:
        if self._socket is not None and events != self._events:
            self._events = events
            self._loop.watch(self._socket, events, self._on_ready)

    def _end(self, reason: str) -> None:
        if self.ended:
            return
        self.drop()
        self._tell_end(self, reason)


def tune(sock: Stream, silence: float) -> None:
    """Send small frames at once; end an idle connection whose host does not answer for `silence` seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = max(1, round(silence / 4))
    interval = max(1, round((silence - idle) / _PROBES))
    for option, value in (("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", _PROBES)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def is_silent(sock: Stream, silence: float) -> bool:
    """Return True if the peer's host owes an acknowledgement, and has sent none for `silence` seconds."""
    info = _tcp_info(sock)
    if len(info) < _FIRST.size:
        return False
    _, _, retransmits, probes, unacknowledged, last_answer = _FIRST.unpack_from(info)
    # One probe may just be on its way: they are up to two minutes apart.
    asked = (unacknowledged > 0 and retransmits > 0) or probes > 1
    return bool(asked and last_answer >= silence * 1000)


def bound_flight(sock: socket.socket) -> bool:
    """Bound the bytes in flight to a peer on the same host or a fast network; return False for others.

    By itself the kernel lets megabytes wait on such a connection, though a fraction fills the line; they fall
    out of the processor's cache while they wait. The bound makes large all-reduces between two containers of
    one machine take 0.4 to 0.7 of the time. For a distant peer the kernel knows best. The handshake before it
    has measured the round trip.
    """
    info = _tcp_info(sock)
    if len(info) < _SHORTEST.size or not 0 < _SHORTEST.unpack(info)[0] <= _NEAR:
        return False
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _FLIGHT_BOUND)
    return True


def _tcp_info(sock: Stream) -> bytes:
    """Return the kernel's counters; none if it has none: not Linux, or the socket is closed."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SHORTEST.size)
    except (OSError, AttributeError):
        return b""
