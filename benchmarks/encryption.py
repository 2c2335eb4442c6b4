"""Cost of encryption between peers: calls over messages and over dedicated connections, with and without TLS.

    python benchmarks/encryption.py                               # all-reduces of 2 ranks
    python benchmarks/encryption.py --call send --sizes 8,65536   # there and back again
    python benchmarks/encryption.py --ranks 4

Each way is a cluster of its own, over loopback, with default settings except for those that select the way.
The clusters take turns within seconds. The table has the medians of the rounds' medians: the time of a call
on rank 0, and the processor time of its process. Needs the extra `security` for the certificates.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WAYS: Mapping[str, Mapping[str, str]] = {
    "messages within TLS": {"DMESH_PEER_TLS": "1", "DMESH_NATIVE": "0"},
    "dedicated within TLS": {"DMESH_PEER_TLS": "1", "DMESH_NATIVE": "1"},
    "dedicated": {"DMESH_NATIVE": "1"},
}
MOST_CALLS, BYTES_IN_A_TURN = 500, 64 << 20


def rank(call: str) -> None:
    """One rank: for each size that it reads it prints the seconds of a call, and of its processor time."""
    import numpy as np

    import dmesh

    dmesh.initialize_accelerator_system(enable_coordination_service=False)
    collectives, me = dmesh.collectives, dmesh.client_id()

    def exchange(x: object) -> None:
        if me == 0:
            collectives.send(x, 1)
        if me <= 1:
            collectives.recv(x, 1 - me, out=x)
        if me == 1:
            collectives.send(x, 0)

    def reduce(x: object) -> None:
        collectives.all_reduce(x, "max", out=x)

    once: Callable[[object], None] = exchange if call == "send" else reduce
    for line in sys.stdin:
        size = int(line)
        x, times = np.ones(size // 4, np.float32), []
        dmesh.barrier()
        used = _processor_seconds()
        for _ in range(max(3, min(MOST_CALLS, BYTES_IN_A_TURN // size))):
            began = time.perf_counter()
            once(x)
            times.append(time.perf_counter() - began)
        print(json.dumps([statistics.median(times), (_processor_seconds() - used) / len(times)]), flush=True)
    dmesh.shutdown_accelerator_system()


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Way:
    """The processes of one cluster."""

    def __init__(self, ranks: int, call: str, environment: Mapping[str, str]) -> None:
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
        jobs = ",".join(f"127.0.0.1:{sock.getsockname()[1]}" for sock in held)
        for sock in held:
            sock.close()
        command = [sys.executable, __file__, "--role", "rank", "--call", call]
        common = {**os.environ, **environment, "DTENSOR_JOBS": jobs, "DTENSOR_JOB_NAME": "worker"}
        self._processes = [
            subprocess.Popen(
                command,
                env={**common, "DTENSOR_CLIENT_ID": str(client)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for client in range(ranks)
        ]

    def measure(self, size: int) -> tuple[float, float]:
        """Give the ranks their turn; return rank 0's figures."""
        for process in self._processes:
            assert process.stdin is not None
            print(size, file=process.stdin, flush=True)
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(answers):
            sys.exit("a rank failed")
        seconds, processor = json.loads(answers[0])
        return seconds, processor

    def end(self) -> None:
        """Let the ranks end."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()


def main() -> None:
    """Starts the clusters, gives them their turns, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", default="all_reduce", choices=["all_reduce", "send"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="8,1024,65536,1048576,4194304,16777216", help="sizes in bytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "rank":
        rank(options.call)
        return
    with tempfile.TemporaryDirectory() as directory:
        tls = Path(directory) / "tls"
        for command in (["init", str(tls)], ["issue", str(tls), "--name", "peer", "--host", "127.0.0.1"]):
            run = [sys.executable, "-m", "dmesh", "certs", *command]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        common = {
            "DMESH_TOKEN": "t" * 32,
            "DMESH_SHARED_MEMORY": "0",
            "DMESH_TUNING": "0",
            "DMESH_TLS_CA": str(tls / "ca.pem"),
            "DMESH_TLS_CERT": str(tls / "peer.pem"),
            "DMESH_TLS_KEY": str(tls / "peer.key"),
        }
        ways = {name: Way(options.ranks, options.call, {**common, **own}) for name, own in WAYS.items()}
        print("| size |", " | ".join(f"{name} | processor" for name in ways), "|")
        print("|---" * (2 * len(ways) + 1) + "|")
        for size in map(int, options.sizes.split(",")):
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for turn in range(options.rounds + 1):
                for name, way in ways.items():
                    figures = way.measure(size)
                    if turn:  # the first round warms up
                        found[name].append(figures)
            cells = [
                f"{1e6 * statistics.median(column):.0f} µs"
                for rounds in found.values()
                for column in zip(*rounds, strict=True)
            ]
            print(f"| {size} |", " | ".join(cells), "|", flush=True)
        for way in ways.values():
            way.end()


if __name__ == "__main__":
    main()
