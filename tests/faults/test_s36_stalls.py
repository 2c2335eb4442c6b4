"""Scenario 36: the server stalls for 0.5 to 3 s, with connections reset in it. Default settings."""

from __future__ import annotations

import time

import pytest
from tests.faults.processes import eventually, results

from dmesh.testing import FaultProxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SIZE = 4
STALLS = (0.5, 1.0, 2.0, 3.0)


@pytest.fixture
def proxy():
    made = FaultProxy("127.0.0.1:1").start()
    yield made
    made.close()


def assert_all_are_there(clients):
    eventually(
        lambda: clients[0].do("[m.state.name for m in agent.members()]") == ["CONNECTED"] * len(clients),
        "all sessions to be attached again",
    )
    results([client.submit("agent.barrier('b', timeout=80)") for client in clients])
    for client in clients:
        assert client.told("departed") == []
        assert client.told("failure") == []


@pytest.mark.parametrize("when", ["before the stall", "in the stall", "both"])
@pytest.mark.parametrize("stall", STALLS)
def test_a_server_that_is_stopped_declares_nobody_dead(stall, when, proxy, make_server, make_cluster):
    """SIGSTOP: the attach waits in the kernel's queue when the server goes on."""
    server = make_server().start()
    proxy.target = server.address
    clients = make_cluster(SIZE, proxy.address)
    if when != "in the stall":
        proxy.reset()
    server.freeze()
    frozen_at = time.monotonic()
    if when != "before the stall":
        time.sleep(stall / 2)  # the clients are to connect to a server that is stopped
        proxy.reset()
    time.sleep(max(0.0, frozen_at + stall - time.monotonic()))  # the stall is what is injected
    server.thaw()
    assert_all_are_there(clients)


@pytest.mark.parametrize("stall", STALLS)
def test_a_loop_that_is_held_up_declares_nobody_dead(stall, proxy, make_server, make_cluster):
    """One event takes long, again and again: gRPC's threads accept connections meanwhile."""
    # The first passages are those of joining.
    failpoints = f"runtime.before_apply=sleep:{stall}:after=40:times=6"
    server = make_server(environ={"DMESH_FAILPOINTS": failpoints}).start()
    proxy.target = server.address
    clients = make_cluster(SIZE, proxy.address)
    writing = [
        client.submit("for i in range(10): agent.key_value_set(f'k{i}', 'v', True)") for client in clients
    ]
    for _ in range(4):
        time.sleep(stall / 2)  # somewhere in a stall
        proxy.reset()
    results(writing)
    assert_all_are_there(clients)


def test_a_stall_on_top_of_a_flap(proxy, make_server, make_cluster):
    """The connections are refused for a second, and come back to a server that stalls for three."""
    server = make_server().start()
    proxy.target = server.address
    clients = make_cluster(SIZE, proxy.address)
    with proxy.refuse():
        proxy.reset()
        time.sleep(1.0)  # the outage is what is injected
        server.freeze()
    time.sleep(3.0)  # the stall is what is injected
    server.thaw()
    assert_all_are_there(clients)


@pytest.mark.alone
def test_a_process_that_is_killed_in_a_stall_is_lost_all_the_same(make_server, make_cluster, figures):
    server = make_server().start()
    clients = make_cluster(3, server.address)
    server.freeze()
    clients[2].kill()
    time.sleep(2.0)  # the stall is what is injected
    thawed_at = time.monotonic()
    server.thaw()
    noticed = [client.wait_event("departed", rank=2)["at"] - thawed_at for client in clients[:2]]
    figures.add("end of a stall to the news of who was killed in it", noticed)
    assert max(noticed) < 1.0
