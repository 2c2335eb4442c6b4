"""Cholesky and LU factorizations of a sharded matrix, by panels of columns, without gathering it.

Each panel is sent to the devices that need it. All of them factor it with the same result, and then update
their own blocks. A device receives the panel's rows that its block has as rows or columns; with pivoting, all
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays.dispatch.operands import blocks_for, bring
from dmesh.arrays.dispatch.threads import each
from dmesh.arrays.dispatch.ufunc import astype, elementwise, run_local
from dmesh.arrays.dtensor import DTensor, exchange
from dmesh.arrays.ops.diagonals import tril
from dmesh.arrays.ops.mappings import reshape
from dmesh.arrays.ops.panels import (
    Array,
    adjoint,
    apart,
    mapped,
    own_copy,
    panel_of,
    part_of,
    steps_of,
    write_panel,
)  # fmt: skip
from dmesh.arrays.spec import WHOLE, Bounds, spec_of
from dmesh.arrays.transfer.mapping import Dim, Side, plan_exchange, side

# Cholesky ---------------------------------------------------------------------------------------------------


def cholesky(a: DTensor, upper: bool = False) -> Any:
    """Return the Cholesky factor of a matrix, in its layout; only one triangle of the matrix is used.

    Raises:
        LinAlgError: The matrix is not positive definite.
    """
    if upper:
        return elementwise(np.conjugate, (cholesky(elementwise(np.conjugate, (a,), {}).T).T,), {})
    kind = np.linalg.cholesky(np.eye(1, dtype=a.dtype)).dtype
    x, blocks = own_copy(a if a.dtype == kind else astype(a, kind))
    spec, n = x.spec, x.shape[0]
    for start, stop in steps_of(spec):
        corner = part_of(x, WHOLE, (start, stop), (start, stop))
        panels = [panel_of(x, axis, (stop, n), (start, stop)) for axis in spec.axes]
        if x._shards is None:
            continue
        factor = np.linalg.cholesky(corner.blocks[0])
        left, above = (mapped(one, partial(_solved, stop, factor)) for one in panels)
        rows = zip(blocks, spec.regions, blocks_for(spec, left), blocks_for(spec, above), strict=True)
        step = partial(_cholesky_step, (start, stop), factor)
        each(step, list(rows), spec.grid, spec.largest, blas=True)
    return tril(x)


def _solved(stop: int, factor: Array, region: Bounds, panel: Array) -> Array:
    """Return a panel's rows from `stop` on, times the inverse of the adjoint of the corner's factor."""
    first, made = max(stop - region[0][0], 0), np.zeros_like(panel)
    if first < len(panel):
        made[first:] = adjoint(np.linalg.solve(factor, adjoint(panel[first:])))
    return made


def _cholesky_step(
    step: tuple[int, int], factor: Array, block: Array, region: Bounds, rows: Array, columns: Array
) -> None:
    (top, bottom), (first, last) = region
    start, stop = step
    a, b = max(top, start), min(bottom, stop)
    c, d = max(first, start), min(last, stop)
    if a < b and c < d:
        block[a - top : b - top, c - first : d - first] = factor[a - start : b - start, c - start : d - start]
    a, b = max(top, stop), max(first, stop)
    if a < bottom and c < d:
        block[a - top :, c - first : d - first] = rows[a - top :, c - start : d - start]
    end = min(last, bottom)  # beyond is the other triangle
    if a < bottom and b < end:
        block[a - top :, b - first : end - first] -= rows[a - top :] @ adjoint(
            columns[b - first : end - first]
        )


# LU ---------------------------------------------------------------------------------------------------------


class Eliminated(NamedTuple):
    """A matrix after Gaussian elimination with row exchanges."""

    matrix: DTensor
    """The factors: L below the diagonal, U on it and above."""
    right: DTensor | None
    """The right-hand side after the same operations."""
    swaps: int
    """Number of row exchanges."""


def _factored(panel: Array) -> tuple[Array, Array, int]:
    """Return the LU factors of a panel, the order of its rows, and the number of exchanges.

    No step depends on the order of additions in a library, so all devices choose the same pivots.
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
    """Return the LU factors of a square sharded matrix, and a right-hand side times the inverse of L.

    Args:
        name: Name of the operation.
        a: The matrix.
        right: A matrix with the same number of rows and the same dtype.
    """
    rows, columns = a.spec.axes
    if rows == WHOLE:
        a, rows, columns = bring(a, a.spec.complete().replace(axes=(columns, rows)), name), columns, rows
    (x, own), swaps, n = own_copy(a), 0, a.shape[0]
    work, y = [(x, own)], None
    if right is not None:
        other = right.spec.axes[1]
        target = right.spec.complete().replace(axes=(rows, WHOLE if other == rows else other))
        y, theirs = own_copy(bring(right, target, name))
        work.append((y, theirs))
    for start, stop in steps_of(x.spec):
        lu, order, count = _factored(part_of(x, WHOLE, (start, n), (start, stop)).blocks[0])
        swaps += count
        order += start
        moved = [at for at in range(start, n) if at < stop or order[at - start] != at]
        sources = order[np.array(moved) - start].astype(np.intp)
        size = stop - start
        lower = np.tril(lu[:size], -1) + np.eye(size, dtype=lu.dtype)
        for m, blocks in work:
            fetched = _rows(m, sources)
            done = stop if m is x else 0  # number of finished columns
            top = mapped(fetched, partial(_solved_rows, done, lower))
            rows_of = zip(
                blocks, m.spec.regions, blocks_for(m.spec, fetched), blocks_for(m.spec, top), strict=True
            )
            update = partial(_update, (start, stop), lu, moved, done)
            each(update, list(rows_of), m.spec.grid, m.spec.largest, blas=True)
    return Eliminated(x, y, swaps)


def _rows(x: DTensor, rows: NDArray[np.intp]) -> DTensor:
    """Return some rows, on all devices with the same columns."""
    spec, count = x.spec, len(rows)
    target = spec_of(spec.grid, (count, spec.shape[1]), spec.dtype, (WHOLE, spec.axes[1]))
    dims = [
        Dim(count, side(spec, 0, rows), Side(WHOLE, ((0, count),))),
        Dim(spec.shape[1], side(spec, 1), side(target, 1)),
    ]
    return apart(exchange(x, plan_exchange(spec, dims, target.used), target), x)


def _solved_rows(done: int, lower: Array, region: Bounds, rows: Array) -> Array:
    """Return the inverse of the corner's L times the first rows, in the unfinished columns."""
    first, made = max(done - region[1][0], 0), np.zeros((len(lower), rows.shape[1]), rows.dtype)
    if first < rows.shape[1]:
        made[:, first:] = np.linalg.solve(lower, rows[: len(lower), first:])
    return made


def _exchange_rows(block: Array, region: Bounds, moved: Sequence[int], new: Array) -> None:
    top, bottom = region[0]
    for at, row in enumerate(moved):
        if top <= row < bottom:
            block[row - top] = new[at]


def _update(
    step: tuple[int, int],
    lu: Array,
    moved: Sequence[int],
    done: int,
    block: Array,
    region: Bounds,
    new: Array,
    upper: Array,
) -> None:
    """Exchange rows, write the panel, and subtract its multiples below, in the columns from `done` on."""
    (top, bottom), (start, stop) = region[0], step
    _exchange_rows(block, region, moved, new)
    if done:
        write_panel(block, region, step, lu)
    rest = max(done - region[1][0], 0)
    a, b = max(top, start), min(bottom, stop)
    if a < b:
        block[a - top : b - top, rest:] = upper[a - start : b - start, rest:]
    a = max(top, stop)
    if a < bottom:
        block[a - top :, rest:] -= lu[a - start : bottom - start] @ upper[:, rest:]


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
    blocks = y._shards or ()
    for start, stop in reversed(steps_of(x.spec)):
        corner = np.triu(part_of(x, WHOLE, (start, stop), (start, stop)).blocks[0])
        if not np.all(np.diagonal(corner)):
            raise np.linalg.LinAlgError("Singular matrix")
        above = panel_of(x, x.spec.axes[0], (0, start), (start, stop))
        known = part_of(y, y.spec.axes[1], (start, stop), (0, y.shape[1]))
        found = mapped(known, partial(_solved_rows, 0, corner))
        rows = zip(blocks, y.spec.regions, blocks_for(y.spec, above), blocks_for(y.spec, found), strict=True)
        each(partial(_substituted, (start, stop)), list(rows), y.spec.grid, y.spec.largest, blas=True)
    return reshape(y, b.shape) if line else y


def _substituted(step: tuple[int, int], block: Array, region: Bounds, factor: Array, solved: Array) -> None:
    """Write a panel's rows of the solution, and subtract their multiples from the rows before."""
    (top, bottom), (start, stop) = region[0], step
    low, high = max(top, start), min(bottom, stop)
    if low < high:
        block[low - top : high - top] = solved[low - start : high - start]
    before = min(bottom, start) - top
    if before > 0:
        block[:before] -= factor[:before] @ solved


def inv(a: DTensor) -> DTensor:
    """Return the inverse of a matrix."""
    spec = a.spec.complete()
    made = []
    for rows, columns in spec.regions:
        made.append((np.arange(*rows)[:, None] == np.arange(*columns)).astype(a.dtype))
    return solve("np.linalg.inv", a, DTensor(spec, tuple(made)))


def slogdet(a: DTensor) -> tuple[DTensor, DTensor]:
    """Return the sign of the determinant and the logarithm of its absolute value."""
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
