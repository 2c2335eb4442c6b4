"""Time of nonblocking sends and receives, beside blocking ones and `permute`.

    python benchmarks/transfers.py               # through shared memory
    python benchmarks/transfers.py --tcp         # over TCP, as between hosts

With two ranks: a pair of blocking `send` and `recv` of 8 B, and the same pair with `async_op=True`. With
four ranks: a halo step, in which each rank sends an array to both neighbors in a ring, by nonblocking
transfers and by two calls of `permute`. All figures are medians of rounds that take turns, in microseconds.
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
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALLS = 200


def rank(rounds: int, nbytes: int) -> None:
    """Measure on one rank; rank 0 prints its figures."""
    import numpy as np

    import dmesh

    dmesh.initialize_accelerator_system(enable_coordination_service=False)
    group = dmesh.collectives.world()
    me, size = group.rank, group.size
    x = np.ones(nbytes // 8)
    left, right = (me - 1) % size, (me + 1) % size

    def blocking() -> None:
        for send in (me == 0, me != 0):
            if send:
                group.send(x, right)
            else:
                group.recv(x, right)

    def nonblocking() -> None:
        sent, got = group.send(x, right, async_op=True), group.recv(x, left, async_op=True)
        got.result()
        sent.result()

    def halo() -> None:
        futures = [group.send(x, other, async_op=True) for other in (left, right)]
        futures += [group.recv(x, other, async_op=True) for other in (left, right)]
        for future in futures:
            future.result()

    def permute() -> None:
        group.permute(x, [(at, (at + 1) % size) for at in range(size)])
        group.permute(x, [(at, (at - 1) % size) for at in range(size)])

    steps: tuple[Callable[[], None], ...] = (blocking, nonblocking) if size == 2 else (halo, permute)
    figures: dict[str, list[float]] = {step.__name__: [] for step in steps}
    for _ in range(rounds):
        for step in steps:
            step()
            group.barrier()
            began = time.perf_counter()
            for _ in range(CALLS):
                step()
            figures[step.__name__].append(1e6 * (time.perf_counter() - began) / CALLS)
    if me == 0:
        print(json.dumps({name: statistics.median(times) for name, times in figures.items()}))
    dmesh.shutdown_accelerator_system()


def run(size: int, rounds: int, nbytes: int, tcp: bool) -> dict[str, float]:
    """Start the ranks; return the medians."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    jobs = ",".join(f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes)
    for probe in probes:
        probe.close()
    environment = {**os.environ, "DTENSOR_JOBS": jobs, "DTENSOR_JOB_NAME": "worker"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "client"), os.environ.get("PYTHONPATH", "")])
    if tcp:
        environment["DMESH_SHARED_MEMORY"] = "0"
    command = [sys.executable, __file__, "--rank", "--rounds", str(rounds), "--bytes", str(nbytes)]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "DTENSOR_CLIENT_ID": str(at)}, stdout=subprocess.PIPE, text=True
        )
        for at in range(size)
    ]
    texts = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit("a rank failed")
    figures: dict[str, float] = json.loads(texts[0].splitlines()[-1])
    return figures


def main() -> None:
    """Measure both comparisons, and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bytes", type=int, default=8, help="size of the array")
    parser.add_argument("--tcp", action="store_true", help="use TCP instead of shared memory")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rounds, options.bytes)
        return
    for size, new, old in ((2, "nonblocking", "blocking"), (4, "halo", "permute")):
        times = run(size, options.rounds, options.bytes, options.tcp)
        shares = f"{times[new] / times[old]:.2f} times {old}"
        print(f"{size} ranks: {old} {times[old]:.1f} us, {new} {times[new]:.1f} us: {shares}")


if __name__ == "__main__":
    main()
