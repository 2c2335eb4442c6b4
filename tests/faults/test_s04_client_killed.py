"""Scenario 4: a client is killed with -9 while the others wait for it."""

from __future__ import annotations

import socket
import time

import pytest
from tests.faults.processes import INTERVAL, LEASE, errors, eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

ROUNDS = 10


def test_everyone_who_waits_is_told_who_died(make_server, make_cluster, figures, chance):
    """Every waiter's error names rank, host, pid and last-seen age, long before the lease is over."""
    server = make_server().start()
    to_waiters, to_listeners = [], []
    for round_ in range(ROUNDS):
        clients = make_cluster(4, server.address, cluster=f"c{round_}")
        victim = clients[chance.randrange(4)]
        others = [client for client in clients if client is not victim]
        waiting = [client.submit("agent.barrier('b', timeout=80)") for client in others]
        eventually(
            lambda: victim.do("[len(b.arrived) for b in agent.cluster_state().barriers]") == [3],  # noqa: B023
            "three arrivals",
        )
        killed_at = time.monotonic()
        victim.process.send(9)
        for error in errors(waiting):
            assert error.kind == "BarrierError"
            [dead] = error.members
            assert (dead["rank"], dead["pid"]) == (victim.index, victim.pid)
            assert dead["host"] == socket.gethostname()
            assert dead["state"] == "LOST"
            assert 0 <= dead["last_seen_age"] <= LEASE + INTERVAL
            assert f"/job:worker/task:{victim.index}" in error.message
            assert f"pid {victim.pid}" in error.message
            assert socket.gethostname() in error.message
            to_waiters.append(error.at - killed_at)
        for client in others:
            event = client.wait_event("departed", rank=victim.index)
            assert "closed" in event["reason"] or "connection" in event["reason"]
            to_listeners.append(event["at"] - killed_at)
        for client in clients:
            client.kill()
    figures.add("kill -9 to the error of each waiter", to_waiters)
    figures.add("kill -9 to each departure listener", to_listeners)
    assert max(to_waiters) <= LEASE + INTERVAL
    # The lease has nothing to do with it: the end of the connection tells.
    assert sorted(to_waiters)[len(to_waiters) // 2] < 2.0


def test_fail_fast_nobody_may_take_the_task_slot(make_server, make_cluster, make_client):
    server = make_server().start()
    clients = make_cluster(3, server.address)
    clients[2].kill()
    clients[0].wait_event("departed", rank=2)
    successor = make_client(2, 3, server.address, options="connect_timeout=3.0")
    [error] = errors([successor.submit("join()")])
    assert "CoordinationError" in error.kinds
    assert "/job:worker/task:2" in error.message
    [error] = errors([clients[0].submit("agent.barrier('b', timeout=60)")])
    assert error.members[0]["rank"] == 2


def test_rejoin_the_others_wait_for_the_successor(make_server, make_cluster, make_client):
    server = make_server().start()
    settings = "restart_policy=RestartPolicy.REJOIN"
    clients = make_cluster(3, server.address, settings=settings)
    waiting = [client.submit("agent.barrier('resume', timeout=80)") for client in clients[:2]]
    clients[2].kill()
    for client in clients[:2]:
        client.wait_event("departed", rank=2)
    successor = make_client(2, 3, server.address, settings=settings).join()
    assert successor.do("agent.barrier('resume', timeout=60)") is None
    for future in waiting:
        future.result(60)
    for client in (*clients[:2], successor):
        members = client.do("[(m.rank, m.state.name, m.process.pid) for m in agent.members()]")
        assert members[2] == [2, "CONNECTED", successor.pid]
