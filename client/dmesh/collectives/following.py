"""Follows what a client calls, one call after the other, to tell somebody of each: a trace, say.

Calls that the native core takes whole are not slowed down by more than a call of Python for each: they are
fetched from its own record of the last 256, many at once, and told of by a thread.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from dmesh.collectives.arena.titles import Title, text_of
from dmesh.collectives.flight import Record
from dmesh.collectives.signature import as_called
from dmesh.coordination.waiting import Worker, take

if TYPE_CHECKING:
    from dmesh.collectives.arena.port import Port
    from dmesh.collectives.group import Group
    from dmesh.collectives.lane import Lane

_AT_ONCE = 128
"""Calls that the native core has finished after which its record is fetched."""
_KEPT = 256
"""Calls that it remembers."""
_MOST_WAITING = 1000
"""Batches of calls that wait for the thread; what comes on top is lost."""
_MOST_CHANGES = 512
"""Changes of what surrounds a port's calls that are remembered until those are fetched."""
_EVERY = 1.0
"""Seconds after which they are fetched in any case."""
_CLOSE = 10.0
"""Seconds that the thread has for what is left."""


class Followed(NamedTuple):
    """A call that is over."""

    lane: int
    """What it is counted in; 0 for a barrier of the coordination service."""
    group: str
    """Name of its group."""
    call: str
    """Operation, dtype, shape and arguments."""
    number: int
    """Its number in its lane."""
    nbytes: int
    """Bytes of the larger of input and output."""
    began: float
    """When it began, seconds of the monotonic clock."""
    elapsed: float
    """Seconds that it took."""
    waited: float | None
    """Of these, seconds spent waiting for peers; None if that is not known."""
    error: str
    """What it failed with; empty if it did not."""
    queued: float = 0.0
    """Seconds from its call until it began."""
    scope: object = None
    """What surrounded it where it was called; see `Follower`."""


class Follower(ABC):
    """Is told of every call that is over, and passes it on on a thread of its own. See `flight.Listener`.

    Args:
        name: Of the thread.
        scope: Returns what surrounds a call, on the thread that makes it: the span that is current there,
            say. The same object as long as it is the same. None if nobody wants to know.
    """

    def __init__(self, name: str, scope: Callable[[], object] | None = None) -> None:
        self._name = name
        self.scope = scope
        self._lost = 0
        self._queue: SimpleQueue[Sequence[Followed] | None] = SimpleQueue()
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._seen: weakref.WeakKeyDictionary[Lane, int] = weakref.WeakKeyDictionary()
        self._scopes: weakref.WeakKeyDictionary[Lane, Scopes | None] = weakref.WeakKeyDictionary()
        self._fetching = threading.Lock()
        self._worker: Worker | None = None

    def begin(self) -> None:
        """Begins to pass on calls."""
        self._worker = Worker(self._run, self._name)
        self._worker.start()

    @property
    def begun(self) -> bool:
        """Whether it has begun, and was not closed."""
        return self._worker is not None

    # What is done with the calls; on the thread, but for `_full` ----------------------------------------

    @abstractmethod
    def _take(self, call: Followed) -> None:
        """Takes a call."""

    def _full(self, calls: int) -> bool:
        """Whether so many more calls need not even be passed on. Any thread; must be quick."""
        return False

    @abstractmethod
    def _pause(self) -> None:
        """All calls that there were were taken."""

    @abstractmethod
    def _end(self) -> None:
        """There will be no more."""

    # What tells it of calls; any thread ---------------------------------------------------------------------

    def ended(self, record: Record) -> None:
        """A call is over that the flight recorder was told of."""
        if record.began is None or record.ended is None:
            return
        if self._behind(1):
            return
        call = Followed(
            record.lane, record.group or "barriers", record.call, record.sequence, record.nbytes,
            record.began, record.ended - record.began, record.waited if record.timed else None,
            record.error or "", record.began - record.called, record.scope,
        )  # fmt: skip
        self._queue.put([call])

    def watch(self, group: Group) -> None:
        """A group has ports from now on, whose calls nobody tells of one by one."""
        self._groups.add(group)
        for lane in group.lanes:
            self.added(group, lane)

    def added(self, group: Group, lane: Lane) -> None:
        """A group has a lane, which may have a port."""
        if lane in self._scopes:
            return
        scopes = self._scopes[lane] = None if self.scope is None else Scopes(self.scope)
        counter = _Counter(self, group, lane, scopes)
        lane.add_idle(counter.finished if scopes is None else counter.finished_in_scope)

    def fetch(self, group: Group, lane: Lane) -> None:
        """Fetches what a port has done since the last time."""
        port = lane.port
        if port is None or not self._fetching.acquire(blocking=False):  # another thread is at it
            return
        try:
            seen, issued = self._seen.get(lane, 0), port.issued
            self._lost += max(0, issued - seen - _KEPT) if seen else 0
            sends = None if lane.pair is None else group.ranks[lane.pair[0]] == group.world_rank
            scopes = self._scopes.get(lane)
            calls: list[Followed] = []
            last = issued
            for number, title, nbytes, began, ended, waited in port.recent(min(_KEPT, issued - seen)):
                if number <= seen:
                    continue
                if not ended:
                    last = number - 1
                    break
                text = as_called(text_of(Title(*title)), sends)
                share = None if waited < 0 else waited / 1e9
                calls.append(
                    Followed(
                        lane.number, group.name or group.label, text, number, nbytes, began / 1e9,
                        (ended - began) / 1e9, share, "",
                        scope=None if scopes is None else scopes.of(number),
                    )
                )  # fmt: skip
            self._seen[lane] = last
        finally:
            self._fetching.release()
        if calls and not self._behind(len(calls)):
            self._queue.put(calls)

    def _behind(self, calls: int) -> bool:
        """Leaves calls out if nobody wants them, or the thread cannot keep up."""
        if self._full(calls):
            return True
        late = self._queue.qsize() >= _MOST_WAITING
        if late:
            self._lost += calls
        return late

    def close(self) -> None:
        """Passes on what is left, and ends. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is None:
            return  # closed already, or never begun
        self._fetch_all()
        self._queue.put(None)
        worker.join(_CLOSE)

    # The thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                calls = take(self._queue, _EVERY)
            except Empty:
                self._fetch_all()
                self._pause()
                continue
            if calls is None:
                break
            for call in calls:
                self._take(call)
            self._pause()
        self._end()

    def _fetch_all(self) -> None:
        for group in tuple(self._groups):
            for lane in group.lanes:
                self.fetch(group, lane)


class Scopes:
    """Remembers what surrounded the calls of a port: only when that changes, for that is rare.

    Args:
        scope: Returns what surrounds the calling thread.
    """

    def __init__(self, scope: Callable[[], object]) -> None:
        self._scope = scope
        self._latest: object = None
        self._before: object = None
        self._changes: deque[tuple[int, object]] = deque(maxlen=_MOST_CHANGES)
        self._changing = threading.Lock()
        """A full deque drops its first change when another comes: not while somebody looks at it."""

    def look(self, port: Port) -> None:
        """A call of the port is over, on the thread that has made it."""
        scope = self._scope()
        if scope is not self._latest:
            self._latest = scope
            with self._changing:
                self._changes.append((port.finished, scope))

    def of(self, number: int) -> object:
        """Returns what surrounded a call. Asked in order of numbers, by one thread at a time."""
        changes = self._changes
        with self._changing:
            while changes and changes[0][0] <= number:
                self._before = changes.popleft()[1]
        return self._before


class _Counter:
    """Counts the calls that a port has finished, and has them fetched before it forgets them."""

    def __init__(self, follower: Follower, group: Group, lane: Lane, scopes: Scopes | None) -> None:
        self._fetch: Callable[[Group, Lane], None] = follower.fetch
        self._group = weakref.ref(group)
        self._lane = weakref.ref(lane)
        self._look = None if scopes is None else scopes.look
        self._count = 0

    def finished(self) -> None:
        """A call is over. Must be quick, and must not raise."""
        self._count += 1
        if self._count < _AT_ONCE:
            return
        self._count = 0
        group, lane = self._group(), self._lane()
        if group is not None and lane is not None:
            self._fetch(group, lane)

    def finished_in_scope(self) -> None:
        """The same, where it matters what surrounds the call."""
        lane = self._lane()
        if lane is not None and lane.port is not None and self._look is not None:
            self._look(lane.port)
        self.finished()
