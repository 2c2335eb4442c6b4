"""A collector of OpenTelemetry traces on loopback: OTLP over HTTP, as its specification describes it."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

DEADLINE = 60.0


@dataclass(frozen=True)
class Got:
    """A span, as it came."""

    span: trace_pb2.Span
    resource: dict[str, Any]
    scope: str

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def kind(self) -> str:
        return trace_pb2.Span.SpanKind.Name(self.span.kind).removeprefix("SPAN_KIND_")

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def span_id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return _plain(self.span.attributes)

    @property
    def failed(self) -> bool:
        return self.span.status.code == trace_pb2.Status.STATUS_CODE_ERROR

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        return [(event.name, _plain(event.attributes)) for event in self.span.events]


def _plain(pairs: Any) -> dict[str, Any]:
    def value(one: AnyValue) -> Any:
        return getattr(one, one.WhichOneof("value") or "string_value")

    return {pair.key: value(pair.value) for pair in pairs}


@dataclass
class Collector:
    """What came, and how it is answered."""

    endpoint: str = ""
    spans: list[Got] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hold: threading.Event | None = None
    """Answers wait for it."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, path: str, headers: Any, body: bytes) -> None:
        if path != "/v1/traces" or headers["content-type"] != "application/x-protobuf":
            self.problems.append(f"{path} {headers['content-type']}")
            return
        if headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.bodies.append(body)
            for resource in request.resource_spans:
                about = _plain(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self.spans += [Got(span, about, scope.scope.name) for span in scope.spans]
            self._changed.notify_all()

    def named(self, name: str, **attributes: Any) -> list[Got]:
        """Returns the spans of a name; in the attributes' names `_` stands for `.`, where that is one."""
        with self._changed:
            return [
                span
                for span in self.spans
                if span.name == name
                and all(
                    {key.replace(".", "_"): value for key, value in span.attributes.items()}.get(wanted)
                    == value
                    for wanted, value in attributes.items()
                )
            ]

    def wait_for(self, found: Callable[[], bool]) -> None:
        """Waits until what came is enough."""
        deadline = time.monotonic() + DEADLINE
        with self._changed:
            while not found() and time.monotonic() < deadline:
                self._changed.wait(0.5)
        names = sorted((span.kind, span.name) for span in self.spans)
        assert found(), f"it never came; there are {names} {self.problems}"


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.hold is not None:
                collector.hold.wait(DEADLINE)
            collector.take(self.path, self.headers, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            try:
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except OSError as error:
                collector.problems.append(str(error))

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        if collector.hold is not None:
            collector.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()
