"""Check of SQLite's write-ahead log, before SQLite opens it.

SQLite takes a log up to the last commit that precedes the first wrong frame, and silently drops the rest.
That is right for a write that a crash has cut short. If acknowledged commits are dropped, the database holds
fewer commits than the commit marker says, so most damage needs no look at the log. Two cases need one:

- The commit marker is not synced: after a power failure it may be older than the log. If a later transaction
  follows a wrong frame, the log is damaged: every transaction is synced before the next one is written, so a
  crash alone never leaves that.
- The commit marker is lost or damaged. Then a complete frame that is wrong is refused.

See https://www.sqlite.org/fileformat2.html#walformat for the format.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

from dmesh_server.store.base import StoreDamagedError

HEADER = 32
"""Bytes before the first frame."""
FRAME_HEADER = 24
"""Bytes of a frame before its page."""

_LITTLE, _BIG = 0x377F0682, 0x377F0683
_VERSION = 3007000
_MASK = 0xFFFFFFFF
_LOG_HEAD = struct.Struct(">IIII8sII")
_FRAME_HEAD = struct.Struct(">II8sII")

Checksum = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Acknowledged part of a log."""

    salts: bytes
    """Of the generation of the log; empty if no frame was acknowledged since the last checkpoint."""
    end: int
    """Offset behind the last acknowledged commit of that generation."""


@dataclass(frozen=True, slots=True)
class Log:
    """Result of the check: the part of a log that SQLite will use, and the rest."""

    salts: bytes = b""
    """Of its generation; empty if there is none."""
    end: int = 0
    """Offset behind the last complete commit; 0 if there is none."""
    right: int = 0
    """Offset of the first frame that is wrong or incomplete."""
    torn: int = 0
    """Bytes of the current generation behind `end`: what a crash has left of an unfinished write."""
    pages: frozenset[int] = field(default_factory=frozenset)
    """Pages of which the log has a version, up to `end`."""


def inspect(path: Path, *, marked: bool) -> Log:
    """Check a log.

    Args:
        path: The log; it need not exist.
        marked: Whether a commit marker tells how many commits were acknowledged.

    Raises:
        StoreDamagedError: A frame is wrong, and not because a crash has cut the last write short.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Log()
    if len(content) < HEADER:
        # Shorter than anything that was ever synced before it was used.
        return Log(torn=len(content))
    magic, version, page_size, _, salts, *stored = _LOG_HEAD.unpack_from(content)
    if (
        magic not in (_LITTLE, _BIG)
        or version != _VERSION
        or not 512 <= page_size <= 65536
        or page_size & (page_size - 1)
        or _checksum(content[:24], magic == _BIG, (0, 0)) != (stored[0], stored[1])
    ):
        raise damaged(path, 0, "the header of the log is wrong")
    return _Reading(path, content, magic == _BIG, page_size, salts, (stored[0], stored[1])).judge(
        marked=marked
    )


def following_commit(descriptor: int, end: int, page_size: int) -> tuple[bytes, int]:
    """Find the commit that was just written behind the one that ended at `end`; nothing is checked.

    Args:
        descriptor: Of the log.
        end: Offset behind the previous commit of this generation; 0 for the first one.
        page_size: Of the database.

    Returns:
        The salts of the generation, and the offset behind the commit.
    """
    at = end or HEADER
    while True:
        head = os.pread(descriptor, FRAME_HEADER, at)
        if len(head) < FRAME_HEADER:
            raise OSError(f"the log ends at offset {at}, within what was just written")
        at += FRAME_HEADER + page_size
        _, pages, salts, _, _ = _FRAME_HEAD.unpack(head)
        if pages:
            return salts, at


def salts_of(descriptor: int) -> bytes:
    """Return the salts of the current generation of a log; empty if it has no header."""
    head = os.pread(descriptor, HEADER, 0)
    return _LOG_HEAD.unpack(head)[4] if len(head) == HEADER else b""


def latest_pages(descriptor: int, end: int, page_size: int) -> dict[int, bytes]:
    """Return the latest version of each page of a log that this process has written, up to `end`."""
    pages = {}
    for at in range(HEADER, end, FRAME_HEADER + page_size):
        frame = os.pread(descriptor, FRAME_HEADER + page_size, at)
        pages[int.from_bytes(frame[:4], "big")] = frame[FRAME_HEADER:]
    return pages


def damaged(path: Path, offset: int, reason: str) -> StoreDamagedError:
    """Return the refusal of a damaged log."""
    return StoreDamagedError(
        f"{path} is damaged at offset {offset}: {reason}. Acknowledged changes are missing or altered, so it "
        "is not used, and nothing was changed. Restore the directory from a copy; or move it away to begin "
        "anew."
    )


@dataclass
class _Reading:
    """A log whose header is right."""

    path: Path
    content: bytes
    big: bool
    page_size: int
    salts: bytes
    start: Checksum

    def judge(self, *, marked: bool) -> Log:
        """Return the part that SQLite will use; refuse the log if another transaction follows it."""
        chain, number, end = self.start, 0, 0
        pages: set[int] = set()
        unfinished: set[int] = set()
        while number < self._frames:
            page, size, right, chain = self._check(number, chain)
            if not right:
                break
            number += 1
            unfinished.add(page)
            if size:
                pages |= unfinished
                unfinished.clear()
                end = self._offset(number)
        if self._later_transaction(number):
            raise damaged(self.path, self._offset(number), "a later transaction follows")
        extent = self._extent(number)
        if not marked and self._offset(number + 1) <= extent:
            raise damaged(
                self.path,
                self._offset(number),
                "the checksum of a complete frame is wrong, and without the commit marker nobody knows "
                "whether it was acknowledged",
            )
        place = min(self._offset(number), len(self.content))
        return Log(self.salts, end, place, max(0, extent - (end or HEADER)), frozenset(pages))

    @property
    def _frames(self) -> int:
        return (len(self.content) - HEADER) // (FRAME_HEADER + self.page_size)

    def _offset(self, number: int) -> int:
        return HEADER + number * (FRAME_HEADER + self.page_size)

    def _check(self, number: int, before: Checksum) -> tuple[int, int, bool, Checksum]:
        """Check a frame against its predecessor's checksum; return page, size, verdict and own checksum."""
        at = self._offset(number)
        page, size, salts, first, second = _FRAME_HEAD.unpack_from(self.content, at)
        right = salts == self.salts and page > 0
        if right:
            body = self.content[at + FRAME_HEADER : at + FRAME_HEADER + self.page_size]
            right = _checksum(self.content[at : at + 8] + body, self.big, before) == (first, second)
        return page, size, right, (first, second)

    def _extent(self, right: int) -> int:
        """Return the end offset of this generation's bytes; those of earlier ones may follow."""
        extent, number = self._offset(right), right
        while (at := self._offset(number)) < len(self.content):
            salts = self.content[at + 8 : at + 16]
            # The last frame may be too short to tell whose it is.
            if salts == self.salts or len(salts) < 8:
                extent = self._offset(number + 1)
            number += 1
        return min(extent, len(self.content))

    def _later_transaction(self, first: int) -> bool:
        """Return whether, from frame `first` on, a correct frame follows a commit."""
        committed = False
        before = self._stored(first - 1) if first else self.start
        for number in range(first, self._frames):
            _, size, right, before = self._check(number, before)
            if right and committed:
                return True
            # The wrong frame may be the one that commits; what its header says is all there is to go by.
            at = self._offset(number)
            committed |= size > 0 and self.content[at + 8 : at + 16] == self.salts
        return False

    def _stored(self, number: int) -> Checksum:
        _, _, _, first, second = _FRAME_HEAD.unpack_from(self.content, self._offset(number))
        return first, second


def _checksum(content: bytes, big: bool, before: Checksum) -> Checksum:
    """Continue SQLite's checksum over `content`, whose length is a multiple of 8."""
    words = struct.unpack(f"{'>' if big else '<'}{len(content) // 4}I", content)
    s0, s1 = before
    pairs = iter(words)
    for x, y in zip(pairs, pairs, strict=True):
        s0 = s0 + x + s1 & _MASK
        s1 = s1 + y + s0 & _MASK
    return s0, s1
