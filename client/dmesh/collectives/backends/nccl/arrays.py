"""CuPy arrays as requests need them: checks, memory on the caller's CUDA stream, and NCCL's reductions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dmesh.collectives.reduction import canonical_op, plain_reduction
from dmesh.collectives.request import Reduction, Request, describe_dtype, describe_type
from dmesh.errors import CollectiveError, CollectiveTypeError, CollectiveValueError, MissingExtraError

_DTYPES = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip
_OPS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX", "mean": "AVG"}
_TRUTH = {"any": "MAX", "all": "MIN", "max": "MAX", "min": "MIN"}
_PARTS = {"complex64": "float32", "complex128": "float64"}


class Folding(NamedTuple):
    """A reduction of one dtype, as NCCL knows it."""

    op: int
    """NCCL's number of the reduction."""
    code: int
    """NCCL's number of the dtype."""
    width: int
    """Number of NCCL's elements in one element."""
    reduction: Reduction


class GpuArrays:
    """CuPy, for one rank of a group; see `validation.NumpyArrays`.

    A group works with one device of each process, because an NCCL communicator does.
    """

    where = "on GPUs"
    """Last argument of a descriptor, so that the same call with NumPy arrays is another call."""

    def __init__(self) -> None:
        self._device: int | None = None

    @contextmanager
    def using(self, x: Any, what: str) -> Iterator[None]:
        """Make the group's device, which the array must be on, the current one."""
        load_nccl()
        device = int(x.device.id)
        if self._device is None:
            self._device = device
        elif device != self._device:
            raise CollectiveValueError(
                f"{what} got an array on device {device}, but this group's GPU arrays are on device "
                f"{self._device}: a group works with one device of each process"
            )
        import cupy

        with cupy.cuda.Device(device):
            if cupy.cuda.get_current_stream().is_capturing():
                raise CollectiveError(
                    f"{what} was called while a CUDA graph is captured: its ranks agree on each call, which "
                    "a graph cannot repeat; call it before begin_capture() or after end_capture()"
                )
            yield

    def as_input(self, x: Any, what: str) -> Any:
        """Return an array in C order: itself, or a copy."""
        del what
        return x if x.flags.c_contiguous else x.copy(order="C")

    def check_out(self, out: Any, dtype: Any, shape: tuple[int, ...], x: Any, what: str) -> None:
        """Raise if the result cannot be put into `out`."""
        if out is None:
            return
        name = f"out= of {what}"
        if not is_gpu_array(out):
            raise CollectiveTypeError(
                f"{name} of GPU arrays must be a cupy.ndarray, not {describe_type(out)}"
            )
        if out.dtype != dtype:
            raise CollectiveTypeError(
                f"{name} has dtype {out.dtype}, but the result is {describe_dtype(dtype)}"
            )
        if out.shape != shape:
            raise CollectiveValueError(f"{name} has shape {out.shape}, but the result's is {shape}")
        if not out.flags.c_contiguous:
            raise CollectiveValueError(f"{name} of GPU arrays must be C-contiguous")
        if (device := int(out.device.id)) != self._device:
            raise CollectiveValueError(f"{name} is on device {device}, but the input on {self._device}")
        if x is not None and x.flags.c_contiguous and _overlap_partly(x, out):
            raise CollectiveValueError(
                f"{name} overlaps the input without being the same array; pass a separate array"
            )

    def reduction(self, op: str, dtype: np.dtype[Any], what: str) -> Reduction:
        """Return how NCCL folds contributions; raises where it cannot."""
        return resolve(op, dtype, what).reduction

    def complete(self, request: Request) -> Request:
        """Allocate the memory and record the event after which it may be used, on the current stream."""
        import cupy

        out = request.out
        if out is None and request.shape is not None:
            out = cupy.empty(request.shape, request.dtype)
        made = replace(request, out=out, device=self._device, aliased=out is not None and request.aliased)
        ready = cupy.cuda.Event(block=True, disable_timing=True)
        made = replace(made, prepared=made.allocate(cupy.empty), ready=ready)
        ready.record(cupy.cuda.get_current_stream())
        return made


def is_gpu_array(x: object) -> bool:
    """Return whether an object is a CuPy array.

    This does not import CuPy: a program that has not imported it has no such arrays.
    """
    cupy = sys.modules.get("cupy")
    kind = getattr(cupy, "ndarray", None)  # missing while another thread is importing it
    return kind is not None and isinstance(x, kind)


def load_nccl() -> Any:
    """Return CuPy's module of NCCL; raises MissingExtraError if CuPy has none."""
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise MissingExtraError(
            "collectives of GPU arrays need NCCL, which CuPy does not find: pip install 'dmesh[nccl]', or "
            "'dmesh[nccl-cuda13]' for CUDA 13"
        )
    return nccl


def resolve(op: str, dtype: np.dtype[Any], what: str) -> Folding:
    """Return NCCL's reduction for an op and a dtype, or raise before anything is sent."""
    op = canonical_op(op)
    name = describe_dtype(dtype)
    part = _PARTS.get(name, name)
    refusal = ""
    if op in ("any", "all") and dtype.kind not in "biufc" and name not in _DTYPES:
        refusal = "truth has no meaning for it"
    elif op in ("any", "all") or dtype.kind == "b":
        # A boolean is a byte of 0 or 1, also to CUDA: the largest says whether any is true.
        dtype, part = np.dtype(np.bool_), "uint8"
        if op not in _TRUTH:
            refusal = "convert it, e.g. with x.astype('int64')"
    elif op not in _OPS:
        refusal = "it has no bitwise reductions"
    elif name in _PARTS and op not in ("sum", "mean"):
        refusal = "complex numbers can only be added"
    elif op == "mean" and "float" not in part:
        refusal = "its mean would be truncated; convert it to floats"
    elif part not in _DTYPES:
        refusal = "it does not know this dtype; convert it"
    nccl = load_nccl()
    if not refusal:
        names = f"NCCL_{part.upper()}", f"NCCL_{(_TRUTH if dtype.kind == 'b' else _OPS)[op]}"
        missing = [name for name in names if not hasattr(nccl, name)]
        if not missing:
            code, number = (getattr(nccl, name) for name in names)
            return Folding(number, code, 2 if name in _PARTS else 1, plain_reduction(op, dtype))
        refusal = f"this build of CuPy knows no {missing[0]}"
    raise CollectiveTypeError(f"NCCL cannot {what} GPU arrays of {name} with {op!r}: {refusal}")


def _overlap_partly(x: Any, out: Any) -> bool:
    """Return whether two contiguous arrays share memory, and are not the same."""
    start, at = x.data.ptr, out.data.ptr
    if start == at and x.shape == out.shape and x.dtype == out.dtype:
        return False
    return bool(start < at + out.nbytes and at < start + x.nbytes)
