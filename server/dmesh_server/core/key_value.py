"""The key-value store of one generation of a cluster: its calls, its revisions, its watches."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from dmesh_server.core import records, validation
from dmesh_server.core.deadlines import RestoreDue, WaitDue
from dmesh_server.core.effects import (
    Answer,
    KeysRestored,
    KvDeleted,
    KvIncremented,
    KvRead,
    KvResult,
    KvRevision,
    KvTransacted,
    LeaseGranted,
    WatchPush,
)
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    GrantLease,
    KvDelete,
    KvGet,
    KvGetMany,
    KvIncrement,
    KvList,
    KvOperation,
    KvSet,
    KvTransaction,
    KvWatch,
    RenewLease,
    RevokeLease,
)
from dmesh_server.core.key_changes import KeyChanges
from dmesh_server.core.key_leases import KeyLeases
from dmesh_server.core.key_restore import KeyCall, KeyRestore, Prepared
from dmesh_server.core.messages import quote, seconds
from dmesh_server.core.model import Condition, ConditionOperator, ConditionTarget, KeyEvent, KeyValue
from dmesh_server.core.ordered_keys import OrderedKeys
from dmesh_server.core.roster import Roster, TaskSlot
from dmesh_server.core.shared import Shared
from dmesh_server.core.transaction import Transaction
from dmesh_server.core.watches import BlockedRead, History, Waiters, Watch

_INTEGER = re.compile(rb"[+-]?[0-9]{1,20}")


class KeyValueStore:
    """Keys, values and revisions, the history of their changes, and the blocked reads and watches."""

    def __init__(self, cluster: str, shared: Shared, roster: Roster, owner: str = "") -> None:
        self._cluster = cluster
        self._owner = owner
        self._quotas = shared.quotas
        self._limits = limits = shared.limits
        self._deadlines = shared.deadlines
        self._waiting = shared.waiting
        self.revision = 0
        """Of the latest change."""
        self.keys = OrderedKeys()
        """The keys and their values."""
        self.history = History(limits.watch_history, limits.watch_history_bytes)
        """The latest changes."""
        self.waiters = Waiters()
        """Blocked reads and watches."""
        self.leases = KeyLeases(cluster, shared, roster, self._remove_all)
        """The leases of its keys."""
        self.restore: KeyRestore | None = None
        """Restore under way: meanwhile no call may change a key."""

    def write(
        self, event: KvSet | KvDelete | KvIncrement, transaction: Transaction
    ) -> KvRevision | KvDeleted | KvIncremented:
        """Set, delete or increments keys."""
        changes = KeyChanges(self.keys, self.revision + 1)
        result = self._change(event, changes)
        self._commit(changes, transaction)
        return result

    def transact(self, event: KvTransaction, transaction: Transaction) -> KvTransacted:
        """Carries a transaction out: all of it, or nothing if any of its operations is refused."""
        for listed in (event.compare, event.then, event.otherwise):
            if len(listed) > self._limits.max_transaction_operations:
                raise CoreError(
                    ErrorKind.LIMIT_EXCEEDED,
                    f"a transaction has {len(listed)} conditions or operations; the server allows "
                    f"{self._limits.max_transaction_operations} of each",
                )
        for condition in event.compare:
            validation.key(condition.key, self._limits)
        succeeded = all(map(self._holds, event.compare))
        changes, results, read = KeyChanges(self.keys, self.revision + 1), list[KvResult](), 0
        try:
            for operation in event.then if succeeded else event.otherwise:
                result = self._perform(operation, changes)
                if isinstance(result, KvRead):
                    read += sum(len(kv.key) + len(kv.value) for kv in result.kvs)
                results.append(result)
            if changes and read > self._limits.max_remembered_read_bytes:
                raise CoreError(
                    ErrorKind.LIMIT_EXCEEDED,
                    f"a transaction reads {read} bytes beside its changes; the server allows "
                    f"{self._limits.max_remembered_read_bytes}. Read them in a transaction without changes.",
                )
        except CoreError:
            changes.undo()
            raise
        self._commit(changes, transaction)
        return KvTransacted(succeeded, tuple(results), self.revision)

    def change_lease(
        self, event: GrantLease | RenewLease | RevokeLease, transaction: Transaction
    ) -> LeaseGranted | KvDeleted:
        """Grant, renew or revoke a lease of keys."""
        match event:
            case GrantLease():
                return LeaseGranted(self.leases.grant(event.lease, event.ttl, transaction))
            case RenewLease():
                return LeaseGranted(self.leases.renew(event.lease, transaction))
            case RevokeLease():
                return KvDeleted(self.leases.revoke(event.lease, transaction), self.revision)

    def remove(self, key: str, transaction: Transaction) -> None:
        """Remove a key that was checked, if it exists."""
        changes = KeyChanges(self.keys, self.revision + 1)
        changes.remove(key)
        self._commit(changes, transaction)

    def _remove_all(self, keys: list[str], transaction: Transaction) -> None:
        changes = KeyChanges(self.keys, self.revision + 1)
        for key in keys:
            changes.remove(key)
        self._commit(changes, transaction)

    def get(self, event: KvGet, slot: TaskSlot | None, transaction: Transaction) -> KeyValue | None:
        """Read one key; None if the caller now waits for it."""
        validation.key(event.key, self._limits)
        validation.duration(event.timeout, "the time to wait for a key", positive=False)
        kv = self.keys.get(event.key)
        if kv is not None:
            return kv
        if event.timeout == 0:
            raise CoreError(
                ErrorKind.KEY_NOT_FOUND,
                f"there is no key {quote(event.key)} in cluster {quote(self._cluster)} (revision "
                f"{self.revision})",
            )
        self._wait(BlockedRead(event.token, event.key, event.timeout, slot))
        if event.timeout is not None:
            self._deadlines.set(WaitDue(event.token), transaction.now + event.timeout)
        return None

    def get_many(self, event: KvGetMany, revision: int | None = None) -> KvRead:
        """Read many keys at one revision, by default the current one."""
        validation.keys(event.keys, len(event.keys), self._limits)
        found = [kv for key in event.keys if (kv := self.keys.get(key)) is not None]
        return self._read(found, "the keys asked for", revision)

    def list(self, event: KvList, revision: int | None = None) -> KvRead:
        """Read all keys with a prefix at one revision, by default the current one."""
        validation.key(event.prefix, self._limits, prefix=True)
        found = self.keys.with_prefix(event.prefix)
        if event.keys_only:
            found = (KeyValue(kv.key, b"", kv.create_revision, kv.mod_revision) for kv in found)
        return self._read(found, f"the keys with prefix {quote(event.prefix)}", revision)

    def watch(self, event: KvWatch, slot: TaskSlot | None, transaction: Transaction) -> None:
        """Watch a prefix; replies by itself, because the changes since then follow the reply."""
        validation.key(event.prefix, self._limits, prefix=True)
        if event.from_revision < 0:
            raise validation.invalid(f"a watch cannot start from revision {event.from_revision}")
        if event.from_revision > self.revision + 1:
            raise CoreError(
                ErrorKind.COMPACTED,
                f"a watch from revision {event.from_revision} is not possible: cluster "
                f"{quote(self._cluster)} is at revision {self.revision}. The cluster has begun a new "
                "generation since: read the keys again and watch from the revision of that read plus one.",
                oldest_revision=self.history.oldest(self.revision),
                revision=self.revision,
            )
        oldest = self.history.oldest(self.revision)
        if 0 < event.from_revision < oldest:
            raise CoreError(
                ErrorKind.COMPACTED,
                f"a watch from revision {event.from_revision} is not possible: the server keeps the changes "
                f"since revision {oldest} (now {self.revision}). Read the keys again and watch from the "
                "revision of that read plus one.",
                oldest_revision=oldest,
                revision=self.revision,
            )
        self._wait(Watch(event.token, event.prefix, slot))
        transaction.reply(event.token, KvRevision(self.revision))
        if event.from_revision:
            for revision, events in self.history.since(event.from_revision):
                matching = tuple(change for change in events if change.kv.key.startswith(event.prefix))
                if matching:
                    transaction.watch_push(WatchPush(event.token, revision, matching))

    def time_out(self, token: int, transaction: Transaction) -> None:
        """End a blocked read whose time is over."""
        read = self._release(token)
        assert isinstance(read, BlockedRead)
        transaction.reply(
            token,
            CoreError(
                ErrorKind.DEADLINE_EXCEEDED,
                f"key {quote(read.key)} did not appear in cluster {quote(self._cluster)} within "
                f"{seconds(read.timeout or 0.0)}. Check that the process that should set it is running and "
                "has got that far.",
            ),
        )

    def dismiss(self, token: int, error: CoreError | None, transaction: Transaction) -> None:
        """End a blocked read or a watch, with an error unless the caller is gone."""
        waiter = self._release(token)
        if error is None:
            return
        if isinstance(waiter, BlockedRead):
            transaction.reply(token, error)
        elif isinstance(waiter, Watch):
            transaction.watch_push(WatchPush(token, self.revision, (), error))

    def end(self, transaction: Transaction) -> None:
        """Forget all keys and changes: the cluster's generation is over."""
        for key in self.keys.keys():  # noqa: SIM118 - not a dict
            transaction.persist(self._cluster, records.KEY, key, None)
        for revision in self.history.revisions():
            transaction.persist(self._cluster, records.CHANGE, str(revision), None)
        self.leases.end(transaction)

    def begin_restore(self, restore: KeyRestore, transaction: Transaction) -> None:
        """Begin to restore keys; `step_restore` is due from now on."""
        assert self.restore is None, "a restore is under way"
        self.restore = restore
        restore.begin(self.keys, self.revision + 1)
        self._deadlines.set(RestoreDue(self._cluster), transaction.now)

    def defers(self, event: KeyCall) -> bool:
        """Keep a call that would change keys, if keys are being restored, until that is over."""
        if self.restore is not None:
            self.restore.deferred.append(event)
        return self.restore is not None

    def step_restore(self, transaction: Transaction) -> KeysRestored | CoreError | None:
        """Prepare the next keys; when all are prepared, make them the store's, as one change.

        Returns:
            The answer, if it is over: an error if a key cannot be set or the store would become too large.
        """
        assert self.restore is not None, "no restore is under way"
        try:
            if self.restore.step():
                return self._restored(self.restore.prepared, transaction)
        except CoreError as error:
            return error
        # Not at this same time, or the server would do nothing else in between.
        self._deadlines.set(RestoreDue(self._cluster), math.nextafter(transaction.now, math.inf))
        return None

    def end_restore(self, answer: Answer | None, transaction: Transaction) -> Iterable[KeyCall]:
        """Answer a restore, if there is one and an answer; return the calls that were deferred for it."""
        if self.restore is None or answer is None:
            return []
        ended, self.restore = self.restore, None
        self._deadlines.cancel(RestoreDue(self._cluster))
        transaction.reply(ended.token, answer)
        return ended.deferred

    def _restored(self, prepared: Prepared, transaction: Transaction) -> KeysRestored:
        events = tuple(prepared.events)
        growth = prepared.keys.size - self.keys.size
        self._quotas.check_write(self._owner, len(prepared.keys) - len(self.keys), growth)
        if growth > 0 and prepared.keys.size > self._limits.max_store_bytes:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"the keys cannot be restored: the keys and values of cluster {quote(self._cluster)} would "
                f"have {prepared.keys.size} bytes, and the server's limit is {self._limits.max_store_bytes}. "
                "Delete keys that are no longer needed.",
            )
        if events:
            self.keys, self.revision = prepared.keys, prepared.revision
            transaction.persist_all(prepared.records)
            self._publish(events, b"".join(prepared.change), prepared.size, transaction)
            for key, lease in prepared.detached:
                self.leases.detach(key, lease, transaction)
            for key in self.waiters.wanted():
                self._answer_reads(key, transaction)
        return KeysRestored(len(events) - prepared.deleted, prepared.deleted, self.revision)

    def advance(self, revision: int, transaction: Transaction) -> None:
        """Let revisions go on behind one that an earlier store has used; no watch can start before it."""
        if revision <= self.revision:
            return
        for forgotten in self.history.revisions():
            transaction.persist(self._cluster, records.CHANGE, str(forgotten), None)
        self.history = History(self._limits.watch_history, self._limits.watch_history_bytes)
        self.revision = revision
        self.history.append(revision, (), 0)
        transaction.persist(self._cluster, records.CHANGE, str(revision), records.NO_EVENTS)
        self._changed()

    def _holds(self, condition: Condition) -> bool:
        kv = self.keys.get(condition.key)
        operand = condition.operand
        found: bytes | int
        match condition.target:
            case ConditionTarget.VALUE:
                if kv is None:
                    return condition.operator is ConditionOperator.NOT_EQUAL
                found = kv.value
            case ConditionTarget.CREATE_REVISION:
                found = kv.create_revision if kv else 0
            case ConditionTarget.MOD_REVISION:
                found = kv.mod_revision if kv else 0
        if condition.operator is ConditionOperator.EQUAL:
            return found == operand
        if condition.operator is ConditionOperator.NOT_EQUAL:
            return found != operand
        less = condition.operator is ConditionOperator.LESS
        return found != operand and (found < operand) is less  # type: ignore[operator]

    def _perform(self, operation: KvOperation, changes: KeyChanges) -> KvResult:
        match operation:
            case KvGetMany():
                return self.get_many(operation, changes.revision if changes else self.revision)
            case KvList():
                return self.list(operation, changes.revision if changes else self.revision)
            case _:
                return self._change(operation, changes)

    def _change(
        self, event: KvSet | KvDelete | KvIncrement, changes: KeyChanges
    ) -> KvRevision | KvDeleted | KvIncremented:
        match event:
            case KvSet():
                self._set(event, changes)
                return KvRevision(changes.revision)
            case KvIncrement():
                return KvIncremented(self._increment(event, changes), changes.revision)
            case KvDelete():
                validation.key(event.key, self._limits, prefix=event.is_prefix)
                deleted = changes.remove(event.key, is_prefix=event.is_prefix)
                return KvDeleted(deleted, changes.revision if changes else self.revision)

    def _set(self, event: KvSet, changes: KeyChanges) -> None:
        validation.key(event.key, self._limits)
        validation.value(event.value, event.key, self._limits)
        if not event.allow_overwrite and (old := self.keys.get(event.key)) is not None:
            raise CoreError(
                ErrorKind.KEY_EXISTS,
                f"key {quote(event.key)} has a value already (since revision {old.create_revision}, "
                f"{len(old.value)} bytes). Delete it first, or allow overwriting (allow_overwrite=True).",
            )
        if event.lease:
            self.leases.check(event.lease)
        self._put(event.key, event.value, changes, event.lease)

    def _increment(self, event: KvIncrement, changes: KeyChanges) -> int:
        validation.key(event.key, self._limits)
        if event.amount not in validation.INT64:
            raise validation.invalid(f"the amount {event.amount} does not fit into 64 bits")
        old = self.keys.get(event.key)
        value = event.amount
        if old is not None:
            if not _INTEGER.fullmatch(old.value) or int(old.value) not in validation.INT64:
                raise CoreError(
                    ErrorKind.KEY_NOT_INTEGER,
                    f"key {quote(event.key)} cannot be incremented: its value {_excerpt(old.value)} is not a "
                    "decimal integer of 64 bits",
                )
            value += int(old.value)
            if value not in validation.INT64:
                raise CoreError(
                    ErrorKind.KEY_NOT_INTEGER,
                    f"key {quote(event.key)} cannot be incremented by {event.amount}: {int(old.value)} plus "
                    "that does not fit into 64 bits",
                )
        self._put(event.key, str(value).encode(), changes, old.lease if old else 0)
        return value

    def _put(self, key: str, value: bytes, changes: KeyChanges, lease: int = 0) -> None:
        growth = self.keys.growth(key, value)
        self._quotas.check_write(self._owner, int(self.keys.get(key) is None), growth)
        if growth > 0 and self.keys.size + growth > self._limits.max_store_bytes:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"key {quote(key)} cannot be set: the keys and values of cluster {quote(self._cluster)} have "
                f"{self.keys.size} bytes, and {growth} more would pass the server's limit of "
                f"{self._limits.max_store_bytes}. Delete keys that are no longer needed.",
            )
        changes.put(key, value, lease)

    def _commit(self, changes: KeyChanges, transaction: Transaction) -> None:
        """Keep the changes, if any, as the next revision; answer the blocked reads and watches."""
        if not changes:
            return
        events = changes.events()
        self.revision = changes.revision
        for event in events:
            kv = event.kv
            value = None if event.deleted else records.encode_key(kv)
            transaction.persist(self._cluster, records.KEY, kv.key, value)
        for key, before, now in changes.leases():
            if before:
                self.leases.detach(key, before, transaction)
            if now:
                self.leases.attach(key, now, transaction)
        for event in events:
            self._answer_reads(event.kv.key, transaction)
        size = sum(event.size for event in events)
        self._publish(events, records.encode_change(events), size, transaction)
        self._changed()

    def _publish(
        self, events: tuple[KeyEvent, ...], encoded: bytes, size: int, transaction: Transaction
    ) -> None:
        """Add the changes of the current revision to the history, and push them to the watches."""
        transaction.persist(self._cluster, records.CHANGE, str(self.revision), encoded)
        for forgotten in self.history.append(self.revision, events, size):
            transaction.persist(self._cluster, records.CHANGE, str(forgotten), None)
        for watch, matching in self.waiters.watching(events):
            transaction.watch_push(WatchPush(watch.token, self.revision, matching))

    def _answer_reads(self, key: str, transaction: Transaction) -> None:
        """Answer those who wait for a key, if it is there."""
        kv = self.keys.get(key)
        if kv is not None:
            for read in self.waiters.reads_of(key):
                self.dismiss(read.token, None, transaction)
                transaction.reply(read.token, kv)

    def _changed(self) -> None:
        if self.restore is not None:
            self.restore.begin(self.keys, self.revision + 1)

    def _read(self, found: Iterable[KeyValue], what: str, revision: int | None) -> KvRead:
        kvs, size = [], 0
        for kv in found:
            kvs.append(kv)
            size += len(kv.key) + len(kv.value)
            if size > self._limits.max_read_bytes:
                raise CoreError(
                    ErrorKind.LIMIT_EXCEEDED,
                    f"{what} have more than {self._limits.max_read_bytes} bytes, the server's limit for one "
                    "answer. Read them in parts: by longer prefixes, or the names first (keys_only) and then "
                    "some at a time.",
                )
        return KvRead(tuple(kvs), self.revision if revision is None else revision)

    def _wait(self, waiter: BlockedRead | Watch) -> None:
        if len(self.waiters) >= self._limits.max_waiters:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"{len(self.waiters)} reads and watches wait in cluster {quote(self._cluster)}, which is the "
                "server's limit",
            )
        self.waiters.add(waiter)
        self._waiting[waiter.token] = self

    def _release(self, token: int) -> BlockedRead | Watch | None:
        self._waiting.pop(token, None)
        self._deadlines.cancel(WaitDue(token))
        return self.waiters.remove(token)


def _excerpt(value: bytes) -> str:
    return repr(value) if len(value) <= 40 else f"{value[:40]!r}... ({len(value)} bytes)"
