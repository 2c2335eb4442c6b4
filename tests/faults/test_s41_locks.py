"""Scenario 41: ephemeral keys, locks, semaphores and elections under kills, freezes and partitions.

A lock has one holder at every instant, a semaphore no more than its places, an election one leader:
`lock_history` has what is checked of what the clients wrote down. The server runs with its default settings:
one client is frozen for longer than the lease, and in half of the runs others are cut off for as long.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.lock_history import PLACES, History, Violation, check, load
from tests.faults.processes import PATIENCE, ServerProcess, Spawned, eventually

from dmesh.testing import FaultProxy
from dmesh_server.core.model import Limits

SECONDS = float(os.environ.get("DMESH_FAULTS_LOCKS") or 25)
LONG = Limits().lease + 2.0
"""Seconds after which a silent client is lost."""
CLIENTS = 5
WORKER = Path(__file__).with_name("lock_worker.py")


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

    def taken(self) -> Counter[str]:
        """Counts how often it has taken what."""
        return Counter(str(line["kind"]) for line in self.wrote("acquired"))

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
    asleep = chance.randrange(1, len(clients))

    def victim() -> int:
        return chance.choice([position for position in range(1, len(clients)) if position != asleep])

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

    def inject(faults: list[Callable[[], None]], seconds: float) -> None:
        end = time.monotonic() + seconds
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

    begin, sleeper = time.monotonic(), clients[asleep]
    sleeper.process.freeze()
    if chance.random() < 0.5:
        with chance.choice(proxies).drop(chance.choice(["both", "to_client", "to_target"])):
            inject([client_killed, reset], LONG)
        count["long_partition"] = 1
    else:
        inject([client_killed, client_frozen, partition, reset], LONG)
    key = f"alive/{asleep}"
    eventually(
        lambda: any(line["key"] == key and line["value"] is None for line in clients[0].wrote("event")),
        "the client that is frozen to be lost",
    )
    sleeper.process.thaw()
    eventually(
        lambda: sleeper.fenced, "the client that was frozen for longer than its lease to be fenced", PATIENCE
    )
    inject([server_killed, client_killed, client_frozen, partition], SECONDS - (time.monotonic() - begin))
    return count


@pytest.mark.faults
@pytest.mark.timeout(600 + 4 * SECONDS)
def test_no_more_hold_than_there_are_places(make_server, clients, artefacts, chance, seed, figures):
    server = make_server().start()
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
    assert any(line["key"] == "end" for line in clients[0].wrote("event")), clients[0].process.err[-4000:]
    found = check(load(sorted(artefacts.glob("client-*.jsonl"))))
    for name, number in (injected | found).items():
        figures.add(name, number, "")
    (alive,) = clients[0].wrote("alive")
    assert alive["keys"] == {
        f"alive/{client.index}": str(client.wrote("joined")[0]["pid"]) for client in clients[1:]
    }, "there is a key of a process that is gone, or none of one that is there"
    assert all(found[f"{kind} taken"] > SECONDS / 2 for kind in PLACES)
    assert found["leaders seen"] > 1
    assert found["clients"] == CLIENTS


def settle(clients: list[Client]) -> None:
    """Waits until every client holds its place, replaced if need be, and has taken everything once more."""
    for position, first in enumerate(clients[1:], 1):
        taken = first.taken()

        def well(position: int = position, first: Client = first, taken: Counter[str] = taken) -> bool:
            client = clients[position]
            if client.fenced:
                clients[position] = client.replacement()
                return False
            before = taken if client is first else Counter()
            return all(client.taken()[kind] > before[kind] for kind in PLACES)

        eventually(well, f"client {position} to take everything", PATIENCE)


# The checker itself.


def event(revision: int, key: str, value: str | None) -> dict[str, object]:
    return {"what": "event", "at": 0.0, "revision": revision, "key": key, "value": value}


def journal(kind: str) -> list[dict[str, object]]:
    return [
        event(1, f"dmesh/{kind}/x/a", "x"),
        event(2, f"dmesh/{kind}/x/b", "y"),
        event(3, f"guarded/{kind}", "1/0"),
        event(3, f"count/{kind}", "1"),
        event(4, f"dmesh/{kind}/x/a", None),
        event(5, f"guarded/{kind}", "2/0"),
        event(5, f"count/{kind}", "2"),
        event(6, f"dmesh/{kind}/x/c", "z"),
    ]


def span(token: int, began: float, end: float, kind: str = "lock") -> list[dict[str, object]]:
    return [
        {"what": "acquired", "kind": kind, "at": began, "token": token},
        {"what": "releasing", "kind": kind, "at": end, "token": token},
        {"what": "released", "kind": kind, "at": end, "token": token},
    ]


UNMADE = {"what": "guarded", "kind": "lock", "at": 0, "token": 1, "succeeded": True, "revision": 9}
LOCK, SEMAPHORE = journal("lock"), journal("semaphore")


def test_the_checker_accepts_what_is_right():
    told = {"client-1-0": span(1, 1.0, 2.0), "client-2-0": span(2, 2.5, 3.0)}
    assert check(History(LOCK, told))["lock taken"] == 2
    two = {"c-1-0": span(1, 1.0, 2.6, "semaphore"), "c-2-0": span(2, 2.5, 3.0, "semaphore")}
    assert check(History(SEMAPHORE, two))["semaphore changes"] == 2
    assert check(History(journal("election"), {}, [1, 0, 2]))["leaders seen"] == 3


@pytest.mark.parametrize(
    ("history", "match"),
    [
        (History(LOCK, {"c-1-0": span(1, 1.0, 2.6), "c-2-0": span(2, 2.5, 3.0)}), "2 hold the lock"),
        (
            History(SEMAPHORE, {f"c-{n}-0": span(t, 1.0, 2.0, "semaphore") for n, t in enumerate((1, 2, 6))}),
            "3 hold the semaphore",
        ),
        (History(LOCK, {"c-1-0": span(7, 1.0, 2.0)}), "never did"),
        (
            History(
                LOCK,
                {
                    "c": [
                        {
                            "what": "guarded",
                            "kind": "lock",
                            "at": 0,
                            "token": 1,
                            "succeeded": True,
                            "revision": 9,
                        }
                    ]
                },
            ),
            "was not made",
        ),
        (History([*LOCK, event(7, "guarded/lock", "1/1")]), "did not hold"),
        (History([*LOCK[:4], event(4, "guarded/lock", "2/0")]), "did not hold"),
        (History([*SEMAPHORE, event(7, "guarded/semaphore", "1/1")]), "did not hold"),
        (History([*LOCK, event(7, "count/lock", "2")]), "the count"),
        (History([LOCK[0], *LOCK[2:]]), "gaps"),
        (History(journal("election"), {}, [2, 1]), "leaders"),
        (History(journal("election"), {}, [3]), "leaders"),
    ],
)
def test_the_checker_finds_what_is_wrong(history, match):
    with pytest.raises(Violation, match=match):
        check(history)
