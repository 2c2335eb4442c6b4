"""CuPy arrays as requests need them: checks, copies and memory on the caller's current CUDA stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from dmesh.collectives.backends.nccl import is_gpu_array
from dmesh.collectives.backends.nccl.reductions import load_nccl, resolve
from dmesh.collectives.request import Descriptor, Reduction, Request, describe_dtype, describe_type, text_from
from dmesh.errors import CollectiveTypeError, CollectiveValueError

ON_GPUS = "on GPUs"
"""Last argument of a descriptor of GPU arrays, so that the same call with NumPy arrays is another call."""


class GpuArrays:
    """CuPy, for one rank of a group; see `request.Arrays`.

    A group works with one device of each process, because an NCCL communicator does.
    """

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
            yield

    def as_input(self, x: Any, what: str) -> Any:
        """Return an array in C order: itself, or a copy."""
        del what
        return x if x.flags.c_contiguous else x.copy(order="C")

    def check_out(self, out: Any, dtype: Any, shape: tuple[int, ...], x: Any, what: str) -> None:
        """Raise if the result cannot be put into `out`."""
        if out is None:
            return
        if not is_gpu_array(out):
            raise CollectiveTypeError(
                f"out= of {what} of GPU arrays must be a cupy.ndarray, not {describe_type(out)}"
            )
        if out.dtype != dtype:
            raise CollectiveTypeError(
                f"out= of {what} has dtype {out.dtype}, but the result is {describe_dtype(dtype)}"
            )
        if out.shape != shape:
            raise CollectiveValueError(f"out= of {what} has shape {out.shape}, but the result's is {shape}")
        if not out.flags.c_contiguous:
            raise CollectiveValueError(f"out= of {what} of GPU arrays must be C-contiguous")
        if int(out.device.id) != self._device:
            raise CollectiveValueError(
                f"out= of {what} is on device {int(out.device.id)}, but the input on {self._device}"
            )
        if x is not None and x.flags.c_contiguous and _overlap_partly(x, out):
            raise CollectiveValueError(
                f"out= of {what} overlaps the input without being the same array; pass a separate array"
            )

    def reduction(self, op: str, dtype: np.dtype[Any], what: str) -> Reduction:
        """Return how NCCL folds contributions; raises where it cannot."""
        return resolve(op, dtype, what).reduction

    def describe(
        self, kind: str, arguments: list[str], like: Any, number: int
    ) -> tuple[str, Descriptor | None]:
        """Return the wire descriptor as text; there is none in numbers."""
        del number
        return text_from(kind, [*arguments, describe_dtype(like.dtype), f"shape {like.shape}", ON_GPUS]), None

    def complete(self, request: Request) -> Request:
        """Allocate the memory and record the event after which it may be used, on the current stream."""
        import cupy

        out = request.out
        if out is None and request.shape is not None:
            out = cupy.empty(request.shape, request.dtype)
        made = replace(request, out=out, device=self._device, aliased=out is not None and request.aliased)
        made = replace(made, prepared=made.allocate(cupy.empty))
        ready = cupy.cuda.Event(block=True, disable_timing=True)
        ready.record(cupy.cuda.get_current_stream())
        return replace(made, ready=ready)


def _overlap_partly(x: Any, out: Any) -> bool:
    """Return whether two contiguous arrays share memory, and are not the same."""
    start, at = x.data.ptr, out.data.ptr
    if start == at and x.shape == out.shape and x.dtype == out.dtype:
        return False
    return bool(start < at + out.nbytes and at < start + x.nbytes)
