"""Operations on shapes: reshape, transpose, squeeze, broadcast; copies."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dmesh.arrays.creation import from_blocks_of
from dmesh.arrays.dispatch.operands import aligned, bring, check_operand, choose_axes
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype, store
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ops import mappings
from dmesh.arrays.ops.mappings import map_blocks, moved_dims
from dmesh.arrays.spec import WHOLE, spec_of
from dmesh.errors import UnshardableError

_f: Any  # loop variable of the registrations below


def axis_of(axis: Any, ndim: int) -> int:
    """Return a dimension as a non-negative number."""
    return int(np.lib.array_utils.normalize_axis_index(operator.index(axis), ndim))


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return dimensions as non-negative numbers."""
    return tuple(np.lib.array_utils.normalize_axis_tuple(axis, ndim))


def _row_major(order: str, name: str) -> None:
    if order not in ("C", "K", "A"):
        raise UnshardableError(f"np.{name} of sharded arrays supports only C order, got order={order!r}")


@implements(np.reshape)
def reshape(
    a: Any, /, shape: Any = None, order: str = "C", *, newshape: Any = None, copy: bool | None = None
) -> Any:
    """Return an array with another shape; see `mappings.reshape`."""
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
    if copy is False:
        raise ValueError("a reshaped array has elements of its own on sharded arrays: copy=False is refused")
    return mappings.reshape(a, tuple(lengths))


@implements(np.ravel)
def ravel(a: Any, order: str = "C") -> Any:
    """Return the flattened array."""
    _row_major(order, "ravel")
    return mappings.reshape(a, (a.size,))


@implements(np.transpose, getattr(np, "permute_dims", None))
def transpose(a: Any, axes: Any = None) -> Any:
    """Return an array with its dimensions in another order; nothing moves."""
    order = tuple(reversed(range(a.ndim))) if axes is None else axes_of(tuple(axes), a.ndim)
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
    i, j = axis_of(axis1, a.ndim), axis_of(axis2, a.ndim)
    order[i], order[j] = j, i
    return moved_dims(a, order)


@implements(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> Any:
    """Return an array with dimensions at new positions; nothing moves."""
    sources, targets = axes_of(source, a.ndim), axes_of(destination, a.ndim)
    if len(sources) != len(targets):
        raise ValueError("`source` and `destination` arguments must have the same number of elements")
    order = [d for d in range(a.ndim) if d not in sources]
    for target, dim in sorted(zip(targets, sources, strict=True)):
        order.insert(target, dim)
    return moved_dims(a, order)


@implements(np.rollaxis)
def rollaxis(a: Any, axis: Any, start: int = 0) -> Any:
    """Return an array with a dimension moved before another one; no element moves."""
    at = axis_of(axis, a.ndim)
    place = start + a.ndim if start < 0 else start
    order = [d for d in range(a.ndim) if d != at]
    order.insert(place - (at < place), at)
    return moved_dims(a, order)


@implements(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> Any:
    """Return an array with more dimensions of length 1; nothing moves."""
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    places = sorted(axes_of(tuple(axes), a.ndim + len(axes)))
    shape = list(a.shape)
    for at in places:
        shape.insert(at, 1)
    return _relabel(a, tuple(shape), places, [])


@implements(np.squeeze)
def squeeze(a: Any, axis: Any = None) -> Any:
    """Return an array without dimensions of length 1."""
    dims = [d for d, n in enumerate(a.shape) if n == 1] if axis is None else list(axes_of(axis, a.ndim))
    if any(a.shape[d] != 1 for d in dims):
        raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
    shape = tuple(n for d, n in enumerate(a.shape) if d not in dims)
    return _relabel(a, shape, [], dims)


def _relabel(a: DTensor, shape: tuple[int, ...], new: Sequence[int], dropped: Sequence[int]) -> DTensor:
    """Add and drop dimensions of length 1; a sharded one is first sent to all devices."""
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
    """Return an array broadcast to a shape."""
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
    """Return arrays broadcast to a common shape."""
    del subok
    for x in args:
        check_operand(x, "np.broadcast_arrays")
    if not all(isinstance(x, DTensor) for x in args):
        raise UnshardableError(
            "np.broadcast_arrays cannot mix sharded arrays and numbers. Make them arrays with dmesh.full"
        )
    shape = np.broadcast_shapes(*(x.shape for x in args))
    return tuple(broadcast_to(x, shape) for x in args)


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
            "np.copyto cannot copy a sharded array to a plain one. Use x.full() for the whole array"
        )
    check_operand(src, "np.copyto")
    kind: Any = casting
    np.copyto(np.empty((), dst.dtype), np.empty((), src.dtype) if isinstance(src, DTensor) else src, kind)
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
                "shape= of the _like functions is not supported for sharded arrays. Use dmesh.zeros and the "
                "like with a layout"
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
    number = np.full_like(np.empty((), made.dtype), fill_value) if np.ndim(fill_value) == 0 else fill_value
    made[...] = fill_value if isinstance(fill_value, DTensor) else number
    return made
