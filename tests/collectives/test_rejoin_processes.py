"""A process is killed, another one takes its task slot, and the collectives go on, over TCP."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.collectives.test_processes import WAYS
from tests.e2e import forkserver
from tests.waiting import free_ports

SIZE = 300_000
"""Elements of a large array, which is received straight into its memory."""


class Rank:
    """A process that runs `rejoin_worker`."""

    def __init__(
        self, rank: int, incarnation: int, way: str, joined: int = 0, port: int | None = None
    ) -> None:
        port = port or free_ports(1)[0]  # which nobody else gets before a successor
        arguments = [
            "-m",
            "tests.collectives.rejoin_worker",
            *map(str, (rank, incarnation, joined, port, way)),
        ]
        self._process = forkserver.start(
            [sys.executable, *arguments], os.environ, stdin=subprocess.PIPE, stderr=sys.__stderr__
        )
        self.row = {"rank": rank, "incarnation": incarnation, "port": self.answer()["port"]}

    def say(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def tell(self, do: str, **order: Any) -> None:
        self.say({"do": do, **order})

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        answer: dict[str, Any] = json.loads(line)
        assert "traceback" not in answer, answer["traceback"]
        return answer

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._end()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._end()

    def _end(self) -> None:
        self._process.wait(60)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class Job:
    """Some ranks, which reach each other in one way, and what a coordination service would tell them."""

    def __init__(self, size: int, way: str = "messages") -> None:
        self.way = way
        self._incarnations = itertools.count(1000)
        self.epoch = size
        self.ranks = [Rank(rank, next(self._incarnations), way) for rank in range(size)]
        for rank in self.ranks:
            rank.say(self.table())

    def table(self) -> list[dict[str, Any]]:
        return [rank.row for rank in self.ranks]

    def replace(self, victim: int, *, same_port: bool) -> None:
        self.epoch += 2
        port = self.ranks[victim].row["port"] if same_port else None
        self.ranks[victim] = Rank(victim, next(self._incarnations), self.way, self.epoch, port)
        self.ranks[victim].say(self.table())

    def all(self, do: str, **order: Any) -> list[dict[str, Any]]:
        for rank in self.ranks:
            rank.tell(do, **order)
        return [rank.answer() for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture(scope="module", params=WAYS)
def job(request):
    made = Job(3, request.param)
    yield made
    made.close()


@pytest.mark.timeout(300)
def test_killed_and_replaced_over_and_over(job):
    """All goes on with the same bits, and the one that survives them all keeps nothing of the others."""
    expected = job.all("use", size=SIZE)
    assert len({answer["world"] for answer in expected}) == 1
    figures: list[dict[str, int]] = []
    for turn in range(6):
        victim = 1 + turn % 2
        for rank in job.ranks:
            rank.tell("fail", size=SIZE if turn % 2 else 10)
        job.ranks[victim].kill()
        for rank in (job.ranks[0], job.ranks[3 - victim]):
            answer = rank.answer()
            assert answer["error"] == "PeerLostError", answer
            assert f"lost rank {victim}, task {victim}" in answer["message"]
        job.replace(victim, same_port=turn % 3 == 0)
        # One after the other, in another order each time: the first begin without waiting for the last.
        order = [job.ranks[(turn + shift) % 3] for shift in range(3)]
        for rank in order:
            rank.tell("renew", peers=job.table(), generation=job.epoch)
            rank.tell("use", size=SIZE)
        for rank in order:
            assert rank.answer() == {}
            assert rank.answer() == expected[0]
        job.ranks[0].tell("resources")
        figures.append(job.ranks[0].answer())
    settled, last = figures[2], figures[-1]
    assert last["fds"] <= settled["fds"]
    assert last["threads"] <= settled["threads"]
    assert last["rss"] - settled["rss"] < 8 * 2**20


def test_who_waits_does_not_compute(job):
    """After 50 ms of waiting for the others, less than 2 % of a core."""
    job.all("use", size=10)
    job.ranks[0].tell("wait")
    time.sleep(2.0)  # this is what it waits for
    for rank in job.ranks[1:]:
        rank.tell("wait")
    waited, *_ = [rank.answer() for rank in job.ranks]
    assert waited["seconds"] > 1.5
    assert waited["cpu"] < 0.05 + 0.02 * waited["seconds"], waited
