"""Standard input of a rank on another host: read here, written there, one chunk under way at a time."""

from __future__ import annotations

import os
import selectors
from typing import IO

from dmesh.launcher.frames import Frame
from dmesh.launcher.outbox import Outbox

_CHUNK = 1 << 16


class InputReader:
    """Passes the launcher's standard input on to the agent of a rank.

    Args:
        descriptor: Standard input.
        selector: Watches it.
        outbox: To the agent.
        rank: Whose input it is.
    """

    def __init__(self, descriptor: int, selector: selectors.BaseSelector, outbox: Outbox, rank: int) -> None:
        self._descriptor = descriptor
        self._selector = selector
        self._outbox = outbox
        self._rank = rank
        self._watched = False
        self._over = False
        self.on_taken()

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._descriptor

    def on_taken(self) -> None:
        """Take note that the last chunk has reached the rank."""
        if self._over:
            return
        if not _may_read(self._descriptor):
            self._end()
        elif not self._watched:
            self._selector.register(self, selectors.EVENT_READ, self)
            self._watched = True

    def read(self) -> None:
        """Pass one chunk on."""
        self._stop_watching()
        try:
            data = os.read(self._descriptor, _CHUNK) if _may_read(self._descriptor) else b""
        except OSError:  # the terminal is gone
            data = b""
        if data:
            self._outbox.send(Frame("input", self._rank, data))
        else:
            self._end()

    def close(self) -> None:
        """Read no more."""
        self._over = True
        self._stop_watching()

    def _end(self) -> None:
        self._over = True
        self._outbox.send(Frame("input", self._rank))

    def _stop_watching(self) -> None:
        if self._watched:
            self._selector.unregister(self)
            self._watched = False


def _may_read(descriptor: int) -> bool:
    """Return whether reading would not stop this process, as it does a terminal's job in the background."""
    try:
        return not os.isatty(descriptor) or os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


class InputWriter:
    """Writes the launcher's input to a client's standard input.

    Args:
        pipe: The client's standard input.
        selector: Says when there is room.
        outbox: To the launcher.
        rank: The client.
    """

    def __init__(self, pipe: IO[bytes], selector: selectors.BaseSelector, outbox: Outbox, rank: int) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._selector = selector
        self._outbox = outbox
        self._rank = rank
        self._data = b""
        self._watched = False

    def write(self, data: bytes) -> None:
        """Take the next chunk; an empty one is the end."""
        if not data:
            self.close()
            return
        self._data += data
        self.read()

    def read(self) -> None:
        """Write as much as there is room for, and say so when all of it is written."""
        if self._pipe.closed:
            return
        try:
            self._data = self._data[os.write(self._pipe.fileno(), self._data) :]
        except BlockingIOError:
            pass
        except OSError:  # the client reads no more
            self._data = b""
        self._watch(bool(self._data))
        if not self._data:
            self._outbox.send(Frame("taken", self._rank))

    def close(self) -> None:
        """Write no more."""
        self._watch(False)
        if not self._pipe.closed:
            self._pipe.close()

    def _watch(self, wanted: bool) -> None:
        if wanted != self._watched:
            self._watched = wanted
            if wanted:
                self._selector.register(self._pipe, selectors.EVENT_WRITE, self)
            else:
                self._selector.unregister(self._pipe)
