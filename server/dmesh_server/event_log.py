"""Event log: the latest events of all clusters for people to read, in memory and bounded.

Events have growing numbers. A reader gives the number of the last event it saw and gets the later ones; if
some of these have been dropped, the answer says so. Passed barriers have a ring buffer of their own, so that
thousands of them do not push out the loss of a member. Used on the event loop only.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from dmesh_server.core.events import KvSet
from dmesh_server.core.log_events import (
    BarrierEnded,
    ClusterEnded,
    ClusterFormed,
    LivenessReported,
    LogEvent,
    MemberDeparted,
    MemberJoined,
)
from dmesh_server.core.model import Task
from dmesh_server.send_queue import SendQueue

PREEMPTION_NOTICES = "dmesh/preemption/notice/"
"""Keys under which clients announce that one of them will be preempted."""

_MOST = 10_000
_MOST_ROUTINE = 2_000
_MOST_BYTES = 16 << 20
_OVERHEAD = 400
"""Bytes of an event beside its texts, about."""
_LONGEST_REASON = 1_000
_UNREAD = 2_000
"""Events that a reader may fall behind."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """Announcement by a member that a host will be preempted."""

    cluster: str
    task: Task | None
    """Task that announced it."""
    reason: str
    """Reason given by the task."""


@dataclass(frozen=True, slots=True)
class AdminAction:
    """An operator changed something."""

    cluster: str
    action: str
    """`cancel_barrier`, `evict_member`, `end_cluster`, `delete_key`, `increment_key` or `restore_keys`."""
    target: str
    """Name of the barrier, member or key changed; of keys that were restored, how many."""
    task: Task | None
    """The member that it was done to, if it was one."""
    by: str
    """Operator that asked for it."""


@dataclass(frozen=True, slots=True)
class ServerNote:
    """Something happened to the server itself."""

    kind: str
    """`server_started`, `store_failed` or `store_recovered`."""
    reason: str
    cluster: str = ""


Event = LogEvent | Preemption | AdminAction | ServerNote
"""Everything that is kept."""


class Entry:
    """Event in the log.

    Attributes:
        number: Larger than the numbers of all earlier events.
        time: Unix time, for display.
        kind: One of `KINDS`.
        event: The event.
        encoded: Its encoding for readers, made for the first reader and kept.
    """

    __slots__ = ("encoded", "event", "kind", "number", "time")

    def __init__(self, number: int, time: float, kind: str, event: Event) -> None:
        """Make an entry that is not encoded yet."""
        self.number = number
        self.time = time
        self.kind = kind
        self.event = event
        self.encoded: bytes | None = None


SEVERITIES = ("info", "warning", "error")
"""Severities of events, ascending."""

KINDS = {
    "cluster_formed": "info",
    "cluster_ended": "info",
    "member_joined": "info",
    "member_rejoined": "info",
    "member_left": "info",
    "member_lost": "error",
    "member_failed": "error",
    "member_blocked": "warning",
    "member_stuck": "warning",
    "member_live": "info",
    "barrier_passed": "info",
    "barrier_failed": "error",
    "preemption_announced": "warning",
    "admin_action": "warning",
    "server_started": "info",
    "store_failed": "error",
    "store_recovered": "info",
}
"""Every kind of event, and how bad it is."""

ROUTINE = "barrier_passed"
"""The kind of which there may be very many."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selection of events; None selects all."""

    cluster: str | None = None
    """Select the events of this cluster."""
    kinds: frozenset[str] | None = None
    """Select events of these kinds."""
    task: Task | None = None
    """Select events about this member."""

    def __call__(self, entry: Entry) -> bool:
        """Return whether an event is one of them."""
        return (
            (self.kinds is None or entry.kind in self.kinds)
            and (self.cluster is None or entry.event.cluster == self.cluster)
            and (self.task is None or task_of(entry.event) == self.task)
        )

    @property
    def routine(self) -> bool:
        """True if passed barriers can match."""
        return (self.kinds is None or ROUTINE in self.kinds) and self.task is None


EVERYTHING = Filter()
"""All events."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some events after a number."""

    entries: tuple[Entry, ...]
    last: int
    """Number after which the next page begins."""
    more: bool
    """True if more events match now."""
    lost: int
    """Largest number among dropped events later than the number asked for; 0 for none."""


class Feed:
    """One reader's events as they happen; it closes when the reader falls behind."""

    def __init__(self, keep: Filter, limit: int) -> None:
        """Make a feed; `EventLog.subscribe` attaches it."""
        self.keep = keep
        self.send_queue: SendQueue[Entry] = SendQueue(limit)


class EventLog:
    """Keeps the latest events."""

    def __init__(
        self, clock: Callable[[], float], *, most: int = _MOST, most_routine: int = _MOST_ROUTINE
    ) -> None:
        """Begin empty.

        Args:
            clock: Unix time, seconds.
            most: How many events are kept, beside barriers that passed.
            most_routine: How many of these.
        """
        self._clock = clock
        self._last = 0
        self._notable = _Ring(most, _MOST_BYTES)
        self._routine = _Ring(most_routine, _MOST_BYTES // 4)
        self._feeds: set[Feed] = set()
        self.closed = False
        """True once the server stops and no event is delivered any more."""
        # All kinds exist from the start: Prometheus sees no increase in a series that begins at 1.
        self.counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        """Number of events of each kind."""

    @property
    def last(self) -> int:
        """The number of the latest event; 0 before the first."""
        return self._last

    @property
    def feeds(self) -> int:
        """Number of subscribed readers."""
        return len(self._feeds)

    def note(self, event: Event) -> None:
        """Append an event and deliver it to the readers."""
        kind = kind_of(event)
        self.counts[kind] += 1
        self._last += 1
        entry = Entry(self._last, self._clock(), kind, event)
        (self._routine if kind == ROUTINE else self._notable).add(entry)
        for feed in self._feeds:
            if feed.keep(entry):
                feed.send_queue.put(entry)

    def page(self, after: int | None, limit: int, keep: Filter) -> Page:
        """Return the first events after a number, oldest first.

        Args:
            after: Number of the last one that the reader knows of; None: whatever is kept.
            limit: How many.
            keep: Which of them.
        """
        rings = self._rings(keep)
        lost = 0 if after is None else max(ring.dropped for ring in rings)
        after = after or 0
        following = merge(*(ring.after(after) for ring in rings), key=_number)
        found = list(islice(filter(keep, following), limit + 1))
        entries, more = tuple(found[:limit]), len(found) > limit
        last = entries[-1].number if more else self._last
        return Page(entries, last, more, lost if lost > after else 0)

    def latest(self, before: int, limit: int, keep: Filter) -> tuple[Entry, ...]:
        """Return the last events before a number, newest first; 0: before none."""
        newest = merge(*(ring.before(before) for ring in self._rings(keep)), key=_number, reverse=True)
        return tuple(islice(filter(keep, newest), limit))

    def subscribe(self, keep: Filter, limit: int = _UNREAD) -> Feed:
        """Return a feed of the events from now on. Pair with `unsubscribe`."""
        feed = Feed(keep, limit)
        if self.closed:
            feed.send_queue.close()
        self._feeds.add(feed)
        return feed

    def unsubscribe(self, feed: Feed) -> None:
        """End a feed. Idempotent."""
        self._feeds.discard(feed)
        feed.send_queue.close()

    def _rings(self, keep: Filter) -> tuple[_Ring, ...]:
        return (self._notable, self._routine) if keep.routine else (self._notable,)

    def close(self) -> None:
        """End all feeds: the server stops."""
        self.closed = True
        for feed in self._feeds:
            feed.send_queue.close()


class _Ring:
    """Events in order, bounded in number and size."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._entries: list[Entry] = []
        self._sizes: list[int] = []
        self._begin = 0  # entries before it are not kept any more, and removed many at a time
        self._size = 0
        self.dropped = 0
        """Number of the last event that is not kept any more."""

    def add(self, entry: Entry) -> None:
        size = _size(entry.event)
        self._entries.append(entry)
        self._sizes.append(size)
        self._size += size
        while len(self._entries) - self._begin > self._most or (
            self._size > self._most_bytes and len(self._entries) - self._begin > 1
        ):
            self.dropped = self._entries[self._begin].number
            self._size -= self._sizes[self._begin]
            self._begin += 1
        if self._begin > self._most // 4:
            del self._entries[: self._begin], self._sizes[: self._begin]
            self._begin = 0

    def after(self, number: int) -> Iterator[Entry]:
        begin = max(self._begin, bisect_right(self._entries, number, key=_number))
        return islice(self._entries, begin, None)

    def before(self, number: int) -> Iterator[Entry]:
        end = bisect_right(self._entries, number - 1, key=_number) if number else len(self._entries)
        return (self._entries[index] for index in range(end - 1, self._begin - 1, -1))


def kind_of(event: Event) -> str:
    """Return the event's kind, one of `KINDS`."""
    match event:
        case BarrierEnded():
            return "barrier_failed" if event.error else ROUTINE
        case MemberJoined():
            return "member_rejoined" if event.rejoined else "member_joined"
        case MemberDeparted():
            return f"member_{event.member.state.name.lower()}"
        case LivenessReported():
            return f"member_{event.member.liveness.name.lower()}"
        case ClusterFormed():
            return "cluster_formed"
        case ClusterEnded():
            return "cluster_ended"
        case Preemption():
            return "preemption_announced"
        case AdminAction():
            return "admin_action"
        case ServerNote():
            return event.kind


def task_of(event: Event) -> Task | None:
    """Return the member that an event is about, if it is about one."""
    match event:
        case MemberJoined() | MemberDeparted() | LivenessReported():
            return event.member.task
        case Preemption() | AdminAction():
            return event.task
    return None


def preemption(event: KvSet) -> Preemption:
    """Read a preemption notice that a client set as a key under `PREEMPTION_NOTICES`."""
    try:
        content = json.loads(event.value) if len(event.value) <= 1 << 16 else None
    except (ValueError, RecursionError):  # a client may set any key to anything
        content = None
    reason = content.get("reason") if isinstance(content, dict) else None
    said = reason[:_LONGEST_REASON] if isinstance(reason, str) else ""
    return Preemption(event.caller.cluster, event.caller.task, said)


def _number(entry: Entry) -> int:
    return entry.number


def _size(event: Event) -> int:
    """Return about how much memory an event keeps, bytes."""
    texts: Sequence[str]
    match event:
        case MemberJoined() | MemberDeparted() | LivenessReported():
            process, activity = event.member.process, event.member.activity
            texts = (event.member.reason, process.host, process.program, process.boot_id)
            texts += activity.stack if activity is not None else ()
        case BarrierEnded():
            texts = (event.name, event.reason)
        case Preemption() | ServerNote():
            texts = (event.reason,)
        case AdminAction():
            texts = (event.target, event.by)
        case _:
            texts = ()
    return _OVERHEAD + 2 * sum(map(len, texts))
