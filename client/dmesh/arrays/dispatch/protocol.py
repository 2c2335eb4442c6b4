"""NumPy's ufunc protocol: dispatch of a ufunc's methods, with a fast path for calls with a cached plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dmesh.arrays import ledger
from dmesh.arrays.dispatch.operands import PYTHON_SCALARS, check_operand
from dmesh.arrays.dispatch.reduction import accumulate, reduce
from dmesh.arrays.dispatch.registry import hook
from dmesh.arrays.dispatch.ufunc import PLANS, check_out, elementwise, key_of, still, store
from dmesh.arrays.dtensor import DTensor, read
from dmesh.errors import UnshardableError

_POWERS = {1: np.positive, -1: np.reciprocal, 0.5: np.sqrt, 2: np.square}
"""Ufuncs that NumPy calls for some powers of floats and complex numbers."""
GENERALIZED: dict[np.ufunc, Callable[..., Any]] = {}
"""Handlers of generalized ufuncs (of vectors or matrices), registered by `ops`."""


@hook("binary")
def binary(ufunc: np.ufunc, a: Any, b: Any) -> Any:
    """Call a ufunc of two operands, at least one of which is a sharded array."""
    if type(a) is DTensor:
        if type(b) is DTensor:
            plan = PLANS.get((ufunc, a._spec, b._spec))
            if plan is not None and plan.direct:
                x, y = a._shards, b._shards
                if x is not None and y is not None and not plan.scalar:
                    if len(x) == 1:
                        return DTensor(plan.out[0], (ufunc(x[0], y[0]),))
                    return DTensor(plan.out[0], tuple(map(ufunc, x, y)))
        elif type(b) in PYTHON_SCALARS:
            plan = PLANS.get((ufunc, a._spec, type(b)))
            x = a._shards
            if plan is not None and plan.direct and x is not None and not plan.scalar:
                return DTensor(plan.out[0], tuple([ufunc(block, b) for block in x]))
    return call(ufunc, "__call__", (a, b), {})


@hook("power")
def power(ufunc: np.ufunc, a: DTensor, b: Any) -> Any:
    """Raise an array to a power. Like NumPy, use special ufuncs for some exponents."""
    found = None
    kinds = "fc"
    if type(b) is int and b == 2:
        kinds = "biufc"
    elif type(b) is float and b < 0:
        kinds = "f"
    if type(b) in (int, float) and a.dtype.kind in kinds:
        found = _POWERS.get(b)
    return binary(ufunc, a, b) if found is None else call(found, "__call__", (a,), {})


@hook("ufunc")
def call(ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement `__array_ufunc__`."""
    if method == "__call__" and not kwargs:
        plan = PLANS.get(key_of(ufunc, inputs))
        if plan is not None and plan.slots is not None:
            found = still(ufunc, plan, inputs)
            if found is not None:
                return found if len(found) > 1 else found[0]
    if any(getattr(type(x), "stands_for_array", False) for x in inputs):
        inputs = tuple(read(x) for x in inputs)
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
        f"np.{ufunc.__name__}.{method} is not supported on sharded arrays, because it accesses single "
        "elements by index. Use a reduction, or dmesh.shard_map on the blocks"
    )


def _generalized(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handler = GENERALIZED.get(ufunc)
    if handler is None:
        raise UnshardableError(
            f"np.{ufunc.__name__} is not supported on sharded arrays. docs/coverage.md lists what is"
        )
    out = kwargs.pop("out", None)
    result = handler(*inputs, **kwargs)
    if out is None or out == (None,):
        return result
    (target,) = out
    check_out(target, ufunc.__name__)
    return store(result, target, "same_kind")


def _outer(ufunc: np.ufunc, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b = inputs
    for operand in inputs:
        check_operand(operand, f"{ufunc.__name__}.outer")
    ndim = b.ndim if isinstance(b, (DTensor, np.ndarray)) else 0
    a, b = (x if isinstance(x, DTensor) else np.asarray(x) for x in inputs)  # numbers have a dtype here
    left = a.reshape(a.shape + (1,) * ndim) if isinstance(a, DTensor) else a
    return elementwise(ufunc, (left, b), kwargs)
