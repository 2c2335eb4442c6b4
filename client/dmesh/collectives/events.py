"""Event ring of a client's collectives: the last calls, for the flight recorder, traces, progress and spans.

Calls that the native core carries out by itself cost one optional Python callback: the ring merges the core's
own record of the last 256 lazily. Readers get finished calls in batches, on one thread that they share.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from dmesh._locks import Lock
from dmesh._log import logger
from dmesh.collectives.backends.base import Stream
from dmesh.collectives.request import Descriptor, as_called, text_of
from dmesh.coordination.waiting import Worker, take

_CAPACITY = 256
"""Calls that the ring keeps, and that each native endpoint keeps."""
_BATCH = 128
"""Calls that an endpoint completes before they are fetched for the readers."""
_MAX_SCOPE_CHANGES = 512
"""Changes of scope that are remembered for the calls of an endpoint until these are fetched."""
_FETCH_EVERY = 1.0
"""Seconds after which calls are fetched in any case."""
_MAX_QUEUED = 1000
"""Batches that may wait for the readers' thread; later ones are dropped and counted as lost."""
_CLOSE_WITHIN = 10.0
"""Seconds that a reader has for the calls that are left when it is closed."""


class Pending(Protocol):
    """A call under way. Its `str` names it to a person; it is computed only when it is read."""

    def waits_for(self) -> tuple[int, ...]:
        """Return the ranks that block the call. Any thread."""


@dataclass(slots=True)
class CallRecord:
    """One call of a collective, a transfer or a barrier. A call under way goes on changing."""

    group: str
    """Name of the group; empty for barriers of the coordination service."""
    sequence: int
    call: str
    """Operation, dtype, shape and arguments."""
    nbytes: int
    """Bytes of the larger of input and output."""
    called: float
    """Time of the call, in seconds of the monotonic clock, like `began` and `ended`."""
    began: float | None = None
    """Later than `called` for an asynchronous call that was queued."""
    waited: float = 0.0
    """Seconds spent waiting for peers."""
    ended: float | None = None
    error: str | None = None
    work: Pending | None = None
    """The call itself, while it is under way."""
    stream: int = 0
    """Id of the stream that `sequence` counts in: the same on all members. 0 for barriers."""
    timed: bool = True
    """True if `waited` is known."""
    scope: object = None
    """The context in which the call was made, if a reader asks for scopes."""

    def __str__(self) -> str:
        work = self.work
        return f"{self.call}, #{self.sequence} of {self.group}" if work is None else str(work)

    def waits_for(self) -> tuple[int, ...]:
        """Return the ranks that block the call; none once it has ended. Any thread."""
        work = self.work
        return () if work is None else work.waits_for()


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


class EventRing:
    """The last calls of a client. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.on_waiting: Callable[[str, Sequence[int], float], None] | None = None
        """Callback for long waits: the call, the ranks that block it, and the seconds so far; no ranks when
        the wait is over. Must not block or raise."""
        self._records: deque[CallRecord] = deque(maxlen=_CAPACITY)
        self._running: dict[int, CallRecord] = {}  # by thread
        self._ended = 0
        self._ended_at = 0.0
        self._taps: weakref.WeakKeyDictionary[Stream, _Tap] = weakref.WeakKeyDictionary()
        self._sources: tuple[Callable[[int], Sequence[CallRecord]], ...] = ()
        self._lock = Lock()
        self._readers: tuple[EventReader, ...] = ()
        self._scope: Callable[[], object] | None = None
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # of the readers' thread

    # -- writing ---------------------------------------------------------------------------------------------

    def called(self, group: str, sequence: int, call: str, nbytes: int, stream: int = 0) -> CallRecord:
        """Record a call that has got its number."""
        record = CallRecord(group, sequence, call, nbytes, self.clock(), stream=stream)
        if self._scope is not None:
            record.scope = self._scope()
        with self._lock:
            self._records.append(record)
        return record

    def began(self, record: CallRecord, work: Pending | None = None) -> None:
        """Record that a call begins on this thread."""
        self._running.pop(-id(record), None)
        record.began = record.began or self.clock()
        record.work = work
        self._running[threading.get_ident()] = record

    def awaits(self, record: CallRecord, work: Pending) -> None:
        """Record that a call begins, which waits among others on one thread."""
        record.began = self.clock()
        record.work = work
        self._running[-id(record)] = record

    def waiting(self, record: CallRecord, ranks: Sequence[int], age: float) -> None:
        """Report that a call has waited for ranks for `age` seconds; no ranks: that wait is over."""
        if self.on_waiting is not None:
            self.on_waiting(str(record) if ranks else "", ranks, age)

    def ended(self, record: CallRecord, error: BaseException | None = None) -> None:
        """Record that a call has ended, on the thread on which it began. Idempotent."""
        if record.ended is not None:
            return
        record.ended = now = self.clock()
        record.work = None
        if error is not None:
            record.error = f"{type(error).__name__}: {error}"[:1000]
        thread = threading.get_ident()
        if self._running.get(thread) is record:
            del self._running[thread]
        self._ended, self._ended_at = self._ended + 1, now
        if self._readers:
            self.publish(record)

    def publish(self, record: CallRecord) -> None:
        """Pass a call that has ended on to the readers."""
        if record.began is not None and record.ended is not None:
            self._put([record])

    def attach(self, stream: Stream, group: str, sends: bool | None) -> None:
        """Merge the calls that the native endpoint of a stream carries out, as long as the stream lives.

        The stream may get its endpoint later. `sends`: of transfers, whether this rank is the sender.
        """
        tap = _Tap(self._fetch, stream, group, sends)
        with self._lock:
            self._taps[stream] = tap
            if self._readers:
                tap.open(self._scope)

    # -- reading ---------------------------------------------------------------------------------------------

    def noted(self) -> list[CallRecord]:
        """Return the last calls, except those of native endpoints, oldest first."""
        with self._lock:
            records = list(self._records)
        known = set(map(id, records))
        return [*(record for record in list(self._running.values()) if id(record) not in known), *records]

    def taken(self, stream: Stream, most: int = _CAPACITY) -> list[CallRecord]:
        """Return the last calls of a stream that its native endpoint has carried out, oldest first."""
        with self._lock:
            tap = self._taps.get(stream)
        return [] if tap is None else tap.records(most)

    def records(self, most: int = _CAPACITY) -> tuple[CallRecord, ...]:
        """Return the last calls and barriers, at most so many, oldest first."""
        records = self.noted()[-most:]
        for tap in self._all_taps():
            records += tap.records(most)
        for source in self._sources:
            records += source(most)
        records.sort(key=lambda record: record.called)
        return tuple(records[-most:])

    def oldest_running(self) -> CallRecord | None:
        """Return the call or barrier that this client has been in for longest; None if it is in none."""
        records = (*self._running.values(), *self.records())
        running = (record for record in records if record.began is not None and record.ended is None)
        return min(running, key=lambda record: record.called, default=None)

    def operations(self) -> Mapping[int, CallRecord]:
        """Return the calls under way, by thread. See `coordination.activity.ActivitySource`."""
        return self._running

    def progress(self) -> tuple[int, float]:
        """Return how many calls have ended, and when the last one did. See `operations`."""
        endpoints = [endpoint for tap in self._all_taps() if (endpoint := tap.endpoint) is not None]
        count = self._ended + sum(endpoint.completed for endpoint in endpoints)
        return count, max([self._ended_at, *(endpoint.completed_at / 1e9 for endpoint in endpoints)])

    def add_source(self, source: Callable[[int], Sequence[CallRecord]]) -> None:
        """Merge records that are kept elsewhere: `source` returns the last of them, at most so many."""
        self._sources = (*self._sources, source)

    def _all_taps(self) -> list[_Tap]:
        with self._lock:
            return list(self._taps.values())

    # -- readers ---------------------------------------------------------------------------------------------

    def add_reader(self, reader: EventReader) -> None:
        """Pass all calls from now on to a reader. A reader of scopes is to be added before calls are made."""
        with self._lock:
            self._scope = self._scope or reader.scope
            is_first, self._readers = not self._readers, (*self._readers, reader)
            for tap in self._taps.values():
                tap.open(self._scope)
        reader.detach = partial(self._remove, reader)
        if is_first:
            Worker(self._pass_on, "dmesh-events").start()

    def _remove(self, reader: EventReader) -> None:
        """Stop passing calls to a reader; wait until it has processed its calls."""
        for tap in self._all_taps():
            self._fetch(tap, last=True)
        done: SimpleQueue[None] = SimpleQueue()
        with self._lock:
            self._readers = tuple(other for other in self._readers if other is not reader)
            self._jobs.put(reader.finish)
            self._jobs.put(partial(done.put, None))
            if not self._readers:
                self._jobs.put(None)
        try:
            take(done, _CLOSE_WITHIN)
        except Empty:
            logger.warning("%s did not end within %g s", type(reader).__name__, _CLOSE_WITHIN)

    def _put(self, calls: Sequence[CallRecord]) -> None:
        """Pass calls to the readers. Any thread; does not wait."""
        is_full = self._jobs.qsize() >= _MAX_QUEUED
        for reader in self._readers:
            if is_full:
                reader.lost += len(calls)
            else:
                self._jobs.put(partial(reader.read, calls))

    def _pass_on(self) -> None:
        """Run the readers' queued jobs, and fetch calls periodically, as long as there are readers."""
        while True:
            try:
                job: Callable[[], object] | None = take(self._jobs, _FETCH_EVERY)
            except Empty:
                job = self._fetch_all
            if job is None:
                return
            try:
                job()
            except Exception:  # noqa: BLE001 -- one reader's bug must not stop the others
                logger.exception("an event reader has failed")

    def _fetch_all(self) -> None:
        for tap in self._all_taps():
            self._fetch(tap)

    def _fetch(self, tap: _Tap, *, last: bool = False) -> None:
        """Fetch the calls that an endpoint has completed since the last time, for the readers."""
        readers = self._readers
        if last or not all(reader.paused() for reader in readers):
            calls, lost = tap.fetch()
            for reader in readers:
                reader.lost += lost
            if calls:
                self._put(calls)


class _Tap:
    """The calls that a stream's native endpoint carries out by itself. It does not keep the stream alive.

    Of scopes, only the changes are kept, because these are rare.
    """

    def __init__(
        self, fetch: Callable[[_Tap], None], stream: Stream, group: str = "", sends: bool | None = None
    ) -> None:
        self._fetch = fetch
        self._stream = weakref.ref(stream)
        self._id, self._group, self._sends = stream.number, group, sends
        self._opened = False
        self._count = 0
        self._seen = 0
        self._fetching = Lock()
        self._scope: Callable[[], object] | None = None
        self._latest: object = None
        self._before: object = None
        self._changes: deque[tuple[int, object]] = deque(maxlen=_MAX_SCOPE_CHANGES)
        # A full deque drops its first change when another comes: not while that is read.
        self._changing = Lock()

    @property
    def endpoint(self) -> Any:
        """The endpoint; None if the stream has none, or is gone."""
        stream = self._stream()
        return None if stream is None else stream.endpoint

    def open(self, scope: Callable[[], object] | None) -> None:
        """Have completed calls fetched from now on, before the endpoint forgets them."""
        stream = self._stream()
        if not self._opened and stream is not None:
            self._opened, self._scope = True, scope
            stream.on_complete(self.completed if scope is None else self.completed_in_scope)

    def completed(self) -> None:
        """Count a call that is complete. Must be quick, and must not raise."""
        self._count += 1
        if self._count >= _BATCH:
            self._count = 0
            self._fetch(self)

    def completed_in_scope(self) -> None:
        """Count a call that is complete, on the thread that has made it, and keep its scope."""
        stream = self._stream()
        if stream is not None and self._scope is not None:
            scope = self._scope()
            if scope is not self._latest:
                self._latest = scope
                with self._changing:
                    self._changes.append((stream.completed, scope))
        self.completed()

    def scope_of(self, number: int) -> object:
        """Return the scope of a call. To be called in order of numbers, by one thread at a time."""
        with self._changing:
            while self._changes and self._changes[0][0] <= number:
                self._before = self._changes.popleft()[1]
        return self._before

    def records(self, most: int) -> list[CallRecord]:
        """Return the endpoint's last calls, the one under way included, oldest first."""
        endpoint = self.endpoint
        return [
            CallRecord(
                self._group, number, as_called(text_of(Descriptor(*descriptor)), self._sends), nbytes,
                called=began / 1e9, began=began / 1e9, waited=max(waited, 0) / 1e9,
                ended=ended / 1e9 if ended else None, stream=self._id, timed=waited >= 0,
            )
            for number, descriptor, nbytes, began, ended, waited in (
                () if endpoint is None else endpoint.recent(min(most, _CAPACITY))
            )
        ]  # fmt: skip

    def fetch(self) -> tuple[list[CallRecord], int]:
        """Return the calls completed since the last time, and how many the endpoint has forgotten since."""
        stream = self._stream()
        if stream is None or stream.endpoint is None or not self._fetching.acquire(blocking=False):
            return [], 0  # another thread fetches them
        try:
            seen, issued = self._seen, stream.issued
            lost = max(0, issued - seen - _CAPACITY) if seen else 0
            calls: list[CallRecord] = []
            self._seen = issued
            for call in self.records(issued - seen):
                if call.ended is None:
                    self._seen = call.sequence - 1
                    break
                if call.sequence > seen:
                    if self._scope is not None:
                        call.scope = self.scope_of(call.sequence)
                    calls.append(call)
            return calls, lost
        finally:
            self._fetching.release()
