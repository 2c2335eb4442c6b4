"""Readers of a client's collectives: traces and spans get all calls that have ended, on one thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from dmesh._log import logger
from dmesh.collectives.call_record import CallRecord
from dmesh.coordination.waiting import Worker, take

_MAX_QUEUED = 1000
"""Batches that may wait for the thread; later ones are dropped and counted as lost."""
_CLOSE_WITHIN = 10.0
"""Seconds that a reader has for the calls that are left when it is closed."""


class EventReader(ABC):
    """A consumer of all calls that have ended, such as a trace. See `EventRing.add_reader`.

    Args:
        scope: Returns the context of the calling thread, to be kept with each call; the same object as long
            as the context is the same. It is called on the threads that make calls: it must be quick, and
            must not raise. None if the reader does not use scopes.
    """

    def __init__(self, scope: Callable[[], object] | None = None) -> None:
        self.scope = scope
        self.lost = 0
        """Calls that were dropped because the thread could not keep up."""
        self.detach: Callable[[], object] | None = None
        """Passes on the calls that are left, and no more; set by the ring."""

    @abstractmethod
    def read(self, calls: Sequence[CallRecord]) -> None:
        """Take a batch of calls. On the readers' thread, like `finish`."""

    @abstractmethod
    def finish(self) -> None:
        """Take note that no more calls follow."""

    def paused(self) -> bool:
        """Return whether it is too early to fetch calls from native endpoints. Any thread; must be quick."""
        return False

    def close(self) -> None:
        """Read the calls that are left, and end. Idempotent."""
        detach, self.detach = self.detach, None
        if detach is not None:
            detach()


class ReaderThread:
    """The thread that passes batches of calls to readers, as long as there are readers.

    Args:
        idle: Called on the thread when there has been nothing to do for `every` seconds.
        every: See `idle`.
    """

    def __init__(self, idle: Callable[[], object], every: float) -> None:
        self.readers: tuple[EventReader, ...] = ()
        self._idle, self._every = idle, every
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def add(self, reader: EventReader) -> None:
        """Begin to pass calls to a reader."""
        with self._lock:
            self.readers = (*self.readers, reader)
            first = len(self.readers) == 1
        if first:
            Worker(self._run, "dmesh-events").start()

    def put(self, calls: Sequence[CallRecord]) -> None:
        """Pass calls to the readers. Any thread; does not wait."""
        if self._queue.qsize() < _MAX_QUEUED:
            self._queue.put(partial(_pass_on, self.readers, calls))
            return
        for reader in self.readers:
            reader.lost += len(calls)

    def remove(self, reader: EventReader) -> None:
        """Pass no more calls to a reader; waits until it has taken those that it was given."""
        done: SimpleQueue[None] = SimpleQueue()
        with self._lock:
            self.readers = tuple(other for other in self.readers if other is not reader)
            self._queue.put(reader.finish)
            self._queue.put(lambda: done.put(None))
            if not self.readers:
                self._queue.put(None)
        try:
            take(done, _CLOSE_WITHIN)
        except Empty:
            logger.warning("%s did not end within %g s", type(reader).__name__, _CLOSE_WITHIN)

    def _run(self) -> None:
        while True:
            try:
                job: Callable[[], object] | None = take(self._queue, self._every)
            except Empty:
                job = self._idle
            if job is None:
                return
            try:
                job()
            except Exception:  # noqa: BLE001 -- one reader's bug must not stop the others
                logger.exception("an event reader has failed")


def _pass_on(readers: Sequence[EventReader], calls: Sequence[CallRecord]) -> None:
    for reader in readers:
        reader.read(calls)
