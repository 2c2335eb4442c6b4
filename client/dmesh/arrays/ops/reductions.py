"""Reductions: NumPy's functions over `ufunc.reduce`, the variants that skip NaN, and statistics.

A sum over a sharded dimension stays a partial sum, with one contribution on each device, until an operation
needs its value.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from dmesh.arrays.dispatch.operands import check_operand, grid_among
from dmesh.arrays.dispatch.reduction import NO_VALUE, normalized_axes, reduce
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype, elementwise, run_local, store
from dmesh.arrays.dtensor import DTensor, move
from dmesh.arrays.ops.mappings import reshape
from dmesh.arrays.ops.selection import where_
from dmesh.errors import UnshardableError


def _reduction(ufunc: np.ufunc, nan: float | None = None) -> Callable[..., Any]:
    """Return the handler of a reduction; with `nan`, this number replaces each NaN."""

    def function(
        a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = NO_VALUE,
        initial: Any = NO_VALUE, where: Any = NO_VALUE,
    ) -> Any:  # fmt: skip
        x = a if nan is None else replaced(a, nan)
        return reduce(ufunc, x, axis, dtype, out, keepdims, initial, where)

    return function


def _extreme(ufunc: np.ufunc) -> Callable[..., Any]:
    def function(
        a: Any,
        axis: Any = None,
        out: Any = None,
        keepdims: Any = NO_VALUE,
        initial: Any = NO_VALUE,
        where: Any = NO_VALUE,
    ) -> Any:
        return reduce(ufunc, a, axis, None, out, keepdims, initial, where)

    return function


def _logical(ufunc: np.ufunc) -> Callable[..., Any]:
    def function(
        a: Any, axis: Any = None, out: Any = None, keepdims: Any = NO_VALUE, *, where: Any = NO_VALUE
    ) -> Any:
        return reduce(ufunc, a, axis, None, out, keepdims, NO_VALUE, where)

    return function


implements(np.sum)(_reduction(np.add))
implements(np.prod)(_reduction(np.multiply))
implements(np.nansum)(_reduction(np.add, 0.0))
implements(np.nanprod)(_reduction(np.multiply, 1.0))
implements(np.max, np.amax)(_extreme(np.maximum))
implements(np.min, np.amin)(_extreme(np.minimum))
implements(np.nanmax)(_extreme(np.fmax))
implements(np.nanmin)(_extreme(np.fmin))
implements(np.any)(_logical(np.logical_or))
implements(np.all)(_logical(np.logical_and))


def count_of(x: DTensor, axis: Any) -> int:
    """Return the number of elements that go into each result of a reduction."""
    return math.prod(x.shape[dim] for dim in normalized_axes(axis, x.ndim))


def finish(result: Any, out: Any) -> Any:
    """Return a result, written to `out=` if given."""
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
    total = reduce(np.add, a, axis, working, None, keepdims, NO_VALUE, where)
    everywhere = where is NO_VALUE or where is True
    n: Any = count_of(a, axis) if everywhere else _counted(where, a, axis, keepdims)
    if everywhere and not n:
        warnings.warn("Mean of empty slice.", RuntimeWarning, stacklevel=2)
    divided = elementwise(np.true_divide, (total, n), {})
    return finish(divided if divided.dtype == kind else astype(divided, kind), out)


def _counted(mask: Any, x: DTensor, axis: Any, keepdims: Any) -> Any:
    ones = elementwise(np.logical_and, (mask, elementwise(np.equal, (astype(x, np.dtype(bool)), 0), {})), {})
    both = elementwise(
        np.logical_or, (ones, elementwise(np.logical_and, (mask, astype(x, np.dtype(bool))), {})), {}
    )
    return reduce(np.add, both, axis, np.intp, None, keepdims)


@implements(np.var)
def var(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = NO_VALUE, *,
    where: Any = NO_VALUE, mean: Any = NO_VALUE, correction: Any = NO_VALUE,
) -> Any:  # fmt: skip
    """Return the variance, in two passes like NumPy."""
    if where is not NO_VALUE:
        raise UnshardableError(
            "where= of np.var and np.std is not implemented. Select the elements with x[mask] first"
        )
    if correction is not NO_VALUE:
        ddof = correction
    if dtype is not None and np.dtype(dtype).kind not in ("c" if a.dtype.kind == "c" else "fc"):
        raise UnshardableError(
            f"dtype={np.dtype(dtype)} of np.var and np.std is refused for sharded arrays of {a.dtype}: "
            "rounding the mean to it would count as deviation. Use x.astype"
        )
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
    total = reduce(np.add, square, axis, None, None, keepdims)
    if n - ddof <= 0:
        warnings.warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=2)
    divided = elementwise(np.true_divide, (total, max(n - ddof, 0)), {})
    return finish(divided if divided.dtype == kind else astype(divided, kind), out)


def _abs_squared(x: DTensor) -> DTensor:
    spec = x.spec.complete()
    kind = np.empty(0, x.dtype).real.dtype
    (result,) = run_local(
        "abs2", lambda b: b.real * b.real + b.imag * b.imag, [x], [spec], (spec.replace(dtype=kind),)
    )
    return result


def _root(x: DTensor, out: Any) -> Any:
    kind = x.dtype if out is None else out.dtype  # NumPy takes the root in out=
    result = elementwise(np.sqrt, (x if kind.kind == "f" else astype(x, kind),), {})
    return result if out is None else store(result, out, "same_kind")


@implements(np.std)
def std(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = NO_VALUE, *,
    where: Any = NO_VALUE, mean: Any = NO_VALUE, correction: Any = NO_VALUE,
) -> Any:  # fmt: skip
    """Return the standard deviation."""
    found = var(a, axis, dtype, None, ddof, keepdims, where=where, mean=mean, correction=correction)
    return _root(found, out)


@implements(np.ptp)
def ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = NO_VALUE) -> Any:
    """Return the range of the values."""
    high, low = (reduce(ufunc, a, axis, keepdims=keepdims) for ufunc in (np.maximum, np.minimum))
    result = elementwise(np.subtract, (high, low), {})
    return result if out is None else store(result, out, "same_kind")


@implements(np.average)
def average(
    a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = NO_VALUE
) -> Any:
    """Return the weighted average."""
    if weights is None:
        found = mean(a, axis, keepdims=keepdims)
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
    scale = reduce(np.add, weights if weights.shape == a.shape else spread, axis, kind, None, keepdims)
    _refuse_zeros(scale)
    found = elementwise(np.true_divide, (reduce(np.add, product, axis, kind, None, keepdims), scale), {})
    return (found, scale) if returned else found


def _refuse_zeros(scale: DTensor) -> None:
    zero = reduce(np.logical_or, elementwise(np.equal, (scale, 0), {}), None)
    found = move(zero, zero.spec.replicated())
    if found._shards is not None and found.item():
        raise ZeroDivisionError("Weights sum to zero, can't be normalized")


@implements(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """Return the number of nonzero elements."""
    return reduce(np.add, elementwise(np.not_equal, (a, 0), {}), axis, np.intp, None, keepdims)


# Variants that skip NaN -------------------------------------------------------------------------------------


def replaced(a: DTensor, value: float) -> DTensor:
    """Return an array with each NaN replaced by a number."""
    if a.dtype.kind not in "fc":
        return a
    spec = a.spec.complete()
    (result,) = run_local(
        "nan", lambda block: np.where(np.isnan(block), a.dtype.type(value), block), [a], [spec], (spec,)
    )
    return result


def _check_inexact(dtype: Any, out: Any) -> None:
    for name, kind in (("dtype", dtype), ("out", getattr(out, "dtype", None))):
        if kind is not None and np.dtype(kind).kind not in "fc":
            raise TypeError(f"If a is inexact, then {name} must be inexact")


def _present(a: DTensor, axis: Any, keepdims: Any) -> Any:
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
    if a.dtype.kind not in "fc":
        return mean(a, axis, dtype, out, keepdims)
    _check_inexact(dtype, out)
    kind = np.mean(np.ones(1, a.dtype), dtype=dtype).dtype
    total = reduce(np.add, replaced(a, 0.0), axis, kind, None, keepdims)
    return finish(astype(elementwise(np.true_divide, (total, _present(a, axis, keepdims)), {}), kind), out)


@implements(np.nanvar)
def nanvar(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = NO_VALUE, *,
    where: Any = NO_VALUE, mean: Any = NO_VALUE, correction: Any = NO_VALUE,
) -> Any:  # fmt: skip
    """Return the variance of the elements that are not NaN."""
    if where is not NO_VALUE:
        raise UnshardableError(
            "where= of np.nanvar is not implemented. Select the elements with x[mask] first"
        )
    ddof = ddof if correction is NO_VALUE else correction
    if a.dtype.kind not in "fc":
        return var(a, axis, dtype, out, ddof, keepdims, mean=mean)
    _check_inexact(dtype, out)
    kind = np.var(np.ones(2, a.dtype), dtype=dtype).dtype
    center = nanmean(a, axis, dtype, keepdims=True) if mean is NO_VALUE else mean
    difference = elementwise(np.subtract, (a, center), {})
    difference = where_(elementwise(np.isnan, (a,), {}), 0, difference)  # infinities leave NaN that count
    square = (
        _abs_squared(difference)
        if difference.dtype.kind == "c"
        else elementwise(np.square, (difference,), {})
    )
    total = reduce(np.add, square, axis, None, None, keepdims)
    left = elementwise(np.subtract, (_present(a, axis, keepdims), ddof), {})
    divided = elementwise(np.true_divide, (total, left), {})
    divided = where_(elementwise(np.less_equal, (left, 0), {}), np.nan, divided)
    return finish(astype(divided, kind), out)


@implements(np.nanstd)
def nanstd(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = NO_VALUE, *,
    where: Any = NO_VALUE, mean: Any = NO_VALUE, correction: Any = NO_VALUE,
) -> Any:  # fmt: skip
    """Return the standard deviation of the elements that are not NaN."""
    if a.dtype.kind in "fc":
        _check_inexact(dtype, out)
    found = nanvar(a, axis, dtype, None, ddof, keepdims, where=where, mean=mean, correction=correction)
    return _root(found, out)
