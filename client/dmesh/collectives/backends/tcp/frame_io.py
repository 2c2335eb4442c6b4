"""Reading and writing of frames on one connection, straight from and into the callers' memory."""

from __future__ import annotations

import enum
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from dmesh.collectives.backends.tcp.channel import Destination, Send
from dmesh.collectives.backends.tcp.frames import (
    CHUNK_LIMIT,
    HEADER_SIZE,
    SIGNATURE_LIMIT,
    Frame,
    Kind,
    parse_header,
)
from dmesh.collectives.backends.tcp.tls import Stream
from dmesh.collectives.backends.tcp.transport import MessageQueue
from dmesh.errors import CollectiveError

_BUFFER_SIZE: Final = 128 * 1024
_READ_AT_ONCE: Final = 4 * 1024 * 1024
_FRAMES_AT_ONCE: Final = 16
_WRITES_AT_ONCE: Final = 4
# Takes unwanted bytes. Its contents mean nothing, so all connections share it.
_DISCARD: Final = memoryview(bytearray(256 * 1024))


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
            header = self.frame._replace(length=end - self.offset).encode()
            self.pending = [header, self.send.data[self.offset : end]]
            self.offset = end


class SendQueue:
    """Frames in order; the chunks of large payloads take turns between them.

    May be used by any thread. Its lock is held while the socket is written to, which never blocks; so once a
    payload is withdrawn, its memory is not being read any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[_Entry] = deque()
        self._last: Frame | None = None
        self._socket: Stream | None = None
        self._blocked = False
        self._ended = False
        self._interrupted = False

    def put(self, frame: Frame, send: Send | None = None, payload: bytes | None = None) -> bool:
        """Append a frame; return True if `write` should be called for it now."""
        with self._lock:
            if self._ended or self._last is not None or (send is not None and send.withdrawn):
                return False
            data = payload if send is None else send.data
            pieces = [] if frame.kind is Kind.CHUNK else [frame.encode(), *([data] if data else [])]
            self._entries.append(_Entry(frame, send, pieces))
            return self._socket is not None and not self._blocked

    def finish(self, last: Frame) -> None:
        """Append the last frame; call `write` for it."""
        with self._lock:
            if self._last is None:
                self._last = last
                self._blocked = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def attach(self, sock: Stream) -> None:
        """Set the socket to write to."""
        with self._lock:
            self._socket = sock

    def detach(self) -> None:
        """End the queue and drop its frames; the socket is not used after it returns."""
        with self._lock:
            self._ended = True
            self._socket = None
            self._entries.clear()

    def write(self) -> tuple[WriteResult, Iterable[Send]]:
        """Write as much as the socket takes; return the outcome, and the sends that are complete."""
        finished: list[Send] = []
        with self._lock:
            result = self._write(finished)
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

    def _write(self, finished: list[Send]) -> WriteResult:
        sock = self._socket
        if sock is None:
            return WriteResult.EMPTY
        if self._interrupted:
            return WriteResult.BROKEN
        for _ in range(_WRITES_AT_ONCE):
            if not self._entries:
                if self._last is None:
                    return WriteResult.EMPTY
                if self._ended:
                    return WriteResult.ENDED
                self._ended = True
                self._entries.append(_Entry(self._last, None, [self._last.encode()]))
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
        if self._entries or (self._last is not None and not self._ended):
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
