"""Gates in front of the RPCs: a token is checked before a byte of the request is decoded."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import grpc

from dmesh.security.tokens import Role, Token
from dmesh.v1 import common_pb2
from dmesh_server.rpc.connections import ConnectionGuard
from dmesh_server.rpc.errors import ERROR_METADATA, abort, status_message
from dmesh_server.rpc.handlers import Context
from dmesh_server.security.access import (
    CALL_RATE,
    CALLER,
    Access,
    Verdict,
    audit,
    calls_exceeded,
    denial,
    may,
)
from dmesh_server.security.refusals import RefusalLog, host_of
from dmesh_server.security.roles import MEMBERSHIP_CALLS, role_for_rpc
from dmesh_server.security.tls import is_allowed

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

_OPEN_SECONDS = 10.0
"""Time for the request of a call that needs no token."""
_REVOKED = "the token that this stream was opened with is not accepted any more; connect again with another"


class TokenGate(grpc.aio.ServerInterceptor):
    """Lets calls pass whose token has the role they need.

    Others never reach a servicer: they get a handler that reads nothing of the request and refuses.
    """

    def __init__(self, access: Access, guard: ConnectionGuard) -> None:
        """Make a gate.

        Args:
            access: Knows the tokens.
            guard: Closes connections of peers without one.
        """
        self._access = access
        self._guard = guard

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the handler of the call: its servicer, or a refusal; None if there is no such method."""
        method = handler_call_details.method
        needed = role_for_rpc(method)
        if needed is None:
            handler = await continuation(handler_call_details)
            return None if handler is None else _in_time(handler)
        verdict = self._access.identify(_authorization(handler_call_details))
        token = verdict.token
        if token is None:
            return self._unauthenticated(verdict, method)
        handler = await continuation(handler_call_details)
        if handler is not None and not may(token, needed):
            return self._denied(token, needed, method)
        # Authorized callers get UNIMPLEMENTED from gRPC: newer clients ask for methods that came later.
        if handler is None:
            return None
        if handler.response_streaming:
            return self._held(handler, token)
        return self._noted(handler, token, method)

    def _unauthenticated(self, verdict: Verdict, method: str) -> Handler:
        async def refuse(_: AsyncIterator[bytes], context: Context) -> None:
            self._guard.refused(context.peer())
            self._access.refusals.note(
                "unauthenticated",
                host_of(context.peer()),
                method=method,
                fingerprint=verdict.shown or None,
                reason="no token" if not verdict.shown else "token not accepted",
            )
            kind = common_pb2.ERROR_KIND_UNAUTHENTICATED
            await _abort(context, grpc.StatusCode.UNAUTHENTICATED, kind, verdict.problem)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _denied(self, token: Token, needed: Role, method: str) -> Handler:
        async def refuse(_: AsyncIterator[bytes], context: Context) -> None:
            audit(self._access.refusals, host_of(context.peer()), token, needed, method)
            await _abort(
                context,
                grpc.StatusCode.PERMISSION_DENIED,
                common_pb2.ERROR_KIND_PERMISSION_DENIED,
                denial(token, needed, method),
            )

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _noted(self, handler: Handler, token: Token, method: str) -> Handler:
        """Wrap a call with one answer, so that its connection and its servicer know the token."""
        behavior: Any = handler.unary_unary
        rate = self._access.call_rate(token)

        async def noted(request: Any, context: Context) -> Any:
            self._guard.authenticated(context.peer())
            CALLER.set(token)
            if rate is not None:
                if method in MEMBERSHIP_CALLS:  # later, but not refused: a job's start would fail
                    await asyncio.sleep(rate.spend(time.monotonic()))
                elif not rate.take(time.monotonic()):
                    await abort(context, calls_exceeded(token), time.monotonic())
            return await behavior(request, context)

        return grpc.unary_unary_rpc_method_handler(
            noted, handler.request_deserializer, handler.response_serializer
        )

    def _held(self, handler: Handler, token: Token) -> Handler:
        """Wrap a stream, so that it ends when its token is revoked."""
        behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
        if not inspect.iscoroutinefunction(behavior):
            return handler  # reflection: a stream that ends by itself

        async def held(request: Any, context: Context) -> None:
            self._guard.authenticated(context.peer())
            CALLER.set(token)
            CALL_RATE.set(self._access.call_rate(token))
            with self._access.holding(token) as hold:
                try:
                    await behavior(request, context)
                except asyncio.CancelledError:
                    if not hold.revoked:
                        raise
                    kind = common_pb2.ERROR_KIND_UNAUTHENTICATED
                    await _abort(context, grpc.StatusCode.UNAUTHENTICATED, kind, _REVOKED)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        return make(held, handler.request_deserializer, handler.response_serializer)


class IdentityGate(grpc.aio.ServerInterceptor):
    """Lets calls pass whose client certificate has an allowed name."""

    def __init__(self, allowed: Sequence[str], refusals: RefusalLog) -> None:
        """Make a gate.

        Args:
            allowed: Names and prefixes; see `TlsSettings.allowed`.
            refusals: Where refusals are noted.
        """
        self._allowed = tuple(allowed)
        self._refusals = refusals

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the call's handler, with a look at the certificate in front of it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        found: Any = handler.stream_stream or handler.unary_stream
        behavior: Any = found or handler.stream_unary or handler.unary_unary
        # Who calls is known to the call's context only, so a body is decoded here, after the look; a stream's
        # messages are decoded when the servicer reads them.
        decoder = handler.request_deserializer
        read: Callable[[Any], Any] = decoder if decoder and not handler.request_streaming else _as_is

        if inspect.isasyncgenfunction(behavior):

            async def checked_generator(request: Any, context: Context) -> AsyncIterator[Any]:
                await self._check(context)
                async for response in behavior(read(request), context):
                    yield response

            checked: Callable[..., Any] = checked_generator
        else:

            async def checked_call(request: Any, context: Context) -> Any:
                await self._check(context)
                return await behavior(read(request), context)

            checked = checked_call
        make = _MAKERS[handler.request_streaming, handler.response_streaming]
        return make(checked, decoder if handler.request_streaming else None, handler.response_serializer)

    async def _check(self, context: Context) -> None:
        names = [
            name.decode(errors="replace")
            for name in context.auth_context().get("x509_subject_alternative_name", ())
        ]
        if is_allowed(names, self._allowed):
            return
        shown = ", ".join(names)[:200] or "no name"
        self._refusals.note(
            "certificate_refused", host_of(context.peer()), names=shown, reason="none of --tls-allow"
        )
        await _abort(
            context,
            grpc.StatusCode.UNAUTHENTICATED,
            common_pb2.ERROR_KIND_UNAUTHENTICATED,
            f"this server does not accept the client certificate for {shown}: its names are none of those "
            "that --tls-allow lists",
        )


_MAKERS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _in_time(handler: Handler) -> Handler:
    """Wrap a call that needs no token, with a limit on the time until its request has arrived."""
    if handler.request_streaming or handler.response_streaming:
        return handler
    behavior: Any = handler.unary_unary

    async def answer(_: object, context: Context) -> Any:
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                request = await context.read()
        except TimeoutError:
            request = grpc.aio.EOF
        if request is grpc.aio.EOF:
            kind = common_pb2.ERROR_KIND_INVALID_ARGUMENT
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, kind, "the call came without a request")
        return await behavior(request, context)

    return grpc.stream_unary_rpc_method_handler(
        answer, handler.request_deserializer, handler.response_serializer
    )


def _as_is(request: Any) -> Any:
    return request


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    """Return the value of `authorization`; None if it is there not once."""
    found = [value for key, value in details.invocation_metadata or () if key == "authorization"]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


async def _abort(
    context: Context, code: grpc.StatusCode, kind: common_pb2.ErrorKind.ValueType, message: str
) -> NoReturn:
    error = common_pb2.Error(kind=kind, message=message)
    try:
        await context.abort(code, status_message(message), ((ERROR_METADATA, error.SerializeToString()),))
    except grpc.aio.InternalError as broken:  # no client is left to answer
        raise asyncio.CancelledError from broken
    raise AssertionError("abort returned")
