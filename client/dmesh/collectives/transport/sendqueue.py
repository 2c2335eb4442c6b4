"""What waits to be written to one connection, straight from the callers' memory."""

from __future__ import annotations

import enum
import itertools
import threading
from collections import deque
from collections.abc import Iterable

from dmesh.collectives.transport.frames import CHUNK_LIMIT, Frame, Kind
from dmesh.collectives.transport.records import Send
from dmesh.collectives.transport.secure import Stream

_FRAMES_AT_ONCE = 16
_WRITES_AT_ONCE = 4


class Pushed(enum.Enum):
    """How a push ended."""

    EMPTY = enum.auto()
    """All is written."""
    BLOCKED = enum.auto()
    """Something is left; push again when the socket can be written to."""
    ENDED = enum.auto()
    """All is written, and nothing will follow."""
    BROKEN = enum.auto()
    """The connection is broken."""


class _Entry:
    """A frame, or the chunks of a large payload, of which one frame at a time is loaded."""

    __slots__ = ("frame", "offset", "pending", "send")

    def __init__(self, frame: Frame, payload: bytes | memoryview | None, send: Send | None) -> None:
        self.frame = frame
        self.send = send
        self.offset = 0
        self.pending: list[bytes | memoryview] = []
        if frame.kind is not Kind.CHUNK:
            self.pending.append(frame.encode())
            if payload:
                self.pending.append(memoryview(payload))

    @property
    def complete(self) -> bool:
        """True if nothing follows the frame that is loaded."""
        return self.frame.kind is not Kind.CHUNK or self.offset == self.frame.length

    def load(self) -> None:
        """Makes the next frame, unless one is loaded."""
        if not self.pending:
            assert self.send is not None
            end = min(self.offset + CHUNK_LIMIT, self.frame.length)
            header = self.frame._replace(length=end - self.offset).encode()
            self.pending = [header, self.send.data[self.offset : end]]
            self.offset = end


class SendQueue:
    """Frames in order, the chunks of large payloads in turns between them.

    May be used by any thread; its lock is held while a socket is written to, which never blocks, so that a
    withdrawn payload is not being read any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[_Entry] = deque()
        self._farewell: Frame | None = None
        self._socket: Stream | None = None
        self._blocked = False
        self._ended = False
        self._torn = False

    def put(self, frame: Frame, send: Send | None = None, payload: bytes | None = None) -> bool:
        """Appends a frame; True if `push` should be called for it now."""
        with self._lock:
            if self._ended or self._farewell is not None or (send is not None and send.withdrawn):
                return False
            self._entries.append(_Entry(frame, payload if send is None else send.data, send))
            return self._socket is not None and not self._blocked

    def finish(self, farewell: Frame) -> None:
        """Has `farewell` follow what is in the queue, as the last frame; call `push` for it."""
        with self._lock:
            if self._farewell is None:
                self._farewell = farewell
                self._blocked = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def attach(self, sock: Stream) -> None:
        """Says to which socket to write."""
        with self._lock:
            self._socket = sock

    def detach(self) -> list[Send]:
        """Ends the queue and drops what is in it; the socket is not used after it returns."""
        with self._lock:
            self._ended = True
            self._socket = None
            dropped = [entry.send for entry in self._entries if entry.send is not None]
            self._entries.clear()
            return dropped

    def push(self) -> tuple[Pushed, Iterable[Send]]:
        """Writes what the socket takes; returns how that ended, and the sends that are written."""
        finished: list[Send] = []
        with self._lock:
            result = self._push(finished)
            self._blocked = result is Pushed.BLOCKED
        return result, finished

    def withdraw(self, send: Send) -> bool:
        """Stops using the memory of a send; True if all of it has been written, or will be from a copy.

        A frame that may have been begun must be finished, or the other side would lose its place in the
        stream.
        """
        with self._lock:
            send.withdrawn = True
            for entry in self._entries:
                if entry.send is send:
                    break
            else:
                return send.written
            entry.send = None
            if entry.pending:
                entry.pending = [bytes(piece) for piece in entry.pending]
                complete = entry.complete
                entry.frame = entry.frame._replace(length=entry.offset)
                return complete
            self._entries.remove(entry)
            return False

    def _push(self, finished: list[Send]) -> Pushed:
        sock = self._socket
        if sock is None:
            return Pushed.EMPTY
        if self._torn:
            return Pushed.BROKEN
        for _ in range(_WRITES_AT_ONCE):
            if not self._entries:
                if self._farewell is None:
                    return Pushed.EMPTY
                if self._ended:
                    return Pushed.ENDED
                self._ended = True
                self._entries.append(_Entry(self._farewell, None, None))
            pieces: list[bytes | memoryview] = []
            size = 0
            for entry in itertools.islice(self._entries, _FRAMES_AT_ONCE):
                entry.load()
                pieces += entry.pending
                size += sum(map(len, entry.pending))
                if size >= CHUNK_LIMIT:
                    break
            # Ctrl-C may end what follows anywhere. Then nobody knows what the peer has got, and the stream
            # must not go on: the peer would take the wrong bytes for data.
            self._torn = True
            try:
                written = sock.sendmsg(pieces)
            except (BlockingIOError, InterruptedError):
                self._torn = False
                return Pushed.BLOCKED
            except OSError:
                return Pushed.BROKEN
            self._advance(written, finished)
            self._torn = False
        if self._entries or (self._farewell is not None and not self._ended):
            return Pushed.BLOCKED
        return Pushed.EMPTY if self._farewell is None else Pushed.ENDED

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
