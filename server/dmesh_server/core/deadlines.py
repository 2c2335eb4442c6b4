"""Deadlines: a heap whose entries can be moved and cancelled."""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseDue:
    """A lease may have run out."""

    lease: int


@dataclass(frozen=True, slots=True)
class NoticeDue:
    """Time to announce the departures that were held back."""

    cluster: str


@dataclass(frozen=True, slots=True)
class BarrierDue:
    """A barrier's time is over."""

    cluster: str
    name: str


@dataclass(frozen=True, slots=True)
class StuckDue:
    """Members may have been waited for for too long."""

    cluster: str


@dataclass(frozen=True, slots=True)
class LivenessDue:
    """Time to announce the changes of liveness that were held back."""

    cluster: str


@dataclass(frozen=True, slots=True)
class WaitDue:
    """A blocked read's time is over."""

    token: int


@dataclass(frozen=True, slots=True)
class RestoreDue:
    """The next keys of a restore can be prepared."""

    cluster: str


Due = LeaseDue | NoticeDue | BarrierDue | StuckDue | LivenessDue | WaitDue | RestoreDue
"""Everything that can fall due."""

_SLACK = 64
"""Stale heap entries that are not worth a clean-up."""


class Deadlines:
    """At most one time for each `Due`.

    Moving or cancelling leaves a stale entry in the heap, which is dropped when it comes to the top, or all
    together when they outnumber the live ones. Every operation is O(log n), amortized.
    """

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Due]] = []
        """Entries, stale ones included: nothing is due before the first."""
        self.live: dict[Due, int] = {}
        """Serial number of the valid entry of each `Due`."""
        self._serial = 0

    def __len__(self) -> int:
        return len(self.live)

    def __contains__(self, due: object) -> bool:
        return due in self.live

    def set(self, due: Due, when: float) -> None:
        """Let `due` happen at `when` and not at any time set before."""
        self._serial += 1
        self.live[due] = self._serial
        heapq.heappush(self.heap, (when, self._serial, due))
        if len(self.heap) > 2 * len(self.live) + _SLACK:
            self.heap = [entry for entry in self.heap if self.live.get(entry[2]) == entry[1]]
            heapq.heapify(self.heap)

    def cancel(self, due: Due) -> None:
        """Let `due` not happen; nothing if it was not going to."""
        self.live.pop(due, None)

    def clear(self) -> None:
        """Let nothing happen."""
        self.heap.clear()
        self.live.clear()

    def next(self) -> float | None:
        """Return the earliest time at which something is due, None for never."""
        while self.heap:
            when, serial, due = self.heap[0]
            if self.live.get(due) == serial:
                return when
            heapq.heappop(self.heap)
        return None

    def pop(self, now: float) -> Due | None:
        """Remove and return the earliest that is due by `now`, if any."""
        when = self.next()
        if when is None or when > now:
            return None
        _, _, due = heapq.heappop(self.heap)
        del self.live[due]
        return due
