"""Reductions: NumPy's functions over `ufunc.reduce`, the variants that skip NaN, and statistics.

A sum over a dimension that is cut stays a partial sum, one contribution on each device, until something needs
it whole.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from dmesh.arrays.creation import from_blocks_of
from dmesh.arrays.dispatch.operands import bring, check_operand, free_axes, grid_among
from dmesh.arrays.dispatch.reduction import NO_VALUE, accumulate, normalized_axes, reduce
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype, elementwise, run_local, store
from dmesh.arrays.dtensor import DTensor, exchange
from dmesh.arrays.ops.mappings import reshape
from dmesh.arrays.spec import WHOLE, spec_of
from dmesh.arrays.transfer.mapping import plan_relayout
from dmesh.errors import UnshardableError

_f: Any  # NumPy's functions, by families


def _reduction(ufunc: np.ufunc, name: str) -> Callable[..., Any]:
    def function(
        a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = NO_VALUE,
        initial: Any = NO_VALUE, where: Any = NO_VALUE,
    ) -> Any:  # fmt: skip
        kept = keepdims is not NO_VALUE and bool(keepdims)
        mask = True if where is NO_VALUE else where
        return reduce(ufunc, a, axis, dtype, out, kept, initial, mask)

    function.__name__ = name
    return function


def _extreme(ufunc: np.ufunc, name: str) -> Callable[..., Any]:
    def function(
        a: Any,
        axis: Any = None,
        out: Any = None,
        keepdims: Any = NO_VALUE,
        initial: Any = NO_VALUE,
        where: Any = NO_VALUE,
    ) -> Any:
        kept = keepdims is not NO_VALUE and bool(keepdims)
        return reduce(ufunc, a, axis, None, out, kept, initial, True if where is NO_VALUE else where)

    function.__name__ = name
    return function


def _logical(ufunc: np.ufunc, name: str) -> Callable[..., Any]:
    def function(
        a: Any, axis: Any = None, out: Any = None, keepdims: Any = NO_VALUE, *, where: Any = NO_VALUE
    ) -> Any:
        kept = keepdims is not NO_VALUE and bool(keepdims)
        return reduce(ufunc, a, axis, None, out, kept, NO_VALUE, True if where is NO_VALUE else where)

    function.__name__ = name
    return function


for _f in (np.sum, np.prod):
    implements(_f)(_reduction(np.add if _f is np.sum else np.multiply, _f.__name__))
for _f in (np.max, np.amax, np.min, np.amin):
    implements(_f)(_extreme(np.maximum if _f in (np.max, np.amax) else np.minimum, _f.__name__))
for _f in (np.any, np.all):
    implements(_f)(_logical(np.logical_or if _f is np.any else np.logical_and, _f.__name__))


def count_of(x: DTensor, axis: Any) -> int:
    """Return how many elements each result of a reduction is made of."""
    return math.prod(x.shape[dim] for dim in normalized_axes(axis, x.ndim))


def _finish(result: Any, out: Any) -> Any:
    return result if out is None else store(result, out, "unsafe")


@implements(np.mean)
def mean(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = NO_VALUE,
    *,
    where: Any = NO_VALUE,
) -> Any:
    """Return the arithmetic mean."""
    kind = np.mean(np.ones(1, a.dtype), dtype=dtype).dtype
    # NumPy adds float16 in float32.
    working = np.dtype(np.float32) if kind == np.float16 and dtype is None else kind
    mask = True if where is NO_VALUE else where
    total = reduce(
        np.add, a, axis, working, None, keepdims is not NO_VALUE and bool(keepdims), NO_VALUE, mask
    )
    n: Any = count_of(a, axis) if mask is True else _counted(mask, a, axis, keepdims)
    if mask is True and not n:
        warnings.warn("Mean of empty slice.", RuntimeWarning, stacklevel=2)
    divided = elementwise(np.true_divide, (total, n), {})
    return _finish(divided if divided.dtype == kind else astype(divided, kind), out)


def _counted(mask: Any, x: DTensor, axis: Any, keepdims: Any) -> Any:
    ones = elementwise(np.logical_and, (mask, elementwise(np.equal, (astype(x, np.dtype(bool)), 0), {})), {})
    both = elementwise(
        np.logical_or, (ones, elementwise(np.logical_and, (mask, astype(x, np.dtype(bool))), {})), {}
    )
    return reduce(np.add, both, axis, np.intp, None, keepdims is not NO_VALUE and bool(keepdims))


@implements(np.var)
def var(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = NO_VALUE, *,
    where: Any = NO_VALUE, mean: Any = NO_VALUE, correction: Any = NO_VALUE,
) -> Any:  # fmt: skip
    """Return the variance: in two passes, as NumPy does."""
    if where is not NO_VALUE:
        raise UnshardableError(
            "where= of np.var and np.std is not built: select the elements with x[mask] first"
        )
    if correction is not NO_VALUE:
        ddof = correction
    kind = np.var(np.ones(2, a.dtype), dtype=dtype).dtype
    work = np.result_type(kind, np.float32) if kind == np.float16 else kind
    wide = np.result_type(a.dtype, work)
    x = a if a.dtype == wide else astype(a, np.dtype(wide))
    n = count_of(a, axis)
    center = (
        mean
        if mean is not NO_VALUE
        else elementwise(np.true_divide, (reduce(np.add, x, axis, None, None, True), n), {})
    )
    difference = elementwise(np.subtract, (x, center), {})
    square = (
        _abs_squared(difference)
        if difference.dtype.kind == "c"
        else elementwise(np.multiply, (difference, difference), {})
    )
    total = reduce(np.add, square, axis, None, None, keepdims is not NO_VALUE and bool(keepdims))
    if n - ddof <= 0:
        warnings.warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=2)
    divided = elementwise(np.true_divide, (total, max(n - ddof, 0)), {})
    return _finish(divided if divided.dtype == kind else astype(divided, kind), out)


def _abs_squared(x: DTensor) -> DTensor:
    spec = x.spec.complete()
    kind = np.empty(0, x.dtype).real.dtype
    (result,) = run_local(
        "abs2", lambda b: b.real * b.real + b.imag * b.imag, [x], [spec], (spec.replace(dtype=kind),)
    )
    return result


@implements(np.std)
def std(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = NO_VALUE, *,
    where: Any = NO_VALUE, mean: Any = NO_VALUE, correction: Any = NO_VALUE,
) -> Any:  # fmt: skip
    """Return the standard deviation."""
    found = var(a, axis, dtype, None, ddof, keepdims, where=where, mean=mean, correction=correction)
    return _finish(elementwise(np.sqrt, (found,), {}), out)


@implements(np.ptp)
def ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = NO_VALUE) -> Any:
    """Return the range of the values."""
    kept = keepdims is not NO_VALUE and bool(keepdims)
    high, low = reduce(np.maximum, a, axis, keepdims=kept), reduce(np.minimum, a, axis, keepdims=kept)
    return _finish(elementwise(np.subtract, (high, low), {}), out)


@implements(np.average)
def average(
    a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = NO_VALUE
) -> Any:
    """Return the weighted average."""
    kept = keepdims is not NO_VALUE and bool(keepdims)
    if weights is None:
        found = mean(a, axis, keepdims=kept)
        scale = elementwise(np.add, (elementwise(np.multiply, (found, 0), {}), float(count_of(a, axis))), {})
        return (found, scale) if returned else found
    check_operand(weights, "np.average")
    grid_among([x for x in (a, weights) if isinstance(x, DTensor)], "np.average")
    if weights.shape != a.shape:
        if axis is None or isinstance(axis, tuple) or weights.ndim != 1:
            raise TypeError("Axis must be specified when shapes of a and weights differ.")
        (dim,) = normalized_axes(axis, a.ndim)
        if weights.shape[0] != a.shape[dim]:
            raise ValueError("Shape of weights must be consistent with shape of a along specified axis.")
        weights = reshape(weights, tuple(weights.shape[0] if d == dim else 1 for d in range(a.ndim)))
    kind = np.result_type(a.dtype, weights.dtype, np.float64 if a.dtype.kind in "iub" else a.dtype)
    product = elementwise(np.multiply, (a, weights), {"dtype": kind})
    spread = (
        product
        if weights.shape == a.shape
        else elementwise(np.add, (elementwise(np.multiply, (a, 0), {"dtype": kind}), weights), {})
    )
    scale = reduce(np.add, weights if weights.shape == a.shape else spread, axis, kind, None, kept)
    found = elementwise(np.true_divide, (reduce(np.add, product, axis, kind, None, kept), scale), {})
    return (found, scale) if returned else found


@implements(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """Return how many elements are not zero."""
    return reduce(np.add, elementwise(np.not_equal, (a, 0), {}), axis, np.intp, None, keepdims)


# Variants that skip NaN -------------------------------------------------------------------------------------


def _replaced(a: DTensor, value: float) -> DTensor:
    if a.dtype.kind not in "fc":
        return a
    spec = a.spec.complete()
    (result,) = run_local(
        "nan", lambda block: np.where(np.isnan(block), a.dtype.type(value), block), [a], [spec], (spec,)
    )
    return result


def _nan_reduction(ufunc: np.ufunc, value: float) -> Callable[..., Any]:
    def function(
        a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = NO_VALUE,
        initial: Any = NO_VALUE, where: Any = NO_VALUE,
    ) -> Any:  # fmt: skip
        kept = keepdims is not NO_VALUE and bool(keepdims)
        mask = True if where is NO_VALUE else where
        return reduce(ufunc, _replaced(a, value), axis, dtype, out, kept, initial, mask)

    return function


implements(np.nansum)(_nan_reduction(np.add, 0.0))
implements(np.nanprod)(_nan_reduction(np.multiply, 1.0))


def _nan_extreme(ufunc: np.ufunc) -> Callable[..., Any]:
    def function(
        a: Any,
        axis: Any = None,
        out: Any = None,
        keepdims: Any = NO_VALUE,
        initial: Any = NO_VALUE,
        where: Any = NO_VALUE,
    ) -> Any:
        kept = keepdims is not NO_VALUE and bool(keepdims)
        return reduce(ufunc, a, axis, None, out, kept, initial, True if where is NO_VALUE else where)

    return function


implements(np.nanmax)(_nan_extreme(np.fmax))
implements(np.nanmin)(_nan_extreme(np.fmin))


def _present(a: DTensor, axis: Any, keepdims: bool) -> Any:
    if a.dtype.kind not in "fc":
        return count_of(a, axis)
    return reduce(np.add, elementwise(np.equal, (a, a), {}), axis, np.intp, None, keepdims)


@implements(np.nanmean)
def nanmean(
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = NO_VALUE,
    *,
    where: Any = NO_VALUE,
) -> Any:
    """Return the mean of the elements that are not NaN."""
    if where is not NO_VALUE:
        raise UnshardableError("where= of np.nanmean is not built: select the elements with x[mask] first")
    kept = keepdims is not NO_VALUE and bool(keepdims)
    kind = np.mean(np.ones(1, a.dtype), dtype=dtype).dtype
    total = reduce(np.add, _replaced(a, 0.0), axis, kind, None, kept)
    return _finish(astype(elementwise(np.true_divide, (total, _present(a, axis, kept)), {}), kind), out)


@implements(np.nanvar)
def nanvar(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = NO_VALUE, *,
    where: Any = NO_VALUE, mean: Any = NO_VALUE, correction: Any = NO_VALUE,
) -> Any:  # fmt: skip
    """Return the variance of the elements that are not NaN."""
    if where is not NO_VALUE:
        raise UnshardableError("where= of np.nanvar is not built: select the elements with x[mask] first")
    ddof = ddof if correction is NO_VALUE else correction
    kept = keepdims is not NO_VALUE and bool(keepdims)
    kind = np.var(np.ones(2, a.dtype), dtype=dtype).dtype
    center = nanmean(a, axis, dtype, keepdims=True) if mean is NO_VALUE else mean
    difference = _replaced(elementwise(np.subtract, (a, center), {}), 0.0)
    square = (
        _abs_squared(difference)
        if difference.dtype.kind == "c"
        else elementwise(np.square, (difference,), {})
    )
    total = reduce(np.add, square, axis, None, None, kept)
    n = _present(a, axis, kept)
    divided = elementwise(
        np.true_divide,
        (total, elementwise(np.subtract, (n, ddof), {}) if isinstance(n, DTensor) else n - ddof),
        {},
    )
    return _finish(astype(divided, kind), out)


@implements(np.nanstd)
def nanstd(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = NO_VALUE, *,
    where: Any = NO_VALUE, mean: Any = NO_VALUE, correction: Any = NO_VALUE,
) -> Any:  # fmt: skip
    """Return the standard deviation of the elements that are not NaN."""
    found = nanvar(a, axis, dtype, None, ddof, keepdims, where=where, mean=mean, correction=correction)
    return _finish(elementwise(np.sqrt, (found,), {}), out)


# Accumulations ----------------------------------------------------------------------------------------------


def _flat(a: DTensor, axis: Any) -> tuple[DTensor, int]:
    return (reshape(a, (a.size,)), 0) if axis is None else (a, axis)


@implements(np.cumsum)
def cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the sums up to each element."""
    x, dim = _flat(a, axis)
    return accumulate(
        np.add, x, dim, np.add.reduce(np.ones(1, a.dtype)).dtype if dtype is None else dtype, out
    )


@implements(np.cumprod)
def cumprod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the products up to each element."""
    x, dim = _flat(a, axis)
    kind = np.multiply.reduce(np.ones(1, a.dtype)).dtype if dtype is None else dtype
    return accumulate(np.multiply, x, dim, kind, out)


@implements(np.nancumsum)
def nancumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the sums up to each element, NaN counting as 0."""
    return cumsum(_replaced(a, 0.0), axis, dtype, out)


@implements(np.nancumprod)
def nancumprod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    """Return the products up to each element, NaN counting as 1."""
    return cumprod(_replaced(a, 1.0), axis, dtype, out)


def _cumulative(base: Callable[..., Any], identity: int) -> Callable[..., Any]:
    def function(
        x: Any, /, *, axis: Any = None, dtype: Any = None, out: Any = None, include_initial: bool = False
    ) -> Any:
        if axis is None and x.ndim > 1:
            raise ValueError("For arrays which have more than one dimension ``axis`` argument is required.")
        found = base(x, 0 if axis is None else axis, dtype, None if include_initial else out)
        if not include_initial:
            return found
        (dim,) = normalized_axes(0 if axis is None else axis, x.ndim)
        shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        first = spec_of(found.spec.grid, shape, found.dtype, found.spec.axes)
        made = from_blocks_of(first, lambda local: np.full(local, identity, first.dtype))
        return _finish(np.concatenate([made, found], dim), out)

    return function


implements(getattr(np, "cumulative_sum", None))(_cumulative(cumsum, 0))
implements(getattr(np, "cumulative_prod", None))(_cumulative(cumprod, 1))


# Places of extremes -----------------------------------------------------------------------------------------


def _arg_extreme(find: Any, name: str) -> Callable[..., Any]:
    def function(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = NO_VALUE) -> Any:
        kept = keepdims is not NO_VALUE and bool(keepdims)
        x, dim = _flat(a, axis)
        result = _places(find, x, normalized_axes(dim, x.ndim)[0], name)
        if axis is None:
            shape = (1,) * a.ndim if kept else ()
        else:
            (at,) = normalized_axes(axis, a.ndim)
            shape = tuple(1 if d == at else n for d, n in enumerate(a.shape) if kept or d != at)
        return _finish(reshape(result, shape), out)

    function.__name__ = name
    return function


def _places(find: Any, x: DTensor, dim: int, name: str) -> DTensor:
    """Return where the first extreme lies along a dimension: each block's own, then the best of these."""
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
    # One candidate from each block: its value, and its index in the whole dimension.
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
        return find(_replaced(a, value), axis, out, keepdims=keepdims)

    return function


implements(np.nanargmax)(_nan_arg(_arg_extreme(np.argmax, "nanargmax"), -np.inf))
implements(np.nanargmin)(_nan_arg(_arg_extreme(np.argmin, "nanargmin"), np.inf))
