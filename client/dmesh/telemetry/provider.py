"""Destination of spans: the program's own tracer provider, or one that the `OTEL_*` variables describe.

The global one is never set: a program that sets its own after dmesh was initialized finds the place free.
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
"""Seconds that a process which ends spends on exporting what it has."""

_EXPORTERS = "opentelemetry_traces_exporter"
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class Provider:
    """Makes tracers, and carries what belongs together from one process to the other. Thread-safe.

    Args:
        provider: OpenTelemetry's.
        own: Whether it is dmesh's alone, to be shut down with it.
    """

    def __init__(self, provider: trace.TracerProvider, *, own: bool) -> None:
        self._provider = provider
        self._own = own
        self._fields = frozenset(propagate.get_global_textmap().fields)
        self._warned = False

    def tracer(self, scope: str) -> trace.Tracer:
        """Returns what makes the spans of a part of dmesh."""
        return self._provider.get_tracer(scope, __version__)

    def carried(self, span: trace.Span) -> Carried:
        """Returns what to send with a call so that what it brings about is part of its span."""
        fields: dict[str, str] = {}
        try:
            propagate.inject(fields, trace.set_span_in_context(span))
        except Exception as error:  # noqa: BLE001 - a propagator of the program's own may raise anything
            self._warn("goes without what it would have written", error)
        return outgoing(fields)

    def parent(self, fields: Mapping[str, str] | Iterable[tuple[str, str | bytes]]) -> Context:
        """Returns where a call belongs, as its caller says; nowhere if it says nothing sensible."""
        pairs = fields.items() if isinstance(fields, Mapping) else fields
        try:
            return propagate.extract(incoming(pairs, self._fields), Context())
        except Exception as error:  # noqa: BLE001 - see above
            self._warn("begins a trace of its own", error)
            return Context()

    def _warn(self, result: str, error: Exception) -> None:
        """A propagator has failed: that costs traces, and no call."""
        if not self._warned:
            self._warned = True
            logger.warning("an OpenTelemetry propagator has failed, so a call %s", result, exc_info=error)

    def close(self, seconds: float = FLUSH) -> str:
        """Exports what there is, as far as that is possible within some seconds. Idempotent.

        A provider of the program's own is left to the program.

        Returns:
            What went wrong, for people; empty if nothing did.
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
        except RuntimeError as error:  # no thread can be started any more
            return f"the last spans are lost: {error}"
        worker.join(seconds)
        if done:
            return ""
        return f"the last spans are lost: the OpenTelemetry exporter did not take them within {seconds:g} s"


def open_provider(switch: str, service: str) -> Provider | None:
    """See `dmesh.telemetry.open_provider`."""
    environ = os.environ
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        logger.info("%s is on, but OTEL_SDK_DISABLED is true: there will be no traces", switch)
        return None
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        return Provider(provider, own=False)
    names = _exporters(environ)
    if not names:
        logger.info("%s is on, but OTEL_TRACES_EXPORTER is none: there will be no traces", switch)
        return None
    exporters = [_make(switch, name) for name in names]
    try:
        own = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
        for exporter in exporters:
            own.add_span_processor(BatchSpanProcessor(exporter))
    except ValueError as error:
        raise ConfigurationError(
            f"{switch} is on, but OpenTelemetry cannot be set up: {error}. Look at the OTEL_* variables"
        ) from error
    return Provider(own, own=True)


def _exporters(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the exporters as they are registered."""
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
            f"OTEL_TRACES_EXPORTER asks for {name!r}, which is not installed; there are otlp, none, {known}"
        )
    try:
        exporter: SpanExporter = found.load()()
    except ImportError as error:
        raise MissingExtraError(
            f"OTEL_TRACES_EXPORTER asks for {name!r}, which cannot be imported: {error}"
        ) from error
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            f"{switch} is on, but the exporter {name!r} cannot be made: {error}. Look at the OTEL_EXPORTER_* "
            "variables"
        ) from error
    return exporter


def _resource(service: str) -> Resource:
    """Returns what spans are of. What the `OTEL_*` variables say of that comes first."""
    said = OTELResourceDetector().detect().attributes
    ours: dict[str, str | int] = {
        SERVICE_NAME: service, "host.name": socket.gethostname(), "process.pid": os.getpid(),
    }  # fmt: skip
    return Resource.create({name: value for name, value in ours.items() if name not in said})
