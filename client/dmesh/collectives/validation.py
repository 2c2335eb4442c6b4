"""Validation of calls: from a caller's arguments to a request.

Everything that a caller can get wrong is found here, in the caller's thread, before anything is sent to the
other ranks or allocated for them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dmesh.collectives.backends.nccl.arrays import GpuArrays, is_gpu_array
from dmesh.collectives.reduction import REDUCTIONS, canonical_op, resolve
from dmesh.collectives.request import (
    BFLOAT16,
    REDUCING,
    ROOTED,
    TRANSFER,
    Array,
    Reduction,
    Request,
    Requests,
    describe,
    describe_dtype,
    describe_type,
)
from dmesh.errors import CollectiveTypeError, CollectiveValueError

# Limit of the search for an element that two arrays with interleaved memory share.
_OVERLAP_EFFORT = 10_000

_PEERS = {"send": "dst", "recv": "src"}
_NUMPY_ONLY = ("gather", "scatter", "permute")


def as_input(x: ArrayLike, what: str) -> Array:
    """Return `x` as a C-contiguous array of native byte order: itself if it is one, else a copy."""
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
    dtype, flags = array.dtype, array.flags
    if dtype.hasobject:
        raise CollectiveTypeError(
            f"{what} cannot move arrays of dtype {dtype}: its elements are references to Python objects, "
            "which dmesh never pickles. Convert them to a dtype of fixed size."
        )
    if flags.c_contiguous and flags.aligned and dtype.isnative:
        return array
    return np.array(array, dtype=dtype.newbyteorder("="), order="C")


def check_out(out: Any, dtype: np.dtype[Any], shape: tuple[int, ...], x: Any, what: str) -> None:
    """Raise if the result cannot be put into `out`; it may be the input `x`, but not overlap it otherwise."""
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
    if isinstance(x, np.ndarray) and _overlap(x, out) and not _same_memory(x, out):
        raise CollectiveValueError(
            f"out= of {what} overlaps the input without being the same array; pass a separate array"
        )


class NumpyArrays:
    """NumPy, with the methods that `GpuArrays` has for CuPy."""

    as_input = staticmethod(as_input)
    check_out = staticmethod(check_out)
    where = ""

    def using(self, x: Any, what: str) -> AbstractContextManager[None]:
        """Do nothing: NumPy has no devices."""
        del x, what
        return nullcontext()

    def reduction(self, op: str, dtype: np.dtype[Any], what: str) -> Reduction:
        """Return how contributions are folded; raises where that has no meaning."""
        del what
        known = REDUCTIONS.get((op, dtype)) if isinstance(op, str) else None
        return known or resolve(canonical_op(op), dtype)

    def complete(self, request: Request) -> Request:
        """Return the request as it is."""
        return request


NUMPY = NumpyArrays()


class RequestBuilder(Requests):
    """Validates the calls of one rank of a group; see `Requests`."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self._gpu = GpuArrays()

    def validate(
        self,
        kind: str,
        x: Any,
        out: Any = None,
        op: Any = None,
        root: Any = None,
        axis: Any = None,
        compress: Any = None,
        pairs: Any = None,
    ) -> Request:
        """Check everything that a caller passed, and return the request; see `Requests.make`."""
        if kind == "barrier":
            return Request(kind, *describe(kind))
        if compress is not None:
            return self._compressed(x, op, out, compress)
        size, rank = self.size, self.rank
        if kind in _PEERS:
            root = check_position(root, size, _PEERS[kind], kind)
            if root == rank:
                raise CollectiveValueError(f"{_PEERS[kind]}={root} of {kind} is this rank itself")
        elif kind in ROOTED:
            root = check_position(root, size, "root", kind)
        if kind in ("reduce", "gather") and out is not None and rank != root:
            raise CollectiveValueError(
                f"out= of {kind} is for the root (position {root}) alone; this is position {rank}"
            )
        receives = kind == "recv" or (kind == "scatter" and rank != root)
        like = out if receives and x is None else x
        if receives and like is None:
            raise CollectiveValueError(
                f"{kind} must know what it will receive: pass an array of its dtype and shape, or out="
            )
        if kind == "scatter" and like is None:
            raise CollectiveValueError("the root of scatter must pass the array whose rows are scattered")
        moves = _check_pairs(pairs, size, kind) if kind == "permute" else ()
        arrays = self._arrays(like, kind)
        with arrays.using(like, kind):
            array = arrays.as_input(like, kind)
            reduction = arrays.reduction(op, array.dtype, kind) if kind in REDUCING else None
            dtype = array.dtype if reduction is None else reduction.result
            axis = 0 if kind == "all_to_all" else axis
            if axis is not None:
                axis = _check_axis(axis, array, size, kind)
            elif kind == "reduce_scatter" or (kind == "scatter" and not receives):
                _check_rows(array, size, kind)
            source, shape, arrange = _arranged(kind, array, axis, size)
            if kind == "scatter" and not receives:
                array = array[0, ...]  # an array even where array[0] would be a scalar of another dtype
                shape = array.shape
            arrays.check_out(out, dtype, shape, None if receives else x, kind)
            if reduction is not None:
                if source.dtype != reduction.wire:
                    source = source.astype(reduction.wire, order="C")
                source = arrays.as_input(source, kind)
            contributes = not receives and (kind != "broadcast" or rank == root)
            if kind == "permute":
                contributes = any(start == rank for start, _ in moves)
            parts = size if kind in ("reduce_scatter", "all_to_all") else 1
            called = TRANSFER if kind in _PEERS else kind
            name = "" if reduction is None else reduction.op
            text, descriptor = describe(
                called, array.dtype, array.shape, name, root or 0, axis, moves, arrays.where
            )
            request = Request(
                called,
                text,
                descriptor,
                nbytes_per_rank=int(array.nbytes) * size if kind == "scatter" else int(source.nbytes),
                count=array.size // parts if array.nbytes else 0,
                root=root or 0,
                pairs=moves,
                reduction=reduction,
                contributes=contributes,
                dtype=dtype,
                source=source if contributes else None,
                shape=None if kind == "send" or (kind in ("reduce", "gather") and rank != root) else shape,
                out=out,
                arrange=arrange,
                aliased=out is not None and not receives and _same_memory(source, out),
                needs_copy=kind in ("all_to_all", "permute"),
                zero_fill=kind == "permute" and all(end != rank for _, end in moves),
            )
            return arrays.complete(request)

    def _compressed(self, x: ArrayLike, op: Any, out: Any, compress: DTypeLike) -> Request:
        """Return the request of an all-reduce of arrays that travel in 16 bits."""
        kind = "all_reduce"
        if self._arrays(x, kind) is not NUMPY:
            raise CollectiveTypeError(
                "compress= of all_reduce is for NumPy arrays; convert GPU arrays yourself"
            )
        wide = as_input(x, kind)
        shape, dtype = wide.shape, wide.dtype
        NUMPY.reduction(op, dtype, kind)
        narrow = _as_half(compress, dtype)
        check_out(out, dtype, shape, x, kind)
        with np.errstate(all="ignore"):  # values that are too large become infinite, on one rank as on all
            request = self.validate(kind, wide.astype(narrow), None, op)
        return replace(request, out=out, arrange=lambda flat: flat.reshape(shape).astype(dtype))

    def _arrays(self, x: object, kind: str) -> NumpyArrays | GpuArrays:
        is_on_gpu = kind not in _NUMPY_ONLY and "cupy" in sys.modules and is_gpu_array(x)
        return self._gpu if is_on_gpu else NUMPY


def _arranged(kind: str, x: Any, axis: int | None, size: int) -> tuple[Any, tuple[int, ...], Any]:
    """Return what travels, the result's shape, and what makes it of the output, if it is no reshape."""
    shape = x.shape
    if kind == "reduce_scatter":
        if axis is None:
            return x, shape[1:], None
        result = (*shape[:axis], shape[axis] // size, *shape[axis + 1 :])
        blocks = x.reshape(*result[:axis], size, *result[axis:])
        return blocks.transpose(axis, *range(axis), *range(axis + 1, blocks.ndim)), result, None
    if kind not in ("all_gather", "gather"):
        return x, shape, None
    stacked = (size, *shape)
    if axis is None:
        return x, stacked, None
    joined = (*shape[:axis], size * shape[axis], *shape[axis + 1 :])
    order = (*range(1, axis + 1), 0, *range(axis + 1, x.ndim + 1))

    def arrange(flat: Any) -> Any:
        return flat.reshape(stacked).transpose(order).copy(order="C").reshape(joined)

    return x, joined, arrange if axis else None


def _overlap(x: Array, out: Array) -> bool:
    try:
        return np.shares_memory(x, out, max_work=_OVERLAP_EFFORT)  # type: ignore[arg-type]  # takes any int
    except np.exceptions.TooHardError:
        return True


def _same_memory(x: Any, out: Any) -> bool:
    """Return whether two arrays of one library have the same elements at the same places."""
    if not isinstance(out, np.ndarray):
        return bool(x.data.ptr == out.data.ptr)
    return (
        np.may_share_memory(x, out)  # first: it is quick
        and x.__array_interface__["data"][0] == out.__array_interface__["data"][0]
        and x.shape == out.shape
        and x.strides == out.strides
        and x.dtype == out.dtype
    )


def _as_integer(value: Any, error: str) -> int:
    try:
        if not isinstance(value, (bool, np.bool_)):
            return operator.index(value)
    except TypeError:
        pass
    raise CollectiveValueError(f"{error}, got {value!r}")


def check_position(value: Any, size: int, name: str, what: str) -> int:
    """Return a position in a group (`root`, `src`, `dst`) as an int, or refuse it."""
    position = value if type(value) is int else _as_integer(value, f"{name} of {what} must be an integer")
    if not 0 <= position < size:
        raise CollectiveValueError(
            f"{name}={position} of {what} is not in the group: its {size} ranks have the positions "
            f"0 to {size - 1}"
        )
    return position


def _check_pairs(pairs: Iterable[tuple[int, int]], size: int, what: str) -> tuple[tuple[int, int], ...]:
    """Return the (source, target) pairs of a permutation, sorted; none may be twice a source or a target."""
    try:
        candidates = [(source, target) for source, target in pairs]
    except (TypeError, ValueError):
        raise CollectiveValueError(f"{what} needs a list of (source, target) pairs, got {pairs!r}") from None
    checked = sorted(
        (check_position(source, size, "source", what), check_position(target, size, "target", what))
        for source, target in candidates
    )
    for name, values in (("source", [s for s, _ in checked]), ("target", [t for _, t in checked])):
        if len(set(values)) < len(values):
            twice = min(value for value in values if values.count(value) > 1)
            raise CollectiveValueError(f"{what} got position {twice} more than once as a {name}")
    return tuple(checked)


def _check_rows(x: Any, size: int, what: str) -> None:
    if x.ndim == 0 or x.shape[0] != size:
        raise CollectiveValueError(
            f"{what} needs an array with one row for each of the group's {size} ranks along axis 0, "
            f"got shape {x.shape}"
        )


def _check_axis(axis: Any, x: NDArray[Any], size: int, what: str) -> int:
    """Return an axis as a number from 0 to ndim - 1; the ranks divide its length, unless they gather."""
    number = _as_integer(axis, f"axis of {what} must be an integer or None")
    if not -x.ndim <= number < x.ndim:
        raise CollectiveValueError(
            f"axis={number} of {what} is out of range for an array of {x.ndim} dimensions"
        )
    number %= x.ndim
    if what != "all_gather" and x.shape[number] % size:
        raise CollectiveValueError(
            f"{what} divides axis {number} among the group's {size} ranks, but its length "
            f"{x.shape[number]} (shape {x.shape}) is not a multiple of {size}"
        )
    return number


def _as_half(compress: DTypeLike, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type of 16 bits in which arrays of float32 or float64 are to travel."""
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
