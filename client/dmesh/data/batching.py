"""The steps of a pipeline that make rows of elements, or elements of rows."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.data.elements import TensorSpec
from dmesh.data.pipeline import UNKNOWN_CARDINALITY, Elements, Step, opened, uneven
from dmesh.errors import DatasetError
from dmesh.structure import flatten, map_structure

__all__ = ["Batch", "Rebatch", "rows_of", "Split", "Unbatch"]


@dataclass(frozen=True, eq=False)
class Batch(Step):
    """Makes one element of several, of which each is a row."""

    size: int
    """Number of rows."""
    drop_remainder: bool
    """True if a last batch of fewer rows is left out."""

    def elements(self) -> Elements:
        """Yields the batches."""
        return self.source.batches(self.size, self.drop_remainder)

    def cardinality(self) -> int:
        """Returns how many batches there are."""
        rows = self.source.cardinality()
        if rows < 0:
            return rows
        return rows // self.size if self.drop_remainder else math.ceil(rows / self.size)

    def sample(self) -> Any:
        """Returns a batch made of one element of the source."""
        return map_structure(lambda leaf: np.stack([leaf] * self.size), self.source.sample())

    def spec(self) -> Any:
        """Returns the source's specs with one more dimension."""
        rows = self.size if self.drop_remainder else None
        return map_structure(lambda leaf: TensorSpec((rows, *leaf.shape), leaf.dtype), self.source.spec())

    def batch_size(self) -> int | None:
        """Returns how many rows a batch has."""
        return self.size


class _Rows(Step):
    """A step for which the rows of the source's elements are what counts."""

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

    def elements(self) -> Elements:
        """Yields the rows."""
        with opened(self.source) as elements:
            for element in elements:
                for row in range(rows_of(element, "unbatch()")):
                    yield row_of(element, row)

    def sample(self) -> Any:
        """Returns a row."""
        for row in Unbatch(self.source).elements():
            return row
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
    """One after the other, and again from the first one; some may be 0, not all."""
    drop_remainder: bool = False
    """True if a last batch of fewer rows is left out."""

    def elements(self) -> Elements:
        """Yields the batches."""
        with opened(self.source) as elements:
            first = next(elements, None)
            if first is None:
                return
            pieces = _Pieces(first)
            for wanted in itertools.cycle(self.sizes):
                while pieces.rows < wanted:
                    element = next(elements, None)
                    if element is None:
                        if pieces.rows and not self.drop_remainder:
                            yield pieces.take(pieces.rows)
                        return
                    pieces.add(element)
                yield pieces.take(wanted)


@dataclass(frozen=True, eq=False)
class Split(_Rows):
    """Cuts each element into a given number of parts of equal size, the last ones smaller, some empty."""

    parts: int
    """Number of parts."""

    def elements(self) -> Elements:
        """Yields the parts, in order."""
        with opened(self.source) as elements:
            for element in elements:
                size = math.ceil(rows_of(element, "splitting a batch among replicas") / self.parts)
                for part in range(self.parts):
                    yield cut(element, part * size, (part + 1) * size)

    def cardinality(self) -> int:
        """Returns how many parts there are."""
        number = self.source.cardinality()
        return number if number < 0 else number * self.parts


def rows_of(element: Any, what: str) -> int:
    """Returns the length of the first dimension of all arrays of an element.

    Args:
        element: Some arrays.
        what: Who wants to know, for messages.

    Raises:
        DatasetError: An array has no dimension, or another length than the others.
    """
    lengths = [leaf.shape[0] if leaf.ndim else None for leaf in flatten(element)]
    if not lengths or None in lengths:
        raise DatasetError(
            f"{what} needs arrays with rows, but the element has "
            f"{'no arrays' if not lengths else 'an array without dimensions'}. Call batch() on the dataset "
            "first"
        )
    if len(set(lengths)) > 1:
        raise DatasetError(
            f"{what} needs arrays with equal numbers of rows, but the element's have {lengths}"
        )
    return int(lengths[0])  # type: ignore[arg-type]  # None was refused


def row_of(element: Any, row: int) -> Any:
    """Returns one row of all arrays of an element."""
    return map_structure(lambda leaf: np.asarray(leaf[row]), element)


def cut(element: Any, start: int, stop: int) -> Any:
    """Returns some rows of all arrays of an element."""
    return map_structure(lambda leaf: leaf[start:stop], element)


class _Pieces:
    """Rows that have been read and not been given away."""

    def __init__(self, first: Any) -> None:
        self.rows = 0
        self._waiting: deque[Any] = deque()
        self._none = cut(first, 0, 0)
        self.add(first)

    def add(self, element: Any) -> None:
        rows = rows_of(element, "rebatch()")
        if rows:
            self._waiting.append(element)
            self.rows += rows

    def take(self, rows: int) -> Any:
        """Returns the first rows; there must be as many."""
        self.rows -= rows
        taken = []
        while rows:
            first = self._waiting.popleft()
            here = len(flatten(first)[0])
            if here > rows:
                self._waiting.appendleft(cut(first, rows, here))
                first, here = cut(first, 0, rows), rows
            taken.append(first)
            rows -= here
        if not taken:
            return self._none
        return taken[0] if len(taken) == 1 else map_structure(_concatenated, *taken)


def _concatenated(*leaves: NDArray[Any]) -> NDArray[Any]:
    try:
        return np.concatenate(leaves)
    except ValueError as error:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise DatasetError(f"rebatch() cannot put rows of different shapes together: {shapes}") from error
