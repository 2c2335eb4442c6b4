"""Flips, rotations, shifts, repetitions, padding, and deletion of elements."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from dmesh.arrays.creation import from_blocks_of, scattered
from dmesh.arrays.dispatch.operands import check_operand
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype
from dmesh.arrays.dtensor import DTensor, move
from dmesh.arrays.ops import mappings
from dmesh.arrays.ops.joining import concatenate
from dmesh.arrays.ops.mappings import Pick, pick, place_into
from dmesh.arrays.ops.shapes import axes_of, axis_of, broadcast_to, copy, expand_dims, moveaxis, swapaxes
from dmesh.arrays.spec import spec_of
from dmesh.arrays.transfer.mapping import Run
from dmesh.errors import UnshardableError


@implements(np.flip)
def flip(m: Any, axis: Any = None) -> Any:
    """Return an array with its elements in reverse order along dimensions."""
    dims = range(m.ndim) if axis is None else axes_of(axis, m.ndim)
    return pick(m, [Pick(n, Run(n - 1, -1)) if d in dims and n else Pick(n) for d, n in enumerate(m.shape)])


@implements(np.fliplr)
def fliplr(m: Any) -> Any:
    """Return an array with its columns in reverse order."""
    if m.ndim < 2:
        raise ValueError("Input must be >= 2-d.")
    return flip(m, 1)


@implements(np.flipud)
def flipud(m: Any) -> Any:
    """Return an array with its rows in reverse order."""
    if m.ndim < 1:
        raise ValueError("Input must be >= 1-d.")
    return flip(m, 0)


@implements(np.rot90)
def rot90(m: Any, k: int = 1, axes: Any = (0, 1)) -> Any:
    """Return an array rotated by quarter turns."""
    if len(axes) != 2:
        raise ValueError("len(axes) must be 2.")
    i, j = axis_of(axes[0], m.ndim), axis_of(axes[1], m.ndim)
    if i == j:
        raise ValueError("Axes must be different.")
    turns = k % 4
    if turns == 0:
        return m[:]
    if turns == 2:
        return flip(m, (i, j))
    return swapaxes(flip(m, j), i, j) if turns == 1 else flip(swapaxes(m, i, j), j)


@implements(np.roll)
def roll(a: Any, shift: Any, axis: Any = None) -> Any:
    """Return an array whose elements are shifted cyclically."""
    if axis is None:
        return mappings.reshape(roll(mappings.reshape(a, (a.size,)), shift, 0), a.shape)
    shifts = np.atleast_1d(shift).tolist()
    dims = list(axis) if isinstance(axis, (tuple, list)) else [axis]
    pairs = np.broadcast_arrays(shifts, dims)
    result = a
    for by, dim in zip(pairs[0].tolist(), pairs[1].tolist(), strict=True):
        at = axis_of(dim, a.ndim)
        n = a.shape[at]
        if n and by % n:
            lead = (slice(None),) * at
            cut = n - by % n
            result = concatenate([result[(*lead, slice(cut, None))], result[(*lead, slice(None, cut))]], at)
    return result if result is not a else a[...]


@implements(np.repeat)
def repeat(a: Any, repeats: Any, axis: Any = None) -> Any:
    """Return an array with its elements repeated along a dimension; every client reads all counts."""
    x, at = (mappings.reshape(a, (a.size,)), 0) if axis is None else (a, axis_of(axis, a.ndim))
    if not isinstance(repeats, DTensor) and np.ndim(repeats) == 0 and (count := operator.index(repeats)) > 0:
        each = broadcast_to(expand_dims(x, at + 1), (*x.shape[: at + 1], count, *x.shape[at + 1 :]))
        return mappings.reshape(each, (*x.shape[:at], x.shape[at] * count, *x.shape[at + 1 :]))
    counts = move(repeats, repeats.spec.replicated()).blocks[0] if isinstance(repeats, DTensor) else repeats
    indices = np.repeat(np.arange(x.shape[at]), counts).astype(np.intp)
    return mappings.take_along(x, indices, at)


@implements(np.tile)
def tile(A: Any, reps: Any) -> Any:
    """Return an array made of repetitions of the whole array."""
    counts = list(reps) if isinstance(reps, (tuple, list)) else [reps]
    x = expand_dims(A, tuple(range(len(counts) - A.ndim))) if A.ndim < len(counts) else A
    counts = [1] * (x.ndim - len(counts)) + counts
    for dim, count in enumerate(counts):
        if count != 1:
            x = mappings.take_along(x, np.tile(np.arange(x.shape[dim]), count).astype(np.intp), dim)
    return x if x is not A else copy(A)


@implements(np.pad)
def pad(array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    """Return an array padded with one value, its edge values, or values from inside the array."""
    widths = np.broadcast_to(np.asarray(pad_width), (array.ndim, 2)).astype(int).tolist()
    if mode in ("edge", "wrap", "reflect", "symmetric") and not kwargs:
        x = array
        for dim, (before, after) in enumerate(widths):
            indices = np.pad(np.arange(x.shape[dim]), (before, after), mode=mode).astype(np.intp)
            x = mappings.take_along(x, indices, dim)
        return x
    values = kwargs.pop("constant_values", 0)
    if mode != "constant" or kwargs or np.ndim(values):
        raise UnshardableError(
            "np.pad of sharded arrays supports mode='constant' with one value, 'edge', 'wrap', "
            "'reflect' and 'symmetric'"
        )
    if any(width < 0 for pair in widths for width in pair):
        raise ValueError("index can't contain negative values")
    value = np.asarray(values).astype(array.dtype)
    shape = tuple(n + before + after for n, (before, after) in zip(array.shape, widths, strict=True))
    target = spec_of(array.spec.grid, shape, array.dtype, array.spec.axes)
    if array._shards is None:
        result = DTensor(target, None)
    else:
        result = from_blocks_of(target, lambda local: np.full(local, value, array.dtype))
        result._owned = True
    place_into(result, array, [before for before, _ in widths])
    return result


@implements(np.delete)
def delete(arr: Any, obj: Any, axis: Any = None) -> Any:
    """Return an array without some elements along a dimension."""
    x, at = (mappings.reshape(arr, (arr.size,)), 0) if axis is None else (arr, axis_of(axis, arr.ndim))
    if isinstance(obj, DTensor):
        raise UnshardableError("the indices of np.delete must be plain: they say how long the result is")
    return mappings.take_along(x, np.delete(np.arange(x.shape[at]), obj).astype(np.intp), at)


@implements(np.insert)
def insert(arr: Any, obj: Any, values: Any, axis: Any = None) -> Any:
    """Return an array with more elements along a dimension; their indices are plain."""
    check_operand(values, "np.insert")
    if isinstance(obj, DTensor) or not isinstance(arr, DTensor):
        raise UnshardableError(
            "np.insert takes a sharded array and plain indices: they say how long the result is"
        )
    x, at = (mappings.reshape(arr, (arr.size,)), 0) if axis is None else (arr, axis_of(axis, arr.ndim))
    n, size = x.shape[at], np.arange(x.shape[at])[obj].size if isinstance(obj, slice) else np.size(obj)
    new = (
        values
        if isinstance(values, DTensor)
        else scattered(np.asarray(values), spec_of(x.spec.grid, (), np.asarray(values).dtype))
    )
    new = mappings.reshape(new, (1,) * (x.ndim - new.ndim) + new.shape)
    if np.ndim(obj) == 0 and not isinstance(obj, slice):
        new = moveaxis(new, 0, at)
    count = new.shape[at] if size == 1 else size
    places = np.insert(np.arange(n), obj, np.arange(n, n + count)).astype(np.intp)
    new = broadcast_to(new, tuple(count if d == at else m for d, m in enumerate(x.shape)))
    return mappings.take_along(concatenate([x, astype(new, x.dtype, "unsafe")], at), places, at)
