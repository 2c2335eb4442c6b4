"""Time of a small all-reduce of two ranks of one host, by the way it is called: a Markdown table.

    dmesh run -n 2 benchmarks/plans.py

The ways take turns in blocks of 500 calls. The figures are the fastest block's and the median block's, in
microseconds per call. If the machine has other work to do, only the fastest block shows the cost of the
calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import dmesh

CALLS, BLOCKS = 500, 60


def block(call: Callable[[], object]) -> float:
    """Return the microseconds that a call takes."""
    for _ in range(20):
        call()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS * 1e6


def main() -> None:
    """Print the table, on rank 0."""
    dmesh.initialize_accelerator_system()
    group = dmesh.collectives.world()
    if group.rank == 0:
        print("| array | `all_reduce(x, out=y)` | `group.all_reduce(x, out=y)` | `plan()` |")
        print("|---|---|---|---|")
    for size in (8, 1024):
        x, y = np.ones(size // 8), np.empty(size // 8)
        plan = dmesh.collectives.plan_all_reduce(x)
        plan.input[...] = x
        ways: list[Callable[[], object]] = [
            lambda: dmesh.collectives.all_reduce(x, out=y),  # noqa: B023
            lambda: group.all_reduce(x, out=y),  # noqa: B023
            plan,
        ]
        found = [[block(way) for way in ways] for _ in range(BLOCKS)]
        if group.rank == 0:
            cells = [
                f"{min(column):.2f} µs, median {statistics.median(column):.2f}"
                for column in zip(*found, strict=True)
            ]
            print(f"| {size} B | {' | '.join(cells)} |", flush=True)
    dmesh.shutdown_accelerator_system()


if __name__ == "__main__":
    main()
