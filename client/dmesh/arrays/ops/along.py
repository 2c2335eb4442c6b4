"""Operations that need some dimensions whole on each device: sorting, order statistics, fft, matrices.

Their mesh axes come to cut other dimensions for that, which moves blocks and gathers none. Where there is no
other dimension, the array has to be gathered, and the policy of implicit gathers decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dmesh.arrays.creation import scattered
from dmesh.arrays.dispatch.operands import bring, check_operand, free_axes, grid_among
from dmesh.arrays.dispatch.reduction import NO_VALUE, normalized_axes
from dmesh.arrays.dispatch.registry import implements
from dmesh.arrays.dispatch.ufunc import run_local, store
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ops import mappings
from dmesh.arrays.spec import WHOLE, Spec, spec_of
from dmesh.errors import UnshardableError

_f: Any  # NumPy's functions, by families


@lru_cache(maxsize=1024)
def _shape_of(
    kernel: Callable[..., Any], dims: tuple[int, ...], spec: Spec
) -> tuple[tuple[tuple[int, ...], Any], ...]:
    shape = tuple(n if d in dims else 1 for d, n in enumerate(spec.shape))
    sample = np.ones(shape, spec.dtype)
    made = kernel(sample)
    return tuple(
        (np.shape(one), np.asarray(one).dtype) for one in (made if isinstance(made, tuple) else (made,))
    )


def along(name: str, x: DTensor, dims: Sequence[int], kernel: Callable[..., Any]) -> tuple[DTensor, ...]:
    """Call a kernel that works on some dimensions as a whole, and keeps the others and their places.

    What the results look like is found out with an array of ones, of length 1 along the other dimensions.
    """
    chosen = tuple(sorted(d % x.ndim for d in dims))
    spec = free_axes(x.spec, chosen)
    found = _shape_of(kernel, chosen, spec)
    targets = []
    for shape, dtype in found:
        if len(shape) != x.ndim:
            raise UnshardableError(f"{name} does not keep the dimensions of its argument")
        full = tuple(n if d in chosen else m for d, (n, m) in enumerate(zip(shape, x.shape, strict=True)))
        targets.append(
            spec_of(spec.grid, full, dtype, [WHOLE if d in chosen else a for d, a in enumerate(spec.axes)])
        )

    def work(block: Any) -> Any:
        if block.size or not all(block.shape[d] for d in chosen):
            return _arrays(kernel(block))
        # Not all functions of NumPy take a stack of nothing.
        made = [
            np.empty(
                [n if d in chosen else m for d, (n, m) in enumerate(zip(t.shape, block.shape, strict=True))],
                t.dtype,
            )
            for t in targets
        ]
        return tuple(made) if len(made) > 1 else made[0]

    return run_local(name.removeprefix("np."), work, [x], [spec], targets)


def _arrays(made: Any) -> Any:
    return made if isinstance(made, tuple) and len(made) > 1 else made[0] if isinstance(made, tuple) else made


def _flat(a: DTensor, axis: Any) -> tuple[DTensor, int]:
    if axis is None:
        return mappings.reshape(a, (a.size,)), 0
    return a, normalized_axes(axis, a.ndim)[0]


def _static(name: str, *values: Any) -> None:
    if any(isinstance(value, DTensor) for value in values):
        raise UnshardableError(f"{name} takes sharded arrays as its first argument only")


def _ordered(function: Any, *, keeps_flat: bool = False) -> Any:
    def handler(a: Any, *args: Any, axis: Any = -1, **kwargs: Any) -> Any:
        name = f"np.{function.__name__}"
        if args and function in (np.sort, np.argsort):
            axis, args = args[0], args[1:]
        elif len(args) > 1:
            axis, args = args[1], (args[0], *args[2:])
        _static(name, *args, *kwargs.values())
        x, dim = _flat(a, axis)
        (result,) = along(name, x, [dim], _kernel(function, dim, args, tuple(sorted(kwargs.items()))))
        return result

    return handler


@lru_cache(maxsize=1024)
def _kernel(
    function: Any, dim: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    options = dict(kwargs)
    return lambda block: function(block, *args, axis=dim, **options)


for _f in (np.sort, np.argsort):
    implements(_f, note="whole dimension")(_ordered(_f))


def _freeze(value: Any) -> Any:
    return tuple(np.asarray(value).tolist()) if isinstance(value, (list, np.ndarray)) else value


def _partitioned(function: Any) -> Any:
    def handler(a: Any, kth: Any, axis: Any = -1, kind: str = "introselect", order: Any = None) -> Any:
        _static(f"np.{function.__name__}", kth, order)
        x, dim = _flat(a, axis)
        (result,) = along(
            f"np.{function.__name__}", x, [dim], _kernel(function, dim, (_freeze(kth),), (("kind", kind),))
        )
        return result

    return handler


for _f in (np.partition, np.argpartition):
    implements(_f, note="whole dimension")(_partitioned(_f))


def _statistic(function: Any, operands: int) -> Any:
    """Return the handler of an order statistic, whose result lacks the dimensions."""

    def handler(
        a: Any, *args: Any, axis: Any = None, out: Any = None, keepdims: Any = False, **kwargs: Any
    ) -> Any:
        name = f"np.{function.__name__}"
        args_left = list(args)
        given = (
            [args_left.pop(0) for _ in range(operands)]
            if args_left
            else [kwargs.pop("q")]
            if operands
            else []
        )
        if args_left:
            axis = args_left.pop(0)
        if args_left:
            raise UnshardableError(f"{name} of sharded arrays takes its further arguments by name")
        if kwargs.pop("overwrite_input", False):
            raise UnshardableError(
                f"overwrite_input= of {name} is refused: a sharded array is not overwritten"
            )
        _static(name, *given, *kwargs.values())
        kept = bool(keepdims) and keepdims is not NO_VALUE
        x, dims = (
            (mappings.reshape(a, (a.size,)), (0,)) if axis is None else (a, normalized_axes(axis, a.ndim))
        )
        quantiles = np.shape(given[0]) if given else ()
        frozen = tuple(_freeze(np.asarray(value).reshape(-1)) if quantiles else value for value in given)
        kernel = _quantiles(function, dims, frozen, tuple(sorted(kwargs.items())))
        (result,) = along(name, x, dims, kernel)
        # The quantiles lie along the first of the dimensions; they come to the front.
        count = result.shape[dims[0]]
        rest = [d for d in range(x.ndim) if d not in dims]
        result = mappings.moved_dims(result, [*dims, *rest])
        shape = tuple(result.shape[len(dims) :])
        if kept:
            ndim = a.ndim
            gone = range(ndim) if axis is None else dims
            shape = tuple(1 if d in gone else n for d, n in enumerate(a.shape))
        result = mappings.reshape(result, (*quantiles, *shape)) if count or quantiles else result
        return result if out is None else store(result, out, "unsafe")

    return handler


@lru_cache(maxsize=1024)
def _quantiles(function: Any, dims: Any, given: Any, kwargs: Any) -> Callable[..., Any]:
    options = dict(kwargs)

    def kernel(block: Any) -> Any:
        made = np.asarray(function(block, *given, axis=dims, keepdims=True, **options))
        if made.ndim == block.ndim:
            return made
        return np.moveaxis(made, 0, dims[0]).reshape(
            [len(given[0]) if d == dims[0] else n for d, n in enumerate(made.shape[1:])]
        )

    return kernel


for _f, _n in (
    (np.median, 0), (np.nanmedian, 0), (np.quantile, 1), (np.percentile, 1), (np.nanquantile, 1),
    (np.nanpercentile, 1),
):  # fmt: skip
    implements(_f, note="whole dimension")(_statistic(_f, _n))


def _edge(value: Any, a: DTensor, dim: int) -> DTensor:
    """Return what `np.diff` takes before the first element, or after the last one, in the array's layout."""
    check_operand(value, "np.diff")
    if not isinstance(value, DTensor):
        number = np.asarray(value)
        value = scattered(number, spec_of(a.spec.grid, (), number.dtype))
    if not value.ndim:
        broadcast: Any = np.broadcast_to
        value = broadcast(value, (*a.shape[:dim], 1, *a.shape[dim + 1 :]))
    return bring(value, value.spec.complete().replace(axes=a.spec.axes), "np.diff")


@implements(np.diff)
def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Return the differences of neighbors."""
    if n < 0:
        raise ValueError(f"order must be non-negative but got {n}")
    if n == 0:
        return a
    (dim,) = normalized_axes(axis, a.ndim)
    lead = (slice(None),) * dim
    none = (None, NO_VALUE)
    parts = [a if x is a else _edge(x, a, dim) for x in (prepend, a, append) if not any(x is y for y in none)]
    result: Any = np.concatenate(parts, dim) if len(parts) > 1 else a
    for _ in range(n):
        after, before = result[(*lead, slice(1, None))], result[(*lead, slice(None, -1))]
        result = after != before if a.dtype == np.bool_ else after - before
    return result


@implements(np.ediff1d)
def ediff1d(ary: Any, to_end: Any = None, to_begin: Any = None) -> Any:
    """Return the differences of neighbors, in one dimension."""
    if to_end is not None or to_begin is not None:
        raise UnshardableError("to_end= and to_begin= of np.ediff1d are not built: np.concatenate does so")
    return diff(mappings.reshape(ary, (ary.size,)))


@implements(np.take_along_axis, note="whole dimension")
def take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> Any:
    """Return elements by their indices along a dimension."""
    for x in (arr, indices):
        check_operand(x, "np.take_along_axis")
    grid_among([x for x in (arr, indices) if isinstance(x, DTensor)], "np.take_along_axis")
    if not isinstance(arr, DTensor) or not isinstance(indices, DTensor):
        raise UnshardableError("np.take_along_axis takes two sharded arrays")
    x, dim = _flat(arr, axis)
    if indices.ndim != x.ndim:
        raise ValueError("`indices` and `arr` must have the same number of dimensions")
    spec = free_axes(x.spec, [dim])
    shape = np.broadcast_shapes(
        tuple(1 if d == dim else n for d, n in enumerate(x.shape)),
        tuple(1 if d == dim else n for d, n in enumerate(indices.shape)),
    )
    full = tuple(indices.shape[dim] if d == dim else n for d, n in enumerate(shape))
    if x.shape[:dim] + x.shape[dim + 1 :] != full[:dim] + full[dim + 1 :]:
        raise UnshardableError(
            "np.take_along_axis of sharded arrays does not broadcast the array; np.broadcast_to does"
        )
    placed = indices.spec.complete().replace(
        axes=[
            a if n == full[d] else WHOLE
            for d, (a, n) in enumerate(zip(spec.axes, indices.shape, strict=True))
        ]
    )
    target = spec_of(spec.grid, full, x.dtype, spec.axes)
    (result,) = run_local(
        "take_along_axis", lambda b, i: np.take_along_axis(b, i, dim), [x, indices], [spec, placed], (target,)
    )
    return result


@implements(np.unwrap, note="whole dimension")
def unwrap(p: Any, discont: Any = None, axis: int = -1, *, period: float = 2 * np.pi) -> Any:
    """Return angles without jumps."""
    (dim,) = normalized_axes(axis, p.ndim)
    (result,) = along(
        "np.unwrap", p, [dim], _kernel(np.unwrap, dim, (), (("discont", discont), ("period", period)))
    )
    return result


@implements(np.trapezoid if hasattr(np, "trapezoid") else None)
def trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Any:
    """Return the integral by the trapezoidal rule, over equal distances."""
    if x is not None:
        raise UnshardableError("x= of np.trapezoid is not built for sharded arrays: pass dx=")
    (dim,) = normalized_axes(axis, y.ndim)
    lead = (slice(None),) * dim
    return np.sum((y[(*lead, slice(1, None))] + y[(*lead, slice(None, -1))]) * (dx / 2.0), axis=dim)


# Fourier transforms -----------------------------------------------------------------------------------------


def _fft_one(function: Any) -> Any:
    def handler(a: Any, n: Any = None, axis: int = -1, norm: Any = None, out: Any = None) -> Any:
        (dim,) = normalized_axes(axis, a.ndim)
        (result,) = along(
            f"np.fft.{function.__name__}", a, [dim], _kernel(function, dim, (), (("n", n), ("norm", norm)))
        )
        return result if out is None else store(result, out, "same_kind")

    return handler


@lru_cache(maxsize=1024)
def _many(function: Any, axes: tuple[int, ...], s: Any, norm: Any) -> Callable[..., Any]:
    return lambda block: function(block, s=s, axes=axes, norm=norm)


def _fft_many(function: Any, default: Any) -> Any:
    def handler(a: Any, s: Any = None, axes: Any = default, norm: Any = None, out: Any = None) -> Any:
        chosen = (
            range(a.ndim) if axes is None and s is None else range(a.ndim - len(s)) if axes is None else axes
        )
        dims = tuple(int(d) % a.ndim for d in chosen)
        lengths = None if s is None else tuple(s)
        (result,) = along(f"np.fft.{function.__name__}", a, dims, _many(function, dims, lengths, norm))
        return result if out is None else store(result, out, "same_kind")

    return handler


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    implements(getattr(np.fft, _name), note="whole dimension")(_fft_one(getattr(np.fft, _name)))
for _name in ("fftn", "ifftn", "rfftn", "irfftn"):
    implements(getattr(np.fft, _name), note="whole dimension")(_fft_many(getattr(np.fft, _name), None))
for _name in ("fft2", "ifft2", "rfft2", "irfft2"):
    implements(getattr(np.fft, _name), note="whole dimension")(_fft_many(getattr(np.fft, _name), (-2, -1)))


def _shift(sign: int) -> Any:
    def handler(x: Any, axes: Any = None) -> Any:
        dims = (
            range(x.ndim)
            if axes is None
            else normalized_axes(axes if not isinstance(axes, list) else tuple(axes), x.ndim)
        )
        shifts = tuple(x.shape[d] // 2 if sign > 0 else -(x.shape[d] // 2) for d in dims)
        return np.roll(x, shifts, tuple(dims))

    return handler


implements(np.fft.fftshift)(_shift(1))
implements(np.fft.ifftshift)(_shift(-1))


# Stacks of matrices -----------------------------------------------------------------------------------------


def _matrices(function: Any, kept: bool = True) -> Any:
    """Return the handler of a function of matrices, for stacks that are cut along other dimensions."""

    def handler(a: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"np.linalg.{function.__name__}"
        _static(name, *args, *kwargs.values())
        if a.ndim < 2:
            raise np.linalg.LinAlgError(
                f"{a.ndim}-dimensional array given. Array must be at least two-dimensional"
            )
        spec = free_axes(a.spec, [a.ndim - 2, a.ndim - 1])
        sample = function(
            np.broadcast_to(np.eye(*a.shape[-2:], dtype=a.dtype), (1,) * (a.ndim - 2) + a.shape[-2:]),
            *args,
            **kwargs,
        )
        several = isinstance(sample, tuple)
        lead = a.ndim - 2
        targets = [
            spec_of(
                spec.grid,
                a.shape[:lead] + np.shape(one)[lead:],
                np.asarray(one).dtype,
                list(spec.axes[:lead]) + [WHOLE] * (np.ndim(one) - lead),
            )
            for one in (sample if several else (sample,))
        ]

        def kernel(block: Any) -> Any:
            made = function(block, *args, **kwargs)
            return tuple(made) if several else made

        results = run_local(f"linalg.{function.__name__}", kernel, [a], [spec], targets)
        return (
            type(sample)(*results)
            if several and hasattr(sample, "_fields")
            else results
            if several
            else results[0]
        )

    return handler


for _name in (
    "cholesky", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv", "pinv", "qr", "slogdet", "svd", "svdvals",
    "matrix_rank", "cond",
):  # fmt: skip
    if hasattr(np.linalg, _name):
        implements(getattr(np.linalg, _name), note="whole matrices")(_matrices(getattr(np.linalg, _name)))


@implements(np.linalg.solve, note="whole matrices")
def solve(a: Any, b: Any) -> Any:
    """Return the solutions of stacks of linear equations, matrix by matrix."""
    for x in (a, b):
        check_operand(x, "np.linalg.solve")
    grid_among([a, b], "np.linalg.solve")
    if a.ndim < 2 or b.ndim not in (1, a.ndim) or (b.ndim > 2 and a.shape[:-2] != b.shape[:-2]):
        raise UnshardableError("np.linalg.solve of sharded arrays takes stacks of the same lengths")
    spec = free_axes(a.spec, [a.ndim - 2, a.ndim - 1])
    if b.ndim == 1 and a.ndim > 2:
        raise UnshardableError(
            "np.linalg.solve of a stack of matrices and one vector: np.broadcast_to makes a stack of it"
        )
    lead = list(spec.axes[: a.ndim - 2])
    placed = b.spec.complete().replace(axes=lead + [WHOLE] * (b.ndim - len(lead)))
    dtype = np.linalg.solve(np.eye(1, dtype=a.dtype), np.ones(1, b.dtype)).dtype
    target = spec_of(spec.grid, b.shape, dtype, placed.axes)
    (result,) = run_local(
        "linalg.solve", np.linalg.solve, [a, bring_small(b, placed)], [spec, placed], (target,)
    )
    return result


def bring_small(x: DTensor, placed: Spec) -> DTensor:
    """Return the right side of equations, which is gathered as the matrices are."""
    return bring(x, placed, "np.linalg.solve")


@implements(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the norm of vectors or matrices; those of singular values take whole matrices."""
    if axis is None and (ord is None or x.ndim == 1):
        flat = mappings.reshape(x, (x.size,)) if ord is None else x
        found = _vector_norm(flat, ord, 0, False)
        return mappings.reshape(found, (1,) * x.ndim) if keepdims else found
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
    raise UnshardableError(
        f"ord={ord!r} of np.linalg.norm needs singular values, which are not built: np.linalg.svd of "
        "stacks is"
    )


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
