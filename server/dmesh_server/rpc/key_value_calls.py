"""Calls of the key-value store between the wire and the core, by RPC or within a session.

Both ways carry the same messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from dmesh.v1 import key_value_pb2 as pb
from dmesh_server.core import events
from dmesh_server.core.effects import (
    KvDeleted,
    KvIncremented,
    KvRead,
    KvResult,
    KvRevision,
    KvTransacted,
    LeaseGranted,
)
from dmesh_server.core.model import Caller, Condition, ConditionOperator, ConditionTarget, KeyValue
from dmesh_server.rpc import convert
from dmesh_server.runtime import AnsweredEvent

SERVICE = "dmesh.v1.KeyValueService"


@dataclass(frozen=True, slots=True)
class Method:
    """Decoder and encoder of one kind of call."""

    read: Callable[[int, Caller, Any, int, int], AnsweredEvent]
    """Makes the event of (token, caller, request, session, reply slot): 0 and 0 outside of a session.

    Raises:
        CoreError: The request makes no sense.
    """
    answer: type
    """Type of the core's answer."""
    write: Callable[[Any], Message]
    """Makes the response of the answer."""


def _set(token: int, caller: Caller, request: pb.SetRequest, session: int, reply_slot: int) -> events.KvSet:
    if request.ephemeral and caller.task is None:
        raise convert.invalid("an ephemeral key belongs to a member, and an observer is not one; use a lease")
    return events.KvSet(
        token, caller, request.request_id, request.key, request.value, request.allow_overwrite,
        caller.incarnation if request.ephemeral else request.lease,
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
) -> events.KvTransaction:
    """Make a transaction of one condition and one operation."""
    key = request.key
    if request.HasField("expected"):
        condition = Condition(key, ConditionTarget.VALUE, ConditionOperator.EQUAL, request.expected)
    else:
        condition = Condition(key, ConditionTarget.MOD_REVISION, ConditionOperator.EQUAL, 0)
    then = events.KvSet(token, caller, "", key, request.value, allow_overwrite=True)
    otherwise = events.KvGetMany(token, caller, (key,))
    return events.KvTransaction(
        token, caller, request.request_id, (condition,), (then,), (otherwise,),
        session=session, reply_slot=reply_slot,
    )  # fmt: skip


def _compared(answer: KvTransacted) -> pb.CompareAndSetResponse:
    response = pb.CompareAndSetResponse(succeeded=answer.succeeded, revision=answer.revision)
    for result in answer.results:
        if isinstance(result, KvRead) and result.kvs:
            response.current.CopyFrom(convert.key_value_to_proto(result.kvs[0]))
    return response


def _transaction(
    token: int, caller: Caller, request: pb.TransactionRequest, session: int, reply_slot: int
) -> events.KvTransaction:
    return events.KvTransaction(
        token,
        caller,
        request.request_id,
        tuple(map(_condition, request.compare)),
        tuple(_operation(token, caller, operation) for operation in request.then),
        tuple(_operation(token, caller, operation) for operation in request.otherwise),
        session=session,
        reply_slot=reply_slot,
    )


def _condition(message: pb.Condition) -> Condition:
    target = message.WhichOneof("operand")
    if target is None or message.operator not in _OPERATORS:
        raise convert.invalid(
            f"the condition on key {message.key[:100]!r} does not say what is compared, or how"
        )
    operand: bytes | int = getattr(message, target)
    return Condition(
        message.key, ConditionTarget[target.upper()], ConditionOperator(message.operator), operand
    )


def _operation(token: int, caller: Caller, message: pb.Operation) -> events.KvOperation:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise convert.invalid(
            "an operation of a transaction is empty or of a kind that this server does not know"
        )
    operation: events.KvOperation = _READERS[kind](token, caller, getattr(message, kind), 0, 0)
    return operation


def _transacted(answer: KvTransacted) -> pb.TransactionResponse:
    return pb.TransactionResponse(
        succeeded=answer.succeeded, results=map(_result, answer.results), revision=answer.revision
    )


def _result(result: KvResult) -> pb.OperationResult:
    match result:
        case KvRevision():
            return pb.OperationResult(set=_was_set(result))
        case KvDeleted():
            return pb.OperationResult(delete=_deleted(result))
        case KvIncremented():
            return pb.OperationResult(increment=_incremented(result))
        case KvRead():
            return pb.OperationResult(read=_listed(result))


def _was_set(answer: KvRevision) -> pb.SetResponse:
    return pb.SetResponse(revision=answer.revision)


def _deleted(answer: KvDeleted) -> pb.DeleteResponse:
    return pb.DeleteResponse(deleted=answer.deleted, revision=answer.revision)


def _incremented(answer: KvIncremented) -> pb.IncrementResponse:
    return pb.IncrementResponse(value=answer.value, revision=answer.revision)


def _listed(answer: KvRead) -> pb.ListResponse:
    return pb.ListResponse(kvs=_kvs(answer), revision=answer.revision)


def _kvs(answer: KvRead) -> list[pb.KeyValue]:
    return [convert.key_value_to_proto(kv) for kv in answer.kvs]


_OPERATORS = frozenset(operator.value for operator in ConditionOperator)
_READERS: Mapping[str, Callable[[int, Caller, Any, int, int], events.KvOperation]] = {
    "set": _set,
    "delete": _delete,
    "increment": _increment,
    "get_many": _get_many,
    "list": _list,
}

SET = Method(_set, KvRevision, _was_set)
GET = Method(_get, KeyValue, lambda answer: pb.GetResponse(kv=convert.key_value_to_proto(answer)))
GET_MANY = Method(
    _get_many, KvRead, lambda answer: pb.GetManyResponse(kvs=_kvs(answer), revision=answer.revision)
)
LIST = Method(_list, KvRead, _listed)
DELETE = Method(_delete, KvDeleted, _deleted)
INCREMENT = Method(_increment, KvIncremented, _incremented)
COMPARE_AND_SET = Method(_compare_and_set, KvTransacted, _compared)
TRANSACTION = Method(_transaction, KvTransacted, _transacted)

GRANT_LEASE = Method(
    lambda token, caller, request, *_: events.GrantLease(
        token, caller, request.request_id, request.lease, request.ttl_ms / 1000
    ),
    LeaseGranted,
    lambda answer: pb.GrantLeaseResponse(ttl_ms=round(answer.ttl * 1000)),
)
RENEW_LEASE = Method(
    lambda token, caller, request, *_: events.RenewLease(token, caller, request.lease),
    LeaseGranted,
    lambda answer: pb.RenewLeaseResponse(ttl_ms=round(answer.ttl * 1000)),
)
REVOKE_LEASE = Method(
    lambda token, caller, request, *_: events.RevokeLease(token, caller, request.request_id, request.lease),
    KvDeleted,
    lambda answer: pb.RevokeLeaseResponse(deleted=answer.deleted),
)

METHODS: Mapping[str, Method] = {
    "set": SET,
    "get": GET,
    "get_many": GET_MANY,
    "list": LIST,
    "delete": DELETE,
    "increment": INCREMENT,
    "compare_and_set": COMPARE_AND_SET,
    "transaction": TRANSACTION,
}
"""By the name of the field that holds the request in a call, and the response in its reply."""
