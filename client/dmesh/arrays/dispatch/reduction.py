"""Reductions and accumulations of ufuncs. Over sharded dimensions, reductions leave contributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh import native
from dmesh.arrays.dispatch.operands import aligned, blocks_for, check_operand, free_axes, slots_for
from dmesh.arrays.dispatch.threads import LARGE
from dmesh.arrays.dispatch.ufunc import MOST_PLANS, asked_dtype, check_out, elementwise, run_local, store
from dmesh.arrays.dtensor import DTensor, exchange
from dmesh.arrays.spec import WHOLE, Spec, spec_of
from dmesh.arrays.transfer.mapping import Dim, plan_exchange, side
from dmesh.arrays.transfer.plan import FOLDS
from dmesh.errors import UnshardableError

REDUCTIONS: dict[np.ufunc, str] = {fold: op for op, fold in FOLDS.items()}
"""Reduction of the contributions that each ufunc leaves."""
NO_VALUE: Any = np._NoValue
"""Value that NumPy's functions pass for a missing argument."""


_ADDED_IN = {np.dtype(kind): np.dtype(wide) for kind, wide in (("f2", "f4"), ("f4", "f4"), ("f8", "f8"))}
"""Dtypes that the native core adds, and those of its sums."""
_NATIVE_FROM = 1 << 18
"""Bytes of a block from which the native core adds it."""
_ROW_FROM = 512
"""Bytes of a row from which the native core adds it faster than NumPy."""


# Reductions -------------------------------------------------------------------------------------------------


def normalized_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the dimensions that an `axis` argument names, in ascending order."""
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, tuple) else (axis,)
    return tuple(sorted(np.lib.array_utils.normalize_axis_tuple(axes, ndim)))


def is_kept(keepdims: Any) -> bool:
    """Return whether reduced dimensions stay, with length 1."""
    return keepdims is not NO_VALUE and bool(keepdims)


def reduce_block(
    ufunc: np.ufunc, block: NDArray[Any], dims: tuple[int, ...], dtype: Any, keepdims: bool, **options: Any
) -> Any:
    """Return `ufunc.reduce` of a block; large sums of floats are the native core's, if there is one."""
    if ufunc is np.add and block.nbytes >= _NATIVE_FROM and block.dtype in _ADDED_IN and not options:
        sums = _native_sums(block, dims, block.dtype if dtype is None else np.dtype(dtype))
        if sums is not None:
            return sums.reshape(
                [1 if dim in dims else n for dim, n in enumerate(block.shape) if keepdims or dim not in dims]
            )
    return ufunc.reduce(block, axis=dims, dtype=dtype, keepdims=keepdims, **options)


def _native_sums(block: NDArray[Any], dims: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return the sums over some dimensions, one after the other; None if they are left to NumPy.

    Sums that are infinite or NaN are, because NumPy may warn about them.
    """
    rows, core = _rows(block, dims), native.core()
    if rows is None or core is None or dtype not in (block.dtype, _ADDED_IN[block.dtype]):
        return None
    sums = core.sum_rows(rows)
    if sums is None or sums.dtype == dtype:
        return sums
    with np.errstate(over="ignore"):
        sums = sums.astype(dtype)
    return sums if np.isfinite(sums).all() else None


def _rows(block: NDArray[Any], dims: tuple[int, ...]) -> NDArray[Any] | None:
    """Return a block as a matrix whose rows are to be added; None if that would need a copy or not pay."""
    kept = block.ndim - len(dims)
    if dims != tuple(range(kept, block.ndim)) or not block.flags.c_contiguous:
        if kept or not block.flags.f_contiguous:
            return None
        block = block.T
    length = math.prod(block.shape[kept:])
    return block.reshape(-1, length) if length * block.itemsize >= _ROW_FROM else None


def reduce(
    ufunc: np.ufunc,
    array: Any,
    axis: Any = 0,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = NO_VALUE,
    initial: Any = NO_VALUE,
    where: Any = NO_VALUE,
) -> Any:
    """Reduce dimensions; sharded ones leave unreduced contributions.

    Arguments are those of NumPy's functions, which pass `NO_VALUE` for missing ones.
    """
    name = ufunc.__name__
    target = out[0] if isinstance(out, tuple) else out
    if target is not None:
        check_out(target, name)
        dtype = target.dtype if dtype is None and not name.startswith("logical_") else dtype
    if not isinstance(array, DTensor):
        raise UnshardableError(f"np.{name}.reduce of a plain array takes no sharded arguments")
    dtype = asked_dtype(dtype, array.dtype)
    kept, mask = is_kept(keepdims), True if where is NO_VALUE else where
    if not array.ndim and not isinstance(axis, tuple) and axis in (0, -1):
        axis = None  # NumPy reduces a number along its first dimension
    result = _reduce(ufunc, array, normalized_axes(axis, array.ndim), dtype, kept, initial, mask)
    return result if target is None else store(result, target, "same_kind")


def _identity(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Any:
    """Return the identity of a reduction, for empty blocks."""
    if ufunc in (np.fmin, np.fmax) and dtype.kind in "fc":
        return dtype.type(np.nan)
    low = ufunc in (np.maximum, np.fmax)
    if dtype.kind == "b":
        return not low
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if low else np.iinfo(dtype).max
    if dtype.kind == "c":
        return complex(-np.inf, -np.inf) if low else complex(np.inf, np.inf)
    if dtype.kind in "mM":
        limits = np.iinfo(np.int64)
        return np.int64(limits.min + 1 if low else limits.max).view(dtype)
    return dtype.type(-np.inf if low else np.inf)


_reductions: dict[tuple[Any, ...], tuple[Spec, bool]] = {}
"""Result of a plain reduction, and whether its blocks have no dimensions, by ufunc, operand and arguments."""


def _reduce(
    ufunc: np.ufunc, x: DTensor, dims: tuple[int, ...], dtype: Any, keepdims: bool, initial: Any, where: Any
) -> DTensor:
    given = initial is not NO_VALUE
    plain = where is True and not given
    key = (ufunc, x.spec, dims, dtype, keepdims)
    known = _reductions.get(key) if plain else None
    if known is not None and x._shards is not None:
        made = [reduce_block(ufunc, block, dims, dtype, keepdims) for block in x._shards]
        return DTensor(known[0], tuple(map(np.asarray, made)) if known[1] else tuple(made))
    # NumPy determines the dtype, and refuses unsupported reductions.
    probe = np.ones((1,) * max(len(dims), 1), x.dtype)
    result_dtype = ufunc.reduce(probe, axis=tuple(range(len(dims))) if dims else (), dtype=dtype).dtype
    empty = any(x.shape[dim] == 0 for dim in dims)
    extreme = ufunc in (np.minimum, np.maximum, np.fmin, np.fmax)
    if (empty or where is not True) and ufunc.identity is None and not given:
        if where is not True:
            raise ValueError(
                f"reduction operation '{ufunc.__name__}' does not have an identity, so to use a where "
                "mask one has to specify 'initial'"
            )
        raise ValueError(f"zero-size array to reduction operation {ufunc.__name__} which has no identity")
    op = REDUCTIONS.get(ufunc)
    if result_dtype == np.bool_:  # of which NumPy's sum is any
        op = {"sum": "any", "prod": "all"}.get(op or "", op)
    spec = x.spec
    keeps = spec.partial and spec.op == op and where is True and not given and result_dtype == x.dtype
    if spec.partial and not keeps:
        spec = spec.complete()
    if op is None and any(spec.axes[dim] != WHOLE for dim in dims):
        spec = free_axes(spec, dims)
    over = {spec.axes[dim] for dim in dims if spec.axes[dim] != WHOLE} | (
        set(spec.partial) if keeps else set()
    )
    shape, axes = [], []
    for dim, n in enumerate(spec.shape):
        if dim not in dims:
            shape.append(n)
            axes.append(spec.axes[dim])
        elif keepdims:
            shape.append(1)
            axes.append(WHOLE)
    target = spec_of(spec.grid, tuple(shape), result_dtype, axes, over, op or "")
    operands: list[Any] = [x]
    placed: list[Spec | None] = [spec]
    if plain and spec is x.spec and not (extreme and any(0 in local for local in spec.local_shapes)):
        same = slots_for(target, spec) == tuple(range(len(spec.slots)))
        same &= spec.largest < LARGE or len(spec.slots) == 1  # others have threads
        if same and x.size and len(_reductions) < MOST_PLANS:
            _reductions[key] = target, not shape
    masked = where is not True
    if masked:
        check_operand(where, ufunc.__name__)
        operands.append(where)
        placed.append(
            where.spec.complete().replace(axes=aligned(where.shape, spec.shape, spec.axes))
            if isinstance(where, DTensor) else None
        )  # fmt: skip

    def kernel(block: Any, *mask: Any) -> Any:
        options: dict[str, Any] = {}
        if mask:
            options["where"] = mask[0]
        if extreme and (mask or any(block.shape[dim] == 0 for dim in dims)):
            options["initial"] = _identity(ufunc, result_dtype)
        return reduce_block(ufunc, block, dims, dtype, keepdims, **options)

    (result,) = run_local(f"{ufunc.__name__}.reduce", kernel, operands, placed, (target,))
    if given and initial is not None:
        result = elementwise(
            ufunc, (initial, result), {"dtype": asked_dtype(result_dtype, result.dtype), "casting": "unsafe"}
        )
    return result


# Accumulations ----------------------------------------------------------------------------------------------


def accumulate(ufunc: np.ufunc, array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
    """Accumulate along a dimension.

    Along a sharded dimension, each block is accumulated, then combined with the total of the blocks before
    it. Only the totals move.
    """
    target = out[0] if isinstance(out, tuple) else out
    if not isinstance(array, DTensor):
        raise UnshardableError(f"np.{ufunc.__name__}.accumulate of a plain array takes no sharded arguments")
    if not array.ndim:
        raise TypeError("cannot accumulate on a scalar")
    (dim,) = normalized_axes(axis, array.ndim)
    dtype = asked_dtype(dtype, array.dtype)
    result_dtype = ufunc.accumulate(np.ones(1, array.dtype), dtype=dtype).dtype
    spec = array.spec.complete()
    if REDUCTIONS.get(ufunc) is None:
        spec = free_axes(spec, [dim])
    result_spec = spec.replace(dtype=result_dtype)

    def kernel(block: Any) -> Any:
        return ufunc.accumulate(block, axis=dim, dtype=dtype)

    (result,) = run_local(f"{ufunc.__name__}.accumulate", kernel, [array], [spec], (result_spec,))
    cut = spec.axes[dim]
    if cut != WHOLE and spec.grid.sizes[cut] > 1:
        result = _carry(ufunc, result, dim, cut)
    return result if target is None else store(result, target, "same_kind")


def _carry(ufunc: np.ufunc, x: DTensor, dim: int, cut: int) -> DTensor:
    """Combine each block with the last elements of the blocks before it."""
    spec, grid = x.spec, x.spec.grid
    ends = [stop - 1 for start, stop in spec.cuts(dim) if stop > start]
    if len(ends) < 2:
        return x
    tail_shape = (*spec.shape[:dim], len(ends), *spec.shape[dim + 1 :])
    tail_axes = (*spec.axes[:dim], WHOLE, *spec.axes[dim + 1 :])
    tails = spec_of(grid, tail_shape, spec.dtype, tail_axes)
    dims = [
        Dim(len(ends), side(spec, d, np.array(ends, np.intp)), side(tails, d)) if d == dim
        else Dim(n, side(spec, d), side(tails, d))
        for d, n in enumerate(spec.shape)
    ]  # fmt: skip
    collected = exchange(x, plan_exchange(spec, dims, tails.used), tails)
    if x._shards is None:
        return DTensor(spec, None)
    made = []
    before = (slice(None),) * dim
    for slot, block, last in zip(spec.slots, x.blocks, blocks_for(spec, collected), strict=True):
        at = slot[spec.used.index(cut)]
        if at == 0 or block.shape[dim] == 0:
            made.append(block)
            continue
        total = ufunc.reduce(
            last[(*before, slice(0, at))], axis=dim, keepdims=True, dtype=asked_dtype(spec.dtype, last.dtype)
        )
        made.append(np.asarray(ufunc(total, block), spec.dtype))
    return DTensor(spec, tuple(made))
