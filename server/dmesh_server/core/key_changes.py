"""Changes of one revision of the key-value store: applied one after the other, kept or undone together."""

from __future__ import annotations

from collections.abc import Iterator

from dmesh_server.core import validation
from dmesh_server.core.messages import quote
from dmesh_server.core.model import KeyEvent, KeyValue
from dmesh_server.core.ordered_keys import OrderedKeys


class KeyChanges:
    """Changes that get one revision.

    Each takes effect at once, so that what follows in the same transaction sees it. No key changes twice: the
    changes of a revision have no order for those who watch them.

    Args:
        keys: The store's keys.
        revision: The revision of the changes.
    """

    def __init__(self, keys: OrderedKeys, revision: int) -> None:
        self.revision = revision
        """The revision of the changes."""
        self._keys = keys
        self._before: dict[str, KeyValue | None] = {}

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._before)

    def put(self, key: str, value: bytes, lease: int = 0) -> KeyValue:
        """Set a key."""
        self._once(key)
        old = self._before[key] = self._keys.get(key)
        kv = KeyValue(key, value, old.create_revision if old else self.revision, self.revision, lease)
        self._keys.put(kv)
        return kv

    def remove(self, key: str, *, is_prefix: bool = False) -> int:
        """Remove a key, or all keys with a prefix; return how many there were."""
        if is_prefix:
            for changed in self._before:
                if changed.startswith(key):
                    self._once(changed)
        else:
            self._once(key)
        removed = self._keys.remove(key, is_prefix=is_prefix)
        self._before.update((kv.key, kv) for kv in removed)
        return len(removed)

    def events(self) -> tuple[KeyEvent, ...]:
        """Return the changes, sorted by key."""
        return tuple(self._event(key) for key in sorted(self._before))

    def leases(self) -> Iterator[tuple[str, int, int]]:
        """Yield the keys whose lease has changed, with the lease before and the present one, 0 for none."""
        for key, old in self._before.items():
            kv = self._keys.get(key)
            before, now = old.lease if old else 0, kv.lease if kv else 0
            if before != now:
                yield key, before, now

    def undo(self) -> None:
        """Put everything back as it was."""
        for key, old in self._before.items():
            if old is not None:
                self._keys.put(old)
            else:
                self._keys.remove(key, is_prefix=False)
        self._before.clear()

    def _event(self, key: str) -> KeyEvent:
        kv, old = self._keys.get(key), self._before[key]
        if kv is not None:
            return KeyEvent(kv)
        assert old is not None, "what did not exist was not removed"
        return KeyEvent(KeyValue(key, b"", old.create_revision, self.revision), deleted=True)

    def _once(self, key: str) -> None:
        if key in self._before:
            raise validation.invalid(
                f"key {quote(key)} is changed more than once in a transaction; change each key once, or "
                "use several "
                "transactions"
            )
