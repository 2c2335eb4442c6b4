"""Waiting of threads for each other, in ways that Ctrl-C can end without leaving a lock behind.

`KeyboardInterrupt` is raised in the main thread between any two bytecodes, also inside `Condition.__enter__`,
after the lock was taken and before anybody is obliged to release it: the lock is then held for ever. gRPC's
Python layer is built on conditions, and one such accident silences a whole channel. So the threads of users
only take locks and queues that are implemented in C, which are taken or not, and never run gRPC's code: a
thread of the agent does.
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from dmesh._locks import Lock
from dmesh._log import logger

T = TypeVar("T")


def take(box: queue.SimpleQueue[T], seconds: float) -> T:
    """Take what comes first out of a queue; raise `queue.Empty` after some seconds. One taker at a time.

    The queue's own time-out can be none: if an item was taken before without waiting, or none ever came, the
    queue's lock is open, `get` passes it, looks at the clock again, and takes time that has run out meanwhile
    for endless time (CPython 3.11 and 3.12 at least). Taking without waiting closes it.
    """
    try:
        return box.get_nowait()
    except queue.Empty:
        return box.get(timeout=seconds)


def may_start_threads() -> bool:
    """Return whether a new thread would run.

    CPython 3.12 and later refuse to start threads once the program is over, already while functions of
    `atexit` run ("can't create new thread at interpreter shutdown"). gRPC starts a thread for a call with a
    future unless another one is under way, and does not recover if it cannot: no such call ends any more, and
    neither does closing the channel. A call that blocks its thread needs no other one.
    """
    return threading.main_thread().is_alive()


class Bell:
    """Lets threads wait for a condition that others bring about. An interrupt-proof `threading.Condition`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sleepers: list[queue.SimpleQueue[None]] = []

    def ring(self) -> None:
        """Wake all waiting threads."""
        with self._lock:
            sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.put(None)

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition holds, looking whenever the bell rings; return whether it does."""
        deadline = time.monotonic() + seconds
        while True:
            sleeper: queue.SimpleQueue[None] = queue.SimpleQueue()
            with self._lock:
                self._sleepers.append(sleeper)
            try:
                # Looked at after lying down, so that a ring in between is heard.
                if condition():
                    return True
                if (left := deadline - time.monotonic()) <= 0:
                    return False
                try:
                    take(sleeper, left)
                except queue.Empty:
                    continue
            finally:
                with self._lock:
                    if sleeper in self._sleepers:
                        self._sleepers.remove(sleeper)


class Worker:
    """A daemon thread which, unlike a `threading.Thread`, an interrupted thread may start and join.

    Args:
        run: What it does.
        name: Its name.
    """

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._run = run
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._begun = False

    def start(self) -> None:
        """Start it, once."""
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def begin() -> None:
            try:
                self._thread.start()
            except BaseException as error:  # noqa: BLE001 -- raised below
                started.put(error)
            else:
                started.put(None)

        self._begun = True
        _thread.start_new_thread(
            begin, ()
        )  # Thread.start() waits on a condition, and is not ours to interrupt
        if (error := started.get()) is not None:
            self._begun = False
            raise error

    def join(self, timeout: float) -> None:
        """Wait for its end, for `timeout` seconds at most; return at once when called on that thread."""
        if self._begun and self._thread is not threading.current_thread():
            with contextlib.suppress(queue.Empty):
                take(self._ended, timeout)
                self._ended.put(None)

    def _main(self) -> None:
        try:
            self._run()
        finally:
            self._ended.put(None)


def do_aside(name: str, job: Callable[[], object]) -> None:
    """Run a job on a thread of its own; on this one if there can be no more threads."""
    try:
        Worker(job, name).start()
    except RuntimeError:
        job()


def carry_out(
    job: Callable[[], object], submit: Callable[[Callable[[], None]], None], check: Callable[[], object]
) -> None:
    """Have a job run on another thread, and wait until it has. Ctrl-C only ends the waiting.

    Args:
        job: What to do.
        submit: Gives a job to the thread; does not wait.
        check: Called now and then while it is waited for; raises if the thread has ended.
    """
    done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run() -> None:
        job()
        done.put(None)

    submit(run)
    while True:
        check()
        with contextlib.suppress(queue.Empty):
            take(done, 0.1)
            return


class Inbox:
    """Actions for a thread that waits in a selector, handed over by any thread; never waits.

    The thread watches `wakee`, calls `woken` when that is readable, and `run` before it waits again.
    """

    def __init__(self) -> None:
        self._actions: deque[Callable[[], object]] = deque()
        self._waker, self.wakee = socket.socketpair()
        self._waker.setblocking(False)
        self.wakee.setblocking(False)
        self.reader: int | None = None
        """The thread; its own actions need not wake it."""

    def __len__(self) -> int:
        return len(self._actions)

    def put(self, action: Callable[[], object]) -> None:
        """Have an action run on the thread, in the order of the calls."""
        self._actions.append(action)
        if threading.get_ident() != self.reader:
            self.wake()

    def wake(self) -> None:
        """Make the thread look."""
        with contextlib.suppress(OSError):  # it has been woken often enough, or has ended
            self._waker.send(b"\0")

    def woken(self) -> None:
        """Take note of having been woken."""
        with contextlib.suppress(BlockingIOError):
            self.wakee.recv(4096)

    def run(self) -> None:
        """Run the actions that are there."""
        for _ in range(len(self._actions)):
            self._actions.popleft()()

    def close(self) -> None:
        """Close the sockets."""
        self._waker.close()
        self.wakee.close()


class SerialExecutor:
    """A thread that runs short jobs for other threads, in order."""

    def __init__(self, name: str) -> None:
        self._lock = Lock()
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._closed = False
        self._worker = Worker(self._run, name)
        self._worker.start()

    def submit(self, job: Callable[[], object]) -> bool:
        """Have a job run; return False if it is too late for that. A job must not block."""
        with self._lock:
            if self._closed:
                return False
            self._jobs.put(job)
            return True

    def close(self, last: Callable[[], object], timeout: float) -> None:
        """Run the submitted jobs, then `last`, and end the thread. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(last)
                self._jobs.put(None)
        self._worker.join(timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 -- one failed job must not stop those of the other threads
                logger.exception("a call to the coordinator failed in an unexpected way")
