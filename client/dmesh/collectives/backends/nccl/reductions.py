"""Reductions of NCCL, by op and dtype, and NCCL's numbers for them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmesh.collectives.reduction import canonical_op, plain_reduction
from dmesh.collectives.request import Reduction, describe_dtype
from dmesh.errors import CollectiveTypeError, MissingExtraError

_CODES = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}
_OPS = {"sum": "NCCL_SUM", "prod": "NCCL_PROD", "min": "NCCL_MIN", "max": "NCCL_MAX", "mean": "NCCL_AVG"}
_TRUTH = {"any": "NCCL_MAX", "all": "NCCL_MIN", "max": "NCCL_MAX", "min": "NCCL_MIN"}
_PARTS = {"complex64": "float32", "complex128": "float64"}
_AVERAGED = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Folding:
    """A reduction of one dtype, as NCCL knows it."""

    op: int
    """NCCL's number of the reduction."""
    code: int
    """NCCL's number of the dtype."""
    width: int
    """Number of NCCL's elements in one element."""
    reduction: Reduction
    """The reduction, for requests."""


def load_nccl() -> Any:
    """Return CuPy's module of NCCL.

    Raises:
        MissingExtraError: CuPy is there without NCCL.
    """
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise MissingExtraError(
            "collectives of GPU arrays need NCCL, which CuPy does not find: pip install 'dmesh[nccl]'"
        )
    return nccl


def resolve(op: str, dtype: np.dtype[Any], what: str) -> Folding:
    """Return NCCL's reduction for an op and a dtype, or refuse it before anything is sent.

    Args:
        op: Name of the reduction, as the caller gave it.
        dtype: Of the arrays.
        what: The operation, for messages.

    Raises:
        CollectiveTypeError: NCCL has no such reduction for the dtype.
        CollectiveValueError: There is no such reduction.
        MissingExtraError: There is no NCCL.
    """
    name = canonical_op(op)
    nccl = load_nccl()
    name_of_dtype = describe_dtype(dtype)
    if name in ("any", "all"):
        if dtype.kind not in "biufc" and name_of_dtype not in _CODES:
            raise _refusal(name, name_of_dtype, what, "truth has no meaning for it")
        dtype = np.dtype(np.bool_)
    if dtype.kind == "b":
        # A boolean is a byte of 0 or 1, also to CUDA: the largest says whether any is true.
        if name not in _TRUTH:
            raise _refusal(name, name_of_dtype, what, "convert it, e.g. with x.astype('int64')")
        return Folding(getattr(nccl, _TRUTH[name]), nccl.NCCL_UINT8, 1, plain_reduction(name, dtype))
    if name not in _OPS:
        raise _refusal(name, name_of_dtype, what, "it has no bitwise reductions")
    part = _PARTS.get(name_of_dtype, name_of_dtype)
    if part != name_of_dtype and name not in ("sum", "mean"):
        raise _refusal(name, name_of_dtype, what, "complex numbers can only be added")
    if name == "mean" and part not in _AVERAGED:
        raise _refusal(name, name_of_dtype, what, "its mean would be truncated; convert it to floats")
    if part not in _CODES:
        raise _refusal(name, name_of_dtype, what, "it does not know this dtype; convert it")
    code, number = getattr(nccl, _CODES[part], None), getattr(nccl, _OPS[name], None)
    if code is None or number is None:
        missing = _CODES[part] if code is None else _OPS[name]
        raise _refusal(name, name_of_dtype, what, f"this build of CuPy knows no {missing}")
    return Folding(number, code, 1 if part == name_of_dtype else 2, plain_reduction(name, dtype))


def _refusal(name: str, dtype: str, what: str, why: str) -> CollectiveTypeError:
    return CollectiveTypeError(f"NCCL cannot {what} GPU arrays of {dtype} with {name!r}: {why}")
