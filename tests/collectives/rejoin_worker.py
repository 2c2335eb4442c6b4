"""One rank in a process of its own, which renews when it is told to: JSON objects, one a line."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import socket
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np
from tests.collectives.process_worker import shared_memory

from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.group import Group
from dmesh.errors import CollectiveError

SMALL, LARGE = 500, 60_000
"""Elements of the arrays of `many`, at most."""
SECRET = b"known to the test and its workers"


def as_peers(table: list[dict[str, Any]]) -> list[Peer]:
    return [
        Peer(row["rank"], (f"127.0.0.1:{row['port']}",), row["incarnation"], f"task {row['rank']}")
        for row in table
    ]


def use(group: Group, rank: int, size: int) -> str:
    """Calls on which all ranks agree; returns a hash of what came out of them, byte by byte."""
    generator = np.random.default_rng(rank)
    small = group.all_reduce(generator.standard_normal(1001).astype("f4"))
    large = group.all_reduce(generator.standard_normal(size))
    rows = group.all_gather(np.full(3, rank))
    return hashlib.sha256(b"".join(array.tobytes() for array in (small, large, rows))).hexdigest()


def many(group: Group, seed: int, small: int, large: int) -> float:
    """Calls of all kinds and sizes, which all ranks choose alike; raises if a result is wrong."""
    chance = random.Random(seed)
    kinds = [True] * large + [False] * small
    chance.shuffle(kinds)
    size, rank, total = group.size, group.rank, 0.0
    buffers = {is_large: np.empty(LARGE if is_large else SMALL) for is_large in (True, False)}
    for number, is_large in enumerate(kinds):
        count = chance.randrange(size, buffers[is_large].size) // size * size
        x = buffers[is_large][:count]
        x.fill(rank + number % 7)
        match chance.randrange(5):
            case 0:
                group.barrier()
            case 1:
                root = chance.randrange(size)
                got = group.broadcast(x, root)
                assert got[0] == got[-1] == root + number % 7
            case 2:
                got = group.all_gather(x[: count // size])
                assert [row[0] for row in got] == [other + number % 7 for other in range(size)]
            case _:
                got = group.all_reduce(x, out=x)
                assert got[0] == got[-1] == size * (size - 1) / 2 + size * (number % 7)
                total += got[0]
    return total


def resources() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def main() -> None:
    rank, incarnation, joined = (int(argument) for argument in sys.argv[1:4])
    port, way = int(sys.argv[4]), sys.argv[5]
    listener = socket.create_server(("127.0.0.1", port), reuse_port=False)
    print(json.dumps({"port": listener.getsockname()[1], "pid": os.getpid()}), flush=True)
    peers = as_peers(json.loads(sys.stdin.readline()))
    transport = TcpTransport(rank, listener, lambda: SECRET, b"cluster", incarnation)
    communicator = Communicator(
        rank, peers, transport, timeout=60, joined=joined, shared_memory=shared_memory(way, rank)
    )
    held = communicator.new_group(range(len(peers)), "held")
    for line in sys.stdin:
        order = json.loads(line)
        result: dict[str, Any] = {}
        try:
            match order["do"]:
                case "renew":
                    communicator.renew(as_peers(order["peers"]), order["generation"])
                case "use":
                    result["world"] = use(communicator.world, rank, order["size"])
                    result["held"] = use(held, rank, order["size"])
                case "fail":
                    try:
                        while True:
                            communicator.world.all_reduce(np.ones(order["size"]))
                    except CollectiveError as error:
                        result = {"error": type(error).__name__, "message": str(error)}
                case "many":
                    result["total"] = many(communicator.world, order["seed"], order["small"], order["large"])
                case "differ":
                    try:
                        communicator.world.all_reduce(np.ones(order["size"] + (rank == order["who"])))
                    except CollectiveError as error:
                        result = {"error": type(error).__name__, "message": str(error)}
                case "wait":
                    began, used = time.monotonic(), time.process_time()
                    communicator.world.barrier()
                    result = {"cpu": time.process_time() - used, "seconds": time.monotonic() - began}
                case "resources":
                    result = resources()
        except Exception:  # noqa: BLE001
            result = {"traceback": traceback.format_exc()}
        print(json.dumps(result), flush=True)
    communicator.close(linger=1.0)


if __name__ == "__main__":
    main()
