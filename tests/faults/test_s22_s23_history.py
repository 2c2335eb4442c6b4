"""Scenarios 22 and 23: what clients and watchers are told can be true, whatever fails meanwhile.

Every client writes down its operations; `history` has what is checked of them. The histories of a run that
failed are in its artefacts; `python -m tests.faults.history_check DIRECTORY` looks at them again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.history_check import MINIMUM_RATE, check_directory
from tests.faults.processes import PATIENCE, ServerProcess

from dmesh.testing import FaultProxy

SECONDS = float(os.environ.get("DMESH_FAULTS_HISTORY") or 30)
WRITERS = 8
WORKER = Path(__file__).with_name("history_worker.py")


class Writer:
    """A client process with a history, which may be killed and replaced."""

    def __init__(self, address: str, index: int, artefacts: Path, life: int, seed: int) -> None:
        name = f"client-{index}-{life}"
        self.index, self.life, self.address, self.seed = index, life, address, seed
        self._artefacts = artefacts
        with (artefacts / f"{name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(WORKER),
                    address,
                    str(index),
                    str(1 + WRITERS),
                    str(artefacts / f"{name}.jsonl"),
                    f"{seed}/{index}/{life}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.lines: list[str] = []
        self._said = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                with self._said:
                    self.lines.append(line.strip())
                    self._said.notify_all()

    def said(self, what: str) -> None:
        with self._said:
            assert self._said.wait_for(lambda: what in self.lines, PATIENCE), (
                f"client {self.index} did not say {what!r} but {self.lines}: see {self._artefacts}"
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def replacement(self) -> Writer:
        self.kill()
        return Writer(self.address, self.index, self._artefacts, self.life + 1, self.seed)

    @property
    def fenced(self) -> bool:
        return self.process.poll() == 3

    def finish(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    made: list[Writer] = []
    yield made
    for writer in made:
        writer.kill()


def break_things(
    chance: random.Random, server: ServerProcess, proxies: list[FaultProxy], writers: list[Writer], end: float
) -> dict[str, int]:
    """Injects one fault after another until the end, and takes all of them back; returns how many of each."""
    count: dict[str, int] = {}

    def server_killed() -> None:
        server.restart(down=chance.choice([0.0, 0.2, 1.0]))

    def client_killed() -> None:
        position = chance.randrange(1, len(writers))
        writers[position] = writers[position].replacement()

    def partition() -> None:
        with chance.choice(proxies).drop(chance.choice(["both", "to_client", "to_target"])):
            time.sleep(chance.uniform(0.2, 2.5))

    def reset() -> None:
        chance.choice(proxies).reset()

    def slow() -> None:
        with chance.choice(proxies).delay(0.05, jitter=0.05):
            time.sleep(chance.uniform(0.2, 1.0))

    faults: list[Callable[[], None]] = [server_killed, client_killed, partition, reset, slow]
    for fault in faults[: 2 if end - time.monotonic() < 20 else 5]:  # each at least once
        fault()
        count[fault.__name__] = count.get(fault.__name__, 0) + 1
    while time.monotonic() < end:
        time.sleep(chance.uniform(0.1, 1.5))
        for position, writer in enumerate(writers):
            if writer.fenced:
                writers[position] = writer.replacement()
                count["writers_fenced"] = count.get("writers_fenced", 0) + 1
        fault = chance.choice(faults)
        fault()
        count[fault.__name__] = count.get(fault.__name__, 0) + 1
    return count


@pytest.mark.faults
@pytest.mark.timeout(600 + 4 * SECONDS)
@pytest.mark.parametrize("broken", [True, False], ids=["faults", "calm"])
def test_what_clients_are_told_can_be_true(broken, make_server, writers, artefacts, chance, seed, figures):
    """Linearizable operations; ordered, unique, complete and resumable watches."""
    # Who is cut off for some seconds is to come back, and not to be replaced each time.
    server = make_server().start()
    proxies = [FaultProxy(server.address).start() for _ in range(3)]
    try:
        writers.append(Writer(server.address, 0, artefacts, 0, seed))
        writers.extend(
            Writer(proxies[index % 3].address, index, artefacts, 0, seed) for index in range(1, 1 + WRITERS)
        )
        for writer in writers:
            writer.said("joined")
        injected: dict[str, int] = {}
        if broken:
            injected = break_things(chance, server, proxies, writers, time.monotonic() + SECONDS)
        else:
            time.sleep(SECONDS / 3)  # of nothing but traffic
        for proxy in proxies:
            proxy.heal()
        for writer in writers[1:]:
            writer.said("joined")  # the last replacement, too
        for writer in writers[1:]:
            writer.finish()
        for writer in writers[1:]:
            if not writer.fenced:
                writer.said("done")
        writers[0].finish()
        writers[0].said("done")
    finally:
        for proxy in proxies:
            proxy.close()
    found = check_directory(artefacts)
    for name, number in (injected | found).items():
        figures.add(f"{name} ({'with faults' if broken else 'calm'})", number, "")
    assert found["operations per second"] >= MINIMUM_RATE
    if broken:
        assert injected["server_killed"]
        assert injected["client_killed"]
