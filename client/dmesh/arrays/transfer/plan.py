"""Steps from one placement of an array to another, with their cost in bytes. No IO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dmesh.arrays import ledger
from dmesh.arrays.spec import WHOLE, Spec
from dmesh.arrays.transfer.execute import Array, Shards, gather_rows, reduce_among, run_exchange
from dmesh.arrays.transfer.mapping import Dim, Exchange, Side, plan_exchange, plan_relayout, side

FOLDS: dict[str, np.ufunc] = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "any": np.logical_or,
    "all": np.logical_and, "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor, "fmin": np.fmin, "fmax": np.fmax, "logical_xor": np.logical_xor,
}  # fmt: skip
"""Ufuncs that reduce contributions."""
_LOCAL_NAMES = ("fmin", "fmax", "logical_xor")
"""Reductions for which the collectives need a ufunc."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduction of contributions along some mesh axes, to a replicated array or to shards along the axis."""

    source: Spec
    target: Spec
    axes: tuple[int, ...]
    scatter: int
    """Dimension that is sharded along the axis, or -1."""
    exchange: Exchange | None
    """Mapping that gathers all contributions, if the mesh has no group for each line of devices."""

    @property
    def kind(self) -> str:
        """Name of the transfer."""
        return "all-reduce" if self.scatter < 0 else "reduce-scatter"

    def bytes_by_client(self) -> dict[int, int]:
        """Return the bytes that each client's devices receive from other devices."""
        source, grid = self.source, self.source.grid
        if self.exchange is not None:
            return {client: n * source.dtype.itemsize for client, n in self.exchange.moved.items()}
        lines = grid.lines(self.axes)
        assert lines is not None
        found = {}
        for client, slots in source.all_slots.items():
            sizes: dict[tuple[int, ...], int] = {}
            folded = 0
            for slot in slots:
                nbytes = math.prod(b - a for a, b in source.region(slot)) * source.dtype.itemsize
                key = _key(source, self.axes, slot)
                folded += nbytes if key in sizes else 0
                sizes[key] = nbytes
            k = len(lines[client].clients)
            factor = 2 if self.scatter < 0 else 1
            found[client] = folded + factor * sum(sizes.values()) * (k - 1) // k
        return found

    def run(self, shards: Sequence[Array]) -> Shards:
        """Carry out the step on this client's blocks."""
        if self.exchange is not None:
            return self._gathered(shards)
        source, target, grid, fold = self.source, self.target, self.source.grid, FOLDS[self.source.op]
        folded: dict[tuple[int, ...], Array] = {}
        for slot, shard in zip(source.slots, shards, strict=True):
            key = _key(source, self.axes, slot)
            if key in folded:
                ledger.count("fold", shard.nbytes)
                folded[key] = np.asarray(fold(folded[key], shard))
            else:
                folded[key] = shard
        keys, lines = sorted(folded), grid.lines(self.axes)
        assert lines is not None
        clients = lines[grid.client].clients
        if len(clients) > 1:
            op: Any = fold if source.op in _LOCAL_NAMES else source.op
            if self.scatter >= 0:
                blocks = [
                    [self._block(folded[key], place[0]) for key in keys for place in lines[client].places]
                    for client in clients
                ]
                flat = _joined([block for each in blocks for block in each])
                counts = [sum(block.size for block in each) for each in blocks]
                mine = reduce_among(grid, self.axes, flat, op, counts)
                own, at, found = blocks[clients.index(grid.client)], 0, {}
                names = [(key, place[0]) for key in keys for place in lines[grid.client].places]
                for name, block in zip(names, own, strict=True):
                    found[name] = mine[at : at + block.size].reshape(block.shape)
                    at += block.size
                return tuple(found[self._name(slot)] for slot in target.slots)
            flat, at = reduce_among(grid, self.axes, _joined([folded[key] for key in keys]), op), 0
            for key in keys:
                size, shape = folded[key].size, folded[key].shape
                folded[key] = flat[at : at + size].reshape(shape)
                at += size
        if self.scatter < 0:
            return tuple(folded[slot] for slot in target.slots)
        names = [self._name(slot) for slot in target.slots]
        return tuple(self._block(folded[key], at) for key, at in names)

    def _block(self, array: Array, at: int) -> Array:
        low, high = self.target.cuts(self.scatter)[at]
        return array[(slice(None),) * self.scatter + (slice(low, high),)]

    def _name(self, slot: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        at = self.target.used.index(self.axes[0])
        return slot[:at] + slot[at + 1 :], slot[at]

    def _gathered(self, shards: Sequence[Array]) -> Shards:
        assert self.exchange is not None
        extra = (1,) * len(self.axes)
        stacked = run_exchange(
            self.exchange, [shard.reshape(extra + shard.shape) for shard in shards], self.source.dtype
        )
        fold, result = FOLDS[self.source.op], []
        for stack in stacked:
            count = math.prod(stack.shape[: len(self.axes)])
            flat = stack.reshape(count, *stack.shape[len(self.axes) :])
            total = flat[0]
            for one in flat[1:]:
                total = np.asarray(fold(total, one))
            result.append(total)
        return tuple(result)


@dataclass(frozen=True, slots=True)
class Move:
    """Exchange of blocks between two shardings."""

    source: Spec
    target: Spec
    exchange: Exchange

    @property
    def kind(self) -> str:
        """Name of the transfer."""
        if not any(self.exchange.moved.values()):
            return "slice"
        return "all-gather" if set(self.target.used) < set(self.source.used) else "all-to-all"

    def bytes_by_client(self) -> dict[int, int]:
        """Return the bytes that each client's devices receive from other devices."""
        return {client: n * self.source.dtype.itemsize for client, n in self.exchange.moved.items()}

    def run(self, shards: Sequence[Array]) -> Shards:
        """Carry out the step on this client's blocks."""
        counts = _rows_of_clients(self.source, self.target)
        if counts is None:
            return run_exchange(self.exchange, shards, self.source.dtype)
        return (gather_rows(self.source.grid.group(), shards, counts),)


def _joined(blocks: Sequence[Array]) -> Array:
    """Return the elements of blocks, one block after the other; without a copy if they lie so in memory."""
    if len(blocks) == 1:
        return blocks[0].reshape(-1)
    base, at = blocks[0].base, blocks[0].ctypes.data
    for block in blocks:
        if base is None or block.base is not base or block.ctypes.data != at or not block.flags.c_contiguous:
            return np.concatenate([block.reshape(-1) for block in blocks])
        at += block.nbytes
    first = blocks[0]
    return np.lib.stride_tricks.as_strided(first, (sum(b.size for b in blocks),), (first.itemsize,))


Step = Reduce | Move


@lru_cache(maxsize=1024)
def _rows_of_clients(source: Spec, target: Spec) -> tuple[int, ...] | None:
    """Return each client's number of rows, if the clients have consecutive rows and all need all rows."""
    grid = source.grid
    if (
        target.used
        or len(source.used) != 1
        or source.axes[0] == WHOLE
        or len(grid.clients) == 1
        or not source.size
    ):
        return None
    slots = [slot for client in grid.clients for slot in source.all_slots[client]]
    if slots != sorted(set(slots)):
        return None
    cuts = source.cuts(0)
    return tuple(
        sum(cuts[slot[0]][1] - cuts[slot[0]][0] for slot in source.all_slots[client])
        for client in grid.clients
    )


def _key(spec: Spec, axes: tuple[int, ...], slot: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(at for axis, at in zip(spec.used, slot, strict=True) if axis not in axes)


def _reduce(source: Spec, axes: tuple[int, ...], scatter: int) -> Reduce:
    grid = source.grid
    cut = list(source.axes)
    if scatter >= 0:
        cut[scatter] = axes[0]
    left = [axis for axis in source.partial if axis not in axes]
    target = source.replace(axes=cut, partial=left, op=source.op if left else "")
    exchange = None
    if grid.lines(axes) is None:
        dims = [
            Dim(
                grid.sizes[a],
                Side(a, tuple((i, i + 1) for i in range(grid.sizes[a]))),
                Side(WHOLE, ((0, grid.sizes[a]),)),
            )
            for a in axes
        ] + [Dim(n, side(source, d), side(target, d)) for d, n in enumerate(source.shape)]
        exchange = plan_exchange(source, dims, target.used, tied=left)
    return Reduce(source, target, axes, scatter, exchange)


@lru_cache(maxsize=1024)
def plan(source: Spec, target: Spec) -> tuple[Step, ...]:
    """Return the steps from one placement to a complete one of the same shape and dtype.

    Contributions are reduced first; with a reduce-scatter if the target is sharded along their mesh axis, so
    that each element travels once.
    """
    steps: list[Step] = []
    now, left = source, list(source.partial)
    for axis in source.partial:
        dim = target.axes.index(axis) if axis in target.axes else -1
        if dim >= 0 and now.axes[dim] == WHOLE:
            steps.append(_reduce(now, (axis,), dim))
            now = steps[-1].target
            left.remove(axis)
    if left:
        steps.append(_reduce(now, tuple(left), -1))
        now = steps[-1].target
    if now is not target:
        steps.append(Move(now, target, plan_relayout(now, target)))
    return tuple(steps)


@lru_cache(maxsize=4096)
def cost(source: Spec, target: Spec) -> int:
    """Return the bytes that all devices receive from others in the steps from one placement to another."""
    if source is target:
        return 0
    return sum(sum(step.bytes_by_client().values()) for step in plan(source, target))
