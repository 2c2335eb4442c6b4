"""Ufuncs on sharded arrays: calls, reductions, accumulations and outer products.

A call's plan is found by the ufunc and the placements of its operands. If all of them lie alike, which is the
usual case, the plan is the ufunc itself on each block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmesh.array import ledger
from dmesh.array.dispatch.operands import (
    PYTHON_SCALARS,
    aligned,
    blocks_for,
    bring,
    check_operand,
    choose_axes,
    free_axes,
    grid_among,
    slots_for,
)
from dmesh.array.dispatch.registry import hook
from dmesh.array.dtensor import DTensor, exchange
from dmesh.array.spec import WHOLE, Spec, spec_of
from dmesh.array.transfer.mapping import Dim, plan_exchange, side
from dmesh.array.transfer.plan import FOLDS
from dmesh.errors import UnshardableError

REDUCTIONS: dict[np.ufunc, str] = {fold: op for op, fold in FOLDS.items()}
"""Name of the contributions that a reduction over a cut dimension leaves."""
GENERALIZED: dict[np.ufunc, Callable[..., Any]] = {}
"""Handlers of the ufuncs that work on whole vectors or matrices; entered by `ops`."""
_KEEPS_SUM = (np.negative, np.positive, np.conjugate)
_MOST_PLANS = 4096
NO_VALUE: Any = np._NoValue
"""What NumPy's functions pass for an argument that was not given."""


class Plan(NamedTuple):
    """Plan of an elementwise call."""

    operands: tuple[Spec | None, ...]
    """Where each operand has to be; None for a scalar."""
    out: tuple[Spec, ...]
    direct: bool
    """True if no operand moves, and all have the same slots as the result."""
    scalar: bool
    """True if the blocks have no dimensions, for which NumPy returns scalars."""


_plans: dict[tuple[Any, ...], Plan] = {}


@hook("binary")
def binary(ufunc: np.ufunc, a: Any, b: Any) -> Any:
    """Call a ufunc of two operands, of which at least one is a sharded array."""
    if type(a) is DTensor:
        if type(b) is DTensor:
            plan = _plans.get((ufunc, a._spec, b._spec))
            if plan is not None and plan.direct:
                x, y = a._shards, b._shards
                if x is not None and y is not None and not plan.scalar:
                    if len(x) == 1:
                        return DTensor(plan.out[0], (ufunc(x[0], y[0]),))
                    return DTensor(plan.out[0], tuple(map(ufunc, x, y)))
        elif type(b) in PYTHON_SCALARS:
            plan = _plans.get((ufunc, a._spec, type(b)))
            x = a._shards
            if plan is not None and plan.direct and x is not None and not plan.scalar:
                return DTensor(plan.out[0], tuple([ufunc(block, b) for block in x]))
    return call(ufunc, "__call__", (a, b), {})


@hook("ufunc")
def call(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out what NumPy's ufunc protocol asks for."""
    with ledger.operation(f"np.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")):
        if method == "__call__":
            if ufunc.signature is not None:
                return _generalized(ufunc, inputs, kwargs)
            return elementwise(ufunc, inputs, kwargs)
        if method == "reduce":
            return reduce(ufunc, *inputs, **kwargs)
        if method == "accumulate":
            return accumulate(ufunc, *inputs, **kwargs)
        if method == "outer":
            return _outer(ufunc, inputs, kwargs)
    raise UnshardableError(
        f"np.{ufunc.__name__}.{method} is refused on sharded arrays: it reads and writes elements by "
        "index, one after "
        "the other. Use a reduction, or dmesh.shard_map on the blocks"
    )


def _generalized(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = GENERALIZED.get(ufunc)
    if handler is None:
        raise UnshardableError(
            f"np.{ufunc.__name__} is not built for sharded arrays; docs/coverage.md lists what is"
        )
    out = kwargs.pop("out", None)
    result = handler(*inputs, **kwargs)
    if out is None or out == (None,):
        return result
    (target,) = out
    _check_out(target, ufunc.__name__)
    return store(result, target, "same_kind")


# Calls ------------------------------------------------------------------------------------------------------


def elementwise(ufunc: np.ufunc, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a ufunc element by element."""
    name = ufunc.__name__
    options = dict(kwargs)
    out = options.pop("out", None)
    where = options.pop("where", True)
    options.pop("order", None)
    options.pop("subok", None)
    outs = (None,) * ufunc.nout if out is None else (out if isinstance(out, tuple) else (out,))
    for target in outs:
        if target is not None:
            _check_out(target, name)
    operands = [*inputs] + ([] if where is True else [where]) + [t for t in outs if t is not None]
    for operand in operands:
        check_operand(operand, name)
    arrays = [operand for operand in operands if isinstance(operand, DTensor)]
    grid_among(arrays, name)
    if where is True:
        results = _call(ufunc, inputs, options, [t.dtype if t is not None else None for t in outs])
    else:
        results = _call_where(ufunc, inputs, where, outs, options)
    finished = tuple(
        result if target is None else store(result, target, options.get("casting", "same_kind"))
        for result, target in zip(results, outs, strict=True)
    )
    return finished if len(finished) > 1 else finished[0]


def _signature(x: Any) -> Any:
    if isinstance(x, DTensor):
        return x.dtype
    return type(x) if type(x) in PYTHON_SCALARS and type(x) is not bool else np.asarray(x).dtype


def result_dtypes(
    ufunc: np.ufunc, inputs: Sequence[Any], options: dict[str, Any], outs: Sequence[Any] = ()
) -> tuple[np.dtype[Any], ...]:
    """Return the dtypes of a call's results, before anything moves."""
    targets = tuple(outs) if outs else (None,) * ufunc.nout
    given = tuple(_signature(x) for x in inputs)
    chosen = {key: value for key, value in options.items() if key in ("casting", "signature")}
    if options.get("dtype") is not None:
        chosen["signature"] = (None,) * ufunc.nin + (np.dtype(options["dtype"]),) * ufunc.nout
    if chosen.get("signature") is not None and isinstance(chosen["signature"], str):
        return _probed(ufunc, inputs, options)
    resolved = ufunc.resolve_dtypes((*given, *targets), **chosen)
    return tuple(resolved[ufunc.nin :])


def _probed(ufunc: np.ufunc, inputs: Sequence[Any], options: dict[str, Any]) -> tuple[np.dtype[Any], ...]:
    values = [np.ones((), x.dtype) if isinstance(x, DTensor) else x for x in inputs]
    results = ufunc(*values, **options)
    return tuple(one.dtype for one in (results if isinstance(results, tuple) else (results,)))


def _plan(
    ufunc: np.ufunc, inputs: Sequence[Any], options: dict[str, Any], outs: Sequence[np.dtype[Any] | None]
) -> Plan:
    dtypes = result_dtypes(ufunc, inputs, options, outs)
    arrays = [x for x in inputs if isinstance(x, DTensor)]
    grid = arrays[0].spec.grid
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    specs = tuple(x.spec for x in arrays)
    kept = _kept_partial(ufunc, inputs, dtypes[0]) if not _named(outs) else ()
    if kept:
        others = tuple(spec.complete() for spec in specs)
        axes = choose_axes(others, shape)
        if set(axes) & set(kept):
            kept = ()
    if not kept:
        axes = choose_axes(specs, shape)
    operands: list[Spec | None] = []
    for x in inputs:
        if not isinstance(x, DTensor):
            operands.append(None)
            continue
        wanted = aligned(x.shape, shape, axes)
        keeps = kept and x.spec.partial
        if keeps and wanted != x.spec.axes:
            return _plan(ufunc, [_completed(y) for y in inputs], options, outs)
        operands.append(x.spec if keeps else x.spec.complete().replace(axes=wanted))
    out = tuple(spec_of(grid, shape, dtype, axes, kept, "sum" if kept else "") for dtype in dtypes)
    direct = len(out) == 1 and all(
        spec is None
        or (
            spec is x.spec
            and spec.used == out[0].used
            and slots_for(out[0], spec) == tuple(range(len(spec.slots)))
        )
        for spec, x in zip(operands, inputs, strict=True)
    )
    return Plan(tuple(operands), out, direct, not shape)


def _named(outs: Sequence[Any]) -> bool:
    return any(out is not None for out in outs)


def _completed(x: Any) -> Any:
    """Return an array of the same placement without contributions, to plan with."""
    return DTensor(x.spec.complete(), None) if isinstance(x, DTensor) else x


def _kept_partial(ufunc: np.ufunc, inputs: Sequence[Any], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the mesh axes along which a result is a sum of contributions, because its operand is one."""
    partial = [x for x in inputs if isinstance(x, DTensor) and x.spec.partial]
    if (
        not partial
        or any(x.spec.op != "sum" or x.dtype != dtype for x in partial)
        or dtype.kind not in "iufc"
    ):
        return ()
    axes: tuple[int, ...] = partial[0].spec.partial
    if any(x.spec.partial != axes for x in partial):
        return ()
    if ufunc in _KEEPS_SUM:
        return axes
    if ufunc in (np.add, np.subtract) and len(partial) == 2 and partial[0].shape == partial[1].shape:
        return axes
    scales = ufunc is np.multiply or (
        ufunc is np.true_divide and partial[0] is inputs[0] and dtype.kind in "fc"
    )
    if scales and len(partial) == 1 and all(x is partial[0] or not isinstance(x, DTensor) for x in inputs):
        return axes
    return ()


def _call(
    ufunc: np.ufunc, inputs: Sequence[Any], options: dict[str, Any], outs: Sequence[np.dtype[Any] | None]
) -> tuple[DTensor, ...]:
    key: Any = None
    if not options and not _named(outs):
        key = (
            ufunc,
            *(
                x._spec
                if type(x) is DTensor
                else type(x)
                if type(x) in PYTHON_SCALARS
                else np.asarray(x).dtype
                for x in inputs
            ),
        )
    plan = _plans.get(key) if key is not None else None
    if plan is None:
        plan = _plan(ufunc, inputs, options, outs)
        if key is not None:
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[key] = plan
    return run_local(
        ufunc.__name__, lambda *blocks: ufunc(*blocks, **options), inputs, plan.operands, plan.out
    )


def run_local(
    name: str,
    kernel: Callable[..., Any],
    inputs: Sequence[Any],
    operands: Sequence[Spec | None],
    out: Sequence[Spec],
) -> tuple[DTensor, ...]:
    """Bring operands to where a kernel needs them, and call it for each slot of the results.

    Args:
        name: Of the operation.
        kernel: Takes the operands' blocks, and scalars as they are; returns the results' blocks.
        inputs: The operands.
        operands: Where they have to be; None for scalars.
        out: Placements of the results, which have the same slots.
    """
    there = [
        x if spec is None else bring(x, spec, f"np.{name}") for x, spec in zip(inputs, operands, strict=True)
    ]
    first = out[0]
    ledger.record(f"local -> {first.describe()}", "local", {}, sum(one.largest for one in out), f"np.{name}")
    if any(isinstance(x, DTensor) and x._shards is None for x in there):
        return tuple(DTensor(spec, None) for spec in out)
    columns = [blocks_for(first, x) if isinstance(x, DTensor) else [x] * len(first.slots) for x in there]
    results: list[list[Any]] = [[] for _ in out]
    for blocks in zip(*columns, strict=True):
        made = kernel(*blocks)
        for column, block, spec in zip(results, made if len(out) > 1 else (made,), out, strict=True):
            array = np.asarray(block)
            column.append(array if array.dtype == spec.dtype else array.astype(spec.dtype))
    return tuple(DTensor(spec, tuple(column)) for spec, column in zip(out, results, strict=True))


def _call_where(
    ufunc: np.ufunc, inputs: Sequence[Any], where: Any, outs: Sequence[Any], options: dict[str, Any]
) -> tuple[DTensor, ...]:
    """Call a ufunc where a mask is true; elsewhere the result is `out`, or zero."""
    if np.asarray(where).dtype != np.bool_ if not isinstance(where, DTensor) else where.dtype != np.bool_:
        raise TypeError("where= must be an array of booleans")
    if ufunc.nout != 1:
        raise UnshardableError(f"where= of np.{ufunc.__name__}, which has several results, is not built")
    (target,) = outs
    dtype = result_dtypes(ufunc, inputs, options, [None if target is None else target.dtype])[0]
    arrays = [x for x in (*inputs, where, target) if isinstance(x, DTensor)]
    shape = np.broadcast_shapes(*(x.shape for x in arrays)) if target is None else target.shape
    axes = choose_axes(tuple(x.spec for x in arrays), shape) if target is None else target.spec.axes
    out = spec_of(arrays[0].spec.grid, shape, dtype if target is None else target.dtype, axes)
    count = len(inputs)

    def kernel(*blocks: Any) -> Any:
        start = next(
            block.shape for block in blocks if isinstance(block, np.ndarray) and block.ndim == len(shape)
        )
        made = np.zeros(np.broadcast_shapes(start, *(np.shape(b) for b in blocks)), out.dtype)
        if target is not None:
            made[...] = blocks[count + 1]
        ufunc(*blocks[:count], out=made, where=blocks[count], **options)
        return made

    operands = [*inputs, where] + ([] if target is None else [target])
    placed = [
        x.spec.complete().replace(axes=aligned(x.shape, shape, axes)) if isinstance(x, DTensor) else None
        for x in operands
    ]
    return run_local(ufunc.__name__, kernel, operands, placed, (out,))


def can_cast(source: Any, target: np.dtype[Any], casting: Any) -> bool:
    """Return whether a casting rule allows to cast one dtype to another."""
    return bool(np.can_cast(source, target, casting=casting))


def _check_out(target: Any, name: str) -> None:
    if not isinstance(target, DTensor):
        raise UnshardableError(
            f"out= of np.{name} on sharded arrays must be one, too, not {type(target).__name__}"
        )


def store(result: DTensor, target: DTensor, casting: str) -> DTensor:
    """Make an array take the value of a result, in its own layout and dtype."""
    if result.shape != target.shape:
        np.broadcast_shapes(result.shape, target.shape)
        raise ValueError(
            f"non-broadcastable output operand with shape {target.shape} doesn't match the broadcast "
            f"shape {result.shape}"
        )
    if result.dtype != target.dtype:
        if not can_cast(result.dtype, target.dtype, casting):
            raise TypeError(
                f"Cannot cast output from {result.dtype!r} to {target.dtype!r} with casting rule {casting!r}"
            )
        result = astype(result, target.dtype, "unsafe")
    spec = target.spec.complete()
    moved = bring(result, spec, "out=")
    if moved is result:
        moved = DTensor(spec, result._shards)
    target._spec = spec
    target.replace_with(moved)
    return target


# Reductions -------------------------------------------------------------------------------------------------


def normalized_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the dimensions that an `axis` argument names, in ascending order."""
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, tuple) else (axis,)
    return tuple(sorted(np.lib.array_utils.normalize_axis_tuple(axes, ndim)))


def reduce(
    ufunc: np.ufunc,
    array: Any,
    axis: Any = 0,
    dtype: Any = None,
    out: Any = None,
    keepdims: bool = False,
    initial: Any = NO_VALUE,
    where: Any = True,
) -> Any:
    """Reduce dimensions; over those that are cut, the result is left as contributions."""
    name = ufunc.__name__
    target = out[0] if isinstance(out, tuple) else out
    if target is not None:
        _check_out(target, name)
        dtype = target.dtype if dtype is None else dtype
    if not isinstance(array, DTensor):
        raise UnshardableError(f"np.{name}.reduce of a plain array takes no sharded arguments")
    keepdims = bool(keepdims) if keepdims is not NO_VALUE else False
    result = _reduce(ufunc, array, normalized_axes(axis, array.ndim), dtype, keepdims, initial, where)
    return result if target is None else store(result, target, "same_kind")


def _identity(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Any:
    """Return what does not change a reduction, for blocks without elements."""
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


def _reduce(
    ufunc: np.ufunc, x: DTensor, dims: tuple[int, ...], dtype: Any, keepdims: bool, initial: Any, where: Any
) -> DTensor:
    given = initial is not NO_VALUE
    # NumPy itself says what the dtype is, and refuses what it does not reduce.
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
    masked = where is not True
    if masked:
        check_operand(where, ufunc.__name__)
        operands.append(where)
        placed.append(
            where.spec.complete().replace(axes=aligned(where.shape, spec.shape, spec.axes))
            if isinstance(where, DTensor) else None
        )  # fmt: skip

    def kernel(block: Any, *mask: Any) -> Any:
        options: dict[str, Any] = {"axis": dims, "dtype": dtype, "keepdims": keepdims}
        if mask:
            options["where"] = mask[0]
        if extreme and (mask or any(block.shape[dim] == 0 for dim in dims)):
            options["initial"] = _identity(ufunc, block.dtype)
        return ufunc.reduce(block, **options)

    (result,) = run_local(f"{ufunc.__name__}.reduce", kernel, operands, placed, (target,))
    if given and initial is not None:
        result = elementwise(ufunc, (initial, result), {"dtype": result_dtype, "casting": "unsafe"})
    return result


# Accumulations ----------------------------------------------------------------------------------------------


def accumulate(ufunc: np.ufunc, array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
    """Accumulate along a dimension.

    A dimension that is cut is accumulated block by block, and each block is combined with the total of those
    before it: no element moves.
    """
    target = out[0] if isinstance(out, tuple) else out
    if not isinstance(array, DTensor):
        raise UnshardableError(f"np.{ufunc.__name__}.accumulate of a plain array takes no sharded arguments")
    if not array.ndim:
        raise TypeError("cannot accumulate on a scalar")
    (dim,) = normalized_axes(axis, array.ndim)
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
        total = ufunc.reduce(last[(*before, slice(0, at))], axis=dim, keepdims=True, dtype=spec.dtype)
        made.append(np.asarray(ufunc(total, block), spec.dtype))
    return DTensor(spec, tuple(made))


def _outer(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = inputs
    for operand in inputs:
        check_operand(operand, f"{ufunc.__name__}.outer")
    ndim = b.ndim if isinstance(b, (DTensor, np.ndarray)) else 0
    left = a.reshape(a.shape + (1,) * ndim) if isinstance(a, DTensor) else a
    return elementwise(ufunc, (left, b), kwargs)


@hook("astype")
def astype(x: DTensor, dtype: np.dtype[Any], casting: str = "unsafe") -> DTensor:
    """Return an array with another dtype."""
    if not can_cast(x.dtype, dtype, casting):
        raise TypeError(
            f"Cannot cast array data from {x.dtype!r} to {dtype!r} according to the rule {casting!r}"
        )
    spec = x.spec.complete()
    (result,) = run_local(
        "astype", lambda block: block.astype(dtype), [x], [spec], (spec.replace(dtype=dtype),)
    )
    return result
