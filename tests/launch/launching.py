"""A `dmesh run` as a real process, read line by line."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import IO

import psutil

DMESH = (sys.executable, "-c", "import sys; from dmesh.cli import main; sys.exit(main())")
PATIENCE = 90.0
"""Seconds; the machine may be busy, and nothing here waits this long unless it is broken."""


@dataclass
class Launch:
    """A `dmesh run` under way."""

    process: subprocess.Popen[bytes]
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    _arrivals: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    _readers: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for pipe, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            if pipe is None:  # the test has the other end
                self._arrivals.put(None)
                continue
            thread = threading.Thread(target=self._read, args=(pipe, lines))
            thread.start()
            self._readers.append(thread)

    def _read(self, pipe: IO[bytes], lines: list[str]) -> None:
        for line in pipe:
            lines.append(line.decode("utf-8", "replace").rstrip("\n"))
            self._arrivals.put(lines[-1])
        self._arrivals.put(None)

    def expect(self, text: str, times: int = 1) -> list[str]:
        """Waits for lines that contain `text`; each line is seen once."""
        found: list[str] = []
        ends = 0
        while len(found) < times:
            line = self._arrivals.get(timeout=PATIENCE)
            if line is None:
                ends += 1
                assert ends < 2, f"it ended without {text!r}: {self.out} {self.err}"
            elif text in line:
                found.append(line)
        return found

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
            assert not reader.is_alive(), "somebody still holds the launcher's output"
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self.process.kill()
        self.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
