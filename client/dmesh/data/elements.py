"""Elements: the nested structures of NumPy arrays that datasets yield, and their specs.

Tuples, named tuples and dicts are structures, nested to any depth. Everything else is, or becomes, an array.
As in `tf.data`, that includes lists: `[1, 2, 3]` becomes an array of three numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dmesh.errors import ArgumentTypeError, DatasetError
from dmesh.structure import flatten, map_structure, outline, with_values

__all__ = [
    "as_element",
    "check_integer",
    "empty_like",
    "reshaped",
    "same_structure",
    "spec_of",
    "stack",
    "TensorSpec",
]

_TEXT = "US"
"""Kinds of dtype whose item size varies from array to array, and is not compared."""


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of an array.

    Args:
        shape: Its shape, in which None stands for a length that differs from array to array; None if even the
            number of dimensions differs.
        dtype: Type of its elements. Strings of any length have the same.
        name: For people.
    """

    shape: tuple[int | None, ...] | None
    """Its shape, in which None stands for a length that differs; None if the number of dimensions differs."""
    dtype: np.dtype[Any]
    """Type of its elements."""
    name: str | None = None
    """Name for display."""

    def __init__(
        self,
        shape: Sequence[int | None] | SupportsIndex | None,
        dtype: DTypeLike = np.float32,
        name: str | None = None,
    ) -> None:
        lengths = (shape,) if isinstance(shape, SupportsIndex) else None if shape is None else tuple(shape)
        for length in lengths or ():
            if length is not None:
                check_integer("a length in a TensorSpec", length, 0)
        object.__setattr__(self, "shape", lengths)
        object.__setattr__(self, "dtype", _plain(np.dtype(dtype)))
        object.__setattr__(self, "name", name)

    def is_compatible_with(self, other: ArrayLike | TensorSpec) -> bool:
        """Returns whether an array, or an array of another spec, may have this dtype and shape."""
        given = other if isinstance(other, TensorSpec) else np.asarray(other)
        if _plain(given.dtype) != self.dtype:
            return False
        if self.shape is None or given.shape is None:
            return True
        return len(self.shape) == len(given.shape) and all(
            mine is None or theirs is None or mine == theirs
            for mine, theirs in zip(self.shape, given.shape, strict=True)
        )

    @classmethod
    def from_tensor(cls, array: ArrayLike, name: str | None = None) -> TensorSpec:
        """Return the spec of one array."""
        given = np.asarray(array)
        return cls(given.shape, given.dtype, name)


def reshaped(
    spec: TensorSpec, change: Callable[[tuple[int | None, ...]], tuple[int | None, ...]]
) -> TensorSpec:
    """Returns a spec with a changed shape; a number of dimensions that is not known stays so."""
    return TensorSpec(None if spec.shape is None else change(spec.shape), spec.dtype)


def as_element(value: Any, what: str = "the element", *, lists_are_tuples: bool = False) -> Any:
    """Return a structure with all its leaves turned into arrays.

    Args:
        value: The structure.
        what: Its name, for messages.
        lists_are_tuples: True if lists of arrays or structures become tuples.

    Raises:
        ArgumentTypeError: A leaf cannot become an array.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return value
    if isinstance(value, Mapping):
        parts = {
            key: as_element(part, f"{what}[{key!r}]", lists_are_tuples=lists_are_tuples)
            for key, part in value.items()
        }
        return with_values(value, parts)
    if type(value) is tuple and all(type(part) is np.ndarray and part.dtype.kind != "O" for part in value):
        return value
    if isinstance(value, tuple) or (lists_are_tuples and isinstance(value, list) and _holds_arrays(value)):
        items = [
            as_element(part, f"{what}[{index}]", lists_are_tuples=lists_are_tuples)
            for index, part in enumerate(value)
        ]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return _as_array(value, what)


def _holds_arrays(items: list[Any]) -> bool:
    return any(
        isinstance(item, tuple | Mapping | np.ndarray)
        or hasattr(item, "__array__")
        or (isinstance(item, list) and _holds_arrays(item))
        for item in items
    )


def _as_array(value: Any, what: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise ArgumentTypeError(
            f"{what} cannot become an array ({error}). For a structure of several arrays, use a tuple or a "
            "dict instead of a list"
        ) from error
    if array.dtype.kind == "O":
        raise ArgumentTypeError(
            f"{what}, {type(value).__name__} {value!r:.80}, cannot become an array of numbers, strings or "
            "dates"
        )
    return array


def spec_of(element: Any) -> Any:
    """Return the structure of specs of one element."""
    return map_structure(TensorSpec.from_tensor, element)


def same_structure(element: Any, expected: Any, what: str) -> None:
    """Raise DatasetError if the structures of an element and of `expected` differ."""
    if outline(element) != outline(expected):
        raise DatasetError(
            f"{what} has the structure {outline(element)}, expected {outline(expected)}: all elements of a "
            "dataset must have the same structure"
        )


def stack(elements: Sequence[Any]) -> Any:
    """Return the batch of several elements: one element whose arrays have theirs as rows.

    Raises:
        DatasetError: Their structures, shapes or dtypes differ.
    """
    first = elements[0]
    kind = type(first)
    if all(type(element) is kind for element in elements):
        if kind is np.ndarray:
            return _stack_arrays(elements)
        if kind is tuple and all(len(element) == len(first) for element in elements):
            return tuple([stack(column) for column in zip(*elements, strict=True)])
        if kind is dict and all(element.keys() == first.keys() for element in elements):
            return {key: stack([element[key] for element in elements]) for key in first}
    for index, element in enumerate(elements):
        same_structure(element, first, f"element {index} of a batch")
    columns = zip(*map(flatten, elements), strict=True)
    stacked = iter([_stack_arrays(column) for column in columns])
    return map_structure(lambda _: next(stacked), first)


def _stack_arrays(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    first = arrays[0]
    for index, array in enumerate(arrays):
        if array.shape != first.shape:
            raise DatasetError(
                f"cannot batch arrays of different shapes: element 0 of the batch has {first.shape}, element "
                f"{index} has {array.shape}. Make them equal with map(), or use batch(1)"
            )
        if array.dtype != first.dtype and _plain(array.dtype) != _plain(first.dtype):
            raise DatasetError(
                f"cannot batch arrays of different dtypes: element 0 of the batch is {first.dtype}, element "
                f"{index} is {array.dtype}. Convert them with map()"
            )
    if first.dtype.isnative and all(array.dtype == first.dtype for array in arrays):
        return np.array(arrays)  # like stack(), four times as fast
    return np.stack(arrays)


def empty_like(spec: Any) -> Any:
    """Return an element without rows: arrays of length 0 whose other lengths are those of the specs."""
    return map_structure(
        lambda leaf: np.empty((0, *(length or 0 for length in (leaf.shape or ())[1:])), leaf.dtype), spec
    )


def check_integer(name: str, value: object, least: int | None = None) -> int:
    """Return an argument that must be an integer.

    Raises:
        ArgumentTypeError: The argument is not an integer.
        DatasetError: The argument is less than `least`.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, SupportsIndex):
        raise ArgumentTypeError(f"{name} must be an integer, got {value!r:.80}")
    number = value.__index__()
    if least is not None and number < least:
        raise DatasetError(f"{name} must be at least {least}, got {number}")
    return number


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(dtype.kind) if dtype.kind in _TEXT else dtype.newbyteorder("=")
