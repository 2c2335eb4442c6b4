"""A client is killed while it trains; another process takes its place, and the result is right."""

import contextlib
import signal
import sys
import time

import pytest
from tests.e2e.clients import DEADLINE, Process, free_ports, run_clients, run_server

STEPS = 40
TRAIN = """
import os, signal, sys, time, numpy as np, dmesh
from dmesh import coordination
dmesh.initialize_accelerator_system()
rank, size = dmesh.client_id(), dmesh.num_clients()
step, total = 0, np.zeros(4)
recover = coordination.rejoined()
group = dmesh.collectives.new_group(range(size), "mine")
while step < {steps}:
    try:
        if recover:
            coordination.barrier("recover")
            steps = dmesh.collectives.all_gather(np.array(step), group=group)
            totals = dmesh.collectives.all_gather(total, group=group).reshape(size, 4)
            step, total = int(steps.max()), totals[int(np.argmax(steps))]
            recover = False
            print("goes on at", step, [m.process.pid for m in coordination.members()], flush=True)
        {disaster}
        total = total + dmesh.collectives.all_reduce(np.full(4, rank + step, float))
        if step % 7 == 0:
            coordination.barrier("seven")
        step += 1
        if step == 3:
            print("running", flush=True)
    except (dmesh.errors.PeerLostError, dmesh.errors.BarrierError) as error:
        print("lost", error, flush=True)
        recover = True
print("result", total[0], flush=True)
dmesh.shutdown_accelerator_system()
print("done", flush=True)
"""
RIGHT = f"result {float(sum(3 * step + 3 for step in range(STEPS)))}"
REJOIN = {"DMESH_RESTART_POLICY": "rejoin"}


DIE = "os.kill(os.getpid(), signal.SIGKILL)"


def train(when: str = "False", how: str = DIE) -> str:
    """Returns the program, in which a client dies at some point."""
    return TRAIN.format(steps=STEPS, disaster=f"if {when}: {how}")


@contextlib.contextmanager
def cluster(mode, script):
    """Runs three clients; yields them by rank, and what starts another one in the place of a rank."""
    ports = free_ports(3)
    with contextlib.ExitStack() as stack:
        environ = dict(REJOIN)
        if mode == "standalone":
            environ["DMESH_COORDINATOR"] = stack.enter_context(run_server())[1]
        options = {"environ": environ, "ports": ports}
        clients = dict(stack.enter_context(run_clients(3, script, **options)))

        def replace(rank, successor=None, **more):
            options["per_client"] = {rank: more}
            more = stack.enter_context(run_clients(3, successor or script, only=(rank,), **options))
            clients[rank] = more[rank]

        yield clients, replace


def finish(clients):
    for client in clients.values():
        assert client.wait() == 0, client.err
        assert RIGHT in client.out
        assert client.out.endswith("done")


@pytest.mark.parametrize("mode", ["embedded", "standalone"])
def test_a_killed_client_is_replaced_and_the_result_is_right(mode):
    script = train("rank == 1 and step == 10 and not coordination.rejoined()")
    with cluster(mode, script) as (clients, replace):
        first = clients[1]
        assert first.wait() == -signal.SIGKILL
        for rank in (0, 2):
            assert "/job:worker/task:1" in clients[rank].wait_for("lost")
        replace(1)
        for client in clients.values():
            line = client.wait_for("goes on at")
            assert str(clients[1].pid) in line, "everybody sees who has the task slot now"
            assert str(first.pid) not in line
        finish(clients)


def test_one_after_the_other_and_two_at_once():
    """Also one whose predecessor has been a successor, and the client that hosts nothing but has rank 0."""
    script = train(
        "(step == 8 and rank in (0, 2) and not coordination.rejoined())"
        " or (step == 20 and rank == 2 and 'LAST' not in os.environ)"
    )
    with cluster("standalone", script) as (clients, replace):
        for rank in (0, 2):
            assert clients[rank].wait() == -signal.SIGKILL
        replace(2)
        replace(0)
        assert clients[2].wait() == -signal.SIGKILL
        assert "goes on at 8" in clients[2].out
        replace(2, "import os; os.environ['LAST'] = '1'\n" + script)
        finish(clients)


def test_a_successor_that_dies_before_it_is_taken_in():
    script = train("rank == 1 and step == 10 and not coordination.rejoined()")
    stillborn = """
import os, signal, dmesh
dmesh.initialize_accelerator_system()
assert dmesh.coordination.rejoined()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with cluster("standalone", script) as (clients, replace):
        assert clients[1].wait() == -signal.SIGKILL
        replace(1, stillborn)
        assert clients[1].wait() == -signal.SIGKILL
        replace(1)
        finish(clients)


def test_a_client_that_fails_with_an_exception_is_replaced_too():
    script = train("rank == 1 and step == 10 and not coordination.rejoined()", "raise ZeroDivisionError")
    with cluster("standalone", script) as (clients, replace):
        assert clients[1].wait() == 1
        for rank in (0, 2):
            assert "ZeroDivisionError" in clients[rank].wait_for("lost")
        replace(1)
        finish(clients)


def test_a_successor_that_comes_before_the_end_of_its_predecessor_waits_for_it():
    """As when a machine is cut off, and another one gets its client id at once."""
    script = """
import dmesh
dmesh.initialize_accelerator_system()
print("ready", dmesh.coordination.rejoined(), flush=True)
if dmesh.client_id() == 1 and not dmesh.coordination.rejoined():
    dmesh.coordination.key_value_get("for ever")
dmesh.coordination.barrier("all")
dmesh.shutdown_accelerator_system()
"""
    with cluster("standalone", script) as (clients, replace):
        for client in clients.values():
            client.wait_for("ready")
        former = clients[1]
        replace(1, DMESH_BIND_HOST="127.0.0.2")  # on one machine, they cannot have one port
        clients[1].wait_for("waiting until the process that had this client id before has left", "err")
        former.signal(signal.SIGKILL)
        clients[1].wait_for("ready True")
        for client in clients.values():
            assert client.wait() == 0, client.err


def test_without_the_policy_a_lost_client_stays_lost():
    script = """
import dmesh
dmesh.initialize_accelerator_system()
print("ready", flush=True)
if dmesh.client_id() == 1:
    dmesh.coordination.key_value_get("for ever")
try:
    dmesh.coordination.barrier("all")
except dmesh.errors.BarrierError as error:
    print("BarrierError", error, flush=True)
dmesh.coordination.key_value_get("go")
"""
    late = "import dmesh; dmesh.initialize_accelerator_system()"
    ports = free_ports(3)
    with run_server() as (_, address):
        environ = {"DMESH_COORDINATOR": address, "DMESH_INIT_TIMEOUT": "5"}
        with run_clients(3, script, environ=environ, ports=ports) as clients:
            for client in clients.values():
                client.wait_for("ready")
            clients[1].signal(signal.SIGKILL)
            for rank in (0, 2):
                clients[rank].wait_for("BarrierError")
            with run_clients(3, late, environ=environ, ports=ports, only=(1,)) as second:
                assert second[1].wait() == 1
                assert "/job:worker/task:1" in second[1].err
                assert "CoordinationError" in second[1].err


def test_settings_of_the_cluster_are_agreed_on():
    script = """
import dmesh
try:
    dmesh.initialize_accelerator_system()
except dmesh.errors.JobMismatchError as error:
    print("refused", error, flush=True)
"""
    with (
        run_server() as (_, address),
        run_clients(
            2,
            script,
            environ={"DMESH_COORDINATOR": address},
            per_client={0: {"DMESH_LEASE": "7"}, 1: {"DMESH_LEASE": "9"}},
        ) as clients,
    ):
        line = wait_for_either(clients, "refused")
        assert "lease" in line
        assert "7 s" in line
        assert "9 s" in line


def wait_for_either(clients, text):
    """Waits until one of the clients says it."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        for client in clients.values():
            for line in client.out.split("\n"):
                if text in line:
                    return line
        time.sleep(0.02)
    raise AssertionError([(client.out, client.err) for client in clients.values()])


def test_dmesh_run_starts_the_killed_client_again(tmp_path):
    """The whole story with one command: kill -9 in the middle, and exit code 0."""
    script = tmp_path / "train.py"
    script.write_text(train("rank == 1 and step == 10 and not coordination.rejoined()"))
    run = Process([sys.executable, "-m", "dmesh", "run", "-n", "3", "--max-restarts", "1", str(script)], {})
    try:
        assert run.wait() == 0, run.err
        assert "was killed by SIGKILL; restarting it (1 of 1)" in run.err
        for rank in range(3):
            assert f"[{rank}] {RIGHT}" in run.out
        for rank in (0, 2):
            assert f"[{rank}] lost" in run.out
    finally:
        run.end()
