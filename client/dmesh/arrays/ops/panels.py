"""Panels of columns, which factorizations of a sharded matrix process one by one instead of gathering it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays.dispatch.operands import bring
from dmesh.arrays.dispatch.threads import each
from dmesh.arrays.dtensor import DTensor, exchange
from dmesh.arrays.spec import WHOLE, Bounds, Spec, spec_of
from dmesh.arrays.transfer.mapping import Dim, Exchange, Run, plan_exchange, side

Array = NDArray[Any]
_WIDTH = 64
"""Maximum number of columns of a panel."""


def steps_of(spec: Spec) -> list[tuple[int, int]]:
    """Return begin and end of the panels of a matrix: of all columns, but at most as many as rows."""
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


def part_of(x: DTensor, column: int, rows: tuple[int, int], columns: tuple[int, int]) -> DTensor:
    """Return some rows of some columns: unsharded along the rows, optionally sharded along the columns."""
    target = spec_of(x.spec.grid, (rows[1] - rows[0], columns[1] - columns[0]), x.dtype, (WHOLE, column))
    return apart(exchange(x, _plan(x.spec, target, rows, 0, columns), target), x)


def panel_of(x: DTensor, axis: int, rows: tuple[int, int], columns: tuple[int, int]) -> DTensor:
    """Return some columns, sharded along the rows; rows other than the given ones are undefined."""
    target = spec_of(x.spec.grid, (x.shape[0], columns[1] - columns[0]), x.dtype, (axis, WHOLE))
    return apart(exchange(x, _plan(x.spec, target, rows, rows[0], columns), target), x)


def apart(part: DTensor, x: DTensor) -> DTensor:
    """Return a copy of a part of an array, to write to."""

    def copied(region: Bounds, block: Array) -> Array:
        return np.array(block) if any(np.may_share_memory(block, own) for own in x._shards or ()) else block

    return mapped(part, copied)


def mapped(x: DTensor, change: Callable[[Bounds, Array], Array]) -> DTensor:
    """Return an array of new blocks, each a function of the old block and its bounds."""
    if x._shards is None:
        return x
    rows = list(zip(x.spec.regions, x.blocks, strict=True))
    return DTensor(x.spec, tuple(each(change, rows, x.spec.grid, x.spec.largest, blas=True)))


def own_copy(x: DTensor) -> tuple[DTensor, tuple[Array, ...]]:
    """Return a copy and its writable blocks."""
    own = mapped(bring(x, x.spec.complete(), "linalg"), lambda region, block: np.array(block))
    return own, () if own._shards is None else own._shards


def adjoint(x: Array) -> Array:
    """Return the adjoint of a matrix."""
    return x.conj().T


def write_panel(block: Array, region: Bounds, step: tuple[int, int], panel: Array) -> None:
    """Write a panel, whose first row has the number of its first column, into a block."""
    (top, bottom), (first, last) = region
    a, c, d = max(top, step[0]), max(first, step[0]), min(last, step[1])
    if c < d and a < bottom:
        block[a - top :, c - first : d - first] = panel[
            a - step[0] : bottom - step[0], c - step[0] : d - step[0]
        ]
