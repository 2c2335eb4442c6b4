"""Connections of frames with the peers: what waits to be sent, and how both ends close a connection.

The thread that sends a frame writes it itself, as far as the socket takes it; the loop's thread dials, reads,
and writes the rest.
"""

from __future__ import annotations

import enum
import itertools
import secrets
import selectors
import socket
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dmesh._locks import Lock
from dmesh.collectives.backends.tcp.channel import Send
from dmesh.collectives.backends.tcp.event_loop import EventLoop
from dmesh.collectives.backends.tcp.frames import CHUNK_LIMIT, HEADER, VERSION, Frame, Kind
from dmesh.collectives.backends.tcp.message_queue import FrameReader, MessageQueue, ReadResult
from dmesh.collectives.backends.tcp.routes import LocalAddress, Route, pack
from dmesh.collectives.backends.tcp.sockets import is_silent, measure
from dmesh.collectives.backends.tcp.tls import Stream
from dmesh.errors import CollectiveError
from dmesh.security.secure_socket import SecureSocket

_DISCARD_SIZE: Final = 256 * 1024
_FRAMES_AT_ONCE: Final = 16
_WRITES_AT_ONCE: Final = 4


def encode(frame: Frame) -> bytes:
    """Return the header and the signature of a frame, which the payload follows; see `frames`."""
    kind, group, sequence, step, length, signature, generation = frame
    header = HEADER.pack(VERSION, kind, len(signature), step, generation, group, sequence, length)
    return header + signature


class WriteResult(enum.Enum):
    """Outcome of a write."""

    EMPTY = enum.auto()  # everything is written
    BLOCKED = enum.auto()  # something is left; write again when the socket is writable
    ENDED = enum.auto()  # everything is written, and nothing will follow
    BROKEN = enum.auto()


@dataclass(slots=True, eq=False)
class _Entry:
    """A queued frame, or the chunks of a large payload, of which one at a time is loaded."""

    frame: Frame
    send: Send | None
    pending: list[bytes | memoryview]
    """Loaded bytes that are not written yet."""
    offset: int = 0

    @property
    def complete(self) -> bool:
        """True if nothing follows the loaded frame."""
        return self.frame.kind is not Kind.CHUNK or self.offset == self.frame.length

    def load(self) -> None:
        """Load the next chunk, unless a frame is loaded."""
        if not self.pending:
            assert self.send is not None
            end = min(self.offset + CHUNK_LIMIT, self.frame.length)
            header = encode(self.frame._replace(length=end - self.offset))
            self.pending = [header, self.send.data[self.offset : end]]
            self.offset = end


class SendQueue:
    """Frames in order; the chunks of large payloads take turns between them.

    May be used by any thread. Its lock is held while the socket is written to, which never blocks; so once a
    payload is withdrawn, its memory is not being read any more.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: deque[_Entry] = deque()
        self._last: Frame | None = None
        self._socket: Stream | None = None
        self._blocked = False
        self._closed = False
        self._interrupted = False

    def put(self, frame: Frame, send: Send | None = None, payload: bytes | None = None) -> bool:
        """Append a frame; return True if `write` should be called for it now."""
        with self._lock:
            if self._closed or self._last is not None or (send is not None and send.withdrawn):
                return False
            data = payload if send is None else send.data
            pieces = [] if frame.kind is Kind.CHUNK else [encode(frame), *([data] if data else [])]
            self._entries.append(_Entry(frame, send, pieces))
            return self._socket is not None and not self._blocked

    def finish(self, last: Frame) -> None:
        """Append the last frame; call `write` for it."""
        with self._lock:
            if self._last is None:
                self._last = last
                self._blocked = False

    @property
    def idle(self) -> bool:
        """True if nothing waits to be written."""
        return not self._entries

    def attach(self, sock: Stream) -> None:
        """Set the socket to write to."""
        with self._lock:
            self._socket = sock

    def detach(self) -> Stream | None:
        """End the queue and drop its frames; return the socket, which is not used any more."""
        with self._lock:
            self._closed = True
            sock, self._socket = self._socket, None
            self._entries.clear()
            return sock

    def write(self) -> tuple[WriteResult, Iterable[Send]]:
        """Write as much as the socket takes; return the outcome, and the sends that are complete."""
        finished: list[Send] = []
        with self._lock:
            result = self._write_frames(finished)
            self._blocked = result is WriteResult.BLOCKED
        return result, finished

    def withdraw(self, send: Send) -> bool:
        """Stop using the memory of a send; return True if all of it has been written, or will be from a copy.

        A frame that may have been begun must be finished, or the other side would lose its place in the
        stream.
        """
        with self._lock:
            send.withdrawn = True
            entry = next((entry for entry in self._entries if entry.send is send), None)
            if entry is None:
                return send.written
            entry.send = None
            if entry.pending:
                entry.pending = [bytes(piece) for piece in entry.pending]
                complete = entry.complete
                entry.frame = entry.frame._replace(length=entry.offset)
                return complete
            self._entries.remove(entry)
            return False

    def _write_frames(self, finished: list[Send]) -> WriteResult:
        sock = self._socket
        if sock is None:
            return WriteResult.EMPTY
        if self._interrupted:
            return WriteResult.BROKEN
        for _ in range(_WRITES_AT_ONCE):
            if not self._entries:
                if self._last is None:
                    return WriteResult.EMPTY
                if self._closed:
                    return WriteResult.ENDED
                self._closed = True
                self._entries.append(_Entry(self._last, None, [encode(self._last)]))
            pieces: list[bytes | memoryview] = []
            size = 0
            for entry in itertools.islice(self._entries, _FRAMES_AT_ONCE):
                entry.load()
                pieces += entry.pending
                size += sum(map(len, entry.pending))
                if size >= CHUNK_LIMIT:
                    break
            # Ctrl-C may interrupt anything below. Nobody knows then how much was written, and the stream must
            # not go on: the peer would take the wrong bytes for data.
            self._interrupted = True
            try:
                written = sock.sendmsg(pieces)
            except (BlockingIOError, InterruptedError):
                self._interrupted = False
                return WriteResult.BLOCKED
            except OSError:
                return WriteResult.BROKEN
            self._advance(written, finished)
            self._interrupted = False
        if self._entries or (self._last is not None and not self._closed):
            return WriteResult.BLOCKED
        return WriteResult.EMPTY if self._last is None else WriteResult.ENDED

    def _advance(self, written: int, finished: list[Send]) -> None:
        while written:
            entry = self._entries[0]
            while entry.pending and written >= len(entry.pending[0]):
                written -= len(entry.pending.pop(0))
            if entry.pending:
                if written:
                    entry.pending[0] = memoryview(entry.pending[0])[written:]
                return
            self._entries.popleft()
            if not entry.complete:
                self._entries.append(entry)
            elif entry.send is not None:
                entry.send.written = True
                finished.append(entry.send)


class Connection(SendQueue):
    """A connection with a peer, on which the dialing side sends all frames but the goodbye.

    `send` and `withdraw` may be used by any thread; frames wait in the queue until the socket is there.
    Everything else happens on the loop's thread.
    """

    def __init__(self, owner: PeerConnections, peer: int, dialed: bool) -> None:
        super().__init__()
        self.peer = peer
        self.dialed = dialed
        self.ended = False
        self.goodbye = False
        self._owner = owner
        self._loop = owner.loop
        self._reader: FrameReader | None = None
        self._events = 0
        self._leaving = False
        self._reads_on = False

    @property
    def is_open(self) -> bool:
        """True while there is a proven connection."""
        return self._socket is not None

    def send(self, frame: Frame, send: Send | None = None, payload: bytes | None = None) -> None:
        """Queue a frame, and write at once as much as the socket takes."""
        if self.put(frame, send, payload):
            result = None
            try:
                result = self._write()
            finally:
                if result is not WriteResult.EMPTY:
                    self._loop.call(self._flush)  # after Ctrl-C, too: the loop's thread is safe from it

    def adopt(self, sock: Stream) -> None:
        """Take the proven socket: begin to read, and to write the queued frames."""
        self._reader = FrameReader(
            sock, self.peer, self._owner.message_queue, self._on_goodbye, only_goodbye=self.dialed
        )
        self.attach(sock)
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
        self.finish(Frame(Kind.GOODBYE, sequence=int(other_follows)))
        self._leaving = True
        if self._socket is not None:
            self._watch(self._events | selectors.EVENT_READ)
            self._flush()

    def drop(self) -> None:
        """Close the connection at once, without telling the owner."""
        self.ended = True
        if (sock := self.detach()) is not None:
            self._loop.watch(sock, 0, self._on_ready)
            sock.close()

    def _on_goodbye(self, frame: Frame) -> None:
        self.goodbye = True
        self._owner.on_goodbye(self, frame)

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
        result, finished = self.write()
        for send in finished:
            send.channel.sent(send)
        return result

    def _watch(self, events: int) -> None:
        if self._socket is not None and events != self._events:
            self._events = events
            self._loop.watch(self._socket, events, self._on_ready)

    def _end(self, reason: str) -> None:
        if not self.ended:
            self.drop()
            self._owner.on_ended(self, reason)


class PeerConnections:
    """Connections of a client with its peers, and the frame sender of its message queue; see `FrameSender`.

    A connection that sends is made at the first need, and dialed by the loop's thread, on which `dial` takes
    it. `on_goodbye` takes the other side's goodbye on a connection, `on_ended` the reason for which one has
    ended or broken, also after a goodbye.
    """

    def __init__(
        self,
        rank: int,
        unexpected_limit: int,
        loop: EventLoop,
        dial: Callable[[Connection], None],
        on_goodbye: Callable[[Connection, Frame], None],
        on_ended: Callable[[Connection, str], None],
    ) -> None:
        self.message_queue = MessageQueue(rank, self, unexpected_limit)
        # These belong to the loop's thread, but any thread may look up a connection; new ones are made under
        # the lock.
        self.dialed: dict[int, Connection] = {}
        self.accepted: dict[int, Connection] = {}
        self.closing = False
        """True if no more connections are made."""
        self.loop = loop
        self.on_goodbye = on_goodbye
        self.on_ended = on_ended
        self._lock = Lock()
        self._dial = dial

    def __iter__(self) -> Iterator[Connection]:
        return itertools.chain(tuple(self.dialed.values()), tuple(self.accepted.values()))

    def transmit(self, peer: int, frame: Frame, send: Send | None, payload: bytes | None = None) -> None:
        """Send a frame; see `FrameSender.transmit`."""
        connection = self.dialed.get(peer) or self.to(peer)
        if connection is not None:
            connection.send(frame, send, payload)

    def withdraw(self, send: Send) -> bool:
        """Stop using a send's memory; see `FrameSender.withdraw`."""
        if (connection := self.dialed.get(send.peer)) is not None:
            return connection.withdraw(send)
        send.withdrawn = True  # nothing has ever been sent to that peer
        return False

    def resume(self, peer: int) -> None:
        """Read a peer again; see `FrameSender.resume`."""
        if (connection := self.accepted.get(peer)) is not None:
            self.loop.call(connection.resume)

    def to(self, peer: int) -> Connection | None:
        """Return the connection that carries frames to a peer, a new one if need be; None if it is gone."""
        gone = self.message_queue.gone(peer)
        with self._lock:
            connection = self.dialed.get(peer)
            if connection is None and not gone and not self.closing:
                made = connection = self.dialed[peer] = Connection(self, peer, dialed=True)
                self.loop.call(lambda: self._dial(made))
        return connection

    def accept(self, peer: int, sock: Stream) -> None:
        """Take a connection that a peer has dialed. The loop's thread."""
        connection = self.accepted[peer] = Connection(self, peer, dialed=False)
        connection.adopt(sock)

    def drop(self, peers: Collection[int]) -> None:
        """Close the connections with former processes of peers. The loop's thread."""
        with self._lock:
            dropped = [found.pop(peer, None) for found in (self.dialed, self.accepted) for peer in peers]
        for connection in dropped:
            if connection is not None:
                connection.drop()

    def close(self) -> bool:
        """Make no more connections; return False if that was decided before."""
        with self._lock:
            first, self.closing = not self.closing, True
        return first


OnDialed = Callable[[Stream | None, str], None]
"""Takes a dialed connection, or None and the problem."""


class Connector(ABC):
    """Makes dedicated connections of groups: a peer dials once, under a random number. For any thread.

    `call` runs an action on the thread that dials. `addresses` are those of this host's interfaces at which
    it listens; peers learn them as connections are made.
    """

    def __init__(
        self, call: Callable[[Callable[[], None]], None], addresses: Sequence[LocalAddress] = ()
    ) -> None:
        self.addresses = tuple(addresses)
        self.offer = pack(addresses)
        self._call = call
        self._lock = Lock()
        self._expected: dict[int, int] = {}
        self._arrived: dict[int, Stream] = {}
        self._made: dict[int, weakref.WeakSet[Stream]] = {}
        self._closed = False

    def expect(self, peer: int) -> int:
        """Let a peer dial once; return the number (not 0) by which it must ask. Ends with `claim`."""
        with self._lock:
            while (number := secrets.randbits(32)) == 0 or number in self._expected:
                continue
            self._expected[number] = peer
            return number

    def claim(self, number: int) -> Stream | None:
        """Return and forget the connection that has come under a number; None if none has."""
        with self._lock:
            peer, sock = self._expected.pop(number, None), self._arrived.pop(number, None)
            if peer is not None and sock is not None:
                self._made.setdefault(peer, weakref.WeakSet()).add(sock)
            return sock

    def is_expected(self, peer: int, number: int) -> bool:
        """Return whether a peer may come in under a number."""
        with self._lock:
            return self._expected.get(number) == peer and number not in self._arrived and not self._closed

    def admit(self, number: int, sock: Stream) -> None:
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

    def dial(self, peer: int, number: int, on_dialed: OnDialed, route: Route | None = None) -> None:
        """Connect to a peer that expects it under a number; `on_dialed` is called once, on any thread.

        A `route` is tried first.
        """

        def dialed(sock: Stream | None, problem: str) -> None:
            if sock is not None:
                with self._lock:
                    self._made.setdefault(peer, weakref.WeakSet()).add(sock)
            on_dialed(sock, problem)

        self._call(lambda: self._dial(peer, number, dialed, route))

    def links(self) -> dict[int, tuple[int, int]]:
        """Return round trip (microseconds) and rate (bytes per second) of the connections with each peer."""
        with self._lock:
            made = {peer: list(streams) for peer, streams in self._made.items()}
        found = {}
        for peer, streams in made.items():
            measured = [one for one in map(measure, streams) if one is not None]
            if measured:
                found[peer] = min(trip for trip, _ in measured), sum(rate for _, rate in measured)
        return found

    @abstractmethod
    def _dial(self, peer: int, number: int, on_dialed: OnDialed, route: Route | None) -> None:
        """Connect to a peer; see `dial`. The thread of `call`."""
