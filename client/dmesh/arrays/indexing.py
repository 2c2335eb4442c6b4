"""Indexing of sharded arrays: slices, integers, `None`, `...`, masks and lists."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays import ledger
from dmesh.arrays.dispatch.operands import bring, grid_among
from dmesh.arrays.dispatch.registry import hook
from dmesh.arrays.dispatch.threads import each
from dmesh.arrays.dtensor import DTensor, exchange, move
from dmesh.arrays.ops.mappings import Pick, moved_dims, pick, reshape
from dmesh.arrays.spec import WHOLE, Bounds, Spec, spec_of
from dmesh.arrays.transfer.execute import gather_counts
from dmesh.arrays.transfer.mapping import Dim, Run, Side, plan_exchange, side
from dmesh.errors import UnshardableError


class Advanced(NamedTuple):
    """Lists of indices (also made from masks), and the dimensions that they index."""

    dims: tuple[int, ...]
    lists: tuple[NDArray[np.intp], ...]
    at: int
    """Position of their dimensions in the result."""


class Parsed(NamedTuple):
    """A parsed index, by dimension."""

    picks: list[Pick]
    dropped: list[int]
    """Dimensions that are indexed by an integer."""
    new: list[int]
    """Positions of new dimensions of length 1 in the result of the basic part."""
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


def read_whole(x: Any) -> Any:
    """Return an index array whole, on every client."""
    if isinstance(x, DTensor):
        return move(x, x.spec.replicated()).blocks[0]
    return x


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, np.ndarray, DTensor)) and not (
        isinstance(x, (np.ndarray, DTensor)) and x.ndim == 0 and x.dtype.kind in "iu"
    )


def parse(index: Any, shape: tuple[int, ...]) -> Parsed:
    """Parse an index.

    Raises:
        IndexError: The index does not fit the shape.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    expanded: list[Any] = []
    for entry in entries:
        if isinstance(entry, (bool, np.bool_)) or (
            getattr(entry, "ndim", 1) == 0 and entry.dtype == np.bool_
        ):
            raise UnshardableError(
                "a sharded array cannot be indexed with a single True or False. Use None, or np.where"
            )
        if _is_list(entry):
            values = read_whole(entry)
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
    places: list[int] = []  # positions of the lists among the entries, to find out whether they are adjacent
    result_at = 0
    first_at = None
    for number, (kind, value) in enumerate(expanded):
        dim = len(picks)
        if kind == "mask":
            for at, length in enumerate(value.shape, dim):
                if length not in (0, shape[at]):  # no elements along a dimension of length 0
                    raise IndexError(
                        f"boolean index did not match indexed array along axis {at}; size of axis is "
                        f"{shape[at]} but size of corresponding boolean axis is {length}"
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
                places.append(number)  # combined with lists, an integer counts as one
    if not lists:
        return Parsed(picks, dropped, new, None)
    together = places == list(range(places[0], places[0] + len(places)))
    at = (first_at or 0) if together else 0
    try:
        shapes = np.broadcast_shapes(*(values.shape for _, values in lists))
    except ValueError:
        raise IndexError(
            "shape mismatch: indexing arrays could not be broadcast together with shapes "
            + " ".join(str(values.shape) for _, values in lists)
        ) from None
    broadcast = tuple(np.broadcast_to(values, shapes) for _, values in lists)
    return Parsed(picks, dropped, new, Advanced(tuple(dim for dim, _ in lists), broadcast, at))


def _shape_basic(x: DTensor, parsed: Parsed) -> DTensor:
    """Drop the dimensions indexed by integers, and add new ones."""
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
    """Return an array with the same elements and other dimensions of length 1."""
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
    """Index with lists: merge the indexed dimensions into one, and pick elements of it."""
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
        # The merged dimension moves to the position of the first list.
        merged_at = sum(d < advanced.dims[0] for d in rest)
        taken = moved_dims(front, [*range(1, merged_at + 1), 0, *range(merged_at + 1, front.ndim)])
        kept = [*rest[:merged_at], advanced.dims[0], *rest[merged_at:]]
        dropped = [kept.index(d) for d in parsed.dropped]
        parsed = parsed._replace(dropped=dropped)
        dim = merged_at
    # Now the merged dimension is `dim`. Drop the dimensions of integers, then move it to its position.
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


def counts_of(spec: Spec, mine: Sequence[int]) -> Bounds:
    """Exchange the lengths of a result's blocks among the clients; return begin and end of each block.

    Args:
        spec: Placement of a one-dimensional array with a slot for each block.
        mine: Lengths of this client's blocks.
    """
    grid, axis = spec.grid, spec.axes[0]
    lengths = np.zeros(1 if axis == WHOLE else grid.sizes[axis], np.int64)
    for slot, length in zip(spec.slots, mine, strict=True):
        lengths[0 if axis == WHOLE else slot[0]] = length
    if len(grid.clients) > 1:
        lengths = gather_counts(grid.group(), lengths).max(axis=0)
    ends = np.cumsum(lengths).tolist()
    return tuple((end - n, end) for n, end in zip(lengths.tolist(), ends, strict=True))


def counted(x: DTensor, blocks: Sequence[NDArray[Any]]) -> DTensor:
    """Return a one-dimensional array, in equal blocks, from blocks whose lengths other clients do not know.

    Args:
        x: One-dimensional array with a slot for each block.
        blocks: This client's blocks.
    """
    spec, grid, axis = x.spec, x.spec.grid, x.spec.axes[0]
    cuts = counts_of(spec, [len(block) for block in blocks])
    total = cuts[-1][1]
    target = spec_of(grid, (total,), blocks[0].dtype if blocks else x.dtype, spec.axes)
    source = DTensor(spec_of(grid, spec.shape, target.dtype, spec.axes), tuple(blocks))
    mapping = plan_exchange(spec, [Dim(total, Side(axis, cuts), side(target, 0))], target.used)
    return exchange(source, mapping, target)


def compress(x: DTensor, mask: DTensor) -> DTensor:
    """Return the elements where a mask of the array's shape is true, in NumPy's order."""
    grid_among([x, mask], "x[mask]")
    flat = reshape(x, (x.size,))
    there = bring(
        reshape(mask, (x.size,)), spec_of(flat.spec.grid, (x.size,), mask.dtype, flat.spec.axes), "x[mask]"
    )
    flat = bring(flat, flat.spec.complete(), "x[mask]")
    rows = list(zip(flat.blocks, there.blocks, strict=True))
    chosen = each(operator.getitem, rows, flat.spec.grid, max(flat.spec.largest, there.spec.largest))
    return counted(flat, chosen)


__all__ = ["Parsed", "compress", "counted", "counts_of", "getitem", "parse", "read_whole"]
