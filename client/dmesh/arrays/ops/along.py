"""Operations along dimensions that must be unsharded.

The mesh axes of these dimensions shard other dimensions instead, which moves blocks without gathering any. If
there is no other dimension, the array must be gathered, subject to the policy of implicit gathers.
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
from dmesh.arrays.dispatch.ufunc import run_local
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.ops.mappings import reshape
from dmesh.arrays.spec import WHOLE, Spec, spec_of
from dmesh.errors import UnshardableError


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
    """Call a kernel that needs some dimensions whole, and keeps the others and their positions.

    A call with an array of ones, of length 1 along the other dimensions, tells shape and dtype of the
    results.
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
        # Some NumPy functions do not accept an empty stack.
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


def flattened(a: DTensor, axis: Any) -> tuple[DTensor, int]:
    """Return an array and one of its dimensions; without an axis, the flattened array."""
    if axis is None:
        return reshape(a, (a.size,)), 0
    return a, normalized_axes(axis, a.ndim)[0]


def check_plain(name: str, *values: Any) -> None:
    """Raise UnshardableError if another argument is a sharded array."""
    if any(isinstance(value, DTensor) for value in values):
        raise UnshardableError(f"{name} takes sharded arrays as its first argument only")


@lru_cache(maxsize=1024)
def kernel_of(
    function: Any, dim: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """Return a kernel: a NumPy function along some dimensions; the same object for equal arguments."""
    options = dict(kwargs)
    return lambda block: function(block, *args, axis=dim, **options)


def _edge(value: Any, a: DTensor, dim: int) -> DTensor:
    """Return the `prepend` or `append` argument of `np.diff` in the array's layout."""
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
    """Return the differences between neighbors."""
    if n < 0:
        raise ValueError(f"order must be non-negative but got {n}")
    if n == 0:
        return a
    if not a.ndim:
        raise ValueError("diff requires input that is at least one dimensional")
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
    """Return the differences between neighbors of the flattened array."""
    if to_end is not None or to_begin is not None:
        raise UnshardableError("to_end= and to_begin= of np.ediff1d are not built: np.concatenate does so")
    if ary.dtype == np.bool_:
        raise TypeError("np.ediff1d of booleans is not supported: np.diff tells which neighbors differ")
    return diff(reshape(ary, (ary.size,)))


@implements(np.take_along_axis, note="whole dimension")
def take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> Any:
    """Return elements by their indices along a dimension."""
    for x in (arr, indices):
        check_operand(x, "np.take_along_axis")
    grid_among([x for x in (arr, indices) if isinstance(x, DTensor)], "np.take_along_axis")
    if not isinstance(arr, DTensor) or not isinstance(indices, DTensor):
        raise UnshardableError("np.take_along_axis takes two sharded arrays")
    x, dim = flattened(arr, axis)
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
            "np.take_along_axis does not broadcast a sharded array. Call np.broadcast_to first"
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
    """Return angles without jumps of more than half a period."""
    (dim,) = normalized_axes(axis, p.ndim)
    (result,) = along(
        "np.unwrap", p, [dim], kernel_of(np.unwrap, dim, (), (("discont", discont), ("period", period)))
    )
    return result


@implements(np.trapezoid if hasattr(np, "trapezoid") else None)
def trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Any:
    """Return the integral by the trapezoidal rule, for evenly spaced points."""
    if x is not None:
        raise UnshardableError("x= of np.trapezoid is not implemented for sharded arrays. Pass dx=")
    (dim,) = normalized_axes(axis, y.ndim)
    lead = (slice(None),) * dim
    return np.sum(dx * (y[(*lead, slice(1, None))] + y[(*lead, slice(None, -1))]) / 2.0, axis=dim)
