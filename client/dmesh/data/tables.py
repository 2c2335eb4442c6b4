"""Tables of arrays: rows are views, batches are copies, made in one pass per array."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.data.cursors import Cursor, Keys, Table, as_array, as_list
from dmesh.data.elements import stack
from dmesh.structure import map_structure, with_values

__all__ = ["Arrays", "chained", "Chunks", "each_leaf", "Joined", "Numbers", "read_only"]


def each_leaf(
    function: Callable[[NDArray[Any]], Callable[[Any], Any]], structure: Any
) -> Callable[[Any], Any]:
    """Return a function that calls one function for each leaf and returns the structure of their results.

    It is `map_structure` for a structure known in advance, without comparisons in each call.

    Args:
        function: Returns the function for one leaf.
        structure: Structure of arrays.
    """
    if isinstance(structure, Mapping):
        parts = {key: each_leaf(function, part) for key, part in structure.items()}
        if type(structure) is dict:
            return lambda key: {name: part(key) for name, part in parts.items()}
        return lambda key: with_values(structure, {name: part(key) for name, part in parts.items()})
    if isinstance(structure, tuple):
        items = [each_leaf(function, part) for part in structure]
        if hasattr(structure, "_fields"):
            kind = type(structure)
            return lambda key: kind(*[item(key) for item in items])
        return lambda key: tuple([item(key) for item in items])
    return function(structure)


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, of type ndarray."""
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view


def _row(array: NDArray[Any]) -> Callable[[Any], NDArray[Any]]:
    # Indexing a vector with an integer would return a scalar, not an array.
    return array.__getitem__ if array.ndim > 1 else lambda row: array[row, ...]


def _span(array: NDArray[Any]) -> Callable[[Any], NDArray[Any]]:
    return lambda span: array[span].copy()


def _gather(array: NDArray[Any]) -> Callable[[Any], NDArray[Any]]:
    # take() is faster, but first copies the whole array if it is not aligned, contiguous and native.
    if array.flags.c_contiguous and array.flags.aligned:
        return lambda rows: array.take(rows, axis=0)
    return lambda rows: array[rows]


class Arrays(Table):
    """Rows of a structure of arrays.

    Args:
        arrays: Arrays of equal first lengths. They are not copied.
        size: Their first length.
    """

    cheap = True

    def __init__(self, arrays: Any, size: int) -> None:
        self.size = size
        self.arrays = map_structure(read_only, arrays)
        self.get = each_leaf(_row, self.arrays)  # type: ignore[method-assign,assignment]
        self._span = each_leaf(_span, self.arrays)
        self._gather = each_leaf(_gather, self.arrays)

    def get(self, key: Any) -> Any:
        """Return a row, as read-only views."""
        raise AssertionError("replaced in __init__")

    def gather(self, keys: Keys) -> Any:
        """Return copies of rows."""
        if isinstance(keys, range):
            return self._span(slice(keys.start, keys.stop, keys.step))
        return self._gather(np.asarray(keys, np.intp))


class Numbers(Table):
    """Evenly spaced integers.

    Args:
        numbers: The integers.
        dtype: Type of the arrays.
    """

    cheap = True

    def __init__(self, numbers: range, dtype: np.dtype[Any]) -> None:
        self._numbers = numbers
        self._dtype = dtype
        self.size = len(numbers)

    def get(self, key: Any) -> Any:
        """Return a number as an array without dimensions."""
        return np.asarray(self._numbers[key], self._dtype)

    def gather(self, keys: Keys) -> Any:
        """Return some of the numbers."""
        if isinstance(keys, range):
            span = self._numbers[keys.start : keys.stop : keys.step]
            return np.arange(span.start, span.stop, span.step).astype(self._dtype, copy=False)
        rows = np.asarray(keys, np.int64)
        return (self._numbers.start + self._numbers.step * rows).astype(self._dtype, copy=False)


class Joined(Table):
    """Rows of several tables, one after the other.

    Args:
        tables: Tables whose sizes are known.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self.ends = np.array([*accumulate(table.size or 0 for table in tables)], np.int64)
        self.size = int(self.ends[-1])
        self.cheap = all(table.cheap for table in tables)
        self.parallel = max(table.parallel for table in tables)

    def start(self, index: int) -> int:
        """Return the first row of one table."""
        return int(self.ends[index - 1]) if index else 0

    def get(self, key: Any) -> Any:
        """Return a row of one of the tables."""
        return self.submit(key)()

    def submit(self, key: Any) -> Callable[[], Any]:
        """Start making a row of one of the tables."""
        index = int(np.searchsorted(self.ends, key, "right"))
        return self._tables[index].submit(key - self.start(index))

    def gather(self, keys: Keys) -> Any:
        """Return rows: gather once from each table, then sort."""
        if isinstance(keys, range) and len(keys):
            index = int(np.searchsorted(self.ends, keys.start, "right"))
            start = self.start(index)
            if keys[-1] < self.ends[index]:
                return self._tables[index].gather(range(keys.start - start, keys.stop - start, keys.step))
        rows = as_array(keys)
        owners = np.searchsorted(self.ends, rows, "right")
        used = np.unique(owners)
        if len(used) < 2:
            index = int(used[0]) if len(used) else 0
            return self._tables[index].gather(rows - self.start(index))
        if not self.cheap:
            return super().gather(keys)  # concurrently, not table by table
        parts, order = [], []
        for index in used.tolist():
            [places] = np.nonzero(owners == index)
            parts.append(self._tables[index].gather(rows[places] - self.start(index)))
            order.append(places)
        inverse = np.argsort(np.concatenate(order), kind="stable")
        return map_structure(lambda leaf: leaf[inverse], _concatenated(parts))


def _concatenated(parts: list[Any]) -> Any:
    """Concatenate batches. Raise the errors of `stack` if rows differ."""
    stack([map_structure(lambda leaf: leaf[0], part) for part in parts])
    return map_structure(lambda *leaves: np.concatenate(leaves), *parts)


class _Tagged(Table):
    """Elements of several tables; a key is a table and its own key."""

    def get(self, key: Any) -> Any:
        """Return an element of the key's table."""
        table, own = key
        return table.get(own)

    def submit(self, key: Any) -> Callable[[], Any]:
        """Start making an element of the key's table."""
        table, own = key
        pending: Callable[[], Any] = table.submit(own)
        return pending

    def gather(self, keys: Keys) -> Any:
        """Return a batch; gather directly if all keys belong to one table."""
        listed = list(as_list(keys))
        if listed:
            first = listed[0][0]
            if all(table is first for table, _ in listed):
                return first.gather([key for _, key in listed])
        return super().gather(keys)


class _Joining(Cursor):
    """Cursor over the rows of several tables, numbered as in `Joined`."""

    lazy = True

    def __init__(self, cursors: Sequence[Cursor]) -> None:
        self._cursors = cursors
        self._index = 0
        self.table = self._joined = Joined([cursor.table for cursor in cursors])

    def keys(self, count: int) -> Keys:
        """Return the next rows of one of the tables."""
        while self._index < len(self._cursors):
            block = self._cursors[self._index].keys(count)
            if len(block):
                start = self._joined.start(self._index)
                if isinstance(block, range):
                    return range(block.start + start, block.stop + start, block.step)
                return as_array(block) + start
            self._index += 1
        return range(0)

    def skip(self, count: int) -> int:
        """Skip rows."""
        skipped = 0
        while self._index < len(self._cursors):
            skipped += self._cursors[self._index].skip(count - skipped)
            if skipped == count:
                break
            self._index += 1
        return skipped

    def state(self) -> list[Any]:
        """Return the index of the current table, and the position in it."""
        current = self._cursors[self._index : self._index + 1]
        return [self._index, *(cursor.state() for cursor in current)]

    def restore(self, state: Any) -> None:
        """Move into one table."""
        self._index, *position = state
        for own in position:
            self._cursors[self._index].restore(own)


class Chunks(Cursor):
    """Cursor over parts. Each part is opened when it is reached; skipped parts are not opened.

    Args:
        parts: For each part: its number of elements, or None, and a function that opens it.
        parallel: Number of elements to make concurrently.
    """

    def __init__(self, parts: Sequence[tuple[int | None, Callable[[], Cursor]]], parallel: int = 1) -> None:
        self.table = _Tagged()
        self.table.parallel = parallel
        self._parts = parts
        self._index = 0
        self._cursor: Cursor | None = None

    def keys(self, count: int) -> Keys:
        """Return keys of the current part, or of the next one."""
        while self._index < len(self._parts):
            cursor = self._opened()
            block = as_list(cursor.keys(count))
            if block:
                table = cursor.table
                return [(table, key) for key in block]
            self._advance()
        return []

    def skip(self, count: int) -> int:
        """Skip elements."""
        skipped = 0
        while skipped < count and self._index < len(self._parts):
            size, _ = self._parts[self._index]
            if self._cursor is None and size is not None and size <= count - skipped:
                skipped += size
                self._index += 1
                continue
            skipped += self._opened().skip(count - skipped)
            if skipped < count:
                self._advance()
        return skipped

    def _opened(self) -> Cursor:
        if self._cursor is None:
            self._cursor = self._parts[self._index][1]()
        return self._cursor

    def _advance(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
        self._cursor = None
        self._index += 1

    def state(self) -> list[Any]:
        """Return the index of the current part, and the position in it."""
        return [self._index, None if self._cursor is None else self._cursor.state()]

    def restore(self, state: Any) -> None:
        """Move into one part."""
        self._index, position = state
        if position is not None:
            self._opened().restore(position)

    def close(self) -> None:
        """End the reading of the current part."""
        self._advance()
        self._index = len(self._parts)


def chained(cursors: Sequence[Cursor]) -> Cursor:
    """Return a cursor over the keys of several cursors, one after the other."""
    if all(cursor.lazy and cursor.table.size is not None for cursor in cursors):
        return _Joining(cursors)
    parallel = max(cursor.table.parallel for cursor in cursors)
    return Chunks([(None, partial(_itself, cursor)) for cursor in cursors], parallel)


def _itself(cursor: Cursor) -> Cursor:
    return cursor
