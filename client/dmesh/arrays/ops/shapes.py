"""Operations on shapes: new orders, lengths and numbers of dimensions, joining and splitting."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dmesh.arrays.creation import from_blocks_of
from dmesh.arrays.dispatch.operands import aligned, bring, check_operand, choose_axes, grid_among
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype, can_cast, store
from dmesh.arrays.dtensor import DTensor, move
from dmesh.arrays.ops import mappings
from dmesh.arrays.ops.mappings import Pick, map_blocks, moved_dims, pick, place_into
from dmesh.arrays.spec import WHOLE, spec_of
from dmesh.arrays.transfer.mapping import Run
from dmesh.errors import UnshardableError

_f: Any  # NumPy's functions, by families


def _axis(axis: Any, ndim: int) -> int:
    return int(np.lib.array_utils.normalize_axis_index(operator.index(axis), ndim))


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    return tuple(np.lib.array_utils.normalize_axis_tuple(axis, ndim))


def _row_major(order: str, name: str) -> None:
    if order not in ("C", "K", "A"):
        raise UnshardableError(
            f"np.{name} of sharded arrays takes elements in C order only, not order={order!r}"
        )


@implements(np.reshape)
def reshape(
    a: Any, /, shape: Any = None, order: str = "C", *, newshape: Any = None, copy: bool | None = None
) -> Any:
    """Return an array with another shape: see `mappings.reshape`."""
    _row_major(order, "reshape")
    wanted = newshape if shape is None else shape
    lengths = [operator.index(n) for n in (wanted if isinstance(wanted, (tuple, list)) else (wanted,))]
    if lengths.count(-1) > 1:
        raise ValueError("can only specify one unknown dimension")
    if -1 in lengths:
        known = math.prod(n for n in lengths if n != -1)
        if not known or a.size % known:
            raise ValueError(f"cannot reshape array of size {a.size} into shape {tuple(lengths)}")
        lengths[lengths.index(-1)] = a.size // known
    if math.prod(lengths) != a.size or any(n < 0 for n in lengths):
        raise ValueError(f"cannot reshape array of size {a.size} into shape {tuple(lengths)}")
    del copy
    return mappings.reshape(a, tuple(lengths))


@implements(np.ravel)
def ravel(a: Any, order: str = "C") -> Any:
    """Return the elements in one dimension."""
    _row_major(order, "ravel")
    return mappings.reshape(a, (a.size,))


@implements(np.transpose, getattr(np, "permute_dims", None))
def transpose(a: Any, axes: Any = None) -> Any:
    """Return an array with its dimensions in another order; nothing moves."""
    order = tuple(reversed(range(a.ndim))) if axes is None else _axes(tuple(axes), a.ndim)
    if len(order) != a.ndim:
        raise ValueError("axes don't match array")
    return moved_dims(a, order)


@implements(np.matrix_transpose if hasattr(np, "matrix_transpose") else None)
def matrix_transpose(x: Any, /) -> Any:
    """Return an array with its last two dimensions exchanged; nothing moves."""
    if x.ndim < 2:
        raise ValueError(f"Input array must be at least 2-dimensional, but it is {x.ndim}")
    return swapaxes(x, -1, -2)


@implements(np.swapaxes)
def swapaxes(a: Any, axis1: Any, axis2: Any) -> Any:
    """Return an array with two dimensions exchanged; nothing moves."""
    order = list(range(a.ndim))
    i, j = _axis(axis1, a.ndim), _axis(axis2, a.ndim)
    order[i], order[j] = j, i
    return moved_dims(a, order)


@implements(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> Any:
    """Return an array with dimensions at new places; nothing moves."""
    sources, targets = _axes(source, a.ndim), _axes(destination, a.ndim)
    if len(sources) != len(targets):
        raise ValueError("`source` and `destination` arguments must have the same number of elements")
    order = [d for d in range(a.ndim) if d not in sources]
    for target, dim in sorted(zip(targets, sources, strict=True)):
        order.insert(target, dim)
    return moved_dims(a, order)


@implements(np.rollaxis)
def rollaxis(a: Any, axis: Any, start: int = 0) -> Any:
    """Return an array with a dimension before another one; nothing moves."""
    at = _axis(axis, a.ndim)
    place = start + a.ndim if start < 0 else start
    order = [d for d in range(a.ndim) if d != at]
    order.insert(place - (at < place), at)
    return moved_dims(a, order)


@implements(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> Any:
    """Return an array with more dimensions of length 1; nothing moves."""
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    places = sorted(_axes(tuple(axes), a.ndim + len(axes)))
    shape = list(a.shape)
    for at in places:
        shape.insert(at, 1)
    return _relabel(a, tuple(shape), places, [])


@implements(np.squeeze)
def squeeze(a: Any, axis: Any = None) -> Any:
    """Return an array without dimensions of length 1."""
    dims = [d for d, n in enumerate(a.shape) if n == 1] if axis is None else list(_axes(axis, a.ndim))
    if any(a.shape[d] != 1 for d in dims):
        raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
    shape = tuple(n for d, n in enumerate(a.shape) if d not in dims)
    return _relabel(a, shape, [], dims)


def _relabel(a: DTensor, shape: tuple[int, ...], new: Sequence[int], dropped: Sequence[int]) -> DTensor:
    """Add and drop dimensions of length 1; one that is cut is first brought to all devices."""
    spec = a.spec
    if any(spec.axes[d] != WHOLE for d in dropped):
        spec = spec.complete().replace(
            axes=[WHOLE if d in dropped else axis for d, axis in enumerate(spec.axes)]
        )
        a = bring(a, spec, "squeeze")
    axes = [axis for d, axis in enumerate(spec.axes) if d not in dropped]
    for at in new:
        axes.insert(at, WHOLE)
    target = spec_of(spec.grid, shape, spec.dtype, axes, spec.partial, spec.op)
    if a._shards is None:
        return DTensor(target, None)
    return DTensor(target, tuple(b.reshape(s) for b, s in zip(a.blocks, target.local_shapes, strict=True)))


def _at_least(n: int) -> Any:
    def function(*arrays: Any) -> Any:
        results = []
        for a in arrays:
            if a.ndim >= n:
                results.append(a)
            elif n == 3 and a.ndim == 2:
                results.append(expand_dims(a, 2))
            elif n == 3 and a.ndim == 1:
                results.append(expand_dims(a, (0, 2)))
            else:
                results.append(expand_dims(a, tuple(range(n - a.ndim))))
        return results[0] if len(results) == 1 else tuple(results)

    return function


for _f, _n in ((np.atleast_1d, 1), (np.atleast_2d, 2), (np.atleast_3d, 3)):
    implements(_f)(_at_least(_n))


@implements(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> Any:
    """Return an array that is repeated along new and lengthened dimensions."""
    del subok
    lengths = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if np.broadcast_shapes(array.shape, lengths) != lengths:
        raise ValueError(
            f"operands could not be broadcast together with remapped shapes {array.shape} and {lengths}"
        )
    spec = array.spec.complete()
    axes = choose_axes((spec,), lengths)
    placed = spec.replace(axes=aligned(spec.shape, lengths, axes))
    target = spec_of(spec.grid, lengths, spec.dtype, axes)
    there = bring(array, placed, "np.broadcast_to")
    if there._shards is None:
        return DTensor(target, None)
    blocks = [there.blocks[placed.slot_of[device]] for device in target.devices]
    return DTensor(
        target, tuple(np.broadcast_to(b, s).copy() for b, s in zip(blocks, target.local_shapes, strict=True))
    )


@implements(np.broadcast_arrays)
def broadcast_arrays(*args: Any, subok: bool = False) -> Any:
    """Return arrays of one shape."""
    del subok
    for x in args:
        check_operand(x, "np.broadcast_arrays")
    if not all(isinstance(x, DTensor) for x in args):
        raise UnshardableError(
            "np.broadcast_arrays of sharded arrays and numbers: make the numbers arrays, by dmesh.full"
        )
    shape = np.broadcast_shapes(*(x.shape for x in args))
    return tuple(broadcast_to(x, shape) for x in args)


@implements(np.meshgrid)
def meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Any:
    """Return the coordinates of a grid, each array cut as the vector that it repeats."""
    del copy
    if indexing not in ("xy", "ij"):
        raise ValueError("Valid values for `indexing` are 'xy' and 'ij'.")
    found = _arrays(xi, "meshgrid")
    order = list(range(len(found)))
    if indexing == "xy" and len(found) > 1:
        order[:2] = 1, 0
    ones = [1] * len(found)
    lines = [
        mappings.reshape(x, (*ones[:at], x.size, *ones[at + 1 :])) for x, at in zip(found, order, strict=True)
    ]
    return tuple(lines) if sparse else broadcast_arrays(*lines)


# Copies -----------------------------------------------------------------------------------------------------


@implements(np.copy)
def copy(a: Any, order: str = "K", subok: bool = False) -> Any:
    """Return a copy."""
    del order, subok
    return map_blocks(a, a.spec, lambda block: block.copy())


@implements(np.copyto)
def copyto(dst: Any, src: Any, casting: str = "same_kind", where: Any = True) -> None:
    """Copy values to an array, in its layout."""
    if not isinstance(dst, DTensor):
        raise UnshardableError(
            "np.copyto writes to a sharded array, or from plain to plain; x.full() is the whole array"
        )
    check_operand(src, "np.copyto")
    source = src.dtype if isinstance(src, (DTensor, np.ndarray, np.generic)) else np.min_scalar_type(src)
    if not can_cast(source, dst.dtype, casting):
        raise TypeError(
            f"Cannot cast array data from {source!r} to {dst.dtype!r} according to the rule {casting!r}"
        )
    if where is True:
        dst[...] = src
        return
    check_operand(where, "np.copyto")
    from dmesh.arrays.ops.selection import where_

    if not isinstance(src, DTensor):
        src = np.asarray(src).astype(dst.dtype)[()]
    chosen = where_(where, src, dst)
    store(chosen if chosen.dtype == dst.dtype else astype(chosen, dst.dtype), dst, "unsafe")


def _like(make: Any) -> Any:
    def function(
        a: Any,
        dtype: Any = None,
        order: str = "K",
        subok: bool = True,
        shape: Any = None,
        *,
        device: Any = None,
    ) -> Any:
        del order, subok, device
        if shape is not None and tuple(np.atleast_1d(shape)) != a.shape:
            raise UnshardableError(
                "shape= of the _like functions is refused for sharded arrays: use dmesh.zeros and "
                "others, with a layout"
            )
        spec = a.spec.complete().replace(dtype=a.dtype if dtype is None else dtype)
        return from_blocks_of(spec, lambda local: make(local, spec.dtype))

    return function


implements(np.zeros_like, np.empty_like)(_like(np.zeros))
implements(np.ones_like)(_like(np.ones))


@implements(np.full_like)
def full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *,
    device: Any = None,
) -> Any:  # fmt: skip
    """Return an array of the same shape and layout, filled with a number."""
    made = _like(np.zeros)(a, dtype, order, subok, shape, device=device)
    made[...] = fill_value
    return made


# Joining ----------------------------------------------------------------------------------------------------


def _arrays(values: Any, name: str) -> list[DTensor]:
    found = list(values)
    for x in found:
        check_operand(x, name)
    if not all(isinstance(x, DTensor) for x in found):
        raise UnshardableError(f"np.{name} joins sharded arrays with each other, not with numbers")
    grid_among(found, name)
    return found


@implements(np.concatenate, getattr(np, "concat", None))
def concatenate(
    arrays: Any, /, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> Any:
    """Return arrays joined along a dimension, in the layout of the first one."""
    found = _arrays(arrays, "concatenate")
    if axis is None:
        found, axis = [mappings.reshape(x, (x.size,)) for x in found], 0
    first = found[0]
    if not first.ndim:
        raise ValueError("zero-dimensional arrays cannot be concatenated")
    at = _axis(axis, first.ndim)
    for x in found:
        if x.ndim != first.ndim:
            raise ValueError(
                "all the input array dimensions except for the concatenation axis must match exactly: "
                "they have "
                f"{first.ndim} and {x.ndim} dimensions"
            )
        if any(n != m for d, (n, m) in enumerate(zip(x.shape, first.shape, strict=True)) if d != at):
            raise ValueError(
                "all the input array dimensions except for the concatenation axis must match exactly: "
                f"{first.shape} "
                f"and {x.shape}"
            )
    kind = np.result_type(*(x.dtype for x in found)) if dtype is None else np.dtype(dtype)
    shape = tuple(sum(x.shape[at] for x in found) if d == at else n for d, n in enumerate(first.shape))
    target = spec_of(first.spec.grid, shape, kind, first.spec.axes)
    if any(x._shards is None for x in found):
        result = DTensor(target, None)
    else:
        result = from_blocks_of(target, lambda local: np.empty(local, target.dtype))
        result._owned = True
    offset = 0
    for x in found:
        offsets = [offset if d == at else 0 for d in range(len(shape))]
        source = x if x.dtype == target.dtype else astype(x, target.dtype, casting)
        place_into(result, source, offsets)
        offset += x.shape[at]
    return result if out is None else store(result, out, casting)


@implements(np.stack)
def stack(
    arrays: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> Any:
    """Return arrays joined along a new dimension."""
    found = _arrays(arrays, "stack")
    if not found:
        raise ValueError("need at least one array to stack")
    if any(x.shape != found[0].shape for x in found):
        raise ValueError("all input arrays must have the same shape")
    at = _axis(axis, found[0].ndim + 1)
    return concatenate([expand_dims(x, at) for x in found], at, out, dtype=dtype, casting=casting)


@implements(np.vstack)
def vstack(tup: Any, *, dtype: Any = None, casting: str = "same_kind") -> Any:
    """Return arrays joined row by row."""
    return concatenate([np.atleast_2d(x) for x in _arrays(tup, "vstack")], 0, dtype=dtype, casting=casting)


@implements(np.hstack)
def hstack(tup: Any, *, dtype: Any = None, casting: str = "same_kind") -> Any:
    """Return arrays joined column by column."""
    found = [np.atleast_1d(x) for x in _arrays(tup, "hstack")]
    return concatenate(found, 0 if found and found[0].ndim == 1 else 1, dtype=dtype, casting=casting)


@implements(np.dstack)
def dstack(tup: Any) -> Any:
    """Return arrays joined along the third dimension."""
    return concatenate([np.atleast_3d(x) for x in _arrays(tup, "dstack")], 2)


@implements(np.column_stack)
def column_stack(tup: Any) -> Any:
    """Return vectors as the columns of a matrix."""
    return concatenate([expand_dims(x, 1) if x.ndim == 1 else x for x in _arrays(tup, "column_stack")], 1)


@implements(np.append)
def append(arr: Any, values: Any, axis: Any = None) -> Any:
    """Return an array with values after its end."""
    return concatenate([arr, values], axis)


@implements(np.array_split)
def array_split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    """Return parts of an array along a dimension."""
    at = _axis(axis, ary.ndim)
    length = ary.shape[at]
    if isinstance(indices_or_sections, (int, np.integer)):
        each, more = divmod(length, indices_or_sections)
        ends = np.cumsum([0] + more * [each + 1] + (indices_or_sections - more) * [each]).tolist()
    else:
        ends = [0, *(int(i) for i in indices_or_sections), length]
    return [ary[(slice(None),) * at + (slice(a, b),)] for a, b in itertools.pairwise(ends)]


@implements(np.split)
def split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    """Return equal parts of an array along a dimension."""
    if (
        isinstance(indices_or_sections, (int, np.integer))
        and ary.shape[_axis(axis, ary.ndim)] % indices_or_sections
    ):
        raise ValueError("array split does not result in an equal division")
    return array_split(ary, indices_or_sections, axis)


for _f, _least, _at in ((np.vsplit, 2, 0), (np.dsplit, 3, 2)):

    def _split(ary: Any, indices_or_sections: Any, _least: int = _least, _at: int = _at) -> Any:
        if ary.ndim < _least:
            raise ValueError(f"the split only works on arrays of {_least} or more dimensions")
        return split(ary, indices_or_sections, _at)

    implements(_f)(_split)


@implements(np.hsplit)
def hsplit(ary: Any, indices_or_sections: Any) -> Any:
    """Return parts of an array, column by column."""
    if not ary.ndim:
        raise ValueError("hsplit only works on arrays of 1 or more dimensions")
    return split(ary, indices_or_sections, 1 if ary.ndim > 1 else 0)


@implements(getattr(np, "unstack", None))
def unstack(x: Any, /, *, axis: int = 0) -> Any:
    """Return the parts of an array along a dimension, without it."""
    at = _axis(axis, x.ndim)
    return tuple(x[(slice(None),) * at + (i,)] for i in range(x.shape[at]))


# Other orders of elements -----------------------------------------------------------------------------------


@implements(np.flip)
def flip(m: Any, axis: Any = None) -> Any:
    """Return an array with its elements in reverse order along dimensions."""
    dims = range(m.ndim) if axis is None else _axes(axis, m.ndim)
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
    i, j = _axis(axes[0], m.ndim), _axis(axes[1], m.ndim)
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
    """Return an array whose elements are shifted, those beyond the end coming in at the start."""
    if axis is None:
        return mappings.reshape(roll(mappings.reshape(a, (a.size,)), shift, 0), a.shape)
    shifts = np.atleast_1d(shift).tolist()
    dims = list(axis) if isinstance(axis, (tuple, list)) else [axis]
    pairs = np.broadcast_arrays(shifts, dims)
    result = a
    for by, dim in zip(pairs[0].tolist(), pairs[1].tolist(), strict=True):
        at = _axis(dim, a.ndim)
        n = a.shape[at]
        if n and by % n:
            lead = (slice(None),) * at
            cut = n - by % n
            result = concatenate([result[(*lead, slice(cut, None))], result[(*lead, slice(None, cut))]], at)
    return result if result is not a else a[...]


@implements(np.repeat)
def repeat(a: Any, repeats: Any, axis: Any = None) -> Any:
    """Return an array whose elements are repeated along a dimension; sharded counts are read whole."""
    x, at = (mappings.reshape(a, (a.size,)), 0) if axis is None else (a, _axis(axis, a.ndim))
    counts = move(repeats, repeats.spec.replicated()).blocks[0] if isinstance(repeats, DTensor) else repeats
    indices = np.repeat(np.arange(x.shape[at]), counts).astype(np.intp)
    return mappings.take_along(x, indices, at)


@implements(np.tile)
def tile(A: Any, reps: Any) -> Any:
    """Return an array that is repeated as a whole."""
    counts = list(reps) if isinstance(reps, (tuple, list)) else [reps]
    x = expand_dims(A, tuple(range(len(counts) - A.ndim))) if A.ndim < len(counts) else A
    counts = [1] * (x.ndim - len(counts)) + counts
    for dim, count in enumerate(counts):
        if count != 1:
            x = mappings.take_along(x, np.tile(np.arange(x.shape[dim]), count).astype(np.intp), dim)
    return x if x is not A else copy(A)


@implements(np.pad)
def pad(array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    """Return an array with a margin of one value, or one that repeats its edge or wraps around."""
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
            "np.pad of sharded arrays is built for mode='constant' with one value, 'edge', 'wrap', "
            "'reflect' and 'symmetric'"
        )
    shape = tuple(n + before + after for n, (before, after) in zip(array.shape, widths, strict=True))
    target = spec_of(array.spec.grid, shape, array.dtype, array.spec.axes)
    if array._shards is None:
        result = DTensor(target, None)
    else:
        result = from_blocks_of(target, lambda local: np.full(local, values, array.dtype))
        result._owned = True
    place_into(result, array, [before for before, _ in widths])
    return result


@implements(np.delete)
def delete(arr: Any, obj: Any, axis: Any = None) -> Any:
    """Return an array without some elements along a dimension."""
    x, at = (mappings.reshape(arr, (arr.size,)), 0) if axis is None else (arr, _axis(axis, arr.ndim))
    if isinstance(obj, DTensor):
        raise UnshardableError("the indices of np.delete must be plain: they say how long the result is")
    return mappings.take_along(x, np.delete(np.arange(x.shape[at]), obj).astype(np.intp), at)
