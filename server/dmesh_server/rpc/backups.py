"""Backup and restore of a cluster's keys, for operators: `Backup` and `Restore` of the `KeyValueService`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dmesh.v1 import key_value_pb2 as pb
from dmesh_server.core.effects import KeySnapshot, KeysRestored
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import RestoreKeys, SnapshotKeys
from dmesh_server.core.model import KeyValue
from dmesh_server.event_log import AdminAction
from dmesh_server.rpc import convert
from dmesh_server.rpc.auditing import record
from dmesh_server.rpc.callers import caller_of
from dmesh_server.rpc.handlers import Context, Reader
from dmesh_server.runtime import Runtime
from dmesh_server.security.audit import AuditLog
from dmesh_server.security.refusals import host_of
from dmesh_server.telemetry import logs

_AT_ONCE = 256 << 10
"""Bytes of keys and values in one message, unless one key has more."""
_KEY_COST = 32


class Backups:
    """Answers `Backup` and `Restore`."""

    def __init__(self, runtime: Runtime, audit_log: AuditLog | None = None) -> None:
        """Make a servicer.

        Args:
            runtime: Knows the keys.
            audit_log: Log of backups and restores; None for none.
        """
        self._runtime = runtime
        self._audit_log = audit_log

    async def backup(self, request: pb.BackupRequest, context: Context) -> None:
        """Stream all keys as of one revision. They are not copied: what changes later is another value."""
        caller, by = caller_of(request), _operator(context)
        event = SnapshotKeys(self._runtime.next_number(), caller, by)
        async with record(self._audit_log, context, "back_up_keys", caller.cluster) as entry:
            found = await self._runtime.request(event, KeySnapshot)
            entry.target += f": {len(found.kvs)} keys (revision {found.revision})"
        logs.info("admin_read", cluster=caller.cluster, keys=len(found.kvs), revision=found.revision, by=by)
        await context.write(
            pb.BackupResponse(
                cluster_incarnation=found.cluster_incarnation, revision=found.revision, keys=len(found.kvs)
            )
        )
        for portion in _portions(found.kvs):
            await context.write(pb.BackupResponse(kvs=map(convert.key_value_to_proto, portion)))

    async def restore(self, read: Reader[pb.RestoreRequest], context: Context) -> None:
        """Restore keys when all of them have come, and no sooner."""
        request = await read()
        if request is None:
            raise convert.invalid("a restore begins with a message that names the cluster")
        caller, by, announced, merge = caller_of(request), _operator(context), request.keys, request.merge
        keys: dict[str, bytes] = {}
        size, count, limit = 0, 0, self._runtime.limits.max_store_bytes
        while request is not None:
            for kv in request.kvs:
                keys[kv.key] = kv.value
                size += len(kv.key) + len(kv.value)
            count += len(request.kvs)
            if size > limit:
                raise CoreError(
                    ErrorKind.LIMIT_EXCEEDED,
                    f"the keys to restore have more than {limit} bytes, the server's limit for one cluster "
                    "(--max-store-size). Nothing was changed.",
                )
            request = await read()
        if not count == len(keys) == announced:
            raise convert.invalid(
                f"{count} keys came, {len(keys)} of them different, but {announced} were announced. Nothing "
                "was changed."
            )
        event = RestoreKeys(self._runtime.next_number(), caller, by, keys, merge)
        async with record(self._audit_log, context, "restore_keys", caller.cluster) as entry:
            answer = await self._runtime.request(event, KeysRestored)
            target = f"{answer.set} keys set, {answer.deleted} deleted (revision {answer.revision})"
            entry.target += f": {target}"
        logs.warning("admin_action", action="restore_keys", cluster=caller.cluster, target=target, by=by)
        self._runtime.event_log.note(AdminAction(caller.cluster, "restore_keys", target, None, by))
        await context.write(
            pb.RestoreResponse(set=answer.set, deleted=answer.deleted, revision=answer.revision)
        )


def _portions(kvs: Iterable[KeyValue]) -> Iterator[list[KeyValue]]:
    portion: list[KeyValue] = []
    size = 0
    for kv in kvs:
        added = len(kv.key) + len(kv.value) + _KEY_COST
        if portion and size + added > _AT_ONCE:
            yield portion
            portion, size = [], 0
        portion.append(kv)
        size += added
    if portion:
        yield portion


def _operator(context: Context) -> str:
    return f"an operator at {host_of(context.peer())}"
