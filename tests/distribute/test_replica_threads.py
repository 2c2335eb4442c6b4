"""Threads that are used again, and when they are not."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

import pytest
from tests.waiting import eventually

from dmesh.distribute import MirroredStrategy
from dmesh.distribute.replica_threads import ReplicaThreads


def running(threads: ReplicaThreads) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if getattr(one, "_target", None) == threads._serve]


def names(threads: ReplicaThreads) -> set[str]:
    return {one.name for one in running(threads)}


def test_a_thread_that_is_idle_gets_the_next_work_and_its_name() -> None:
    threads = ReplicaThreads(idle_seconds=20)
    seen = []
    for name in ("first", "second"):
        threads.start(lambda: seen.append(threading.current_thread().ident), name)
        eventually(lambda: names(threads) == {"dmesh-replica-idle"} and len(threads._idle) == 1)
    assert len(seen) == 2
    assert len(set(seen)) == 1


def test_a_thread_that_is_busy_holds_nobody_up() -> None:
    threads = ReplicaThreads(idle_seconds=20)
    release, done = threading.Event(), threading.Semaphore(0)
    threads.start(lambda: release.wait(20), "busy")
    threads.start(done.release, "other")
    assert done.acquire(timeout=20)
    release.set()
    eventually(lambda: len(threads._idle) == 2)


def test_a_thread_without_work_ends_and_keeps_nothing() -> None:
    class Value:
        pass

    threads = ReplicaThreads(idle_seconds=0.01)
    value = Value()
    gone = weakref.ref(value)
    threads.start(lambda value=value: None, "short")
    del value
    eventually(lambda: gone() is None and not running(threads))
    assert not threads._idle
    done = threading.Event()
    threads.start(done.set, "again")
    assert done.wait(20)


def test_steps_use_the_threads_of_steps_before(monkeypatch) -> None:
    monkeypatch.setenv("DMESH_NUM_CPU_DEVICES", "4")
    strategy = MirroredStrategy()
    seen = set()
    for _ in range(50):
        seen.update(strategy.experimental_local_results(strategy.run(threading.get_ident)))
    assert len(seen) < 50, "four threads for each step would be 200"


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_child_process_has_threads_of_its_own() -> None:
    program = """
import os
from dmesh.distribute import MirroredStrategy
strategy = MirroredStrategy()
strategy.run(lambda: None)
child = os.fork()
if child == 0:
    strategy.run(lambda: None)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        check=True,
        timeout=60,
        env={"DMESH_NUM_CPU_DEVICES": "4", "PATH": ""},
    )
