"""Makes a span of each call of gRPC, as a part of the caller's trace."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from dmesh_server.core.errors import CoreError
from dmesh_server.core.model import Caller
from dmesh_server.rpc import convert
from dmesh_server.rpc.handlers import Context
from dmesh_server.rpc.interceptors import Continuation, Handler
from dmesh_server.security.refusals import host_of

if TYPE_CHECKING:
    from dmesh_server.telemetry.tracing import CallSpan, Traces


_OURS = "/dmesh.v1."


class CallTracer(grpc.aio.ServerInterceptor):
    """Traces the calls that passed the gates: strangers make no spans.

    A session is not a span, which would last as long as the program; the calls within it are. The span of a
    watch ends when the watch is in place.
    """

    def __init__(self, traces: Traces) -> None:
        """Make an interceptor.

        Args:
            traces: Makes the spans.
        """
        self._traces = traces

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the call's handler, in a span."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or handler.request_streaming or not method.startswith(_OURS):
            return handler
        fields = [(str(key), value) for key, value in handler_call_details.invocation_metadata or () if value]

        def begin(request: Any, context: Context) -> CallSpan:
            return self._traces.call(method, fields, _caller(request), host_of(context.peer()))

        if handler.response_streaming:
            streaming: Any = handler.unary_stream

            async def stream(request: Any, context: Context) -> None:
                span = begin(request, context)
                with _Ending(span, context):
                    await streaming(request, _Placed(context, span))

            return grpc.unary_stream_rpc_method_handler(
                stream, handler.request_deserializer, handler.response_serializer
            )
        behavior: Any = handler.unary_unary

        async def call(request: Any, context: Context) -> Any:
            with _Ending(begin(request, context), context):
                return await behavior(request, context)

        return grpc.unary_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )


class _Ending:
    """Ends a span with the status of its call."""

    def __init__(self, span: CallSpan, context: Context) -> None:
        self._span = span
        self._context = context

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._span.end()
        elif isinstance(error, asyncio.CancelledError):
            self._span.end(grpc.StatusCode.CANCELLED, "the caller is gone, or the server stops")
        else:
            self._span.end(*_status(self._context))


class _Placed:
    """A stream's context, which ends the span with the first response."""

    def __init__(self, context: Context, span: CallSpan) -> None:
        self._context = context
        self._span = span

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, response: Any) -> None:
        """Send a response."""
        await self._context.write(response)
        self._span.end()


def _status(context: Context) -> tuple[grpc.StatusCode, str]:
    """Return the status that a call was aborted with."""
    code: Any = context.code()
    if not isinstance(code, grpc.StatusCode):  # its C layer has numbers
        code = next((one for one in grpc.StatusCode if one.value[0] == code), grpc.StatusCode.UNKNOWN)
    return code, str(context.details() or "")


def _caller(request: Any) -> Caller | None:
    caller = getattr(request, "caller", None)
    if caller is None:  # bytes that are no message
        return None
    try:
        return convert.caller(caller, True)
    except CoreError:
        return None
