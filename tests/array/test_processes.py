"""Sharded arrays of real processes: one operation of each family, and a client that dies in one."""

import signal
from pathlib import Path

import pytest
from tests.e2e.clients import run_clients

PROGRAM = """
import numpy as np
import dmesh
from dmesh import Layout

with dmesh.session() as me:
    mesh = dmesh.create_distributed_mesh([("x", 2), ("y", 2)])
    values = np.random.default_rng(0).standard_normal((37, 23))
    x = dmesh.copy_to_mesh(values, Layout(["x", "y"], mesh), uneven=True)
    row = dmesh.copy_to_mesh(values[0], Layout(["y"], mesh), uneven=True)
    def same(mine, theirs):
        np.testing.assert_allclose(mine.full(), theirs, atol=1e-9)
    same(x * 2 + row, values * 2 + values[0])
    same(np.sum(x, axis=0), values.sum(0))
    same(np.max(x, axis=1), values.max(1))
    same(x @ x.T, values @ values.T)
    same(np.cumsum(x, axis=0), values.cumsum(0))
    rows = dmesh.relayout(x, Layout(["x", "unsharded"], mesh), uneven=True)
    same(np.sort(rows, axis=0), np.sort(values, 0))
    same(x[::-3, 1:], values[::-3, 1:])
    same(dmesh.relayout(x, Layout(["unsharded", "x"], mesh), uneven=True)[[0, 5, 5]], values[[0, 5, 5]])
    same(np.concatenate([x, x]), np.concatenate([values, values]))
    row[row > 0] = 0
    same(row, np.minimum(values[0], 0))
    same(np.fft.fft(rows, axis=0), np.fft.fft(values, axis=0))
    big = dmesh.ones((1024, 1024), layout=Layout(["x", "y"], mesh))
    assert float((big @ big).sum()) == 1024.0**3
    layout = big.layout
    add = dmesh.shard_map(lambda b: b + dmesh.axes.psum(b, "x"), in_layouts=layout, out_layouts=layout)
    assert add(big).full().max() == 3
    print("all the same", flush=True)
"""

FOR_EVER = """
import numpy as np
import dmesh

dmesh.initialize_accelerator_system()
mesh = dmesh.create_distributed_mesh([("x", 3)])
x = dmesh.ones(1000, layout=dmesh.Layout(["x"], mesh))
step = 0
try:
    while True:
        assert float(x.sum()) == 1000
        step += 1
        if step == 3:
            print("running", flush=True)
except dmesh.errors.PeerLostError as error:
    print("PeerLostError", error.rank, "|", error, flush=True)
"""
COMMON = """
import numpy as np
import dmesh
from dmesh import Layout

with dmesh.session() as me:
    mesh = dmesh.create_distributed_mesh([("x", 2)])
    rows, columns = Layout(["x", "unsharded"], mesh), Layout(["unsharded", "x"], mesh)
    values = np.arange(5 * 2**18.0).reshape(320, 4096)  # 10 MiB
    x = dmesh.copy_to_mesh(values, rows)
    for step in range(20):  # more than may be shared, if it were not given back
        whole = dmesh.relayout(x, Layout.replicated(mesh, 2))
        first = whole.to_local()[0]
        whole[0] = -me.rank
        assert whole.to_local()[0][0, 0] == -me.rank and first[0, 0] == 0
        assert (first == values).all()
    kept = [dmesh.relayout(x, Layout.replicated(mesh, 2)) for _ in range(9)]
    assert all((each.to_local()[0] == values).all() for each in kept)
    y = dmesh.relayout(x, columns)
    assert (y.to_local()[0] == values[:, 2048 * me.rank : 2048 * (me.rank + 1)]).all()
    assert (dmesh.relayout(y, rows).to_local()[0] == x.to_local()[0]).all()
    dmesh.empty(2**20, shared=True)  # something is left to share
    print("all the same", flush=True)
"""
ALONE = """
import dmesh

dmesh.initialize_accelerator_system()
mesh = dmesh.create_distributed_mesh([("x", 2)])
x = dmesh.ones(1000, layout=dmesh.Layout(["x"], mesh))
float(x.sum())
try:
    if dmesh.client_id() == 0:
        x.full()
    else:
        x[::2].full()
except dmesh.errors.CollectiveMismatchError as error:
    print("mismatch |", error, flush=True)
"""


@pytest.mark.parametrize(("clients", "devices"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("native", ["1", "0"])
def test_operations_between_processes(clients, devices, native):
    environ = {"DMESH_NUM_CPU_DEVICES": str(devices), "DMESH_NATIVE": native}
    with run_clients(clients, PROGRAM, environ=environ) as started:
        for client in started.values():
            client.wait_for("all the same")
            assert client.wait() == 0


def test_blocks_that_clients_have_in_common_are_copied_before_they_are_written_to():
    with run_clients(2, COMMON, environ={"DMESH_SHARED_MEMORY": "64"}) as started:
        for client in started.values():
            client.wait_for("all the same")
            assert client.wait() == 0


def test_a_client_that_is_killed_in_an_operation_is_lost_to_all_others():
    with run_clients(3, FOR_EVER) as clients:
        for client in clients.values():
            client.wait_for("running")
        clients[1].signal(signal.SIGKILL)
        for rank in (0, 2):
            assert clients[rank].wait_for("PeerLostError").startswith("PeerLostError 1 |")


def test_one_client_that_reads_alone_is_an_error_on_both_with_both_lines():
    with run_clients(2, ALONE) as clients:
        for client in clients.values():
            line = client.wait_for("mismatch |")
            assert "full: all_gather" in line
            assert "x[...]: all_to_all" in line or line.count("full: all_gather") == 2
            assert line.count(" @ ") == 2


def test_the_example():
    script = str(Path(__file__).parents[2] / "examples" / "kmeans_sharded.py")
    with run_clients(2, script, environ={"DMESH_NUM_CPU_DEVICES": "2"}) as clients:
        clients[0].wait_for("equals NumPy's: yes")
        assert [client.wait() for client in clients.values()] == [0, 0]
