"""Output of many processes on one terminal: whole lines, each with its rank before it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from dmesh.launcher.folding import TracebackFolder

_LONGEST = 64 * 1024
"""Bytes of one line that are held back at most; a longer one comes out in pieces."""
_COLORS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red


class Output:
    """A file descriptor of the launcher, written without a buffer of its own."""

    def __init__(self, descriptor: int, environment: Mapping[str, str]) -> None:
        self._descriptor = descriptor
        self.colored = os.isatty(descriptor) and not environment.get("NO_COLOR")
        self.closed = False
        """True once the reader has closed it; further writes are dropped."""
        self.lines = 0
        """Number of lines written."""

    def write(self, data: bytes) -> None:
        """Write all of `data`."""
        self.lines += data.count(b"\n")
        view = memoryview(data)
        while view and not self.closed:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:  # somebody who shares the terminal made it non-blocking
                select.select([], [self._descriptor], [])
            except OSError:  # a closed pipe, a terminal that is gone
                self.closed = True


class StreamOutput(Output):
    """A text stream of this process, such as that of a notebook's cell, which is no file descriptor.

    Args:
        stream: Returns the stream: it may be another one while output is captured.
        colored: True if labels are to be colored.
    """

    def __init__(self, stream: Callable[[], TextIO], *, colored: bool = False) -> None:
        self._stream = stream
        self.colored = colored
        self.closed = False
        self.lines = 0

    def write(self, data: bytes) -> None:
        """Write all of `data`."""
        self.lines += data.count(b"\n")
        stream = self._stream()
        try:
            stream.write(data.decode("utf-8", "replace"))
            stream.flush()
        except (OSError, ValueError):  # a closed pipe, a closed stream
            self.closed = True


class LineLabeler:
    """Writer that puts `[rank] ` before each line of one stream of one client; nothing if the rank is None.

    Args:
        rank: The client.
        output: Where the lines go.
        on_line: Called with each line that comes, without its end.
        folder: Folds the tracebacks among them, if that is wanted.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        rank: int | None,
        output: Output,
        on_line: Callable[[bytes], None] | None = None,
        folder: TracebackFolder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        label = "" if rank is None else f"[{rank}] "
        if rank is not None and output.colored:
            label = f"\x1b[{_COLORS[rank % len(_COLORS)]}m[{rank}]\x1b[0m "
        self._label = label.encode()
        self._output = output
        self._on_line = on_line
        self._folder = folder
        self._clock = clock
        self._rest = b""

    @property
    def due(self) -> float | None:
        """Time at which `release` is due; None if nothing is held back."""
        return None if self._folder is None else self._folder.due

    def release(self) -> None:
        """Pass on the traceback that is held back, if any."""
        if self._folder is not None:
            self._write(self._folder.release())

    def feed(self, data: bytes) -> None:
        """Add output of the client; write whole lines, and keep an incomplete one."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > _LONGEST:
            lines.append(self._rest[:_LONGEST])
            self._rest = self._rest[_LONGEST:]
        self._emit(lines)

    def finish(self) -> None:
        """Pass on the last line, which has no end, with one."""
        if self._rest:
            self._emit([self._rest])
            self._rest = b""
        self.release()

    def _emit(self, lines: list[bytes]) -> None:
        self._write(lines if self._folder is None else self._folder.feed(lines, self._clock()))
        if self._on_line is not None:
            for line in lines:
                self._on_line(line)

    def _write(self, lines: list[bytes]) -> None:
        # One write for all, so that what another program writes to the same terminal falls between lines.
        if lines:
            self._output.write(b"".join(self._label + line + b"\n" for line in lines))
