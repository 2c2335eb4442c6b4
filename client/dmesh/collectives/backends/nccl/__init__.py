"""Collectives of arrays on GPUs: `cupy.ndarray` in, `cupy.ndarray` out, through NCCL; see docs/gpu.md.

`arrays` checks CuPy arrays and knows NCCL's reductions; `backend` lets the members agree on each call over
the group's other backends, and then carries it out in NCCL.
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
