"""Turns the bytes of one connection into frames, and puts payloads where the mailbox wants them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

from dmesh.collectives.transport.frames import (
    EAGER_LIMIT,
    HEADER_SIZE,
    SIGNATURE_LIMIT,
    Frame,
    Kind,
    parse_header,
)
from dmesh.collectives.transport.mailbox import Mailbox
from dmesh.collectives.transport.records import Landing
from dmesh.collectives.transport.secure import Stream
from dmesh.errors import CollectiveError

_STAGE: Final = 128 * 1024
_READ_AT_ONCE: Final = 4 * 1024 * 1024
# Takes the bytes that nobody wants. What is in it means nothing, so all connections may share it.
_SCRATCH: Final = memoryview(bytearray(256 * 1024))


class Progress(enum.Enum):
    """How a read ended."""

    MORE = enum.auto()
    """Read again when the socket can be read from."""
    STALLED = enum.auto()
    """There is no room for the next frame; read again when there is."""
    ENDED = enum.auto()
    """The connection ended, cleanly if a goodbye has come."""


class FrameReader:
    """Reads the frames of a peer that has proven who it is.

    Headers and small payloads go through a stage, so that many come with one system call; a large payload is
    read straight into the posted memory, together with the header that follows it.

    Args:
        sock: The connection, non-blocking.
        peer: Who sends.
        mailbox: Where channels' frames go.
        on_goodbye: Called with the GOODBYE frame.
        only_goodbye: The other side may say nothing else: it is the one that listens here.
    """

    def __init__(
        self,
        sock: Stream,
        peer: int,
        mailbox: Mailbox,
        on_goodbye: Callable[[Frame], None],
        *,
        only_goodbye: bool = False,
    ) -> None:
        self._socket = sock
        self._peer = peer
        self._mailbox = mailbox
        self._on_goodbye = on_goodbye
        self._only_goodbye = only_goodbye
        self._stage = memoryview(bytearray(HEADER_SIZE + SIGNATURE_LIMIT if only_goodbye else _STAGE))
        self._start = 0
        self._end = 0
        self._frame: Frame | None = None  # complete but for its payload, and not yet taken
        self._landing: Landing | None = None
        self._landed = 0
        self._control: bytearray | None = None
        self._said_goodbye = False

    def read(self) -> Progress:
        """Reads what there is, up to a limit that leaves other connections their turn.

        Raises:
            CollectiveError: The peer breaks the protocol.
            OSError: The connection is broken.
        """
        budget = _READ_AT_ONCE
        while budget > 0:
            if not self._parse():
                return Progress.STALLED
            try:
                count = self._receive()
            except (BlockingIOError, InterruptedError):
                return Progress.MORE
            if count == 0:
                return Progress.ENDED
            budget -= count
        return Progress.MORE if self._parse() else Progress.STALLED

    def _receive(self) -> int:
        landing = self._landing
        if landing is None:
            self._compact()
            count = self._socket.recv_into(self._stage[self._end :])
            self._end += count
            return count
        # The stage is empty, or it would have gone into the landing.
        rest = landing.size - self._landed
        self._start = self._end = 0
        with landing.guard:
            view = landing.view
            target = _SCRATCH[:rest] if view is None else view[self._landed :]
            # After a large payload's piece most likely the next one comes, which is not to go through the
            # stage.
            large = landing.receive is not None and landing.receive.view.nbytes > EAGER_LIMIT
            ahead = self._stage[:HEADER_SIZE] if large else self._stage
            count = self._socket.recvmsg_into([target, ahead])[0]
        payload = min(count, len(target))
        self._end = count - payload
        self._fill(payload)
        return count

    def _compact(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._stage[self._start : self._end])
            self._stage[: len(rest)] = rest
            self._start, self._end = 0, len(rest)

    def _parse(self) -> bool:
        """Takes all that is complete in the stage; False if there is no room for a frame."""
        while True:
            if self._landing is not None:
                if self._start == self._end:
                    return True
                self._copy(self._landing)
                continue
            if self._frame is None:
                self._frame = self._next_frame()
                if self._frame is None:
                    return True
            if not self._take(self._frame):
                return False
            self._frame = None

    def _next_frame(self) -> Frame | None:
        available = self._end - self._start
        if available < HEADER_SIZE:
            return None
        frame, signature_length = parse_header(self._stage, self._start)
        if self._said_goodbye or (self._only_goodbye and frame.kind is not Kind.GOODBYE):
            raise CollectiveError(f"a {frame.kind.name} frame came where none may come")
        size = HEADER_SIZE + signature_length
        if available < size:
            return None
        if signature_length:
            signature = bytes(self._stage[self._start + HEADER_SIZE : self._start + size])
            frame = frame._replace(signature=signature)
        self._start += size
        return frame

    def _take(self, frame: Frame) -> bool:
        kind = frame.kind
        if kind is Kind.DATA or kind is Kind.CHUNK:
            landing = self._mailbox.accept(self._peer, frame)
            if landing is None:
                return False
            self._begin(landing)
        elif kind is Kind.CONTROL:
            self._control = bytearray(frame.length)
            self._begin(Landing(frame.length, memoryview(self._control)))
        elif kind is Kind.GOODBYE:
            self._said_goodbye = True
            self._on_goodbye(frame)
        else:
            return self._mailbox.notice(self._peer, frame)
        return True

    def _begin(self, landing: Landing) -> None:
        self._landing = landing
        self._landed = 0
        if landing.size == 0:
            self._fill(0)

    def _copy(self, landing: Landing) -> None:
        count = min(self._end - self._start, landing.size - self._landed)
        with landing.guard:
            view = landing.view
            if view is not None:
                view[self._landed : self._landed + count] = self._stage[self._start : self._start + count]
        self._start += count
        self._fill(count)

    def _fill(self, count: int) -> None:
        landing = self._landing
        assert landing is not None
        self._landed += count
        if self._landed < landing.size:
            return
        self._landing = None
        if self._control is not None:
            message, self._control = bytes(self._control), None
            self._mailbox.control(self._peer, message)
        else:
            self._mailbox.landed(landing)
