"""Collectives between real processes, over TCP."""

from __future__ import annotations

import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.collectives.cases import case, some_cases
from tests.collectives.process_calls import CALLS, MISMATCHES
from tests.collectives.process_checks import CHECKS
from tests.collectives.properties import MOVEMENTS, OF_A_PROCESS, REDUCTIONS, WITH_SERVICE
from tests.collectives.transport.harness import authority
from tests.e2e import forkserver

import dmesh.collectives
from dmesh import native

LIMIT = 90.0
OPERATIONS = [
    "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all",
    "permute", "send_recv", "exchange", "barrier", *CHECKS,
]  # fmt: skip


@functools.cache
def certificates() -> str:
    """Return a directory with a peer's certificate."""
    authority().issue("peer")
    return str(authority().path.parent)


class WorkerProcess:
    """A process that runs `process_worker`."""

    def __init__(self) -> None:
        self._process = forkserver.start(
            [sys.executable, "-m", "tests.collectives.process_worker"],
            {**os.environ, "DMESH_TEST_CERTIFICATES": certificates()},
            stdin=subprocess.PIPE,
            stderr=sys.__stderr__,
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
        self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        answer = self._answers.get(timeout=LIMIT)
        assert answer is not None, "the worker has ended"
        assert "traceback" not in answer, answer["traceback"]
        return answer

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

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
            self.kill()
            self._process.wait(10)
        self._reader.join(10)


class Pool:
    """Processes that form clusters of several sizes, which reach each other in one way."""

    def __init__(self, count: int, way: str = "messages", workers: Sequence[WorkerProcess] = ()) -> None:
        self.way = way
        self.workers = [*workers, *(WorkerProcess() for _ in range(count))]
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


WAYS = ["messages", *(["native", "dedicated", "encrypted"] if native.core() is not None else [])]


@pytest.fixture(scope="module", params=WAYS)
def pool(request):
    made = Pool(5, request.param)
    yield made
    made.end()


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation(pool, size, operation):
    pool.cluster(size)
    pool.all(size, "check", operation=operation)


def test_each_public_function_has_a_property():
    public = vars(dmesh.collectives).items()
    functions = {name for name, value in public if name in dmesh.collectives.__all__ and callable(value)}
    functions -= {name for name in functions if isinstance(getattr(dmesh.collectives, name), type)}
    assert functions == {*REDUCTIONS, *MOVEMENTS, *WITH_SERVICE, *OF_A_PROCESS}


@settings(
    max_examples=settings.default.max_examples * 2 // 5,
    # What follows a failed case fails, too, for ranks have left it at different places: nothing is shrunk.
    phases=[Phase.explicit, Phase.generate],
)
@given(size=st.integers(1, 5), drawn=some_cases(6), failing=st.none() | case("reset"))
def test_any_calls_give_what_numpy_gives(pool, size, drawn, failing):
    pool.cluster(size)
    pool.all(size, "run", cases=drawn)
    if failing is not None:
        pool.all(size, "run", cases=[failing])


def test_mismatches_between_processes(pool):
    """All ranks say what both sides called; then they reset the group, and it works again."""
    pool.cluster(3)
    for name, (_, sides) in MISMATCHES.items():
        for answer in pool.all(3, "mismatch", name=name):
            assert (answer["error"] == "CollectiveMismatchError") == (name != "tags"), answer
            for side in sides:
                assert side in answer["message"], name
    pool.all(3, "check", operation="transfers")


@pytest.fixture(scope="module")
def forker():
    """A process that forks others, which costs less than to start them."""
    worker = WorkerProcess()
    yield worker
    worker.end()


@pytest.mark.parametrize(
    ("call", "way", "victim"),
    [
        (call, way, (at + of) % 3)
        for of, way in enumerate(WAYS)
        for at, call in enumerate(CALLS)
        if way != "encrypted" or at % 4 == 0  # otherwise they are like the dedicated ones
    ],
)
def test_killed_in_the_middle(forker, call, way, victim):
    """kill -9: all others raise PeerLostError that names it, long before their time runs out."""
    forker.tell("kill in", call=call, way=way, victim=victim)
    for answer in forker.answer()["answers"]:
        assert "traceback" not in answer, answer["traceback"]
        assert answer["rank"] == victim
        name = f"lost rank {victim}, /job:worker/task:{victim} (host h, pid {forker.pid}): "
        assert name in answer["message"]
        assert answer["seconds"] < 10  # milliseconds, but the machine may be busy
        assert "group world has failed and cannot be used any more" in answer["again"]


@pytest.mark.parametrize("victim", [0, 1])
def test_interrupted_in_the_middle(pool, victim):
    """Ctrl-C: the process ends with a KeyboardInterrupt, the other raises an error that names it.

    The last test of the pool, each time of another two processes.
    """
    pair = Pool(0, pool.way, pool.workers[2 * victim : 2 * victim + 2])
    pair.cluster(2)
    assert pair.all(2, "reduce for ever") == [{"running": True}] * 2
    pair.workers[victim].interrupt()
    assert pair.workers[victim].ended() == -signal.SIGINT
    answer = pair.workers[1 - victim].answer()
    assert answer["error"] in ("CollectiveError", "PeerLostError")
    assert f"rank {victim}" in answer["message"]


def test_ctrl_c_leaves_no_lock_behind():
    worker = WorkerProcess()
    try:
        worker.tell("interrupt waits", rounds=300)
        assert worker.answer() == {"interrupted": 300, "locked": 0}
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
