"""Scenario 34: random faults for a long time: all invariants hold, and nothing grows.

DMESH_FAULTS_SOAK says for how many seconds (60 by default, 3600 for the long one). The faults follow from the
seed and are written to `faults.jsonl` beside the logs. All of them are of the kind that a program must not
notice: shorter than what it takes to give somebody up.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

import pytest
from tests.faults.test_kill_loop import PATIENT, start_traffic, stop_traffic
from tests.faults.traffic import describe, percentile

from dmesh.testing import FaultProxy

SECONDS = float(os.environ.get("DMESH_FAULTS_SOAK") or 60)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(SECONDS * 2 + 600)]

CLIENTS = 4
SHORT = 1.2
"""Longest fault, seconds: below a ping interval and its timeout."""
MAX_RSS, MAX_FDS, MAX_THREADS = 24 << 20, 6, 4
"""Growth that is allowed, however long the soak is."""


class Faults:
    """All that can happen, by name; each returns what takes it back."""

    def __init__(self, server, clients, proxies, chance) -> None:
        self.server = server
        self.clients = clients
        self.proxies = proxies
        self.chance = chance
        self.names = sorted(name[3:] for name in dir(self) if name.startswith("do_"))

    def do_kill_server(self):
        self.server.kill()
        return self.server.start

    def do_stop_server(self):
        self.server.terminate()
        return self.server.start

    def do_freeze_server(self):
        self.server.freeze()
        return self.server.thaw

    def do_freeze_client(self):
        client = self.chance.choice(self.clients)
        client.freeze()
        return client.thaw

    def do_delay(self):
        return self.chance.choice(self.proxies).delay(0.05, jitter=0.03).heal

    def do_drop(self):
        direction = self.chance.choice(["both", "to_target", "to_client"])
        return self.chance.choice(self.proxies).drop(direction).heal

    def do_throttle(self):
        return self.chance.choice(self.proxies).throttle(20_000).heal

    def do_reset(self):
        self.chance.choice(self.proxies).reset()
        return lambda: None

    def do_refuse(self):
        proxy = self.chance.choice(self.proxies)
        fault = proxy.refuse()
        proxy.reset()
        return fault.heal


def clash(one: str, other: str) -> bool:
    return one == other or ("server" in one and "server" in other)


def test_soak(make_server, make_client, chance, figures, artefacts):
    server = make_server().start()
    with contextlib.ExitStack() as stack:
        proxies = [
            stack.enter_context(FaultProxy(server.address, seed=chance.getrandbits(32)))
            for _ in range(CLIENTS)
        ]
        clients = [
            make_client(rank, CLIENTS, proxies[rank].address, options=PATIENT) for rank in range(CLIENTS)
        ]
        for future in [client.submit("join()") for client in clients]:
            future.result(90)
        paths, running = start_traffic(clients, artefacts, keep=50, pause=0.01)
        faults = Faults(server, clients, proxies, chance)
        begun, injected, sizes = time.monotonic(), 0, []
        with (artefacts / "faults.jsonl").open("w", buffering=1) as log:
            while (elapsed := time.monotonic() - begun) < SECONDS:
                pause, length = chance.uniform(0.1, 1.5), chance.uniform(0.1, SHORT)
                chosen = [chance.choice(faults.names)]
                if chance.random() < 0.3:
                    # A second one at the same time, but not to the same process.
                    others = [name for name in faults.names if not clash(name, chosen[0])]
                    chosen.append(chance.choice(others))
                log.write(json.dumps({"at": round(elapsed, 3), "faults": chosen, "for": length}) + "\n")
                undo = [getattr(faults, f"do_{name}")() for name in chosen]
                time.sleep(length)
                for back in reversed(undo):
                    back()
                injected += len(chosen)
                time.sleep(pause)
                if elapsed > SECONDS * 0.25:
                    sizes.append([client.size for client in clients])
        verdict = stop_traffic(clients, running, paths)
        print(describe(verdict), f"{injected} faults")
        assert verdict.problems == []
        assert verdict.steps >= SECONDS / 2, "not enough traffic for the run to mean anything"
        for client in clients:
            assert client.told("departed") == [], "a false death"
            assert client.told("failure") == [], "the program noticed"
        figures.add("seconds", time.monotonic() - begun, "s")
        figures.add("faults injected", injected, "")
        figures.add("acknowledged operations", verdict.operations, "")
        waits = [took for times in verdict.latencies.values() for took in times]
        figures.add("latency of an operation, median", percentile(waits, 0.5))
        figures.add("latency of an operation, 99.9th percentile", percentile(waits, 0.999))
        # Growth from the first quarter to the end, of those who lived through all of it.
        for rank, client in enumerate(clients):
            first, last = sizes[0][rank], client.size
            growth = {name: last[name] - first[name] for name in first}
            figures.add(f"growth of client {rank}'s memory", growth["rss"] / 1024, "KiB")
            assert growth["rss"] < MAX_RSS, growth
            assert growth["fds"] <= MAX_FDS, growth
            assert growth["threads"] <= MAX_THREADS, growth


def test_the_server_does_not_grow_under_connections_that_come_and_go(make_server, make_client, figures):
    """One life of it (the soak's are short): sessions broken and made again, keys overwritten."""
    server = make_server().start()
    with FaultProxy(server.address) as proxy:
        client = make_client(0, 1, proxy.address).join()
        rounds, sizes = 60, []
        for round_ in range(rounds):
            client.do(
                "for i in range(50): agent.key_value_set(f'k{i}', 'x' * 1000, True)\n"
                "agent.barrier('b', timeout=60)"
            )
            proxy.reset()
            if round_ in (rounds // 3, rounds - 1):
                client.do("agent.key_value_try_get('k0')")
                sizes.append((server.size, client.size))
        for which, name in enumerate(("server", "client")):
            first, last = sizes[0][which], sizes[-1][which]
            growth = {what: last[what] - first[what] for what in first}
            figures.add(f"growth of the {name}'s memory over 40 broken sessions", growth["rss"] / 1024, "KiB")
            assert growth["rss"] < MAX_RSS, (name, growth)
            assert growth["fds"] <= MAX_FDS, (name, growth)
            assert growth["threads"] <= MAX_THREADS, (name, growth)
