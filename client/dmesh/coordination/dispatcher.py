"""Event dispatcher: calls the listeners for cluster events on a thread of its own."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable

from dmesh._locks import Lock
from dmesh._log import logger
from dmesh.coordination.members import Member, Task
from dmesh.coordination.waiting import Worker, may_start_threads
from dmesh.errors import CoordinationError

DepartureListener = Callable[[Member], None]
RejoinListener = Callable[[Member], None]
LivenessListener = Callable[[Member], None]
FailureListener = Callable[[CoordinationError], None]

_Dispatch = Callable[[], None]

_PATIENCE = 5.0
"""Seconds that `close` waits for a listener that blocks, before it leaves it to its fate."""


class EventDispatcher:
    """Departures and failures, reported once to every listener, in order.

    A listener that is added late also gets earlier events: some may happen between joining a cluster and
    adding a listener. The thread starts with the first listener: the first event may come when the program is
    over, and no thread starts any more. The queue of events is bounded by the number of members that can
    depart and rejoin, and how often they get stuck.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._departed: dict[tuple[str, int, int], Member] = {}
        self._gone: dict[Task, int] = {}
        self._replaced: set[Task] = set()
        self._departure_listeners: list[DepartureListener] = []
        self._rejoin_listeners: list[RejoinListener] = []
        self._liveness_listeners: list[LivenessListener] = []
        self._failure_listeners: list[FailureListener] = []
        self._final: CoordinationError | None = None
        self._queue: queue.SimpleQueue[_Dispatch | None] = queue.SimpleQueue()
        self._worker: Worker | None = None
        self._closed = False

    def add_departure_listener(self, listener: DepartureListener) -> None:
        """Add a listener for departures of members."""
        with self._lock:
            self._start()
            self._departure_listeners.append(listener)
            for member in self._departed.values():
                self._dispatch(lambda member=member: listener(member))  # type: ignore[misc]

    def add_rejoin_listener(self, listener: RejoinListener) -> None:
        """Add a listener for members that take the slot of a departed one, from now on."""
        with self._lock:
            self._start()
            self._rejoin_listeners.append(listener)

    def add_liveness_listener(self, listener: LivenessListener) -> None:
        """Add a listener for members that become blocked, stuck or live again, from now on."""
        with self._lock:
            self._start()
            self._liveness_listeners.append(listener)

    def add_failure_listener(self, listener: FailureListener) -> None:
        """Add a listener for failures of the session."""
        with self._lock:
            self._start()
            self._failure_listeners.append(listener)
            if self._final is not None:
                final = self._final
                self._dispatch(lambda: listener(final))

    def departed(self, members: Iterable[Member]) -> None:
        """Dispatch the departures that are not known yet."""
        with self._lock:
            for member in members:
                key = (member.job, member.index, member.incarnation)
                if key in self._departed:
                    continue
                self._departed[key] = member
                self._gone[Task(member.job, member.index)] = member.incarnation
                for listener in self._departure_listeners:
                    self._dispatch(lambda listener=listener, member=member: listener(member))  # type: ignore[misc]

    def rejoined(self, members: Iterable[Member]) -> None:
        """Note members that took the task slots of departed ones."""
        with self._lock:
            for member in members:
                slot = Task(member.job, member.index)
                if self._gone.get(slot) != member.incarnation:
                    self._gone.pop(slot, None)
                self._replaced.add(slot)
                for listener in self._rejoin_listeners:
                    self._dispatch(lambda listener=listener, member=member: listener(member))  # type: ignore[misc]

    def liveness(self, members: Iterable[Member]) -> None:
        """Note members that have become blocked or stuck, or live again."""
        with self._lock:
            for member in members:
                for listener in self._liveness_listeners:
                    self._dispatch(lambda listener=listener, member=member: listener(member))  # type: ignore[misc]

    def gone(self) -> frozenset[Task]:
        """Return the task slots whose holders are known to have departed, and were not replaced."""
        with self._lock:
            return frozenset(self._gone)

    def replaced(self) -> frozenset[Task]:
        """Return the task slots that were taken again after their holders had departed."""
        with self._lock:
            return frozenset(self._replaced)

    def dispatch(self, notice: Callable[[], None]) -> None:
        """Queue another call, in order with the events."""
        with self._lock:
            self._dispatch(notice)

    def failed(self, error: CoordinationError, *, final: bool) -> None:
        """Dispatch a failure of the session. Listeners that are added later also get a final one."""
        with self._lock:
            if final:
                self._final = error
            for listener in self._failure_listeners:
                self._dispatch(lambda listener=listener: listener(error))  # type: ignore[misc]

    def close(self) -> None:
        """Dispatch the queued events, then end the thread. May be called by a listener."""
        with self._lock:
            self._closed = True
            worker = self._worker
            if worker is not None:
                self._queue.put(None)
        if worker is not None:
            worker.join(_PATIENCE)

    def _dispatch(self, notice: _Dispatch) -> None:
        if self._closed:
            return
        self._start()
        self._queue.put(notice)

    def _start(self) -> None:
        if self._worker is None and not self._closed and may_start_threads():
            self._worker = Worker(self._run, self._name)
            self._worker.start()

    def _run(self) -> None:
        while (notice := self._queue.get()) is not None:
            try:
                notice()
            except Exception:  # noqa: BLE001 -- a listener's error must not stop the others
                logger.exception("a listener of the coordination session raised an exception")
