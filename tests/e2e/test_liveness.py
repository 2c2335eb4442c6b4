"""Clients that are there but get nowhere, or were given up: who is told what, and how they end."""

import signal

import pytest
from tests.e2e.clients import free_ports, run_clients, run_server

STUCK = """
import os, sys, threading, numpy as np, dmesh
from dmesh import coordination
dmesh.initialize_accelerator_system()
rank = dmesh.client_id()

def load_data():
    print("loading", flush=True)
    sys.stdin.read()  # a file system that hangs

def members_in_trouble():
    return [(m.rank, m.liveness.name, m.activity and m.activity.where) for m in coordination.members()
            if m.liveness.name in ("BLOCKED", "STUCK")]

def watch():
    while not coordination.key_value_try_get("over"):
        trouble = members_in_trouble()
        if trouble:
            print("trouble", trouble, flush=True)
            return

if rank == 2:
    load_data()
if rank == 0:
    threading.Thread(target=watch).start()
{wait}
print("met", flush=True)
coordination.barrier("after")
while any(where == {stuck!r} for _, _, where in members_in_trouble()):
    pass  # the server's table may be a second old
coordination.barrier("looked")
dmesh.shutdown_accelerator_system()
"""


@pytest.mark.parametrize(
    ("wait", "where"),
    [
        ("coordination.barrier('loaded')", "barrier 'loaded'"),
        ("dmesh.collectives.all_reduce(np.ones(3))", "all_reduce"),
    ],
    ids=["barrier", "collective"],
)
def test_a_stuck_client_is_named_with_its_stack_and_not_killed(tmp_path, wait, where):
    script = tmp_path / "train.py"
    script.write_text(STUCK.format(wait=wait, stuck="train.py:9 in load_data"))
    with (
        run_server() as (_, address),
        run_clients(
            3,
            str(script),
            environ={"DMESH_COORDINATOR": address, "DMESH_STUCK_AFTER": "0.5"},
            stdin=True,
        ) as clients,
    ):
        clients[2].wait_for("loading")
        for rank in (0, 1):
            line = clients[rank].wait_for("is stuck", "err")
            assert "rank 2, /job:worker/task:2 (host " in line
            assert "at train.py:" in line
            assert "in load_data" in line
            assert where in line
        assert "(2, 'STUCK', 'train.py:9 in load_data')" in clients[0].wait_for("trouble")
        assert "other ranks are waiting for this process" in clients[2].wait_for("other ranks", "err")
        clients[2].close_stdin()
        for client in clients.values():
            assert client.wait() == 0, client.err


FENCED = """
import os, signal, numpy as np, dmesh
from dmesh import coordination
dmesh.initialize_accelerator_system()
print("ready", flush=True)
if dmesh.client_id() == 0:
    try:
        coordination.barrier("never")
    except dmesh.errors.BarrierError:
        print("lost it", flush=True)
    coordination.key_value_get("over")
else:
    {use}
"""


@pytest.mark.parametrize(
    "use",
    [
        "while True: coordination.key_value_increment('written')",
        "coordination.barrier('alone', [1])\n    while True: dmesh.collectives.all_reduce(np.ones(3))",
    ],
    ids=["coordination", "collectives"],
)
def test_a_client_that_was_given_up_ends_with_the_documented_code(use):
    """Frozen for longer than its lease: on waking, its calls are refused, nothing that it writes counts."""
    with (
        run_server("--memory", "--lease", "2") as (_, address),
        run_clients(2, FENCED.format(use=use), environ={"DMESH_COORDINATOR": address}) as clients,
    ):
        for client in clients.values():
            client.wait_for("ready")
        clients[1].signal(signal.SIGSTOP)
        clients[0].wait_for("lost it")
        clients[1].signal(signal.SIGCONT)
        assert clients[1].wait() == 76, clients[1].err
        assert "FencedError" in clients[1].err or "CollectiveError" in clients[1].err


def test_who_loses_a_peer_or_the_server_ends_with_a_code_of_its_own():
    script = """
import dmesh, numpy as np
dmesh.initialize_accelerator_system()
print("ready", flush=True)
if dmesh.client_id() == 1:
    dmesh.coordination.key_value_get("for ever")
elif dmesh.client_id() == 0:
    dmesh.collectives.all_reduce(np.ones(3))
else:
    dmesh.coordination.barrier("b")
"""
    with run_clients(3, script, ports=free_ports(3)) as clients:
        for client in clients.values():
            client.wait_for("ready")
        clients[1].signal(signal.SIGKILL)
        assert {clients[rank].wait() for rank in (0, 2)} == {75}


def test_an_error_of_its_own_is_an_error_of_its_own():
    script = """
import dmesh
dmesh.initialize_accelerator_system()
dmesh.coordination.key_value_get("missing", timeout=0)
"""
    with run_clients(1, script) as clients:
        assert clients[0].wait() == 1
        assert "KeyNotFoundError" in clients[0].err
