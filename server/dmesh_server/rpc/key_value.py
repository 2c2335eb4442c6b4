"""The `KeyValueService`."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import Message

from dmesh.v1 import key_value_pb2 as pb
from dmesh_server.core import events
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.replies import had_effect
from dmesh_server.rpc import auditing, convert
from dmesh_server.rpc import key_value_calls as calls
from dmesh_server.rpc.backups import Backups
from dmesh_server.rpc.callers import caller_of
from dmesh_server.rpc.delivery import until_first_done
from dmesh_server.rpc.handlers import Context, UnaryBehavior, server_stream, two_way_stream, unary
from dmesh_server.rpc.key_value_calls import SERVICE as SERVICE  # part of this module's interface
from dmesh_server.rpc.key_value_calls import Method
from dmesh_server.runtime import SHUTTING_DOWN, Runtime
from dmesh_server.security.audit import AuditLog
from dmesh_server.sessions import Watch


class KeyValueServicer:
    """Answers the calls of `KeyValueService`."""

    def __init__(self, runtime: Runtime, audit_log: AuditLog | None = None) -> None:
        """Make a servicer.

        Args:
            runtime: Answers the requests.
            audit_log: Log of changes by callers without a task; None for none.
        """
        self._runtime = runtime
        self._audit_log = audit_log
        self._backups = Backups(runtime, audit_log)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the handler of each method."""
        desk = self._runtime
        return {
            "Set": unary(pb.SetRequest, self._behavior(calls.SET), desk),
            "Get": unary(pb.GetRequest, self._behavior(calls.GET), desk),
            "GetMany": unary(pb.GetManyRequest, self._behavior(calls.GET_MANY), desk),
            "List": unary(pb.ListRequest, self._behavior(calls.LIST), desk),
            "Delete": unary(pb.DeleteRequest, self._behavior(calls.DELETE), desk),
            "Increment": unary(pb.IncrementRequest, self._behavior(calls.INCREMENT), desk),
            "CompareAndSet": unary(pb.CompareAndSetRequest, self._behavior(calls.COMPARE_AND_SET), desk),
            "Transaction": unary(pb.TransactionRequest, self._behavior(calls.TRANSACTION), desk),
            "GrantLease": unary(pb.GrantLeaseRequest, self._behavior(calls.GRANT_LEASE), desk),
            "RenewLease": unary(pb.RenewLeaseRequest, self._behavior(calls.RENEW_LEASE), desk),
            "RevokeLease": unary(pb.RevokeLeaseRequest, self._behavior(calls.REVOKE_LEASE), desk),
            "Watch": server_stream(pb.WatchRequest, self.watch, desk),
            "Backup": server_stream(pb.BackupRequest, self._backups.backup, desk),
            "Restore": two_way_stream(pb.RestoreRequest, self._backups.restore, desk),
        }

    def _behavior(self, method: Method) -> UnaryBehavior[Any]:
        async def behavior(request: Any, context: Context) -> Message:
            event = method.read(self._runtime.next_number(), caller_of(request), request, 0, 0)
            entry = auditing.audited(event)
            if entry is None:
                return method.write(await self._runtime.request(event, method.answer))
            async with auditing.record(self._audit_log, context, *entry) as done:
                answer: Any = await self._runtime.request(event, method.answer)
                done.outcome = "done" if had_effect(answer) else "unchanged"
            return method.write(answer)

        return behavior

    async def watch(self, request: pb.WatchRequest, context: Context) -> None:
        """Stream the changes of all keys with a prefix."""
        if request.from_revision < 0:
            raise convert.invalid(
                f"from_revision is {request.from_revision}; revisions count from 1, 0 is from now on"
            )
        event = events.KvWatch(
            self._runtime.next_number(), caller_of(request), request.prefix, request.from_revision,
            convert.seen_state(request),
        )  # fmt: skip
        watch = await self._runtime.open_watch(event)
        try:
            placed = pb.WatchResponse(
                revision=watch.revision, server_incarnation=self._runtime.server_incarnation
            )
            await context.write(placed)
            await until_first_done(watch.send_queue, _write_changes(watch, context))
            if watch.send_queue.overflowed:
                limits = self._runtime.limits
                raise CoreError(
                    ErrorKind.COMPACTED,
                    f"the watch fell more than {limits.watch_history} revisions or "
                    f"{limits.watch_history_bytes} bytes behind and was dropped; read the keys again and "
                    "watch from there",
                )
            raise CoreError(ErrorKind.SHUTTING_DOWN, SHUTTING_DOWN)
        finally:
            self._runtime.close_watch(watch)


async def _write_changes(watch: Watch, context: Context) -> None:
    while (push := await watch.send_queue.get()) is not None:
        if push.error is not None:
            raise push.error
        changes = map(convert.key_event_to_proto, push.events)
        await context.write(pb.WatchResponse(revision=push.revision, events=changes))
