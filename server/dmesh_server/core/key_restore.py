"""Restore of many keys as one change, prepared in slices so that the server does other things in between.

The store's keys do not change meanwhile: calls that would change them are deferred until the restore is over.
The one exception are keys whose lease ends, which begins the work anew, a few times at most.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dmesh_server.core import records
from dmesh_server.core.effects import Record
from dmesh_server.core.events import (
    DropKey,
    KvDelete,
    KvIncrement,
    KvSet,
    KvTransaction,
    RestoreKeys,
    RevokeLease,
)
from dmesh_server.core.model import KeyEvent, KeyValue
from dmesh_server.core.ordered_keys import OrderedKeys

KeyCall = KvSet | KvDelete | KvIncrement | KvTransaction | RevokeLease | DropKey | RestoreKeys
"""Calls that may change keys."""

SLICE = 500
"""Keys handled at a time."""
_ATTEMPTS = 4
"""Number of attempts in slices; the last one then handles all remaining keys at once."""


@dataclass(slots=True)
class Prepared:
    """The keys as they will be, and everything that follows from the change."""

    revision: int
    """Revision of the change."""
    keys: OrderedKeys = field(default_factory=OrderedKeys)
    """All keys after the change."""
    events: list[KeyEvent] = field(default_factory=list)
    """The changes, sorted by key."""
    size: int = 0
    """Bytes of the events."""
    records: dict[tuple[str, str, str], Record] = field(default_factory=dict)
    """Durable records of the changed keys, by their addresses."""
    change: list[bytes] = field(default_factory=list)
    """Parts of the durable record of the change."""
    detached: list[tuple[str, int]] = field(default_factory=list)
    """Keys that lose their lease, with its number."""
    deleted: int = 0
    """Number of keys that are deleted."""


class KeyRestore:
    """Restore under way.

    Args:
        token: Token of the call to answer.
        cluster: Name of the cluster.
        given: The keys to restore and their values.
        check: Raises `CoreError` for a key and a value that cannot be restored.
        spared: Returns whether a key that is not given stays.
    """

    def __init__(
        self,
        token: int,
        cluster: str,
        given: Mapping[str, bytes],
        check: Callable[[str, bytes], None],
        spared: Callable[[str], bool],
    ) -> None:
        self.token = token
        self.deferred: list[KeyCall] = []
        """Calls that wait until it is over."""
        self._cluster = cluster
        self._given = given
        self._check = check
        self._spared = spared
        self._unchecked = iter(given)
        self._sorted: list[list[str]] = []
        self._attempts = 0
        self._work: Iterator[bool] = iter(())
        self.prepared = Prepared(0)

    def begin(self, keys: OrderedKeys, revision: int) -> None:
        """Begin, or begin anew because the store has changed.

        Args:
            keys: The store's keys.
            revision: Revision of the change.
        """
        self._attempts += 1
        self.prepared = Prepared(revision)
        self._work = self._steps(keys)

    def step(self) -> bool:
        """Handle the next keys; return whether all are done.

        Raises:
            CoreError: A key cannot be restored.
        """
        if self._attempts < _ATTEMPTS:
            return next(self._work, True)
        for _ in self._work:
            pass
        return True

    def _steps(self, keys: OrderedKeys) -> Iterator[bool]:
        while names := list(itertools.islice(self._unchecked, SLICE)):
            for key in names:
                self._check(key, self._given[key])
            self._sorted.append(sorted(names))
            yield False
        merged = itertools.groupby(heapq.merge(keys.keys(), *self._sorted))
        while names := [key for key, _ in itertools.islice(merged, SLICE)]:
            self._decide(names, keys)
            yield False

    def _decide(self, names: Iterable[str], keys: OrderedKeys) -> None:
        prepared = self.prepared
        for key in names:
            old, value = keys.get(key), self._given.get(key)
            if old is not None and (self._spared(key) if value is None else old.value == value):
                prepared.keys.put(old)
                continue
            created = old.create_revision if old else prepared.revision
            if value is None:
                event = KeyEvent(KeyValue(key, b"", created, prepared.revision), deleted=True)
                prepared.deleted += 1
            else:
                event = KeyEvent(KeyValue(key, value, created, prepared.revision))
                prepared.keys.put(event.kv)
            prepared.events.append(event)
            prepared.size += event.size
            encoded = None if event.deleted else records.encode_key(event.kv)
            address = (self._cluster, records.KEY, key)
            prepared.records[address] = Record(*address, encoded)
            prepared.change.append(records.encode_change((event,)))
            if old is not None and old.lease:
                prepared.detached.append((key, old.lease))
