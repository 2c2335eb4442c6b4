"""SQLite's write-ahead log, read before SQLite reads it.

SQLite takes a log up to the last commit that precedes the first frame whose checksum is wrong, and says
nothing about the rest. That is right for a write that a crash has cut short, and a silent loss for anything
else; `inspect` tells the two apart. See https://www.sqlite.org/fileformat2.html#walformat for the format.

The rule. Every transaction is synced before it is acknowledged and before the next one is written. So a
crash can spoil the last transaction only, and only if it was not acknowledged. The log is *torn* where it
ends short, or where a frame of the current generation is wrong, if nothing acknowledged and no later
transaction lies behind that place: the rest is dropped, with a copy and a log line. In every other case
something that was acknowledged is gone: the log is *damaged* and refused.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import mul
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
    """How far a log was acknowledged, as far as is known."""

    salts: bytes
    """Of the generation of the log; empty if no frame was acknowledged since the last checkpoint."""
    end: int
    """Offset behind the last acknowledged commit of that generation."""


@dataclass(frozen=True, slots=True)
class Log:
    """A usable log."""

    salts: bytes = b""
    """Of its generation; empty if there is none."""
    end: int = 0
    """Offset behind the last complete commit; 0 if there is none."""
    torn: int = 0
    """Bytes of the current generation behind `end`: what a crash has left of an unfinished write."""
    pages: dict[int, int] = field(default_factory=dict)
    """Where the latest version of each page begins in the log, up to `end`."""


def inspect(path: Path, acknowledged: Acknowledged | None) -> Log:
    """Reads a log.

    Args:
        path: The log; it need not exist.
        acknowledged: What is known to have been acknowledged; None if nothing is known.

    Raises:
        StoreDamagedError: Something that was acknowledged is missing or altered; names the first offset.
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
        raise _damaged(path, 0, "the header of the log is wrong")
    return _Reading(path, content, magic == _BIG, page_size, salts, (stored[0], stored[1])).judge(
        acknowledged
    )


def following_commit(descriptor: int, end: int, page_size: int) -> tuple[bytes, int]:
    """Finds the commit that was just written behind the one that ended at `end`, without any check.

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
    """Returns the salts of the current generation of a log; empty if it has no header."""
    head = os.pread(descriptor, HEADER, 0)
    return _LOG_HEAD.unpack(head)[4] if len(head) == HEADER else b""


def latest_pages(descriptor: int, end: int, page_size: int) -> dict[int, bytes]:
    """Returns the latest version of each page of a log that this process has written, up to `end`."""
    pages = {}
    for at in range(HEADER, end, FRAME_HEADER + page_size):
        frame = os.pread(descriptor, FRAME_HEADER + page_size, at)
        pages[int.from_bytes(frame[:4], "big")] = frame[FRAME_HEADER:]
    return pages


@dataclass
class _Reading:
    """A log whose header is right."""

    path: Path
    content: bytes
    big: bool
    page_size: int
    salts: bytes
    start: Checksum

    def judge(self, acknowledged: Acknowledged | None) -> Log:
        """Tells how much of the log counts, or that it is damaged."""
        pages: dict[int, int] = {}
        unfinished: dict[int, int] = {}
        end = right = 0
        for number, page, committed in self._right_frames():
            unfinished[page] = self._offset(number) + FRAME_HEADER
            right = number + 1
            if committed:
                pages |= unfinished
                unfinished.clear()
                end = self._offset(right)
        place = min(self._offset(right), len(self.content))
        extent = self._extent(right)
        if acknowledged is not None and acknowledged.salts == self.salts and acknowledged.end > end:
            raise _damaged(
                self.path,
                place,
                f"it was acknowledged up to offset {acknowledged.end}, and is right up to {place} only",
            )
        if self._later_transaction(right):
            raise _damaged(self.path, place, "a later transaction follows")
        if acknowledged is None and self._whole_frames(extent) > right:
            raise _damaged(
                self.path,
                place,
                "the checksum of a complete frame is wrong, and without the commit marker nobody knows "
                "whether it was acknowledged",
            )
        return Log(self.salts, end, max(0, extent - (end or HEADER)), pages)

    def _offset(self, number: int) -> int:
        return HEADER + number * (FRAME_HEADER + self.page_size)

    def _whole_frames(self, extent: int) -> int:
        return max(0, extent - HEADER) // (FRAME_HEADER + self.page_size)

    def _right_frames(self) -> Iterator[tuple[int, int, bool]]:
        chain = self.start
        for number in range(self._whole_frames(len(self.content))):
            page, size, right, chain = self._check(number, chain)
            if not right:
                return
            yield number, page, size > 0

    def _check(self, number: int, before: Checksum) -> tuple[int, int, bool, Checksum]:
        """Checks a frame against its predecessor's checksum; returns page, size, verdict and own checksum."""
        at = self._offset(number)
        page, size, salts, first, second = _FRAME_HEAD.unpack_from(self.content, at)
        right = salts == self.salts and page > 0
        if right:
            body = memoryview(self.content)[at + FRAME_HEADER : at + FRAME_HEADER + self.page_size]
            computed = _checksum(self.content[at : at + 8] + bytes(body), self.big, before)
            right = computed == (first, second)
        return page, size, right, (first, second)

    def _stored(self, number: int) -> Checksum:
        if number < 0:
            return self.start
        _, _, _, first, second = _FRAME_HEAD.unpack_from(self.content, self._offset(number))
        return first, second

    def _extent(self, right: int) -> int:
        """Returns where the bytes of this generation end; behind them may be those of earlier ones."""
        extent, number = self._offset(right), right
        while (at := self._offset(number)) < len(self.content):
            salts = self.content[at + 8 : at + 16]
            # The last frame may be too short to tell whose it is.
            if salts == self.salts or len(salts) < 8:
                extent = self._offset(number + 1)
            number += 1
        return min(extent, len(self.content))

    def _later_transaction(self, first: int) -> bool:
        """Tells whether a frame that is right by itself follows a commit among those from `first` on."""
        committed = False
        for number in range(first, self._whole_frames(len(self.content))):
            _, size, right, _ = self._check(number, self._stored(number - 1))
            if right and committed:
                return True
            # The wrong frame may be the one that commits; what its header says is all there is to go by.
            at = self._offset(number)
            committed |= size > 0 and self.content[at + 8 : at + 16] == self.salts
        return False


def _checksum(content: bytes, big: bool, before: Checksum) -> Checksum:
    """Continues SQLite's checksum over `content`, whose length is a multiple of 8.

    SQLite adds pairs of words: `s0 += x + s1; s1 += y + s0`, modulo 2**32. That is linear, so the sum over
    many pairs is a scalar product with constant weights, which Python computes far quicker than the loop.
    """
    count = len(content) // 4
    first, second, carry = _weights(count)
    words = struct.unpack(f"{'>' if big else '<'}{count}I", content)
    s0, s1 = before
    (a, b), (c, d) = carry
    return (
        (a * s0 + b * s1 + sum(map(mul, first, words))) & _MASK,
        (c * s0 + d * s1 + sum(map(mul, second, words))) & _MASK,
    )


_Matrix = tuple[tuple[int, int], tuple[int, int]]
_known_weights: dict[int, tuple[tuple[int, ...], tuple[int, ...], _Matrix]] = {}


def _weights(count: int) -> tuple[tuple[int, ...], tuple[int, ...], _Matrix]:
    """Returns what each of `count` words adds to either half, and what the sum before them becomes."""
    if count not in _known_weights:
        first, second = [0] * count, [0] * count
        # Columns of A**k, where one pair (x, y) takes (s0, s1) to A (s0, s1) + (x, x + y).
        a, b, c, d = 1, 0, 0, 1
        for at in range(count - 2, -1, -2):
            first[at], first[at + 1] = (a + b) & _MASK, b
            second[at], second[at + 1] = (c + d) & _MASK, d
            a, b, c, d = (a + b) & _MASK, (a + 2 * b) & _MASK, (c + d) & _MASK, (c + 2 * d) & _MASK
        _known_weights[count] = (tuple(first), tuple(second), ((a, b), (c, d)))
    return _known_weights[count]


def _damaged(path: Path, offset: int, reason: str) -> StoreDamagedError:
    return StoreDamagedError(
        f"{path} is damaged at offset {offset}: {reason}. Acknowledged changes are missing or altered, so it "
        "is not used, and nothing was changed. Restore the directory from a copy; or move it away to begin "
        "anew."
    )
