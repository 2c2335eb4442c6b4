"""Commit marker: a small file beside the database that records which commits were acknowledged.

Its first sector says how many commits were acknowledged and how far into the log they reach. It is
overwritten, without a sync of its own, after every commit: the kernel keeps it when the process is killed,
and after a power failure it may be behind the log, never ahead of it. A log or a database with fewer commits
than the marker says has lost some, however intact it looks.

Behind that are checksums of the database's pages, as of the latest checkpoint. They prove nothing that the
checksums of the records do not prove; they tell *where* a database is damaged. Pages that the log has too are
not looked at, which is why the checksums may be brought up to date in place, before the log is overwritten.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Container, Iterable
from pathlib import Path

from dmesh_server.store import wal

_MAGIC = b"dmeshSL1"
_HEAD = struct.Struct("<8sQ8sQI")
_SUMS = 512
"""Offset of the first page's checksum: behind the sector that is overwritten at every commit."""
_AT_ONCE = 256
"""Pages read at once when the whole database is looked at."""


class CommitMarker:
    """An open commit marker.

    Attributes:
        commits: Number of acknowledged commits.
        acknowledged: Acknowledged part of the log.
        fault: Reason for which the marker cannot be trusted; None if it can.
    """

    def __init__(self, path: Path) -> None:
        """Open the commit marker; a missing one is made at the first commit.

        Raises:
            OSError: It cannot be opened.
        """
        self.path = path
        self.commits = 0
        self.acknowledged = wal.Acknowledged(b"", 0)
        self._descriptor = -1
        try:
            self._open(0)
        except FileNotFoundError:
            self.fault: str | None = "there was none"
        else:
            self.fault = self._read()

    def note(self, commits: int, salts: bytes, end: int) -> None:
        """Record a synced commit.

        Args:
            commits: Number of commits with this one.
            salts: Generation of the log.
            end: Offset in the log behind this commit, bytes.

        Raises:
            OSError: It cannot be written.
        """
        # What is synced is synced, whether or not it can be noted.
        self.commits, self.acknowledged = commits, wal.Acknowledged(salts, end)
        head = _HEAD.pack(_MAGIC, commits, salts, end, 0)[:-4]
        os.pwrite(self._opened(), head + zlib.crc32(head).to_bytes(4, "little"), 0)
        self.fault = None

    def note_pages(self, sums: Iterable[tuple[int, int]]) -> None:
        """Record the checksums of pages, by number from 1, and sync the commit marker.

        Raises:
            OSError: It cannot be written.
        """
        # Neighbours go into one write.
        run, first = array("I"), 0
        for page, checksum in sorted(sums):
            if run and page != first + len(run):
                os.pwrite(self._opened(), run.tobytes(), _SUMS + 4 * (first - 1))
                del run[:]
            if not run:
                first = page
            run.append(checksum)
        if run:
            os.pwrite(self._opened(), run.tobytes(), _SUMS + 4 * (first - 1))
        self.sync()

    def sync(self) -> None:
        """Wait until the commit marker is on the disk.

        Raises:
            OSError: It cannot be written.
        """
        os.fsync(self._opened())

    def note_all_pages(self, sums: dict[int, int]) -> None:
        """Replace all checksums with the checksums of a database's pages, and sync the commit marker.

        Raises:
            OSError: It cannot be written.
        """
        os.ftruncate(self._opened(), _SUMS)
        self.note_pages(sums.items())

    def altered_pages(self, sums: dict[int, int], besides: Container[int]) -> list[int]:
        """Return the pages, by number from 1, whose checksums differ from the recorded ones.

        Args:
            sums: The checksums of a database's pages.
            besides: Pages that may differ, because the log has newer versions.

        Raises:
            OSError: The commit marker cannot be read.
        """
        if self._descriptor < 0:
            return []
        size = os.fstat(self._descriptor).st_size
        noted = array("I", os.pread(self._descriptor, max(0, size - _SUMS) // 4 * 4, _SUMS))
        # A checksum of 0 was most likely never noted.
        return [
            page
            for page, checksum in enumerate(noted, 1)
            if checksum and page not in besides and sums.get(page) != checksum
        ]

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, flags: int) -> None:
        self._descriptor = os.open(self.path, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _opened(self) -> int:
        if self._descriptor < 0:
            self._open(os.O_CREAT)
        return self._descriptor

    def _read(self) -> str | None:
        head = os.pread(self._descriptor, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return f"it ends at offset {len(head)}"
        magic, commits, salts, end, checksum = _HEAD.unpack(head)
        if magic != _MAGIC or zlib.crc32(head[:-4]) != checksum:
            return "its checksum is wrong at offset 0"
        self.commits, self.acknowledged = commits, wal.Acknowledged(salts, end)
        return None


def page_sums(database: Path, page_size: int) -> dict[int, int]:
    """Return the checksum of each page of a database, by number from 1.

    Never while this process has the database open: closing a file ends all of a process's locks on it.

    Raises:
        OSError: The database cannot be read.
    """
    sums: dict[int, int] = {}
    with database.open("rb", buffering=0) as file:
        while content := file.read(page_size * _AT_ONCE):
            for at in range(0, len(content), page_size):
                sums[len(sums) + 1] = zlib.crc32(content[at : at + page_size])
    return sums
