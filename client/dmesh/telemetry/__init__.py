"""OpenTelemetry spans of dmesh's operations (the extra `otel`).

`open_provider` is the entry point. Only this package imports OpenTelemetry, and other packages import it
lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from dmesh.telemetry.provider import Provider


def open_provider(switch: str, service: str) -> Provider | None:
    """Return a provider of tracers: the program's own tracer provider, or one for dmesh alone.

    Args:
        switch: The setting that switched tracing on, for messages: `DMESH_OTEL`, `--otel`.
        service: Service name of the spans, unless the `OTEL_*` variables have one.

    Returns:
        The provider; None if the `OTEL_*` variables switch tracing off.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
        ConfigurationError: The `OTEL_*` variables name an exporter or a propagator that does not exist or
            cannot be created.
    """
    try:
        from dmesh.telemetry.provider import open_provider
    except ImportError as error:
        raise MissingExtraError(
            f"{switch} asks for OpenTelemetry traces, which need the otel extra ({error}): "
            "pip install 'dmesh[otel]'"
        ) from error
    except ValueError as error:  # OpenTelemetry reads OTEL_PROPAGATORS and others on import
        raise ConfigurationError(
            f"{switch} is on, but OpenTelemetry cannot be set up: {error} Check the OTEL_* variables"
        ) from error
    return open_provider(switch, service)
