"""Operations that move elements: each is a mapping of indices along each dimension."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays.dispatch.operands import bring, free_axes
from dmesh.arrays.dtensor import DTensor, exchange
from dmesh.arrays.spec import WHOLE, Spec, spec_of
from dmesh.arrays.transfer.mapping import EVERY, Dim, Exchange, Indices, Run, plan_exchange, side


class Pick:
    """Selected elements along one dimension, in the order of the result.

    Args:
        count: Their number.
        at: Their indices.
    """

    __slots__ = ("at", "count")

    def __init__(self, count: int, at: Indices = EVERY) -> None:
        self.count = count
        self.at = at

    @property
    def key(self) -> Any:
        """Hashable identity; None for a list of indices, whose plan is not cached."""
        return (self.count, self.at) if isinstance(self.at, Run) else None


@lru_cache(maxsize=1024)
def _plan_runs(source: Spec, target: Spec, keys: tuple[tuple[int, Run], ...]) -> Exchange:
    dims = [Dim(n, side(source, d, run), side(target, d)) for d, (n, run) in enumerate(keys)]
    return plan_exchange(source, dims, target.used)


def pick(x: DTensor, picks: Sequence[Pick], axes: Sequence[int] | None = None) -> DTensor:
    """Return the elements at some indices of each dimension: their outer product.

    Each dimension stays sharded along its mesh axis, with blocks of equal lengths in the result.
    """
    source = bring(x, x.spec.complete(), "index")
    shape = tuple(one.count for one in picks)
    spec = source.spec
    target = spec_of(spec.grid, shape, spec.dtype, spec.axes if axes is None else axes)
    keys = tuple(one.key for one in picks)
    if None in keys:
        dims = [Dim(one.count, side(spec, d, one.at), side(target, d)) for d, one in enumerate(picks)]
        return exchange(source, plan_exchange(spec, dims, target.used), target)
    if all(key == (n, Run()) for key, n in zip(keys, spec.shape, strict=True)) and target is spec:
        return source.alias()
    return exchange(source, _plan_runs(spec, target, keys), target)


def put(x: DTensor, picks: Sequence[Pick], values: DTensor) -> None:
    """Write to the elements at some indices of each dimension; the values are broadcast to them."""
    target, source = x.spec, values.spec.complete()
    values = bring(values, source, "assignment")
    if source.ndim != target.ndim:
        values = with_shape_ones(values, target.ndim)
        source = values.spec
    dims = []
    for d, one in enumerate(picks):
        repeated = source.shape[d] == 1 and one.count != 1
        if not repeated and source.shape[d] != one.count:
            raise ValueError(
                f"could not broadcast input array from shape {source.shape} into shape "
                f"{tuple(p.count for p in picks)}"
            )
        dims.append(Dim(one.count, side(source, d, Run(0, 0 if repeated else 1)), side(target, d, one.at)))
    exchange(values, plan_exchange(source, dims, target.used), target, into=x)


def place_into(target: DTensor, source: DTensor, offsets: Sequence[int]) -> None:
    """Copy an array into another one at an offset in each dimension."""
    spec = source.spec.complete()
    source = bring(source, spec, "copy")
    dims = [
        Dim(n, side(spec, d), side(target.spec, d, Run(offset)))
        for d, (n, offset) in enumerate(zip(spec.shape, offsets, strict=True))
    ]
    exchange(source, plan_exchange(spec, dims, target.spec.used), target.spec, into=target)


def map_blocks(x: DTensor, target: Spec, change: Any) -> DTensor:
    """Return an array whose blocks are views of another one's, with the same slots."""
    if x._shards is None:
        return DTensor(target, None)
    return DTensor(target, tuple(change(block) for block in x.blocks))


def with_shape_ones(x: DTensor, ndim: int) -> DTensor:
    """Return an array with dimensions of length 1 before its own."""
    more = ndim - x.ndim
    if more < 0:
        for dim in range(-more):
            if x.shape[dim] != 1:
                raise ValueError(f"could not broadcast input array of shape {x.shape} into {ndim} dimensions")
        whole = free_axes(x.spec, range(-more))
        x = bring(x, whole, "assignment")
        target = spec_of(whole.grid, whole.shape[-more:], whole.dtype, whole.axes[-more:])
        return map_blocks(x, target, lambda block: block.reshape(block.shape[-more:]))
    spec = x.spec
    target = spec_of(
        spec.grid, (1,) * more + spec.shape, spec.dtype, (WHOLE,) * more + spec.axes, spec.partial, spec.op
    )
    return map_blocks(x, target, lambda block: block.reshape((1,) * more + block.shape))


# Reshape ----------------------------------------------------------------------------------------------------


def groups_of(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """Return the dimensions of two shapes in the smallest groups with equal numbers of elements."""
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first, start = i, j
        a = b = 1
        if i < len(old):
            a, i = old[i], i + 1
        if j < len(new):
            b, j = new[j], j + 1
        while a != b:
            if a < b and i < len(old):
                a, i = a * old[i], i + 1
            elif j < len(new):
                b, j = b * new[j], j + 1
            else:
                a, i = a * old[i], i + 1
        groups.append((range(first, i), range(start, j)))
    return groups


def _leading(shape: Sequence[int], dims: range) -> int:
    """Return the first dimension of a group with a length above 1; the first one if there is none."""
    return next((dim for dim in dims if shape[dim] != 1), dims[0] if len(dims) else -1)


def reshape(x: DTensor, shape: tuple[int, ...]) -> DTensor:
    """Return an array with another shape, its elements in the same order.

    A group of dimensions stays sharded along one mesh axis if its first dimension is sharded. Otherwise the
    mesh axis is first moved to the first dimension.
    """
    spec = x.spec
    if spec.shape == shape:
        return x.alias()
    if spec.size == 0:
        return _reshape_empty(x, shape)
    axes, new_axes = [WHOLE] * spec.ndim, [WHOLE] * len(shape)
    groups = groups_of(spec.shape, shape)
    for old, new in groups:
        cut = [spec.axes[dim] for dim in old if spec.axes[dim] != WHOLE]
        if len(old) == len(new) == 1:
            axes[old[0]] = new_axes[new[0]] = spec.axes[old[0]]
        elif cut and len(new):
            lead = _leading(spec.shape, old)
            axis = spec.axes[lead] if spec.axes[lead] != WHOLE else cut[0]
            axes[lead] = axis
            new_axes[_leading(shape, new)] = axis
    # Unused mesh axes shard another unsharded dimension, so that no block becomes larger.
    for axis in [axis for axis in spec.axes if axis != WHOLE and axis not in axes]:
        free = [d for d in range(spec.ndim) if axes[d] == WHOLE and spec.shape[d] > 1 and _alone(groups, d)]
        if free:
            dim = max(free, key=lambda d: spec.shape[d])
            axes[dim] = axis
            old, new = next(group for group in groups if dim in group[0])
            new_axes[new[0]] = axis
    middle = spec.complete().replace(axes=axes)
    source = bring(x, middle, "reshape")
    target = spec_of(spec.grid, shape, spec.dtype, new_axes)
    dims, even = [], True
    flat_cuts_of_target: list[Any] = []
    for old, new in groups:
        s, t = _flat_side(middle, old), _flat_side(target, new)
        count = 1
        for dim in old:
            count *= spec.shape[dim]
        even &= s[1] == t[1]
        dims.append((count, s, t))
        flat_cuts_of_target.append(t)
    if even and middle.used == target.used:
        shapes = target.local_shapes
        if source._shards is None:
            return DTensor(target, None)
        return DTensor(
            target, tuple(block.reshape(s) for block, s in zip(source.blocks, shapes, strict=True))
        )
    return _ragged(source, target, dims)


def _alone(groups: list[tuple[range, range]], dim: int) -> bool:
    return any(dim in old and len(old) == len(new) == 1 for old, new in groups)


def _flat_side(spec: Spec, dims: range) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return mesh axis and block bounds of a group of dimensions as one flat dimension."""
    count = 1
    for dim in dims:
        count *= spec.shape[dim]
    for dim in dims:
        if spec.axes[dim] != WHOLE:
            width = (
                count // spec.shape[dim]
            )  # the group is sharded along its first dimension of a length other than 1
            return spec.axes[dim], tuple((a * width, b * width) for a, b in spec.cuts(dim))
    return WHOLE, ((0, count),)


def _ragged(source: DTensor, target: Spec, dims: Sequence[Any]) -> DTensor:
    """Exchange elements between blocks with different bounds in the flat dimensions."""
    from dmesh.arrays.transfer.mapping import Side

    made = [Dim(count, Side(*s), Side(*t)) for count, s, t in dims]
    mapping = plan_exchange(source.spec, made, target.used)
    if source._shards is None:
        return exchange(source, mapping, target)
    flat = []
    for slot, block in zip(source.spec.slots, source.blocks, strict=True):
        place = dict(zip(source.spec.used, slot, strict=True))
        lengths = []
        for dim in made:
            low, high = dim.source.cuts[0 if dim.source.axis == WHOLE else place[dim.source.axis]]
            lengths.append(high - low)
        flat.append(block.reshape(lengths))
    moved = exchange(DTensor(source.spec, tuple(flat)), mapping, target)
    shapes = target.local_shapes
    return DTensor(target, tuple(block.reshape(s) for block, s in zip(moved.blocks, shapes, strict=True)))


def _reshape_empty(x: DTensor, shape: tuple[int, ...]) -> DTensor:
    axes = [WHOLE] * len(shape)
    for dim, axis in enumerate(x.spec.axes[: len(shape)]):
        if shape[dim] == x.shape[dim]:
            axes[dim] = axis
    target = spec_of(x.spec.grid, shape, x.dtype, axes)
    if x._shards is None:
        return DTensor(target, None)
    return DTensor(target, tuple(np.empty(s, x.dtype) for s in target.local_shapes))


def take_along(x: DTensor, indices: NDArray[np.intp], dim: int) -> DTensor:
    """Return the elements at a list of indices of one dimension."""
    picks = [Pick(n) for n in x.shape]
    picks[dim] = Pick(len(indices), indices)
    return pick(x, picks)


def moved_dims(x: DTensor, order: Sequence[int]) -> DTensor:
    """Return an array with its dimensions in another order."""
    spec = x.spec
    target = spec_of(
        spec.grid,
        tuple(spec.shape[d] for d in order),
        spec.dtype,
        [spec.axes[d] for d in order],
        spec.partial,
        spec.op,
    )
    return map_blocks(x, target, lambda block: block.transpose(order))
