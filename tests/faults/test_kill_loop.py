"""The server is killed with -9 a hundred times, at random instants, under traffic: no program notices."""

from __future__ import annotations

import os
import time

import pytest
from tests.faults.processes import eventually, results
from tests.faults.traffic import check, describe, percentile

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("DMESH_FAULTS_KILLS") or 100)
CLIENTS = 4
# By default a program gives up 20 s after the server was last heard of; a machine with much else to do may
# need longer than that to start one.
PATIENT = "patience=Patience(give_up=300)"


def start_traffic(clients, artefacts, **options):
    """Has every client do its part of the traffic; returns its histories and what they will answer."""
    paths = [artefacts / f"history-{client.index}.jsonl" for client in clients]
    for client, path in zip(clients, paths, strict=True):
        client.do(f"import traffic; t = traffic.Traffic(agent, {str(path)!r}, **{options!r})")
    return paths, [client.submit("t.run()") for client in clients]


def stop_traffic(clients, running, paths):
    """Ends the traffic and judges it."""
    clients[0].do("t.stop = True", thread=True)
    results(running, 300)
    listed = clients[0].do("{k: v.decode() for k, v in agent.key_value_list('traffic/').items()}")
    return check(paths, listed)


def test_a_hundred_kills_at_random_instants(make_server, make_cluster, chance, figures, artefacts):
    server = make_server().start()
    clients = make_cluster(CLIENTS, server.address, options=PATIENT)
    paths, running = start_traffic(clients, artefacts)
    recoveries = []

    def steps() -> int:
        for future in running:
            if future.done():
                future.result()  # nobody ends by itself: this raises what went wrong
        return clients[0].do("t.steps", thread=True)

    for _ in range(KILLS):
        before = steps()
        kind = chance.random()
        if kind < 0.75:
            # In the middle of the traffic: it must be flowing again after the last time.
            eventually(lambda: steps() > before, "traffic after a restart")  # noqa: B023
            recoveries.append(time.monotonic() - server.ready_at)
            time.sleep(chance.uniform(0, 0.5))
        elif kind < 0.9:
            time.sleep(chance.uniform(0, 0.3))  # while the clients come back
        server.kill()
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0, 1))
        server.launch()
        if kind >= 0.9:
            time.sleep(chance.uniform(0, 1))  # while it starts, or restores
            server.kill()
            server.launch()
        server.wait_ready()
    verdict = stop_traffic(clients, running, paths)
    print(describe(verdict))
    assert verdict.problems == []
    assert verdict.steps >= KILLS / 2, "not enough traffic for the run to mean anything"
    for client in clients:
        assert client.told("departed") == [], "a false death"
        assert client.told("failure") == [], "the program noticed"
    figures.add("kills survived", server.lives - 1, "")
    figures.add("acknowledged operations", verdict.operations, "")
    figures.add("barriers passed by all", verdict.steps, "")
    figures.add("traffic flows again after the port is back", recoveries)
    waits = [took for times in verdict.latencies.values() for took in times]
    figures.add("latency of an operation, 99.9th percentile", percentile(waits, 0.999))
    figures.add("latency of an operation, longest", max(waits))
