"""Speed of all-reduces by number of streams, on networks that limit each TCP connection. Linux, as root.

    python benchmarks/streams.py                              # 250 Mbit/s for each connection
    python benchmarks/streams.py --rate 100mbit --sizes 16777216
    python benchmarks/streams.py --interfaces 2               # 250 Mbit/s for each interface

A host is a network namespace. Both ends of the link between the hosts distribute their packets to 256
queues, by the ephemeral port of the connection. Each queue has the given rate (`htb`, `u32`), like a cloud's
network that limits each flow. With several interfaces, each interface has the rate for all of its
connections; one interface is compared with all of them, with as many streams as there are interfaces.
Numbers of streams, or of interfaces, take turns in one run. The time of a call is that of the slowest rank.
This machine's processors do all the work: at rates that they cannot shape, more streams are not faster.
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
NETWORK, HOSTS, QUEUES = "10.79", ("dmst0", "dmst1"), 256


def up(rate: str, interfaces: int) -> None:
    """Makes the namespaces, joined by as many links as each has interfaces."""
    down()
    for name in HOSTS:
        _run("ip", "netns", "add", name)
    first, second = HOSTS
    for at in range(interfaces):
        ends = f"add eth{at} type veth peer name eth{at} netns {second}".split()
        _run("ip", "-n", first, "link", *ends)
        for host, name in enumerate(HOSTS):
            _run("ip", "-n", name, "addr", "add", f"{NETWORK}.{at}.{host + 1}/24", "dev", f"eth{at}")
            _run("ip", "-n", name, "link", "set", f"eth{at}", "up")
            if interfaces > 1:
                shape = f"htb rate {rate} burst 64kb cburst 64kb quantum 60000"
                for line in (
                    f"qdisc add dev eth{at} root handle 1: htb default 1",
                    f"class add dev eth{at} parent 1: classid 1:1 {shape}",
                    f"qdisc add dev eth{at} parent 1:1 pfifo limit 1000",
                ):
                    _run("ip", "netns", "exec", name, "tc", *line.split())
    for host, name in enumerate(HOSTS):
        _run("ip", "-n", name, "link", "set", "lo", "up")
        if interfaces > 1:
            continue
        # The first host dials. Ephemeral ports are even, or odd, by preference: the lowest bit tells little.
        mask = "0x01fe0000" if host == 0 else "0x000001fe"
        table = "filter add dev eth0 parent 1: prio 1 protocol ip u32"
        lines = ["qdisc add dev eth0 root handle 1: htb default 0"]
        for queue in range(QUEUES):
            shape = f"htb rate {rate} burst 64kb cburst 64kb quantum 60000"
            lines.append(f"class add dev eth0 parent 1: classid 1:{queue + 1:x} {shape}")
            lines.append(f"qdisc add dev eth0 parent 1:{queue + 1:x} pfifo limit 1000")
        lines.append("filter add dev eth0 parent 1: prio 1 handle 2: protocol ip u32 divisor 256")
        for queue in range(QUEUES):
            every = "match u32 0 0"
            lines.append(f"{table} ht 2:{queue:x}: {every} flowid 1:{queue + 1:x}")
        lines.append(f"{table} ht 800: match ip protocol 6 0xff hashkey mask {mask} at 20 link 2:")
        batch = "\n".join(lines) + "\n"
        command = ["ip", "netns", "exec", name, "tc", "-batch", "-"]
        subprocess.run(command, input=batch, text=True, check=True)


def down() -> None:
    """Takes the namespaces away that `up` has made."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    for name in HOSTS:
        if name in names:
            _run("ip", "netns", "del", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def rank(sizes: list[int], streams: list[int], interfaces: int, rounds: int, calls: int) -> None:
    """One rank; rank 0 prints a line for each size."""
    import numpy as np

    import dmesh
    from dmesh.collectives.tuning import Tuning

    dmesh.initialize_accelerator_system(enable_coordination_service=False)
    world = dmesh.collectives.world()
    connector: Any = world.communicator.transport.connector
    groups, addresses = {}, connector.addresses
    assert interfaces == 1 or len(addresses) == interfaces, "this host does not use all interfaces"
    for count in streams:
        world.communicator.tuning = Tuning(streams=max(count, interfaces))
        if interfaces > 1:
            connector.addresses = addresses[:count]
        groups[count] = world.communicator.new_group(world.ranks, f"{count} streams")
        groups[count].barrier()
        assert groups[count].endpoint.streams == max(count, interfaces), (
            "the group has no dedicated connections"
        )
    for size in sizes:
        x = np.ones(size // 4, np.float32)
        times: dict[int, list[float]] = {count: [] for count in groups}

        def once(group: Any, x: Any = x) -> float:
            group.barrier()
            began = time.perf_counter()
            group.all_reduce(x, "max", out=x)
            mine = np.array(time.perf_counter() - began)
            return float(group.all_reduce(mine, "max"))

        for turn in range(rounds + 1):
            for count, figures in times.items():
                batch = [once(groups[count]) for _ in range(calls)]
                if turn:  # the first round warms up
                    figures.append(statistics.median(batch))
        if dmesh.client_id() == 0:
            found = {str(count): statistics.median(figures) for count, figures in times.items()}
            print(json.dumps({"size": size, "seconds": found}), flush=True)
    dmesh.shutdown_accelerator_system()


def main() -> None:
    """Makes the hosts, lets them run, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="250mbit", help="speed of each connection, in tc's notation")
    parser.add_argument("--sizes", default="16777216,67108864", help="sizes in bytes")
    parser.add_argument("--streams", default="1,2,4", help="numbers of streams to compare")
    parser.add_argument("--interfaces", type=int, default=1, help="of a host, to compare in place of streams")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3, help="calls for each size and round")
    parser.add_argument("--role", default="main", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    streams = [int(count) for count in options.streams.split(",")]
    if options.interfaces > 1:
        streams = [1, options.interfaces]
    if options.role == "rank":
        rank(sizes, streams, options.interfaces, options.rounds, options.calls)
        return
    environment = {
        **os.environ,
        "DTENSOR_JOBS": ",".join(f"{NETWORK}.0.{host + 1}:4700" for host in range(len(HOSTS))),
        "DTENSOR_JOB_NAME": "worker",
        "DMESH_SHARED_MEMORY": "0",  # both are in one namespace of process ids
        "DMESH_INTERFACES": ",".join(
            f"eth{at}" for at in range(options.interfaces) if options.interfaces > 1
        ),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]),
    }
    passed = [
        f"--{name}={getattr(options, name)}" for name in ("sizes", "streams", "interfaces", "rounds", "calls")
    ]
    up(options.rate, options.interfaces)
    try:
        processes = []
        for host, name in enumerate(HOSTS):
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--role", "rank", *passed]
            own = {**environment, "DTENSOR_CLIENT_ID": str(host)}
            processes.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True))
        texts = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            sys.exit("a host failed")
    finally:
        down()
    others, what = streams[1:], "streams" if options.interfaces == 1 else "interfaces"
    print(
        "| size |",
        " | ".join(f"{count} {what} | ratio" for count in streams).replace(" | ratio", "", 1),
        "|",
    )
    print("|---" * (len(streams) + len(others) + 1) + "|")
    for line in texts[0].splitlines():
        found = json.loads(line)
        times = [found["seconds"][str(count)] for count in streams]
        cells = [f"{1e3 * times[0]:.1f} ms"]
        cells += [f"{1e3 * seconds:.1f} ms | {seconds / times[0]:.2f}" for seconds in times[1:]]
        print(f"| {found['size']} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
