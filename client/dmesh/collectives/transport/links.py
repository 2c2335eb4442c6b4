"""One proven connection between two peers: a queue that is written, a reader that reads, and how both end."""

from __future__ import annotations

import selectors
import socket
from typing import Protocol

from dmesh.collectives.transport.engine import Engine
from dmesh.collectives.transport.frames import Frame, Kind
from dmesh.collectives.transport.mailbox import Mailbox
from dmesh.collectives.transport.reader import FrameReader, Progress
from dmesh.collectives.transport.records import Send
from dmesh.collectives.transport.secure import SecureSocket, Stream
from dmesh.collectives.transport.sendqueue import Pushed, SendQueue
from dmesh.collectives.transport.silence import is_silent
from dmesh.errors import CollectiveError

_SCRATCH_SIZE = 256 * 1024


class LinkOwner(Protocol):
    """Who is told what becomes of a link; on the engine's thread."""

    def link_goodbye(self, link: Link, frame: Frame) -> None:
        """The other side said goodbye on this link."""

    def link_ended(self, link: Link, reason: str) -> None:
        """The connection ended or broke, with or without a goodbye before."""


class Link:
    """A connection to a peer, on which one side sends all frames but the goodbye.

    `send` may be used by any thread; frames wait in the queue until the connection is there. Everything else
    happens on the engine's thread.

    Args:
        engine: Waits for the socket.
        mailbox: Where frames go, and which is told what has been sent.
        peer: The other side's rank.
        dialed: True if this client connects to the peer and sends, False if the peer does.
        owner: Who is told of its end.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox, peer: int, dialed: bool, owner: LinkOwner) -> None:
        self.peer = peer
        self.dialed = dialed
        self.ended = False
        self.goodbye = False
        self._engine = engine
        self._mailbox = mailbox
        self._owner = owner
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
        """Queues a frame, and writes at once what the socket takes."""
        if self._queue.put(frame, send, payload):
            result = None
            try:
                result = self._push()
            finally:
                if result is not Pushed.EMPTY:
                    self._engine.call(self._flush)  # after Ctrl-C, too: the engine's thread is safe from it

    def withdraw(self, send: Send) -> bool:
        """Stops using the memory of a send; see `Wire.withdraw`."""
        return self._queue.withdraw(send)

    def adopt(self, sock: Stream) -> None:
        """The connection is there: begins to read, and to write what has waited."""
        self._socket = sock
        self._reader = FrameReader(sock, self.peer, self._mailbox, self._on_goodbye, only_goodbye=self.dialed)
        self._queue.attach(sock)
        self._watch(selectors.EVENT_READ)
        self._read_on(sock)
        self._flush()

    def resume(self) -> None:
        """There is room again for what the peer sends."""
        if self._socket is not None and not self._events & selectors.EVENT_READ:
            self._on_readable()

    def check(self, silence: float) -> None:
        """Ends the link if the peer's host has not answered for `silence` seconds."""
        if self._socket is not None and is_silent(self._socket, silence):
            self._end(f"its host has not answered for {silence:g} s")

    def leave(self, farewell: Frame) -> None:
        """Says goodbye after what is queued; the link ends when the peer has closed its side, too."""
        self._queue.finish(farewell)
        self._leaving = True
        if self._socket is not None:
            self._watch(self._events | selectors.EVENT_READ)
            self._flush()

    def drop(self) -> None:
        """Closes the connection at once, without telling the owner."""
        self.ended = True
        self._queue.detach()
        sock, self._socket = self._socket, None
        if sock is not None:
            self._engine.watch(sock, 0, self._on_ready)
            sock.close()

    def _on_goodbye(self, frame: Frame) -> None:
        self.goodbye = True
        self._owner.link_goodbye(self, frame)

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
                progress = Progress.MORE if sock.recv(_SCRATCH_SIZE) else Progress.ENDED
            else:
                progress = reader.read()
        except (BlockingIOError, InterruptedError):
            progress = Progress.MORE
        except OSError as error:
            self._end(f"its connection broke ({error.strerror or error})")
            return
        except CollectiveError as error:
            self._end(f"it broke the protocol: {error}")
            return
        if self._socket is None:
            return  # what was read led to the link's end
        if progress is Progress.ENDED:
            self._end("its connection was closed without a goodbye")
        elif progress is Progress.STALLED:
            self._watch(self._events & ~selectors.EVENT_READ)
        else:
            self._watch(self._events | selectors.EVENT_READ)
            self._read_on(sock)

    def _read_on(self, sock: Stream) -> None:
        """Reads again after the others' turn, if something has come of which the selector does not know."""
        if isinstance(sock, SecureSocket) and sock.hidden and not self._reads_on:
            self._reads_on = True
            self._engine.call(self._on_hidden)

    def _on_hidden(self) -> None:
        self._reads_on = False
        if self._events & selectors.EVENT_READ and self._socket is not None:
            self._on_readable()

    def _flush(self) -> None:
        """Writes on the engine's thread, and goes on when the socket takes more."""
        sock = self._socket
        if sock is None:
            return
        result = self._push()
        if result is Pushed.BROKEN:
            # Whatever has come before the connection broke still counts, a goodbye above all.
            self._watch(self._events & ~selectors.EVENT_WRITE)
            self._on_readable()
            if self._socket is not None and not self.goodbye:
                self._end("its connection broke")
            return
        if result is Pushed.BLOCKED:
            self._watch(self._events | selectors.EVENT_WRITE)
            return
        self._watch(self._events & ~selectors.EVENT_WRITE)
        if result is Pushed.ENDED:
            try:
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                self._end("its connection broke")

    def _push(self) -> Pushed:
        result, finished = self._queue.push()
        for send in finished:
            self._mailbox.sent(send)
        return result

    def _watch(self, events: int) -> None:
        if self._socket is not None and events != self._events:
            self._events = events
            self._engine.watch(self._socket, events, self._on_ready)

    def _end(self, reason: str) -> None:
        if self.ended:
            return
        self.drop()
        self._owner.link_ended(self, reason)


def goodbye(other_follows: bool) -> Frame:
    """Makes the last frame of a link; `other_follows` if the sender's other link says goodbye on its own."""
    return Frame(Kind.GOODBYE, sequence=int(other_follows))
