"""Collectives of arrays on GPUs: `cupy.ndarray` in, `cupy.ndarray` out, through NCCL.

The members compare their calls over the group's other backends first, and exchange the id of their NCCL
communicator there. The data never leaves the GPUs. See docs/gpu.md.

| module | contents |
|---|---|
| `arrays` | checks of CuPy arrays, copies and memory on the caller's CUDA stream |
| `reductions` | the reductions that NCCL has, by op and dtype |
| `backend` | agreement of the members, then the operation in NCCL |
| `communicator` | an NCCL communicator and the thread that uses it |
"""

from __future__ import annotations

import sys

__all__ = ["is_gpu_array"]


def is_gpu_array(x: object) -> bool:
    """Return whether an object is a CuPy array.

    This does not import CuPy: a program that has not imported it has no such arrays.
    """
    cupy = sys.modules.get("cupy")
    kind = getattr(cupy, "ndarray", None)  # missing while another thread is importing it
    return kind is not None and isinstance(x, kind)
