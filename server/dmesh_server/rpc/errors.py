"""Refusals of the core as gRPC statuses, with the whole error beside them as trailing metadata."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from dmesh.v1 import common_pb2
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Member
from dmesh_server.rpc import convert

ERROR_METADATA = "dmesh-error-bin"
"""Key of the trailing metadata that carries a serialized `dmesh.v1.Error`."""

_MAX_METADATA = 4096
"""Bytes of an error in metadata. Clients accept 8 KiB of metadata in all, and -bin values may grow by a
third."""

_MAX_DETAILS = 1500
"""Bytes of a status message, as it travels: as a header too, beside the metadata, within the same 8 KiB."""

STATUS_CODES: dict[ErrorKind, grpc.StatusCode] = {
    ErrorKind.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNKNOWN_TASK: grpc.StatusCode.NOT_FOUND,
    ErrorKind.TASK_TAKEN: grpc.StatusCode.ALREADY_EXISTS,
    ErrorKind.SPEC_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.FENCED: grpc.StatusCode.FAILED_PRECONDITION,
    # Not UNAVAILABLE: gRPC would repeat the call by itself, which cannot help.
    ErrorKind.NOT_REGISTERED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.BARRIER_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.BARRIER_FAILED: grpc.StatusCode.ABORTED,
    ErrorKind.BARRIER_CANCELLED: grpc.StatusCode.ABORTED,
    ErrorKind.BARRIER_MISMATCH: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.KEY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorKind.KEY_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.KEY_NOT_INTEGER: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.COMPACTED: grpc.StatusCode.OUT_OF_RANGE,
    ErrorKind.LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.CLUSTER_ENDING: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorKind.VERSION_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.STORE_UNAVAILABLE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.JOB_LIST_UNKNOWN: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.STORE_LOST: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.LEASE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
}
"""Status code of each kind of error. Clients decide by the kind, never by the code alone."""


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: CoreError, now: float) -> NoReturn:
    """End the call with the status and the metadata of `error`."""
    metadata = ((ERROR_METADATA, encode_for_metadata(error, now)),)
    await context.abort(STATUS_CODES[error.kind], status_message(error.message), metadata)
    raise AssertionError("abort returned")


def encode_for_metadata(error: CoreError, now: float) -> bytes:
    """Serialize an error within gRPC's bounds for metadata.

    Members are cut down to their names; from the first that does not fit, they are left out.
    """
    message = common_pb2.Error(
        kind=convert.error_kind(error.kind),
        message=shorten(error.message, _MAX_DETAILS),
        epoch=error.epoch,
        fields=error.fields,
        oldest_revision=error.oldest_revision,
        revision=error.revision,
    )
    size = message.ByteSize()
    for member in error.members:
        summary = _summary(member, now)
        size += summary.ByteSize() + 4
        if size > _MAX_METADATA:
            break
        message.members.append(summary)
    return message.SerializeToString()


def status_message(text: str) -> str:
    """Cut a text that is too long for a status message.

    Headers are ASCII: of all other characters, gRPC writes each byte of their UTF-8 as three (%C3%BC). A
    client refuses answers with larger headers than it accepts, and near the limit it does so by chance.
    """
    length = 0
    for index, character in enumerate(text):
        length += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if length > _MAX_DETAILS - 4:
            return text[:index] + " ..."
    return text


def shorten(text: str, limit: int) -> str:
    """Cut a text to a number of bytes of its UTF-8."""
    encoded = text.encode()
    if len(encoded) <= limit:
        return text
    return encoded[: limit - 4].decode(errors="ignore") + " ..."


def _summary(member: Member, now: float) -> common_pb2.Member:
    summary = convert.member_to_proto(member, now)
    summary.ClearField("devices")
    summary.ClearField("peer_addresses")
    return summary
