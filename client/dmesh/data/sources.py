"""Sources of a pipeline: arrays in memory, ranges, generators, and other iterables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.data.batching import cut, row_of
from dmesh.data.elements import TensorSpec, as_element, same_structure, spec_of
from dmesh.data.pipeline import UNKNOWN_CARDINALITY, Elements, Node, opened, uneven
from dmesh.errors import ArgumentTypeError, DatasetError
from dmesh.structure import flatten, map_structure

__all__ = ["Iterated", "Range", "Single", "Slices"]


class Single(Node):
    """One element.

    Args:
        element: A structure of arrays. They are not copied.
    """

    def __init__(self, element: Any) -> None:
        self._element = map_structure(_read_only, element)

    def elements(self) -> Elements:
        """Yields the element."""
        yield self._element

    def cardinality(self) -> int:
        """Returns 1."""
        return 1


class Slices(Node):
    """The rows of arrays.

    Args:
        element: A structure of arrays with equal first lengths. They are not copied.
    """

    def __init__(self, element: Any) -> None:
        leaves = flatten(element)
        if not leaves:
            raise DatasetError("from_tensor_slices() needs at least one array")
        lengths = [leaf.shape[0] if leaf.ndim else None for leaf in leaves]
        if None in lengths:
            raise DatasetError(
                "from_tensor_slices() needs arrays of at least one dimension, to take slices along it; a "
                "single value is for from_tensors()"
            )
        if len(set(lengths)) > 1:
            raise DatasetError(f"from_tensor_slices() needs arrays of equal first lengths, got {lengths}")
        self._rows: int = leaves[0].shape[0]
        self._arrays = map_structure(_read_only, element)

    def elements(self) -> Elements:
        """Yields the rows, as views that cannot be written."""
        for row in range(self._rows):
            yield row_of(self._arrays, row)

    def batches(self, size: int, drop_remainder: bool) -> Elements:
        """Yields copies of consecutive rows."""
        end = self._rows - self._rows % size if drop_remainder else self._rows
        for start in range(0, end, size):
            yield map_structure(np.array, cut(self._arrays, start, start + size))

    def cardinality(self) -> int:
        """Returns the number of rows."""
        return self._rows

    def spec(self) -> Any:
        """Returns the specs of a row."""
        return map_structure(lambda leaf: TensorSpec(leaf.shape[1:], leaf.dtype), self._arrays)

    def sample(self) -> Any:
        """Returns a row; of zeros, if there is none."""
        if self._rows:
            return row_of(self._arrays, 0)
        return map_structure(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), self._arrays)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True, eq=False)
class Range(Node):
    """Integers of equal distances."""

    numbers: range
    """The range."""
    dtype: np.dtype[Any]
    """Of the arrays."""

    def elements(self) -> Elements:
        """Yields arrays without dimensions."""
        for number in self.numbers:
            yield np.asarray(number, self.dtype)

    def batches(self, size: int, drop_remainder: bool) -> Elements:
        """Yields consecutive numbers."""
        for start in range(0, len(self.numbers), size):
            piece = self.numbers[start : start + size]
            if len(piece) == size or not drop_remainder:
                yield np.arange(piece.start, piece.stop, piece.step).astype(self.dtype)

    def cardinality(self) -> int:
        """Returns how many numbers there are."""
        return len(self.numbers)

    def spec(self) -> Any:
        """Returns the spec of a number."""
        return TensorSpec((), self.dtype)


@dataclass(frozen=True, eq=False)
class Iterated(Node):
    """Elements of an iterable, iterated anew for each reading."""

    start: Callable[[], Iterable[Any]]
    """Makes it."""
    signature: Any = None
    """The structure of specs that all elements must have; None to take what comes."""
    what: str = "the generator"
    """Name of the source, for messages."""
    length: int = UNKNOWN_CARDINALITY
    """Number of elements, if known."""
    rows: int | None = None
    """Number of rows of all elements but the last, if known."""
    lists_are_tuples: bool = False
    """True if a list that holds arrays or structures is taken for a tuple."""
    convert: Callable[[Any], Any] | None = None
    """Makes a structure of arrays of what the iterator yields."""

    def elements(self) -> Elements:
        """Yields what the iterator yields, as arrays."""
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
        """Returns how many elements there are."""
        return self.length

    def sample(self) -> Any:
        """Returns the first element, or zeros if there is none but a signature."""
        with opened(self) as elements:
            for element in elements:
                return element
        if self.signature is None:
            return super().sample()
        return map_structure(
            lambda spec: np.zeros([length or 0 for length in spec.shape], spec.dtype), self.signature
        )

    def spec(self) -> Any:
        """Returns the signature, or else the specs of the first element, with any number of rows."""
        return uneven(spec_of(self.sample())) if self.signature is None else self.signature

    def batch_size(self) -> int | None:
        """Returns how many rows an element has, if that is known."""
        return self.rows


def _checked(element: Any, signature: Any, what: str) -> Any:
    same_structure(element, signature, what)
    converted = []
    for leaf, spec in zip(flatten(element), flatten(signature), strict=True):
        array = leaf
        if array.dtype != spec.dtype and np.can_cast(array.dtype, spec.dtype, "same_kind"):
            array = leaf.astype(spec.dtype)  # Python's numbers have no dtype of their own
            if leaf.dtype.kind in "iu" and not np.array_equal(array, leaf):
                array = leaf  # they do not fit
        if not spec.is_compatible_with(array):
            raise ArgumentTypeError(
                f"{what} has an array of {leaf.dtype} with shape {leaf.shape}, but its output_signature says "
                f"{spec.dtype} with shape {spec.shape}"
            )
        converted.append(array)
    leaves = iter(converted)
    return map_structure(lambda _: next(leaves), element)
