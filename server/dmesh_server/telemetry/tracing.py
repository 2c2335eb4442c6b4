"""OpenTelemetry spans of the server's calls (the extra `otel`). Imported only where tracing is on.

A span has names in it (cluster, task, method, barrier), never a key, its value or a token. A caller's trace
context is believed as far as it makes sense: nothing in it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import grpc
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from dmesh.telemetry.provider import Provider
from dmesh_server.core.model import Caller

_SCOPE = "dmesh.server"
_KEY_VALUES = "dmesh.v1.KeyValueService"
"""Messages of its errors quote keys, which must not get into a span."""
_LONGEST = 256
"""Characters of a name."""
_LONGEST_REASON = 1000

_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Statuses that are the server's failure, by OpenTelemetry's conventions; others are its answer."""

Fields = Mapping[str, str] | Iterable[tuple[str, str | bytes]]


class Traces:
    """Makes the spans of one server, on its event loop.

    Args:
        provider: Where they go.
    """

    def __init__(self, provider: Provider) -> None:
        """Make none yet."""
        self._provider = provider
        self._tracer = provider.tracer(_SCOPE)

    def call(self, method: str, fields: Fields, caller: Caller | None, client: str = "") -> CallSpan:
        """Begin the span of a call.

        Args:
            method: Its full name, such as `/dmesh.v1.CoordinationService/Leave`.
            fields: Its metadata, unchecked.
            caller: The caller, if known.
            client: The caller's host; empty for a call within a session.
        """
        service, _, name = method.strip("/").partition("/")
        about = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name, **_names(caller)}
        if client:
            about["client.address"] = client[:_LONGEST]
        else:
            about["dmesh.in_session"] = True
        span = self._begin(f"{service}/{name}", fields, about)
        return CallSpan(span, rpc=True, wordless=service == _KEY_VALUES)

    def barrier(self, name: str, fields: Fields, caller: Caller) -> CallSpan:
        """Begin the span of a member's wait at a barrier, when it has arrived."""
        about = {"dmesh.barrier.name": name[:_LONGEST], **_names(caller)}
        return CallSpan(self._begin("barrier", fields, about), rpc=False)

    def _begin(self, name: str, fields: Fields, about: Mapping[str, str | bool]) -> Span:
        parent = self._provider.parent(fields)
        return self._tracer.start_span(name, parent, kind=SpanKind.SERVER, attributes=about)


class CallSpan:
    """The span of one call or barrier."""

    def __init__(self, span: Span, *, rpc: bool, wordless: bool = False) -> None:
        """Wrap a span that has begun."""
        self._span: Span | None = span
        self._rpc = rpc
        self._wordless = wordless

    def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, message: str = "") -> None:
        """The call is over. Only the first time counts."""
        span, self._span = self._span, None
        if span is None:
            return
        if self._rpc:
            span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not grpc.StatusCode.OK:
            span.set_attribute("error.type", code.name)
            if code in _FAULTS or not self._rpc:
                words = "" if self._wordless else message[:_LONGEST_REASON]
                span.set_status(Status(StatusCode.ERROR, words or code.name))
        span.end()


def _names(caller: Caller | None) -> dict[str, str | bool]:
    if caller is None:
        return {}
    return {
        "dmesh.cluster": caller.cluster[:_LONGEST],
        "dmesh.task": str(caller.task or "observer")[:_LONGEST],
    }
