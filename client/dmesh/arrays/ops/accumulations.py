"""Accumulations (`cumsum`, ...), `argmin` and `argmax`, without gathering sharded dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dmesh.arrays.creation import from_blocks_of
from dmesh.arrays.dispatch.operands import bring, free_axes
from dmesh.arrays.dispatch.reduction import NO_VALUE, accumulate, is_kept, normalized_axes, reduce
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import can_cast, elementwise, run_local
from dmesh.arrays.dtensor import DTensor, exchange
from dmesh.arrays.ops.mappings import reshape
from dmesh.arrays.ops.reductions import finish, replaced
from dmesh.arrays.spec import WHOLE, spec_of
from dmesh.arrays.transfer.mapping import plan_relayout

# Accumulations ----------------------------------------------------------------------------------------------


def _flat(a: DTensor, axis: Any) -> tuple[DTensor, int]:
    return (reshape(a, (a.size,)), 0) if axis is None or (not a.ndim and axis in (0, -1)) else (a, axis)


@implements(np.cumsum)
def cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the cumulative sums."""
    x, dim = _flat(a, axis)
    return accumulate(
        np.add, x, dim, np.add.reduce(np.ones(1, a.dtype)).dtype if dtype is None else dtype, out
    )


@implements(np.cumprod)
def cumprod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the cumulative products."""
    x, dim = _flat(a, axis)
    kind = np.multiply.reduce(np.ones(1, a.dtype)).dtype if dtype is None else dtype
    return accumulate(np.multiply, x, dim, kind, out)


@implements(np.nancumsum)
def nancumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the cumulative sums, with NaN as 0."""
    return cumsum(replaced(a, 0.0), axis, dtype, out)


@implements(np.nancumprod)
def nancumprod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the cumulative products, with NaN as 1."""
    return cumprod(replaced(a, 1.0), axis, dtype, out)


def _cumulative(base: Callable[..., Any], identity: int) -> Callable[..., Any]:
    def function(
        x: Any, /, *, axis: Any = None, dtype: Any = None, out: Any = None, include_initial: bool = False
    ) -> Any:
        if axis is None and x.ndim > 1:
            raise ValueError("For arrays which have more than one dimension ``axis`` argument is required.")
        if not x.ndim:
            x = reshape(x, (1,))
        found = base(x, 0 if axis is None else axis, dtype, None if include_initial else out)
        if not include_initial:
            return found
        (dim,) = normalized_axes(0 if axis is None else axis, x.ndim)
        shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        first = spec_of(found.spec.grid, shape, found.dtype, found.spec.axes)
        made = from_blocks_of(first, lambda local: np.full(local, identity, first.dtype))
        return finish(np.concatenate([made, found], dim), out)

    return function


implements(getattr(np, "cumulative_sum", None))(_cumulative(cumsum, 0))
implements(getattr(np, "cumulative_prod", None))(_cumulative(cumprod, 1))


# argmin and argmax ------------------------------------------------------------------------------------------


def _arg_extreme(find: Any, name: str) -> Callable[..., Any]:
    def function(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = NO_VALUE) -> Any:
        kept = is_kept(keepdims)
        if out is not None and not can_cast(out.dtype, np.dtype(np.intp), "safe"):
            raise TypeError(
                f"Cannot cast array data from {out.dtype!r} to dtype('int64') according to the rule 'safe'"
            )
        if not a.ndim and axis in (0, -1):
            axis = None
        x, dim = _flat(a, axis)
        result = _places(find, x, normalized_axes(dim, x.ndim)[0], name)
        if axis is None:
            shape = (1,) * a.ndim if kept else ()
        else:
            (at,) = normalized_axes(axis, a.ndim)
            shape = tuple(1 if d == at else n for d, n in enumerate(a.shape) if kept or d != at)
        return finish(reshape(result, shape), out)

    function.__name__ = name
    return function


def _places(find: Any, x: DTensor, dim: int, name: str) -> DTensor:
    """Return the index of the first extreme along a dimension: of each block, then the best of them."""
    if x.shape[dim] == 0:
        raise ValueError(f"attempt to get {name} of an empty sequence")
    spec = x.spec.complete()
    cut = spec.axes[dim]
    shards = 1 if cut == WHOLE else sum(stop > start for start, stop in spec.cuts(dim))
    if shards == 1:
        spec = free_axes(spec, [dim]) if spec.ndim > 1 or cut == WHOLE else spec.replicated()
        rest = [d for d in range(x.ndim) if d != dim]
        target = spec_of(
            spec.grid, tuple(spec.shape[d] for d in rest), np.dtype(np.intp), [spec.axes[d] for d in rest]
        )
        (result,) = run_local(name, lambda b: find(b, axis=dim), [x], [spec], (target,))
        return result
    # One candidate of each block: its value, and its index in the whole dimension.
    length = spec.grid.sizes[cut]
    shape = (*spec.shape[:dim], length, *spec.shape[dim + 1 :])
    values, places = (
        spec_of(spec.grid, shape, spec.dtype, spec.axes),
        spec_of(spec.grid, shape, np.dtype(np.intp), spec.axes),
    )
    offsets = [start for start, _ in spec.cuts(dim)]
    there = bring(x, spec, name)
    if there._shards is None:
        v, p = DTensor(values, None), DTensor(places, None)
    else:
        found_values, found_places = [], []
        for slot, block in zip(spec.slots, there.blocks, strict=True):
            shard = slot[spec.used.index(cut)]
            local = list(block.shape)
            local[dim] = 1
            if block.shape[dim] == 0 or block.size == 0:
                found_values.append(np.zeros(local, spec.dtype))
                found_places.append(np.full(local, -1, np.intp))
                continue
            at = np.expand_dims(np.asarray(find(block, axis=dim)), dim)
            found_values.append(np.take_along_axis(block, at, dim))
            found_places.append(at + offsets[shard])
        v, p = DTensor(values, tuple(found_values)), DTensor(places, tuple(found_places))
    whole = free_axes(values, [dim])
    if whole.axes[dim] == WHOLE and whole.shards < values.shards:
        whole = values.replace(axes=[WHOLE if d == dim else axis for d, axis in enumerate(values.axes)])
    v = exchange(v, plan_relayout(values, whole), whole)
    where = whole.replace(dtype=np.intp)
    p = exchange(p, plan_relayout(places, where), where)
    rest = [d for d in range(x.ndim) if d != dim]
    target = spec_of(
        spec.grid, tuple(spec.shape[d] for d in rest), np.dtype(np.intp), [whole.axes[d] for d in rest]
    )

    def best(candidates: Any, indices: Any) -> Any:
        candidates = np.take(candidates, range(shards), axis=dim)  # the last blocks may be empty
        first = np.expand_dims(find(candidates, axis=dim), dim)
        return np.take_along_axis(indices, first, dim).squeeze(dim)

    (result,) = run_local(name, best, [v, p], [whole, where], (target,))
    return result


implements(np.argmax)(_arg_extreme(np.argmax, "argmax"))
implements(np.argmin)(_arg_extreme(np.argmin, "argmin"))


def _nan_arg(find: Any, value: float) -> Callable[..., Any]:
    def function(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = NO_VALUE) -> Any:
        if a.dtype.kind in "fc" and bool(
            reduce(np.logical_or, reduce(np.logical_and, elementwise(np.isnan, (a,), {}), axis), None)
        ):
            raise ValueError("All-NaN slice encountered")
        return find(replaced(a, value), axis, out, keepdims=keepdims)

    return function


implements(np.nanargmax)(_nan_arg(_arg_extreme(np.argmax, "nanargmax"), -np.inf))
implements(np.nanargmin)(_nan_arg(_arg_extreme(np.argmin, "nanargmin"), np.inf))
