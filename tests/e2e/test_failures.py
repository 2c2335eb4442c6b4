"""Clients that die, leave or fail while others need them: named on every survivor, and quickly."""

import re
import signal
import sys
import time

import pytest
from tests.e2e.clients import DEADLINE, Process, free_ports, run_clients, run_server

REDUCE_FOR_EVER = """
import numpy as np, dmesh
dmesh.initialize_accelerator_system({arguments})
step = 0
try:
    while True:
        dmesh.collectives.all_reduce(np.ones(1000))
        step += 1
        if step == 3:
            print("running", flush=True)
except dmesh.errors.PeerLostError as error:
    print("PeerLostError", error.rank, "|", error, flush=True)
"""

WITHOUT_COORDINATION = "enable_coordination_service=False"


@pytest.mark.parametrize("mode", ["embedded", "standalone", "none"])
@pytest.mark.parametrize("victim", [0, 2])
def test_killed_in_the_middle_of_a_run(mode, victim):
    """kill -9: all others raise PeerLostError naming it, in milliseconds unless the machine is busy."""
    script = REDUCE_FOR_EVER.format(arguments=WITHOUT_COORDINATION if mode == "none" else "")

    def check(environ):
        with run_clients(4, script, environ=environ) as clients:
            for client in clients.values():
                client.wait_for("running")
            clients[victim].signal(signal.SIGKILL)
            killed_at = time.monotonic()
            for rank, client in clients.items():
                if rank != victim:
                    line = client.wait_for("PeerLostError", timeout=30)
                    assert line.startswith(f"PeerLostError {victim} |")
                    assert f"/job:worker/task:{victim}" in line
            assert time.monotonic() - killed_at < 10, "its lease is 15 s"
            for rank, client in clients.items():
                if rank != victim:
                    client.wait(20)
            # Nobody lingers for a server that died with its host, or for peers that are gone.
            assert time.monotonic() - killed_at < 20

    if mode == "standalone":
        with run_server() as (_, address):
            check({"DMESH_COORDINATOR": address})
    else:
        check({})


@pytest.mark.parametrize("mode", ["embedded", "none"])
def test_dead_before_the_collective_began(mode):
    """Nobody has spoken to the dead client before: it is found all the same."""
    script = """
import signal, dmesh
dmesh.initialize_accelerator_system({arguments})
print("ready", flush=True)
if dmesh.client_id() == 1:
    signal.pause()
try:
    dmesh.collectives.barrier(timeout=60)
except dmesh.errors.PeerLostError as error:
    print("PeerLostError", error.rank, flush=True)
""".format(arguments=WITHOUT_COORDINATION if mode == "none" else "")
    with run_clients(3, script) as clients:
        for client in clients.values():
            client.wait_for("ready")
        clients[1].signal(signal.SIGKILL)
        for rank in (0, 2):
            clients[rank].wait_for("PeerLostError 1", timeout=30)


def test_the_cause_is_heard_before_its_consequences():
    """Rank 0 alone is connected with the dead one, hears of it first and ends: rank 2 blames the dead one."""
    script = """
import signal, time, dmesh
import numpy as np
from dmesh.collectives.control import ControlHandler
dmesh.initialize_accelerator_system()
rank = dmesh.client_id()
if rank == 0:
    dmesh.collectives.send(np.ones(1), 1)
elif rank == 1:
    dmesh.collectives.recv(np.ones(1), 0)
    print("ready", flush=True)
    signal.pause()
else:
    receive = ControlHandler.receive
    def receive_late(*arguments):
        time.sleep(0.2)
        receive(*arguments)
    ControlHandler.receive = receive_late
print("ready", flush=True)
try:
    dmesh.collectives.barrier(timeout=60)
except dmesh.errors.PeerLostError as error:
    print("PeerLostError", error.rank, "|", error, flush=True)
"""
    with run_clients(3, script) as clients:
        for client in clients.values():
            client.wait_for("ready")
        clients[1].signal(signal.SIGKILL)
        for rank in (0, 2):
            assert clients[rank].wait_for("PeerLostError", timeout=30).startswith("PeerLostError 1 |")


def test_an_exception_on_one_client_reaches_all():
    """The others are told what went wrong, by name, instead of waiting for ever."""
    script = """
import numpy as np, dmesh
dmesh.initialize_accelerator_system()
try:
    dmesh.collectives.barrier()  # in which others may still be when client 2 is through, and ends
    if dmesh.client_id() == 2:
        raise ZeroDivisionError("the learning rate")
    dmesh.collectives.all_reduce(np.ones(3))
except dmesh.errors.PeerLostError as error:
    print("PeerLostError", error.rank, error, flush=True)
"""
    with run_clients(4, script) as clients:
        for rank in (0, 1, 3):
            line = clients[rank].wait_for("PeerLostError 2", timeout=30)
            assert "ZeroDivisionError: the learning rate" in line
        assert clients[2].wait() == 1
        assert "ZeroDivisionError: the learning rate" in clients[2].err


def test_leaving_without_a_shutdown_is_named():
    script = """
import dmesh
dmesh.initialize_accelerator_system()
if dmesh.client_id() != 1:
    try:
        dmesh.coordination.barrier("never", timeout=60)
    except dmesh.errors.BarrierError as error:
        print("BarrierError", error, flush=True)
"""
    with run_clients(3, script) as clients:
        for rank in (0, 2):
            line = clients[rank].wait_for("BarrierError", timeout=30)
            assert "/job:worker/task:1" in line
            assert "ended normally, without calling dmesh.shutdown_accelerator_system()" in line


def test_a_clean_shutdown_is_no_crash():
    """Nobody complains, however far apart the clients come to the end."""
    script = """
import sys, time, dmesh
dmesh.initialize_accelerator_system()
time.sleep(0.3 * dmesh.client_id())
dmesh.shutdown_accelerator_system()
"""
    with run_clients(4, script) as clients:
        for client in clients.values():
            assert client.wait() == 0
            assert client.out == ""
            assert client.err == ""


def test_shutdown_has_a_limit_and_names_who_did_not_come():
    script = """
import signal, dmesh
dmesh.initialize_accelerator_system()
if dmesh.client_id() == 1:
    signal.pause()
try:
    dmesh.shutdown_accelerator_system()
except dmesh.errors.BarrierTimeoutError as error:
    print("BarrierTimeoutError", error, flush=True)
"""
    with run_clients(2, script, environ={"DMESH_SHUTDOWN_TIMEOUT": "1"}) as clients:
        line = clients[0].wait_for("BarrierTimeoutError", timeout=30)
        assert "/job:worker/task:1" in line
        assert clients[0].wait() == 0


def test_a_mismatch_names_both_sides_on_every_rank():
    script = """
import numpy as np, dmesh
dmesh.initialize_accelerator_system()
try:
    dmesh.collectives.all_reduce(np.ones(4 if dmesh.client_id() == 1 else 3))
except dmesh.errors.CollectiveMismatchError as error:
    print("mismatch", error, flush=True)
dmesh.shutdown_accelerator_system()
"""
    with run_clients(3, script) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err
            assert "(3,)" in client.out
            assert "(4,)" in client.out
            assert "rank 1" in client.out


def test_the_server_is_killed_and_restarted_under_a_running_job(tmp_path):
    """The job goes on; the clients register again by themselves and meet at the next barrier."""
    script = """
import sys, time, numpy as np, dmesh
dmesh.initialize_accelerator_system()
print("ready", flush=True)
for step in range(400):
    dmesh.collectives.all_reduce(np.ones(10))
    dmesh.coordination.barrier("step", timeout=60)
    if step % 50 == 49:
        print("step", step, flush=True)
dmesh.shutdown_accelerator_system()
print("done", flush=True)
"""
    port = free_ports(1)[0]
    arguments = ("--listen", f"127.0.0.1:{port}", "--data-dir", str(tmp_path / "data"))
    coordinator = {"DMESH_COORDINATOR": f"127.0.0.1:{port}"}
    with run_server(*arguments) as (server, _), run_clients(3, script, environ=coordinator) as clients:
        for client in clients.values():
            client.wait_for("step 49")
        server.end()
        with run_server(*arguments):
            for client in clients.values():
                assert client.wait() == 0, client.err
                assert client.out.endswith("done")


def test_a_client_that_was_given_up_stops_taking_part():
    """Frozen for longer than its lease, it wakes up and learns that it is out, also on the data plane."""
    script = """
import time, numpy as np, dmesh
dmesh.initialize_accelerator_system()
dmesh.collectives.barrier()
print("ready", flush=True)
try:
    while True:
        dmesh.collectives.all_reduce(np.ones(3), group=dmesh.collectives.world())
        if dmesh.client_id() == 1:
            dmesh.coordination.key_value_increment("step")
except dmesh.errors.DMeshError as error:
    print(type(error).__name__, "|", error, flush=True)
"""
    with (
        run_server("--memory", "--lease", "2") as (_, address),
        run_clients(2, script, environ={"DMESH_COORDINATOR": address}) as clients,
    ):
        for client in clients.values():
            client.wait_for("ready")
        clients[1].signal(signal.SIGSTOP)
        assert "/job:worker/task:1" in clients[0].wait_for("PeerLostError", timeout=30)
        clients[1].signal(signal.SIGCONT)
        line = clients[1].wait_for(" | ", timeout=30)
        assert line.startswith(("FencedError", "CollectiveError", "PeerLostError"))


SKIP = """
import time
import numpy as np, dmesh
dmesh.initialize_accelerator_system()
for _ in range({earlier}):
    dmesh.collectives.all_reduce(np.ones(3))
began = time.monotonic()
try:
    if dmesh.client_id() == {skipping}:
        {instead}
    else:
        dmesh.collectives.all_reduce(np.ones(3))
except dmesh.errors.CollectiveMismatchError as error:
    print("MISMATCH", round(time.monotonic() - began, 2), error, flush=True)
    raise
"""


@pytest.mark.parametrize(("earlier", "skipping"), [(0, 1), (3, 0)])
@pytest.mark.parametrize(
    ("instead", "place"),
    [
        ("dmesh.coordination.barrier('saved')", "barrier 'saved'"),
        ("dmesh.shutdown_accelerator_system()", "the shutdown of the system"),
    ],
    ids=["barrier", "shutdown"],
)
def test_a_skipped_call_is_an_error_of_all_ranks_at_once(tmp_path, earlier, skipping, instead, place):
    """A rank goes to a barrier instead of the call for which the others wait: it can never come to it."""
    script = tmp_path / "train.py"
    script.write_text(SKIP.format(earlier=earlier, skipping=skipping, instead=instead))
    run = Process([sys.executable, "-m", "dmesh", "run", "-n", "3", str(script)], {})
    assert run.wait(DEADLINE) == 1, run.err
    found = re.findall(r"^\[\d\] MISMATCH ([\d.]+) (.*)$", run.out, re.M)
    assert len(found) == 3, run.out + run.err
    text = f"rank {skipping} has not called it and never will: it is waiting in {place}"
    for seconds, message in found:
        assert float(seconds) < 20.0, "0.8 on a machine that does nothing else; its time-out is 300 s"
        assert f"collective #{earlier + 1} of group world: rank" in message
        assert "called all_reduce(sum, float64, shape (3,))" in message
        assert text in message
    summary = run.err.partition("dmesh run: FAILED")[2]
    assert text in summary, run.err
