"""Linear algebra of a sharded matrix, and of stacks of unsharded matrices; norms."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dmesh.arrays.dispatch.operands import aligned, check_operand, free_axes, grid_among
from dmesh.arrays.dispatch.reduction import NO_VALUE, reduce
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import astype, elementwise, run_local
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ops import elimination, tall
from dmesh.arrays.ops.along import check_plain
from dmesh.arrays.ops.contraction import matmul
from dmesh.arrays.ops.mappings import moved_dims, reshape
from dmesh.arrays.ops.sorting import fits
from dmesh.arrays.spec import WHOLE, Spec, spec_of

_ARRAYS = (DTensor, np.ndarray, list, tuple)
TOLERANCES: dict[Callable[..., Any], tuple[str, str]] = {
    np.linalg.pinv: ("rcond", "rtol"),
    np.linalg.matrix_rank: ("tol", "rtol"),
}
"""Arguments that may be sharded arrays with one number per matrix of a stack; the first one is positional."""


def _matrices(function: Any) -> Any:
    """Return the handler of a function of matrices, for stacks that are sharded along other dimensions."""
    keys = TOLERANCES.get(function, ())

    def handler(a: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"np.linalg.{function.__name__}"
        if keys and args:
            kwargs, args = {keys[0]: args[0], **kwargs}, args[1:]
        given = {key: kwargs[key] for key in keys if isinstance(kwargs.get(key), _ARRAYS)}
        check_plain(name, *args, *(value for key, value in kwargs.items() if key not in given))
        if a.ndim < 2 and function is np.linalg.matrix_rank:
            return astype(
                reduce(np.logical_or, elementwise(np.not_equal, (a, 0), {}), None), np.dtype(np.intp)
            )
        if a.ndim < 2:
            raise np.linalg.LinAlgError(
                f"{a.ndim}-dimensional array given. Array must be at least two-dimensional"
            )
        for key, tolerance in given.items():
            _check_tolerance(name, a, key, tolerance, function is np.linalg.matrix_rank)
        cut = CUT.get(function)
        if (
            cut is not None
            and a.ndim == 2
            and a.size
            and not fits(a.spec, (0, 1))
            and not kwargs.get("hermitian")
        ):
            return cut(a, *args, **kwargs)
        held = {key: x for key, x in given.items() if isinstance(x, DTensor)}
        stack = np.broadcast_shapes(a.shape[:-2], *(x.shape for x in held.values()))
        if stack != a.shape[:-2]:
            broadcast: Any = np.broadcast_to
            a = broadcast(a, stack + a.shape[-2:])
        lead = a.ndim - 2
        spec = _beside(free_axes(a.spec, [lead, lead + 1]), held.values())
        sample = function(
            np.broadcast_to(np.eye(*a.shape[-2:], dtype=a.dtype), (1,) * lead + a.shape[-2:]),
            *args,
            **{**kwargs, **{key: np.ones((), x.dtype) for key, x in held.items()}},
        )
        several = isinstance(sample, tuple)
        targets = [
            spec_of(
                spec.grid,
                a.shape[:lead] + np.shape(one)[lead:],
                np.asarray(one).dtype,
                list(spec.axes[:lead]) + [WHOLE] * (np.ndim(one) - lead),
            )
            for one in (sample if several else (sample,))
        ]

        def kernel(block: Any, *tolerances: Any) -> Any:
            made = function(block, *args, **{**kwargs, **dict(zip(held, tolerances, strict=True))})
            return tuple(made) if several else made

        placed = [
            x.spec.complete().replace(axes=aligned(x.shape, stack, spec.axes[:lead])) for x in held.values()
        ]
        operands, specs = [a, *held.values()], [spec, *placed]
        results = run_local(f"linalg.{function.__name__}", kernel, operands, specs, targets, blas=True)
        return (
            type(sample)(*results)
            if several and hasattr(sample, "_fields")
            else results
            if several
            else results[0]
        )

    return handler


def _check_tolerance(name: str, a: DTensor, key: str, tolerance: Any, grows: bool) -> None:
    """Raise an error for tolerances that are plain arrays, on another mesh, or do not match the stack."""
    check_operand(tolerance, name)
    if isinstance(tolerance, DTensor):
        grid_among([a, tolerance], name)
        stack = a.shape[:-2]
        if np.broadcast_shapes(stack, tolerance.shape) != stack and not grows:
            raise ValueError(
                f"{name}: {key}= has shape {tolerance.shape}, which does not match a stack of shape {stack}"
            )


def _beside(spec: Spec, tolerances: Iterable[DTensor]) -> Spec:
    """Return a stack's placement, also sharded along dimensions along which only its tolerances are."""
    axes = list(spec.axes)
    for x in tolerances:
        for dim, axis in enumerate(x.spec.axes, spec.ndim - 2 - x.ndim):
            if axis not in axes and axes[dim] == WHOLE and x.shape[dim - spec.ndim + 2] == spec.shape[dim]:
                axes[dim] = axis
    return spec.replace(axes=axes)


# A sharded matrix -------------------------------------------------------------------------------------------

CUT: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Functions of one sharded matrix, by NumPy function; they do not gather it."""


def _cut(function: Callable[..., Any] | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        if function is not None:
            CUT[function] = handler
        return handler

    return register


def _check_square(a: Any) -> None:
    if a.shape[-1] != a.shape[-2]:
        raise np.linalg.LinAlgError("Last 2 dimensions of the array must be square")


@_cut(np.linalg.cholesky)
def _cholesky(a: Any, /, *, upper: bool = False) -> Any:
    _check_square(a)
    return elimination.cholesky(a, upper)


@_cut(np.linalg.inv)
def _inv(a: Any) -> DTensor:
    _check_square(a)
    return elimination.inv(a)


@_cut(np.linalg.slogdet)
def _slogdet(a: Any) -> Any:
    _check_square(a)
    return type(np.linalg.slogdet(np.eye(1)))(*elimination.slogdet(a))


@_cut(np.linalg.det)
def _det(a: Any) -> DTensor:
    sign, logarithm = _slogdet(a)
    return elementwise(np.multiply, (sign, elementwise(np.exp, (logarithm,), {})), {})  # type: ignore[no-any-return]


@_cut(np.linalg.qr)
def _qr(a: Any, mode: str = "reduced") -> Any:
    return tall.qr(a, mode)


@_cut(np.linalg.svd)
def _svd(a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    del hermitian
    return tall.svd(a, full_matrices, compute_uv)


@_cut(getattr(np.linalg, "svdvals", None))
def _svdvals(x: Any, /) -> DTensor:
    return tall.svdvals("np.linalg.svdvals", x)


@_cut(np.linalg.pinv)
def _pinv(a: Any, rcond: Any = None, hermitian: bool = False, *, rtol: Any = NO_VALUE) -> DTensor:
    del hermitian
    if rtol is NO_VALUE:
        return tall.pinv(a, 1e-15 if rcond is None else rcond)  # NumPy's, whatever the dtype
    if rcond is not None:
        raise ValueError("`rtol` and `rcond` can't be both set.")
    return tall.pinv(a, rtol)


@_cut(np.linalg.matrix_rank)
def _matrix_rank(A: Any, tol: Any = None, hermitian: bool = False, *, rtol: Any = None) -> DTensor:
    del hermitian
    s = tall.svdvals("np.linalg.matrix_rank", A)
    if tol is None:
        ratio = max(A.shape) * np.finfo(s.dtype).eps if rtol is None else rtol
        ratio = ratio if isinstance(ratio, DTensor) else float(ratio)
        tol = elementwise(np.multiply, (reduce(np.maximum, s, None), ratio), {})
    if isinstance(tol, DTensor):
        tol = reshape(tol, (*tol.shape, 1))
    return reduce(np.add, elementwise(np.greater, (s, tol), {}), -1, np.intp)  # type: ignore[no-any-return]


@_cut(np.linalg.cond)
def _cond(x: Any, p: Any = None) -> Any:
    if p in (None, 2, -2):
        s = tall.svdvals("np.linalg.cond", x)
        with np.errstate(all="ignore"):
            found = s[-1] / s[0] if p == -2 else s[0] / s[-1]
    else:
        _check_square(x)
        try:
            found = norm(x, p) * norm(_inv(x), p)
        except np.linalg.LinAlgError:
            return norm(x, p) * 0 + np.inf
    where: Any = np.where
    return where(np.isnan(found) & ~np.isnan(x).any(), np.inf, found)


for _name in (
    "cholesky", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv", "pinv", "qr", "slogdet", "svd", "svdvals",
    "matrix_rank", "cond",
):  # fmt: skip
    if hasattr(np.linalg, _name):
        _function = getattr(np.linalg, _name)
        implements(_function, note="distributed" if _function in CUT else "whole matrices")(
            _matrices(_function)
        )


@implements(np.linalg.solve)
def solve(a: Any, b: Any) -> Any:
    """Return the solutions of linear equations, of one sharded matrix or of each matrix of a stack."""
    for x in (a, b):
        check_operand(x, "np.linalg.solve")
    grid_among([a, b], "np.linalg.solve")
    if a.ndim < 2 or not b.ndim:
        raise np.linalg.LinAlgError(
            f"{a.ndim}-dimensional array given. Array must be at least two-dimensional"
        )
    _check_square(a)
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ValueError(f"solve: shapes {a.shape} and {b.shape} do not fit")
    if b.ndim == 1 and a.ndim > 2:
        return np.squeeze(solve(a, reshape(b, (b.size, 1))), -1)
    if b.ndim > 1 and a.shape[:-2] != b.shape[:-2]:
        batch, broadcast = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), np.broadcast_to
        return solve(broadcast(a, batch + a.shape[-2:]), broadcast(b, batch + b.shape[-2:]))
    if a.ndim == 2 and a.size and not fits(a.spec, (0, 1)):
        return elimination.solve("np.linalg.solve", a, b)
    spec = free_axes(a.spec, [a.ndim - 2, a.ndim - 1])
    lead = list(spec.axes[: a.ndim - 2])
    placed = b.spec.complete().replace(axes=lead + [WHOLE] * (b.ndim - len(lead)))
    dtype = np.linalg.solve(np.eye(1, dtype=a.dtype), np.ones(1, b.dtype)).dtype
    target = spec_of(spec.grid, b.shape, dtype, placed.axes)
    return run_local("linalg.solve", np.linalg.solve, [a, b], [spec, placed], (target,), blas=True)[0]


@implements(np.linalg.lstsq)
def lstsq(a: Any, b: Any, rcond: Any = None) -> Any:
    """Return the least-squares solution of a tall matrix, residuals, rank and singular values."""
    for x in (a, b):
        check_operand(x, "np.linalg.lstsq")
    grid_among([a, b], "np.linalg.lstsq")
    if a.ndim != 2 or b.ndim not in (1, 2):
        raise np.linalg.LinAlgError(f"{a.ndim}-dimensional array given. Array must be two-dimensional")
    if a.shape[0] != b.shape[0]:
        raise np.linalg.LinAlgError("Incompatible dimensions")
    return tall.lstsq(a, b, rcond)


@implements(np.linalg.matrix_power)
def matrix_power(a: Any, n: int) -> Any:
    """Return a power of a square matrix; a power of its inverse if the exponent is negative."""
    if a.ndim < 2:
        raise np.linalg.LinAlgError(
            f"{a.ndim}-dimensional array given. Array must be at least two-dimensional"
        )
    _check_square(a)
    n = operator.index(n)
    if n < 0:
        inverse: Any = np.linalg.inv
        a, n = inverse(a), -n
    result, base = None, a
    while n:
        if n & 1:
            result = base if result is None else matmul(result, base)
        n >>= 1
        if n:
            base = matmul(base, base)
    if result is not None:
        return result
    return astype(elementwise(np.equal, (_index(a, -2), _index(a, -1)), {}), a.dtype)


def _index(a: DTensor, dim: int) -> DTensor:
    """Return the index of each element along a dimension, in the array's layout."""
    spec = a.spec.complete().replace(dtype=np.intp)
    made = []
    for region, shape in zip(spec.regions, spec.local_shapes, strict=True):
        line = np.arange(*region[dim])
        made.append(np.broadcast_to(line if dim == -1 else line[:, None], shape))
    return DTensor(spec, tuple(made))


# Norms ------------------------------------------------------------------------------------------------------


@implements(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the norm of vectors or matrices; norms of singular values need unsharded matrices."""
    if x.dtype.kind not in "fc":
        x = x.astype(np.float64)  # squares of integers would overflow
    if axis is None and (ord is None or x.ndim == 1):
        found: Any = np.sqrt(_squares(x)) if ord in (None, 2) else _vector_norm(x, ord, 0, False)
        return reshape(found, (1,) * x.ndim) if keepdims else found
    dims = (x.ndim - 2, x.ndim - 1) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if axis is None and x.ndim != 2:
        raise ValueError("Improper number of dimensions to norm.")
    if len(dims) == 1:
        return _vector_norm(x, ord, dims[0], keepdims)
    i, j = (d % x.ndim for d in dims)
    if ord in (None, "fro"):
        return np.sqrt(np.sum(np.real(x * np.conjugate(x)), axis=(i, j), keepdims=keepdims))
    if ord in (1, -1, np.inf, -np.inf):
        first, second = (i, j) if abs(ord) == 1 else (j, i)
        sums = np.sum(np.abs(x), axis=first, keepdims=True)
        found = (np.max if ord > 0 else np.min)(sums, axis=second, keepdims=True)
        return found if keepdims else np.squeeze(found, (i, j))
    if ord not in (2, -2, "nuc"):
        raise ValueError("Invalid norm order for matrices.")
    values: Any = np.linalg.svd
    s = values(moved_dims(x, [*(d for d in range(x.ndim) if d not in (i, j)), i, j]), compute_uv=False)
    found = reduce({2: np.maximum, -2: np.minimum, "nuc": np.add}[ord], s, -1)
    if keepdims:
        return reshape(found, tuple(1 if d in (i, j) else n for d, n in enumerate(x.shape)))
    return found


def _squares(x: DTensor) -> DTensor:
    """Return the sum of the squares of all elements' sizes."""
    spec = x.spec.complete()
    real = np.empty(0, x.dtype).real.dtype
    target = spec_of(spec.grid, (), real, (), {axis for axis in spec.axes if axis != WHOLE}, "sum")

    def kernel(block: Any) -> Any:
        flat = block.ravel(order="K").view(real)
        return np.dot(flat, flat)

    (found,) = run_local("linalg.norm", kernel, [x], [spec], (target,))
    return found


def _vector_norm(x: Any, ord: Any, axis: int, keepdims: bool) -> Any:
    if ord is None or ord == 2:
        return np.sqrt(np.sum(np.real(x * np.conjugate(x)), axis=axis, keepdims=keepdims) * 1.0)
    size = np.abs(x)
    if ord == np.inf:
        return np.max(size, axis=axis, keepdims=keepdims)
    if ord == -np.inf:
        return np.min(size, axis=axis, keepdims=keepdims)
    if ord == 0:
        return np.sum((x != 0).astype(size.dtype), axis=axis, keepdims=keepdims)
    if ord == 1:
        return np.sum(size, axis=axis, keepdims=keepdims)
    if not isinstance(ord, (int, float)):
        raise ValueError(f"Invalid norm order '{ord}' for vectors")
    return np.sum(size**ord, axis=axis, keepdims=keepdims) ** (1.0 / ord)
