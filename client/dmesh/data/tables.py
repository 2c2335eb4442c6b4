"""Tables of arrays: rows are views, batches are gathered with one copy for each array."""

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
    """Returns a function that makes a structure of what one function for each leaf returns.

    It is `map_structure` with the structure known in advance: nothing is compared in a call.

    Args:
        function: Maker of the function for one leaf.
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
    """Returns a view that cannot be written, of the plain array type."""
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view


def _row(array: NDArray[Any]) -> Callable[[Any], NDArray[Any]]:
    # A row of a vector would be a scalar, not an array.
    return array.__getitem__ if array.ndim > 1 else lambda row: array[row, ...]


def _span(array: NDArray[Any]) -> Callable[[Any], NDArray[Any]]:
    return lambda span: array[span].copy()


def _gather(array: NDArray[Any]) -> Callable[[Any], NDArray[Any]]:
    # take() is faster, but copies the whole array first if its memory is not as it wants it.
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
        """Returns a row, as views that cannot be written."""
        raise AssertionError("replaced when the table is made")

    def gather(self, keys: Keys) -> Any:
        """Returns copies of rows."""
        if isinstance(keys, range):
            return self._span(slice(keys.start, keys.stop, keys.step))
        return self._gather(np.asarray(keys, np.intp))


class Numbers(Table):
    """Integers of equal distances.

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
        """Returns a number as an array without dimensions."""
        return np.asarray(self._numbers[key], self._dtype)

    def gather(self, keys: Keys) -> Any:
        """Returns some of the numbers."""
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
        """Returns the first row of one table."""
        return int(self.ends[index - 1]) if index else 0

    def get(self, key: Any) -> Any:
        """Returns a row of one of the tables."""
        return self.submit(key)()

    def submit(self, key: Any) -> Callable[[], Any]:
        """Begins to make a row of one of the tables."""
        index = int(np.searchsorted(self.ends, key, "right"))
        return self._tables[index].submit(key - self.start(index))

    def gather(self, keys: Keys) -> Any:
        """Returns rows: from each table once, and put in order afterwards."""
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
            return super().gather(keys)  # at once, as far as that goes, and not table by table
        parts, order = [], []
        for index in used.tolist():
            [places] = np.nonzero(owners == index)
            parts.append(self._tables[index].gather(rows[places] - self.start(index)))
            order.append(places)
        inverse = np.argsort(np.concatenate(order), kind="stable")
        return map_structure(lambda leaf: leaf[inverse], _concatenated(parts))


def _concatenated(parts: list[Any]) -> Any:
    """Returns batches as one. Rows that differ are refused as `stack` refuses them."""
    stack([map_structure(lambda leaf: leaf[0], part) for part in parts])
    return map_structure(lambda *leaves: np.concatenate(leaves), *parts)


class _Tagged(Table):
    """Elements of several tables; a key is a table and its own key."""

    def get(self, key: Any) -> Any:
        """Returns an element of the key's table."""
        table, own = key
        return table.get(own)

    def submit(self, key: Any) -> Callable[[], Any]:
        """Begins to make an element of the key's table."""
        table, own = key
        pending: Callable[[], Any] = table.submit(own)
        return pending

    def gather(self, keys: Keys) -> Any:
        """Returns a batch; of one table, if all keys are its."""
        listed = list(as_list(keys))
        if listed:
            first = listed[0][0]
            if all(table is first for table, _ in listed):
                return first.gather([key for _, key in listed])
        return super().gather(keys)


class _Joining(Cursor):
    """Cursor over the rows of several tables, as those of one."""

    lazy = True

    def __init__(self, cursors: Sequence[Cursor]) -> None:
        self._cursors = cursors
        self._index = 0
        self.table = self._joined = Joined([cursor.table for cursor in cursors])

    def keys(self, count: int) -> Keys:
        """Returns the next rows of one of the tables."""
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
        """Leaves out rows."""
        skipped = 0
        while self._index < len(self._cursors):
            skipped += self._cursors[self._index].skip(count - skipped)
            if skipped == count:
                break
            self._index += 1
        return skipped

    def state(self) -> list[Any]:
        """Returns the index of the table that is under way, and the position in it."""
        current = self._cursors[self._index : self._index + 1]
        return [self._index, *(cursor.state() for cursor in current)]

    def restore(self, state: Any) -> None:
        """Moves into one table."""
        self._index, *position = state
        for own in position:
            self._cursors[self._index].restore(own)


class Chunks(Cursor):
    """Cursor over parts, of which each is opened when it is reached, and need not be opened to be skipped.

    Args:
        parts: For each part: its number of elements, if that is known, and a function that opens it.
        parallel: Number of elements that are worth making at once.
    """

    def __init__(self, parts: Sequence[tuple[int | None, Callable[[], Cursor]]], parallel: int = 1) -> None:
        self.table = _Tagged()
        self.table.parallel = parallel
        self._parts = parts
        self._index = 0
        self._cursor: Cursor | None = None

    def keys(self, count: int) -> Keys:
        """Returns keys of the part that is under way, or of the next one."""
        while self._index < len(self._parts):
            cursor = self._opened()
            block = as_list(cursor.keys(count))
            if block:
                table = cursor.table
                return [(table, key) for key in block]
            self._advance()
        return []

    def skip(self, count: int) -> int:
        """Leaves out elements."""
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
        """Returns the index of the part that is under way, and the position in it."""
        return [self._index, None if self._cursor is None else self._cursor.state()]

    def restore(self, state: Any) -> None:
        """Moves into one part."""
        self._index, position = state
        if position is not None:
            self._opened().restore(position)

    def close(self) -> None:
        """Ends the reading of the part that is under way."""
        self._advance()
        self._index = len(self._parts)


def chained(cursors: Sequence[Cursor]) -> Cursor:
    """Returns a cursor over the keys of several cursors, one after the other."""
    if all(cursor.lazy and cursor.table.size is not None for cursor in cursors):
        return _Joining(cursors)
    parallel = max(cursor.table.parallel for cursor in cursors)
    return Chunks([(None, partial(_itself, cursor)) for cursor in cursors], parallel)


def _itself(cursor: Cursor) -> Cursor:
    return cursor
