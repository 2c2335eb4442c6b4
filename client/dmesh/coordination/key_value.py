"""The key-value store of the cluster: small values that the processes of a program must agree on.

Values are bytes. Where a value is given, a `str` stands for its UTF-8 encoding; where one is returned, it is
bytes unless the caller names an `encoding`. Nothing about the type is stored, because programs in other
languages and other protocols share the keys.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import overload

from dmesh.coordination import transactions
from dmesh.coordination.calls import Calls
from dmesh.coordination.store_loss import OwnedKeys
from dmesh.coordination.transactions import Condition, Delete, Get, Operation, TransactionResult
from dmesh.coordination.values import (
    Snapshot,
    Value,
    check_timeout,
    decode_value,
    encode_amount,
    encode_key,
    encode_value,
)
from dmesh.errors import ConfigurationError, KeyNotFoundError, KeyWaitTimeoutError
from dmesh.v1 import key_value_pb2 as pb


@dataclass(frozen=True, slots=True)
class CompareAndSetResult:
    """Result of a compare-and-set; true if it was done."""

    succeeded: bool
    """True if the key was as expected and is now set."""
    value: bytes | None
    """The key's value now; None if there is no such key."""
    revision: int
    """Revision of the change; the current one if nothing changed."""

    def __bool__(self) -> bool:
        return self.succeeded


class KeyValueMethods:
    """Operations of an agent on the cluster's key-value store. Thread-safe.

    Args:
        calls: Makes the calls.
        owned: Sets keys again that this process owns; None if it cannot own any.
    """

    def __init__(self, calls: Calls, owned: OwnedKeys | None = None) -> None:
        self._calls = calls
        self._owned = owned
        # Not the same in any other process, and none twice in this one.
        self._request_ids = map(secrets.token_hex(12).__add__, map(str, itertools.count(1)))

    def put_again(self, key: str, value: bytes) -> None:
        """Set a key that this process owns, after the coordinator has lost it."""
        self._calls.witness.accept()
        self.key_value_set(key, value, allow_overwrite=True)

    def key_value_set(
        self,
        key: str,
        value: Value,
        allow_overwrite: bool = False,
        *,
        owned: bool = False,
        lease: int = 0,
        ephemeral: bool = False,
    ) -> int:
        """Set a key, perhaps attached to a lease or to this process's membership; return the revision."""
        request = pb.SetRequest(
            request_id=next(self._request_ids),
            key=encode_key(key),
            value=encode_value(value, key),
            allow_overwrite=bool(allow_overwrite),
            lease=lease,
            ephemeral=ephemeral,
        )
        if self._owned is not None and owned:
            # Before the call, or a loss right after it would find no such key.
            self._owned.keep(key, request.value)
        try:
            revision = self._calls.ask("set", lambda: request, doing=f"setting key {key!r}").set.revision
        except BaseException:
            if self._owned is not None and owned:
                self._owned.forget(key)
            raise
        if not owned:
            self._disown(key)
        return revision

    @overload
    def key_value_get(self, key: str, timeout: float | None = None) -> bytes: ...

    @overload
    def key_value_get(self, key: str, timeout: float | None = None, *, encoding: str) -> str: ...

    @overload
    def key_value_get(self, key: str, timeout: float | None = None, *, encoding: str | None) -> Value: ...

    def key_value_get(self, key: str, timeout: float | None = None, *, encoding: str | None = None) -> Value:
        """Read a key, waiting for it to exist."""
        encode_key(key)
        check_timeout(timeout)

        def request(left: float | None) -> pb.GetRequest:
            # Rounded up: 0 would mean "do not wait", which is another question.
            wait_ms = (
                -1
                if left is None
                else math.ceil(left * 1000)
                if timeout == 0
                else max(1, math.ceil(left * 1000))
            )
            return pb.GetRequest(key=key, timeout_ms=wait_ms)

        reply = self._calls.wait("get", request, doing=f"waiting for key {key!r}", timeout=timeout)
        if reply is None:
            raise KeyWaitTimeoutError(
                f"key {key!r} did not appear within {timeout:g} s{self._calls.absence()}. Check that the "
                "process that sets it is running and uses the same key."
            )
        value = reply.get.kv.value
        return value if encoding is None else decode_value(value, key, encoding)

    @overload
    def key_value_try_get(self, key: str) -> bytes | None: ...

    @overload
    def key_value_try_get(self, key: str, *, encoding: str) -> str | None: ...

    @overload
    def key_value_try_get(self, key: str, *, encoding: str | None) -> Value | None: ...

    def key_value_try_get(self, key: str, *, encoding: str | None = None) -> Value | None:
        """Read a key without waiting; return None if there is none."""
        request = pb.GetRequest(key=encode_key(key), timeout_ms=0)
        try:
            reply = self._calls.ask("get", lambda: request, doing=f"reading key {key!r}", mutates=False)
        except KeyNotFoundError:
            return None
        value = reply.get.kv.value
        return value if encoding is None else decode_value(value, key, encoding)

    def key_value_get_many(self, keys: Iterable[str]) -> Snapshot:
        """Read the existing ones of several keys, all at one revision."""
        if isinstance(keys, str | bytes):
            raise ConfigurationError(f"keys must be a collection of strings, not the one {keys!r}")
        wanted = [encode_key(key) for key in keys]
        request = pb.GetManyRequest(keys=wanted)
        response = self._calls.ask(
            "get_many", lambda: request, doing=f"reading {len(wanted)} keys", mutates=False
        ).get_many
        return Snapshot(response.kvs, response.revision)

    def key_value_list(self, prefix: str) -> Snapshot:
        """Read all keys that start with `prefix`, sorted, at one revision."""
        request = pb.ListRequest(prefix=encode_key(prefix, "prefix"))
        response = self._calls.ask(
            "list", lambda: request, doing=f"listing the keys that start with {prefix!r}", mutates=False
        ).list
        return Snapshot(response.kvs, response.revision)

    def key_value_delete(self, key: str, *, is_prefix: bool = False) -> int:
        """Delete a key, or all keys that start with it; return how many there were."""
        request = pb.DeleteRequest(
            request_id=next(self._request_ids),
            key=encode_key(key, "prefix" if is_prefix else "key"),
            is_prefix=bool(is_prefix),
        )
        deleted = self._calls.ask("delete", lambda: request, doing=f"deleting key {key!r}").delete.deleted
        self._disown(key, is_prefix=is_prefix)
        return deleted

    def key_value_increment(self, key: str, amount: int = 1) -> int:
        """Add to a decimal integer, where a missing key counts as 0; return the sum."""
        request = pb.IncrementRequest(
            request_id=next(self._request_ids), key=encode_key(key), amount=encode_amount(amount)
        )
        response = self._calls.ask("increment", lambda: request, doing=f"incrementing key {key!r}").increment
        self._disown(key)
        return response.value

    def key_value_compare_and_set(
        self, key: str, expected: Value | None, value: Value
    ) -> CompareAndSetResult:
        """Set a key if its value is `expected` (None: if it does not exist)."""
        request = pb.CompareAndSetRequest(
            request_id=next(self._request_ids),
            key=encode_key(key),
            expected=None if expected is None else encode_value(expected, key),
            value=encode_value(value, key),
        )
        response = self._calls.ask(
            "compare_and_set", lambda: request, doing=f"setting key {key!r}"
        ).compare_and_set
        if response.succeeded:
            self._disown(key)
            return CompareAndSetResult(True, request.value, response.revision)
        current = response.current.value if response.HasField("current") else None
        return CompareAndSetResult(False, current, response.revision)

    def transaction(
        self,
        compare: Iterable[Condition] = (),
        then: Iterable[Operation] = (),
        otherwise: Iterable[Operation] = (),
    ) -> TransactionResult:
        """Change several keys at one revision, or none: see `dmesh.coordination.transaction`."""
        then, otherwise = list(then), list(otherwise)
        request = transactions.request(next(self._request_ids), compare, then, otherwise)
        reply = self._calls.ask("transaction", lambda: request, doing="changing keys in a transaction")
        for operation in then if reply.transaction.succeeded else otherwise:
            if not isinstance(operation, Get):
                self._disown(operation.key, is_prefix=isinstance(operation, Delete) and operation.is_prefix)
        return transactions.result(reply.transaction)

    def _disown(self, key: str, *, is_prefix: bool = False) -> None:
        """Note that a key was changed otherwise: it is not set again after a loss of the store."""
        if self._owned is not None:
            self._owned.forget(key, is_prefix=is_prefix)
