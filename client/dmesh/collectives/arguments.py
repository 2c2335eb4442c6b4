"""Checks of callers' arguments, before anything is sent, and conversion into sendable arrays."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dmesh.collectives.descriptor import describe_dtype
from dmesh.errors import CollectiveTypeError, CollectiveValueError

# Limit of the search for an element that two arrays with interleaved memory share.
_OVERLAP_EFFORT = 10_000

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def as_input(x: ArrayLike, what: str) -> NDArray[Any]:
    """Return `x` as a C-contiguous array of native byte order: itself if it is one, else a copy.

    Args:
        x: An array or what NumPy makes one of.
        what: The operation, for messages.

    Raises:
        CollectiveTypeError: Its elements are not plain memory, or NumPy must not read them.
        CollectiveValueError: It is no array, or a masked one.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise CollectiveValueError(
            f"{what} cannot take a masked array; pass x.filled(value), or x.data and x.mask separately"
        )
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise CollectiveValueError(f"{what} needs an array, got {describe_type(x)}: {error}") from error
    except TypeError as error:  # such as an array on a GPU, for an operation that knows only NumPy's
        raise CollectiveTypeError(
            f"{what} cannot make a NumPy array of {describe_type(x)}: {error}"
        ) from error
    return native(array, what)


def native(array: NDArray[Any], what: str) -> NDArray[Any]:
    """Return an array in C order and native byte order; see `as_input`."""
    dtype = array.dtype
    if dtype.hasobject:
        raise CollectiveTypeError(
            f"{what} cannot move arrays of dtype {dtype}: its elements are references to Python objects, "
            "which dmesh never pickles. Convert them to a dtype of fixed size."
        )
    flags = array.flags
    if flags.c_contiguous and flags.aligned and dtype.isnative:
        return array
    return np.array(array, dtype=dtype.newbyteorder("="), order="C")


def check_out(
    out: NDArray[Any] | None, dtype: np.dtype[Any], shape: tuple[int, ...], x: NDArray[Any] | None, what: str
) -> None:
    """Check the array that a caller wants the result in.

    Args:
        out: The array, or None.
        dtype: The result's dtype.
        shape: The result's shape.
        x: The caller's input as it was passed; `out` may be the same memory, but not overlap it otherwise.
        what: The operation, for messages.

    Raises:
        CollectiveTypeError: `out` is no array or has another dtype.
        CollectiveValueError: Its shape is wrong, it cannot be written to, or it overlaps the input.
    """
    if out is None:
        return
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise CollectiveTypeError(f"out= of {what} must be a NumPy array, not {describe_type(out)}")
    if out.dtype != dtype:
        raise CollectiveTypeError(
            f"out= of {what} has dtype {out.dtype}, but the result is {describe_dtype(dtype)}"
        )
    if out.shape != shape:
        raise CollectiveValueError(f"out= of {what} has shape {out.shape}, but the result's is {shape}")
    if not out.flags.writeable:
        raise CollectiveValueError(f"out= of {what} is read-only")
    if x is not None and not same_memory(x, out) and _overlap(x, out):
        raise CollectiveValueError(
            f"out= of {what} overlaps the input without being the same array; pass a separate array"
        )


def same_memory(x: NDArray[Any], out: NDArray[Any]) -> bool:
    """True if two arrays have the same elements at the same places."""
    return (
        x.__array_interface__["data"][0] == out.__array_interface__["data"][0]
        and x.shape == out.shape
        and x.strides == out.strides
        and x.dtype == out.dtype
    )


def _overlap(x: NDArray[Any], out: NDArray[Any]) -> bool:
    if not np.may_share_memory(x, out):
        return False
    try:
        return np.shares_memory(x, out, max_work=_OVERLAP_EFFORT)  # type: ignore[arg-type]  # takes any int
    except np.exceptions.TooHardError:
        return True


def check_position(value: int, size: int, name: str, what: str) -> int:
    """Return a position in a group (`root`, `src`, `dst`) as an int.

    Raises:
        CollectiveValueError: It is no integer from 0 to size - 1.
    """
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        position = operator.index(value)
    except TypeError:
        raise CollectiveValueError(f"{name} of {what} must be an integer, got {value!r}") from None
    if not 0 <= position < size:
        raise CollectiveValueError(
            f"{name}={position} of {what} is not in the group: its {size} ranks have the positions "
            f"0 to {size - 1}"
        )
    return position


def describe_type(x: object) -> str:
    """Return the type of something as its user knows it: `list`, `cupy.ndarray`."""
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_other(position: int, rank: int, size: int, name: str, what: str) -> int:
    """Return the position of another rank than this one (`src`, `dst`) as an int.

    Raises:
        CollectiveValueError: It is no integer from 0 to size - 1, or this rank's.
    """
    position = check_position(position, size, name, what)
    if position == rank:
        raise CollectiveValueError(f"{name}={position} of {what} is this rank itself")
    return position


def check_only_root(out: object, rank: int, root: int, what: str) -> None:
    """Check that `out` is given on the root alone.

    Raises:
        CollectiveValueError: It is given on another rank.
    """
    if out is not None and rank != root:
        raise CollectiveValueError(
            f"out= of {what} is for the root (position {root}) alone; this is position {rank}"
        )


def check_pairs(pairs: Iterable[tuple[int, int]], size: int, what: str) -> tuple[tuple[int, int], ...]:
    """Return the (source, target) pairs of a permutation, sorted.

    Raises:
        CollectiveValueError: A position is out of range, or twice a source or a target.
    """
    checked: list[tuple[int, int]] = []
    try:
        candidates = [(source, target) for source, target in pairs]
    except (TypeError, ValueError):
        raise CollectiveValueError(f"{what} needs a list of (source, target) pairs, got {pairs!r}") from None
    for source, target in candidates:
        checked.append(
            (check_position(source, size, "source", what), check_position(target, size, "target", what))
        )
    for name, values in (("source", [s for s, _ in checked]), ("target", [t for _, t in checked])):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise CollectiveValueError(f"{what} got position {twice[0]} more than once as a {name}")
    return tuple(sorted(checked))


def check_timeout(timeout: float | None, default: float) -> float:
    """Return how many seconds a collective may take.

    Raises:
        CollectiveValueError: It is not a positive number.
    """
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
        raise CollectiveValueError(f"timeout must be a number of seconds, got {timeout!r}")
    seconds = float(timeout)
    if math.isnan(seconds) or seconds <= 0:
        raise CollectiveValueError(f"timeout must be more than 0 seconds, got {timeout!r}")
    return seconds


def check_blocks(x: NDArray[Any], size: int, what: str) -> None:
    """Check that an array has exactly one row for each rank along its first axis.

    Raises:
        CollectiveValueError: It has not.
    """
    if x.ndim == 0 or x.shape[0] != size:
        raise CollectiveValueError(
            f"{what} needs an array with one row for each of the group's {size} ranks along axis 0, "
            f"got shape {x.shape}"
        )


def check_divisible(x: NDArray[Any], axis: int, size: int, what: str) -> int:
    """Check that an array can be cut into one equal block for each rank along an axis; returns the axis.

    Raises:
        CollectiveValueError: It cannot, or has no such axis.
    """
    axis = check_axis(axis, x.ndim, what)
    if x.shape[axis] % size:
        raise CollectiveValueError(
            f"{what} divides axis {axis} among the group's {size} ranks, but its length "
            f"{x.shape[axis]} (shape {x.shape}) is not a multiple of {size}"
        )
    return axis


def check_axis(axis: int, ndim: int, what: str) -> int:
    """Return an axis as a number from 0 to ndim - 1.

    Raises:
        CollectiveValueError: There is no such axis.
    """
    try:
        if isinstance(axis, (bool, np.bool_)):
            raise TypeError
        number = operator.index(axis)
    except TypeError:
        raise CollectiveValueError(f"axis of {what} must be an integer or None, got {axis!r}") from None
    if not -ndim <= number < ndim:
        raise CollectiveValueError(
            f"axis={number} of {what} is out of range for an array of {ndim} dimensions"
        )
    return number % ndim


def as_half(compress: DTypeLike, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of 16 bits in which arrays are to travel.

    Raises:
        CollectiveTypeError: It is none, or the arrays are not of float32 or float64.
    """
    try:
        narrow = BFLOAT16 if compress == "bfloat16" else np.dtype(compress)
    except TypeError as error:
        raise CollectiveTypeError(
            f"compress must be float16 or bfloat16, got {compress!r}: {error}"
        ) from None
    if narrow not in (np.dtype(np.float16), BFLOAT16):
        raise CollectiveTypeError(f"compress must be float16 or bfloat16, not {narrow}")
    if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise CollectiveTypeError(f"only float32 and float64 can be compressed, not {dtype}")
    return narrow
