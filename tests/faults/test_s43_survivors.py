"""Scenario 43: ranks of a group are killed, and the survivors go on in a smaller one.

All survivors have the same members, values and results, whatever the others were doing when they were killed,
and however many are killed while the survivors decide. So they have when the server is killed meanwhile, and
when a client was only frozen; a new process in the place of a lost one is let in at the next barrier.
"""

from __future__ import annotations

import contextlib
import random
import signal

import pytest
from tests.e2e.clients import free_ports, run_clients, run_server
from tests.e2e.test_shrink import CALLS, WAYS, play, rounds

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_killed_in_the_middle_of_each_collective(way, part, is_async):
    chance = random.Random(f"each {way} {part} {is_async}")
    plan, left = rounds(chance, 8, [(name, is_async) for name in CALLS[part::3]])
    play(8, plan, left, WAYS[way])


@pytest.mark.parametrize("seed", range(18))
def test_random_kills_down_to_two(seed):
    """Of 8 ranks, 6 are killed at random: in a call, while the others shrink, and while they agree."""
    chance = random.Random(seed)
    calls = [(chance.choice(CALLS), chance.random() < 0.5) for _ in range(8)]
    plan, left = rounds(chance, 8, calls, inside=0.3)
    assert len(left) == 2
    play(8, plan, left, WAYS[list(WAYS)[seed % len(WAYS)]])


SURVIVE = """
import os, signal, sys, time
import numpy as np
import dmesh
from dmesh.errors import CollectiveError, PeerLostError

dmesh.initialize_accelerator_system()
rank = dmesh.client_id()
world = dmesh.collectives.world()
recover = dmesh.coordination.rejoined()
if not recover:
    world.barrier()
    print("ready", flush=True)
    try:
        while True:
            world.all_reduce(np.ones(100))
    except PeerLostError as error:
        print("lost", error, flush=True)
    except CollectiveError as error:
        print("alone", error, flush=True)
    {before}
    group = dmesh.collectives.shrink()
    print("group", group.ranks, group.all_reduce(np.array(rank)), flush=True)
    {after}
"""


def test_the_server_is_killed_while_the_survivors_decide(tmp_path):
    """The last of them comes when the server is back, from its data directory."""
    script = SURVIVE.format(
        before="sys.stdin.read() if rank == 2 else print('shrinks', flush=True)",
        after="dmesh.shutdown_accelerator_system()",
    )
    port, http = free_ports(2)
    serve = ("--listen", f"127.0.0.1:{port}", "--http", f"127.0.0.1:{http}", "--data-dir", str(tmp_path))
    with contextlib.ExitStack() as servers:
        server, address = servers.enter_context(run_server(*serve))
        with run_clients(4, script, environ={"DMESH_COORDINATOR": address}, stdin=True) as clients:
            for client in clients.values():
                client.wait_for("ready")
            clients[1].signal(signal.SIGKILL)
            for rank in (0, 3):
                clients[rank].wait_for("shrinks")
            server.end()
            servers.enter_context(run_server(*serve))
            clients[2].close_stdin()
            for rank in (0, 2, 3):
                assert clients[rank].wait() == 0, clients[rank].err
                assert "group (0, 2, 3) 5" in clients[rank].out


def test_a_frozen_client_comes_back_when_the_others_have_gone_on():
    script = SURVIVE.format(before="", after="dmesh.shutdown_accelerator_system()")
    with run_server() as (_, address):
        environ = {"DMESH_COORDINATOR": address, "DMESH_LEASE": "3"}
        with run_clients(3, script, environ=environ) as clients:
            for client in clients.values():
                client.wait_for("ready")
            clients[1].signal(signal.SIGSTOP)
            for rank in (0, 2):
                clients[rank].wait_for("group (0, 2) 2")
            clients[1].signal(signal.SIGCONT)
            assert clients[1].wait() == 76, "it knows that it may not act for its task any more"
            assert "may not act for its task" in clients[1].err
            for rank in (0, 2):
                assert clients[rank].wait() == 0, clients[rank].err


def test_a_new_process_takes_the_place_of_one_without_which_the_others_went_on():
    """Then the world has all members again, and the smaller group goes on with its own."""
    script = SURVIVE.format(before="", after="small = group; sys.stdin.read()")
    script += """
dmesh.coordination.barrier("everybody")
print("world", world.all_reduce(np.array([rank, 1])).tolist(), flush=True)
if not recover:
    print("small", small.all_reduce(np.array([rank, 1])).tolist(), flush=True)
    small.reset()
    print("again", small.shrink().all_reduce(np.array([rank, 1])).tolist(), flush=True)
dmesh.shutdown_accelerator_system()
"""
    ports = free_ports(3)
    with run_server() as (_, address):
        environ = {"DMESH_COORDINATOR": address, "DMESH_RESTART_POLICY": "rejoin"}
        with run_clients(3, script, environ=environ, ports=ports, stdin=True) as clients:
            for client in clients.values():
                client.wait_for("ready")
            clients[1].signal(signal.SIGKILL)
            for rank in (0, 2):
                clients[rank].wait_for("group (0, 2) 2")
            with run_clients(3, script, environ=environ, ports=ports, only=(1,)) as successors:
                for rank in (0, 2):
                    clients[rank].close_stdin()
                assert successors[1].wait() == 0, successors[1].err
                assert "world [3, 3]" in successors[1].out
                for rank in (0, 2):
                    assert clients[rank].wait() == 0, clients[rank].err
                    for line in ("world [3, 3]", "small [2, 2]", "again [2, 2]"):
                        assert line in clients[rank].out
