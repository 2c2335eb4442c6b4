"""Trace context that travels with a call: cleaned on its way out and on its way in.

OpenTelemetry's propagators write and read it (W3C's `traceparent` and `tracestate`, unless `OTEL_PROPAGATORS`
says otherwise); what is here makes sure that nothing of it can break a call, on either side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MOST_BYTES = 4096
"""Bytes of names and values in all: a part of the metadata that gRPC lets pass."""

_NAME = re.compile(r"[a-z0-9_.-]{1,128}", re.ASCII)
_VALUE = re.compile(r"[\x20-\x7e]*", re.ASCII)
_TAKEN = frozenset(("authorization", "content-type", "user-agent", "te"))
"""Names that mean something else."""
_TAKEN_PREFIXES = ("grpc-", "dmesh-")


def outgoing(fields: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns what of a propagator's fields can be metadata of gRPC, the smallest first.

    What would be too much in all is left out: baggage rather than the trace's own few bytes.
    """
    found = sorted(
        (
            (name.lower(), value)
            for name, value in fields.items()
            if isinstance(value, str) and _fits(name.lower(), value)
        ),
        key=lambda pair: (len(pair[1]), pair),
    )
    kept: dict[str, str] = {}
    left = MOST_BYTES
    for name, value in found:
        left -= len(name) + len(value)
        if left < 0:
            break
        kept.setdefault(name, value)
    return tuple(kept.items())


def incoming(fields: Iterable[tuple[str, str | bytes]], wanted: Iterable[str]) -> dict[str, str]:
    """Returns what of a caller's fields a propagator may be shown; nothing if that is too much in all.

    Args:
        fields: What came with the call, from anybody.
        wanted: Names that the propagators know.
    """
    names = {name.lower() for name in wanted}
    found: dict[str, str] = {}
    size = 0
    for name, value in fields:
        if name not in names or not isinstance(value, str) or not _fits(name, value):
            continue
        size += len(name) + len(value)
        if size > MOST_BYTES:
            return {}
        found.setdefault(name, value)
    return found


def _fits(name: str, value: str) -> bool:
    if name in _TAKEN or name.startswith(_TAKEN_PREFIXES) or name.endswith("-bin"):
        return False
    if _NAME.fullmatch(name) is None:
        return False
    return _VALUE.fullmatch(value) is not None and value == value.strip()
