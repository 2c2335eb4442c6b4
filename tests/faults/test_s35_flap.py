"""Scenario 35: connections are reset, and refused for a second: nobody dies. Default settings throughout."""

from __future__ import annotations

import time

import pytest
from tests.faults.processes import eventually, results

from dmesh.testing import FaultProxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SIZE = 6
FLAP = 1.0
ROUNDS = 3
AFFECTED = {"one client": range(1, 2), "half of the clients": range(0, SIZE, 2), "all clients": range(SIZE)}


@pytest.fixture
def proxies(make_server):
    """A server, and a way to it for each client."""
    server = make_server().start()
    made = [FaultProxy(server.address).start() for _ in range(SIZE)]
    yield made
    for proxy in made:
        proxy.close()


def flap(proxies, seconds):
    """Resets connections, and refuses new ones for a while."""
    refusals = [proxy.refuse() for proxy in proxies]
    for proxy in proxies:
        proxy.reset()
    time.sleep(seconds)  # the outage is what is injected
    for refusal in refusals:
        refusal.heal()


def assert_nobody_died(clients):
    for client in clients:
        assert client.told("departed") == []
        assert client.told("failure") == []
        assert client.do("[m.state.name for m in agent.members()]") == ["CONNECTED"] * len(clients)


@pytest.mark.parametrize("affected", AFFECTED.values(), ids=AFFECTED)
def test_a_second_without_connections_is_survived(affected, proxies, make_client, figures):
    clients = [make_client(index, SIZE, proxy.address) for index, proxy in enumerate(proxies)]
    results([client.submit("join()") for client in clients])
    took = []
    for round_ in range(ROUNDS):
        # Some wait at a barrier, and some write, when it happens.
        waiting = [client.submit("agent.barrier('during', timeout=80)") for client in clients[1:]]
        counting = [client.submit("agent.key_value_increment('n')", thread=True) for client in clients]
        flap([proxies[index] for index in affected], FLAP)
        healed_at = time.monotonic()
        waiting.append(clients[0].submit("agent.barrier('during', timeout=80)"))
        took.append(max(answer.ended for answer in results(waiting)) - healed_at)
        results(counting)
        eventually(
            lambda: clients[0].do("[m.state.name for m in agent.members()]") == ["CONNECTED"] * SIZE,
            "all sessions to be attached again",
        )
        assert clients[0].do("agent.key_value_get('n')") == str(SIZE * (round_ + 1))
    assert_nobody_died(clients)
    figures.add(f"flap of {FLAP:g} s, {len(affected)} of {SIZE} clients, to the next barrier", took)


def test_a_program_with_collectives_survives_as_well(make_server, make_cluster):
    """The whole SDK, on one host: its process is known to exist, its ports answer."""
    server = make_server().start()
    with FaultProxy(server.address) as proxy:
        clients = make_cluster(4, proxy.address, sdk=True)
        for _ in range(ROUNDS):
            flap([proxy], FLAP)
            results([client.submit("dmesh.collectives.all_reduce(np.ones(3))") for client in clients])
            results([client.submit("agent.barrier('b', timeout=80)") for client in clients])
        assert_nobody_died(clients)


@pytest.mark.alone
def test_a_process_that_is_killed_in_a_flap_is_noticed_at_once(make_server, make_client, figures):
    """Evidence ends a lease also when the connection was gone before."""
    server = make_server().start()
    with FaultProxy(server.address) as proxy:
        witness = make_client(0, 2, server.address)
        victim = make_client(1, 2, proxy.address)
        results([client.submit("join()") for client in (witness, victim)])
        with proxy.refuse():
            proxy.reset()
            time.sleep(FLAP)  # the outage is what is injected
            killed_at = time.monotonic()
            victim.kill()
            event = witness.wait_event("departed", rank=1)
        assert "its process is gone" in event["reason"]
        figures.add("kill -9 within a flap to the departure listener", event["at"] - killed_at)
        assert event["at"] - killed_at < 1.0


@pytest.mark.alone
@pytest.mark.parametrize("size", [2, 16])
def test_a_killed_process_is_noticed_in_half_a_second(size, make_server, make_cluster, chance, figures):
    """No setting of the lease is needed for it: the host says that the process is gone."""
    server = make_server().start()
    noticed = []
    for round_ in range(2):
        clients = make_cluster(size, server.address, cluster=f"c{round_}")
        victim = clients[chance.randrange(size)]
        others = [client for client in clients if client is not victim]
        killed_at = time.monotonic()
        victim.process.send(9)
        for client in others:
            event = client.wait_event("departed", rank=victim.index)
            assert "its process is gone" in event["reason"]
            noticed.append(event["at"] - killed_at)
        for client in clients:
            client.kill()
    figures.add(f"kill -9 to each of {size - 1} departure listeners, default lease", noticed)
    assert max(noticed) < 0.5, noticed
