"""Sorting: on each device if the dimension can be unsharded, else by a sample sort.

A sample sort sorts each block, and reads samples of all blocks. They determine the first element of each
block of the result up to a few candidates, which are read as well. So the blocks of the result have the
lengths of the layout, and each element travels once. The sort is stable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays.creation import from_blocks_of
from dmesh.arrays.dispatch.operands import bring, check_operand, free_axes, grid_among
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype, run_local
from dmesh.arrays.dtensor import DTensor, exchange, move
from dmesh.arrays.ops.along import along, check_plain, flattened, kernel_of
from dmesh.arrays.ops.mappings import Pick, map_blocks, pick
from dmesh.arrays.policy import is_larger
from dmesh.arrays.spec import WHOLE, Spec, spec_of
from dmesh.arrays.transfer.mapping import Dim, Part, plan_exchange, side
from dmesh.errors import UnshardableError

# Arrays of one dimension ------------------------------------------------------------------------------------


def positions(spec: Spec) -> DTensor:
    """Return the index of each element of a one-dimensional array, in its layout."""
    target = spec.complete().replace(dtype=np.intp)
    return DTensor(target, tuple(np.arange(*region[0]) for region in target.regions))


def sort_together(name: str, key: DTensor, *others: DTensor, order: Any = None) -> tuple[DTensor, ...]:
    """Return a sorted one-dimensional array, and others of the same length in the same new order.

    The sort is stable. The number of bytes that move depends on the elements.
    """
    spec = key.spec.complete()
    there = [bring(x, spec.replace(dtype=x.dtype), name) for x in (key, *others)]
    specs = [x.spec for x in there]
    runs = run_local(name, partial(_sorted, order=order), there, specs, specs)
    if sum(stop > start for start, stop in spec.cuts(0)) < 2:
        return runs
    dim = Dim(spec.shape[0], side(spec, 0), side(spec, 0), _parts(runs[0], order))
    plan = plan_exchange(spec, [dim], spec.used)
    merged = [exchange(x, plan, x.spec) for x in runs]
    return run_local(name, partial(_sorted, order=order, runs=True), merged, specs, specs)


def _sorted(key: Any, *others: Any, order: Any, runs: bool = False) -> Any:
    if not others:
        return np.sort(key, kind="stable", order=order) if runs else stable_sort(key, order=order)
    # NumPy's stable sorts merge runs that are sorted.
    at = np.argsort(key, kind="stable", order=order) if runs else stable_argsort(key, order=order)
    return key[at], *(x[at] for x in others)


def stable_sort(x: Any, axis: int = -1, order: Any = None) -> NDArray[Any]:
    """Return `np.sort(x, axis, "stable", order)`, of numbers by the faster unstable sort.

    Of equal numbers only zeros can differ, by their signs.
    """
    if x.dtype.kind not in "biuf":
        return np.sort(x, axis=axis, kind="stable", order=order)
    found = np.sort(x, axis=axis)
    if x.dtype.kind == "f" and np.signbit(x[x == 0]).any():
        lines, made = np.moveaxis(x, axis, -1), np.moveaxis(found, axis, -1)
        made[made == 0] = lines[lines == 0]
    return found


def stable_argsort(x: Any, axis: int = -1, order: Any = None) -> NDArray[np.intp]:
    """Return `np.argsort(x, axis, "stable", order)`, of numbers by the faster unstable sort.

    Indices of equal numbers, which that sort leaves in any order, are sorted afterwards.
    """
    n = x.shape[axis]
    if x.dtype.kind not in "iuf" or x.dtype.itemsize < 4 or n >= 1 << 31:
        return np.argsort(x, axis=axis, kind="stable", order=order)
    lines = np.moveaxis(x, axis, -1)
    at = np.argsort(lines, axis=-1)
    values = np.take_along_axis(lines, at, -1)
    equal = values[..., :-1] == values[..., 1:]
    if x.dtype.kind == "f":
        equal |= np.isnan(values[..., :-1])  # what follows NaN is NaN
    if equal.any():
        runs = np.zeros(at.shape, np.int64)
        np.cumsum(~equal, axis=-1, out=runs[..., 1:])
        runs *= n
        at = (np.sort(runs + at, axis=-1) - runs).astype(np.intp, copy=False)
    return np.moveaxis(at, -1, axis)


def _parts(runs: DTensor, order: Any) -> tuple[Part, ...]:
    """Return the parts of each sorted block for each block of the result."""
    spec = runs.spec
    starts = np.array([start for start, _ in spec.cuts(0)])
    lengths = np.array([stop - start for start, stop in spec.cuts(0)])
    ends = np.vstack([_shares(runs, starts, lengths, order), lengths])
    found = []
    for target, (first, last) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        at = 0
        for source, (low, high) in enumerate(zip(first, last, strict=True)):
            if low < high:
                n = high - low
                found.append(Part(source, target, slice(low, high), slice(at, at + n), n))
                at += n
    return tuple(found)


def _shares(runs: DTensor, starts: NDArray[Any], lengths: NDArray[Any], order: Any) -> NDArray[Any]:
    """Return the number of elements of each sorted block that precede each block of the result.

    Elements are ordered by value, then by block. All devices read the same elements, and get the same
    numbers.
    """
    shards = len(lengths)
    # Choose the number of samples per block such that about as many elements lie between two samples.
    most = math.isqrt(2 * shards * int(lengths[0])) + 1
    taken = [np.arange(min(most, n)) * n // max(min(most, n), 1) for n in lengths.tolist()]
    samples = _read(runs, [start + at for start, at in zip(starts, taken, strict=True)])
    blocks = np.repeat(np.arange(shards), [len(at) for at in taken])
    owners = blocks[np.argsort(samples, kind="stable", order=order)]
    # Lower and upper bounds of the number of a block's elements that are not larger than each sample.
    least = [np.concatenate([[0], at + 1]) for at in taken]
    greatest = [np.concatenate([at, [n]]) for at, n in zip(taken, lengths, strict=True)]
    low, high = np.zeros(len(owners), np.int64), np.zeros(len(owners), np.int64)
    for block in range(shards):
        count = np.cumsum(owners == block)
        low += least[block][count]
        high += greatest[block][count]
    before = np.searchsorted(high, starts, "right") - 1
    after = np.searchsorted(low, starts, "left")
    first, last = np.zeros((shards, shards), np.int64), np.zeros((shards, shards), np.int64)
    for block in range(shards):
        places = np.flatnonzero(owners == block)
        first[:, block] = least[block][np.searchsorted(places, before, "right")]
        last[:, block] = greatest[block][np.searchsorted(places, after, "right")]
    first[0] = last[0] = 0
    # Read the elements between the bounds, and sort them.
    spans = [
        [start + np.arange(a, b) for start, a, b in zip(starts, row, end, strict=True)]
        for row, end in zip(first, last, strict=True)
    ]
    between = _read(runs, [one for row in spans for one in row])
    at = 0
    for number, row in enumerate(spans):
        blocks = np.repeat(np.arange(shards), [len(one) for one in row])
        values, at = between[at : at + len(blocks)], at + len(blocks)
        missing = int(starts[number] - first[number].sum())
        chosen = np.argsort(values, kind="stable", order=order)[:missing]
        first[number] += np.bincount(blocks[chosen], minlength=shards)
    return first


def _read(x: DTensor, places: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return elements of a one-dimensional array, on all devices."""
    at = np.concatenate(places).astype(np.intp)
    found: NDArray[Any] = pick(x, [Pick(len(at), at)], [WHOLE]).blocks[0]
    return found


# Arrays of several dimensions -------------------------------------------------------------------------------


def fits(spec: Spec, dims: Sequence[int]) -> bool:
    """Return whether some dimensions can be unsharded without larger blocks."""
    return not is_larger(spec, free_axes(spec, dims))


def sort_dim(name: str, x: DTensor, dim: int, *, places: bool = False, order: Any = None) -> DTensor:
    """Return an array sorted along a dimension, in its layout, or the places that the elements come from."""
    function = stable_argsort if places else stable_sort
    kernel = kernel_of(function, dim, (), (("order", order),))
    if fits(x.spec, [dim]):
        return along(name, x, [dim], kernel)[0]
    if x.ndim == 1:
        return _sort_flat(name, x, places, order)
    spec = x.spec.complete()
    wide = [d for d in range(x.ndim) if d != dim and spec.axes[d] != WHOLE]
    other = max(wide, key=lambda d: spec.cuts(d)[0][1], default=None)
    if other is not None and spec.cuts(other)[0][1] >= spec.grid.sizes[spec.axes[dim]]:
        return _sort_split(name, bring(x, spec, name), dim, other, function, order)
    # There are few lines along the dimension: sort each as a one-dimensional array.
    result = from_blocks_of(
        spec.replace(dtype=np.intp if places else x.dtype),
        partial(np.zeros, dtype=np.intp if places else x.dtype),
    )
    for at in np.ndindex(*(n for d, n in enumerate(x.shape) if d != dim)):
        index = (*at[:dim], slice(None), *at[dim:])
        result[index] = _sort_flat(name, x[index], places, order)
    return result


def _sort_flat(name: str, x: DTensor, places: bool, order: Any) -> DTensor:
    if places:
        return sort_together(name, x, positions(x.spec), order=order)[1]
    return sort_together(name, x, order=order)[0]


def _sort_split(name: str, x: DTensor, dim: int, other: int, function: Any, order: Any) -> DTensor:
    """Sort along a dimension after its mesh axis was moved to split the blocks of another dimension."""
    spec = x.spec
    width = spec.cuts(other)[0][1]
    shape, axes = list(spec.shape), list(spec.axes)
    shape[other : other + 1] = [spec.grid.sizes[spec.axes[other]], width]
    axes.insert(other + 1, WHOLE)
    split = spec_of(spec.grid, tuple(shape), spec.dtype, axes)

    def divided(block: Any) -> Any:
        margin = [(0, width - n if d == other else 0) for d, n in enumerate(block.shape)]
        return np.expand_dims(np.pad(block, margin), other)

    at = dim + (dim > other)
    kernel = kernel_of(function, at, (), (("order", order),))
    (found,) = along(name, map_blocks(x, split, divided), [at], kernel)
    target = spec.replace(dtype=found.dtype)
    back = move(found, split.replace(dtype=found.dtype))
    if back._shards is None:
        return DTensor(target, None)
    lead = (slice(None),) * other
    return DTensor(
        target,
        tuple(
            block.squeeze(other)[(*lead, slice(local[other]))]
            for block, local in zip(back.blocks, target.local_shapes, strict=True)
        ),
    )


# NumPy's functions ------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _check_options(
    function: Callable[..., Any], dtype: np.dtype[Any], options: tuple[tuple[str, Any], ...]
) -> None:
    function(np.empty(0, dtype), **dict(options))


def _ordered(function: Any, places: bool) -> Any:
    def handler(a: Any, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
        fields = tuple(order) if isinstance(order, list) else order
        _check_options(function, a.dtype, (("kind", kind), ("order", fields), ("stable", stable)))
        x, dim = flattened(a, axis)
        return sort_dim(f"np.{function.__name__}", x, dim, places=places, order=fields)

    return handler


implements(np.sort)(_ordered(np.sort, False))
implements(np.argsort)(_ordered(np.argsort, True))


def _partitioned(function: Any, places: bool) -> Any:
    def handler(a: Any, kth: Any, axis: Any = -1, kind: str = "introselect", order: Any = None) -> Any:
        name = f"np.{function.__name__}"
        check_plain(name, kth, order)
        x, dim = flattened(a, axis)
        n = x.shape[dim]
        wrong = [k for k in np.atleast_1d(kth).tolist() if not -n <= k < n] if x.size else []
        if wrong:
            raise ValueError(f"kth(={wrong[0] + n if wrong[0] < 0 else wrong[0]}) out of bounds ({n})")
        if not fits(x.spec, [dim]):
            return sort_dim(name, x, dim, places=places, order=order)
        chosen = tuple(kth) if isinstance(kth, (list, np.ndarray)) else kth
        return along(name, x, [dim], kernel_of(function, dim, (chosen,), (("kind", kind), ("order", order))))[
            0
        ]

    return handler


implements(np.partition)(_partitioned(np.partition, False))
implements(np.argpartition)(_partitioned(np.argpartition, True))


@implements(np.lexsort)
def lexsort(keys: Any, axis: int = -1) -> DTensor:
    """Return the indices that sort by several keys, the last one first."""
    rest = list(keys) if isinstance(keys, (list, tuple)) else [keys[at] for at in range(len(keys))]
    for key in rest:
        check_operand(key, "np.lexsort")
    if not rest or any(getattr(key, "ndim", 0) != 1 for key in rest) or axis not in (-1, 0):
        raise UnshardableError("np.lexsort of sharded arrays takes keys of one dimension")
    grid_among(rest, "np.lexsort")
    if any(key.shape != rest[0].shape for key in rest):
        raise ValueError("all keys need to be the same shape")
    at = positions(rest[0].spec)
    while rest:
        _, at, *rest = sort_together("np.lexsort", rest[0], at, *rest[1:])
    return at


@implements(np.sort_complex)
def sort_complex(a: Any) -> DTensor:
    """Return the sorted elements as complex numbers."""
    found = sort_dim("np.sort_complex", a, a.ndim - 1)
    return found if a.dtype.kind == "c" else astype(found, np.sort_complex(np.empty(0, a.dtype)).dtype)
