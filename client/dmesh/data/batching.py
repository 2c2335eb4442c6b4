"""`Dataset.batch`: batches of keys, which are gathered when they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmesh.data.cursors import Cursor, Keys, Pass, Table, read
from dmesh.data.elements import reshaped
from dmesh.data.pipeline import Reading, Transform
from dmesh.errors import DatasetError
from dmesh.structure import flatten, map_structure

__all__ = ["Batch", "cut", "NoRows", "rows_of"]


@dataclass(frozen=True, eq=False)
class Batch(Transform):
    """Stacks several elements as the rows of one."""

    size: int
    """Number of rows."""
    drop_remainder: bool
    """True if a last batch of fewer rows is left out."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor whose keys are the keys of a batch's rows."""
        return _Batching(self.source.open(reading), self.size, self.drop_remainder)

    def cardinality(self) -> int:
        """Return the number of batches."""
        rows = self.source.cardinality()
        if rows < 0:
            return rows
        return rows // self.size if self.drop_remainder else math.ceil(rows / self.size)

    def sample(self) -> Any:
        """Return a batch made of one element of the source."""
        return map_structure(lambda leaf: np.stack([leaf] * self.size), self.source.sample())

    def spec(self) -> Any:
        """Return the source's specs with one more dimension."""
        rows = self.size if self.drop_remainder else None
        return map_structure(lambda leaf: reshaped(leaf, lambda own: (rows, *own)), self.source.spec())

    def batch_size(self) -> int | None:
        """Return the number of rows of a batch."""
        return self.size


class _Batches(Table):
    """Batches of the rows of another table."""

    def __init__(self, rows: Table) -> None:
        self.rows = rows

    def get(self, key: Any) -> Any:
        """Return a batch."""
        assert self.rows is not None
        return key.make() if isinstance(key, NoRows) else self.rows.gather(key)


class NoRows(list[Any]):
    """Keys of no rows.

    Args:
        make: Function that makes the batch of no rows.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make


class _Batching(Pass):
    """Cursor of `Batch`."""

    def __init__(self, source: Cursor, size: int, drop_remainder: bool) -> None:
        super().__init__(source)
        self.table = _Batches(source.table)
        self._size = size
        self._drop = drop_remainder

    def keys(self, count: int) -> list[Keys]:
        """Return the keys of the next batches' rows."""
        size = self._size
        rows = read(self.source, size * count)
        end = len(rows) - len(rows) % size if self._drop else len(rows)
        return [rows[start : start + size] for start in range(0, end, size)]

    def skip(self, count: int) -> int:
        """Leave out batches."""
        rows = self.source.skip(self._size * count)
        return rows // self._size if self._drop else math.ceil(rows / self._size)


def rows_of(element: Any, what: str) -> int:
    """Return the length of the first dimension of all arrays of an element.

    Args:
        element: Some arrays.
        what: Name of the calling operation, for messages.

    Raises:
        DatasetError: An array has no dimension, or the lengths differ.
    """
    lengths = [leaf.shape[0] if leaf.ndim else None for leaf in flatten(element)]
    if not lengths or None in lengths:
        raise DatasetError(
            f"{what} needs batches, but an element of the dataset has "
            f"{'no arrays' if not lengths else 'an array without dimensions'}. Call batch() on the dataset "
            "first"
        )
    if len(set(lengths)) > 1:
        raise DatasetError(
            f"{what} needs arrays with equal numbers of rows, but the element's have {lengths}"
        )
    return int(lengths[0])  # type: ignore[arg-type]  # None was refused


def cut(element: Any, start: int, stop: int) -> Any:
    """Return some rows of all arrays of an element."""
    return map_structure(lambda leaf: leaf[start:stop], element)
