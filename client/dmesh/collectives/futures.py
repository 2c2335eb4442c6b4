"""Futures of nonblocking calls, and the threads that complete them.

A stream's worker carries out its asynchronous calls, in order. A nonblocking `send` or `recv` begins at once
in the native endpoint of its stream. Most are complete then: the slot of a small send is free, the data of a
receive has come. Any other stays in the endpoint, and is driven by the thread that waits for its result. A
transfer that takes longer, or that nobody waits for, moves to the stream's worker, where it has the
time-outs, questions and failures of every other call.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from concurrent.futures._base import FINISHED
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from dmesh._locks import Lock
from dmesh.coordination import waiting
from dmesh.native import Endpoint

_DRIVEN = 0.01
"""Seconds for which a waiting thread drives a transfer itself."""
_STEP = 50e-6
"""Seconds for which it drives one transfer before it looks at the others."""
_NAPS = 0.002, 0.02
"""Shortest and longest nap of the background thread, in seconds."""
_IDLE = 1.0
"""Seconds without a pending transfer after which the background thread ends."""

T = TypeVar("T")

Job = tuple["Future[Any]", Callable[[], Any]]
HandOver = Callable[["Transfer", Endpoint], None]
"""Lets a stream's thread carry on the transfer that is pending in its endpoint."""


class Future(concurrent.futures.Future[T]):
    """Result of an asynchronous call, which may not be there yet."""

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the end of the call; the same as `result`.

        Args:
            timeout: Seconds to wait, after which the call goes on; None for as long as it takes.

        Returns:
            The result of the call.

        Raises:
            TimeoutError: The call is still under way.
            CollectiveError: The call has failed.
        """
        return self.result(timeout)


class Worker:
    """Thread of one stream, which runs jobs one after the other; started with the first job.

    It knows the queue alone, so that a forgotten group can be collected and end it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: list[int] = []  # its ident, once it runs
        self._lock = Lock()
        self._started = self._stopped = False
        self._last: weakref.ref[Future[Any]] | None = None

    @property
    def busy(self) -> bool:
        """True while a job is queued or under way."""
        last = None if self._last is None else self._last()
        return last is not None and not last.done()

    def submit(self, future: Future[Any], job: Callable[[], Any]) -> None:
        """Queue a job whose outcome goes to `future`."""
        with self._lock:
            if not self._stopped:
                if not self._started:
                    self._started = True
                    waiting.Worker(partial(_work, self._jobs, self._thread), self._name).start()
                self._last = weakref.ref(future)
                self._jobs.put((future, job))
                return
        do(future, job)

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
            do(*item)

    def stop(self) -> None:
        """End the thread once its queue is empty; later jobs run on the thread that submits them."""
        with self._lock:
            self._stopped = True
            self._jobs.put(None)


def _work(jobs: SimpleQueue[Job | None], thread: list[int]) -> None:
    thread.append(threading.get_ident())
    while (item := jobs.get()) is not None:
        do(*item)
        del item  # or its group would stay alive until the next job


def do(future: Future[Any], job: Callable[[], Any]) -> None:
    """Run a job on this thread, whose outcome goes to `future`."""
    complete, outcome = _outcome(future, job)
    complete(outcome)


def _outcome(future: Future[Any], job: Callable[[], Any]) -> tuple[Callable[[Any], None], Any]:
    try:
        return future.set_result, job()
    except BaseException as error:  # noqa: BLE001 -- handed to whoever asks for the result
        return future.set_exception, error


def do_now(future: Future[Any], job: Callable[[], Any]) -> None:
    """Run a job on this thread, whose outcome goes to `future`; callbacks of the future run on another."""
    complete, outcome = _outcome(future, job)
    with future._condition:  # no callback is added meanwhile
        if not future._done_callbacks:  # type: ignore[attr-defined]
            complete(outcome)
            return
    waiting.do_aside("dmesh-callbacks", partial(complete, outcome))


class Completed(Future[Any]):
    """Future of a transfer that was complete when the call returned."""

    _state = FINISHED
    _exception = None

    def __init__(self, result: Any) -> None:  # without the condition and the lists, which are rarely needed
        self._result = result

    _condition: Any = cached_property(lambda self: threading.Condition())
    _waiters: Any = cached_property(lambda self: [])

    def result(self, timeout: float | None = None) -> Any:
        """Return the result."""
        return self._result


class Joined(Future[Any]):
    """Future of a result, complete when another future is, too; waiting for it drives both."""

    def __init__(self, main: Future[Any], other: Future[Any]) -> None:
        super().__init__()
        self._both = main, other
        self._lock = Lock()
        for one in self._both:
            one.add_done_callback(self._one_is_done)

    def _one_is_done(self, _: object) -> None:
        if not all(Future.done(one) for one in self._both):
            return
        errors = [error for one in self._both if (error := Future.exception(one)) is not None]
        with self._lock:
            if Future.done(self):
                return
            if errors:
                self.set_exception(errors[0])
            else:
                self.set_result(Future.result(self._both[0]))

    def cancel(self) -> bool:
        """Return False."""
        return False

    def done(self) -> bool:
        """Return whether both are complete, after an attempt to complete them."""
        main, other = self._both
        return other.done() & main.done() and super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Drive both until they are complete; see `concurrent.futures.Future.result`."""
        return super().result(self._wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Drive both until they are over; see `concurrent.futures.Future.exception`."""
        return super().exception(self._wait(timeout))

    def _wait(self, timeout: float | None) -> float | None:
        began = time.monotonic()
        for one in self._both:
            one.exception(timeout)
            if timeout is not None:
                timeout = max(timeout - (time.monotonic() - began), 0.0)
        return timeout


class Transfer(Future[Any]):
    """Future of a transfer pending in its endpoint; cannot be cancelled, as another rank counts on it."""

    def __init__(self, endpoint: Endpoint, hand_over: HandOver) -> None:
        super().__init__()
        self.looked_at = False
        """True if the background thread has seen it."""
        self.endpoint: Endpoint | None = endpoint
        """The endpoint; None once the transfer is complete, or with the stream's thread."""
        self._hand_over: HandOver | None = hand_over
        self._driving = Lock()
        self._outcome: tuple[Callable[[Future[Any], Any], None], Any] | None = None

    def cancel(self) -> bool:
        """Return False."""
        return False

    def running(self) -> bool:
        """Return whether it is pending."""
        return not super().done()

    def done(self) -> bool:
        """Return whether it is complete, after an attempt to complete it."""
        if not super().done() and not self._driving.locked():
            self._drive(0.0)
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Drive the transfer until it is complete; see `concurrent.futures.Future.result`."""
        return super().result(self._wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Drive the transfer until it is over; see `concurrent.futures.Future.exception`."""
        return super().exception(self._wait(timeout))

    def _wait(self, timeout: float | None) -> float | None:
        """Drive the transfer for a while; return the rest of the time-out."""
        if self.endpoint is None:
            return timeout
        began = now = time.monotonic()
        until = began + (_DRIVEN if timeout is None else min(max(timeout, 0.0), _DRIVEN))
        while True:
            # The other rank may wait for another transfer of this one, as this one waits for it.
            others = [transfer for transfer in tuple(_pending.transfers) if transfer is not self]
            if self._drive(min(_STEP, until - now) if others else until - now):
                break
            now = time.monotonic()
            for transfer in others:
                transfer.settle(0.0) if now >= until else transfer.done()
            if now >= until:
                self.settle(0.0)
                break
        return None if timeout is None else timeout - (time.monotonic() - began)

    def settle(self, seconds: float) -> None:
        """Drive the transfer for at most so long, then leave it to the stream's thread."""
        if self._drive(seconds):
            return
        with self._driving:
            endpoint, hand_over = self.endpoint, self._hand_over
            if endpoint is not None and hand_over is not None and self._outcome is None:
                self._release()
                hand_over(self, endpoint)

    def _release(self) -> None:
        self.endpoint = self._hand_over = None
        _pending.transfers.discard(self)

    def _drive(self, seconds: float) -> bool:
        """Go on for at most so long, in turns with other threads; False if that is not all.

        A function that Ctrl-C ends at any place can be called again.
        """
        endpoint = self.endpoint
        if endpoint is None:
            return True
        with self._driving:
            if self.endpoint is not endpoint:
                return True
            if self._outcome is None:
                try:
                    value = endpoint.progress(seconds)
                    if value is endpoint:
                        return False
                    self._outcome = Future.set_result, value
                except BaseException as error:
                    if not endpoint.pending:
                        self._outcome = Future.set_exception, error
                    elif isinstance(error, Exception):
                        return False  # the stream's thread meets it again, and the group fails of it
                    else:
                        raise
            complete, value = self._outcome
        with contextlib.suppress(InvalidStateError):  # another thread completes it at the same time
            complete(self, value)
        self._release()
        return True


class _Pending:
    """Transfers pending in endpoints, and the thread that completes those without a waiting caller.

    The thread is not woken for a new transfer: it naps while there have been some lately, then ends.
    """

    def __init__(self) -> None:
        self.transfers: set[Transfer] = set()
        self.runs = False
        self._lock = Lock()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self.runs:
                return
            self.runs = True
        waiting.Worker(self._look_after, "dmesh-transfers").start()

    def _look_after(self) -> None:
        shortest, longest = _NAPS
        nap, idle_since = shortest, time.monotonic()
        while True:
            time.sleep(nap)
            nap = shortest if self._settle_old() else min(2 * nap, longest)
            if self.transfers:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > _IDLE:
                with self._lock:
                    self.runs = False  # before the last look: who adds one later starts the thread again
                    if not self.transfers:
                        return
                    self.runs = True

    def _settle_old(self) -> bool:
        """Settle the transfers that were pending at the last look already; False if there are none."""
        transfers = list(self.transfers)
        old = [transfer for transfer in transfers if transfer.looked_at]
        for transfer in old:
            transfer.settle(0.0)
        for transfer in transfers:
            transfer.looked_at = True
        return bool(old)


_pending = _Pending()


def _forget_all() -> None:
    global _pending
    _pending = _Pending()


os.register_at_fork(after_in_child=_forget_all)


def pend(endpoint: Endpoint, hand_over: HandOver) -> Transfer:
    """Return the future of the transfer that has just begun in an endpoint."""
    transfer = Transfer(endpoint, hand_over)
    _pending.transfers.add(transfer)
    if not _pending.runs:
        _pending.start()
    return transfer


def settle(endpoint: Endpoint | None) -> None:
    """Hand an endpoint's pending calls over to its stream's thread, before another call of the stream."""
    if endpoint is not None and endpoint.pending:
        for transfer in list(_pending.transfers):
            if transfer.endpoint is endpoint:
                transfer.settle(0.0)


def then(found: Future[Any], finish: Callable[[Any], Any]) -> Future[Any]:
    """Return a future for a function of another future's result."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def complete(done: concurrent.futures.Future[Any]) -> None:
        try:
            future.set_result(finish(done.result()))
        except BaseException as error:  # noqa: BLE001 -- handed to whoever asks for the result
            future.set_exception(error)

    found.add_done_callback(complete)
    return future
