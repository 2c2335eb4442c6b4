"""A client is told that it will be taken away, by a real signal: all save at the same step."""

import signal

import pytest
from tests.e2e.clients import run_clients, run_server

TRAIN = """
import random, signal, sys, time, numpy as np, dmesh
from dmesh import coordination
before = []
signal.signal(signal.SIGTERM, lambda number, frame: before.append(number))
dmesh.initialize_accelerator_system()
coordination.handle_preemption_signals()
coordination.handle_preemption_signals()
rank = dmesh.client_id()
step = 0
while True:
    {work}
    if coordination.reached_preemption_sync_point(step):
        break
    if step == 5:
        print("running", flush=True)
    step += 1
print("stopped at", step, "handlers", before, flush=True)
dmesh.coordination.barrier("saved", timeout=60)
dmesh.shutdown_accelerator_system()
print("done", flush=True)
"""

BY_THEMSELVES = "time.sleep(random.random() * 0.001 * (1 + rank))"
TOGETHER = "dmesh.collectives.all_reduce(np.ones(10))"


@pytest.mark.parametrize("work", [BY_THEMSELVES, TOGETHER], ids=["at different speeds", "in step"])
@pytest.mark.parametrize("told", [0, 2])
def test_sigterm_stops_all_at_the_same_step(work, told):
    with run_clients(3, TRAIN.format(work=work)) as clients:
        for client in clients.values():
            client.wait_for("running")
        clients[told].signal(signal.SIGTERM)
        lines = [clients[rank].wait_for("stopped at") for rank in clients]
        for client in clients.values():
            assert client.wait() == 0, client.err
        assert len({line.split(" handlers ")[0] for line in lines}) == 1
        for rank, line in enumerate(lines):
            assert line.endswith("[15]" if rank == told else "[]"), (
                "the handler that was there is called, too"
            )
            assert f"/job:worker/task:{told}" in clients[rank].err
            assert "is about to be preempted: it received SIGTERM" in clients[rank].err


def test_whoever_is_told_twice_and_everybody_at_once():
    """As when a whole partition of a cluster is drained."""
    with run_clients(3, TRAIN.format(work=BY_THEMSELVES)) as clients:
        for client in clients.values():
            client.wait_for("running")
        for client in clients.values():
            client.signal(signal.SIGTERM)
            client.signal(signal.SIGTERM)
        lines = {client.wait_for("stopped at").split(" handlers ")[0] for client in clients.values()}
        for client in clients.values():
            assert client.wait() == 0, client.err
        assert len(lines) == 1


def test_the_one_that_is_taken_away_at_once_does_not_keep_the_others():
    """It had announced its preemption, and was killed before it could say where it was."""
    script = """
import os, signal, time, dmesh
from dmesh import coordination
dmesh.initialize_accelerator_system()
if dmesh.client_id() == 1:
    coordination.announce_preemption("spot instance")
    coordination.key_value_get("dmesh/preemption/notice/1")
    signal.pause()
step = 0
while not coordination.reached_preemption_sync_point(step):
    step += 1
    time.sleep(0.001 * (1 + dmesh.client_id()))
    if step == 3:
        print("running", flush=True)
print("stopped at", step, flush=True)
"""
    with (
        run_server() as (_, address),
        run_clients(3, script, environ={"DMESH_COORDINATOR": address}) as clients,
    ):
        for rank in (0, 2):
            clients[rank].wait_for("spot instance", "err")
        clients[1].signal(signal.SIGKILL)
        assert len({clients[rank].wait_for("stopped at") for rank in (0, 2)}) == 1


def test_after_the_shutdown_the_signal_means_what_it_did_before():
    script = """
import signal, dmesh
dmesh.initialize_accelerator_system()
dmesh.coordination.handle_preemption_signals([signal.SIGTERM, signal.SIGUSR1])
dmesh.shutdown_accelerator_system()
print("ready", flush=True)
while True:
    signal.pause()
"""
    with run_clients(1, script) as clients:
        clients[0].wait_for("ready")
        clients[0].signal(signal.SIGTERM)
        assert clients[0].wait() == -signal.SIGTERM


def test_refusals():
    script = """
import signal, threading, dmesh
from dmesh import coordination
def show(call, *args):
    try:
        call(*args)
    except dmesh.errors.DMeshError as error:
        print(type(error).__name__, error, flush=True)
show(coordination.announce_preemption)
dmesh.initialize_accelerator_system()
show(coordination.announce_preemption, 7)
show(coordination.handle_preemption_signals, [signal.SIGKILL])
other = threading.Thread(target=show, args=(coordination.handle_preemption_signals,))
other.start(); other.join()
show(coordination.key_value_set, "dmesh/preemption/sync/1", "0")
show(coordination.key_value_delete, "dmesh/", )
show(coordination.key_value_increment, "dmesh/preemption/sync/1")
show(coordination.key_value_compare_and_set, "dmesh/preemption/sync/1", None, "0")
dmesh.shutdown_accelerator_system()
"""
    with run_clients(1, script) as clients:
        assert clients[0].wait() == 0, clients[0].err
        lines = clients[0].out.split("\n")
        assert lines[0].startswith("NotInitializedError")
        assert lines[1] == "ConfigurationError the reason for a preemption is a string, not 7"
        assert "is not a signal that a process can handle" in lines[2]
        assert "in the main thread" in lines[3]
        assert all("keys that begin with 'dmesh/' are reserved for dmesh" in line for line in lines[4:])
        assert len(lines) == 8
