"""Speed of the native reductions beside a copy, and beside the NumPy calls that they replace.

    python -m benchmarks.kernels [--ops sum:float32:2:1 ...] [--seconds 0.03]

Each line is a case: the operation, the numbers of inputs and outputs, and the size of one array, then GB/s
of the kernel for this CPU, of the same with outputs written past the caches, of the kernel for every CPU,
and of NumPy. Copies follow, from the begin of a page to 16 bytes after one, as large arrays lie beside
mapped memory: the C library's, and the project's own, into the caches and past them. Bytes read and bytes
written count once each. The figures are the best of many calls, with arrays in the caches where they fit:
the cost of an undisturbed call.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tests.native.library import STREAM, Kernels, build

from dmesh.collectives.reduction import resolve
from dmesh.collectives.request import Reduction

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
CASES = [
    "sum:float32:2:1",
    "sum:float32:2:2",
    "sum:float32:4:4",
    "mean:float64:3:1",
    "max:float32:2:1",
    "sum:float16:2:1",
    "sum:float16:4:4",
    "sum:bfloat16:2:1",
    "sum:int8:2:1",
    "prod:complex64:2:1",
]


def best(call: Callable[[], object], seconds: float) -> float:
    """The shortest time of a call."""
    call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return min(times)


def with_numpy(
    reduction: Reduction, inputs: list[NDArray[Any]], outputs: list[NDArray[Any]], accumulator: NDArray[Any]
) -> None:
    """What the collectives do without the kernels."""
    for number, array in enumerate(inputs):
        reduction.fold(array, accumulator, number == 0)
    reduction.finish(accumulator, outputs[0], len(inputs))
    for other in outputs[1:]:
        np.copyto(other, outputs[0])


def measure(kernels: Kernels, case: str, size: int, seconds: float) -> list[float]:
    """GB/s of each way of reducing."""
    op, name, ways, outs = case.split(":")
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    reduction, count = resolve(op, dtype), size // dtype.itemsize
    inputs = [np.ones(count, dtype) for _ in range(int(ways))]
    outputs = [np.ones(count, reduction.result) for _ in range(int(outs))]
    # Where it can, Reduction folds into the result, as the collectives let it.
    accumulator = outputs[0]
    if reduction.accumulator != reduction.result:
        accumulator = np.ones(count, reduction.accumulator)
    best_isa, baseline = kernels.find(op, dtype), kernels.find(op, dtype, "ISA_BASELINE")
    assert best_isa is not None
    assert baseline is not None
    calls = [
        best_isa.prepare(inputs, outputs, count),
        best_isa.prepare(inputs, outputs, count, STREAM),
        baseline.prepare(inputs, outputs, count),
        lambda: with_numpy(reduction, inputs, outputs, accumulator),
    ]
    octets = sum(array.nbytes for array in (*inputs, *outputs))
    return [octets / best(call, seconds) / 1e9 for call in calls]


def at(size: int, offset: int) -> NDArray[Any]:
    """Bytes that start so far behind the begin of a page."""
    memory = np.ones(size + (2 << 12), np.uint8)
    start = -memory.ctypes.data % (1 << 12) + offset
    return memory[start : start + size]


def copies(kernels: Kernels, size: int, seconds: float) -> list[float]:
    """GB/s of copying."""
    source, target = at(size, 0), at(size, 16)
    calls = [
        lambda: np.copyto(target, source),
        kernels.prepare_copy(target, source),
        kernels.prepare_copy(target, source, stream=True),
    ]
    return [2 * size / best(call, seconds) / 1e9 for call in calls]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="*", default=CASES, metavar="OP:DTYPE:INPUTS:OUTPUTS")
    parser.add_argument("--seconds", type=float, default=0.03, help="seconds for each figure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        kernels = Kernels(build(Path(directory) / "kernels.so", "-O3", "-fPIC", "-shared"))
    columns = ("KiB", "kernel", "stream", "baseline", "NumPy", "memcpy", "copy", "past")
    print(f"{'GB/s':<20}{columns[0]:>7}" + "".join(f"{column:>9}" for column in columns[1:]))
    for size in SIZES:
        copied = copies(kernels, size, arguments.seconds)
        for case in arguments.ops:
            figures = measure(kernels, case, size, arguments.seconds) + copied
            print(f"{case:<20}{size >> 10:>7}" + "".join(f"{figure:>9.1f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
