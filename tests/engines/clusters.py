"""Clusters of Dask and Ray as programs of their own, which end when their standard input does.

`python -m tests.engines.clusters dask|ray` prints the cluster's address.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.e2e.clients import Process

ROOT = str(Path(__file__).parents[2])
LOOPBACK = "127.0.0.1"
RAY_LOOPBACK = "127.0.0.2"
"""Ray takes 127.0.0.1 for the host's outer address."""
_LONG = 300.0
"""Seconds; Ray starts a dozen processes, and the machine may be busy."""

_PATIENT = {f"DASK_DISTRIBUTED__COMM__TIMEOUTS__{name}": f"{_LONG:g}s" for name in ("CONNECT", "TCP")}
"""Variables with which Dask does not give workers up that a busy machine keeps from running."""


@contextlib.contextmanager
def cluster(engine: str) -> Iterator[str]:
    """Starts a cluster that can run 4 ranks; the value is its address."""
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.engines.clusters", engine]
    process = Process(command, {"PYTHONPATH": path, **_PATIENT}, stdin=True, fresh=True)
    try:
        yield process.wait_for("address: ", timeout=_LONG).partition(": ")[2]
        process.close_stdin()
        process.wait(_LONG)
    finally:
        process.end()
        print(process.err)  # which pytest shows if a test has failed


def _dask() -> None:
    from distributed import LocalCluster

    address = {"host": LOOPBACK, "dashboard_address": f"{LOOPBACK}:0"}
    with LocalCluster(n_workers=4, threads_per_worker=1, **address) as running:
        _serve(running.scheduler_address)


def _ray() -> None:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "node_ip_address": RAY_LOOPBACK}
    running = _patiently(lambda: Cluster(True, head_node_args={**node, "include_dashboard": False}))
    try:
        _patiently(lambda: running.add_node(**node))
        _serve(running.address)
    finally:
        running.shutdown()


def _patiently(start: Callable[[], Any]) -> Any:
    """Starts a node; Ray gives it 30 s, which a busy machine may not."""
    for _ in range(5):
        with contextlib.suppress(Exception):
            return start()
    return start()


def _serve(address: str) -> None:
    print(f"address: {address}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"dask": _dask, "ray": _ray}[sys.argv[1]]()
