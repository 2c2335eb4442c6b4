"""Scenario 3: the server is away, or frozen, for longer than every lease."""

from __future__ import annotations

import time

import pytest
from tests.faults.processes import LEASE, eventually, results

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_nobody_dies_of_the_servers_absence(how, make_server, make_cluster, figures):
    server = make_server().start()
    # By default a client gives up after lease + 5 s without any contact.
    clients = make_cluster(4, server.address, options="patience=Patience(give_up=60)")
    clients[0].do("agent.key_value_set('before', 'x')")
    waiting = clients[0].submit("agent.barrier('across', timeout=160)")
    arrivals = "[len(b.arrived) for b in agent.cluster_state().barriers]"
    eventually(lambda: clients[1].do(arrivals) == [1], "the arrival")
    away = 2.5 * LEASE
    if how == "killed":
        server.restart(down=away)
        back = server.ready_at
    else:
        server.freeze()
        time.sleep(away)  # the freeze is what is injected
        back = time.monotonic()
        server.thaw()
    ends = results([waiting, *(c.submit("agent.barrier('across', timeout=160)") for c in clients[1:])])
    figures.add(f"all served after {how} for 2.5 leases", max(answer.ended for answer in ends) - back)
    for client in clients:
        # The server answers with a table that may be a second old, and everybody has only just come back.
        wanted = [[rank, "CONNECTED"] for rank in range(4)]
        patience = time.monotonic() + 10.0
        while (states := client.do("[(m.rank, m.state.name) for m in agent.members()]")) != wanted:
            assert time.monotonic() < patience, states
            time.sleep(0.1)
        assert client.do("agent.key_value_get('before', 0)") in ("x", "b'x'")
        assert client.told("departed") == []
        assert client.told("failure") == []
    # And still nobody a lease later: it was not only put off.
    time.sleep(LEASE * 1.5)
    results([client.submit("agent.barrier('later', timeout=60)") for client in clients])
    assert not any(client.told("departed") for client in clients)
