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
    same(np.sort(x, axis=0), np.sort(values, 0))
    line = rows.ravel()
    same(np.sort(line), np.sort(values, None))
    same(np.unique(np.round(line)), np.unique(np.round(values)))
    line[line < 0] = line[line < 0] * 2
    same(line, np.where(values < 0, values * 2, values).ravel())
    square = x @ x.T + dmesh.eye(37, layout=Layout(["x", "y"], mesh))
    whole = square.full()
    same(np.linalg.cholesky(square), np.linalg.cholesky(whole))
    same(np.linalg.solve(square, square[:, 0]), np.eye(37)[0])
    tall = dmesh.copy_to_mesh(np.vstack([values] * 9), Layout(["x", "unsharded"], mesh), uneven=True)
    same(np.linalg.svdvals(tall), 3 * np.linalg.svdvals(values))
    big = dmesh.ones((1024, 1024), layout=Layout(["x", "y"], mesh))
    assert float((big @ big).sum()) == 1024.0**3
    layout = big.layout
    add = dmesh.shard_map(lambda b: b + dmesh.axes.psum(b, "x"), in_layouts=layout, out_layouts=layout)
    assert add(big).full().max() == 3
    print("all the same", flush=True)
"""

ARRAY_API = """
import dmesh
import dmesh.array_api as xp

def standardized(x):
    xp = x.__array_namespace__()
    return (x - xp.mean(x, axis=0)) / xp.std(x, axis=0)

with dmesh.session():
    x = xp.reshape(xp.linspace(0.0, 1.0, 12), (6, 2))
    assert x.layout.sharding_specs == ["x", "unsharded"]
    assert x.device.size == 2 * dmesh.num_clients()
    assert abs(float(xp.sum(standardized(x) ** 2)) - 12) < 1e-9
    assert xp.unique_values(xp.asarray([3, 1, 3, 2, 1])).full().tolist() == [1, 2, 3]
    assert xp.sort(xp.arange(7) % 3, descending=True).full().tolist() == [2, 2, 1, 1, 0, 0, 0]
    with dmesh.implicit_gather("allow"):
        assert [float(row[0]) * 11 for row in x] == [0, 2, 4, 6, 8, 10]
        assert abs(xp.fft.fft(xp.ones(5)).full()[0]) == 5
    print("all the same", flush=True)
"""

FOR_EVER = """
import os
import numpy as np
import dmesh

dmesh.initialize_accelerator_system()
mesh = dmesh.create_distributed_mesh([("x", 3)])
x = dmesh.ones((60, 90), layout=dmesh.Layout(["x", "unsharded"], mesh))
columns = dmesh.Layout(["unsharded", "x"], mesh)
operation = {
    "sum": lambda: x.sum(),
    "product": lambda: (x.T @ x)[0, 0] * 90,
    "relayout": lambda: dmesh.relayout(x, columns).sum(),
}[os.environ["OPERATION"]]
step = 0
try:
    while True:
        assert float(operation()) == 5400
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
REDUCED = """
import numpy as np
import dmesh
from dmesh import Layout
from dmesh.arrays.transfer import execute
from dmesh.collectives.communicator import Communicator
from dmesh.runtime import context

with dmesh.session(num_logical_cpu_devices=2) as me:
    execute._FRESH = 1 << 20
    mesh = dmesh.create_distributed_mesh([("x", 2), ("y", 2)])
    values = np.arange(2.0**19).reshape(512, 1024) % 1000
    x = dmesh.copy_to_mesh(values, Layout(["unsharded", "x"], mesh))
    expected = values @ values.T
    registered = context.current().get(Communicator).pool._registered
    kept = []
    for layout in 3 * [Layout(["x", "unsharded"], mesh), Layout.replicated(mesh, 2)]:
        product = x @ x.T  # a contribution of 2 MiB on each device
        assert product.partial
        result = dmesh.relayout(product, layout)
        assert all(registered.contains(block) for block in result.to_local())
        result += 1
        assert (product.full() == expected).all()
        kept.append(result)
    assert all((each.full() == expected + 1).all() for each in kept)
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


def test_large_results_of_reductions_lie_in_memory_that_is_kept_for_later_ones():
    with run_clients(2, REDUCED, environ={"DMESH_NATIVE": "1"}) as started:
        for client in started.values():
            client.wait_for("all the same")
            assert client.wait() == 0


def test_the_array_api_between_processes():
    with run_clients(2, ARRAY_API, environ={"DMESH_NUM_CPU_DEVICES": "2"}) as started:
        for client in started.values():
            client.wait_for("all the same")
            assert client.wait() == 0


AFTERWARDS = """
import dmesh
from dmesh import Layout

with dmesh.session(num_logical_cpu_devices=2):
    mesh = dmesh.create_distributed_mesh([("x", 2), ("y", 2)])
    x = dmesh.ones((1000, 800), layout=Layout(["x", "y"], mesh))
    twice = x.T + x.T
    assert all(block.flags.f_contiguous and (block == 2).all() for block in twice.to_local()), "as NumPy's"
print(dmesh.relayout(x, Layout(["x", "unsharded"], mesh)).to_local()[0].sum())
"""


def test_large_arrays_too_can_be_used_after_the_shutdown_where_nothing_is_sent():
    with run_clients(2, AFTERWARDS) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err
            assert client.out == "400000.0"


@pytest.mark.parametrize("operation", ["sum", "product", "relayout"])
def test_a_client_that_is_killed_in_an_operation_is_lost_to_all_others(operation):
    with run_clients(3, FOR_EVER, environ={"OPERATION": operation}) as clients:
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


@pytest.mark.parametrize("name", ["kmeans_sharded", "mlp_sharded", "pca_sharded", "conjugate_gradient"])
def test_the_examples(name):
    script = str(Path(__file__).parents[2] / "examples" / f"{name}.py")
    with run_clients(2, script, environ={"DMESH_NUM_CPU_DEVICES": "2"}) as clients:
        clients[0].wait_for("equals NumPy's: yes")
        assert [client.wait() for client in clients.values()] == [0, 0]
