"""Programs that end without a shutdown: a normal end fails nobody who does not need the one that ended."""

import time

import pytest
from tests.e2e.clients import run_clients, run_server

BEGIN = """
import sys, numpy as np, dmesh
from dmesh import collectives, coordination
from dmesh.errors import DMeshError
dmesh.initialize_accelerator_system({arguments})
rank = dmesh.client_id()
ones = np.ones(4)

def wait():
    print("ready", flush=True)
    sys.stdin.read()

def attempt(call):
    try:
        call()
    except DMeshError as error:
        print(type(error).__name__, error, flush=True)
    else:
        print("no error", flush=True)
"""
NORMALLY = "ended normally, without calling dmesh.shutdown_accelerator_system()"
MEANS = {"memory": {}, "tcp": {"DMESH_SHARED_MEMORY": "0"}, "messages": {"DMESH_NATIVE": "0"}}


def begin(arguments=""):
    return BEGIN.format(arguments=arguments)


@pytest.mark.parametrize("mode", ["embedded", "standalone", "none"])
def test_a_program_that_ends_is_no_failure(mode):
    """Nobody waits, complains or fails, whoever comes to its end first."""
    script = begin("enable_coordination_service=False" if mode == "none" else "")
    script += """
import atexit, time
ended = []
atexit.register(ended.append, time.monotonic())
collectives.all_reduce(ones)
"""

    def check(environ):
        with run_clients(3, script, environ=environ) as clients:
            for client in clients.values():
                assert client.wait() == 0, client.err
                assert client.err == "" or mode == "none"

    if mode == "standalone":
        with run_server() as (_, address):
            check({"DMESH_COORDINATOR": address})
    else:
        check({})


def test_an_end_costs_no_fixed_waits():
    script = "import atexit, time\nbegan = []\n"
    script += "atexit.register(lambda: print(f'took {time.monotonic() - began[0]:.3f}', flush=True))\n"
    script += (
        begin() + "collectives.all_reduce(ones)\natexit.register(lambda: began.append(time.monotonic()))\n"
    )
    took = []
    for _ in range(5):  # each of which a fixed wait would make longer; 0.02 s on an idle machine
        with run_clients(3, script) as clients:
            took.append(max(float(client.wait_for("took").split()[1]) for client in clients.values()))
        if took[-1] < 0.9:
            return
    pytest.fail(f"the ends took {took} s")


def test_the_host_of_the_server_hears_of_a_leave_without_a_goodbye():
    """A client that is fast, or on a busy machine, may leave before it is connected with client 0."""
    script = """
import dmesh
from dmesh.collectives.communicator import Communicator
Communicator.watch = lambda communicator, rank: None
dmesh.initialize_accelerator_system()
dmesh.shutdown_accelerator_system()
"""
    with run_clients(2, script, environ={"DMESH_SHUTDOWN_TIMEOUT": "5"}) as clients:
        for client in clients.values():
            assert client.wait() == 0, client.err
            assert client.err == ""


@pytest.mark.parametrize("means", MEANS)
def test_what_the_ended_one_had_completed_completes_for_the_others(means):
    """Rank 2 ends when its own calls are complete; the others make theirs when it is gone."""
    script = (
        begin()
        + """
collectives.all_reduce(ones)
if rank == 2:
    collectives.send(5 * ones, 0)
    sys.exit()
wait()
if rank == 0:
    assert (collectives.recv(np.empty_like(ones), 2) == 5).all()
    collectives.send(7 * ones, 1)
else:
    assert (collectives.recv(np.empty_like(ones), 0) == 7).all()
attempt(lambda: collectives.all_reduce(ones))
"""
    )
    with run_clients(3, script, environ=MEANS[means], stdin=True) as clients:
        for rank in (0, 1):
            clients[rank].wait_for("ready")
        if means == "tcp":  # where a small send does not wait for its receiver
            assert clients[2].wait() == 0, clients[2].err
        for rank in (0, 1):
            clients[rank].close_stdin()
        for rank in (0, 1):
            assert clients[rank].wait() == 0, clients[rank].err
            line = clients[rank].wait_for("PeerLostError")
            assert "lost rank 2" in line
            assert NORMALLY in line


def test_calls_that_have_been_made_are_completed_first():
    """An asynchronous call whose result nobody asks for is a call all the same."""
    script = (
        begin()
        + """
if rank == 1:
    collectives.all_reduce(ones)
    collectives.all_reduce(ones, async_op=True)
    sys.exit()
wait()
collectives.all_reduce(ones)
assert (collectives.all_reduce(ones) == 2).all()
"""
    )
    with run_clients(2, script, stdin=True) as clients:
        clients[0].wait_for("ready")
        time.sleep(0.2)  # client 1 would be gone by now
        clients[0].close_stdin()
        for client in clients.values():
            assert client.wait() == 0, client.err


@pytest.mark.parametrize("end", ["sys.exit(3)", "main()"])
def test_an_exit_code_is_told(end):
    script = (
        begin()
        + f"""
def main():
    try:
        sys.exit(7)  # caught: not the end
    except SystemExit:
        pass
    sys.exit(3)

attempt(collectives.barrier)  # in which others may still be when client 1 is through, and fails
if rank == 1:
    {end}
attempt(lambda: collectives.all_reduce(ones))
"""
    )
    with run_clients(3, script) as clients:
        assert clients[1].wait() == 3
        for rank in (0, 2):
            line = clients[rank].wait_for("PeerLostError")
            assert "lost rank 1" in line
            assert "exited with code 3" in line


@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "caught()"])
def test_an_exit_without_an_error_is_a_normal_end(end):
    script = (
        begin()
        + f"""
def caught():
    try:
        sys.exit(3)
    except SystemExit:
        pass

collectives.barrier()
if rank == 1:
    {end}
else:
    attempt(lambda: coordination.barrier("never", timeout=60))
    attempt(lambda: collectives.all_reduce(ones))
"""
    )
    with run_clients(3, script) as clients:
        assert clients[1].wait() == 0
        for rank in (0, 2):
            assert NORMALLY in clients[rank].wait_for("BarrierError")
            assert NORMALLY in clients[rank].wait_for("PeerLostError")


def test_the_host_of_the_server_lets_the_others_finish():
    """Client 0 is at its end; the others hear so if they need it, and use its server as long as they run."""
    script = (
        begin()
        + """
collectives.all_reduce(ones)
if rank == 0:
    sys.exit()
attempt(lambda: collectives.all_reduce(ones))
wait()
coordination.key_value_set(f"late/{rank}", "done")
pair = collectives.new_group([1, 2])
assert (collectives.all_reduce(ones, group=pair) == 2).all()
coordination.key_value_get("late/1")
coordination.key_value_get("late/2")
"""
    )
    with run_clients(3, script, stdin=True) as clients:
        for rank in (1, 2):
            assert NORMALLY in clients[rank].wait_for("PeerLostError")
            clients[rank].wait_for("ready")
        line = clients[0].wait_for("hosts the coordination server", where="err")
        assert "rank 1, /job:worker/task:1" in line
        assert "rank 2, /job:worker/task:2" in line
        for rank in (1, 2):
            clients[rank].close_stdin()
        for client in clients.values():
            assert client.wait() == 0, client.err


def test_the_host_of_the_server_does_not_wait_for_ever():
    script = (
        begin()
        + """
collectives.all_reduce(ones)
if rank == 1:
    wait()
    attempt(lambda: coordination.key_value_set("late", "done"))
"""
    )
    with run_clients(2, script, environ={"DMESH_SHUTDOWN_TIMEOUT": "0.5"}, stdin=True) as clients:
        assert clients[0].wait() == 0, clients[0].err
        assert "although clients are left: rank 1, /job:worker/task:1" in clients[0].err
        began = time.monotonic()
        clients[1].close_stdin()
        assert "client 0, which hosted the coordination server, is gone" in clients[1].wait_for("Error")
        assert clients[1].wait() == 0, clients[1].err
        assert time.monotonic() - began < 10, "the lease is 15 s"
