"""Frames that wait to be written to the other side, which may be slow."""

from __future__ import annotations

import os
import selectors
from collections import deque

from dmesh._locks import Lock
from dmesh.launcher.frames import Frame


class Outbox:
    """Queue of frames to one descriptor that does not block.

    Signal handlers and other threads may send, too: a sender that finds another one writing leaves the frame
    to that one, or to the next `watch`.

    Args:
        descriptor: Where to write; must not block.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: deque[bytes] = deque()
        self._writing = Lock()
        self._watched = False
        self.unsent = 0
        """Bytes that wait; exact where one thread sends."""
        self.closed = False
        """True once the reader has closed it; further frames are dropped."""

    @property
    def idle(self) -> bool:
        """True if nothing waits."""
        return not self._queue

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._descriptor

    def send(self, message: Frame) -> None:
        """Send a frame, or queue it."""
        self.send_raw(message.encode())

    def send_raw(self, data: bytes) -> None:
        """Send bytes, or queue them."""
        if not self.closed:
            self._queue.append(data)
            self.unsent += len(data)
            self.flush()

    def flush(self) -> None:
        """Write as much as there is room for."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            while self._queue and not self.closed:
                data = self._queue[0]
                written = os.write(self._descriptor, data)
                self.unsent -= written
                if written == len(data):
                    self._queue.popleft()
                else:
                    self._queue[0] = data[written:]
        except BlockingIOError:
            return
        except OSError:  # nobody reads it any more: what that means is found out at the other descriptor
            self.closed = True
            self._queue.clear()
        finally:
            self._writing.release()

    read = flush
    """A selector's event means that there is room."""

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Write what there is room for; have the selector say when there is room for the rest."""
        self.flush()
        wanted = bool(self._queue) and not self.closed
        if wanted != self._watched:
            self._watched = wanted
            if wanted:
                selector.register(self, selectors.EVENT_WRITE, self)
            else:
                selector.unregister(self)

    def close(self, selector: selectors.BaseSelector) -> None:
        """Drop what waits, and take no more."""
        with self._writing:  # so that no thread writes to the descriptor from now on
            self.closed = True
            self._queue.clear()
        self.watch(selector)
