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

from dmesh.collectives.request import DTYPES, OPS, Reduction, describe_dtype
from dmesh.errors import CollectiveTypeError, CollectiveValueError

_ALIASES = {"band": "bitwise_and", "bor": "bitwise_or", "bxor": "bitwise_xor"}
_TRUTH = np.dtype(np.bool_)
# Functions, and the kinds of dtypes for which they have a meaning: numpy's letters, and F and I for the short
# floats and integers of ml_dtypes.
_REDUCED: dict[str, tuple[np.ufunc, str]] = {
    "sum": (np.add, "biufcmFI"),
    "prod": (np.multiply, "biufcFI"),
    "mean": (np.add, "biufcmFI"),
    "min": (np.minimum, "biufcmMFI"),
    "max": (np.maximum, "biufcmMFI"),
    "any": (np.logical_or, "biufcmFI"),
    "all": (np.logical_and, "biufcmFI"),
    "bitwise_and": (np.bitwise_and, "biuI"),
    "bitwise_or": (np.bitwise_or, "biuI"),
    "bitwise_xor": (np.bitwise_xor, "biuI"),
}


def canonical_op(op: object) -> str:
    """Return the canonical name of a reduction, or refuse it."""
    name = _ALIASES.get(op, op) if isinstance(op, str) else None
    if name not in _REDUCED:
        raise CollectiveValueError(f"unknown reduction {op!r}; it must be one of {', '.join(OPS)}")
    return name


@lru_cache(maxsize=512)
def resolve(op: str, dtype: np.dtype[Any]) -> Reduction:
    """Return the reduction of a canonical name for a dtype, or refuse it before anything is sent."""
    kind = _kind(dtype)
    ufunc, kinds = _REDUCED[op]
    if kind not in kinds:
        raise CollectiveTypeError(f"{op!r} has no meaning for arrays of dtype {describe_dtype(dtype)}")
    if op in ("any", "all"):
        return Reduction(op, _TRUTH, _TRUTH, _TRUTH, ufunc)
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
    return Reduction(op, dtype, dtype, dtype, _REDUCED[op][0])


def _kind(dtype: np.dtype[Any]) -> str:
    if dtype.type.__module__.partition(".")[0] != "ml_dtypes":
        return dtype.kind
    return "I" if dtype.name.startswith(("int", "uint")) else "F"


REDUCTIONS = {
    (name, dtype): resolve(canonical_op(name), dtype)
    for name in (*OPS, *_ALIASES)
    for dtype in DTYPES
    if _kind(dtype) in _REDUCED[canonical_op(name)][1]
}
"""Reductions of the usual dtypes, by name."""
