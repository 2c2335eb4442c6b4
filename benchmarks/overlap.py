"""Share of an asynchronous all-reduce that hides behind a matrix product that takes equally long.

    python benchmarks/overlap.py                 # through shared memory
    python benchmarks/overlap.py --tcp           # over TCP, as between hosts
    python benchmarks/overlap.py --mb 16 --rounds 20
    python benchmarks/overlap.py --calls 8       # the array in 8 parts, whose calls are all under way at once

There are two ranks: rank 0 computes and communicates, rank 1 only communicates. NumPy computes in one
thread. The printed share is (communication + product - both at once) divided by the shorter of the two, for
a product that takes about as long as the communication alone: 100 % is hidden completely, 0 % is one after
the other. It is measured in two settings:

- *one core is free*: the product has one core, and all communication the other one, also when it is measured
  alone.
- *shared*: threads run where the scheduler puts them, so the communication alone has both cores. In shared
  memory it keeps both of them busy, and with the product there is work for three cores on two: at best 50 %
  of communication that is bound by computing can hide.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future

    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def rank(number: int, megabytes: int, calls: int, rounds: int, free: tuple[int, int] | None) -> None:
    """One rank; rank 0 prints its figures. `free`: the core for the product, and the one for all else."""
    if free is not None:
        os.sched_setaffinity(0, {free[1]})  # threads that are started later inherit it

    import numpy as np

    import dmesh

    dmesh.initialize_accelerator_system(enable_coordination_service=False)
    group = dmesh.collectives.world()
    parts = np.array_split(np.ones(megabytes * 2**20 // 4, np.float32), calls)

    def begin() -> list[Future[NDArray[Any]]]:
        return [group.all_reduce(part, "max", out=part, async_op=True) for part in parts]

    def end(futures: list[Future[NDArray[Any]]]) -> None:
        for future in futures:
            future.result()

    def communicate() -> float:
        group.barrier()
        began = time.perf_counter()
        end(begin())
        return time.perf_counter() - began

    def multiply(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> float:
        began = time.perf_counter()
        np.matmul(a, b, out=c)
        return time.perf_counter() - began

    for _ in range(3):
        communicate()
    alone = statistics.median(communicate() for _ in range(rounds))
    if free is not None and number == 0:
        os.sched_setaffinity(0, {free[0]})  # this thread alone: the one that communicates runs already
    side = 256
    while number == 0:
        a, b = np.ones((side, side), np.float32), np.ones((side, side), np.float32)
        c = np.empty_like(a)
        product = min(multiply(a, b, c) for _ in range(3))
        if product >= alone:
            break
        side = max(side + 32, int(side * min(2.0, (alone / product) ** (1 / 3))))
    figures: dict[str, list[float]] = {"communication": [], "product": [], "both": []}
    for _ in range(rounds):  # by turns, so that what else the machine does strikes all three
        figures["communication"].append(communicate())
        if number == 0:
            multiply(a, b, c)  # both measurements of it find its matrices in the caches
            figures["product"].append(multiply(a, b, c))
        group.barrier()
        began = time.perf_counter()
        futures = begin()
        if number == 0:
            multiply(a, b, c)
        end(futures)
        figures["both"].append(time.perf_counter() - began)
    if number == 0:
        print(json.dumps(figures))
    dmesh.shutdown_accelerator_system()


def run(options: argparse.Namespace, cores: str) -> dict[str, list[float]]:
    """Starts both ranks; returns the seconds that rank 0 took in each round."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    jobs = ",".join(f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)
    for probe in probes:
        probe.close()
    environment = {
        **os.environ,
        **dict.fromkeys(THREADS, "1"),
        "DTENSOR_JOBS": jobs,
        "DTENSOR_JOB_NAME": "worker",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]),
    }
    if options.tcp:
        environment["DMESH_SHARED_MEMORY"] = "0"
    command = [
        sys.executable,
        __file__,
        "--mb",
        str(options.mb),
        "--calls",
        str(options.calls),
        "--rounds",
        str(options.rounds),
        "--free",
        cores,
    ]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(number)],
            env={**environment, "DTENSOR_CLIENT_ID": str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    texts = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit("a rank failed")
    figures: dict[str, list[float]] = json.loads(texts[0].splitlines()[-1])
    return figures


def main() -> None:
    """Measures both settings, and says what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=64, help="size of the array, MiB")
    parser.add_argument("--calls", type=int, default=1, help="asynchronous calls into which it is divided")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tcp", action="store_true", help="use TCP instead of shared memory")
    parser.add_argument("--json", action="store_true", help="also print all figures as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--free", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        computes, communicates = map(int, options.free.split(",")) if options.free else (-1, -1)
        free = (computes, communicates) if options.free else None
        rank(options.rank, options.mb, options.calls, options.rounds, free)
        return
    way = "over TCP" if options.tcp else "through shared memory"
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    settings = {"shared": ""}
    if len(cores) > 1:
        settings = {"one core is free": f"{cores[0]},{cores[1]}", **settings}
    for name, cores_of in settings.items():
        figures = run(options, cores_of)
        alone, product, both = (
            statistics.median(figures[what]) for what in ("communication", "product", "both")
        )
        hidden = (alone + product - both) / min(alone, product)
        print(
            f"{name}: all-reduce of {options.mb} MiB in {options.calls} calls {way}: {1e3 * alone:.1f} ms; "
            f"product: {1e3 * product:.1f} ms; both at once: {1e3 * both:.1f} ms; hidden: {hidden:.0%}"
        )
        if options.json:
            print(json.dumps({"setting": name, **figures}))


if __name__ == "__main__":
    main()
