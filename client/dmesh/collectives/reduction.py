"""Reductions: their dtypes, and how contributions are folded.

| op | bool | integers | floats | complex | timedelta64 | datetime64 |
|---|---|---|---|---|---|---|
| `sum` | int64 | same | same | same | same | - |
| `prod` | int64 | same | same | same | - | - |
| `mean` | float64 | float64 | same | same | same | - |
| `min`, `max` | same | same | same | same (as numpy orders them) | same | same |
| `any`, `all` | bool | bool | bool | bool | bool | - |
| `bitwise_and`, `bitwise_or`, `bitwise_xor` | same | same | - | - | - | - |

The table gives the result's dtype. Unlike `np.sum`, small integers keep their dtype and wrap around: a
reduction between ranks is a sum of arrays, as `a + b` is. float16 and the short floats of ml_dtypes are added
and multiplied in float32 and rounded once. NaN and NaT win in `min` and `max`, as in `np.minimum`; in `any`
and `all` they count as true. Strings, structured and object dtypes cannot be reduced. NumPy's floating-point
warnings are not issued: an overflow on one rank must not become an exception on that rank alone. Products of
complex numbers can differ in their last bit between kinds of CPUs, as NumPy's do.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from dmesh.collectives.request import DTYPES, Reduction, describe_dtype
from dmesh.errors import CollectiveTypeError, CollectiveValueError

_ALIASES = {"band": "bitwise_and", "bor": "bitwise_or", "bxor": "bitwise_xor"}
_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "any": np.logical_or,
    "all": np.logical_and,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}
OPS: tuple[str, ...] = tuple(_UFUNCS)
"""The reductions; `band`, `bor` and `bxor` are short for the bitwise ones."""

# Kinds of dtypes as numpy's letters, and F and I for the short floats and integers of ml_dtypes.
_MEANINGFUL = {
    "sum": "biufcmFI",
    "prod": "biufcFI",
    "mean": "biufcmFI",
    "min": "biufcmMFI",
    "max": "biufcmMFI",
    "any": "biufcmFI",
    "all": "biufcmFI",
    "bitwise_and": "biuI",
    "bitwise_or": "biuI",
    "bitwise_xor": "biuI",
}


def canonical_op(op: str) -> str:
    """Return the canonical name of a reduction.

    Raises:
        CollectiveValueError: There is no such reduction.
    """
    name = _ALIASES.get(op, op) if isinstance(op, str) else None
    if name not in _UFUNCS:
        raise CollectiveValueError(f"unknown reduction {op!r}; it must be one of {', '.join(OPS)}")
    return name


@lru_cache(maxsize=512)
def resolve(op: str, dtype: np.dtype[Any]) -> Reduction:
    """Return the reduction of a dtype, or refuse it before anything is sent.

    Args:
        op: Canonical name of the reduction.
        dtype: Native dtype of the arrays.

    Raises:
        CollectiveTypeError: The reduction has no meaning for the dtype.
    """
    kind = _kind(dtype)
    if kind not in _MEANINGFUL[op]:
        raise CollectiveTypeError(f"{op!r} has no meaning for arrays of dtype {describe_dtype(dtype)}")
    ufunc = _UFUNCS[op]
    if op in ("any", "all"):
        boolean = np.dtype(np.bool_)
        return Reduction(op, boolean, boolean, boolean, ufunc)
    accumulator = result = dtype
    if op in ("sum", "prod") and kind == "b":
        accumulator = result = np.dtype(np.int64)
    elif op == "mean" and kind in "biuI":
        accumulator = result = np.dtype(np.float64)
    elif kind == "F" or (dtype == np.float16 and op in ("sum", "prod", "mean")):
        accumulator = np.dtype(np.float32)
    elif kind == "I":
        # ml_dtypes has no bitwise operations; a byte's low bits wrap around as the short integer would.
        accumulator = np.dtype(np.uint8 if dtype.name.startswith("uint") else np.int8)
    return Reduction(op, dtype, accumulator, result, ufunc)


def plain_reduction(op: str, dtype: np.dtype[Any]) -> Reduction:
    """Return a reduction whose contributions travel, are folded and are returned in one dtype."""
    return Reduction(op, dtype, dtype, dtype, _UFUNCS[op])


def _kind(dtype: np.dtype[Any]) -> str:
    if dtype.type.__module__.partition(".")[0] != "ml_dtypes":
        return dtype.kind
    return "I" if dtype.name.startswith(("int", "uint")) else "F"


REDUCTIONS = {
    (name, dtype): resolve(canonical_op(name), dtype)
    for name in (*OPS, *_ALIASES)
    for dtype in DTYPES
    if _kind(dtype) in _MEANINGFUL[canonical_op(name)]
}
"""Reductions of the usual dtypes, by name."""
