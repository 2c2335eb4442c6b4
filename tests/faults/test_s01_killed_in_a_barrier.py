"""Scenario 1: the server is killed with -9 while a barrier is half full, and started again."""

from __future__ import annotations

import pytest
from tests.faults.processes import eventually, results

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SIZE = 8


def arrived(client, name: str) -> int:
    found = f"[len(b.arrived) for b in agent.cluster_state().barriers if b.name == {name!r}]"
    return sum(client.do(found, thread=True))


@pytest.mark.parametrize("kept", ["sqlite", "memory"])
def test_half_a_barrier_survives_the_server(kept, make_server, make_cluster, figures, chance):
    """Clients come back by themselves, and the barrier completes exactly once for each of them."""
    server = make_server(**({"data_dir": None} if kept == "memory" else {})).start()
    clients = make_cluster(SIZE, server.address)
    recovery = []
    for round_ in range(4):
        name, early = f"b{round_ % 2}", chance.sample(range(SIZE), 5 if round_ == 0 else chance.randint(1, 7))
        incarnation = clients[0].do("agent.server_incarnation")
        waiting = {index: clients[index].submit(f"agent.barrier({name!r}, timeout=80)") for index in early}
        late = [index for index in range(SIZE) if index not in early]
        eventually(lambda: arrived(clients[late[0]], name) == len(early), "the early ones to have arrived")  # noqa: B023
        server.restart()
        # The late ones do not know that anything happened: they call it as ever.
        waiting |= {index: clients[index].submit(f"agent.barrier({name!r}, timeout=80)") for index in late}
        ends = [answer.ended for answer in results(list(waiting.values()))]
        recovery.append(max(ends) - server.ready_at)
        for client in clients:
            eventually(
                lambda: client.do("agent.server_incarnation") != incarnation,  # noqa: B023
                "the new leader's incarnation to be reported",
            )
    figures.add(f"barrier complete after the port is back ({kept})", recovery)
    assert max(recovery) <= 5.0
    # Exactly once: all count the same, also in barriers to come, and nobody was taken for dead.
    results([client.submit("agent.barrier('b0', timeout=60)") for client in clients])
    for client in clients:
        assert not client.told("departed")
        assert not client.told("failure")
    assert all(client.end() == 0 for client in clients)


def test_killed_right_after_the_last_arrival(make_server, make_cluster, chance):
    """Some may have been told the outcome and some not: all of them pass, once."""
    server = make_server().start()
    clients = make_cluster(SIZE, server.address)
    for round_ in range(6):
        waiting = [client.submit("agent.barrier('race', timeout=80)") for client in clients]
        if round_ % 2:
            next(iter(waiting)).result(80)  # somebody has passed for certain
        server.restart()
        results(waiting)
    counts = {client.do("agent._barriers.instance('race')") for client in clients}
    assert counts == {6}
    for client in clients:
        assert not client.told("departed")
