"""Sources of a pipeline: arrays in memory, ranges, generators, and other iterables."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmesh.data.cursors import Count, Cursor, Streamed, Table
from dmesh.data.elements import TensorSpec, as_element, same_structure, spec_of
from dmesh.data.pipeline import UNKNOWN_CARDINALITY, Node, Reading, with_rows
from dmesh.data.tables import Arrays, Numbers
from dmesh.errors import ArgumentTypeError, DatasetError
from dmesh.structure import flatten, map_structure

__all__ = ["Iterated", "Range", "Rows", "single", "slices"]


class Rows(Node):
    """Rows of a table, in order.

    Args:
        table: The table, whose size is known.
        name: Name of the source, for messages.
    """

    def __init__(self, table: Table, name: str) -> None:
        assert table.size is not None
        self.table = table
        self.size = table.size
        self._name = name

    @property
    def name(self) -> str:
        """Name for messages."""
        return self._name

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor over the rows."""
        return Count(self.table, self.size)

    def cardinality(self) -> int:
        """Return the number of rows."""
        return self.size

    def spec(self) -> Any:
        """Return the specs of a row."""
        if isinstance(self.table, Arrays):
            return map_structure(lambda leaf: TensorSpec(leaf.shape[1:], leaf.dtype), self.table.arrays)
        return super().spec()

    def sample(self) -> Any:
        """Return a row, or zeros if there are no rows."""
        if self.size or not isinstance(self.table, Arrays):
            return super().sample()
        return map_structure(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), self.table.arrays)


def single(element: Any) -> Rows:
    """Return a source of one element, a structure of arrays."""
    return Rows(Arrays(map_structure(lambda leaf: leaf[None], element), 1), "from_tensors()")


def slices(element: Any) -> Rows:
    """Return a source of the rows of arrays.

    Args:
        element: A structure of arrays with equal first lengths. They are not copied.

    Raises:
        DatasetError: An array has no dimension, or the first lengths differ.
    """
    leaves = flatten(element)
    if not leaves:
        raise DatasetError("from_tensor_slices() needs at least one array")
    lengths = [leaf.shape[0] if leaf.ndim else None for leaf in leaves]
    if None in lengths:
        raise DatasetError(
            "from_tensor_slices() slices arrays along their first dimension, but one has none. Use "
            "from_tensors() for a single value"
        )
    if len(set(lengths)) > 1:
        raise DatasetError(f"from_tensor_slices() needs arrays of equal first lengths, got {lengths}")
    return Rows(Arrays(element, leaves[0].shape[0]), "from_tensor_slices()")


@dataclass(frozen=True, eq=False)
class Range(Node):
    """Evenly spaced integers."""

    numbers: range
    """The range."""
    dtype: np.dtype[Any]
    """Type of the arrays."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor over the numbers."""
        return Count(Numbers(self.numbers, self.dtype), len(self.numbers))

    def cardinality(self) -> int:
        """Return the number of numbers."""
        return len(self.numbers)

    def spec(self) -> Any:
        """Return the spec of a number."""
        return TensorSpec((), self.dtype)


@dataclass(frozen=True, eq=False)
class Iterated(Node):
    """Elements of an iterable, which is iterated again for each reading."""

    start: Callable[[], Iterable[Any]]
    """Function that returns the iterable."""
    signature: Any = None
    """Structure of specs of all elements; None to accept any."""
    what: str = "the generator"
    """Name of the source, for messages."""
    length: int = UNKNOWN_CARDINALITY
    """Number of elements, if known."""
    rows: int | None = None
    """Number of rows of all elements but the last, if known."""
    lists_are_tuples: bool = False
    """True if lists of arrays or structures become tuples."""
    convert: Callable[[Any], Any] | None = None
    """Function that converts an item into a structure of arrays."""

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor over the items, as arrays."""
        return Streamed(self._elements)

    def _elements(self) -> Generator[Any, None, None]:
        iterator = iter(self.start())
        expected = self.signature
        try:
            for number, value in enumerate(iterator):
                what = f"element {number} of {self.what}"
                converted = value if self.convert is None else self.convert(value)
                element = as_element(converted, what, lists_are_tuples=self.lists_are_tuples)
                if self.signature is not None:
                    element = _checked(element, self.signature, what)
                elif expected is None:
                    expected = element
                else:
                    same_structure(element, expected, what)
                yield element
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def cardinality(self) -> int:
        """Return the number of elements."""
        return self.length

    def sample(self) -> Any:
        """Return the first element; zeros if there are no elements, but a signature."""
        cursor = Streamed(self._elements)
        try:
            for element in cursor.keys(1):
                return element
        finally:
            cursor.close()
        if self.signature is None:
            return super().sample()
        return map_structure(
            lambda spec: np.zeros([length or 0 for length in spec.shape or ()], spec.dtype), self.signature
        )

    def spec(self) -> Any:
        """Returns the signature, or else the specs of the first element, with any number of rows."""
        return with_rows(spec_of(self.sample()), None) if self.signature is None else self.signature

    def batch_size(self) -> int | None:
        """Return the number of rows of an element, if it is known."""
        return self.rows


def _checked(element: Any, signature: Any, what: str) -> Any:
    same_structure(element, signature, what)
    converted = []
    for leaf, spec in zip(flatten(element), flatten(signature), strict=True):
        array = leaf
        if array.dtype != spec.dtype and np.can_cast(array.dtype, spec.dtype, "same_kind"):
            array = leaf.astype(spec.dtype)  # Python numbers have no dtype
            if leaf.dtype.kind in "iu" and not np.array_equal(array, leaf):
                array = leaf  # not representable in the dtype
        if not spec.is_compatible_with(array):
            raise ArgumentTypeError(
                f"{what} has an array of {leaf.dtype} with shape {leaf.shape}; its output_signature expects "
                f"{spec.dtype} with shape {spec.shape}"
            )
        converted.append(array)
    leaves = iter(converted)
    return map_structure(lambda _: next(leaves), element)
