"""QR factorization of a sharded matrix that is not tall, by Householder reflections of panels of columns.

Each panel is sent to all devices. All factor it with the same result, and reflect their own blocks. As in
LAPACK, the reflections are stored below the diagonal of R; Q is computed from them at the end, last panel
first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dmesh.arrays.dispatch.operands import blocks_for, bring
from dmesh.arrays.dispatch.threads import each
from dmesh.arrays.dispatch.ufunc import astype
from dmesh.arrays.dtensor import DTensor, move
from dmesh.arrays.ops.panels import Array, adjoint, own_copy, part_of, steps_of, write_panel
from dmesh.arrays.spec import WHOLE, Spec, spec_of


def householder(name: str, a: DTensor, mode: str = "reduced") -> tuple[DTensor | None, DTensor]:
    """Return Q, or None in mode "r", and R, in the layout of the matrix; signs are NumPy's."""
    kind = np.linalg.qr(np.eye(1, dtype=a.dtype))[1].dtype
    layout = a.spec.complete().replace(dtype=kind)
    x, own = own_copy(bring(astype(a, kind), _cut_along_columns(layout), name))
    m, n = a.shape
    few = m if mode == "complete" else min(m, n)
    steps = steps_of(x.spec)
    weights: list[Array | None] = []
    for start, stop in steps:
        panel = part_of(x, WHOLE, (start, m), (start, stop))
        if panel._shards is None:
            weights.append(None)
            _reflect(x, own, (start, stop), stop)
            continue
        packed, scales = _factored(panel.blocks[0])
        vectors = _vectors(packed)
        weight = _weight(vectors, scales)
        weights.append(weight)
        for region, block in zip(x.spec.regions, own, strict=True):
            write_panel(block, region, (start, stop), packed)
        _reflect(x, own, (start, stop), stop, vectors, adjoint(weight))
    upper: Any = np.triu
    r = move(upper(x[:few]), layout.replace(shape=(few, n)))
    if mode == "r":
        return None, r
    spec = x.spec.replace(shape=(m, few))
    unit = None if x._shards is None else tuple(_unit(*region).astype(kind) for region in spec.regions)
    q, blocks = own_copy(DTensor(spec, unit))
    for (start, stop), known in zip(reversed(steps), reversed(weights), strict=True):
        panel = part_of(x, WHOLE, (start, m), (start, stop))
        if known is None:
            _reflect(q, blocks, (start, stop), start)
        else:
            _reflect(q, blocks, (start, stop), start, _vectors(panel.blocks[0]), known)
    return move(q, layout.replace(shape=(m, few))), r


def _cut_along_columns(spec: Spec) -> Spec:
    """Return the placement for the computation: with whole columns, reflections need no communication."""
    rows, columns = spec.axes
    other = spec.replace(axes=(WHOLE, rows)) if columns == WHOLE else spec
    return other if other.largest <= spec.largest else spec


@np.errstate(all="ignore")  # like LAPACK
def _factored(panel: Array) -> tuple[Array, Array]:
    """Return the QR factors of a panel in LAPACK's form, and the scales of its reflections.

    No step depends on the order of additions in a library, so all devices choose the same signs.
    """
    packed = np.array(panel, order="C")
    scales = np.zeros(min(packed.shape), packed.dtype)
    real = scales.real.dtype.type
    tiny = np.finfo(real).tiny
    for j in range(len(scales)):
        column = packed[j:, j]
        unit = max(tiny, np.ldexp(real(1), np.frexp(np.abs(column).max())[1] - 1))
        line = column / unit  # exact, and its squares neither overflow nor vanish
        first = line[0]
        if not line[1:].any() and not first.imag:
            continue
        size = -np.copysign(np.sqrt(np.sum(line.real**2 + line.imag**2)), first.real)
        scales[j] = (size - first) / size
        line /= first - size
        line[0] = 1
        rest = packed[j:, j + 1 :]
        rest -= np.multiply.outer(scales[j].conj() * line, np.add.reduce(line.conj()[:, None] * rest, axis=0))
        column[1:], column[0] = line[1:], size * unit
    return packed, scales


def _vectors(packed: Array) -> Array:
    """Return the vectors of a panel's reflections, as columns."""
    vectors: Array = np.tril(packed, -1) + np.eye(*packed.shape, dtype=packed.dtype)
    return vectors


def _weight(vectors: Array, scales: Array) -> Array:
    """Return T, such that the product of the reflections is 1 - V T V^H."""
    gram = adjoint(vectors) @ vectors
    weight = np.diag(scales)
    for j in range(1, len(scales)):
        weight[:j, j] = -scales[j] * (weight[:j, :j] @ gram[:j, j])
    return weight


def _reflect(
    x: DTensor,
    blocks: tuple[Array, ...],
    step: tuple[int, int],
    begin: int,
    vectors: Array | None = None,
    weight: Array | None = None,
) -> None:
    """Subtract V T V^H x from a matrix x, in the rows from the panel's first on, the columns from `begin` on.

    Args:
        x: The matrix.
        blocks: Its blocks, which are written to.
        step: Columns of the panel.
        begin: First column.
        vectors: V, from the panel's first row on; None in `explain`.
        weight: T.
    """
    start, spec = step[0], x.spec
    rows, columns = spec.axes
    target = spec_of(
        spec.grid, (step[1] - start, spec.shape[1]), spec.dtype, (WHOLE, columns),
        () if rows == WHOLE else (rows,), "sum",
    )  # fmt: skip
    if begin >= spec.shape[1]:
        return
    if vectors is None or weight is None:
        move(DTensor(target, None), target.complete())
        return
    places = []
    for ((top, bottom), (first, _)), block in zip(spec.regions, blocks, strict=True):
        at, rest = min(max(top, start), bottom), min(max(begin - first, 0), block.shape[1])
        own = vectors[max(at - start, 0) : max(bottom - start, 0)]
        places.append((block[at - top :, rest:], own, rest))

    def share(part: Array, own: Array, rest: int) -> Array:
        made = np.zeros((len(weight), rest + part.shape[1]), spec.dtype)
        made[:, rest:] = adjoint(own) @ part
        return made

    def reflect(part: Array, own: Array, rest: int, total: Array) -> None:
        part -= own @ (weight @ total[:, rest:])

    shares = each(share, places, spec.grid, spec.largest, blas=True)
    sums = move(DTensor(target, tuple(shares)), target.complete())
    rows_of = [(*place, total) for place, total in zip(places, blocks_for(spec, sums), strict=True)]
    each(reflect, rows_of, spec.grid, spec.largest, blas=True)


def _unit(rows: tuple[int, int], columns: tuple[int, int]) -> Array:
    """Return a block of the unit matrix."""
    return np.equal.outer(np.arange(*rows), np.arange(*columns))
