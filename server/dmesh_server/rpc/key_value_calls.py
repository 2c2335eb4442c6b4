"""The calls of the key-value store between the wire and the core, whichever way they come.

A call comes as an RPC of `KeyValueService`, or inside a session; what it says and what it is answered with
are the same messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from dmesh.v1 import key_value_pb2 as pb
from dmesh_server.core import events
from dmesh_server.core.effects import KvCompared, KvDeleted, KvIncremented, KvRead, KvRevision
from dmesh_server.core.model import Caller, KeyValue
from dmesh_server.rpc import convert
from dmesh_server.runtime import AnsweredEvent

SERVICE = "dmesh.v1.KeyValueService"


@dataclass(frozen=True, slots=True)
class Method:
    """How one kind of call is read and answered."""

    read: Callable[[int, Caller, Any, int, int], AnsweredEvent]
    """Makes the event of (token, caller, request, session, reply slot): 0 and 0 outside of a session.

    Raises:
        CoreError: The request makes no sense.
    """
    answer: type
    """What the core answers with."""
    write: Callable[[Any], Message]
    """Makes the response of the answer."""


def _set(token: int, caller: Caller, request: pb.SetRequest, session: int, reply_slot: int) -> events.KvSet:
    return events.KvSet(
        token, caller, request.request_id, request.key, request.value, request.allow_overwrite,
        session=session, reply_slot=reply_slot,
    )  # fmt: skip


def _get(token: int, caller: Caller, request: pb.GetRequest, *_: int) -> events.KvGet:
    return events.KvGet(token, caller, request.key, convert.wait_timeout(request.timeout_ms))


def _get_many(token: int, caller: Caller, request: pb.GetManyRequest, *_: int) -> events.KvGetMany:
    return events.KvGetMany(token, caller, tuple(request.keys))


def _list(token: int, caller: Caller, request: pb.ListRequest, *_: int) -> events.KvList:
    return events.KvList(token, caller, request.prefix, request.keys_only)


def _delete(
    token: int, caller: Caller, request: pb.DeleteRequest, session: int, reply_slot: int
) -> events.KvDelete:
    return events.KvDelete(
        token,
        caller,
        request.request_id,
        request.key,
        request.is_prefix,
        session=session,
        reply_slot=reply_slot,
    )


def _increment(
    token: int, caller: Caller, request: pb.IncrementRequest, session: int, reply_slot: int
) -> events.KvIncrement:
    return events.KvIncrement(
        token, caller, request.request_id, request.key, request.amount, session=session, reply_slot=reply_slot
    )


def _compare_and_set(
    token: int, caller: Caller, request: pb.CompareAndSetRequest, session: int, reply_slot: int
) -> events.KvCompareAndSet:
    expected = request.expected if request.HasField("expected") else None
    return events.KvCompareAndSet(
        token, caller, request.request_id, request.key, expected, request.value,
        session=session, reply_slot=reply_slot,
    )  # fmt: skip


def _compared(answer: KvCompared) -> pb.CompareAndSetResponse:
    current = None if answer.current is None else convert.key_value_to_proto(answer.current)
    return pb.CompareAndSetResponse(succeeded=answer.succeeded, current=current, revision=answer.revision)


def _kvs(answer: KvRead) -> list[pb.KeyValue]:
    return [convert.key_value_to_proto(kv) for kv in answer.kvs]


SET = Method(_set, KvRevision, lambda answer: pb.SetResponse(revision=answer.revision))
GET = Method(_get, KeyValue, lambda answer: pb.GetResponse(kv=convert.key_value_to_proto(answer)))
GET_MANY = Method(
    _get_many, KvRead, lambda answer: pb.GetManyResponse(kvs=_kvs(answer), revision=answer.revision)
)
LIST = Method(_list, KvRead, lambda answer: pb.ListResponse(kvs=_kvs(answer), revision=answer.revision))
DELETE = Method(
    _delete,
    KvDeleted,
    lambda answer: pb.DeleteResponse(deleted=answer.deleted, revision=answer.revision),
)
INCREMENT = Method(
    _increment,
    KvIncremented,
    lambda answer: pb.IncrementResponse(value=answer.value, revision=answer.revision),
)
COMPARE_AND_SET = Method(_compare_and_set, KvCompared, _compared)

METHODS: Mapping[str, Method] = {
    "set": SET,
    "get": GET,
    "get_many": GET_MANY,
    "list": LIST,
    "delete": DELETE,
    "increment": INCREMENT,
    "compare_and_set": COMPARE_AND_SET,
}
"""By the name of the field that holds the request in a call, and the response in its reply."""
