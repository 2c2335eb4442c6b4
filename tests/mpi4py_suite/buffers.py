"""Buffer arguments of MPI calls as arrays: `data`, `(data, datatype)`, `(data, count, datatype)`, ..."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np


class Absent(Exception):
    """dmesh has no counterpart of what a test calls."""


class Sentinel:
    """A constant of MPI that stands where a buffer would."""


IN_PLACE, BOTTOM = Sentinel(), Sentinel()


class Datatype:
    """Basic datatype: a dtype."""

    def __init__(self, code: str | None) -> None:
        self.dtype = None if code is None else np.dtype(code)
        self.size = self.extent = 0 if self.dtype is None else self.dtype.itemsize

    def Get_size(self) -> int:
        return self.size

    def _derived(self, *_: Any) -> Any:
        raise Absent("derived datatypes")

    Create_indexed_block = _derived
    Create_struct = classmethod(_derived)


@dataclass
class Buffer:
    """A buffer, and which parts of it take part."""

    data: Any
    """Flat array."""
    counts: Any = None
    """Elements, or elements of each rank; None for all."""
    starts: Any = None
    """First elements of the ranks' blocks, or the distance between them; None if they follow each other."""

    def simple(self) -> Any:
        """Return the elements of a call without blocks."""
        return self.data if self.counts is None else self.data[: self.counts]

    def rows(self, size: int) -> Any:
        """Return the blocks of equal lengths, one a row; a count is that of one block."""
        length = self.data.size // size if self.counts is None else self.counts
        return self.data[: size * length].reshape(size, length)

    def blocks(self, size: int) -> list[Any]:
        """Return the blocks of the ranks."""
        counts = self.counts
        if counts is None:
            each, more = divmod(self.data.size, size)
            counts = [each + (at < more) for at in range(size)]
        elif isinstance(counts, int):
            counts = [counts] * size
        starts = self.starts
        if starts is None:
            starts = list(accumulate(counts, initial=0))[:-1]
        elif isinstance(starts, int):
            starts = [starts * at for at in range(size)]
        return [self.data[start : start + count] for start, count in zip(starts, counts, strict=True)]


def lengths(blocks: list[Any]) -> list[int]:
    return [len(block) for block in blocks]


def fill(blocks: list[Any], joined: Any) -> None:
    """Copy an array to blocks, one after the other."""
    ends = list(accumulate(lengths(blocks)))
    for block, part in zip(blocks, np.split(joined, ends[:-1]), strict=True):
        block[...] = part


def parse(given: Any) -> Buffer:
    """Return the buffer that an argument describes."""
    if not isinstance(given, tuple | list):
        return Buffer(_memory(given))
    data, *rest = given
    datatype = rest.pop() if rest and isinstance(rest[-1], Datatype | str) else None
    return Buffer(_memory(data, datatype), *_layout(rest))


def parse_bytes(given: Any) -> Buffer:
    """Return the buffer of `Alltoallw`, which has a datatype for each rank, in bytes."""
    data, *rest, datatypes = given
    if data is BOTTOM:
        raise Absent("derived datatypes")
    counts, starts = _layout(rest)
    return Buffer(
        _memory(data).view(np.uint8), [n * t.size for n, t in zip(counts, datatypes, strict=True)], starts
    )


def _layout(rest: list[Any]) -> Any:
    return rest[0] if len(rest) == 1 and isinstance(rest[0], tuple) else rest


def _memory(data: Any, datatype: Datatype | str | None = None) -> Any:
    """Return memory as a flat array.

    The tests wrap arrays in objects that export DLPack or pretend to be on a GPU. They are unwrapped, because
    their elements are counted and cut here.
    """
    array = np.empty(0, np.uint8) if data is None else np.asarray(getattr(data, "array", data))
    if isinstance(data, bytes | bytearray):
        array = np.frombuffer(data, np.uint8)
    dtype = np.dtype(datatype) if isinstance(datatype, str) else getattr(datatype, "dtype", None)
    flat = array.reshape(-1)
    return flat if dtype is None or dtype == flat.dtype else flat.view(dtype)
