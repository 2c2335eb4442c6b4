"""Spans of a client: its calls to the coordinator, its barriers, its collectives."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType

import grpc
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from dmesh._log import announce
from dmesh.config.addresses import split_address
from dmesh.coordination.tracing import Carried, Job
from dmesh.telemetry.collective_spans import CollectiveSpans
from dmesh.telemetry.provider import Provider

_SCOPE = "dmesh"
_KEY_VALUES = "dmesh.v1.KeyValueService"
"""Service whose error messages may quote values, which must not get into spans."""
_LONGEST = 256
"""Characters of a name in an attribute."""
_LONGEST_MESSAGE = 1000


class ClientTracing:
    """Tracing of one client; see `coordination.tracing.Tracing`.

    Args:
        provider: Provider of the tracers.
        cluster: Name of the cluster.
        coordinator: HOST:PORT of the coordinator; None if there is none.
    """

    def __init__(self, provider: Provider, cluster: str, coordinator: str | None) -> None:
        self._provider = provider
        self._tracer = provider.tracer(_SCOPE)
        self._known: dict[str, str | int] = {"dmesh.cluster": cluster[:_LONGEST]}
        self._server: dict[str, str | int] = {}
        if coordinator is not None:
            host, port = split_address(coordinator, "the coordinator's address")
            self._server = {"server.address": host, "server.port": port}
        self._collectives: CollectiveSpans | None = None

    @property
    def provider(self) -> Provider:
        """The provider of the tracers."""
        return self._provider

    def identify(self, rank: int, world_size: int) -> None:
        """Add this client's rank and the world size to all later spans."""
        self._known = {**self._known, "dmesh.rank": rank, "dmesh.world_size": world_size}

    def call(self, method: str, attributes: Mapping[str, str | int] | None = None) -> CallSpan:
        """See `Tracing.call`."""
        service, _, name = method.strip("/").partition("/")
        about = {
            **self._known, **self._server, "rpc.system": "grpc", "rpc.service": service, "rpc.method": name,
            **(attributes or {}),
        }  # fmt: skip
        span = self._tracer.start_span(f"{service}/{name}", kind=SpanKind.CLIENT, attributes=about)
        return CallSpan(span, self._provider.carried(span), rpc=True, wordless=service == _KEY_VALUES)

    def barrier(self, name: str, participants: int) -> CallSpan:
        """See `Tracing.barrier`."""
        about: dict[str, str | int] = {**self._known, **self._server, "dmesh.barrier.name": name[:_LONGEST]}
        if participants:
            about["dmesh.barrier.participants"] = participants
        span = self._tracer.start_span("barrier", kind=SpanKind.CLIENT, attributes=about)
        return CallSpan(span, self._provider.carried(span), rpc=False)

    def bound(self, job: Job) -> Callable[[], object]:
        """See `Tracing.bound`."""
        return partial(contextvars.copy_context().run, job)

    def collectives(self) -> CollectiveSpans:
        """Return an event reader that makes spans of collectives."""
        self._collectives = CollectiveSpans(self._tracer, self._known)
        return self._collectives

    def close(self) -> None:
        """Export pending spans, within a few seconds. Idempotent."""
        if self._collectives is not None:
            self._collectives.close()
        if problem := self._provider.close():
            announce(problem)


class CallSpan:
    """The span of one call or barrier; see `coordination.tracing.Span`."""

    def __init__(self, span: Span, carried: Carried, *, rpc: bool, wordless: bool = False) -> None:
        self._span = span
        self._wordless = wordless
        self._rpc = rpc
        self.carried = carried
        self._code = grpc.StatusCode.OK
        self._message = ""

    def over(self, code: grpc.StatusCode, message: str = "") -> None:
        """See `Span.over`."""
        self._code, self._message = code, message

    def __enter__(self) -> CallSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        span, code = self._span, self._code
        if error is not None and code is grpc.StatusCode.OK:
            interrupted = not isinstance(error, Exception)
            code = grpc.StatusCode.CANCELLED if interrupted else grpc.StatusCode.UNKNOWN
        if self._rpc:
            span.set_attribute("rpc.grpc.status_code", code.value[0])
        if error is not None:
            kind_name = type(error).__qualname__
            span.set_attribute("error.type", kind_name)
            # Without the traceback: chained exceptions may have secrets in their messages.
            about = {"exception.type": f"{type(error).__module__}.{kind_name}"}
            if not self._wordless:
                about["exception.message"] = str(error)[:_LONGEST_MESSAGE]
            span.add_event("exception", about)
            words = kind_name if self._wordless else f"{kind_name}: {error}"[:_LONGEST_MESSAGE]
            span.set_status(Status(StatusCode.ERROR, words))
        elif code is not grpc.StatusCode.OK:
            span.set_attribute("error.type", code.name)
            words = "" if self._wordless else self._message[:_LONGEST_MESSAGE]
            span.set_status(Status(StatusCode.ERROR, words or code.name))
        span.end()
