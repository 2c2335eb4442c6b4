"""OpenTelemetry: spans of what dmesh does (the extra `otel`).

Whoever switches it on calls `open_provider`; no other room imports what is in here, and nothing else imports
OpenTelemetry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    from dmesh.telemetry.provider import Provider


def open_provider(switch: str, service: str) -> Provider | None:
    """Returns what makes and exports spans: the program's own tracer provider, or one for dmesh alone.

    Args:
        switch: What has asked for it, for messages: `DMESH_OTEL`, `--otel`.
        service: The name of the service that spans are of, where the `OTEL_*` variables do not say it.

    Returns:
        None if the `OTEL_*` variables switch tracing off.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
        ConfigurationError: The `OTEL_*` variables ask for an exporter or a propagator that there is not, or
            that cannot be made.
    """
    try:
        from dmesh.telemetry.provider import open_provider
    except ImportError as error:
        raise MissingExtraError(
            f"{switch} asks for OpenTelemetry traces, which need the otel extra ({error}): "
            "pip install 'dmesh[otel]'"
        ) from error
    except ValueError as error:  # OpenTelemetry reads some, OTEL_PROPAGATORS for one, as it is imported
        raise ConfigurationError(
            f"{switch} is on, but OpenTelemetry cannot be set up: {error} Look at the OTEL_* variables"
        ) from error
    return open_provider(switch, service)
