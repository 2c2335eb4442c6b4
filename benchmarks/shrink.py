"""Time from `kill -9` of a rank to the next result of the survivors: a Markdown table.

    python benchmarks/shrink.py --ranks 8 --runs 3

In each run, all ranks repeat an all-reduce of 1 MB, while one after the other is killed, until two are left.
Each survivor notes when its call fails, when `shrink` has returned the new group, and when the all-reduce in
that group has the right result. The table has medians and maxima over the kills, of the last survivor each
time, from the moment before the signal is sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

WAYS = {
    "shared memory": {},
    "TCP": {"DMESH_SHARED_MEMORY": "0"},
    "messages": {"DMESH_NATIVE": "0"},
}
ELEMENTS = 1 << 17
COLUMNS = ("the call fails", "new group", "next result")


def survive() -> None:
    """Go on with the survivors until this process is killed, or told to end; print the times."""
    import numpy as np

    import dmesh

    dmesh.initialize_accelerator_system()
    group = dmesh.collectives.world()
    x = np.full(ELEMENTS, 1.0)
    group.barrier()
    print("ready", flush=True)
    while group.size > 2:
        try:
            while True:
                dmesh.collectives.all_reduce(x, group=group)
        except dmesh.errors.PeerLostError:
            times = [time.monotonic()]
        group = dmesh.collectives.shrink(group)
        times.append(time.monotonic())
        total = dmesh.collectives.all_reduce(x, group=group)
        times.append(time.monotonic())
        assert total[-1] == group.size
        print(json.dumps(times), flush=True)
    dmesh.shutdown_accelerator_system()


@contextlib.contextmanager
def started(arguments: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process, which is killed in the end."""
    process = subprocess.Popen(
        arguments,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a process has ended too early"
    return line


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in bound]


def run(ranks: int, environ: dict[str, str], chance: random.Random) -> list[list[float]]:
    """Return for each kill the seconds to each of `COLUMNS`, of the last survivor."""
    serve = [sys.executable, "-m", "dmesh", "serve", "--memory"]
    with contextlib.ExitStack() as stack:
        server = started([*serve, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"], {})
        address = said(stack.enter_context(server)).split("grpc=")[1].split()[0]
        jobs = ",".join(f"127.0.0.1:{port}" for port in free_ports(ranks))
        shared = {"DTENSOR_JOBS": jobs, "DMESH_COORDINATOR": address, **environ}
        command = [sys.executable, __file__, "--survive"]
        clients = [
            stack.enter_context(started(command, {**shared, "DTENSOR_CLIENT_ID": str(rank)}))
            for rank in range(ranks)
        ]
        for client in clients:
            assert said(client) == "ready\n"
        found = []
        while len(clients) > 2:
            time.sleep(0.2)  # all are in the middle of their calls
            victim = clients.pop(chance.randrange(len(clients)))
            killed = time.monotonic()
            victim.send_signal(signal.SIGKILL)
            times = [json.loads(said(client)) for client in clients]
            found.append([max(column) - killed for column in zip(*times, strict=True)])
        return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--survive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.survive:
        survive()
        return
    chance = random.Random(arguments.seed)
    print(f"| carried by | kills | {' | '.join(COLUMNS)} |")
    print(f"|---|---|{'---|' * len(COLUMNS)}")
    for way, environ in WAYS.items():
        rows = [row for _ in range(arguments.runs) for row in run(arguments.ranks, environ, chance)]
        cells = [
            f"{statistics.median(column) * 1e3:.0f} ms, at most {max(column) * 1e3:.0f}"
            for column in zip(*rows, strict=True)
        ]
        print(f"| {way} | {len(rows)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
