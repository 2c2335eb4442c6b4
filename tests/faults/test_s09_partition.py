"""Scenario 9: the network between one client and the server is cut, and heals."""

from __future__ import annotations

import time

import pytest
from tests.faults.processes import INTERVAL, LEASE, RemoteError, errors, eventually, results

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SHORT = 3.5
PINGS = 15.0
"""In which a client finds out by gRPC's pings that its connection is gone, whatever the lease."""


@pytest.fixture
def world(make_network, make_server, make_client):
    """A server and three clients, each on a host of its own."""
    network = make_network(4)
    home, *places = network.hosts
    server = make_server("--insecure", host=home.address, prefix=home.prefix).start()
    settings = "restart_policy=RestartPolicy.REJOIN"
    clients = [
        make_client(rank, 3, server.address, prefix=place.prefix, settings=settings)
        for rank, place in enumerate(places)
    ]
    results([client.submit("join()") for client in clients])
    return network, server, clients


@pytest.mark.parametrize("direction", ["both", "from the server", "to the server"])
def test_both_sides_notice_and_the_task_slot_never_has_two_owners(direction, world, make_client, figures):
    network, server, clients = world
    home, _, cut_off = network.hosts[0], network.hosts[1], network.hosts[2]
    victim, others = clients[1], [clients[0], clients[2]]
    waiting = [client.submit("agent.barrier('b', timeout=80)") for client in others]
    cut_at = time.monotonic()
    if direction == "both":
        network.cut(home, cut_off)
    elif direction == "from the server":
        network.cut_one_way(home, cut_off)
    else:
        network.cut_one_way(cut_off, home)
    lost = [client.wait_event("departed", rank=1) for client in others]
    noticed = max(event["at"] for event in lost) - cut_at
    figures.add(f"server notices a cut {direction} (lease {LEASE:g} s)", noticed)
    assert noticed <= LEASE + INTERVAL + 2.0
    gone = victim.wait_event("failure", kind="CoordinatorUnavailableError")
    figures.add(f"client notices a cut {direction} (lease {LEASE:g} s)", gone["at"] - cut_at)
    assert gone["at"] - cut_at <= LEASE + PINGS + 5.0
    # Its task slot has a new holder, elsewhere.
    successor = make_client(
        1, 3, server.address, prefix=network.hosts[3].prefix, settings="restart_policy=RestartPolicy.REJOIN"
    ).join()
    results([*waiting, successor.submit("agent.barrier('b', timeout=60)")])
    network.heal()
    # What was cut off finds out that it is not the owner any more, and gets nothing done.
    eventually(lambda: victim.told("failure", kind="FencedError"), "the former owner to be fenced")
    with pytest.raises(RemoteError) as caught:
        victim.do("agent.key_value_set('k', 'two owners')")
    assert caught.value.kind == "FencedError"
    assert successor.do("agent.key_value_try_get('k')") is None
    holders = others[0].do("[m.process.pid for m in agent.members() if m.rank == 1 and not m.state.departed]")
    assert holders == [successor.pid]


def test_a_short_cut_is_only_latency(world):
    """A quarter of the time that it takes to notice one: everything arrives in the end."""
    network, _, clients = world
    for _ in range(3):
        network.isolate(network.hosts[2])
        waiting = [client.submit("agent.barrier('b', timeout=80)") for client in clients]
        time.sleep(SHORT)  # the cut is what is injected
        network.heal()
        results(waiting)
    assert not any(client.told("departed") or client.told("failure") for client in clients)


def test_fail_fast_the_others_are_told_and_the_task_slot_stays_empty(make_network, make_server, make_client):
    network = make_network(3)
    home = network.hosts[0]
    server = make_server("--insecure", host=home.address, prefix=home.prefix).start()
    places = enumerate(network.hosts[1:])
    clients = [make_client(rank, 2, server.address, prefix=place.prefix) for rank, place in places]
    results([client.submit("join()") for client in clients])
    waiting = clients[0].submit("agent.barrier('b', timeout=80)")
    network.isolate(network.hosts[2])
    [error] = errors([waiting])
    assert error.members[0]["rank"] == 1
    network.heal()
    eventually(lambda: clients[1].told("failure", kind="FencedError"), "the lost one to be fenced")
