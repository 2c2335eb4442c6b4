"""From a call's arguments to what is to be done: everything is checked here, and nothing is sent.

A `Plan` is made in the caller's thread when a collective is called, and carried out then or, asynchronously,
later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmesh.collectives import algorithms
from dmesh.collectives.algorithms import Buffer, Program
from dmesh.collectives.arguments import (
    as_input,
    check_axis,
    check_blocks,
    check_divisible,
    check_out,
    check_pairs,
    check_position,
    native,
    same_memory,
)
from dmesh.collectives.execution import Link, Memory, run
from dmesh.collectives.reduction import Reduction, canonical_op, resolve
from dmesh.collectives.signature import TRANSFER, pairs_text, signature
from dmesh.errors import CollectiveValueError

Array = NDArray[Any]


@dataclass(slots=True)
class Plan:
    """A checked call."""

    signature: str
    """What all ranks must agree on."""
    program: Program
    """What this rank does."""
    dtype: np.dtype[Any]
    """Of the output buffer."""
    source: Array | None = None
    """The input: contiguous, native."""
    shape: tuple[int, ...] | None = None
    """Of the result; None if this rank gets none."""
    out: Array | None = None
    """Where the caller wants the result."""
    reduction: Reduction | None = None
    """What folds, if anything does."""
    arrange: Callable[[Array], Array] | None = None
    """Makes the result from the output buffer, if it is more than another shape."""
    aliased: bool = False
    """Whether `source` and `out` are the same memory."""
    needs_copy: bool = False
    """Whether an aliased input must be copied: elements are received over others not sent yet."""
    clears: bool = False
    """Whether the output must be filled with zeros first."""

    @property
    def nbytes(self) -> int:
        """Bytes of the larger of input and output."""
        source = 0 if self.source is None else int(self.source.nbytes)
        return max(source, 0 if self.shape is None else math.prod(self.shape) * self.dtype.itemsize)

    def carry_out(self, ranks: tuple[int, ...], link: Callable[[], Link]) -> Array | None:
        """Does it, and returns the result.

        Args:
            ranks: The rank at each position of the group.
            link: Opens the way to the peers, once everything has been allocated.
        """
        flat = None if self.source is None else self.source.reshape(-1)
        aliased = self.aliased
        if aliased and self.needs_copy and flat is not None:
            flat, aliased = flat.copy(), False
        in_place = (
            self.out is not None
            and self.arrange is None
            and self.out.flags.c_contiguous
            and self.out.flags.aligned
        )
        size = math.prod(self.shape) if self.shape is not None else self.program.size(Buffer.OUTPUT)
        result: Array
        if in_place:
            assert self.out is not None
            result = self.out.reshape(-1)
            if self.clears:
                result[...] = np.zeros((), self.dtype)
        else:
            result = (np.zeros if self.clears else np.empty)(size, self.dtype)
        memory = Memory.allocate(self.program, flat, result, self.reduction, aliased=aliased and in_place)
        run(self.program, memory, ranks, link(), self.reduction)
        if self.shape is None:
            return None
        if in_place:
            return self.out
        shaped = result.reshape(self.shape) if self.arrange is None else self.arrange(result)
        if self.out is None:
            return shaped
        self.out[...] = shaped
        return self.out


class Planner:
    """Makes the plans of one rank of a group.

    Args:
        size: How many ranks the group has.
        rank: This rank's position in it.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank

    def barrier(self) -> Plan:
        """Nobody passes before all have come."""
        return Plan("barrier()", algorithms.barrier(self.size, self.rank), np.dtype(np.uint8))

    def all_reduce(self, x: ArrayLike, op: str, out: Array | None) -> Plan:
        """All ranks get the fold of all arrays."""
        op, array, reduction = _reducible(x, op, "all_reduce")
        check_out(out, reduction.result, array.shape, _memory_of(x), "all_reduce")
        source = _on_wire(array, reduction)
        return Plan(
            signature("all_reduce", op, like=array),
            self._program(
                array.size, lambda count: algorithms.all_reduce(self.size, self.rank, count, source.nbytes)
            ),
            reduction.result,
            source,
            array.shape,
            out,
            reduction,
            aliased=_aliased(source, out),
        )

    def reduce(self, x: ArrayLike, op: str, root: int, out: Array | None) -> Plan:
        """The root gets the fold of all arrays."""
        root = check_position(root, self.size, "root", "reduce")
        op, array, reduction = _reducible(x, op, "reduce")
        self._check_only_root(out, root, "reduce")
        check_out(out, reduction.result, array.shape, _memory_of(x), "reduce")
        source = _on_wire(array, reduction)
        return Plan(
            signature("reduce", op, f"root={root}", like=array),
            self._program(
                array.size,
                lambda count: algorithms.reduce(self.size, self.rank, root, count, source.nbytes),
            ),
            reduction.result,
            source,
            array.shape if self.rank == root else None,
            out,
            reduction,
            aliased=_aliased(source, out),
        )

    def reduce_scatter(self, x: ArrayLike, op: str, axis: int | None, out: Array | None) -> Plan:
        """Each rank gets the fold of all ranks' blocks of its number."""
        op, array, reduction = _reducible(x, op, "reduce_scatter")
        if axis is None:
            check_blocks(array, self.size, "reduce_scatter")
            shape, rows = array.shape[1:], array
        else:
            axis = check_divisible(array, axis, self.size, "reduce_scatter")
            length = array.shape[axis] // self.size
            shape = (*array.shape[:axis], length, *array.shape[axis + 1 :])
            cut = array.reshape(*array.shape[:axis], self.size, length, *array.shape[axis + 1 :])
            rows = np.moveaxis(cut, axis, 0)
        check_out(out, reduction.result, shape, _memory_of(x), "reduce_scatter")
        source = native(_on_wire(rows, reduction), "reduce_scatter")
        cut_at = () if axis is None else (f"axis={axis}",)
        return Plan(
            signature("reduce_scatter", op, *cut_at, like=array),
            self._program(
                array.size // self.size,
                lambda count: algorithms.reduce_scatter(self.size, self.rank, count),
            ),
            reduction.result,
            source,
            shape,
            out,
            reduction,
            aliased=_aliased(source, out),
        )

    def broadcast(self, x: ArrayLike, root: int, out: Array | None) -> Plan:
        """All ranks get the root's array."""
        root = check_position(root, self.size, "root", "broadcast")
        array = as_input(x, "broadcast")
        check_out(out, array.dtype, array.shape, _memory_of(x), "broadcast")
        return Plan(
            signature("broadcast", f"root={root}", like=array),
            self._program(
                _movable(array),
                lambda count: algorithms.broadcast(self.size, self.rank, root, count, array.nbytes),
            ),
            array.dtype,
            array,
            array.shape,
            out,
            aliased=_aliased(array, out),
        )

    def all_gather(self, x: ArrayLike, axis: int | None, out: Array | None) -> Plan:
        """All ranks get all arrays."""
        array = as_input(x, "all_gather")
        stacked = (self.size, *array.shape)
        arrange: Callable[[Array], Array] | None = None
        if axis is None:
            shape = stacked
        else:
            number = check_axis(axis, array.ndim, "all_gather")
            length = self.size * array.shape[number]
            shape = (*array.shape[:number], length, *array.shape[number + 1 :])
            if number:
                arrange = lambda flat: np.concatenate(list(flat.reshape(stacked)), axis=number)  # noqa: E731
        check_out(out, array.dtype, shape, _memory_of(x), "all_gather")
        return Plan(
            signature("all_gather", like=array),
            self._program(_movable(array), lambda count: algorithms.all_gather(self.size, self.rank, count)),
            array.dtype,
            array,
            shape,
            out,
            arrange=arrange,
            aliased=_aliased(array, out),
        )

    def gather(self, x: ArrayLike, root: int, out: Array | None) -> Plan:
        """The root gets all arrays."""
        root = check_position(root, self.size, "root", "gather")
        array = as_input(x, "gather")
        self._check_only_root(out, root, "gather")
        shape = (self.size, *array.shape)
        check_out(out, array.dtype, shape, _memory_of(x), "gather")
        return Plan(
            signature("gather", f"root={root}", like=array),
            self._program(
                _movable(array), lambda count: algorithms.gather(self.size, self.rank, root, count)
            ),
            array.dtype,
            array,
            shape if self.rank == root else None,
            out,
            aliased=_aliased(array, out),
        )

    def scatter(self, x: ArrayLike | None, root: int, out: Array | None) -> Plan:
        """Each rank gets its row of the root's array."""
        root = check_position(root, self.size, "root", "scatter")
        source: Array | None = None
        if self.rank == root:
            if x is None:
                raise CollectiveValueError("the root of scatter must pass the array whose rows are dealt out")
            source = as_input(x, "scatter")
            check_blocks(source, self.size, "scatter")
            like = source[0, ...]  # an array even where source[0] would be a scalar of another dtype
        elif x is not None:
            like = as_input(x, "scatter")
        elif out is not None:
            like = native(out, "scatter") if isinstance(out, np.ndarray) else as_input(out, "scatter")
        else:
            raise CollectiveValueError(
                "scatter must know what it will receive: pass an array of one row's dtype and shape, or out="
            )
        memory = _memory_of(x) if self.rank == root else None
        check_out(out, like.dtype, like.shape, memory, "scatter")
        return Plan(
            signature("scatter", f"root={root}", like=like),
            self._program(
                _movable(like), lambda count: algorithms.scatter(self.size, self.rank, root, count)
            ),
            like.dtype,
            source,
            like.shape,
            out,
        )

    def all_to_all(self, x: ArrayLike, out: Array | None) -> Plan:
        """Block j of rank i becomes block i of rank j."""
        array = as_input(x, "all_to_all")
        check_divisible(array, 0, self.size, "all_to_all")
        check_out(out, array.dtype, array.shape, _memory_of(x), "all_to_all")
        return Plan(
            signature("all_to_all", like=array),
            self._program(
                _movable(array) // self.size,
                lambda count: algorithms.all_to_all(self.size, self.rank, count),
            ),
            array.dtype,
            array,
            array.shape,
            out,
            aliased=_aliased(array, out),
            needs_copy=True,
        )

    def permute(self, x: ArrayLike, pairs: Iterable[tuple[int, int]], out: Array | None) -> Plan:
        """Each (source, target) pair moves the source's array to the target."""
        checked = check_pairs(pairs, self.size, "permute")
        array = as_input(x, "permute")
        check_out(out, array.dtype, array.shape, _memory_of(x), "permute")
        return Plan(
            signature("permute", pairs_text(checked), like=array),
            self._program(
                _movable(array), lambda count: algorithms.permute(self.size, self.rank, checked, count)
            ),
            array.dtype,
            array,
            array.shape,
            out,
            aliased=_aliased(array, out),
            needs_copy=True,
            clears=all(target != self.rank for _, target in checked),
        )

    def send(self, x: ArrayLike, dst: int) -> Plan:
        """The sender's half of a transfer."""
        dst = self._other(dst, "dst", "send")
        array = as_input(x, "send")
        program = algorithms.transfer_out(dst, _movable(array))
        return Plan(signature(TRANSFER, like=array), program, array.dtype, array)

    def recv(self, x: ArrayLike | None, src: int, out: Array | None) -> Plan:
        """The receiver's half of a transfer."""
        src = self._other(src, "src", "recv")
        if x is None and out is None:
            raise CollectiveValueError(
                "recv must know what it will receive: pass an array of the same dtype and shape, or out="
            )
        array = as_input(x if x is not None else out, "recv")  # type: ignore[arg-type]
        check_out(out, array.dtype, array.shape, None, "recv")
        program = algorithms.transfer_in(src, _movable(array))
        return Plan(signature(TRANSFER, like=array), program, array.dtype, shape=array.shape, out=out)

    def _program(self, count: int, make: Callable[[int], Program]) -> Program:
        # Without elements there is nothing to send, but nobody may pass before all have come.
        return make(count) if count else algorithms.barrier(self.size, self.rank)

    def _other(self, position: int, name: str, what: str) -> int:
        position = check_position(position, self.size, name, what)
        if position == self.rank:
            raise CollectiveValueError(f"{name}={position} of {what} is this rank itself")
        return position

    def _check_only_root(self, out: Array | None, root: int, what: str) -> None:
        if out is not None and self.rank != root:
            raise CollectiveValueError(
                f"out= of {what} is for the root (position {root}) alone; this is position {self.rank}"
            )


def _reducible(x: ArrayLike, op: str, what: str) -> tuple[str, Array, Reduction]:
    op = canonical_op(op)
    array = as_input(x, what)
    return op, array, resolve(op, array.dtype)


def _on_wire(array: Array, reduction: Reduction) -> Array:
    return array if array.dtype == reduction.wire else array.astype(reduction.wire)


def _memory_of(x: ArrayLike | None) -> Array | None:
    """The caller's own array, with which `out` may overlap; None if something else was passed."""
    return x if isinstance(x, np.ndarray) else None


def _aliased(source: Array, out: Array | None) -> bool:
    return out is not None and same_memory(source, out)


def _movable(array: Array) -> int:
    """The number of elements that must travel: none if they have no bytes."""
    return array.size if array.nbytes else 0
