"""Writing to sharded arrays: by slices, integers, masks and lists of indices."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays import ledger
from dmesh.arrays.creation import from_blocks_of, scattered
from dmesh.arrays.dispatch.operands import aligned, bring, check_operand, choose_axes, grid_among, is_scalar
from dmesh.arrays.dispatch.reduction import reduce
from dmesh.arrays.dispatch.registry import hook, implements
from dmesh.arrays.dispatch.threads import each
from dmesh.arrays.dispatch.ufunc import astype, can_cast, run_local, store
from dmesh.arrays.dtensor import DTensor, exchange, move
from dmesh.arrays.indexing import Parsed, counts_of, getitem, parse, read_whole
from dmesh.arrays.ops.mappings import Pick, moved_dims, put, reshape, take_along
from dmesh.arrays.ops.selection import where_
from dmesh.arrays.spec import spec_of
from dmesh.arrays.transfer.mapping import Dim, Run, Side, plan_exchange, side
from dmesh.errors import UnshardableError


@hook("setitem")
def setitem(x: DTensor, index: Any, value: Any) -> None:
    """Carry out `x[index] = value`. Other arrays never change."""
    with ledger.operation("x[...] = v"):
        check_operand(value, "x[...] = v")
        if isinstance(value, DTensor):
            grid_among([x, value], "x[...] = v")
        if x.spec.partial:
            x._memo, whole = None, move(x, x.spec.complete())
            x._spec, x._shards, x._owned = whole.spec, whole._shards, False
        if isinstance(index, np.ndarray) and index.dtype == np.bool_ and x.ndim and index.shape == x.shape:
            index = scattered(index, x.spec.replace(dtype=np.bool_))
        if isinstance(index, DTensor) and index.dtype == np.bool_ and x.ndim and index.shape == x.shape:
            return _set_mask(x, index, value)
        if isinstance(index, DTensor) and index.dtype == np.bool_ and not index.ndim:
            return setitem(x, ..., value) if index.item() else None
        parsed = parse(index, x.shape)
        if isinstance(value, DTensor) and value.dtype != x.dtype:
            value = astype(value, x.dtype)
        if parsed.advanced is None:
            return _set_basic(x, parsed, value)
        return _set_advanced(x, parsed, value)


def _set_mask(x: DTensor, mask: DTensor, value: Any) -> None:
    masked = bring(mask, x.spec.replace(dtype=np.bool_), "x[mask] = v")
    values: Any
    if isinstance(value, DTensor) and value.size != 1:
        there = move(_spread(masked, value if value.dtype == x.dtype else astype(value, x.dtype)), x.spec)
        if x._shards is None or there._shards is None:
            return
        pairs = list(zip(there.blocks, masked.blocks, strict=True))
        values = each(operator.getitem, pairs, x.spec.grid, x.spec.largest)
    else:
        number = move(value, value.spec.replicated()).blocks[0] if isinstance(value, DTensor) else value
        values = [number] * len(x.spec.slots)
    rows = list(zip(x.writable(), masked.blocks, values, strict=True))
    each(operator.setitem, rows, x.spec.grid, x.spec.largest)


def _spread(mask: DTensor, values: DTensor) -> DTensor:
    """Return an array of a mask's shape, with values where the mask is true, in the order of the elements."""
    if values.ndim > 1:
        raise TypeError(
            "NumPy boolean array indexing assignment requires a 0 or 1-dimensional input, input has "
            f"{values.ndim} dimensions"
        )
    flat = reshape(mask, (mask.size,))
    spec, axis = flat.spec, flat.spec.axes[0]
    cuts = counts_of(spec, each(np.count_nonzero, [(b,) for b in flat.blocks], spec.grid, spec.largest))
    total = cuts[-1][1]
    if values.size != total:
        raise ValueError(
            f"NumPy boolean array indexing assignment cannot assign {values.size} input values to the "
            f"{total} output values where the mask is true"
        )
    line = bring(values, values.spec.complete(), "x[mask] = v")
    mapping = plan_exchange(line.spec, [Dim(total, side(line.spec, 0), Side(axis, cuts))], spec.used)
    parts = exchange(line, mapping, spec_of(spec.grid, (total,), values.dtype, spec.axes))

    def spread(where: Any, part: Any) -> Any:
        block = np.zeros(where.shape, values.dtype)
        block[where] = part
        return block

    rows = list(zip(flat.blocks, parts.blocks, strict=True))
    made = each(spread, rows, spec.grid, spec.largest * values.dtype.itemsize)
    return reshape(DTensor(spec.replace(dtype=values.dtype), tuple(made)), mask.shape)


def _as_values(x: DTensor, value: Any) -> DTensor:
    """Return a value as an array, replicated if it is a number."""
    if isinstance(value, DTensor):
        return value
    block = np.empty((), x.dtype)
    block[...] = value
    return scattered(block, spec_of(x.spec.grid, (), x.dtype))


def _set_basic(x: DTensor, parsed: Parsed, value: Any) -> None:
    if is_scalar(value) and all(
        one.at == Run() and one.count == n for one, n in zip(parsed.picks, x.shape, strict=True)
    ):
        for block in x.writable():
            block[...] = value
        return
    values = _as_values(x, value)
    shape = [one.count for d, one in enumerate(parsed.picks) if d not in parsed.dropped]
    for at in sorted(parsed.new):
        shape.insert(at, 1)
    np.broadcast_shapes(tuple(shape), values.shape)
    put(x, parsed.picks, _to_picks(values, shape, parsed, x.ndim))


def _to_picks(values: DTensor, shape: list[int], parsed: Parsed, ndim: int) -> DTensor:
    """Return values with the array's dimensions: without new ones, with those indexed by integers."""
    lengths = [1] * (len(shape) - values.ndim) + list(values.shape)
    if len(lengths) > len(shape):
        extra = len(lengths) - len(shape)
        if any(n != 1 for n in lengths[:extra]):
            raise ValueError(
                f"could not broadcast input array from shape {values.shape} into shape {tuple(shape)}"
            )
        lengths = lengths[extra:]
    if any(n not in (1, m) for n, m in zip(lengths, shape, strict=True)):
        raise ValueError(
            f"could not broadcast input array from shape {values.shape} into shape {tuple(shape)}"
        )
    for at in sorted(parsed.new, reverse=True):
        del lengths[at]
    for d in sorted(parsed.dropped):
        lengths.insert(d, 1)
    return reshape(values, tuple(lengths)) if values.shape != tuple(lengths) else values


def _set_advanced(x: DTensor, parsed: Parsed, value: Any) -> None:
    """Write by lists of indices: merge the indexed dimensions into one, and write its elements."""
    advanced = parsed.advanced
    assert advanced is not None
    shape = advanced.lists[0].shape
    lists = dict(zip(advanced.dims, advanced.lists, strict=True))
    for dim in parsed.dropped:
        at = parsed.picks[dim].at
        assert isinstance(at, Run)
        lists[dim] = np.broadcast_to(np.intp(at.start), shape)
    dims = sorted(lists)
    rest = [d for d in range(x.ndim) if d not in dims]
    lengths = [parsed.picks[d].count for d in rest]
    basic = list(lengths)
    for place in sorted(parsed.new):
        basic.insert(place, 1)
    full = (*basic[: advanced.at], *shape, *basic[advanced.at :])
    values = _as_values(x, value)
    flats = [lists[d].reshape(-1) for d in dims]
    if not values.ndim:
        _set_points(x, dims, flats, [(d, parsed.picks[d]) for d in rest], values)
        return
    if values.ndim > len(full) and all(n == 1 for n in values.shape[: values.ndim - len(full)]):
        values = reshape(values, values.shape[values.ndim - len(full) :])
    if values.ndim > len(full) or np.broadcast_shapes(full, values.shape) != full:
        raise ValueError(
            f"shape mismatch: value array of shape {values.shape} could not be broadcast to indexing result "
            f"of shape {full}"
        )
    if values.shape != full:
        values = _broadcast(values, full)
    among = range(advanced.at, advanced.at + len(shape))
    front = moved_dims(values, [*among, *(d for d in range(len(full)) if d not in among)])
    values = reshape(front, (math.prod(shape), *lengths))
    merged = moved_dims(x, [*dims, *rest])
    sizes = merged.shape[: len(dims)]
    if len(dims) > 1:
        merged = reshape(merged, (math.prod(sizes), *merged.shape[len(dims) :]))
    flat = np.ravel_multi_index(flats, sizes).astype(np.intp)
    only, last = np.unique(flat[::-1], return_index=True)
    if len(only) < len(flat):  # of several values for one element, the last counts
        values, flat = take_along(values, len(flat) - 1 - last, 0), only
    put(merged, [Pick(len(flat), flat), *(parsed.picks[d] for d in rest)], values)
    if len(dims) > 1:
        merged = reshape(merged, (*sizes, *merged.shape[1:]))
    order = [*dims, *rest]
    x.replace_with(move(moved_dims(merged, [order.index(d) for d in range(x.ndim)]), x.spec))


def _set_points(
    x: DTensor,
    dims: Sequence[int],
    points: Sequence[NDArray[Any]],
    rest: Sequence[tuple[int, Pick]],
    value: DTensor,
) -> None:
    """Write a number by lists of indices: each device writes the points in its own block."""
    number = move(value, value.spec.replicated())
    if x._shards is None or number._shards is None:
        return
    for region, block in zip(x.spec.regions, x.writable(), strict=True):
        inside = np.ones(len(points[0]), bool)
        for d, at in zip(dims, points, strict=True):
            inside &= (at >= region[d][0]) & (at < region[d][1])
        index: list[Any] = [None] * x.ndim
        for d, at in zip(dims, points, strict=True):
            index[d] = (at[inside] - region[d][0]).reshape(-1, *[1] * len(rest))
        for number_of, (d, one) in enumerate(rest):
            assert isinstance(one.at, Run)
            at = one.at.start + one.at.step * np.arange(one.count)
            at = at[(at >= region[d][0]) & (at < region[d][1])] - region[d][0]
            index[d] = at.reshape(-1, *[1] * (len(rest) - number_of - 1))
        block[tuple(index)] = number.blocks[0]


def _broadcast(x: DTensor, shape: tuple[int, ...]) -> DTensor:
    axes = choose_axes((x.spec,), shape)
    target = spec_of(x.spec.grid, shape, x.dtype, axes)
    placed = x.spec.complete().replace(axes=aligned(x.shape, shape, axes))
    zeros = from_blocks_of(target, lambda local: np.zeros(local, x.dtype))
    (result,) = run_local(
        "broadcast_to", lambda a, b: np.broadcast_to(a, b.shape), [x, zeros], [placed, target], (target,)
    )
    return result


# NumPy's functions that write -------------------------------------------------------------------------------


def _target(name: str, target: Any, *operands: Any) -> None:
    if not isinstance(target, DTensor):
        raise UnshardableError(f"{name} writes to a sharded array, not to {type(target).__name__}")
    for x in operands:
        check_operand(x, name)


def _as_mask(mask: Any, like: DTensor) -> DTensor:
    if not isinstance(mask, DTensor):
        mask = scattered(
            np.broadcast_to(np.bool_(mask), like.shape), like.spec.complete().replace(dtype=np.bool_)
        )
    same = mask if mask.shape == like.shape else reshape(mask, like.shape)
    return same if same.dtype == np.bool_ else astype(same, np.dtype(bool))


def _check_safe(values: Any, like: DTensor) -> None:
    if isinstance(values, (DTensor, np.ndarray)) and not can_cast(values.dtype, like.dtype, "safe"):
        raise TypeError(
            f"Cannot cast array data from {values.dtype!r} to {like.dtype!r} according to the rule 'safe'"
        )


def _cycled(values: DTensor, count: int) -> DTensor:
    """Return `count` values: the first ones, or all of them repeated."""
    flat = reshape(values, (values.size,))
    if count <= flat.size:
        return getitem(flat, slice(count))
    return take_along(flat, np.arange(count, dtype=np.intp) % flat.size, 0)


@implements(np.place)
def place(arr: Any, mask: Any, vals: Any) -> None:
    """Write values, in order, to the elements where a mask is true."""
    _target("np.place", arr, mask, vals)
    if getattr(mask, "size", 1) != arr.size:
        raise ValueError("place: mask and data must be the same size")
    _check_safe(vals, arr)
    where = _as_mask(mask, arr)
    if isinstance(vals, DTensor):
        count = int(reduce(np.add, where, None, np.intp).item())
        if count and not vals.size:
            raise ValueError("Cannot insert from an empty array!")
        vals = _cycled(vals, count)
    if not isinstance(vals, DTensor) or vals.size:
        setitem(arr, where, vals)


@implements(np.putmask)
def putmask(a: Any, mask: Any, values: Any) -> None:
    """Write values where a mask is true, each at its own position; a short list of values is repeated."""
    _target("np.putmask", a, mask, values)
    if getattr(mask, "size", 1) != a.size:
        raise ValueError("putmask: mask and data must be the same size")
    _check_safe(values, a)
    if not isinstance(values, DTensor) or values.size == 1:
        return setitem(a, _as_mask(mask, a), reshape(values, ()) if isinstance(values, DTensor) else values)
    if not values.size:
        return None
    source = reshape(_cycled(values, a.size), a.shape)
    store(where_(_as_mask(mask, a), source, a), a, "unsafe")
    return None


@implements(np.put)
def put_(a: Any, ind: Any, v: Any, mode: str = "raise") -> None:
    """Write values, in order, to elements given by their indices in the flat array."""
    _target("np.put", a, v)
    places = np.asarray(read_whole(ind)).reshape(-1)
    if places.size and not a.size:
        raise IndexError("cannot replace elements of an empty array")
    if isinstance(v, DTensor):
        if not v.size:
            return
        v = _cycled(v, places.size)
    if mode != "raise":
        n = a.size
        places = places % n if mode == "wrap" else np.clip(places, 0, n - 1)
    flat = reshape(a, (a.size,))
    setitem(flat, places, v)
    store(reshape(flat, a.shape), a, "unsafe")


__all__ = ["place", "put_", "putmask", "setitem"]
