"""Arrays of other libraries as NumPy arrays of the same memory, as inputs and outputs of collectives.

Taken without a copy: whatever exports DLPack on a CPU (PyTorch's tensors, JAX's arrays), and buffers
(`array.array`, bytearray, memoryview, mmap). A dtype that DLPack has and NumPy does not, such as bfloat16, is
taken through `__array__` or, from PyTorch, as the dtype of ml_dtypes.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from dmesh.collectives.backends.nccl.arrays import is_gpu_array
from dmesh.collectives.request import describe_type
from dmesh.errors import CollectiveTypeError

_PLAIN = (np.ndarray, np.generic, int, float, complex, str, bytes, list, tuple, type(None))
_CPU = (1, 3)
"""Devices of DLPack whose memory a CPU reads: its own, and what CUDA has pinned there."""


def as_numpy(x: Any, what: str) -> Any:
    """Return an array of another library as NumPy's, without a copy if possible; anything else as it is.

    Raises:
        CollectiveTypeError: It is on another device, or its library refuses.
    """
    if isinstance(x, _PLAIN):
        return x
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, what)
    try:
        return np.asarray(memoryview(x))
    except (TypeError, ValueError):
        return x  # whatever NumPy makes of it


def as_output(out: Any, what: str) -> Any:
    """Return a caller's `out=` as a NumPy array of the same memory; other objects unchanged.

    Raises:
        CollectiveTypeError: It has no memory that is writable to.
    """
    made = as_numpy(out, f"out= of {what}")
    if made is out or made.flags.writeable:
        return made
    # Older DLPack exports count as read-only, but NumPy's own protocol exports the same memory as writable.
    other = np.asarray(out) if hasattr(out, "__array__") else made
    if not other.flags.writeable or _address(other) != _address(made):
        raise CollectiveTypeError(f"out= of {what} is read-only: {describe_type(out)}")
    return other


def _from_dlpack(x: Any, what: str) -> Any:
    device, number = x.__dlpack_device__() if hasattr(x, "__dlpack_device__") else (_CPU[0], 0)
    if device not in _CPU:
        kind = describe_type(x)
        if is_gpu_array(x):
            raise CollectiveTypeError(f"{what} takes arrays on the CPU only, not {kind}: pass x.get()")
        raise CollectiveTypeError(
            f"{what} cannot take {kind} on device {number} of DLPack's type {int(device)}: copy it to the "
            "CPU, or pass it as a CuPy array with cupy.from_dlpack(x)"
        )
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        refusal = error
    try:
        return _bfloat16(x) if "bfloat16" in str(getattr(x, "dtype", "")) else np.asarray(x)
    except (BufferError, RuntimeError, TypeError, ValueError):
        raise CollectiveTypeError(
            f"{what} cannot make a NumPy array of {describe_type(x)}: {refusal}"
        ) from refusal


def _bfloat16(x: Any) -> Any:
    """Return an array of bfloat16: JAX's know ml_dtypes, PyTorch's can be looked at as integers."""
    torch = __import__("sys").modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return np.from_dlpack(x.view(torch.int16)).view(ml_dtypes.bfloat16)
    return np.asarray(x)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
