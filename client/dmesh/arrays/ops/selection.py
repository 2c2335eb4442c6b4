"""Selection of elements (where, take, clip, masks), and comparisons of whole arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dmesh.arrays.dispatch.operands import (
    PYTHON_SCALARS,
    aligned,
    bring,
    check_operand,
    choose_axes,
    grid_among,
)
from dmesh.arrays.dispatch.reduction import NO_VALUE, normalized_axes, reduce
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.threads import each
from dmesh.arrays.dispatch.ufunc import astype, elementwise, run_local, store
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.indexing import compress, counted, read_whole
from dmesh.arrays.ops import mappings
from dmesh.arrays.spec import spec_of
from dmesh.errors import UnshardableError

_f: Any  # loop variable of the registrations below


def local_elementwise(name: str, kernel: Any, inputs: Sequence[Any], dtype: Any) -> DTensor:
    """Call an elementwise kernel on operands that are broadcast together."""
    for x in inputs:
        check_operand(x, name)
    arrays = [x for x in inputs if isinstance(x, DTensor)]
    grid = grid_among(arrays, name)
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    axes = choose_axes(tuple(x.spec for x in arrays), shape)
    placed = [
        x.spec.complete().replace(axes=aligned(x.shape, shape, axes)) if isinstance(x, DTensor) else None
        for x in inputs
    ]
    (result,) = run_local(name, kernel, inputs, placed, (spec_of(grid, shape, np.dtype(dtype), axes),))
    return result


def typed(values: Sequence[Any]) -> list[Any]:
    """Return what `np.result_type` takes for operands: dtypes, and Python numbers as they are."""
    return [
        x.dtype if isinstance(x, DTensor) else x if type(x) in PYTHON_SCALARS else np.asarray(x).dtype
        for x in values
    ]


def where_(condition: Any, x: Any, y: Any) -> DTensor:
    """Return elements of one array where a condition is true, of another one elsewhere."""
    return local_elementwise("where", np.where, [condition, x, y], np.result_type(*typed([x, y])))


@implements(np.where)
def where(condition: Any, x: Any = None, y: Any = None, /) -> Any:
    """Return elements by a condition; with the condition alone, the indices where it is true."""
    if x is None and y is None:
        return nonzero(condition)
    if x is None or y is None:
        raise ValueError("either both or neither of x and y should be given")
    return where_(condition, x, y)


@implements(np.clip)
def clip(
    a: Any,
    a_min: Any = None,
    a_max: Any = None,
    out: Any = None,
    *,
    min: Any = None,
    max: Any = None,
    **kwargs: Any,
) -> Any:
    """Return values limited to an interval."""
    if a_min is NO_VALUE:
        a_min = None
    if a_max is NO_VALUE:
        a_max = None
    low, high = (min if a_min is None else a_min), (max if a_max is None else a_max)
    low = None if low is NO_VALUE else low
    high = None if high is NO_VALUE else high
    if a.dtype.kind in "iu":  # as NumPy does, numbers beyond the dtype limit nothing
        low = None if type(low) is int and low <= np.iinfo(a.dtype).min else low
        high = None if type(high) is int and high >= np.iinfo(a.dtype).max else high
    if low is None and high is None:
        return elementwise(np.positive, (a,), {"out": None if out is None else (out,)})
    options = {"out": None if out is None else (out,), **kwargs}
    if high is None:
        return elementwise(np.maximum, (a, low), options)
    if low is None:
        return elementwise(np.minimum, (a, high), options)
    if "dtype" not in kwargs:  # that of all three
        ones = [np.ones((), x.dtype) if isinstance(x, DTensor) else x for x in (a, low, high)]
        kind = np.clip(*ones).dtype
        options["dtype"] = kwargs["dtype"] = None if kind.kind in "mM" else kind
    return elementwise(np.minimum, (elementwise(np.maximum, (a, low), kwargs), high), options)


@implements(np.round, np.around)
def round_(a: Any, decimals: int = 0, out: Any = None) -> Any:
    """Return values rounded to some decimals."""
    dtype = np.round(np.ones(1, a.dtype), decimals).dtype
    result = local_elementwise("round", lambda b: np.round(b, decimals), [a], dtype)
    return result if out is None else store(result, out, "same_kind")


def _simple(function: Any, *names: str) -> Any:
    """Return a handler of an elementwise function of one array."""

    def handler(a: Any, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        for value in (*args, *kwargs.values()):
            if isinstance(value, DTensor) or (isinstance(value, np.ndarray) and value.ndim):
                raise UnshardableError(
                    f"np.{function.__name__} of a sharded array takes only numbers as its other arguments"
                )
        dtype = np.asarray(function(np.ones(1, a.dtype), *args, **kwargs)).dtype
        result = local_elementwise(
            function.__name__, lambda b: np.asarray(function(b, *args, **kwargs)), [a], dtype
        )
        return result if out is None else store(result, out, "same_kind")

    return handler


for _f in (
    np.real,
    np.imag,
    np.angle,
    np.nan_to_num,
    np.sinc,
    np.i0,
    np.fix,
    np.isneginf,
    np.isposinf,
    np.iscomplex,
    np.isreal,
):
    implements(_f, note="local")(_simple(_f))


@implements(np.real_if_close, note="local")
def real_if_close(a: Any, tol: float = 100) -> Any:
    """Return the array unchanged, because whether it is nearly real depends on its elements."""
    if a.dtype.kind != "c":
        return a
    raise UnshardableError("np.real_if_close has a dtype that depends on the elements: use np.real")


@implements(np.iscomplexobj, note="local")
def iscomplexobj(x: Any) -> bool:
    """Return whether the dtype is complex."""
    return bool(x.dtype.kind == "c")


@implements(np.isrealobj, note="local")
def isrealobj(x: Any) -> bool:
    """Return whether the dtype is not complex."""
    return bool(x.dtype.kind != "c")


@implements(np.isclose)
def isclose(a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> Any:
    """Return whether elements are close."""
    return local_elementwise(
        "isclose", lambda x, y: np.asarray(np.isclose(x, y, rtol, atol, equal_nan)), [a, b], bool
    )


def _truth(x: DTensor) -> bool:
    return bool(reduce(np.logical_and, x, None))


@implements(np.allclose)
def allclose(a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> bool:
    """Return whether all elements are close; the same value on every client."""
    return _truth(isclose(a, b, rtol, atol, equal_nan))


@implements(np.array_equal)
def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """Return whether two arrays have the same shape and elements; the same value on every client."""
    for x in (a1, a2):
        check_operand(x, "np.array_equal")
    if getattr(a1, "shape", ()) != getattr(a2, "shape", ()):
        return False
    same = elementwise(np.equal, (a1, a2), {})
    if equal_nan:
        same = elementwise(
            np.logical_or,
            (
                same,
                elementwise(
                    np.logical_and, (elementwise(np.isnan, (a1,), {}), elementwise(np.isnan, (a2,), {})), {}
                ),
            ),
            {},
        )
    return _truth(same)


@implements(np.array_equiv)
def array_equiv(a1: Any, a2: Any) -> bool:
    """Return whether two arrays are equal after broadcasting."""
    try:
        np.broadcast_shapes(a1.shape, a2.shape)
    except ValueError:
        return False
    return _truth(elementwise(np.equal, (a1, a2), {}))


# Lists of elements ------------------------------------------------------------------------------------------


@implements(np.take)
def take(a: Any, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise") -> Any:
    """Return the elements at a list of indices of a dimension; every client reads all indices."""
    if not isinstance(a, DTensor):
        raise UnshardableError(
            "np.take cannot take from a plain array by sharded indices. Call dmesh.copy_to_mesh on the array"
        )
    if not a.ndim and axis in (0, -1):
        axis = None
    x, dim = (mappings.reshape(a, (a.size,)), 0) if axis is None else (a, normalized_axes(axis, a.ndim)[0])
    values = np.asarray(read_whole(indices))
    if values.dtype.kind not in "iu" and values.size:
        raise TypeError(
            f"Cannot cast array data from {values.dtype!r} to dtype('int64') according to the rule 'safe'"
        )
    n = x.shape[dim]
    if values.size and not n:
        raise IndexError("cannot do a non-empty take from an empty axes.")
    flat = values.reshape(-1).astype(np.intp)
    if mode == "raise":
        if flat.size and (flat.min() < -n or flat.max() >= n):
            raise IndexError(
                f"index {flat.max() if flat.max() >= n else flat.min()} is out of bounds for axis {dim} "
                f"with size {n}"
            )
        flat = np.where(flat < 0, flat + n, flat)
    else:
        flat = flat % n if mode == "wrap" else np.clip(flat, 0, n - 1)
    taken = mappings.take_along(x, flat, dim)
    result = mappings.reshape(taken, (*x.shape[:dim], *values.shape, *x.shape[dim + 1 :]))
    return result if out is None else store(result, out, "same_kind")


@implements(np.compress)
def compress_(condition: Any, a: Any, axis: Any = None, out: Any = None) -> Any:
    """Return the elements of a dimension where a condition is true; every client reads all of it."""
    chosen = np.flatnonzero(np.asarray(read_whole(condition)))
    return take(a, chosen, axis, out)


@implements(np.extract)
def extract(condition: Any, arr: Any) -> Any:
    """Return the elements where a condition is true."""
    if isinstance(condition, DTensor) and isinstance(arr, DTensor) and condition.shape == arr.shape:
        return compress(arr, condition if condition.dtype == np.bool_ else astype(condition, np.dtype(bool)))
    return take(arr, np.flatnonzero(np.asarray(read_whole(condition))))


@implements(np.flatnonzero)
def flatnonzero(a: Any) -> Any:
    """Return the indices of the nonzero elements in the flattened array."""
    flat = mappings.reshape(a, (a.size,))
    flat = bring(flat, flat.spec.complete(), "np.flatnonzero")
    rows = [(block, start) for ((start, _),), block in zip(flat.spec.regions, flat.blocks, strict=True)]
    found = each(lambda b, start: np.flatnonzero(b) + start, rows, flat.spec.grid, flat.spec.largest)
    return counted(flat, found)


@implements(np.nonzero)
def nonzero(a: Any) -> Any:
    """Return the indices of the nonzero elements, one array for each dimension."""
    if not a.ndim:
        raise ValueError(
            "Calling nonzero on 0d arrays is not allowed. Use np.atleast_1d(scalar).nonzero() instead."
        )
    flat = flatnonzero(a)
    results = []
    for dim, n in enumerate(a.shape):
        stride = math.prod(a.shape[dim + 1 :])
        results.append(
            elementwise(
                np.remainder, (elementwise(np.floor_divide, (flat, max(stride, 1)), {}), max(n, 1)), {}
            )
        )
    return tuple(results)


@implements(np.argwhere)
def argwhere(a: Any) -> Any:
    """Return the indices of the nonzero elements, one row for each element."""
    return np.stack(nonzero(np.atleast_1d(a)), axis=1)[:, : a.ndim]
