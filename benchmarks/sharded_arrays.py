"""Speed of sharded arrays beside NumPy: the cost of dispatch, products, sums and relayouts.

    python benchmarks/sharded_arrays.py                 # dispatch, on 1 and 4 devices of one client
    OPENBLAS_NUM_THREADS=1 dmesh run -n 2 benchmarks/sharded_arrays.py   # and the gain from two clients

Figures are medians of interleaved runs in one process: what is compared was measured in turn.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import dmesh
from dmesh import UNSHARDED, Layout


def interleaved(runs: int, repeat: int, **functions: Callable[[], Any]) -> dict[str, float]:
    """Returns the median time of each function, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(runs):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(repeat):
                function()
            times[name].append((time.perf_counter() - start) / repeat * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def dispatch(devices: int) -> dict[str, float]:
    """Returns what an operation on small arrays takes longer than NumPy's on the same blocks."""
    mesh = dmesh.create_mesh([("x", devices)], devices=[f"CPU:{i}" for i in range(devices)])
    plain, layout = np.ones(8), Layout(["x"], mesh)
    a, b = dmesh.ones(8 * devices, layout=layout), dmesh.ones(8 * devices, layout=layout)
    row = dmesh.ones(8, layout=Layout([UNSHARDED], mesh))
    matrix = dmesh.ones((8, 8), layout=Layout(["x", UNSHARDED], mesh))
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "a + b": (lambda: a + b, lambda: plain + plain),
        "a * 2.0": (lambda: a * 2.0, lambda: plain * 2.0),
        "np.exp(a)": (lambda: np.exp(a), lambda: np.exp(plain)),
        "matrix + row": (lambda: matrix + row, lambda: plain + plain),
        "np.sum(a)": (lambda: np.sum(a), lambda: np.sum(plain)),
    }
    found = {}
    for name, (mine, numpys) in pairs.items():
        taken = interleaved(41, 200, mine=mine, numpys=numpys)
        found[f"{name}, {devices} devices"] = round(taken["mine"] - devices * taken["numpys"], 2)
    return found


def gains() -> dict[str, float]:
    """Returns how many times as fast as NumPy alone, or a local copy, the clients are."""
    mesh = dmesh.create_distributed_mesh([("x", dmesh.size())])
    rows, columns, whole = (
        Layout(["x", UNSHARDED], mesh),
        Layout([UNSHARDED, "x"], mesh),
        Layout.replicated(mesh, 2),
    )
    a = np.ones((2048, 2048), np.float32)
    big = np.ones((4096, 4096))  # 128 MiB
    x, y = dmesh.copy_to_mesh(a, rows), dmesh.copy_to_mesh(a, whole)
    z = dmesh.copy_to_mesh(big, rows)
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "matmul 2048, rows": (lambda: x @ y, lambda: a @ a),
        "a + b, 128 MiB": (lambda: z + z, lambda: big + big),
        "sum, 128 MiB": (lambda: float(z.sum()), lambda: big.sum()),
        "rows to columns, 128 MiB": (lambda: dmesh.relayout(z, columns), big.copy),
        "rows to replicated, 128 MiB": (lambda: dmesh.relayout(z, whole), big.copy),
    }
    found = {}
    for name, (mine, alone) in cases.items():
        taken = {"mine": [], "alone": []}  # type: dict[str, list[float]]
        for _ in range(7):
            dmesh.barrier()
            start = time.perf_counter()
            mine()
            taken["mine"].append(time.perf_counter() - start)
            dmesh.barrier()
            if dmesh.rank() == 0:  # NumPy alone, while the others wait
                start = time.perf_counter()
                alone()
                taken["alone"].append(time.perf_counter() - start)
        if dmesh.rank() == 0:
            found[name] = round(statistics.median(taken["alone"]) / statistics.median(taken["mine"]), 2)
    return found


def main() -> None:
    """Measures, and prints a line of JSON."""
    dmesh.initialize_accelerator_system("CPU", num_logical_cpu_devices=1 if dmesh.num_clients() > 1 else 4)
    result: dict[str, Any] = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "cores": os.cpu_count(),
    }
    result["threads"] = os.environ.get("OPENBLAS_NUM_THREADS", "all")
    if dmesh.num_clients() > 1:
        result |= {"clients": dmesh.num_clients(), "times as fast": gains()}
    else:
        result["microseconds over NumPy"] = {**dispatch(1), **dispatch(4)}
    if dmesh.client_id() == 0:
        print(json.dumps(result, indent=2), flush=True)
    dmesh.shutdown_accelerator_system()


if __name__ == "__main__":
    main()
