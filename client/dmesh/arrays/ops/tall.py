"""Factorizations of tall matrices that are sharded along their rows: QR of each block, then of all R (TSQR).

A tall matrix has so few columns that the R of all blocks fit on each device; nothing else is sent. Singular
values of other matrices need the whole matrix, subject to the policy of implicit gathers; `householder` has
their QR.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dmesh.arrays import ledger
from dmesh.arrays.dispatch.operands import bring
from dmesh.arrays.dispatch.threads import each
from dmesh.arrays.dispatch.ufunc import astype, elementwise, run_local
from dmesh.arrays.dtensor import DTensor, exchange, move
from dmesh.arrays.ops.contraction import matmul
from dmesh.arrays.ops.householder import householder
from dmesh.arrays.ops.mappings import moved_dims, reshape
from dmesh.arrays.policy import check_gather
from dmesh.arrays.spec import WHOLE, Spec, bounds, spec_of
from dmesh.arrays.transfer.mapping import Dim, Side, plan_exchange, side
from dmesh.errors import UnshardableError


def _is_tall(spec: Spec) -> bool:
    """Return whether a matrix is sharded along its rows, and all R together have fewer rows than it."""
    rows = spec.cuts(0) if spec.axes[0] != WHOLE else bounds(spec.shape[0], spec.grid.sizes[spec.axes[1]])
    return sum(min(stop - start, spec.shape[1]) for start, stop in rows) < spec.shape[0]


def tsqr(name: str, a: DTensor) -> tuple[DTensor, DTensor]:
    """Return Q, sharded along its rows, and R, replicated."""
    kind = np.linalg.qr(np.eye(1, dtype=a.dtype))[1].dtype
    axis = a.spec.axes[0] if a.spec.axes[0] != WHOLE else a.spec.axes[1]
    x = bring(astype(a, kind), a.spec.complete().replace(axes=(axis, WHOLE), dtype=kind), name)
    spec, columns = x.spec, a.shape[1]
    cuts, end = [], 0
    for start, stop in spec.cuts(0):
        cuts.append((end, end + min(stop - start, columns)))
        end = cuts[-1][1]
    if not _is_tall(spec):
        check_gather(name, spec, spec.replicated())
    stacked = spec_of(spec.grid, (end, columns), kind)
    dims = [
        Dim(end, Side(axis, tuple(cuts)), side(stacked, 0)),
        Dim(columns, side(spec, 1), side(stacked, 1)),
    ]
    plan = plan_exchange(spec, dims, ())
    few = min(spec.shape)
    q_spec, r_spec = spec.replace(shape=(spec.shape[0], few)), spec_of(spec.grid, (few, columns), kind)
    nbytes, grid = spec.largest, spec.grid
    parts = (
        None if x._shards is None else each(np.linalg.qr, [(b,) for b in x.blocks], grid, nbytes, blas=True)
    )
    tops = DTensor(spec, None if parts is None else tuple(r for _, r in parts))
    stack = exchange(tops, plan, stacked)
    if parts is None:
        return DTensor(q_spec, None), DTensor(r_spec, None)
    rotation, r = np.linalg.qr(stack.blocks[0])
    turns = [rotation[slice(*cuts[slot[0] if slot else 0])] for slot in spec.slots]
    rows = [(q, turn) for (q, _), turn in zip(parts, turns, strict=True)]
    return DTensor(q_spec, tuple(each(np.matmul, rows, grid, nbytes, blas=True))), DTensor(r_spec, (r,))


def _adjoint(x: DTensor) -> DTensor:
    return moved_dims(elementwise(np.conjugate, (x,), {}), (1, 0))


def _small(name: str, kernel: Any, x: DTensor, *shapes: tuple[tuple[int, ...], Any]) -> tuple[DTensor, ...]:
    """Call a kernel on a replicated array."""
    targets = [spec_of(x.spec.grid, shape, np.dtype(dtype)) for shape, dtype in shapes]
    return run_local(name, kernel, [x], [x.spec.replicated()], targets)


def _completed(name: str, q: DTensor) -> DTensor:
    """Return a square unitary matrix, sharded along its rows, whose first columns are an orthonormal matrix.

    The other columns are those of a block reflector, I - W @ inv(K) @ W^H with W = Q + [S; 0], that maps
    [S; 0] to -Q. S is the unitary polar factor of Q's first rows, for which K's eigenvalues lie between 1
    and 2. Each device gets all of Q, which is no larger than its block of the result if that has as many rows
    as Q has columns.
    """
    rows, columns = q.shape
    target = q.spec.replace(shape=(rows, rows), axes=(q.spec.axes[0], WHOLE))
    if rows == columns:
        return q
    with ledger.operation(name):
        whole = move(q, q.spec.replicated())
    if ledger.is_tracing():
        ledger.record(f"local -> {target.describe()}", "local", {}, target.largest, name)
    if whole._shards is None:
        return DTensor(target, None)
    every = whole.blocks[0]
    left, sizes, right = np.linalg.svd(every[:columns])
    reflected = every.copy()
    reflected[:columns] += left @ right
    weights = (right.conj().T / (1 + sizes)) @ (right @ every[columns:].conj().T)
    made = []
    for (low, high), _ in target.regions:
        block = np.concatenate([every[low:high], reflected[low:high] @ -weights], axis=1)
        ones = np.arange(max(low, columns), max(high, columns))
        block[ones - low, ones] += 1
        made.append(block)
    return DTensor(target, tuple(made))


def qr(a: DTensor, mode: str) -> Any:
    """Return the QR factors, with NumPy's signs; for a tall matrix, rows of R may have the other sign."""
    if mode not in ("reduced", "complete", "r"):
        raise UnshardableError(
            f"np.linalg.qr of a sharded matrix supports mode='reduced', 'complete' and 'r', not {mode!r}"
        )
    name, (rows, columns) = "np.linalg.qr", a.shape
    q: DTensor | None
    if mode == "complete" and rows > columns and _is_tall(a.spec):
        thin, top = tsqr(name, a)
        q, below = _completed(name, thin), (rows - columns, columns)
        (r,) = _small(
            "linalg.qr", lambda b: np.concatenate([b, np.zeros(below, b.dtype)]), top, (a.shape, top.dtype)
        )
    else:
        q, r = tsqr(name, a) if _is_tall(a.spec) else householder(name, a, mode)
    result: Any = type(np.linalg.qr(np.eye(1)))
    return r if mode == "r" else result(q, r)


def thin_svd(name: str, a: DTensor) -> tuple[DTensor, DTensor, DTensor]:
    """Return the thin singular value decomposition of a tall or wide matrix."""
    if a.shape[0] < a.shape[1]:
        u, s, v = thin_svd(name, _adjoint(a))
        return _adjoint(v), s, _adjoint(u)
    q, r = tsqr(name, a)
    n = r.shape[0]
    real = np.empty(0, r.dtype).real.dtype
    u, s, v = _small(
        name,
        lambda b: tuple(np.linalg.svd(b, full_matrices=False)),
        r,
        ((n, n), r.dtype),
        ((n,), real),
        (r.shape, r.dtype),
    )
    return matmul(q, u), s, v


def svdvals(name: str, a: DTensor) -> DTensor:
    """Return the singular values of a tall or wide matrix."""
    _, r = tsqr(name, a if a.shape[0] >= a.shape[1] else _adjoint(a))
    real = np.empty(0, r.dtype).real.dtype
    return _small(name, lambda b: np.linalg.svd(b, compute_uv=False), r, ((r.shape[0],), real))[0]


def svd(a: DTensor, full_matrices: bool, compute_uv: bool) -> Any:
    """Return the singular value decomposition."""
    if not compute_uv:
        return svdvals("np.linalg.svd", a)
    u, s, v = thin_svd("np.linalg.svd", a)
    if full_matrices and a.shape[0] > a.shape[1]:
        u = _completed("np.linalg.svd", u)
    elif full_matrices:
        v = _adjoint(_completed("np.linalg.svd", _adjoint(v)))
    result: Any = type(np.linalg.svd(np.eye(1)))
    return result(u, s, v)


def _inverted(s: DTensor, cutoff: DTensor | float) -> DTensor:
    def inverted(values: Any, ratio: Any) -> Any:
        large = values > ratio * values.max(initial=0)
        return np.divide(1, values, where=large, out=np.zeros_like(values))

    whole = s.spec.replicated()
    placed = cutoff.spec.replicated() if isinstance(cutoff, DTensor) else None
    return run_local("linalg.pinv", inverted, [s, cutoff], [whole, placed], [whole])[0]


def pinv(a: DTensor, rcond: Any) -> DTensor:
    """Return the pseudo-inverse."""
    u, s, v = thin_svd("np.linalg.pinv", a)
    if rcond is None:
        rcond = max(a.shape) * np.finfo(s.dtype).eps
    cutoff = rcond if isinstance(rcond, DTensor) else float(rcond)
    return matmul(elementwise(np.multiply, (_adjoint(v), _inverted(s, cutoff)), {}), _adjoint(u))


def lstsq(a: DTensor, b: DTensor, rcond: Any) -> tuple[DTensor, DTensor, int, DTensor]:
    """Return the least-squares solution, the residuals, the rank, and the singular values."""
    right = reshape(b, (*b.shape, 1)) if b.ndim == 1 else b
    kind = np.linalg.solve(np.eye(1, dtype=a.dtype), np.ones(1, b.dtype)).dtype
    x, y = astype(a, kind), astype(right, kind)
    u, s, v = thin_svd("np.linalg.lstsq", x)
    eps = np.finfo(s.dtype).eps
    cutoff = eps * max(a.shape) if rcond is None else eps if rcond < 0 else float(rcond)
    values = s.blocks[0]
    rank = int(np.count_nonzero(values > cutoff * values.max(initial=0)))
    weights = elementwise(np.multiply, (_adjoint(v), _inverted(s, cutoff)), {})
    found = matmul(weights, matmul(_adjoint(u), y))
    if rank == a.shape[1] < a.shape[0]:
        left = elementwise(np.subtract, (y, matmul(x, found)), {})
        size: Any = np.sum(
            np.real(elementwise(np.multiply, (left, elementwise(np.conjugate, (left,), {})), {})), axis=0
        )
    else:
        empty = spec_of(a.spec.grid, (0,), s.dtype)
        size = DTensor(empty, tuple(np.empty(0, s.dtype) for _ in empty.slots))
    return reshape(found, (a.shape[1],)) if b.ndim == 1 else found, size, rank, s
