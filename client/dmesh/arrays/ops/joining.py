"""Joining arrays, and splitting them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from dmesh.arrays.creation import from_blocks_of
from dmesh.arrays.dispatch.operands import check_operand, grid_among
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype, store
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ops import mappings
from dmesh.arrays.ops.mappings import place_into
from dmesh.arrays.ops.shapes import axis_of, expand_dims
from dmesh.arrays.spec import spec_of
from dmesh.errors import UnshardableError

_f: Any  # loop variable of the registrations below


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
    """Return arrays concatenated along a dimension, in the layout of the first one."""
    found = _arrays(arrays, "concatenate")
    if axis is None:
        found, axis = [mappings.reshape(x, (x.size,)) for x in found], 0
    first = found[0]
    if not first.ndim:
        raise ValueError("zero-dimensional arrays cannot be concatenated")
    at = axis_of(axis, first.ndim)
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
        result = from_blocks_of(target, lambda local: target.grid.empty(local, target.dtype))
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
    """Return arrays stacked along a new dimension."""
    found = _arrays(arrays, "stack")
    if not found:
        raise ValueError("need at least one array to stack")
    if any(x.shape != found[0].shape for x in found):
        raise ValueError("all input arrays must have the same shape")
    at = axis_of(axis, found[0].ndim + 1)
    return concatenate([expand_dims(x, at) for x in found], at, out, dtype=dtype, casting=casting)


@implements(np.vstack)
def vstack(tup: Any, *, dtype: Any = None, casting: str = "same_kind") -> Any:
    """Return arrays stacked vertically, along rows."""
    return concatenate([np.atleast_2d(x) for x in _arrays(tup, "vstack")], 0, dtype=dtype, casting=casting)


@implements(np.hstack)
def hstack(tup: Any, *, dtype: Any = None, casting: str = "same_kind") -> Any:
    """Return arrays stacked horizontally, along columns."""
    found = [np.atleast_1d(x) for x in _arrays(tup, "hstack")]
    return concatenate(found, 0 if found and found[0].ndim == 1 else 1, dtype=dtype, casting=casting)


@implements(np.dstack)
def dstack(tup: Any) -> Any:
    """Return arrays stacked along the third dimension."""
    return concatenate([np.atleast_3d(x) for x in _arrays(tup, "dstack")], 2)


@implements(np.column_stack)
def column_stack(tup: Any) -> Any:
    """Return vectors as the columns of a matrix."""
    return concatenate([np.atleast_2d(x).T if x.ndim < 2 else x for x in _arrays(tup, "column_stack")], 1)


@implements(np.block)
def block(arrays: Any) -> Any:
    """Return arrays joined as nested lists say: those within along the last dimension, and so on outward."""

    def depth_of(x: Any) -> int:
        return 1 + max(map(depth_of, x)) if isinstance(x, list) and x else 0

    def leaves(x: Any) -> list[Any]:
        return [leaf for one in x for leaf in leaves(one)] if isinstance(x, list) else [x]

    def joined(x: Any, depth: int) -> Any:
        if isinstance(x, list):
            if not x or not depth:
                raise ValueError(
                    "List depths are mismatched, or a list is empty: np.block needs equal depths"
                )
            return concatenate([joined(one, depth - 1) for one in x], ndim - depth)
        if depth:
            raise ValueError(
                f"List depths are mismatched: an array stands where np.block needs {depth} more lists"
            )
        return mappings.reshape(x, (1,) * (ndim - x.ndim) + x.shape)

    depth = depth_of(arrays)
    ndim = max(depth, *(x.ndim for x in _arrays(leaves(arrays), "block")))
    return joined(arrays, depth)


@implements(np.append)
def append(arr: Any, values: Any, axis: Any = None) -> Any:
    """Return an array with values appended."""
    return concatenate([arr, values], axis)


@implements(np.array_split)
def array_split(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    """Return parts of an array along a dimension."""
    at = axis_of(axis, ary.ndim)
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
        and ary.shape[axis_of(axis, ary.ndim)] % indices_or_sections
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
    """Return parts of an array along its columns."""
    if not ary.ndim:
        raise ValueError("hsplit only works on arrays of 1 or more dimensions")
    return split(ary, indices_or_sections, 1 if ary.ndim > 1 else 0)


@implements(getattr(np, "unstack", None))
def unstack(x: Any, /, *, axis: int = 0) -> Any:
    """Return the slices of an array along a dimension, which they do not have."""
    at = axis_of(axis, x.ndim)
    return tuple(x[(slice(None),) * at + (i,)] for i in range(x.shape[at]))
