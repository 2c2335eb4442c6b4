"""Shapes and dtypes, lookups in tables that every device gets, and covariance matrices."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from dmesh.arrays.dispatch.reduction import normalized_axes
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.indexing import read_whole
from dmesh.arrays.ops.selection import local_elementwise, typed, where_
from dmesh.errors import UnshardableError


def _like(x: Any) -> Any:
    """Return an empty array of the same dtype, for functions that use only the dtype."""
    return np.empty(0, x.dtype) if isinstance(x, DTensor) else x


@implements(np.shape, note="local")
def shape(a: Any) -> tuple[int, ...]:
    """Return the shape."""
    return tuple(a.shape)


@implements(np.ndim, note="local")
def ndim(a: Any) -> int:
    """Return the number of dimensions."""
    return int(a.ndim)


@implements(np.size, note="local")
def size(a: Any, axis: Any = None) -> int:
    """Return the number of elements, or the length of a dimension."""
    return int(a.size if axis is None else a.shape[axis])


@implements(np.result_type, note="local")
def result_type(*args: Any) -> Any:
    """Return the dtype of an operation's result."""
    return np.result_type(*map(_like, args))


@implements(np.common_type, note="local")
def common_type(*arrays: Any) -> Any:
    """Return the common inexact dtype of arrays."""
    return np.common_type(*map(_like, arrays))


@implements(np.min_scalar_type, note="local")
def min_scalar_type(a: Any, /) -> Any:
    """Return the dtype."""
    return np.min_scalar_type(_like(a))


@implements(np.can_cast, note="local")
def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    """Return whether the dtype can be cast."""
    return np.can_cast(from_.dtype if isinstance(from_, DTensor) else from_, to, casting)


@implements(getattr(np, "astype", None), note="local")
def astype_(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    """Return an array with another dtype."""
    del copy, device
    return astype(x, np.dtype(dtype))


@implements(np.digitize, note="local")
def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    """Return the bins of values; every device gets all bin edges."""
    edges = np.asarray(read_whole(bins))
    if not isinstance(x, DTensor):
        return np.digitize(x, edges, right)
    np.digitize(np.empty(0), edges, right)  # raises ValueError for unsorted edges
    return local_elementwise("digitize", lambda b: np.asarray(np.digitize(b, edges, right)), [x], np.intp)


@implements(np.interp, note="local")
def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
    """Return values of a piecewise linear function; every device gets all of its points."""
    points, values = np.asarray(read_whole(xp)), np.asarray(read_whole(fp))
    if not isinstance(x, DTensor):
        return np.interp(x, points, values, left, right, period)
    dtype = np.interp(np.zeros(1), points, values).dtype
    return local_elementwise(
        "interp", lambda b: np.asarray(np.interp(b, points, values, left, right, period)), [x], dtype
    )


@implements(np.select)
def select(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    """Return elements of the array with the first true condition."""
    if len(condlist) != len(choicelist):
        raise ValueError("list of cases must be same length as list of conditions")
    if not condlist:
        raise ValueError("select with an empty condition list is not possible")
    if any(np.asarray(_like(one)).dtype != np.bool_ for one in condlist):
        raise TypeError("invalid entry in condlist: should be boolean ndarray")
    kind = np.result_type(*typed([*choicelist, default]))
    result = default if isinstance(default, DTensor) else np.asarray(default).astype(kind)
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        result = where_(condition, choice, result)
        result = result if result.dtype == kind else astype(result, kind)
    return result


@implements(np.cov)
def cov(
    m: Any, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: Any = None, fweights: Any = None,
    aweights: Any = None, *, dtype: Any = None,
) -> Any:  # fmt: skip
    """Return the covariance matrix of variables."""
    if y is not None or fweights is not None or aweights is not None or m.ndim not in (1, 2):
        raise UnshardableError("np.cov of sharded arrays takes one matrix or sequence, and no weights")
    kind = np.result_type(m.dtype, np.float64) if dtype is None else np.dtype(dtype)
    rows = astype(m[None] if m.ndim == 1 else m if rowvar else m.T, np.dtype(kind))
    n = rows.shape[1]
    left = n - (ddof if ddof is not None else 0 if bias else 1)
    if left <= 0:
        warnings.warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=2)
        left = 0
    mean: Any = np.mean
    centered = rows - mean(rows, axis=1, keepdims=True)
    product = centered @ (np.conjugate(centered.T) if kind.kind == "c" else centered.T)
    squeeze: Any = np.squeeze
    return squeeze(product * np.true_divide(1, left))


@implements(np.corrcoef)
def corrcoef(x: Any, y: Any = None, rowvar: bool = True, *, dtype: Any = None) -> Any:
    """Return the correlation coefficients of variables."""
    c = cov(x, y, rowvar, dtype=dtype)
    if not c.ndim:
        return c / c
    diagonal: Any = np.diagonal
    deviation = np.sqrt(diagonal(c).real)
    return c / deviation[:, None] / deviation[None, :]


@implements(getattr(np.linalg, "vecdot", None))
def linalg_vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Return the sums of products along a dimension, the first array conjugated."""
    vecdot: Any = np.vecdot
    return vecdot(x1, x2, axis=axis)


@implements(getattr(np.linalg, "matrix_transpose", None))
def linalg_matrix_transpose(x: Any, /) -> Any:
    """Return an array with its last two dimensions exchanged; nothing moves."""
    return x.mT


@implements(getattr(np.linalg, "vector_norm", None))
def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    """Return the norms of vectors."""
    norm: Any = np.linalg.norm
    if axis is None:
        found = norm(x.reshape(x.size), ord, 0)
        return found.reshape((1,) * x.ndim) if keepdims else found
    if not isinstance(axis, tuple):
        return norm(x, ord, axis, keepdims)
    dims = normalized_axes(axis, x.ndim)
    rest = [d for d in range(x.ndim) if d not in dims]
    flat = x.transpose(*rest, *dims).reshape(
        (*(x.shape[d] for d in rest), math.prod(x.shape[d] for d in dims))
    )
    found = norm(flat, ord, -1)
    return found.reshape([1 if d in dims else n for d, n in enumerate(x.shape)]) if keepdims else found


@implements(getattr(np.linalg, "matrix_norm", None))
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """Return the norms of matrices."""
    norm: Any = np.linalg.norm
    return norm(x, ord, (x.ndim - 2, x.ndim - 1), keepdims)
