"""Calls of ufuncs on sharded arrays, and outer products.

The plan of a call is looked up by the ufunc and the placements of its operands. If all operands have the same
placement, the usual case, the plan is to call the ufunc on each block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from dmesh.arrays import ledger
from dmesh.arrays.dispatch.operands import (
    PYTHON_SCALARS,
    aligned,
    blocks_for,
    bring,
    check_operand,
    choose_axes,
    grid_among,
    slots_for,
)
from dmesh.arrays.dispatch.registry import hook
from dmesh.arrays.dispatch.threads import each
from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.grid import RECYCLED
from dmesh.arrays.spec import Spec, spec_of
from dmesh.errors import UnshardableError

_KEEPS_SUM = (np.negative, np.positive, np.conjugate)
MOST_PLANS = 4096


class Plan(NamedTuple):
    """Plan of an elementwise call."""

    operands: tuple[Spec | None, ...]
    """Required placement of each operand; None for a scalar."""
    out: tuple[Spec, ...]
    direct: bool
    """True if no operand moves, all have the slots of the result, and the blocks are small."""
    slots: tuple[tuple[int, ...] | None, ...] | None
    """For each operand, its slot for each slot of the result; None if an operand moves."""
    scalar: bool
    """True if the blocks have no dimensions, so that NumPy returns scalars."""


PLANS: dict[tuple[Any, ...], Plan] = {}


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
            check_out(target, name)
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
        result
        if target is None
        else store(_widened(result, target), target, options.get("casting", "same_kind"))
        for result, target in zip(results, outs, strict=True)
    )
    return finished if len(finished) > 1 else finished[0]


def asked_dtype(dtype: Any, own: np.dtype[Any]) -> Any:
    """Return what ufuncs take as `dtype=`: none that times have anyway, for it must have no unit."""
    return None if own.kind in "mM" and dtype is not None and np.dtype(dtype) == own else dtype


def _widened(result: DTensor, target: DTensor) -> DTensor:
    """Return a result as often as `out=` has room for it."""
    if result.shape == target.shape or np.broadcast_shapes(result.shape, target.shape) != target.shape:
        return result
    broadcast: Any = np.broadcast_to
    found: DTensor = broadcast(result, target.shape)
    return found


def _signature(x: Any) -> Any:
    if isinstance(x, DTensor):
        return x.dtype
    return type(x) if type(x) in PYTHON_SCALARS and type(x) is not bool else np.asarray(x).dtype


def result_dtypes(
    ufunc: np.ufunc, inputs: Sequence[Any], options: dict[str, Any], outs: Sequence[Any] = ()
) -> tuple[np.dtype[Any], ...]:
    """Return the dtypes of a call's results without running it."""
    targets = tuple(outs) if outs else (None,) * ufunc.nout
    given = tuple(_signature(x) for x in inputs)
    chosen = {key: value for key, value in options.items() if key in ("casting", "signature")}
    if options.get("dtype") is not None:
        chosen["signature"] = (None,) * ufunc.nin + (np.dtype(options["dtype"]),) * ufunc.nout
    if chosen.get("signature") is not None and isinstance(chosen["signature"], str):
        return _probed(ufunc, inputs, options)
    if chosen.get("casting") == "equiv":  # crashes NumPy 2.4 beside a Python number
        chosen["casting"] = "no"
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
    direct = (
        len(out) == 1
        and out[0].largest < RECYCLED
        and all(
            spec is None
            or (
                spec is x.spec
                and spec.used == out[0].used
                and slots_for(out[0], spec) == tuple(range(len(spec.slots)))
            )
            for spec, x in zip(operands, inputs, strict=True)
        )
    )
    still = all(spec is None or spec is x.spec for spec, x in zip(operands, inputs, strict=True))
    slots = tuple(None if spec is None else slots_for(out[0], spec) for spec in operands) if still else None
    return Plan(tuple(operands), out, direct, slots, not shape)


def _named(outs: Sequence[Any]) -> bool:
    return any(out is not None for out in outs)


def _completed(x: Any) -> Any:
    """Return an array without elements in the complete placement, for planning."""
    return DTensor(x.spec.complete(), None) if isinstance(x, DTensor) else x


def _kept_partial(ufunc: np.ufunc, inputs: Sequence[Any], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the mesh axes along which the result keeps the contributions of its operands."""
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
    return axes if _scales(ufunc, inputs) and _is_linear(ufunc, inputs, dtype) else ()


def _scales(ufunc: np.ufunc, inputs: Sequence[Any]) -> bool:
    """Return whether a call multiplies contributions by a number, or divides them by one."""
    if ufunc not in (np.multiply, np.true_divide):
        return False
    arrays = [x for x in inputs if isinstance(x, DTensor)]
    return len(arrays) == 1 and bool(arrays[0].spec.partial)


def _is_linear(ufunc: np.ufunc, inputs: Sequence[Any], dtype: np.dtype[Any]) -> bool:
    """Return whether scaled contributions add up to the scaled sum: zeros and infinities make NaN of some."""
    first, second = inputs
    if ufunc is np.true_divide and (not isinstance(first, DTensor) or dtype.kind not in "fc" or not second):
        return False
    number = second if isinstance(first, DTensor) else first
    with np.errstate(over="ignore"):
        return dtype.kind in "iu" or bool(np.isfinite(np.asarray(number).astype(dtype)))


def key_of(ufunc: np.ufunc, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the cache key of a call's plan."""
    found: list[Any] = [ufunc]
    for x in inputs:
        kind = type(x)
        if kind is DTensor:
            found.append(x._spec)
        elif kind in PYTHON_SCALARS:
            found.append(kind)
        elif isinstance(x, np.generic) or (kind is np.ndarray and x.ndim == 0):
            found.append(x.dtype)
        else:
            found.append(None)  # refused later
    return tuple(found)


def still(ufunc: np.ufunc, plan: Plan, inputs: Sequence[Any]) -> tuple[DTensor, ...] | None:
    """Carry out a call without moves; return None if one of its arrays has no elements."""
    assert plan.slots is not None
    columns = []
    count = len(plan.out[0].slots)
    for x, slots in zip(inputs, plan.slots, strict=True):
        if slots is None:
            columns.append([x] * count)
            continue
        shards = x._shards
        if shards is None:
            return None
        columns.append([shards[slot] for slot in slots])
    rows = list(zip(*columns, strict=True))
    first = plan.out[0]
    nbytes = max(first.largest, *(0 if spec is None else spec.largest for spec in plan.operands))
    if len(plan.out) == 1 and first.largest >= RECYCLED:
        rows = [
            (*row, _result(first, shape, row)) for row, shape in zip(rows, first.local_shapes, strict=True)
        ]
        return (DTensor(first, tuple(each(ufunc, rows, first.grid, nbytes))),)
    made = each(ufunc, rows, first.grid, nbytes)
    if len(plan.out) > 1:
        results = zip(*made, strict=True)
        return tuple(
            DTensor(spec, tuple(map(np.asarray, column)))
            for spec, column in zip(plan.out, results, strict=True)
        )
    return (DTensor(plan.out[0], tuple(map(np.asarray, made)) if plan.scalar else tuple(made)),)


def _result(spec: Spec, shape: tuple[int, ...], operands: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return an array for a result, whose elements have the operands' order in memory, as NumPy's have."""
    arrays = [x for x in operands if isinstance(x, np.ndarray) and x.ndim > 1]
    if arrays and all(x.flags.f_contiguous and not x.flags.c_contiguous and x.shape == shape for x in arrays):
        return spec.grid.empty(shape[::-1], spec.dtype).T
    return spec.grid.empty(shape, spec.dtype)


def _call(
    ufunc: np.ufunc, inputs: Sequence[Any], options: dict[str, Any], outs: Sequence[np.dtype[Any] | None]
) -> tuple[DTensor, ...]:
    by_type = not options and not _named(outs) and not _scales(ufunc, inputs)
    key = key_of(ufunc, inputs) if by_type else None
    plan = PLANS.get(key) if key is not None else None
    if plan is None:
        plan = _plan(ufunc, inputs, options, outs)
        if key is not None:
            if len(PLANS) >= MOST_PLANS:
                PLANS.clear()
            PLANS[key] = plan
    return run_local(
        ufunc.__name__, lambda *blocks: ufunc(*blocks, **options), inputs, plan.operands, plan.out
    )


def run_local(
    name: str,
    kernel: Callable[..., Any],
    inputs: Sequence[Any],
    operands: Sequence[Spec | None],
    out: Sequence[Spec],
    *,
    blas: bool = False,
) -> tuple[DTensor, ...]:
    """Move operands to the placements that a kernel needs, and call it for each slot of the results.

    Args:
        name: Name of the operation.
        kernel: Function of the operands' blocks, and of scalars; returns the results' blocks.
        inputs: The operands.
        operands: Where they have to be; None for scalars.
        out: Placements of the results, which have the same slots.
        blas: Whether the kernel's time goes to the BLAS library; see `each`.
    """
    there = [
        x if spec is None else bring(x, spec, f"np.{name}") for x, spec in zip(inputs, operands, strict=True)
    ]
    first = out[0]
    if ledger.is_tracing():
        size = sum(one.largest for one in out)
        ledger.record(f"local -> {first.describe()}", "local", {}, size, f"np.{name}")
    if any(isinstance(x, DTensor) and x._shards is None for x in there):
        return tuple(DTensor(spec, None) for spec in out)
    columns = [blocks_for(first, x) if isinstance(x, DTensor) else [x] * len(first.slots) for x in there]
    nbytes = max(one.largest for one in (*out, *(spec for spec in operands if spec is not None)))
    results: list[list[Any]] = [[] for _ in out]
    for made in each(kernel, list(zip(*columns, strict=True)), first.grid, nbytes, blas=blas):
        for column, block, spec in zip(results, made if len(out) > 1 else (made,), out, strict=True):
            array = np.asarray(block)
            column.append(array if array.dtype == spec.dtype else array.astype(spec.dtype))
    return tuple(DTensor(spec, tuple(column)) for spec, column in zip(out, results, strict=True))


def _call_where(
    ufunc: np.ufunc, inputs: Sequence[Any], where: Any, outs: Sequence[Any], options: dict[str, Any]
) -> tuple[DTensor, ...]:
    """Call a ufunc where a mask is true; elsewhere the result is `out`, or zero without `out`."""
    if np.asarray(where).dtype != np.bool_ if not isinstance(where, DTensor) else where.dtype != np.bool_:
        raise TypeError("where= must be an array of booleans")
    if ufunc.nout != 1:
        raise UnshardableError(f"where= is not supported for np.{ufunc.__name__}, which has several results")
    (target,) = outs
    dtype = result_dtypes(ufunc, inputs, options, [None if target is None else target.dtype])[0]
    arrays = [x for x in (*inputs, where, target) if isinstance(x, DTensor)]
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    if target is not None and target.shape != shape:
        _refuse_shape(target, shape)
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
    """Return whether a casting rule allows casting one dtype to another."""
    return bool(np.can_cast(source, target, casting=casting))


def check_out(target: Any, name: str) -> None:
    """Raise UnshardableError if `out=` is a plain array."""
    if not isinstance(target, DTensor):
        raise UnshardableError(
            f"out= of np.{name} must be a sharded array if an operand is one, got {type(target).__name__}"
        )


def _refuse_shape(target: DTensor, shape: tuple[int, ...]) -> NoReturn:
    raise ValueError(
        f"non-broadcastable output operand with shape {target.shape} doesn't match the broadcast shape "
        f"{shape}"
    )


def store(result: DTensor, target: DTensor, casting: str) -> DTensor:
    """Assign a result to an array, in the array's layout and dtype."""
    if result.shape != target.shape:
        _refuse_shape(target, np.broadcast_shapes(result.shape, target.shape))
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
