"""Validation of calls: from a caller's arguments to a request.

Everything that a caller can get wrong is found here, in the caller's thread, before anything is sent to the
other ranks or allocated for them.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dmesh.collectives.backends.nccl import is_gpu_array
from dmesh.collectives.reduction import canonical_op, resolve
from dmesh.collectives.request import (
    TRANSFER,
    Array,
    Arrays,
    Descriptor,
    Reduction,
    Request,
    describe,
    describe_dtype,
    describe_type,
)
from dmesh.errors import CollectiveTypeError, CollectiveValueError

# Limit of the search for an element that two arrays with interleaved memory share.
_OVERLAP_EFFORT = 10_000

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class NumpyArrays:
    """NumPy; see `Arrays`."""

    def using(self, x: Any, what: str) -> AbstractContextManager[None]:
        """Do nothing: NumPy has no devices."""
        del x, what
        return nullcontext()

    def as_input(self, x: Any, what: str) -> Array:
        """Return an array in C order and native byte order; see `as_input`."""
        return as_input(x, what)

    def check_out(self, out: Any, dtype: Any, shape: tuple[int, ...], x: Any, what: str) -> None:
        """Raise if the result cannot be put into `out`; see `check_out`."""
        check_out(out, dtype, shape, x if isinstance(x, np.ndarray) else None, what)

    def reduction(self, op: str, dtype: np.dtype[Any], what: str) -> Reduction:
        """Return how contributions are folded; see `reduction.resolve`."""
        del what
        return resolve(canonical_op(op), dtype)

    def describe(
        self, kind: str, arguments: list[str], like: Any, number: int
    ) -> tuple[str, Descriptor | None]:
        """Return the wire descriptor as text and in numbers."""
        return describe(kind, tuple(arguments), like.dtype, like.shape, number)

    def complete(self, request: Request) -> Request:
        """Return the request as it is."""
        return request


NUMPY = NumpyArrays()


class RequestBuilder:
    """Validates the calls of one rank of a group.

    Args:
        size: Number of ranks in the group.
        rank: This rank's position.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank
        self._gpu: Arrays | None = None

    def barrier(self) -> Request:
        """No rank passes before all have come."""
        text, descriptor = describe("barrier", (), None, (), 0)
        return Request("barrier", text, descriptor)

    def all_reduce(self, x: ArrayLike, op: str, out: Any, compress: DTypeLike | None = None) -> Request:
        """All ranks get the reduction of all arrays."""
        arrays, what = self._arrays(x), "all_reduce"
        if compress is not None:
            if arrays is not NUMPY:
                raise CollectiveTypeError(
                    "compress= of all_reduce is for NumPy arrays; convert GPU arrays yourself"
                )
            return self._compressed(x, op, out, compress)
        with arrays.using(x, what):
            array = arrays.as_input(x, what)
            reduction = arrays.reduction(op, array.dtype, what)
            arrays.check_out(out, reduction.result, array.shape, x, what)
            return self._reducing(arrays, what, array, array, reduction, array.shape, out)

    def _compressed(self, x: ArrayLike, op: str, out: Any, compress: DTypeLike) -> Request:
        """Arrays that travel in 16 bits."""
        what = "all_reduce"
        wide = as_input(x, what)
        resolve(canonical_op(op), wide.dtype)
        narrow = as_half(compress, wide.dtype)
        NUMPY.check_out(out, wide.dtype, wide.shape, x, what)
        with np.errstate(all="ignore"):  # values that are too large become infinite, on one rank as on all
            request = self.all_reduce(wide.astype(narrow), op, None)
        return replace(request, out=out, arrange=lambda flat: flat.reshape(wide.shape).astype(wide.dtype))

    def reduce(self, x: ArrayLike, op: str, root: int, out: Any) -> Request:
        """The root gets the reduction of all arrays."""
        arrays, what = self._arrays(x), "reduce"
        root = check_position(root, self.size, "root", what)
        check_only_root(out, self.rank, root, what)
        with arrays.using(x, what):
            array = arrays.as_input(x, what)
            reduction = arrays.reduction(op, array.dtype, what)
            arrays.check_out(out, reduction.result, array.shape, x, what)
            shape = array.shape if self.rank == root else None
            return self._reducing(arrays, what, array, array, reduction, shape, out, root=root)

    def reduce_scatter(self, x: ArrayLike, op: str, axis: int | None, out: Any) -> Request:
        """Each rank gets the reduction of all ranks' blocks of its number."""
        arrays, what = self._arrays(x), "reduce_scatter"
        with arrays.using(x, what):
            array = arrays.as_input(x, what)
            reduction = arrays.reduction(op, array.dtype, what)
            if axis is None:
                check_blocks(array, self.size, what)
                shape, rows = array.shape[1:], array
            else:
                axis = check_divisible(array, axis, self.size, what)
                length = array.shape[axis] // self.size
                shape = (*array.shape[:axis], length, *array.shape[axis + 1 :])
                cut = array.reshape(*array.shape[:axis], self.size, length, *array.shape[axis + 1 :])
                rows = cut.transpose(axis, *(d for d in range(cut.ndim) if d != axis))
            arrays.check_out(out, reduction.result, shape, x, what)
            return self._reducing(arrays, what, array, rows, reduction, shape, out, axis=axis)

    def _reducing(
        self,
        arrays: Arrays,
        kind: str,
        like: Any,
        rows: Any,
        reduction: Reduction,
        shape: tuple[int, ...] | None,
        out: Any,
        *,
        root: int | None = None,
        axis: int | None = None,
    ) -> Request:
        source = rows if rows.dtype == reduction.wire else rows.astype(reduction.wire, order="C")
        source = arrays.as_input(source, kind)
        arguments = [reduction.op]
        if root is not None:
            arguments.append(f"root={root}")
        if axis is not None:
            arguments.append(f"axis={axis}")
        text, descriptor = arrays.describe(kind, arguments, like, (root or 0) if axis is None else axis + 1)
        blocks = self.size if kind == "reduce_scatter" else 1
        return arrays.complete(
            Request(
                kind,
                text,
                descriptor,
                nbytes_per_rank=int(source.nbytes),
                count=source.size // blocks,
                root=root or 0,
                reduction=reduction,
                contributes=True,
                dtype=reduction.result,
                source=source,
                shape=shape,
                out=out,
                aliased=_aliased(source, out),
            )
        )

    def broadcast(self, x: ArrayLike, root: int, out: Any) -> Request:
        """All ranks get the root's array."""
        arrays, what = self._arrays(x), "broadcast"
        root = check_position(root, self.size, "root", what)
        with arrays.using(x, what):
            array = arrays.as_input(x, what)
            arrays.check_out(out, array.dtype, array.shape, x, what)
            return self._moving(
                arrays, what, array, array.shape, out, root=root, contributes=self.rank == root
            )

    def all_gather(self, x: ArrayLike, axis: int | None, out: Any) -> Request:
        """All ranks get all arrays."""
        arrays, what = self._arrays(x), "all_gather"
        with arrays.using(x, what):
            array = arrays.as_input(x, what)
            stacked = (self.size, *array.shape)
            shape = stacked
            arrange: Callable[[Any], Any] | None = None
            if axis is not None:
                number = check_axis(axis, array.ndim, what)
                shape = (
                    *array.shape[:number],
                    self.size * array.shape[number],
                    *array.shape[number + 1 :],
                )
                if number:
                    order = (*range(1, number + 1), 0, *range(number + 1, array.ndim + 1))

                    def arrange(flat: Any) -> Any:
                        return flat.reshape(stacked).transpose(order).copy(order="C").reshape(shape)

            arrays.check_out(out, array.dtype, shape, x, what)
            return self._moving(arrays, what, array, shape, out, arrange=arrange)

    def gather(self, x: ArrayLike, root: int, out: Any) -> Request:
        """The root gets all arrays."""
        what = "gather"
        root = check_position(root, self.size, "root", what)
        array = as_input(x, what)
        check_only_root(out, self.rank, root, what)
        shape = (self.size, *array.shape)
        NUMPY.check_out(out, array.dtype, shape, x, what)
        return self._moving(NUMPY, what, array, shape if self.rank == root else None, out, root=root)

    def scatter(self, x: ArrayLike | None, root: int, out: Any) -> Request:
        """Each rank gets its row of the root's array."""
        what = "scatter"
        root = check_position(root, self.size, "root", what)
        source: Array | None = None
        if self.rank == root:
            if x is None:
                raise CollectiveValueError("the root of scatter must pass the array whose rows are scattered")
            source = as_input(x, what)
            check_blocks(source, self.size, what)
            like = source[0, ...]  # an array even where source[0] would be a scalar of another dtype
        elif x is not None:
            like = as_input(x, what)
        elif out is not None:
            like = native(out, what) if isinstance(out, np.ndarray) else as_input(out, what)
        else:
            raise CollectiveValueError(
                "scatter must know what it will receive: pass an array of one row's dtype and shape, or out="
            )
        NUMPY.check_out(out, like.dtype, like.shape, None if source is None else x, what)
        return self._moving(
            NUMPY, what, like, like.shape, out, source=source, blocks=self.size, root=root,
            contributes=self.rank == root, aliased=False,
        )  # fmt: skip

    def all_to_all(self, x: ArrayLike, out: Any) -> Request:
        """Block j of rank i becomes block i of rank j."""
        arrays, what = self._arrays(x), "all_to_all"
        with arrays.using(x, what):
            array = arrays.as_input(x, what)
            check_divisible(array, 0, self.size, what)
            arrays.check_out(out, array.dtype, array.shape, x, what)
            return self._moving(
                arrays, what, array, array.shape, out, needs_copy=True, count=array.size // self.size
            )

    def permute(self, x: ArrayLike, pairs: Iterable[tuple[int, int]], out: Any) -> Request:
        """Each (source, target) pair moves the source's array to the target."""
        what = "permute"
        checked = check_pairs(pairs, self.size, what)
        array = as_input(x, what)
        NUMPY.check_out(out, array.dtype, array.shape, x, what)
        return self._moving(
            NUMPY, what, array, array.shape, out, needs_copy=True, pairs=checked,
            contributes=any(source == self.rank for source, _ in checked),
            zero_fill=all(target != self.rank for _, target in checked),
        )  # fmt: skip

    def send(self, x: ArrayLike, dst: int) -> Request:
        """The sender's half of a transfer."""
        arrays, what = self._arrays(x), "send"
        dst = check_other(dst, self.rank, self.size, "dst", what)
        with arrays.using(x, what):
            array = arrays.as_input(x, what)
            return self._moving(arrays, TRANSFER, array, None, None, peer=dst)

    def recv(self, x: ArrayLike | None, src: int, out: Any) -> Request:
        """The receiver's half of a transfer."""
        like: Any = out if x is None else x
        arrays, what = self._arrays(like), "recv"
        src = check_other(src, self.rank, self.size, "src", what)
        if like is None:
            raise CollectiveValueError(
                "recv must know what it will receive: pass an array of the same dtype and shape, or out="
            )
        with arrays.using(like, what):
            array = arrays.as_input(like, what)
            arrays.check_out(out, array.dtype, array.shape, None, what)
            return self._moving(
                arrays, TRANSFER, array, array.shape, out, peer=src, contributes=False, aliased=False
            )

    def _moving(
        self,
        arrays: Arrays,
        kind: str,
        like: Any,
        shape: tuple[int, ...] | None,
        out: Any,
        *,
        source: Any = None,
        blocks: int = 1,
        root: int | None = None,
        peer: int | None = None,
        pairs: tuple[tuple[int, int], ...] = (),
        contributes: bool = True,
        count: int | None = None,
        aliased: bool | None = None,
        needs_copy: bool = False,
        zero_fill: bool = False,
        arrange: Callable[[Any], Any] | None = None,
    ) -> Request:
        arguments = [] if root is None else [f"root={root}"]
        if kind == "permute":
            arguments.append("[" + ", ".join(f"{a}->{b}" for a, b in pairs) + "]")
        text, descriptor = arrays.describe(kind, arguments, like, root or 0)
        nbytes = int(like.nbytes)
        if source is None and contributes:
            source = like
        return arrays.complete(
            Request(
                kind,
                text,
                descriptor,
                nbytes_per_rank=nbytes * blocks,
                count=0 if not nbytes else like.size if count is None else count,
                root=(peer if peer is not None else root) or 0,
                pairs=pairs,
                contributes=contributes,
                dtype=like.dtype,
                source=source,
                shape=shape,
                out=out,
                arrange=arrange,
                aliased=_aliased(like, out) if aliased is None else aliased,
                needs_copy=needs_copy,
                zero_fill=zero_fill,
            )
        )

    def _arrays(self, x: object) -> Arrays:
        if "cupy" not in sys.modules or not is_gpu_array(x):
            return NUMPY
        if self._gpu is None:
            from dmesh.collectives.backends.nccl.arrays import GpuArrays

            self._gpu = GpuArrays()
        return self._gpu


def _aliased(source: Any, out: Any) -> bool:
    if out is None:
        return False
    if isinstance(out, np.ndarray):
        return same_memory(source, out)
    return bool(source.data.ptr == out.data.ptr)


def as_input(x: ArrayLike, what: str) -> NDArray[Any]:
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
    """Check the array that a caller wants the result in."""
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
    """Return a position in a group (`root`, `src`, `dst`) as an int."""
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


def check_other(position: int, rank: int, size: int, name: str, what: str) -> int:
    """Return the position of another rank than this one (`src`, `dst`) as an int."""
    position = check_position(position, size, name, what)
    if position == rank:
        raise CollectiveValueError(f"{name}={position} of {what} is this rank itself")
    return position


def check_only_root(out: object, rank: int, root: int, what: str) -> None:
    """Check that `out` is given on the root alone."""
    if out is not None and rank != root:
        raise CollectiveValueError(
            f"out= of {what} is for the root (position {root}) alone; this is position {rank}"
        )


def check_pairs(pairs: Iterable[tuple[int, int]], size: int, what: str) -> tuple[tuple[int, int], ...]:
    """Return the (source, target) pairs of a permutation, sorted."""
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
    """Return how many seconds a collective may take."""
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
        raise CollectiveValueError(f"timeout must be a number of seconds, got {timeout!r}")
    seconds = float(timeout)
    if math.isnan(seconds) or seconds <= 0:
        raise CollectiveValueError(f"timeout must be more than 0 seconds, got {timeout!r}")
    return seconds


def check_blocks(x: NDArray[Any], size: int, what: str) -> None:
    """Check that an array has exactly one row for each rank along its first axis."""
    if x.ndim == 0 or x.shape[0] != size:
        raise CollectiveValueError(
            f"{what} needs an array with one row for each of the group's {size} ranks along axis 0, "
            f"got shape {x.shape}"
        )


def check_divisible(x: NDArray[Any], axis: int, size: int, what: str) -> int:
    """Check that an array can be cut into one equal block for each rank along an axis; returns the axis."""
    axis = check_axis(axis, x.ndim, what)
    if x.shape[axis] % size:
        raise CollectiveValueError(
            f"{what} divides axis {axis} among the group's {size} ranks, but its length "
            f"{x.shape[axis]} (shape {x.shape}) is not a multiple of {size}"
        )
    return axis


def check_axis(axis: int, ndim: int, what: str) -> int:
    """Return an axis as a number from 0 to ndim - 1."""
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
    """Return the type of 16 bits in which arrays are to travel."""
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
