"""Transforms that take batches apart and make others: of their rows' keys, where those are known."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.data.batching import NoRows, cut, rows_of
from dmesh.data.cursors import ELEMENTS, Cursor, Keys, join
from dmesh.data.elements import TensorSpec, empty_like
from dmesh.data.iterator import Reader
from dmesh.data.pipeline import UNKNOWN_CARDINALITY, Reading, Transform, uneven
from dmesh.errors import DatasetError
from dmesh.structure import map_structure

__all__ = ["Rebatch", "Split", "Unbatch"]


class _Rows(Transform):
    """A transform for which the rows of the source's elements are what counts."""

    def sample(self) -> Any:
        """Returns an element of the source."""
        return self.source.sample()

    def spec(self) -> Any:
        """Returns the source's specs, with any number of rows."""
        return uneven(self.source.spec())

    def batch_size(self) -> int | None:
        """Returns None: the numbers differ."""
        return None

    def cardinality(self) -> int:
        """Returns that it is not known, unless the source is empty or has no end."""
        number = self.source.cardinality()
        return number if number in (0, -1) else UNKNOWN_CARDINALITY


@dataclass(frozen=True, eq=False)
class Unbatch(_Rows):
    """Makes an element of each row."""

    def open(self, reading: Reading) -> Cursor:
        """Returns a cursor over the rows."""
        return _Unbatching(self.source.open(reading), "unbatch()")

    def sample(self) -> Any:
        """Returns a row."""
        reading = Reading.begin(self, counts=False)
        reader = Reader(self.open(reading))
        try:
            for row in reader:
                return row
        finally:
            reader.close()
            reading.close()
        return super().sample()

    def spec(self) -> Any:
        """Returns the source's specs with one dimension less."""
        return map_structure(lambda leaf: TensorSpec(leaf.shape[1:], leaf.dtype), self.source.spec())


@dataclass(frozen=True, eq=False)
class Rebatch(_Rows):
    """Makes batches of given sizes of rows, across the borders of the source's batches.

    With two batches of 7 rows and the sizes 2, 2, 2, 1 it yields those, twice. A last batch has what is left.
    """

    sizes: tuple[int, ...]
    """Sizes, one after the other, and again from the first one; some may be 0, not all."""
    drop_remainder: bool = False
    """True if a last batch of fewer rows is left out."""

    def open(self, reading: Reading) -> Cursor:
        """Returns a cursor that takes pieces of batches."""
        return _Rebatching(self.source.open(reading), self)

    def none(self) -> Any:
        """Returns a batch of no rows."""
        return empty_like(self.spec())


@dataclass(frozen=True, eq=False)
class Split(_Rows):
    """Cuts each element into a given number of parts of equal size, the last ones smaller, some empty."""

    parts: int
    """Number of parts."""

    def open(self, reading: Reading) -> Cursor:
        """Returns a cursor over the parts."""
        return _Splitting(self.source.open(reading), self.parts)

    def cardinality(self) -> int:
        """Returns the number of parts."""
        number = self.source.cardinality()
        return number if number < 0 else number * self.parts


class _Batched(Cursor):
    """Cursor that takes batches apart: their rows' keys where they are known, else the batches themselves.

    Args:
        source: Cursor over batches.
        what: Name of the operation, for messages.
    """

    def __init__(self, source: Cursor, what: str) -> None:
        self._source = source
        self._what = what
        self._rows = source.table.rows
        self._reader = None if self._rows is not None else Reader(source)
        self.table = ELEMENTS if self._rows is None else source.table
        self.lazy = source.lazy and self._rows is not None

    def next_batch(self) -> Any:
        """Returns the next batch, or its keys; None at the end."""
        if self._reader is not None:
            return next(self._reader, None)
        for keys in self._source.keys(1):
            return keys
        return None

    def length(self, batch: Any) -> int:
        """Returns the number of rows of a batch."""
        return len(batch) if self._reader is None else rows_of(batch, self._what)

    def cut(self, batch: Any, start: int, stop: int) -> Any:
        """Returns some rows of a batch."""
        if self._rows is None:
            return cut(batch, start, stop)
        if isinstance(batch, NoRows):
            return batch
        if start < min(stop, len(batch)):
            return batch[start:stop]
        gather, like = self._rows.gather, batch[:1]
        return NoRows(lambda: cut(gather(like), 0, 0))

    def state(self) -> Any:
        """Returns the position after the last batch."""
        return self._source.state() if self._reader is None else self._reader.position()

    def restore(self, state: Any) -> None:
        """Moves the source."""
        if self._reader is None:
            self._source.restore(state)
        else:
            self._reader.move(state)

    def close(self) -> None:
        """Ends the source's reading."""
        self._source.close()


class _InParts(_Batched):
    """Cursor over parts of one batch after the other."""

    _before: Any = None
    """Position before the batch that is under way."""
    _batch: Any = None
    _total = _given = 0
    """Number of parts of the batch that is under way, and how many of them have been read."""

    def _begin(self) -> bool:
        """Read the next batch; return whether there is one."""
        self._before = super().state()
        self._batch = self.next_batch()
        self._total = self._given = 0
        return self._batch is not None

    def _advance(self, count: int) -> tuple[int, int]:
        """Return the bounds of the next parts, which count as read from now on."""
        start, self._given = self._given, min(self._given + count, self._total)
        return start, self._given

    def state(self) -> list[Any]:
        """Returns the position before the batch that is under way, and the number of its parts so far."""
        if self._given == self._total:
            return [super().state(), 0]
        return [self._before, self._given]

    def restore(self, state: Any) -> None:
        """Moves into a batch."""
        before, given = state
        super().restore(before)
        self.skip(given)


class _Unbatching(_InParts):
    """Cursor of `Unbatch`."""

    def __init__(self, source: Cursor, what: str) -> None:
        super().__init__(source, what)
        if self._rows is not None:
            self.table = self._rows

    def keys(self, count: int) -> Keys:
        """Returns keys of rows of one batch."""
        while self._given == self._total:
            if not self._begin():
                return []
            self._total = self.length(self._batch)
        start, stop = self._advance(count)
        if self._reader is None:
            keys: Keys = self._batch[start:stop]
            return keys
        return [
            map_structure(lambda leaf, row=row: leaf[row, ...], self._batch) for row in range(start, stop)
        ]


class _Splitting(_InParts):
    """Cursor of `Split`."""

    def __init__(self, source: Cursor, parts: int) -> None:
        super().__init__(source, "splitting a batch among replicas")
        self._parts = parts

    def keys(self, count: int) -> list[Any]:
        """Returns parts of one batch; of several, if these are whole and cost nothing."""
        if self._given == self._total:
            if self.lazy and count >= self._parts:
                batches = self._source.keys(count // self._parts)
                return [part for batch in batches for part in self._cut(batch, 0, self._parts)]
            if not self._begin():
                return []
            self._total = self._parts
        return self._cut(self._batch, *self._advance(count))

    def _cut(self, batch: Any, start: int, stop: int) -> list[Any]:
        size = math.ceil(self.length(batch) / self._parts)
        return [self.cut(batch, part * size, (part + 1) * size) for part in range(start, stop)]


class _Rebatching(_Batched):
    """Cursor of `Rebatch`."""

    def __init__(self, source: Cursor, node: Rebatch) -> None:
        super().__init__(source, "rebatch()")
        self._node = node
        self._turn = 0
        """Index of the next size."""
        self._waiting: deque[tuple[Any, Any, int]] = deque()
        """Batches that have been read: the position before each, its rows, and how many of them are gone."""
        self._available = 0
        self._begun = False
        self._like: Any = None
        """First batch that was read: it shows what no rows look like."""

    def keys(self, count: int) -> list[Any]:
        """Returns the next batch."""
        wanted = self._node.sizes[self._turn]
        while self._available < wanted or not self._begun:
            if not self._read():
                rest = 0 if self._node.drop_remainder else self._available
                return [self._take(rest)] if rest else []
        self._turn = (self._turn + 1) % len(self._node.sizes)
        return [self._take(wanted)]

    def _read(self, gone: int = 0) -> bool:
        before = super().state()
        batch = self.next_batch()
        if batch is None:
            return False
        if self._like is None:
            self._begun, self._like = True, batch
        self._waiting.append((before, batch, gone))
        self._available += self.length(batch) - gone
        return True

    def _take(self, rows: int) -> Any:
        """Returns the first rows; there must be as many."""
        self._available -= rows
        taken = []
        while rows:
            before, batch, gone = self._waiting.popleft()
            end = min(gone + rows, self.length(batch))
            if end < self.length(batch):
                self._waiting.appendleft((before, batch, end))
            if end > gone:
                taken.append(self.cut(batch, gone, end))
            rows -= end - gone
        if not taken:
            return self._nothing()
        if len(taken) == 1:
            return taken[0]
        return join(taken) if self._reader is None else map_structure(_concatenated, *taken)

    def _nothing(self) -> Any:
        if self._like is not None:
            return self.cut(self._like, 0, 0)
        # Restored at the end of the source.
        return self._node.none() if self._rows is None else NoRows(self._node.none)

    def state(self) -> list[Any]:
        """Returns the turn, the position before the first batch that is not used up, and its rows so far."""
        before, _, gone = self._waiting[0] if self._waiting else (super().state(), None, 0)
        return [self._turn, self._begun, before, gone]

    def restore(self, state: Any) -> None:
        """Moves into a batch."""
        self._turn, self._begun, before, gone = state
        super().restore(before)
        if gone:
            self._read(gone)


def _concatenated(*leaves: NDArray[Any]) -> NDArray[Any]:
    try:
        return np.concatenate(leaves)
    except ValueError as error:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise DatasetError(f"rebatch() cannot put rows of different shapes together: {shapes}") from error
