"""Standard error of what leads to a host: ssh's or srun's own words, and the agent's."""

from __future__ import annotations

import os
import selectors
from collections import deque
from typing import IO

from dmesh.launcher.labels import Output

_CHUNK = 1 << 16
_MOST_LINES = 5
_LONGEST_LINE = 500


class ErrorOutput:
    """Keeps the last lines; shows all of them once that is wanted.

    Args:
        pipe: Its reading end.
        selector: Watches it.
    """

    def __init__(self, pipe: IO[bytes], selector: selectors.BaseSelector) -> None:
        os.set_blocking(pipe.fileno(), False)
        self.last: deque[str] = deque(maxlen=_MOST_LINES)
        """The last lines that are not empty."""
        self._pipe = pipe
        self._selector = selector
        self._label = b""
        self._output: Output | None = None
        self._rest = b""
        selector.register(pipe, selectors.EVENT_READ, self)

    def show(self, label: str, output: Output) -> None:
        """Show the lines from now on, with a label before each."""
        self._label, self._output = label.encode(), output

    def read(self) -> bool:
        """Take what there is, one chunk at most; return False when there is nothing now."""
        if self._pipe.closed:
            return False
        try:
            data = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _CHUNK):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            if line.strip():
                self.last.append(line.decode("utf-8", "replace").strip()[:_LONGEST_LINE])
        if lines and self._output is not None:
            self._output.write(b"".join(self._label + line.rstrip(b"\r") + b"\n" for line in lines))
        if not data:
            self._selector.unregister(self._pipe)
            self._pipe.close()
        return bool(data)

    def close(self) -> None:
        """Take what there is, and give the pipe up."""
        while self.read():
            pass
        if not self._pipe.closed:
            self._selector.unregister(self._pipe)
            self._pipe.close()
