"""Keys in the order of their bytes, with their values: the data structure below the key-value store."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from dmesh_server.core.model import KeyValue


class OrderedKeys:
    """A sorted map from keys to their values and revisions.

    Python compares strings by code point, which is the order of their UTF-8 bytes.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, KeyValue] = {}
        self._sorted: list[str] = []
        self.size = 0
        """Bytes of all keys and values."""

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: str) -> KeyValue | None:
        """Return the key's entry, if any."""
        return self._by_key.get(key)

    def put(self, kv: KeyValue) -> None:
        """Set or replace an entry."""
        old = self._by_key.get(kv.key)
        if old is None:
            insort(self._sorted, kv.key)
            self.size += len(kv.key.encode())
        else:
            self.size -= len(old.value)
        self._by_key[kv.key] = kv
        self.size += len(kv.value)

    def growth(self, key: str, value: bytes) -> int:
        """Return by how many bytes setting `key` to `value` would make the store larger."""
        old = self._by_key.get(key)
        return len(value) - len(old.value) if old else len(value) + len(key.encode())

    def remove(self, key: str, *, is_prefix: bool) -> list[KeyValue]:
        """Remove a key, or all keys with a prefix; return their entries, sorted by key."""
        if is_prefix:
            start, stop = self._span(key)
        elif key in self._by_key:
            start = bisect_left(self._sorted, key)
            stop = start + 1
        else:
            return []
        removed = [self._by_key.pop(name) for name in self._sorted[start:stop]]
        del self._sorted[start:stop]
        self.size -= sum(len(kv.key.encode()) + len(kv.value) for kv in removed)
        return removed

    def with_prefix(self, prefix: str) -> Iterator[KeyValue]:
        """Yield all entries whose keys start with `prefix`, sorted by key."""
        start, stop = self._span(prefix)
        for index in range(start, stop):
            yield self._by_key[self._sorted[index]]

    def after(self, prefix: str, key: str, limit: int) -> list[KeyValue]:
        """Return the first entries whose keys start with `prefix` and come after `key`, sorted by key."""
        start, stop = self._span(prefix)
        start = max(start, bisect_right(self._sorted, key))
        return [self._by_key[name] for name in self._sorted[start : min(stop, start + limit)]]

    def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return list(self._sorted)

    def _span(self, prefix: str) -> tuple[int, int]:
        start = bisect_left(self._sorted, prefix)
        # Truncated to the prefix's length, the keys are still sorted.
        stop = bisect_left(self._sorted, True, start, key=lambda name: not name.startswith(prefix))
        return start, stop
