"""Scenario 8: C code holds a client's interpreter lock for longer than its lease."""

from __future__ import annotations

import time

import pytest
from tests.faults.processes import LEASE, eventually, results

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

# PyDLL does not release the lock: no Python thread of the process runs meanwhile, heartbeats included.
HOLD = "import ctypes; ctypes.PyDLL(None).sleep({seconds:.0f})"


def test_it_is_reported_as_blocked_and_does_not_die(make_server, make_cluster, figures):
    server = make_server().start()
    clients = make_cluster(3, server.address)
    clients[1].do("1")
    started = time.monotonic()
    held = clients[1].submit(HOLD.format(seconds=2 * LEASE))
    waiting = [clients[rank].submit("agent.barrier('b', timeout=85)") for rank in (0, 2)]
    event = clients[0].wait_event("liveness", rank=1, liveness="BLOCKED")
    figures.add(f"lock held to BLOCKED (lease {LEASE:g} s)", event["at"] - started)
    assert event["state"] == "CONNECTED"
    seen = clients[2].do("[m for m in agent.members() if m.rank == 1][0]", thread=True)
    assert seen["liveness"] == "BLOCKED"
    assert not held.done(), "the lock was let go too early for this test to mean anything"
    results([held])
    results([clients[1].submit("agent.barrier('b', timeout=60)"), *waiting])
    clients[0].wait_event("liveness", rank=1, liveness="LIVE")
    eventually(lambda: "blocked" in server.err.lower(), "a line in the server's log")
    for client in clients:
        assert client.told("departed") == []
        assert client.told("failure") == []
