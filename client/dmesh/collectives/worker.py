"""Thread that carries out the asynchronous calls of one group's stream, in order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from dmesh.coordination import waiting

Job = tuple["Future[Any]", Callable[[], Any]]


class Worker:
    """Runs jobs one after the other in a thread of its own, started with the first job.

    The thread knows the queue alone, so that a forgotten group can be collected and end it.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: list[int] = []  # its ident, once it runs
        self._lock = threading.Lock()
        self._started = False
        self._stopped = False
        self._last: weakref.ref[Future[Any]] | None = None

    @property
    def busy(self) -> bool:
        """True while a job is queued or under way."""
        last = None if self._last is None else self._last()
        return last is not None and not last.done()

    def submit(self, future: Future[Any], job: Callable[[], Any]) -> None:
        """Queue a job whose outcome goes to `future`, which cannot be cancelled: other ranks count on it."""
        future.set_running_or_notify_cancel()
        with self._lock:
            if not self._stopped:
                if not self._started:
                    self._started = True
                    waiting.Worker(partial(_work, self._jobs, self._thread), self._name).start()
                self._last = weakref.ref(future)
                self._jobs.put((future, job))
                return
        _do(future, job)

    def catch_up(self, enough: Callable[[], bool]) -> None:
        """Run queued jobs until it is enough, if called on the thread itself, by a future's callback."""
        while threading.get_ident() in self._thread and not enough():
            try:
                item = self._jobs.get_nowait()
            except Empty:
                return
            if item is None:
                self._jobs.put(None)
                return
            _do(*item)

    def stop(self) -> None:
        """End the thread once its queue is empty; later jobs run on the thread that submits them."""
        with self._lock:
            self._stopped = True
            self._jobs.put(None)


def _work(jobs: SimpleQueue[Job | None], thread: list[int]) -> None:
    thread.append(threading.get_ident())
    while (item := jobs.get()) is not None:
        _do(*item)
        del item  # or its group would stay alive until the next job


def _do(future: Future[Any], job: Callable[[], Any]) -> None:
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001 -- handed to whoever asks for the result
        future.set_exception(error)
    else:
        future.set_result(result)
