"""Notices that files were replaced, so that tokens and certificates are renewed under a running process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dmesh._locks import Lock

_Signature = tuple[tuple[int, int, int, int] | None, ...]


class WatchedFiles:
    """Some files, of which one asks every now and then whether they have changed. Thread-safe.

    Looks at device, inode, size and time of modification: renaming a new file into place is noticed, and so
    is the change of a symbolic link on the way to it, as when an orchestrator replaces a mounted secret.
    """

    def __init__(
        self, paths: Iterable[Path], interval: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Notes how the files are now.

        Args:
            paths: The files; they need not exist.
            interval: Seconds within which `changed` looks at most once.
            clock: Monotonic seconds.
        """
        self._paths = tuple(paths)
        self._interval = interval
        self._clock = clock
        self._lock = Lock()
        self._looked_at = clock()
        self._signature = self._look()

    def changed(self) -> bool:
        """Returns whether a file changed since the last time this was True, or since the beginning."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at < self._interval:
                return False
            self._looked_at = now
            signature = self._look()
            if signature == self._signature:
                return False
            self._signature = signature
            return True

    def _look(self) -> _Signature:
        return tuple(_signature(path) for path in self._paths)


def _signature(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
