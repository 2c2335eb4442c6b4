"""Transforms that split batches and make other ones; they work on the rows' keys if those are known."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.data.batching import NoRows, cut, rows_of
from dmesh.data.cursors import ELEMENTS, Cursor, Keys, join
from dmesh.data.elements import empty_like, reshaped
from dmesh.data.iterator import Reader
from dmesh.data.pipeline import UNKNOWN_CARDINALITY, Reading, Transform, static_rows, with_rows
from dmesh.errors import DatasetError
from dmesh.structure import map_structure

__all__ = ["Rebatch", "Split", "Unbatch"]


class _Rows(Transform):
    """A transform of the rows of the source's elements."""

    def sample(self) -> Any:
        """Return an element of the source."""
        return self.source.sample()

    def spec(self) -> Any:
        """Returns the source's specs, with any number of rows."""
        return with_rows(self.source.spec(), None)

    def batch_size(self) -> int | None:
        """Return None: the number of rows varies."""
        return None

    def cardinality(self) -> int:
        """Return UNKNOWN_CARDINALITY, unless the source is empty or infinite."""
        number = self.source.cardinality()
        return number if number in (0, -1) else UNKNOWN_CARDINALITY


@dataclass(frozen=True, eq=False)
class Unbatch(_Rows):
    """Splits each element into its rows."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor over the rows."""
        return _Unbatching(self.source.open(reading), "unbatch()")

    def sample(self) -> Any:
        """Return a row."""
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
        return map_structure(lambda leaf: reshaped(leaf, lambda own: own[1:]), self.source.spec())


@dataclass(frozen=True, eq=False)
class Rebatch(_Rows):
    """Makes batches of given sizes, across the boundaries of the source's batches.

    Two batches of 7 rows and the sizes 2, 2, 2, 1 yield batches of these sizes, twice. The last batch has the
    remaining rows.
    """

    sizes: tuple[int, ...]
    """Sizes, used in turn; some may be 0, but not all."""
    drop_remainder: bool = False
    """True to drop a last batch with fewer rows."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor over the new batches."""
        return _Rebatching(self.source.open(reading), self)

    def spec(self) -> Any:
        """Returns the source's specs, with the number of rows if all batches have the same."""
        source, size = self.source.spec(), self.sizes[0]
        rows = static_rows(source)
        same = set(self.sizes) == {size} and (self.drop_remainder or (rows is not None and rows % size == 0))
        return with_rows(source, size if same else None)

    def none(self) -> Any:
        """Return a batch without rows."""
        return empty_like(self.spec())


@dataclass(frozen=True, eq=False)
class Split(_Rows):
    """Splits each element into a given number of equal parts; the last ones may be smaller or empty."""

    parts: int
    """Number of parts."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor over the parts."""
        return _Splitting(self.source.open(reading), self.parts)

    def cardinality(self) -> int:
        """Return the number of parts."""
        number = self.source.cardinality()
        return number if number < 0 else number * self.parts


class _Batched(Cursor):
    """Cursor that splits batches: their rows' keys if known, else the batches themselves.

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
        """Return the next batch, or its keys; None at the end."""
        if self._reader is not None:
            return next(self._reader, None)
        for keys in self._source.keys(1):
            return keys
        return None

    def length(self, batch: Any) -> int:
        """Return the number of rows of a batch."""
        return len(batch) if self._reader is None else rows_of(batch, self._what)

    def cut(self, batch: Any, start: int, stop: int) -> Any:
        """Return some rows of a batch."""
        if self._rows is None:
            return cut(batch, start, stop)
        if isinstance(batch, NoRows):
            return batch
        if start < min(stop, len(batch)):
            return batch[start:stop]
        gather, like = self._rows.gather, batch[:1]
        return NoRows(lambda: cut(gather(like), 0, 0))

    def state(self) -> Any:
        """Return the position after the last batch."""
        return self._source.state() if self._reader is None else self._reader.position()

    def restore(self, state: Any) -> None:
        """Move the source."""
        if self._reader is None:
            self._source.restore(state)
        else:
            self._reader.move(state)

    def close(self) -> None:
        """End the source's reading."""
        self._source.close()


class _InParts(_Batched):
    """Cursor over parts of one batch after the other."""

    _before: Any = None
    """Position before the current batch."""
    _batch: Any = None
    _total = _given = 0
    """Number of parts of the current batch, and number of parts read."""

    def _begin(self) -> bool:
        """Read the next batch; return whether there is one."""
        self._before = super().state()
        self._batch = self.next_batch()
        self._total = self._given = 0
        return self._batch is not None

    def _advance(self, count: int) -> tuple[int, int]:
        """Return the bounds of the next parts, and mark them as read."""
        start, self._given = self._given, min(self._given + count, self._total)
        return start, self._given

    def state(self) -> list[Any]:
        """Return the position before the current batch, and the number of parts read."""
        if self._given == self._total:
            return [super().state(), 0]
        return [self._before, self._given]

    def restore(self, state: Any) -> None:
        """Move into a batch."""
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
        """Return keys of rows of one batch."""
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
        """Return parts of one batch; of several batches, if they are complete and cost nothing."""
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
        """Batches read: the position before each, its rows, and the number of rows returned."""
        self._available = 0
        self._begun = False
        self._like: Any = None
        """First batch that was read, the model of batches without rows."""

    def keys(self, count: int) -> list[Any]:
        """Return the next batch."""
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
        """Return the first `rows` rows, which must have been read."""
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
        """Return the index of the size, and the position before the first batch with rows left and in it."""
        before, _, gone = self._waiting[0] if self._waiting else (super().state(), None, 0)
        return [self._turn, self._begun, before, gone]

    def restore(self, state: Any) -> None:
        """Move into a batch."""
        self._turn, self._begun, before, gone = state
        super().restore(before)
        if gone:
            self._read(gone)


def _concatenated(*leaves: NDArray[Any]) -> NDArray[Any]:
    try:
        return np.concatenate(leaves)
    except ValueError as error:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise DatasetError(f"rebatch() cannot combine rows of different shapes: {shapes}") from error
