"""Speed of flat and hierarchical collectives of several ranks on each of several hosts. Linux, as root.

    python benchmarks/hosts.py                                # 2 hosts of 2 ranks, at full speed
    python benchmarks/hosts.py --rate 1gbit --sizes 1048576,16777216 --kind all_gather

A host is a network namespace and a namespace of process ids, so its ranks share memory with each other and
not with ranks of other hosts. A bridge joins all hosts. Both ways take turns in one run. The time of a call
is that of the slowest rank. The column `of the line` is the time that the network needs for the bytes that
each host must send, divided by the time of the hierarchical call. These bytes are 2 (H - 1) / H of the array
in an all-reduce, and half of that in an all-gather and a reduce-scatter, whose size is that of the array of
all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RATES = {"1gbit": 1e9, "10gbit": 1e10}
NETWORK, BRIDGE = "10.78.0", "dmsw"


def up(hosts: int, rate: str | None) -> None:
    """Makes the namespaces, joined by a bridge in one of their own."""
    down()
    _ip("netns", "add", BRIDGE)
    _ip("-n", BRIDGE, "link", "add", "br0", "type", "bridge")
    _ip("-n", BRIDGE, "link", "set", "br0", "up")
    for host in range(hosts):
        name, port = f"dmh{host}", f"p{host}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", BRIDGE)
        _ip("-n", name, "addr", "add", f"{NETWORK}.{host + 1}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", BRIDGE, "link", "set", port, "master", "br0", "up")
        if rate:
            for where, device in ((name, "eth0"), (BRIDGE, port)):
                shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                command = ["ip", "netns", "exec", where, "tc", "qdisc", "add", "dev", device, *shape]
                subprocess.run(command, check=True)


def down() -> None:
    """Takes the namespaces away that `up` has made."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        if name == BRIDGE or name.startswith("dmh"):
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def rank(kind: str, sizes: list[int], rounds: int, seconds: float) -> None:
    """One rank; rank 0 prints a line for each size."""
    import numpy as np

    import dmesh
    from dmesh.collectives.tuning import LEAST_ROWS, MOST_BYTES, Tuning

    dmesh.initialize_accelerator_system(enable_coordination_service=False)
    world = dmesh.collectives.world()
    groups = {}
    for way, rows in (("flat", MOST_BYTES), ("hierarchical", LEAST_ROWS)):
        world.communicator.tuning = Tuning(rows=rows)
        groups[way] = world.communicator.new_group(world.ranks, way)
        groups[way].barrier()
        assert groups[way].backend("hierarchical") is not None, "the group is not hierarchical"
    for size in sizes:
        rows = np.ones((world.size, size // 4 // world.size), np.float32)
        own = rows[world.rank]
        times: dict[str, list[float]] = {way: [] for way in groups}

        def once(group: Any, rows: Any = rows, own: Any = own) -> float:
            group.barrier()
            began = time.perf_counter()
            match kind:
                case "all_gather":
                    group.all_gather(own, out=rows)
                case "reduce_scatter":
                    group.reduce_scatter(rows, "max", out=own)
                case _:
                    group.all_reduce(rows, "max", out=rows)
            mine = np.array(time.perf_counter() - began)
            return float(group.all_reduce(mine, "max"))

        for turn in range(rounds + 1):
            for way, figures in times.items():
                group = groups[way]
                once(group)
                count = int(group.broadcast(np.array(max(1, min(50, int(seconds / max(once(group), 1e-6)))))))
                batch = [once(group) for _ in range(count)]
                if turn:  # the first round warms up
                    figures.append(statistics.median(batch))
        if dmesh.client_id() == 0:
            print(
                json.dumps({"size": size, **{way: statistics.median(t) for way, t in times.items()}}),
                flush=True,
            )
    dmesh.shutdown_accelerator_system()


def host(number: int, ranks: int, options: list[str]) -> None:
    """Starts the ranks of one host, in whose namespaces this runs; passes rank 0's lines on."""
    started = []
    for place in range(ranks):
        client = number * ranks + place
        environment = {**os.environ, "DTENSOR_CLIENT_ID": str(client)}
        output = None if client == 0 else subprocess.DEVNULL
        command = [sys.executable, __file__, "--role", "rank", *options]
        started.append(subprocess.Popen(command, env=environment, stdout=output))
    statuses = [process.wait() for process in started]
    if any(statuses):
        sys.exit(f"a rank of host {number} failed")


def main() -> None:
    """Makes the hosts, lets them run, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    parser.add_argument("--kind", choices=kinds, default="all_reduce")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks on each host")
    parser.add_argument("--rate", help="speed of the network, in tc's notation; default: unlimited")
    parser.add_argument("--sizes", default="262144,1048576,16777216,67108864", help="sizes in bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds for each way and round")
    parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    passed = ["--sizes", options.sizes, "--rounds", str(options.rounds), "--seconds", str(options.seconds)]
    passed += ["--kind", options.kind]
    if options.role == "rank":
        rank(options.kind, sizes, options.rounds, options.seconds)
        return
    if options.role.startswith("host"):
        host(int(options.role.removeprefix("host")), options.ranks, passed)
        return
    jobs = [f"{NETWORK}.{h + 1}:{4700 + r}" for h in range(options.hosts) for r in range(options.ranks)]
    environment = {
        **os.environ,
        "DTENSOR_JOBS": ",".join(jobs),
        "DTENSOR_JOB_NAME": "worker",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]),
    }
    up(options.hosts, options.rate)
    try:
        processes = []
        for number in range(options.hosts):
            inside = ["ip", "netns", "exec", f"dmh{number}", "unshare", "--pid", "--fork", "--mount-proc"]
            command = [
                sys.executable,
                __file__,
                "--role",
                f"host{number}",
                "--ranks",
                str(options.ranks),
                *passed,
            ]
            processes.append(
                subprocess.Popen([*inside, *command], env=environment, stdout=subprocess.PIPE, text=True)
            )
        texts = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            sys.exit("a host failed")
    finally:
        down()
    bits = RATES.get(options.rate or "")
    share = (2 if options.kind == "all_reduce" else 1) * (options.hosts - 1) / options.hosts
    print("| size | flat | hierarchical | ratio | of the line |\n|---|---|---|---|---|")
    for line in texts[0].splitlines():
        found = json.loads(line)
        needs = f"{8 * share * found['size'] / bits / found['hierarchical']:.0%}" if bits else "-"
        flat, both = found["flat"], found["hierarchical"]
        print(
            f"| {found['size']} | {1e3 * flat:.2f} ms | {1e3 * both:.2f} ms | {both / flat:.2f} | {needs} |"
        )


if __name__ == "__main__":
    main()
