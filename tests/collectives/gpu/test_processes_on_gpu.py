"""Processes whose arrays are on the GPUs of this machine. Skipped without CuPy, or GPUs for two ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys

import pytest
from tests.e2e.clients import run_clients

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

COUNT = "import cupy; print(cupy.cuda.runtime.getDeviceCount() if cupy.is_available() else 0)"

START = """
import os, signal, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
import cupy, dmesh
from dmesh import collectives
dmesh.initialize_accelerator_system()
rank, size = dmesh.rank(), dmesh.size()
cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
world = collectives.world()
assert collectives.all_reduce(cupy.ones(4)).get().tolist() == [size] * 4
print("running", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def _gpus():
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COUNT], capture_output=True, text=True, check=True
    )
    count = int(found.stdout)
    if count < 2 and not (count and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"):
        pytest.skip("needs two GPUs, or one and NCCL_MULTI_RANK_GPU_ENABLE=1")


def run(script, *, size=2):
    """Returns what each rank prints, after all have ended well."""
    with run_clients(size, START + script, fresh=True) as clients:
        for rank, client in clients.items():
            assert client.wait() == 0, f"rank {rank}: {client.err}"
        return {rank: client.out for rank, client in clients.items()}


def test_what_two_processes_have_is_combined():
    run("""
for shape in [(), (0, 3), (6, 2), (300_000, 2)]:
    for dtype in ("f2", "f4", "f8", "i4", "u8", "c8"):
        x = (np.arange(np.prod(shape, dtype=int)) % 3 + rank).reshape(shape).astype(dtype)
        calls = [lambda x: collectives.all_reduce(x), lambda x: collectives.broadcast(x, size - 1)]
        if shape:
            calls += [lambda x: collectives.all_gather(x, axis=-1)]
            calls += [lambda x: collectives.reduce_scatter(x, axis=0), lambda x: collectives.all_to_all(x)]
        for call in calls:
            found, wanted = call(cupy.asarray(x)), call(x)
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found.get(), wanted)
if rank == 0:
    collectives.send(cupy.arange(10.0), 1)
else:
    assert collectives.recv(cupy.empty(10), 0).get().tolist() == list(range(10))
futures = [collectives.all_reduce(cupy.full(1000, float(i)), async_op=True) for i in range(20)]
assert [float(future.result(60)[0]) for future in futures] == [i * size for i in range(20)]
collectives.barrier()
""")


@pytest.mark.parametrize("when", ["in a call", "before a call"])
def test_a_killed_process_is_named(when):
    script = """
from dmesh.errors import PeerLostError
try:
    if rank == 1 and {waits}:
        signal.pause()
    while True:
        collectives.all_reduce(cupy.ones(1_000_000))
except PeerLostError as error:
    print("PeerLostError", error.rank, flush=True)
"""
    waits = when == "before a call"
    with run_clients(3, START + script.format(waits=waits), fresh=True) as clients:
        for client in clients.values():
            client.wait_for("running")
        clients[1].signal(signal.SIGKILL)
        for rank in (0, 2):
            clients[rank].wait_for("PeerLostError 1", timeout=30)
        for rank in (0, 2):
            clients[rank].wait(30)


def test_a_late_process_is_named_and_the_group_can_be_used_again():
    out = run("""
from dmesh import coordination
from dmesh.errors import CollectiveTimeoutError
if rank == 0:
    try:
        collectives.all_reduce(cupy.ones(4), timeout=2.0)
    except CollectiveTimeoutError as error:
        print("late:", error, flush=True)
    coordination.key_value_set("late", "yes")
else:
    coordination.key_value_get("late", timeout=60)
world.reset(timeout=60)
print(collectives.all_reduce(cupy.ones(4)).get().tolist(), flush=True)
collectives.barrier()
""")
    assert "late:" in out[0]
    assert "rank 1" in out[0]
    assert all("[2.0, 2.0, 2.0, 2.0]" in text for text in out.values())


def test_a_gpu_that_is_busy_elsewhere_is_waited_for_no_longer_than_the_time_out():
    out = run("""
from dmesh.errors import CollectiveError
import threading
gate = threading.Event()
with cupy.cuda.Stream(non_blocking=True) as stream:
    x = cupy.ones(4)
    if rank == 1:
        stream.launch_host_func(lambda _: gate.wait(60), None)
    try:
        collectives.all_reduce(x, timeout=3.0)
    except CollectiveError as error:
        print(type(error).__name__, error, flush=True)
    gate.set()
world.reset(timeout=60)
print(collectives.all_reduce(cupy.ones(4)).get().tolist(), flush=True)
collectives.barrier()
""")
    for text in out.values():
        assert "CollectiveTimeoutError" in text
        assert "[2.0, 2.0, 2.0, 2.0]" in text
