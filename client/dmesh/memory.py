"""NumPy arrays whose memory other clients on the same host can read and write directly.

Collectives find out by themselves that an array, or the array that it is a view of, was made here. Large
ones are then neither copied nor exchanged: see docs/shared-memory.md. Where there is nothing to share, arrays
are ordinary ones, and programs need not care: in local mode, without the native core, on systems without such
memory, or where `DMESH_SHARED_MEMORY` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from dmesh.collectives.backends.shm.arrays import Pool
from dmesh.collectives.communicator import Communicator
from dmesh.runtime import context


def empty(shape: int | Sequence[int], dtype: DTypeLike = float, *, shared: bool = False) -> NDArray[Any]:
    """Returns a new array with arbitrary contents, as `numpy.empty` does.

    Args:
        shape: Its shape.
        dtype: Of its elements. Object arrays are never shared.
        shared: Whether its memory is to be shared with clients on the same host.

    Raises:
        NotInitializedError: It is to be shared, and the system has not been initialized.
        SharedMemoryError: There is no more memory to share (`DMESH_SHARED_MEMORY`).
    """
    pool = _pool() if shared else None
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    return np.empty(lengths, dtype) if pool is None else pool.empty(lengths, dtype)


def zeros(shape: int | Sequence[int], dtype: DTypeLike = float, *, shared: bool = False) -> NDArray[Any]:
    """Returns a new array of zeros, as `numpy.zeros` does; see `empty`."""
    if not shared:
        return np.zeros(shape, dtype)
    made = empty(shape, dtype, shared=True)
    made.fill(0)
    return made


def array(x: ArrayLike, dtype: DTypeLike | None = None, *, shared: bool = False) -> NDArray[Any]:
    """Returns a copy of `x` in C order, as `numpy.array` does; see `empty`."""
    if not shared:
        return np.array(x, dtype, order="C")
    source = np.asarray(x, dtype)
    made = empty(source.shape, source.dtype, shared=True)
    made[...] = source
    return made


def _pool() -> Pool | None:
    return context.current().get(Communicator).pool
