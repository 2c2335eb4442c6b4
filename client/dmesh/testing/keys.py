"""Keys of a coordination service in memory, as far as survivors of a failure need them to decide."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from dmesh.coordination.transactions import Condition, Delete, Get, Operation, Put, TransactionResult
from dmesh.coordination.values import Snapshot, encode_value
from dmesh.errors import KeyWaitTimeoutError


class FakeKeys:
    """Key-value store that the ranks of one process share; see `collectives.consensus.Store`.

    It knows conditions on missing keys, and no increments. Thread-safe.
    """

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def transaction(
        self, compare: Iterable[Condition], then: Iterable[Operation], otherwise: Iterable[Operation]
    ) -> TransactionResult:
        """Change several keys at once, if the keys that `compare` names are missing."""
        with self._changed:
            succeeded = all(self._holds(condition) for condition in compare)
            results = tuple(self._carry_out(operation) for operation in (then if succeeded else otherwise))
            self._changed.notify_all()
            return TransactionResult(succeeded, results, 0)

    def key_value_get(self, key: str, timeout: float) -> bytes:
        """Read a key, waiting for it to exist; KeyWaitTimeoutError if it does not come in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.keys, timeout):
                raise KeyWaitTimeoutError(f"key {key!r} did not appear within {timeout:g} s")
            return self.keys[key]

    def _holds(self, condition: Condition) -> bool:
        assert condition == Condition.absent(condition.key)
        return condition.key not in self.keys

    def _carry_out(self, operation: Operation) -> int | Snapshot:
        match operation:
            case Put(key, value):
                self.keys[key] = encode_value(value, key)
                return 0
            case Delete(key, is_prefix):
                found = self._matching(key, is_prefix)
                for at in found:
                    del self.keys[at]
                return len(found)
            case Get(key, is_prefix):
                snapshot = Snapshot()
                snapshot.update((at, self.keys[at]) for at in self._matching(key, is_prefix))
                return snapshot
        raise AssertionError(operation)

    def _matching(self, key: str, is_prefix: bool) -> list[str]:
        return [at for at in self.keys if (at.startswith(key) if is_prefix else at == key)]
