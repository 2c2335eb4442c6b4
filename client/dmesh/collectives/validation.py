"""Validation of calls: from a caller's arguments to a request.

Everything that a caller can get wrong is found here, in the caller's thread, before anything is sent to the
other ranks or allocated for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from dmesh.collectives.arguments import (
    as_half,
    as_input,
    check_axis,
    check_blocks,
    check_divisible,
    check_only_root,
    check_other,
    check_out,
    check_pairs,
    check_position,
    native,
    same_memory,
)
from dmesh.collectives.backends.nccl import is_gpu_array
from dmesh.collectives.descriptor import TRANSFER, Descriptor, describe
from dmesh.collectives.reduction import Reduction, canonical_op, resolve
from dmesh.collectives.request import Array, Arrays, Request
from dmesh.errors import CollectiveTypeError, CollectiveValueError


class NumpyArrays:
    """NumPy; see `Arrays`."""

    def using(self, x: Any, what: str) -> AbstractContextManager[None]:
        """Do nothing: NumPy has no devices."""
        del x, what
        return nullcontext()

    def as_input(self, x: Any, what: str) -> Array:
        """Return an array in C order and native byte order; see `arguments.as_input`."""
        return as_input(x, what)

    def check_out(self, out: Any, dtype: Any, shape: tuple[int, ...], x: Any, what: str) -> None:
        """Raise if the result cannot be put into `out`; see `arguments.check_out`."""
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
