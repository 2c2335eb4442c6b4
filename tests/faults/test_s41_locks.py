"""Scenario 41: ephemeral keys and locks under kills, freezes and partitions.

A lock has one holder at every instant: `lock_history` has what is checked of what the clients wrote down. A
shorter lease than the default makes freezes and partitions of seconds long enough to lose a lock.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.lock_history import History, Violation, check, load
from tests.faults.processes import PATIENCE, ServerProcess, Spawned, eventually

from dmesh.testing import FaultProxy

SECONDS = float(os.environ.get("DMESH_FAULTS_LOCKS") or 20)
CLIENTS = 5
WORKER = Path(__file__).with_name("lock_worker.py")
LEASE = ("--lease", "3", "--heartbeat-interval", "0.6")


class Client:
    """A process with a history, which may be killed and replaced."""

    def __init__(self, address: str, index: int, artefacts: Path, seed: int, start: int = 0) -> None:
        self.address, self.index, self.artefacts, self.seed, self.start = (
            address,
            index,
            artefacts,
            seed,
            start,
        )
        self.file = artefacts / f"client-{index}-{start}.jsonl"
        arguments = [
            sys.executable, str(WORKER), address, str(index), str(1 + CLIENTS), str(self.file),
            f"{seed}/{index}/{start}",
        ]  # fmt: skip
        self.process = Spawned(f"client-{index}", arguments, artefacts / f"client-{index}.log", {}, pipe=True)

    def wrote(self, what: str) -> list[dict[str, object]]:
        if not self.file.exists():
            return []
        lines = self.file.read_text().split("\n")[:-1]
        return [line for line in map(json.loads, lines) if line["what"] == what]

    def wait_for(self, what: str) -> None:
        eventually(lambda: self.wrote(what) or not self.process.running, f"{what} of client {self.index}")
        assert self.wrote(what), self.process.err[-4000:]

    @property
    def fenced(self) -> bool:
        return not self.process.running and self.process.wait() == 3

    def stop(self) -> None:
        """Lets it take no more locks; it stays a member."""
        self.process._process.stdin.write(b"stop\n")
        self.process._process.stdin.flush()

    def kill(self) -> None:
        self.process.thaw()
        self.process.kill()
        self.process._process.stdout.close()

    def replacement(self) -> Client:
        self.kill()
        return Client(self.address, self.index, self.artefacts, self.seed, self.start + 1)


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    made: list[Client] = []
    yield made
    for client in made:
        client.kill()


def break_things(
    chance: random.Random, server: ServerProcess, proxies: list[FaultProxy], clients: list[Client]
) -> dict[str, int]:
    """Injects one fault after another; returns how many of each."""
    count: dict[str, int] = {}

    def victim() -> int:
        return chance.randrange(1, len(clients))

    def client_killed() -> None:
        position = victim()
        clients[position] = clients[position].replacement()

    def client_frozen() -> None:
        process = clients[victim()].process
        process.freeze()
        time.sleep(chance.choice([0.5, 2.0, 6.0]))
        process.thaw()

    def partition() -> None:
        with chance.choice(proxies).drop(chance.choice(["both", "to_client", "to_target"])):
            time.sleep(chance.choice([0.5, 2.0, 6.0]))

    def reset() -> None:
        chance.choice(proxies).reset()

    def server_killed() -> None:
        server.restart(down=chance.choice([0.0, 0.5]))

    faults: list[Callable[[], None]] = [client_killed, client_frozen, partition, reset, server_killed]
    end = time.monotonic() + SECONDS
    todo = list(faults)  # each at least once
    while todo or time.monotonic() < end:
        fault = todo.pop(0) if todo else chance.choice(faults)
        fault()
        count[fault.__name__] = count.get(fault.__name__, 0) + 1
        time.sleep(chance.uniform(0.1, 1.0))
        for position, client in enumerate(clients):
            if client.fenced:
                clients[position] = client.replacement()
                count["clients_fenced"] = count.get("clients_fenced", 0) + 1
    return count


@pytest.mark.faults
@pytest.mark.timeout(600 + 4 * SECONDS)
def test_a_lock_has_one_holder_at_every_instant(make_server, clients, artefacts, chance, seed, figures):
    server = make_server(*LEASE).start()
    proxies = [FaultProxy(server.address).start() for _ in range(2)]
    try:
        clients.append(Client(server.address, 0, artefacts, seed))
        clients[0].wait_for("joined")
        clients.extend(
            Client(proxies[index % 2].address, index, artefacts, seed) for index in range(1, 1 + CLIENTS)
        )
        for client in clients:
            client.wait_for("joined")
        injected = break_things(chance, server, proxies, clients)
        for proxy in proxies:
            proxy.heal()
        settle(clients)
        for client in clients[1:]:
            client.stop()
        for client in (*clients[1:], clients[0]):  # the journal ends last
            client.stop()
            client.wait_for("done")
    finally:
        for proxy in proxies:
            proxy.close()
    found = check(load(sorted(artefacts.glob("client-*.jsonl"))))
    for name, number in (injected | found).items():
        figures.add(name, number, "")
    (alive,) = clients[0].wrote("alive")
    assert alive["keys"] == {
        f"alive/{client.index}": str(client.wrote("joined")[0]["pid"]) for client in clients[1:]
    }, "there is a key of a process that is gone, or none of one that is there"
    assert found["locks taken"] > SECONDS
    assert found["clients"] == CLIENTS


def settle(clients: list[Client]) -> None:
    """Waits until every client holds its place, replaced if need be, and has taken the lock once more."""
    for position, first in enumerate(clients[1:], 1):
        taken = len(first.wrote("acquired"))

        def well(position: int = position, first: Client = first, taken: int = taken) -> bool:
            client = clients[position]
            if client.fenced:
                clients[position] = client.replacement()
                return False
            return len(client.wrote("acquired")) > (taken if client is first else 0)

        eventually(well, f"client {position} to take the lock", PATIENCE)


# The checker itself.


def event(revision: int, key: str, value: str | None) -> dict[str, object]:
    return {"what": "event", "at": 0.0, "revision": revision, "key": key, "value": value}


QUEUE = "dmesh/lock/l/"
JOURNAL = [
    event(1, QUEUE + "a", "x"),
    event(2, QUEUE + "b", "y"),
    event(3, "guarded", "1/0"),
    event(3, "count", "1"),
    event(4, QUEUE + "a", None),
    event(5, "guarded", "2/0"),
    event(5, "count", "2"),
]


def span(token: int, began: float, end: float) -> list[dict[str, object]]:
    return [
        {"what": "acquired", "at": began, "token": token},
        {"what": "releasing", "at": end, "token": token},
        {"what": "released", "at": end, "token": token},
    ]


def test_the_checker_accepts_what_is_right():
    told = {"client-1-0": span(1, 1.0, 2.0), "client-2-0": span(2, 2.5, 3.0)}
    assert check(History(JOURNAL, told))["locks taken"] == 2


@pytest.mark.parametrize(
    ("journal", "told", "match"),
    [
        (JOURNAL, {"c-1-0": span(1, 1.0, 2.6), "c-2-0": span(2, 2.5, 3.0)}, "two hold the lock"),
        (JOURNAL, {"c-1-0": span(7, 1.0, 2.0)}, "never did"),
        (
            JOURNAL,
            {"c-1-0": [{"what": "guarded", "at": 0, "token": 1, "succeeded": True, "revision": 9}]},
            "was not made",
        ),
        ([*JOURNAL, event(6, "guarded", "1/1")], {}, "did not hold"),
        ([*JOURNAL[:4], event(4, "guarded", "2/0")], {}, "did not hold"),
        ([*JOURNAL, event(6, "count", "2")], {}, "the count"),
        ([JOURNAL[0], *JOURNAL[2:]], {}, "gaps"),
    ],
)
def test_the_checker_finds_what_is_wrong(journal, told, match):
    with pytest.raises(Violation, match=match):
        check(History(journal, told))
