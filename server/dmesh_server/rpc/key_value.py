"""The `KeyValueService`."""

from __future__ import annotations

from typing import Any

import grpc

from dmesh.v1 import key_value_pb2 as pb
from dmesh_server.core import events
from dmesh_server.core.effects import KvCompared, KvDeleted, KvIncremented, KvRead, KvRevision
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Caller, KeyValue
from dmesh_server.rpc import convert
from dmesh_server.rpc.delivery import until_first_done
from dmesh_server.rpc.handlers import Context, server_stream, unary
from dmesh_server.runtime import SHUTTING_DOWN, Runtime, Watch

SERVICE = "dmesh.v1.KeyValueService"


class KeyValueServicer:
    """Answers the calls of `KeyValueService`."""

    def __init__(self, runtime: Runtime) -> None:
        """Makes a servicer.

        Args:
            runtime: Who knows the answers.
        """
        self._runtime = runtime

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Returns the handler of each method."""
        clock = self._runtime.now
        return {
            "Set": unary(pb.SetRequest, self.set, clock),
            "Get": unary(pb.GetRequest, self.get, clock),
            "GetMany": unary(pb.GetManyRequest, self.get_many, clock),
            "List": unary(pb.ListRequest, self.list, clock),
            "Delete": unary(pb.DeleteRequest, self.delete, clock),
            "Increment": unary(pb.IncrementRequest, self.increment, clock),
            "CompareAndSet": unary(pb.CompareAndSetRequest, self.compare_and_set, clock),
            "Watch": server_stream(pb.WatchRequest, self.watch, clock),
        }

    async def set(self, request: pb.SetRequest, context: Context) -> pb.SetResponse:
        """Sets one key."""
        event = events.KvSet(
            self._runtime.next_number(), _caller(request), request.request_id, request.key, request.value,
            request.allow_overwrite,
        )  # fmt: skip
        answer = await self._runtime.request(event, KvRevision)
        return pb.SetResponse(revision=answer.revision)

    async def get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:
        """Reads one key, waiting for it if asked to."""
        timeout = convert.wait_timeout(request.timeout_ms)
        event = events.KvGet(self._runtime.next_number(), _caller(request), request.key, timeout)
        answer = await self._runtime.request(event, KeyValue)
        return pb.GetResponse(kv=convert.key_value_to_proto(answer))

    async def get_many(self, request: pb.GetManyRequest, context: Context) -> pb.GetManyResponse:
        """Reads many keys at one revision."""
        event = events.KvGetMany(self._runtime.next_number(), _caller(request), tuple(request.keys))
        answer = await self._runtime.request(event, KvRead)
        kvs = map(convert.key_value_to_proto, answer.kvs)
        return pb.GetManyResponse(kvs=kvs, revision=answer.revision)

    async def list(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        """Reads all keys with a prefix at one revision."""
        event = events.KvList(
            self._runtime.next_number(), _caller(request), request.prefix, request.keys_only
        )  # fmt: skip
        answer = await self._runtime.request(event, KvRead)
        kvs = map(convert.key_value_to_proto, answer.kvs)
        return pb.ListResponse(kvs=kvs, revision=answer.revision)

    async def delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteResponse:
        """Deletes one key or all keys with a prefix."""
        event = events.KvDelete(
            self._runtime.next_number(), _caller(request), request.request_id, request.key, request.is_prefix
        )
        answer = await self._runtime.request(event, KvDeleted)
        return pb.DeleteResponse(deleted=answer.deleted, revision=answer.revision)

    async def increment(self, request: pb.IncrementRequest, context: Context) -> pb.IncrementResponse:
        """Adds to a decimal integer."""
        event = events.KvIncrement(
            self._runtime.next_number(), _caller(request), request.request_id, request.key, request.amount
        )
        answer = await self._runtime.request(event, KvIncremented)
        return pb.IncrementResponse(value=answer.value, revision=answer.revision)

    async def compare_and_set(
        self, request: pb.CompareAndSetRequest, context: Context
    ) -> pb.CompareAndSetResponse:
        """Sets one key if it is as expected."""
        expected = request.expected if request.HasField("expected") else None
        event = events.KvCompareAndSet(
            self._runtime.next_number(),
            _caller(request),
            request.request_id,
            request.key,
            expected,
            request.value,
        )
        answer = await self._runtime.request(event, KvCompared)
        current = None if answer.current is None else convert.key_value_to_proto(answer.current)
        return pb.CompareAndSetResponse(succeeded=answer.succeeded, current=current, revision=answer.revision)

    async def watch(self, request: pb.WatchRequest, context: Context) -> None:
        """Streams the changes of all keys with a prefix."""
        if request.from_revision < 0:
            raise convert.invalid(
                f"from_revision is {request.from_revision}; revisions count from 1, 0 is from now on"
            )
        event = events.KvWatch(
            self._runtime.next_number(), _caller(request), request.prefix, request.from_revision
        )  # fmt: skip
        watch = await self._runtime.open_watch(event)
        try:
            await context.write(pb.WatchResponse(revision=watch.revision))
            await until_first_done(watch.outbox, _write_changes(watch, context))
            if watch.outbox.overflowed:
                raise CoreError(
                    ErrorKind.COMPACTED,
                    f"the watch fell more than {self._runtime.limits.watch_history} revisions behind and was "
                    f"dropped; read the keys again and watch from there",
                )
            raise CoreError(ErrorKind.SHUTTING_DOWN, SHUTTING_DOWN)
        finally:
            self._runtime.close_watch(watch)


async def _write_changes(watch: Watch, context: Context) -> None:
    while (push := await watch.outbox.get()) is not None:
        if push.error is not None:
            raise push.error
        changes = map(convert.key_event_to_proto, push.events)
        await context.write(pb.WatchResponse(revision=push.revision, events=changes))


def _caller(
    request: pb.SetRequest
    | pb.GetRequest
    | pb.GetManyRequest
    | pb.ListRequest
    | pb.DeleteRequest
    | pb.IncrementRequest
    | pb.CompareAndSetRequest
    | pb.WatchRequest,
) -> Caller:
    return convert.caller(request.caller, request.HasField("caller"))
