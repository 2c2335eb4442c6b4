"""Threads for the devices of one client: an operation's kernel on several large blocks concurrently."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import lru_cache
from itertools import count
from typing import Any

from dmesh.arrays.grid import Grid

LARGE = 1 << 20
"""Bytes of a block from which a thread saves more time than it costs."""


_blas_threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
SERIAL_BLAS = _blas_threads.partition(",")[0].strip() == "1"
"""Whether OpenBLAS works in the caller's thread alone; it reads these variables when it is loaded."""


def each(
    kernel: Callable[..., Any], rows: Sequence[Sequence[Any]], grid: Grid, nbytes: int, *, blas: bool = False
) -> list[Any]:
    """Return `kernel(*row)` for each row: in threads if the blocks are large, else one after the other.

    Results and errors do not depend on the threads. They inherit the context of the caller, and with it
    `np.errstate`. NumPy releases the interpreter's lock in most of its loops.

    Args:
        kernel: Takes the blocks of one device. Must not depend on the order of the calls.
        rows: Blocks of each device.
        grid: The mesh, which says how many threads this client may have.
        nbytes: Size of the largest block of operands and results.
        blas: Whether the kernel's time goes to the BLAS library. One that has threads of its own does not get
            these as well: it would work on one block at a time anyway, and several versions of OpenBLAS mix
            the results of calls that several threads make at once.

    Raises:
        BaseException: The error of the first row that has one.
    """
    threads = min(len(rows), grid.threads) if nbytes >= LARGE and (SERIAL_BLAS or not blas) else 1
    if threads < 2:
        return [kernel(*row) for row in rows]
    results: list[Any] = [None] * len(rows)
    errors: dict[int, BaseException] = {}
    numbers = count()  # next() is atomic, so one thread takes each row, and rows begin in order

    def work() -> None:
        while not errors and (at := next(numbers)) < len(rows):
            try:
                results[at] = kernel(*rows[at])
            except BaseException as error:  # noqa: BLE001 -- raised in the caller's thread
                errors[at] = error

    helpers = [_pool().submit(copy_context().run, work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():  # a task that no thread has started, because all are busy, is dropped
            helper.result()
    if errors:
        raise errors[min(errors)]
    return results


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(256, thread_name_prefix="dmesh-device")  # a thread starts if none is idle


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
