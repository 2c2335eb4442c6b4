"""Checkpoints of real processes: moved between clusters, and of clients that die or cannot write."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from tests.e2e.clients import run_clients

import dmesh
from dmesh.errors import CheckpointError

VALUES = np.random.default_rng(0).standard_normal((37, 23))
MADE = """
import itertools, os, resource, signal, sys, threading
import ml_dtypes
import numpy as np
import dmesh
from dmesh import Layout

directory = os.environ["DIRECTORY"]
values = np.random.default_rng(0).standard_normal((37, 23))

def tree_of(mesh, step):
    x = dmesh.copy_to_mesh(values + step, Layout(["x", "y"], mesh), uneven=True)
    short = (values + step).astype(ml_dtypes.bfloat16)
    y = dmesh.copy_to_mesh(short, Layout(["unsharded", "x"], mesh), uneven=True)
    whole = dmesh.copy_to_mesh(np.arange(9) + step, Layout(["unsharded"], mesh))
    tree = {"x": x, "nested": [y, whole, {"step": step}], "plain": np.arange(5) + step}
    return tree | {"sum": np.sum(x, axis=0)}
"""
SAVE = (
    MADE
    + """
with dmesh.session() as me:
    mesh = dmesh.create_distributed_mesh([("x", 2), ("y", 2)])
    dmesh.checkpoint.save(directory, tree_of(mesh, 5), 5)
"""
)
LOAD = (
    MADE
    + """
with dmesh.session() as me:
    mesh = dmesh.create_distributed_mesh([("x", dmesh.num_global_devices("CPU"))])
    columns = Layout(["unsharded", "x"], mesh)
    tree = dmesh.checkpoint.load(directory, mesh=mesh, layouts={"nested": [columns]})
    assert tree["x"].layout.sharding_specs == ["x", "unsharded"]
    assert tree["x"].full().tobytes() == (values + 5).tobytes()
    y, whole, rest = tree["nested"]
    assert y.layout == columns
    assert y.full().tobytes() == (values + 5).astype(ml_dtypes.bfloat16).tobytes()
    assert whole.numpy().tolist() == list(range(5, 14)) and rest == {"step": 5}
    assert tree["plain"].tolist() == list(range(5, 10))
    np.testing.assert_allclose(tree["sum"].full(), (values + 5).sum(0))
    print("all the same", flush=True)
"""
)
KILLED = (
    MADE
    + """
def count(event, arguments):  # of what is done with files
    global events, committed
    if armed and arguments and str(arguments[0]).startswith(directory):
        events += 1
        commits = event == "os.rename" and os.path.basename(arguments[1]) == "step-2"
        if events == at or {"before": commits, "after": committed}.get(number):
            os.kill(os.getpid(), signal.SIGKILL)
        committed = committed or commits

armed, committed, events, at = False, False, 0, 0
sys.addaudithook(count)
dmesh.initialize_accelerator_system()
mesh = dmesh.create_distributed_mesh([("x", 2), ("y", 2)])
dmesh.checkpoint.save(directory, tree_of(mesh, 1), 1)
kind, _, number = os.environ.get("KILL", "").partition("=")
armed = True
try:
    if kind == "seconds":
        threading.Timer(float(number), os.kill, (os.getpid(), signal.SIGKILL)).start()
    at = int(number) if kind == "event" else 0
    for step in itertools.count(2):
        dmesh.checkpoint.save(directory, tree_of(mesh, step), step)
        if step == 2:
            print("events", events, flush=True)
        if not os.environ.get("FOR_EVER"):
            break
except dmesh.errors.PeerLostError as error:
    print("PeerLostError", error.rank, "|", error, flush=True)
"""
)
FULL = (
    MADE
    + """
with dmesh.session() as me:
    mesh = dmesh.create_distributed_mesh([("x", 2), ("y", 2)])
    dmesh.checkpoint.save(directory, tree_of(mesh, 1), 1)
    if me.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        dmesh.checkpoint.save(directory, tree_of(mesh, 2), 2)
    except dmesh.errors.CheckpointError as error:
        print("CheckpointError", isinstance(error, OSError), str(error).replace(chr(10), " "), flush=True)
    dmesh.barrier(mesh)
    assert os.listdir(directory) == ["step-1"]
    if me.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dmesh.checkpoint.save(directory, tree_of(mesh, 2), 2)
"""
)


def check(directory, at_least=1):
    """Loads the latest step in this process, and compares it with what was saved."""
    step = dmesh.checkpoint.steps(directory)[-1]
    assert step >= at_least
    tree = dmesh.checkpoint.load(directory, mesh=dmesh.create_mesh([("x", 1)]))
    y, whole, rest = tree["nested"]
    assert rest == {"step": step}
    assert tree["x"].numpy().tobytes() == (VALUES + step).tobytes()
    assert y.numpy().tobytes() == (VALUES + step).astype(ml_dtypes.bfloat16).tobytes()
    assert whole.numpy().tolist() == list(range(step, step + 9))
    assert tree["plain"].tolist() == list(range(step, step + 5))
    np.testing.assert_allclose(tree["sum"].numpy(), (VALUES + step).sum(0))
    return step


def test_what_four_clients_save_loads_on_one_two_and_three_and_with_zarr_alone(tmp_path):
    environ = {"DIRECTORY": str(tmp_path)}
    with run_clients(4, SAVE, environ=environ) as clients:
        assert [client.wait() for client in clients.values()] == [0] * 4, clients[0].err
    for count in (1, 2, 3):
        with run_clients(count, LOAD, environ=environ) as clients:
            for client in clients.values():
                client.wait_for("all the same")
                assert client.wait() == 0
    group = zarr.open_group(tmp_path / "step-5", mode="r")
    assert group["x"][:].tobytes() == (VALUES + 5).tobytes()
    assert group["nested/1"][:].tolist() == list(range(5, 14))
    assert check(tmp_path) == 5


def killed(directory, rank, kill):
    """Kills a client in a save, and loads what is there; returns the step."""
    environ = {"DIRECTORY": str(directory), "DMESH_NUM_CPU_DEVICES": "2", "FOR_EVER": "1"}
    with run_clients(2, KILLED, environ=environ, per_client={rank: {"KILL": kill}}) as clients:
        line = clients[1 - rank].wait_for("PeerLostError")
        assert line.startswith(f"PeerLostError {rank} |")
        assert clients[rank].wait() == -9
    step = check(directory)
    dmesh.checkpoint.save(directory, {"after": np.arange(3)})
    assert {path.name for path in directory.iterdir()} == {f"step-{n}" for n in range(1, step + 2)}
    return step


def events_of_a_save(directory):
    with run_clients(
        2, KILLED, environ={"DIRECTORY": str(directory), "DMESH_NUM_CPU_DEVICES": "2"}
    ) as clients:
        return [int(clients[rank].wait_for("events").split()[1]) for rank in (0, 1)]


def test_a_client_that_is_killed_in_a_save_leaves_the_last_committed_step(tmp_path):
    first, second = events_of_a_save(tmp_path / "all")
    with ThreadPoolExecutor(2) as pool:
        instants = [
            (0, f"event={first // 3}"), (1, f"event={second // 2}"), (0, "commit=before"), (0, "commit=after")
        ]  # fmt: skip
        steps = pool.map(lambda one: killed(tmp_path / str(one), *one), instants)
        assert list(steps) == [1, 1, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_that_is_killed_at_50_instants_of_a_save_leaves_the_last_committed_step(tmp_path):
    events, dice = events_of_a_save(tmp_path / "all"), random.Random(0)
    instants = []
    for number in range(50):
        rank = dice.randrange(2)
        kill = f"event={dice.randint(1, events[rank])}" if number % 2 else f"seconds={dice.random() * 0.3}"
        instants.append((tmp_path / str(number), rank, kill))
    with ThreadPoolExecutor(2) as pool:
        assert {1, 2} <= set(pool.map(lambda one: killed(*one), instants))


def test_a_client_that_cannot_write_is_an_error_on_all_that_names_it(tmp_path):
    with run_clients(2, FULL, environ={"DIRECTORY": str(tmp_path), "DMESH_NUM_CPU_DEVICES": "2"}) as clients:
        for client in clients.values():
            line = client.wait_for("CheckpointError")
            assert "True dmesh.checkpoint.save of step 2 failed on rank 1:" in line
            assert "File too large" in line
        assert [client.wait() for client in clients.values()] == [0, 0]
    assert check(tmp_path) == 2
    shutil.rmtree(tmp_path / "step-2" / "x" / "c" / "1")
    with pytest.raises(CheckpointError, match="step-2/x/c/1/0"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("clients", "devices", "name"), [(2, 2, "checkpoint_meshes"), (3, 1, "heat_sharded")]
)
def test_the_examples(clients, devices, name):
    script = str(Path(__file__).parents[2] / "examples" / f"{name}.py")
    with run_clients(clients, script, environ={"DMESH_NUM_CPU_DEVICES": str(devices)}) as started:
        started[0].wait_for("equals NumPy's: yes")
        assert [client.wait() for client in started.values()] == [0] * clients
