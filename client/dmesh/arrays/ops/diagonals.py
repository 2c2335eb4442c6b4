"""Diagonals and triangles of matrices, and matrices made of vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmesh.arrays.dispatch.operands import bring, free_axes
from dmesh.arrays.dispatch.reduction import normalized_axes, reduce
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import run_local
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ops import mappings
from dmesh.arrays.policy import is_larger
from dmesh.arrays.spec import WHOLE, spec_of


def diagonal_of(x: DTensor, i: int, j: int, offset: int = 0) -> DTensor:
    """Return a diagonal of two dimensions, as the last dimension.

    Both dimensions become unsharded; if that would gather the array, single elements are moved instead.
    """
    spec = free_axes(x.spec, [i, j])
    rows, columns = spec.shape[i], spec.shape[j]
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    rest = [d for d in range(spec.ndim) if d not in (i, j)]
    if is_larger(x.spec, spec):
        ordered = mappings.moved_dims(bring(x, x.spec.complete(), "diagonal"), [i, j, *rest])
        flat = mappings.reshape(ordered, (rows * columns, *(spec.shape[d] for d in rest)))
        first = offset if offset >= 0 else -offset * columns
        taken = mappings.take_along(flat, first + (columns + 1) * np.arange(count), 0)
        return mappings.moved_dims(taken, [*range(1, taken.ndim), 0])
    target = spec_of(
        spec.grid, (*(spec.shape[d] for d in rest), count), spec.dtype, [*(spec.axes[d] for d in rest), WHOLE]
    )
    (result,) = run_local("diagonal", lambda b: np.diagonal(b, offset, i, j).copy(), [x], [spec], (target,))
    return result


@implements(np.diagonal)
def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Return a diagonal of two dimensions."""
    (i,), (j,) = normalized_axes(axis1, a.ndim), normalized_axes(axis2, a.ndim)
    if i == j:
        raise ValueError("axis1 and axis2 cannot be the same")
    return diagonal_of(a, i, j, offset)


@implements(getattr(np.linalg, "diagonal", None))
def linalg_diagonal(x: Any, /, *, offset: int = 0) -> Any:
    """Return the diagonals of matrices."""
    return diagonal_of(x, x.ndim - 2, x.ndim - 1, offset)


@implements(np.trace)
def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> Any:
    """Return the sum of a diagonal."""
    return reduce(np.add, diagonal(a, offset, axis1, axis2), -1, dtype, out)


@implements(getattr(np.linalg, "trace", None))
def linalg_trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    """Return the sums of the diagonals of matrices."""
    return reduce(np.add, linalg_diagonal(x, offset=offset), -1, dtype)


def _triangle(lower: bool) -> Any:
    def function(m: Any, k: int = 0) -> Any:
        x: Any = m if m.ndim > 1 else np.broadcast_to(m, (m.shape[0], m.shape[0]))
        spec = x.spec.complete()
        there = bring(x, spec, "np.tril" if lower else "np.triu")
        if there._shards is None:
            return DTensor(spec, None)
        blocks = []
        for region, block in zip(spec.regions, there.blocks, strict=True):
            rows = np.arange(*region[-2])[:, None]
            columns = np.arange(*region[-1])
            keep = columns - rows <= k if lower else columns - rows >= k
            blocks.append(np.where(keep, block, np.zeros((), block.dtype)))
        return DTensor(spec, tuple(blocks))

    return function


tril = implements(np.tril)(_triangle(True))
implements(np.triu)(_triangle(False))


@implements(np.diag)
def diag(v: Any, k: int = 0) -> Any:
    """Return a diagonal of a matrix, or the matrix of a diagonal."""
    if v.ndim == 2:
        return np.diagonal(v, k)
    if v.ndim != 1:
        raise ValueError("Input must be 1- or 2-d.")
    n = v.shape[0] + abs(k)
    row: Any = np.pad(v, (max(k, 0), max(-k, 0)))
    whole: Any = np.broadcast_to(row, (n, n))
    target = whole.spec
    if whole._shards is None:
        return DTensor(target, None)
    blocks = []
    for region, block in zip(target.regions, whole.blocks, strict=True):
        on = np.arange(*region[1]) - np.arange(*region[0])[:, None] == k
        blocks.append(np.where(on, block, np.zeros((), block.dtype)))
    return DTensor(target, tuple(blocks))


@implements(np.diagflat)
def diagflat(v: Any, k: int = 0) -> Any:
    """Return the matrix of a diagonal."""
    return diag(mappings.reshape(v, (v.size,)), k)


@implements(np.vander)
def vander(x: Any, N: Any = None, increasing: bool = False) -> Any:
    """Return the powers of the elements, one row for each."""
    n = x.shape[0] if N is None else N
    dtype = np.vander(np.ones(1, x.dtype), n).dtype
    spec = x.spec.complete()
    target = spec_of(spec.grid, (x.shape[0], n), dtype, (spec.axes[0], WHOLE))
    (result,) = run_local("vander", lambda b: np.vander(b, n, increasing), [x], [spec], (target,))
    return result
