"""Indexing of sharded arrays, for reading and writing: slices, integers, `None`, `...`, masks and lists."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays import ledger
from dmesh.arrays.creation import from_blocks_of, scattered
from dmesh.arrays.dispatch.operands import aligned, bring, check_operand, choose_axes, grid_among, is_scalar
from dmesh.arrays.dispatch.registry import hook
from dmesh.arrays.dispatch.ufunc import astype, run_local, store
from dmesh.arrays.dtensor import DTensor, exchange, move
from dmesh.arrays.ops.mappings import Pick, moved_dims, pick, put, reshape
from dmesh.arrays.spec import WHOLE, spec_of
from dmesh.arrays.transfer.execute import gather_counts
from dmesh.arrays.transfer.mapping import Dim, Run, Side, plan_exchange, side
from dmesh.errors import UnshardableError


class Advanced(NamedTuple):
    """Lists of indices, or masks made into such, and the dimensions that they stand for."""

    dims: tuple[int, ...]
    lists: tuple[NDArray[np.intp], ...]
    at: int
    """Where their dimensions go among those of the result."""


class Parsed(NamedTuple):
    """An index, dimension by dimension."""

    picks: list[Pick]
    dropped: list[int]
    """Dimensions that are indexed by an integer."""
    new: list[int]
    """Places of new dimensions of length 1 in the result of the basic part."""
    advanced: Advanced | None


def _integer_list(x: Any, length: int, dim: int) -> NDArray[np.intp]:
    values = np.asarray(x)
    if values.size == 0 and not isinstance(x, np.ndarray):
        values = values.astype(np.intp)
    if values.dtype.kind not in "iu":
        raise IndexError("arrays used as indices must be of integer (or boolean) type")
    values = values.astype(np.intp)
    wrong = values[(values < -length) | (values >= length)]
    if wrong.size:
        raise IndexError(f"index {wrong.flat[0]} is out of bounds for axis {dim} with size {length}")
    return np.where(values < 0, values + length, values)


def _plain(x: Any) -> Any:
    """Return an index array as every client has it; sharded ones are read whole."""
    if isinstance(x, DTensor):
        return move(x, x.spec.replicated()).blocks[0]
    return x


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, np.ndarray, DTensor)) and not (
        isinstance(x, (np.ndarray, DTensor)) and x.ndim == 0 and x.dtype.kind in "iu"
    )


def parse(index: Any, shape: tuple[int, ...]) -> Parsed:
    """Take an index apart.

    Raises:
        IndexError: It does not fit the shape.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    expanded: list[Any] = []
    for entry in entries:
        if isinstance(entry, (bool, np.bool_)) or (
            getattr(entry, "ndim", 1) == 0 and entry.dtype == np.bool_
        ):
            raise UnshardableError(
                "a single True or False as an index of a sharded array is refused: use None, or where"
            )
        if _is_list(entry):
            values = _plain(entry)
            values = np.asarray(values)
            if values.dtype == np.bool_:
                expanded.append(("mask", values))
                continue
            expanded.append(
                (
                    "list",
                    values if not (values.size == 0 and isinstance(entry, list)) else values.astype(np.intp),
                )
            )
            continue
        expanded.append(("basic", entry))
    used = sum(
        value.ndim if kind == "mask" else 0 if kind == "basic" and (value is None or value is Ellipsis) else 1
        for kind, value in expanded
    )
    if used > len(shape):
        raise IndexError(
            f"too many indices for array: array is {len(shape)}-dimensional, but {used} were indexed"
        )
    if sum(kind == "basic" and value is Ellipsis for kind, value in expanded) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if not any(kind == "basic" and value is Ellipsis for kind, value in expanded):
        expanded.append(("basic", Ellipsis))
    picks: list[Pick] = []
    dropped: list[int] = []
    new: list[int] = []
    lists: list[tuple[int, NDArray[np.intp]]] = []
    places: list[int] = []  # of the lists among the entries, to see whether they are neighbors
    result_at = 0
    first_at = None
    for number, (kind, value) in enumerate(expanded):
        dim = len(picks)
        if kind == "mask":
            if value.shape != shape[dim : dim + value.ndim]:
                raise IndexError(
                    f"boolean index did not match indexed array along axis {dim}; size of axis is "
                    f"{shape[dim]} but "
                    f"size of corresponding boolean axis is {value.shape[0] if value.ndim else 0}"
                )
            first_at = result_at if first_at is None else first_at
            places.append(number)
            for offset, found in enumerate(np.nonzero(value)):
                lists.append((dim + offset, found.astype(np.intp)))
                picks.append(Pick(shape[dim + offset]))
        elif kind == "list":
            first_at = result_at if first_at is None else first_at
            places.append(number)
            lists.append((dim, _integer_list(value, shape[dim], dim)))
            picks.append(Pick(shape[dim]))
        elif value is Ellipsis:
            for _ in range(len(shape) - used):
                picks.append(Pick(shape[len(picks)]))
                result_at += 1
        elif value is None:
            new.append(result_at)
            result_at += 1
        elif isinstance(value, slice):
            start, stop, step = value.indices(shape[dim])
            picks.append(Pick(len(range(start, stop, step)), Run(start, step)))
            result_at += 1
        else:
            try:
                at = operator.index(value)
            except TypeError:
                raise IndexError(
                    "only integers, slices (`:`), ellipsis (`...`), None and integer or boolean arrays "
                    "are valid indices"
                ) from None
            if not -shape[dim] <= at < shape[dim]:
                raise IndexError(f"index {at} is out of bounds for axis {dim} with size {shape[dim]}")
            picks.append(Pick(1, Run(at % shape[dim], 1)))
            dropped.append(dim)
            if lists or any(k in ("list", "mask") for k, _ in expanded):
                places.append(number)  # beside lists, an integer is one of them
    if not lists:
        return Parsed(picks, dropped, new, None)
    together = places == list(range(places[0], places[0] + len(places)))
    at = (first_at or 0) if together else 0
    if dropped:  # integers broadcast with the lists
        early = [d for d in dropped if d < lists[0][0]]
        del early
    shapes = np.broadcast_shapes(*(values.shape for _, values in lists))
    broadcast = tuple(np.broadcast_to(values, shapes) for _, values in lists)
    return Parsed(picks, dropped, new, Advanced(tuple(dim for dim, _ in lists), broadcast, at))


def _shape_basic(x: DTensor, parsed: Parsed) -> DTensor:
    """Drop the dimensions that integers have indexed, and add new ones."""
    if not parsed.dropped and not parsed.new:
        return x
    spec = x.spec
    keep = [d for d in range(spec.ndim) if d not in parsed.dropped]
    shape, axes = [spec.shape[d] for d in keep], [spec.axes[d] for d in keep]
    for at in sorted(parsed.new):
        shape.insert(at, 1)
        axes.insert(at, WHOLE)
    target = spec_of(spec.grid, tuple(shape), spec.dtype, axes)
    return map_blocks_of_slots(x, target)


def map_blocks_of_slots(x: DTensor, target: Any) -> DTensor:
    """Return an array of the same elements, whose dimensions of length 1 differ."""
    if x._shards is None:
        return DTensor(target, None)
    blocks = x.blocks
    shapes = target.local_shapes
    return DTensor(
        target,
        tuple(
            blocks[x.spec.slot_of[device]].reshape(shape)
            for device, shape in zip(target.devices, shapes, strict=True)
        ),
    )


def _basic(x: DTensor, parsed: Parsed) -> DTensor:
    axes = [WHOLE if d in parsed.dropped else axis for d, axis in enumerate(x.spec.axes)]
    return _shape_basic(pick(x, parsed.picks, axes), parsed)


@hook("getitem")
def getitem(x: DTensor, index: Any) -> DTensor:
    """Return `x[index]`."""
    with ledger.operation("x[...]"):
        if isinstance(index, DTensor) and index.dtype == np.bool_ and index.ndim and index.shape == x.shape:
            return compress(x, index)
        if isinstance(index, DTensor) and index.dtype == np.bool_ and not index.ndim:
            return getitem(getitem(x, None), slice(None if index.item() else 0))
        parsed = parse(index, x.shape)
        if parsed.advanced is None:
            return _basic(x, parsed)
        return _advanced(x, parsed)


def _advanced(x: DTensor, parsed: Parsed) -> DTensor:
    """Take by lists: their dimensions are merged into one, of which single elements are picked."""
    advanced = parsed.advanced
    assert advanced is not None
    shape = advanced.lists[0].shape
    if len(advanced.dims) == 1:
        dim = advanced.dims[0]
        picks = list(parsed.picks)
        picks[dim] = Pick(math.prod(shape), advanced.lists[0].reshape(-1))
        axes = [WHOLE if d in parsed.dropped else axis for d, axis in enumerate(x.spec.axes)]
        taken = pick(x, picks, axes)
        merged_at = dim
    else:
        axes = [WHOLE if d in parsed.dropped else axis for d, axis in enumerate(x.spec.axes)]
        basic = pick(x, parsed.picks, axes)
        rest = [d for d in range(x.ndim) if d not in advanced.dims]
        ordered = moved_dims(bring(basic, basic.spec.complete(), "index"), [*advanced.dims, *rest])
        lengths = ordered.shape[: len(advanced.dims)]
        merged = reshape(ordered, (math.prod(lengths), *ordered.shape[len(advanced.dims) :]))
        flat = np.ravel_multi_index(tuple(values.reshape(-1) for values in advanced.lists), lengths).astype(
            np.intp
        )
        picks = [Pick(len(flat), flat), *(Pick(n) for n in merged.shape[1:])]
        front = pick(merged, picks)
        # The merged dimension goes back to where the first list was, among those that are left.
        merged_at = sum(d < advanced.dims[0] for d in rest)
        taken = moved_dims(front, [*range(1, merged_at + 1), 0, *range(merged_at + 1, front.ndim)])
        kept = [*rest[:merged_at], advanced.dims[0], *rest[merged_at:]]
        dropped = [kept.index(d) for d in parsed.dropped]
        parsed = parsed._replace(dropped=dropped)
        dim = merged_at
    # Now the merged dimension lies at `dim`; drop integers, then put it in its place.
    at = dim - sum(d < dim for d in parsed.dropped)
    squeezed = _shape_basic(taken, parsed._replace(new=[]))
    order = [d for d in range(squeezed.ndim) if d != at]
    target_at = advanced.at
    without_new = target_at - sum(place < target_at for place in parsed.new)
    order.insert(without_new, at)
    moved = moved_dims(squeezed, order) if order != list(range(squeezed.ndim)) else squeezed
    lengths = moved.shape
    new_shape = [*lengths[:without_new], *shape, *lengths[without_new + 1 :]]
    result = reshape(moved, tuple(new_shape)) if tuple(new_shape) != lengths else moved
    if parsed.new:
        final = list(result.shape)
        for place in sorted(parsed.new):
            final.insert(place if place < target_at else place + len(shape), 1)
        result = reshape(result, tuple(final))
    return result


# Masks ------------------------------------------------------------------------------------------------------


def counted(x: DTensor, blocks: Sequence[NDArray[Any]]) -> DTensor:
    """Return a one-dimensional array of blocks whose lengths nobody knows yet, in blocks of equal lengths.

    Args:
        x: Array whose slots the blocks belong to: one-dimensional.
        blocks: This client's blocks.
    """
    spec, grid = x.spec, x.spec.grid
    axis = spec.axes[0]
    shards = 1 if axis == WHOLE else grid.sizes[axis]
    lengths = np.zeros(shards, np.int64)
    for slot, block in zip(spec.slots, blocks, strict=True):
        lengths[0 if axis == WHOLE else slot[0]] = len(block)
    if len(grid.clients) > 1:
        lengths = gather_counts(grid.group(), lengths).max(axis=0)
    ends = np.cumsum(lengths)
    cuts = tuple((int(end - n), int(end)) for n, end in zip(lengths, ends, strict=True))
    total = int(ends[-1])
    target = spec_of(grid, (total,), blocks[0].dtype if blocks else x.dtype, spec.axes)
    source = DTensor(spec_of(grid, spec.shape, target.dtype, spec.axes), tuple(blocks))
    mapping = plan_exchange(spec, [Dim(total, Side(axis, cuts), side(target, 0))], target.used)
    return exchange(source, mapping, target)


def compress(x: DTensor, mask: DTensor) -> DTensor:
    """Return the elements where a mask of the same shape is true, in NumPy's order."""
    grid_among([x, mask], "x[mask]")
    flat = reshape(x, (x.size,))
    there = bring(
        reshape(mask, (x.size,)), spec_of(flat.spec.grid, (x.size,), mask.dtype, flat.spec.axes), "x[mask]"
    )
    flat = bring(flat, flat.spec.complete(), "x[mask]")
    chosen = [block[where] for block, where in zip(flat.blocks, there.blocks, strict=True)]
    return counted(flat, chosen)


# Writing ----------------------------------------------------------------------------------------------------


@hook("setitem")
def setitem(x: DTensor, index: Any, value: Any) -> None:
    """Carry out `x[index] = value`, which changes this array alone."""
    with ledger.operation("x[...] = v"):
        check_operand(value, "x[...] = v")
        if isinstance(value, DTensor):
            grid_among([x, value], "x[...] = v")
        if x.spec.partial:
            x._memo, whole = None, move(x, x.spec.complete())
            x._spec, x._shards, x._owned = whole.spec, whole._shards, False
        if isinstance(index, DTensor) and index.dtype == np.bool_ and index.shape == x.shape:
            return _set_mask(x, index, value)
        parsed = parse(index, x.shape)
        if isinstance(value, DTensor) and value.dtype != x.dtype:
            value = astype(value, x.dtype)
        if parsed.advanced is None:
            return _set_basic(x, parsed, value)
        return _set_advanced(x, parsed, value)


def _set_mask(x: DTensor, mask: DTensor, value: Any) -> None:
    if isinstance(value, DTensor) and value.ndim:
        raise UnshardableError(
            "x[mask] = array is refused: which element goes where depends on the mask's values. "
            "x[...] = np.where(mask, values, x) takes values of x's shape"
        )
    spec = x.spec
    masked = bring(mask, spec_of(spec.grid, spec.shape, mask.dtype, spec.axes), "x[mask] = v")
    number = move(value, value.spec.replicated()).blocks[0] if isinstance(value, DTensor) else value
    for block, where in zip(x.writable(), masked.blocks, strict=True):
        block[where] = number


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
    """Return values with the dimensions of the picks: no new ones, and those that integers index."""
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
    advanced = parsed.advanced
    assert advanced is not None
    if (
        parsed.new
        or len(advanced.dims) > 1
        or (
            parsed.dropped
            and advanced.at != sum(d < advanced.dims[0] for d in range(x.ndim) if d not in parsed.dropped)
        )
    ):
        raise UnshardableError(
            "assignment by several lists of indices, or by a list beside None, is refused on sharded "
            "arrays: assign by one "
            "list or one mask of x's shape at a time"
        )
    dim, indices = advanced.dims[0], advanced.lists[0]
    picks = list(parsed.picks)
    picks[dim] = Pick(indices.size, indices.reshape(-1))
    values = _as_values(x, value)
    shape = [one.count for d, one in enumerate(parsed.picks) if d not in parsed.dropped]
    at = dim - sum(d < dim for d in parsed.dropped)
    if advanced.at != at:
        raise UnshardableError(
            "assignment by a list of indices apart from an integer is refused on sharded arrays"
        )
    full = [*shape[:at], *indices.shape, *shape[at + 1 :]]
    if np.broadcast_shapes(tuple(full), values.shape) != tuple(full):
        raise ValueError(
            f"could not broadcast input array from shape {values.shape} into shape {tuple(full)}"
        )
    if indices.ndim != 1 and values.ndim:
        values = reshape(_broadcast(values, tuple(full)), (*shape[:at], indices.size, *shape[at + 1 :]))
    shape[at] = indices.size
    put(x, picks, _to_picks(values, shape, parsed._replace(new=[]), x.ndim))


def _broadcast(x: DTensor, shape: tuple[int, ...]) -> DTensor:
    axes = choose_axes((x.spec,), shape)
    target = spec_of(x.spec.grid, shape, x.dtype, axes)
    placed = x.spec.complete().replace(axes=aligned(x.shape, shape, axes))
    zeros = from_blocks_of(target, lambda local: np.zeros(local, x.dtype))
    (result,) = run_local(
        "broadcast_to", lambda a, b: np.broadcast_to(a, b.shape), [x, zeros], [placed, target], (target,)
    )
    return result


__all__ = ["compress", "counted", "getitem", "parse", "setitem", "store"]
