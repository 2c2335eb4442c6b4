"""Collectives between real processes, over TCP."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.collectives.process_checks import CHECKS

from dmesh import native

LIMIT = 90.0
OPERATIONS = [
    "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all",
    "permute", "send_recv", "exchange", "barrier", *CHECKS,
]  # fmt: skip


class WorkerProcess:
    """A process that runs `process_worker`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.collectives.process_worker"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def tell(self, do: str, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        answer = self._answers.get(timeout=LIMIT)
        assert answer is not None, "the worker has ended"
        assert "traceback" not in answer, answer["traceback"]
        return answer

    def kill(self) -> None:
        self._process.kill()

    def interrupt(self) -> None:
        """Presses Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def ended(self) -> int:
        """Waits for its end, which it is to find by itself; returns its exit status."""
        return self._process.wait(LIMIT)

    def end(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait(10)
        self._reader.join(10)


class Pool:
    """Processes that form clusters of several sizes, which reach each other in one way."""

    def __init__(self, count: int, way: str = "messages") -> None:
        self.way = way
        self.workers = [WorkerProcess() for _ in range(count)]
        self._sizes: set[int] = set()

    def all(self, size: int, do: str, **order: Any) -> list[dict[str, Any]]:
        """Tells the first `size` workers the same; returns their answers."""
        for rank, worker in enumerate(self.workers[:size]):
            worker.tell(do, size=size, rank=rank, **order)
        return [worker.answer() for worker in self.workers[:size]]

    def cluster(self, size: int) -> None:
        """Connects the first `size` workers, unless they are."""
        if size not in self._sizes:
            self._sizes.add(size)
            ports = [answer["port"] for answer in self.all(size, "listen", way=self.way)]
            self.all(size, "connect", ports=ports, pids=[worker.pid for worker in self.workers[:size]])

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


WAYS = ["messages", *(["native", "dedicated"] if native.core() is not None else [])]


@pytest.fixture(params=WAYS)
def way(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=WAYS)
def pool(request):
    made = Pool(5, request.param)
    yield made
    made.end()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation(pool, size, operation):
    pool.cluster(size)
    pool.all(size, "check", operation=operation)


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_in_the_middle(victim, way):
    """kill -9: all others raise PeerLostError that names it within 2 seconds."""
    pool = Pool(4, way)
    try:
        pool.cluster(4)
        assert pool.all(4, "reduce for ever") == [{"running": True}] * 4
        killed_at = time.monotonic()
        pool.workers[victim].kill()
        for rank, worker in enumerate(pool.workers):
            if rank != victim:
                answer = worker.answer()
                assert answer["error"] == "PeerLostError"
                assert answer["rank"] == victim
                pid = pool.workers[victim].pid
                name = f"lost rank {victim}, /job:worker/task:{victim} (host h, pid {pid}): "
                assert name in answer["message"]
                assert answer["at"] - killed_at < 2
        survivors = [worker for rank, worker in enumerate(pool.workers) if rank != victim]
        for worker in survivors:
            worker.tell("check", size=4, operation="barrier")
        for worker in survivors:
            with pytest.raises(AssertionError, match="group world has failed and cannot be used any more"):
                worker.answer()
    finally:
        pool.end()


def test_a_mismatch_between_processes(way):
    pool = Pool(3, way)
    try:
        pool.cluster(3)
        for answer in pool.all(3, "mismatch"):
            assert answer["error"] == "CollectiveMismatchError"
            assert "rank 1 called all_reduce(sum, float64, shape (4,))" in answer["message"]
    finally:
        pool.end()


@pytest.mark.parametrize("victim", [0, 1])
def test_interrupted_in_the_middle(victim, way):
    """Ctrl-C: the process ends with a KeyboardInterrupt, the other raises an error that names it."""
    pool = Pool(2, way)
    try:
        pool.cluster(2)
        assert pool.all(2, "reduce for ever") == [{"running": True}] * 2
        pool.workers[victim].interrupt()
        assert pool.workers[victim].ended() == -signal.SIGINT
        answer = pool.workers[1 - victim].answer()
        assert answer["error"] in ("CollectiveError", "PeerLostError")
        assert f"rank {victim}" in answer["message"]
    finally:
        pool.end()


def test_ctrl_c_leaves_no_lock_behind():
    worker = WorkerProcess()
    try:
        worker.tell("interrupt waits", rounds=600)
        assert worker.answer() == {"interrupted": 600, "locked": 0}
    finally:
        worker.end()


@pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")
def test_a_rank_that_was_stopped_in_a_reduction_writes_to_no_later_array():
    """It wakes when the others have timed out and dropped the array that it writes to."""
    pool = Pool(2, "native")
    try:
        pool.cluster(2)
        first, second = pool.workers
        for _ in range(20):
            second.tell("reduce in shared memory", size=2)
            first.tell("reduce in shared memory", size=2, peer=second.pid)
            ended = first.answer()
            assert second.answer()["error"]
            first.tell("go on")
            kept = first.answer()["kept"]
            if ended["in time"]:
                assert ended["error"] == "CollectiveTimeoutError"
                assert kept
                return
        pytest.fail("the rank was never stopped in time")
    finally:
        pool.end()
