"""Destination of spans: the program's own tracer provider, or one that the `OTEL_*` variables describe.

dmesh never sets the global provider, so a program can still set its own after dmesh was initialized.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from importlib import metadata

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from dmesh._log import logger
from dmesh._version import __version__
from dmesh.coordination.tracing import Carried
from dmesh.coordination.waiting import Worker
from dmesh.errors import ConfigurationError, MissingExtraError
from dmesh.telemetry.carrying import incoming, outgoing

FLUSH = 5.0
"""Maximum time to export pending spans at the end of a process, seconds."""

_EXPORTERS = "opentelemetry_traces_exporter"
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class Provider:
    """Makes tracers, and propagates trace contexts between processes. Thread-safe.

    Args:
        provider: OpenTelemetry's tracer provider.
        own: Whether the provider belongs to dmesh, which then shuts it down.
    """

    def __init__(self, provider: trace.TracerProvider, *, own: bool) -> None:
        self._provider = provider
        self._own = own
        self._fields = frozenset(propagate.get_global_textmap().fields)
        self._warned = False

    def tracer(self, scope: str) -> trace.Tracer:
        """Return the tracer of a part of dmesh."""
        return self._provider.get_tracer(scope, __version__)

    def carried(self, span: trace.Span) -> Carried:
        """Return the fields to send with a call, so that the server's spans are children of `span`."""
        fields: dict[str, str] = {}
        try:
            propagate.inject(fields, trace.set_span_in_context(span))
        except Exception as error:  # noqa: BLE001 - the program's own propagator may raise anything
            self._warn("has no trace context", error)
        return outgoing(fields)

    def parent(self, fields: Mapping[str, str] | Iterable[tuple[str, str | bytes]]) -> Context:
        """Return the trace context of a call from its caller's fields; an empty one if they are invalid."""
        pairs = fields.items() if isinstance(fields, Mapping) else fields
        try:
            return propagate.extract(incoming(pairs, self._fields), Context())
        except Exception as error:  # noqa: BLE001 - see above
            self._warn("begins a new trace", error)
            return Context()

    def _warn(self, result: str, error: Exception) -> None:
        """Log the first failure of a propagator, which affects traces but no calls."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "an OpenTelemetry propagator failed, so a call %s; later failures are not logged",
                result,
                exc_info=error,
            )

    def close(self, seconds: float = FLUSH) -> str:
        """Export pending spans within a time limit. Idempotent.

        The program's own provider is not shut down.

        Returns:
            An error message; empty on success.
        """
        if not self._own:
            return ""
        self._own = False
        assert isinstance(self._provider, TracerProvider)
        done: list[None] = []

        def end() -> None:
            self._provider.shutdown()  # type: ignore[attr-defined]
            done.append(None)

        worker = Worker(end, "dmesh-otel-end")
        try:
            worker.start()
        except RuntimeError as error:  # the interpreter is shutting down
            return f"the last spans are lost: {error}"
        worker.join(seconds)
        if done:
            return ""
        return f"the last spans are lost: the OpenTelemetry exporter did not send them within {seconds:g} s"


def open_provider(switch: str, service: str) -> Provider | None:
    """See `dmesh.telemetry.open_provider`."""
    environ = os.environ
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        logger.info("%s is on, but OTEL_SDK_DISABLED is true, so there are no traces", switch)
        return None
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        return Provider(provider, own=False)
    names = _exporters(environ)
    if not names:
        logger.info("%s is on, but OTEL_TRACES_EXPORTER is none, so there are no traces", switch)
        return None
    exporters = [_make(switch, name) for name in names]
    try:
        own = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
        for exporter in exporters:
            own.add_span_processor(BatchSpanProcessor(exporter))
    except ValueError as error:
        raise ConfigurationError(
            f"{switch} is on, but OpenTelemetry cannot be set up: {error}. Check the OTEL_* variables"
        ) from error
    return Provider(own, own=True)


def _exporters(environ: Mapping[str, str]) -> list[str]:
    """Return the registered names of the requested exporters."""
    asked = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    names = [name.strip() for name in asked.split(",") if name.strip()]
    if "none" in names:
        return []
    protocol = (
        environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "").strip()
        or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip()
        or "http/protobuf"
    )
    if "otlp" in names and protocol not in _PROTOCOLS:
        raise ConfigurationError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; expected {' or '.join(_PROTOCOLS)}. Unset it for "
            "the default, http/protobuf"
        )
    return [_PROTOCOLS[protocol] if name == "otlp" else name for name in dict.fromkeys(names)]


def _make(switch: str, name: str) -> SpanExporter:
    registered = metadata.entry_points(group=_EXPORTERS)
    found = next((entry for entry in registered if entry.name == name), None)
    if found is None:
        known = ", ".join(sorted({entry.name for entry in registered}))
        raise ConfigurationError(
            f"OTEL_TRACES_EXPORTER asks for {name!r}, which is not installed; expected otlp, none, {known}"
        )
    try:
        exporter: SpanExporter = found.load()()
    except ImportError as error:
        raise MissingExtraError(
            f"OTEL_TRACES_EXPORTER asks for {name!r}, which cannot be imported: {error}"
        ) from error
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            f"{switch} is on, but the exporter {name!r} cannot be created: {error}. Check the "
            "OTEL_EXPORTER_* variables"
        ) from error
    return exporter


def _resource(service: str) -> Resource:
    """Return the resource of the spans. The `OTEL_*` variables have priority."""
    said = OTELResourceDetector().detect().attributes
    ours: dict[str, str | int] = {
        SERVICE_NAME: service, "host.name": socket.gethostname(), "process.pid": os.getpid(),
    }  # fmt: skip
    return Resource.create({name: value for name, value in ours.items() if name not in said})
