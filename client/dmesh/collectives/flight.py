"""The flight recorder: what this client's collectives did lately, to look into a stall or a crash."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dmesh.collectives.group import Group
    from dmesh.collectives.lane import Lane


@dataclass(slots=True)
class Record:
    """One call. It is filled in while the call goes on."""

    group: str
    """Name of the group."""
    sequence: int
    """Number of the call in its group (of a transfer: between its two ranks)."""
    call: str
    """Operation, dtype, shape and arguments."""
    nbytes: int
    """Bytes of the larger of input and output."""
    called: float
    """When it was called, in seconds of the monotonic clock."""
    began: float | None = None
    """When it began; later than `called` for an asynchronous call that had to queue."""
    waited: float = 0.0
    """Seconds spent waiting for peers."""
    ended: float | None = None
    """When it ended."""
    error: str | None = None
    """What it failed with, if it did."""
    waits_for: Callable[[], tuple[int, ...]] | None = None
    """While it goes on with peers: returns the ranks that it waits for."""
    lane: int = 0
    """Says of which group, or pair of ranks in a group, `sequence` is: the same number on all members. 0 for
    barriers of the coordination service."""
    timed: bool = True
    """Whether `waited` is known."""
    scope: object = None
    """What surrounded it where it was called, if a listener wants to know."""


class Source(Protocol):
    """What keeps records of its own, because it cannot take the time to tell the recorder of each call."""

    def recent(self, most: int) -> list[Record]:
        """Returns records of the last calls, of each kind at most so many, in any order. Any thread."""


class Listener(Protocol):
    """Is told of calls when they are over."""

    scope: Callable[[], object] | None
    """Returns what surrounds a call, on the thread that makes it; None if the listener does not want to know.
    Must be quick, and must not raise."""

    def ended(self, record: Record) -> None:
        """A call is over. Any thread; must be quick, and must not raise."""

    def watch(self, group: Group) -> None:
        """A group has ports from now on, whose calls nobody tells of one by one."""

    def added(self, group: Group, lane: Lane) -> None:
        """A group that has ports has another lane."""


class FlightRecorder:
    """Keeps the last calls. May be used by any thread.

    Args:
        capacity: How many calls it keeps.
        clock: Seconds, monotonic.
    """

    def __init__(self, capacity: int = 256, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._records: deque[Record] = deque(maxlen=capacity)
        self._capacity = capacity
        self.listeners: tuple[Listener, ...] = ()
        """Are told of every call that is over."""
        self._scope: Callable[[], object] | None = None
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()
        self._lock = threading.Lock()

    def listen(self, listener: Listener) -> None:
        """Tells `listener`, too, of every call from now on. Before any is made, and one that wants scopes."""
        self.listeners = (*self.listeners, listener)
        self._scope = self._scope or listener.scope

    def watch(self, source: Source) -> None:
        """Asks `source`, too, for what was called, as long as it lives."""
        with self._lock:
            self._sources.add(source)

    def called(self, group: str, sequence: int, call: str, nbytes: int, lane: int = 0) -> Record:
        """Notes a call; the record is to be filled in as it goes on."""
        record = Record(group, sequence, call, nbytes, self.clock(), lane=lane)
        if self._scope is not None:
            record.scope = self._scope()
        with self._lock:
            self._records.append(record)
        return record

    def began(self, record: Record) -> None:
        """Notes that a call begins."""
        record.began = self.clock()

    def ended(self, record: Record, error: BaseException | None = None) -> None:
        """Notes that a call is over."""
        record.ended = self.clock()
        record.waits_for = None
        if error is not None:
            record.error = f"{type(error).__name__}: {error}"[:1000]
        for listener in self.listeners:
            listener.ended(record)

    def noted(self) -> list[Record]:
        """Returns the last calls that the recorder was told of one by one, oldest first."""
        with self._lock:
            return list(self._records)

    def records(self, most: int | None = None) -> tuple[Record, ...]:
        """Returns the last calls and barriers, oldest first; those under way go on changing.

        Args:
            most: How many; as many as are kept if None.
        """
        most = self._capacity if most is None else most
        with self._lock:
            sources = list(self._sources)
        records = self.noted()[-most:]
        for source in sources:
            records += source.recent(most)
        records.sort(key=lambda record: record.called)
        return tuple(records[-most:])
