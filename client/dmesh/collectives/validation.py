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

from dmesh.collectives import operators
from dmesh.collectives.backends.nccl.arrays import GpuArrays, is_gpu_array
from dmesh.collectives.envelope import ANY_SOURCE, ANY_TAG, MAX_TAG
from dmesh.collectives.foreign_arrays import as_numpy, as_output
from dmesh.collectives.reduction import REDUCTIONS, canonical_op
from dmesh.collectives.request import (
    BFLOAT16,
    REDUCING,
    ROOTED,
    SYNCHRONOUS,
    TRANSFER,
    Array,
    Pattern,
    Reduction,
    Request,
    Requests,
    describe,
    describe_dtype,
    describe_type,
    text_from,
)
from dmesh.errors import CollectiveTypeError, CollectiveValueError

# Limit of the search for an element that two arrays with interleaved memory share.
_OVERLAP_EFFORT = 10_000

_PEERS = {"send": "dst", "recv": "src"}
_NUMPY_ONLY = ("gather", "scatter", "permute", "scan", "exscan")


def _is_masked(x: object) -> bool:
    """Return whether `x` is a masked array. Nothing is, as long as `numpy.ma` is not imported."""
    module = sys.modules.get("numpy.ma")
    return module is not None and isinstance(x, module.MaskedArray)


def as_input(x: ArrayLike, what: str) -> Array:
    """Return `x` as a C-contiguous array of native byte order: itself if it is one, else a copy."""
    if _is_masked(x):
        raise CollectiveValueError(
            f"{what} cannot take a masked array; pass x.filled(value), or x.data and x.mask separately"
        )
    try:
        array = np.asarray(x if isinstance(x, np.ndarray) else as_numpy(x, what))
    except CollectiveTypeError:  # an array that is not on the CPU
        raise
    except ValueError as error:
        raise CollectiveValueError(f"{what} needs an array, got {describe_type(x)}: {error}") from error
    except TypeError as error:
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
    """Raise if the result cannot be put into `out`; it may overlap the input `x`, which is copied then."""
    del x
    if out is None:
        return
    if not isinstance(out, np.ndarray) or _is_masked(out):
        raise CollectiveTypeError(f"out= of {what} must be a NumPy array, not {describe_type(out)}")
    if out.dtype != dtype:
        raise CollectiveTypeError(
            f"out= of {what} has dtype {out.dtype}, but the result is {describe_dtype(dtype)}"
        )
    if out.shape != shape:
        raise CollectiveValueError(f"out= of {what} has shape {out.shape}, but the result's is {shape}")
    if not out.flags.writeable:
        raise CollectiveValueError(f"out= of {what} is read-only")


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
        return known or operators.resolve(op, dtype)

    def complete(self, request: Request) -> Request:
        """Return the request as it is."""
        return request


NUMPY = NumpyArrays()


class RequestBuilder(Requests):
    """Validates the calls of one rank of a group; see `Requests`."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self._gpu = GpuArrays()

    def convert(self, kind: str, x: Any, out: Any = None, **arguments: Any) -> Request:
        """Return the request of arrays of any library; see `Requests.make`."""
        if is_gpu_array(x) or is_gpu_array(out):
            return self.validate(kind, x, out, **arguments)
        target = as_output(out, kind)
        request = self.validate(kind, as_numpy(x, kind), target, **arguments)
        if target is out:
            return request
        resolves = request.resolve
        if resolves is None:
            return replace(request, returns=out)
        return replace(request, resolve=lambda result: replace(resolves(result), returns=out))

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
        counts: Any = None,
        recv_counts: Any = None,
        tag: Any = 0,
        status: Any = None,
        synchronous: Any = False,
    ) -> Request:
        """Check everything that a caller passed, and return the request; see `Requests.make`."""
        if kind == "barrier":
            return Request(kind, *describe(kind))
        if compress is not None:
            return self._compressed(x, op, out, compress)
        cuts = axis is not None and (kind == "scatter" or (kind == "all_to_all" and axis != 0))
        if cuts or counts is not None or recv_counts is not None:
            return self.with_counts(kind, x, out, counts, recv_counts, axis, root, op)
        size, rank = self.size, self.rank
        if kind == "probe" or (kind == "recv" and self._is_open(x, out, root, tag)):
            return self._receive(kind, x, out, root, tag, status)
        if kind in _PEERS:
            root = check_position(root, size, _PEERS[kind], kind)
            tag = check_tag(tag, kind)
            if synchronous and not tag:
                raise CollectiveValueError(
                    "a synchronous send needs a tag of at least 1: small arrays without one are buffered"
                )
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
                f"{kind} needs to know what to receive: pass an array of that dtype and shape, or out="
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
            fill = np.zeros((), dtype) if kind == "permute" and all(end != rank for _, end in moves) else None
            gets_result = not (kind == "send" or (kind in ("reduce", "gather") and rank != root))
            if reduction is not None:
                source = arrays.as_input(reduction.contribution(source, rank), kind)
                reduction = reduction.of_shape(source.shape)
                if axis is not None and reduction.undivided:
                    raise CollectiveValueError(
                        f"{kind} along an axis needs an operation that may be called with pieces of the "
                        "arrays: use dmesh.collectives.Op(function, elementwise=True)"
                    )
                if kind == "exscan" and rank == 0:  # nobody is before it
                    fill = _identity(reduction, dtype, shape)
                    gets_result = fill is not None
            contributes = not receives and (kind != "broadcast" or rank == root)
            if status is not None:
                status.fill(root, tag, dtype, shape)  # nothing else can come
            if kind == "permute":
                contributes = any(start == rank for start, _ in moves)
            aliased, needs_copy = False, False
            if out is not None and not receives:
                own = rank * min(int(source.nbytes), int(out.nbytes))
                aliased, needs_copy = aliasing(kind, source, out, own)
            parts = size if kind in ("reduce_scatter", "all_to_all") else 1
            called = TRANSFER if kind in _PEERS else kind
            name = "" if reduction is None else reduction.op
            where = f"tag={tag}" + SYNCHRONOUS * bool(synchronous) if tag else arrays.where
            text, descriptor = describe(called, array.dtype, array.shape, name, root or 0, axis, moves, where)
            if (tag or root == rank) and arrays is not NUMPY and kind == "send":
                raise CollectiveTypeError(
                    "send of a GPU array takes no tag, and does not send to this rank itself"
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
                shape=shape if gets_result else None,
                out=out,
                arrange=arrange,
                aliased=aliased,
                needs_copy=needs_copy or fill is not None,
                fill=fill,
                tag=tag,
                synchronous=bool(synchronous),
            )
            return arrays.complete(request)

    def with_counts(self, kind: str, x: Any, out: Any, *arguments: Any) -> Request:
        """Return the request of a call with blocks whose lengths may differ; see `counts`."""
        raise NotImplementedError

    def _is_open(self, x: Any, out: Any, source: Any, tag: Any) -> bool:
        """Return whether a receive takes more than the next array of one sender, of known dtype and shape."""
        unknown = x is None and self._arrays(out, "recv") is NUMPY
        return unknown or source is ANY_SOURCE or source == self.rank or tag is ANY_TAG or tag != 0

    def _receive(self, kind: str, x: Any, out: Any, source: Any, tag: Any, status: Any) -> Request:
        """Return the request of a receive that is more than the next array of one sender, or of a probe."""
        source = None if source is ANY_SOURCE else check_position(source, self.size, "src", kind)
        tag = None if tag is ANY_TAG else check_tag(tag, kind)
        said = [] if source is not None else ["any source"]
        template = None
        if x is not None:
            if self._arrays(x, kind) is not NUMPY:
                raise CollectiveTypeError(
                    "recv of a GPU array takes no tag, and needs a source that is another rank"
                )
            array = as_input(x, kind)
            template = array.dtype, array.shape
            check_out(out, array.dtype, array.shape, None, kind)
            said += [describe_dtype(array.dtype), f"shape {array.shape}"]
        elif out is not None:
            if self._arrays(out, kind) is not NUMPY:
                raise CollectiveTypeError(
                    "recv into a GPU array needs to know what to receive: pass an array of that dtype "
                    "and shape"
                )
            dtype = getattr(out, "dtype", np.dtype(np.uint8))
            check_out(out, dtype, getattr(out, "shape", ()), None, kind)
            if dtype.hasobject or not dtype.isnative:
                raise CollectiveTypeError(f"recv cannot receive into an array of dtype {dtype}")
            said += [describe_dtype(out.dtype), f"shape {out.shape} or smaller"]
        elif kind == "recv":
            said.append("any dtype and shape")
        if tag != 0:
            said.append("any tag" if tag is None else f"tag={tag}")
        pattern = Pattern(source, tag, template, kind == "probe")
        called = TRANSFER if kind == "recv" else kind
        return Request(
            called,
            text_from(called, said, None, ()),
            root=source or 0,
            out=out,
            pattern=pattern,
            status=status,
        )

    def _compressed(self, x: ArrayLike, op: Any, out: Any, compress: DTypeLike) -> Request:
        """Return the request of an all-reduce of arrays that travel in 16 bits."""
        kind = "all_reduce"
        if self._arrays(x, kind) is not NUMPY:
            raise CollectiveTypeError(
                "compress= of all_reduce is for NumPy arrays; convert GPU arrays yourself"
            )
        wide = as_input(x, kind)
        shape, dtype = wide.shape, wide.dtype
        NUMPY.reduction(canonical_op(op), dtype, kind)
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


def _identity(reduction: Reduction, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
    """Return the elements of an array that changes nothing; None if the reduction has none."""
    if (identity := reduction.identity) is None:
        return None
    try:
        with np.errstate(all="ignore"):
            return np.broadcast_to(np.asarray(identity).astype(dtype), shape).reshape(-1)
    except (TypeError, ValueError) as error:
        raise CollectiveValueError(
            f"the identity of {reduction.op} does not fit arrays of {describe_dtype(dtype)}, shape {shape}: "
            f"{error}"
        ) from None


def aliasing(kind: str, source: Any, out: Any, own: int) -> tuple[bool, bool]:
    """Return whether an input and `out` share memory, and whether the input must be copied first.

    It need not if data is only written where the same elements were, or where this rank alone read them.
    `own` is the number of bytes before this rank's own block, in the larger one of the two.
    """
    if not isinstance(out, np.ndarray):
        return _same_memory(source, out), kind in ("all_to_all", "permute")
    if not _shares_memory(source, out):
        return False, False
    if kind not in ("all_gather", "gather", "scatter", "reduce_scatter"):
        return True, kind in ("all_to_all", "permute") or not _same_memory(source, out)
    x, result = (array.__array_interface__["data"][0] for array in (source, out))
    first, second = (x, result) if kind in ("all_gather", "gather") else (result, x)
    is_own = first == second + own and out.flags.c_contiguous and source.dtype == out.dtype
    return kind == "reduce_scatter" or not is_own, not is_own


def _shares_memory(x: Array, out: Array) -> bool:
    """Return whether two arrays have memory in common, or may have."""
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


def as_integer(value: Any, error: str) -> int:
    """Return an integer as an int, or refuse it; True and False are none."""
    try:
        if not isinstance(value, (bool, np.bool_)):
            return operator.index(value)
    except TypeError:
        pass
    raise CollectiveValueError(f"{error}, got {value!r}")


def check_int64(value: Any, name: str, what: str) -> int:
    """Return an integer that fits in 64 bits, or refuse it."""
    number = as_integer(value, f"{name} of {what} must be an integer")
    if not -(1 << 63) <= number < 1 << 63:
        raise CollectiveValueError(f"{name}={number} of {what} does not fit in 64 bits")
    return number


def check_tag(value: Any, what: str) -> int:
    """Return a tag as an int, or refuse it."""
    tag = value if type(value) is int else as_integer(value, f"tag of {what} must be an integer")
    if not 0 <= tag <= MAX_TAG:
        raise CollectiveValueError(f"tag={tag} of {what} is not within 0 to {MAX_TAG}")
    return tag


def check_position(value: Any, size: int, name: str, what: str) -> int:
    """Return a position in a group (`root`, `src`, `dst`) as an int, or refuse it."""
    position = value if type(value) is int else as_integer(value, f"{name} of {what} must be an integer")
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
    number = as_integer(axis, f"axis of {what} must be an integer or None")
    if not -x.ndim <= number < x.ndim:
        raise CollectiveValueError(
            f"axis={number} of {what} is out of range for an array of {x.ndim} dimensions"
        )
    number %= x.ndim
    if what not in ("all_gather", "gather") and x.shape[number] % size:
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
