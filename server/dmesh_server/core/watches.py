"""Blocked reads and watches of keys, and the history that lets a watch start in the past."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from dmesh_server.core.model import KeyEvent
from dmesh_server.core.roster import TaskSlot


class History:
    """The changes of the latest revisions, without gaps."""

    def __init__(self, max_revisions: int, max_bytes: int) -> None:
        self._max_revisions = max_revisions
        self._max_bytes = max_bytes
        self._changes: dict[int, tuple[KeyEvent, ...]] = {}
        self._sizes: deque[tuple[int, int]] = deque()
        """Revision and size of each, oldest first: a dict finds its first item slowly behind deleted ones."""
        self._size = 0

    def __len__(self) -> int:
        return len(self._changes)

    def append(self, revision: int, events: tuple[KeyEvent, ...], size: int) -> list[int]:
        """Add the changes of the next revision; return the old revisions that are forgotten for it."""
        self._changes[revision] = events
        self._sizes.append((revision, size))
        self._size += size
        forgotten = []
        while len(self._changes) > self._max_revisions or (
            self._size > self._max_bytes and len(self._changes) > 1
        ):
            oldest, its_size = self._sizes.popleft()
            del self._changes[oldest]
            self._size -= its_size
            forgotten.append(oldest)
        return forgotten

    def oldest(self, revision: int) -> int:
        """Return the first revision from which a watch can start when the store is at `revision`."""
        return self._sizes[0][0] if self._sizes else revision + 1

    def since(self, revision: int) -> Iterator[tuple[int, tuple[KeyEvent, ...]]]:
        """Yield the kept revisions from `revision` on, in order."""
        # Revisions are consecutive, so the ones wanted can be named instead of searched for.
        first = max(revision, self.oldest(revision))
        while first in self._changes:
            yield first, self._changes[first]
            first += 1

    def revisions(self) -> list[int]:
        """Return the kept revisions, in order."""
        return list(self._changes)


@dataclass(frozen=True, slots=True, eq=False)
class BlockedRead:
    """Read that waits for a key to exist."""

    token: int
    key: str
    timeout: float | None
    slot: TaskSlot | None
    """None for an observer."""


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """Watch of a prefix."""

    token: int
    prefix: str
    slot: TaskSlot | None
    """None for an observer."""


class Waiters:
    """The blocked reads and watches of one cluster, found by key without looking at all of them."""

    def __init__(self) -> None:
        self._by_token: dict[int, BlockedRead | Watch] = {}
        self._reads: dict[str, dict[int, BlockedRead]] = {}
        self._watches: dict[str, dict[int, Watch]] = {}
        self._prefix_lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._by_token)

    def add(self, waiter: BlockedRead | Watch) -> None:
        """Add a blocked read or a watch."""
        self._by_token[waiter.token] = waiter
        if waiter.slot is not None:
            waiter.slot.tokens.add(waiter.token)
        if isinstance(waiter, BlockedRead):
            self._reads.setdefault(waiter.key, {})[waiter.token] = waiter
        else:
            if waiter.prefix not in self._watches:
                self._prefix_lengths[len(waiter.prefix)] += 1
            self._watches.setdefault(waiter.prefix, {})[waiter.token] = waiter

    def remove(self, token: int) -> BlockedRead | Watch | None:
        """Remove the blocked read or watch of a token and return it, if there was one."""
        waiter = self._by_token.pop(token, None)
        if waiter is None:
            return None
        if waiter.slot is not None:
            waiter.slot.tokens.discard(token)
        if isinstance(waiter, BlockedRead):
            reads = self._reads[waiter.key]
            del reads[token]
            if not reads:
                del self._reads[waiter.key]
        else:
            watches = self._watches[waiter.prefix]
            del watches[token]
            if not watches:
                del self._watches[waiter.prefix]
                self._prefix_lengths[len(waiter.prefix)] -= 1
                if not self._prefix_lengths[len(waiter.prefix)]:
                    del self._prefix_lengths[len(waiter.prefix)]
        return waiter

    def wanted(self) -> list[str]:
        """Return the keys for which reads are blocked."""
        return list(self._reads)

    def reads_of(self, key: str) -> list[BlockedRead]:
        """Return the blocked reads of the key, in order."""
        return list(self._reads.get(key, {}).values())

    def watching(self, events: tuple[KeyEvent, ...]) -> list[tuple[Watch, tuple[KeyEvent, ...]]]:
        """Return the watches of any changed key, each with the changes for it, which are sorted by key."""
        if len(events) > len(self._watches):
            return [
                (watch, some)
                for prefix, watches in self._watches.items()
                if (some := _with_prefix(events, prefix))
                for watch in watches.values()
            ]
        pushes: dict[int, list[KeyEvent]] = {}
        for event in events:
            for length in self._prefix_lengths:
                if length <= len(event.kv.key):
                    for token in self._watches.get(event.kv.key[:length], ()):
                        pushes.setdefault(token, []).append(event)
        result = []
        for token, matching in pushes.items():
            watch = self._by_token[token]
            assert isinstance(watch, Watch)
            result.append((watch, tuple(matching)))
        return result

    def of(self, token: int) -> BlockedRead | Watch:
        """Return the blocked read or watch of a token."""
        return self._by_token[token]

    def tokens(self) -> list[int]:
        """Return all tokens, in order of arrival."""
        return list(self._by_token)


def _with_prefix(events: tuple[KeyEvent, ...], prefix: str) -> tuple[KeyEvent, ...]:
    start = bisect_left(events, prefix, key=lambda event: event.kv.key)
    stop = bisect_left(events, True, start, key=lambda event: not event.kv.key.startswith(prefix))
    return events[start:stop]
