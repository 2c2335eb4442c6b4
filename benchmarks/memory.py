"""Speed of memory, and how close the collectives of one host come to it.

    python benchmarks/memory.py                                              # the speed of memory
    python benchmarks/memory.py --results benchmarks/results/collectives.json   # and dmesh's share of it

In the model, all ranks move a given number of bytes at the same time, and do nothing else. With arrays in
shared memory an all-reduce of S bytes on W ranks reads S/W of W arrays and writes S/W of W arrays; an
all-gather and an all-to-all read S and write S; a reduce-scatter reads S and writes S/W; the receivers of a
broadcast and of a transfer read S and write S. NumPy measures the speed: each of W processes copies an array
of S bytes, again and again, all at the same time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

SIZES = (1 << 20, 16 << 20, 64 << 20, 256 << 20)


def moved(op: str, size: int, world: int) -> float:
    """Bytes that each rank reads and writes in an operation whose larger buffer has `size` bytes."""
    return size * (1 + 1 / world) if op == "reduce_scatter" else 2.0 * size


def _copy(size: int, rounds: int, barrier: Barrier, times: multiprocessing.Queue[float]) -> None:
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    taken = []
    for _ in range(rounds):
        barrier.wait()
        began = time.perf_counter()
        for _ in range(4):
            np.copyto(target, source)
        taken.append((time.perf_counter() - began) / 4)
    times.put(statistics.median(taken))


def bandwidth(size: int, world: int) -> float:
    """Returns the bytes that one of `world` processes reads and writes in a second while all copy."""
    context = multiprocessing.get_context("spawn")
    barrier, times = context.Barrier(world), context.Queue()
    rounds = min(200, max(5, (2 << 30) // size))
    workers = [context.Process(target=_copy, args=(size, rounds, barrier, times)) for _ in range(world)]
    for worker in workers:
        worker.start()
    taken = max(times.get() for _ in workers)
    for worker in workers:
        worker.join()
    return 2 * size / float(taken)


def main() -> None:
    """Prints what memory can do, and what dmesh reaches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--results", type=Path, help="file that collectives.py wrote")
    options = parser.parse_args()
    results = json.loads(options.results.read_text())["results"] if options.results else []
    for world in map(int, options.worlds.split(",")):
        for size in SIZES:
            speed = bandwidth(size, world)
            print(
                f"{world} processes on {os.cpu_count()} cores, {size >> 20} MB: {speed / 1e9:.1f} GB/s each"
            )
            for result in results:
                if (result["world"], result["size"], result["backend"]) != (world, size, "dmesh-shared"):
                    continue
                limit = moved(result["op"], size, world) / speed * 1e6
                took = result["median_us"]
                print(f"    {result['op']}: {took:.0f} us, model {limit:.0f} us: {limit / took:.0%}")


if __name__ == "__main__":
    main()
