"""Cholesky and LU factorizations of a matrix that is cut, by panels of columns, without gathering it.

Each panel goes to the devices that need it, which factor it alike, and then work on their own blocks. A
device gets the panel's rows that its own block has as rows or columns; with pivots, all of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays.dispatch.operands import blocks_for, bring
from dmesh.arrays.dispatch.ufunc import astype, elementwise, run_local
from dmesh.arrays.dtensor import DTensor, exchange
from dmesh.arrays.ops.diagonals import tril
from dmesh.arrays.ops.mappings import reshape
from dmesh.arrays.spec import WHOLE, Spec, spec_of
from dmesh.arrays.transfer.mapping import Dim, Exchange, Run, Side, plan_exchange, side

Array = NDArray[Any]
_WIDTH = 128
"""Columns of a panel, at most."""


def _steps(spec: Spec) -> list[tuple[int, int]]:
    n = min(spec.shape)
    width = max(1, min(_WIDTH, -(-n // spec.shards)))
    return [(start, min(start + width, n)) for start in range(0, n, width)]


@lru_cache(maxsize=1024)
def _plan(source: Spec, target: Spec, rows: tuple[int, int], into: int, columns: tuple[int, int]) -> Exchange:
    first, count = rows[0], rows[1] - rows[0]
    dims = [
        Dim(count, side(source, 0, Run(first)), side(target, 0, Run(into))),
        Dim(columns[1] - columns[0], side(source, 1, Run(columns[0])), side(target, 1)),
    ]
    return plan_exchange(source, dims, target.used)


def _part(x: DTensor, column: int, rows: tuple[int, int], columns: tuple[int, int]) -> DTensor:
    """Return some rows of some columns: whole along the rows, and cut along the columns or not."""
    target = spec_of(x.spec.grid, (rows[1] - rows[0], columns[1] - columns[0]), x.dtype, (WHOLE, column))
    return exchange(x, _plan(x.spec, target, rows, 0, columns), target)


def _panel(x: DTensor, axis: int, rows: tuple[int, int], columns: tuple[int, int]) -> DTensor:
    """Return some columns, cut along their rows; rows other than the given ones are undefined."""
    target = spec_of(x.spec.grid, (x.shape[0], columns[1] - columns[0]), x.dtype, (axis, WHOLE))
    return exchange(x, _plan(x.spec, target, rows, rows[0], columns), target)


def _own(x: DTensor) -> DTensor:
    """Return a copy whose blocks may be written to."""
    spec = x.spec.complete()
    there = bring(x, spec, "linalg")
    if there._shards is None:
        return DTensor(spec, None)
    result = DTensor(spec, tuple(np.array(block) for block in there.blocks))
    result._owned = True
    return result


def _adjoint(x: Array) -> Array:
    return x.conj().T


# Cholesky ---------------------------------------------------------------------------------------------------


def cholesky(a: DTensor, upper: bool = False) -> Any:
    """Return the Cholesky factor of a matrix, in its layout; one triangle of it is read.

    Raises:
        LinAlgError: The matrix is not positive definite.
    """
    if upper:
        return elementwise(np.conjugate, (cholesky(elementwise(np.conjugate, (a,), {}).T).T,), {})
    kind = np.linalg.cholesky(np.eye(1, dtype=a.dtype)).dtype
    x = _own(a if a.dtype == kind else astype(a, kind))
    spec, n = x.spec, x.shape[0]
    for start, stop in _steps(spec):
        corner = _part(x, WHOLE, (start, stop), (start, stop))
        left = _panel(x, spec.axes[0], (stop, n), (start, stop))
        above = _panel(x, spec.axes[1], (stop, n), (start, stop))
        if x._shards is None:
            continue
        factor = np.linalg.cholesky(corner.blocks[0])
        for region, block, rows, columns in zip(
            spec.regions, x.writable(), blocks_for(spec, left), blocks_for(spec, above), strict=True
        ):
            _cholesky_step(block, region, (start, stop), factor, rows, columns)
    return tril(x)


def _cholesky_step(
    block: Array, region: Any, step: tuple[int, int], factor: Array, rows: Array, columns: Array
) -> None:
    (top, bottom), (first, last) = region
    start, stop = step
    a, b = max(top, start), min(bottom, stop)
    c, d = max(first, start), min(last, stop)
    if a < b and c < d:
        block[a - top : b - top, c - first : d - first] = factor[a - start : b - start, c - start : d - start]
    a, b = max(top, stop), max(first, stop)
    if a >= bottom:
        return
    below = _adjoint(np.linalg.solve(factor, _adjoint(rows[a - top :])))
    if c < d:
        block[a - top :, c - first : d - first] = below[:, c - start : d - start]
    if b < last and bottom > b:
        right = np.linalg.solve(factor, _adjoint(columns[b - first :]))
        block[a - top :, b - first :] -= below @ right


# LU ---------------------------------------------------------------------------------------------------------


class Eliminated(NamedTuple):
    """A matrix after Gaussian elimination with row exchanges."""

    matrix: DTensor
    """The factors: L below the diagonal, U on it and above."""
    right: DTensor | None
    """The right side, on which the same was done."""
    swaps: int
    """Number of row exchanges."""


def _factored(panel: Array) -> tuple[Array, Array, int]:
    """Return the LU factors of a panel, the order of its rows, and the number of exchanges.

    No step depends on how a library adds: all devices choose the same pivots.
    """
    lu, order, swaps = np.array(panel), np.arange(len(panel)), 0
    for j in range(min(lu.shape)):
        at = j + int(np.argmax(np.abs(lu[j:, j])))
        if at != j:
            lu[[j, at]], order[[j, at]], swaps = lu[[at, j]], order[[at, j]], swaps + 1
        if lu[j, j] != 0:
            lu[j + 1 :, j] /= lu[j, j]
            lu[j + 1 :, j + 1 :] -= np.multiply.outer(lu[j + 1 :, j], lu[j, j + 1 :])
    return lu, order, swaps


def eliminate(name: str, a: DTensor, right: DTensor | None = None) -> Eliminated:
    """Return the LU factors of a square matrix that is cut, and a right side to which its L was applied.

    Args:
        name: Of the operation.
        a: The matrix.
        right: A matrix of as many rows; of the same dtype.
    """
    rows, columns = a.spec.axes
    if rows == WHOLE:
        a, rows, columns = bring(a, a.spec.complete().replace(axes=(columns, rows)), name), columns, rows
    x, swaps, n = _own(a), 0, a.shape[0]
    y = None
    if right is not None:
        other = right.spec.axes[1]
        y = _own(
            bring(right, right.spec.complete().replace(axes=(rows, WHOLE if other == rows else other)), name)
        )
    for start, stop in _steps(x.spec):
        panel = _part(x, WHOLE, (start, n), (start, stop))
        lu, order, count = _factored(panel.blocks[0])
        swaps += count
        order += start
        moved = [at for at in range(start, n) if at < stop or order[at - start] != at]
        sources = order[np.array(moved) - start].astype(np.intp)
        for m in (x,) if y is None else (x, y):
            fetched = _rows(m, sources)
            for region, block, new in zip(
                m.spec.regions, m.writable(), blocks_for(m.spec, fetched), strict=True
            ):
                begin = region[1][0] if m is x else n
                _elimination_step(block, region, (start, stop), lu, moved, new, begin)
    return Eliminated(x, y, swaps)


def _rows(x: DTensor, rows: NDArray[np.intp]) -> DTensor:
    """Return some rows, on all devices that have the same columns."""
    spec, count = x.spec, len(rows)
    target = spec_of(spec.grid, (count, spec.shape[1]), spec.dtype, (WHOLE, spec.axes[1]))
    dims = [
        Dim(count, side(spec, 0, rows), Side(WHOLE, ((0, count),))),
        Dim(spec.shape[1], side(spec, 1), side(target, 1)),
    ]
    return exchange(x, plan_exchange(spec, dims, target.used), target)


def _elimination_step(
    block: Array, region: Any, step: tuple[int, int], lu: Array, moved: list[int], new: Array, begin: int
) -> None:
    """Exchange rows, and eliminate the panel's columns; `begin` is the block's first column in the matrix."""
    (top, bottom), (start, stop) = region[0], step
    for at, row in enumerate(moved):
        if top <= row < bottom:
            block[row - top] = new[at]
    width = block.shape[1]
    a, b = max(top, start), min(bottom, stop)
    c, d = max(begin, start), min(begin + width, stop)
    if c < d and bottom > start:
        block[a - top :, c - begin : d - begin] = lu[a - start : bottom - start, c - start : d - start]
    rest = max(0, stop - begin)
    if rest >= width or bottom <= start:
        return
    size = stop - start
    lower = np.tril(lu[:size], -1) + np.eye(size, dtype=lu.dtype)
    solved = np.linalg.solve(lower, new[:size, rest:])
    if a < b:
        block[a - top : b - top, rest:] = solved[a - start : b - start]
    a = max(top, stop)
    if a < bottom:
        block[a - top :, rest:] -= lu[a - start : bottom - start] @ solved


def solve(name: str, a: DTensor, b: DTensor) -> DTensor:
    """Return the solution of linear equations.

    Raises:
        LinAlgError: The matrix is singular.
    """
    kind = np.linalg.solve(np.eye(1, dtype=a.dtype), np.ones(1, b.dtype)).dtype
    line = b.ndim == 1
    right = reshape(b, (*b.shape, 1)) if line else b
    x, y, _ = eliminate(name, astype(a, kind), astype(right, kind))
    assert y is not None
    for start, stop in reversed(_steps(x.spec)):
        corner = _part(x, WHOLE, (start, stop), (start, stop)).blocks[0]
        if not np.all(np.diagonal(corner)):
            raise np.linalg.LinAlgError("Singular matrix")
        above = _panel(x, x.spec.axes[0], (0, start), (start, stop))
        known = _part(y, y.spec.axes[1], (start, stop), (0, y.shape[1]))
        for region, block, factor, part in zip(
            y.spec.regions, y.writable(), blocks_for(y.spec, above), blocks_for(y.spec, known), strict=True
        ):
            top, bottom = region[0]
            solved = np.linalg.solve(np.triu(corner), part)
            low, high = max(top, start), min(bottom, stop)
            if low < high:
                block[low - top : high - top] = solved[low - start : high - start]
            before = min(bottom, start) - top
            if before > 0:
                block[:before] -= factor[:before] @ solved
    return reshape(y, b.shape) if line else y


def inv(a: DTensor) -> DTensor:
    """Return the inverse of a matrix."""
    spec = a.spec.complete()
    made = []
    for rows, columns in spec.regions:
        made.append((np.arange(*rows)[:, None] == np.arange(*columns)).astype(a.dtype))
    return solve("np.linalg.inv", a, DTensor(spec, tuple(made)))


def slogdet(a: DTensor) -> tuple[DTensor, DTensor]:
    """Return the sign and the logarithm of the determinant's size."""
    kind = np.linalg.det(np.eye(1, dtype=a.dtype)).dtype
    x, _, swaps = eliminate("np.linalg.slogdet", astype(a, kind))
    spec, n = x.spec, x.shape[0]
    made = []
    for (rows, columns), block in zip(spec.regions, x.blocks, strict=True):
        line = np.zeros(n, kind)
        at = np.arange(max(rows[0], columns[0]), min(rows[1], columns[1]))
        line[at] = block[at - rows[0], at - columns[0]]
        made.append(line)
    diagonal = DTensor(spec_of(spec.grid, (n,), kind, None, spec.used, "sum"), tuple(made))
    whole = diagonal.spec.complete()
    real = np.empty(0, kind).real.dtype
    targets = (spec_of(spec.grid, (), kind), spec_of(spec.grid, (), real))

    def measured(line: Array) -> tuple[Any, Any]:
        size = np.abs(line)
        zero = not np.all(size)
        sign = kind.type(0) if zero else np.prod(line / size) * (-1) ** swaps
        with np.errstate(divide="ignore"):
            return sign, np.sum(np.log(size))

    sign, logarithm = run_local("linalg.slogdet", measured, [diagonal], [whole], targets)
    return sign, logarithm
