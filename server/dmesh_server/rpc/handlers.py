"""Common part of all RPC handlers: malformed requests, refusals and faults all become a proper status.

Written by hand instead of the generated `add_..._to_server`, because those let a malformed message end in
`UNKNOWN: Exception deserializing request!`, and cannot send bytes that are encoded already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.rpc import convert
from dmesh_server.rpc.errors import abort
from dmesh_server.telemetry import logs
from dmesh_server.telemetry.measures import Measures

R = TypeVar("R", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]
Response = Message | bytes
"""A message, or one that is encoded already."""
UnaryBehavior = Callable[[R, Context], Awaitable[Response]]
StreamBehavior = Callable[[R, Context], Awaitable[None]]
Reader = Callable[[], Awaitable[R | None]]
"""Waits for the next request of a stream; None if there will be none."""
SessionBehavior = Callable[[Reader[R], Context], Awaitable[None]]


class Desk(Protocol):
    """Interface of the runtime that handlers need."""

    measures: Measures

    def now(self) -> float:
        """Return the time, monotonic seconds."""


class Malformed:
    """Stands for a request whose bytes are not the message that they should be."""

    def __init__(self, name: str) -> None:
        """Note which message was expected."""
        self.name = name

    def refusal(self) -> CoreError:
        """Return the refusal of the request."""
        return convert.invalid(f"the bytes of the request are not a {self.name} message")


def unary(request_type: type[R], behavior: UnaryBehavior[R], desk: Desk) -> grpc.RpcMethodHandler[Any, Any]:
    """Make the handler of an RPC with one request and one response."""
    timing = desk.measures.rpc(request_type.DESCRIPTOR.name.removesuffix("Request"), "grpc")

    async def handle(request: R | Malformed, context: Context) -> Response:
        begin = desk.now()
        try:
            return await behavior(_well_formed(request), context)
        except Exception as error:  # noqa: BLE001 -- the wall to clients: nothing else passes it
            await _fail(context, error, request_type, desk)
        finally:
            timing.observe(desk.now() - begin)

    return grpc.unary_unary_rpc_method_handler(handle, _decoder(request_type), encode)


def server_stream(
    request_type: type[R], behavior: StreamBehavior[R], desk: Desk
) -> grpc.RpcMethodHandler[Any, Any]:
    """Make the handler of an RPC with one request, whose behavior writes responses to its context."""

    async def handle(request: R | Malformed, context: Context) -> None:
        try:
            await behavior(_well_formed(request), context)
        except Exception as error:  # noqa: BLE001
            await _fail(context, error, request_type, desk)

    return grpc.unary_stream_rpc_method_handler(handle, _decoder(request_type), encode)


def two_way_stream(
    request_type: type[R], behavior: SessionBehavior[R], desk: Desk
) -> grpc.RpcMethodHandler[Any, Any]:
    """Make the handler of an RPC with many requests, which its behavior reads; it writes to its context."""

    async def handle(requests: object, context: Context) -> None:
        # Not through the iterator that gRPC offers: this is the hot path of sessions.
        read = context.read

        async def next_request() -> R | None:
            request = await read()
            return None if request is grpc.aio.EOF else _well_formed(request)

        try:
            await behavior(next_request, context)
        except Exception as error:  # noqa: BLE001
            await _fail(context, error, request_type, desk)

    return grpc.stream_stream_rpc_method_handler(handle, _decoder(request_type), encode)


def encode(response: Response) -> bytes:
    """Encode a response unless it is already."""
    return response if isinstance(response, bytes) else response.SerializeToString()


def _decoder(request_type: type[R]) -> Callable[[bytes], R | Malformed]:
    def decode(data: bytes) -> R | Malformed:
        try:
            return request_type.FromString(data)
        except DecodeError:
            return Malformed(request_type.DESCRIPTOR.full_name)

    return decode


def _well_formed(request: R | Malformed) -> R:
    if isinstance(request, Malformed):
        raise request.refusal()
    return request


async def _fail(context: Context, error: Exception, request_type: type[Message], desk: Desk) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):
        raise asyncio.CancelledError from error  # the stream broke while we wrote: no client is left
    if not isinstance(error, CoreError):
        # A bug of ours: the operator gets the traceback, the client a sentence.
        name = request_type.DESCRIPTOR.full_name
        logs.error("request_failed", exc_info=True, request=name, peer=context.peer())
        error = CoreError(ErrorKind.INTERNAL, f"the coordination server failed to handle {name}; see its log")
    desk.measures.refused[error.kind.name] += 1
    try:
        await abort(context, error, desk.now())
    except grpc.aio.InternalError as broken:
        raise asyncio.CancelledError from broken
