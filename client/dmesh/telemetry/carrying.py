"""Trace context of a call: validation of its fields on both sides.

OpenTelemetry's propagators write and read the fields (W3C's `traceparent` and `tracestate`, unless
`OTEL_PROPAGATORS` names others). The checks here keep bad fields from breaking a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MOST_BYTES = 4096
"""Maximum total size of names and values, bytes: a part of gRPC's limit of metadata."""

_NAME = re.compile(r"[a-z0-9_.-]{1,128}", re.ASCII)
_VALUE = re.compile(r"[\x20-\x7e]*", re.ASCII)
_TAKEN = frozenset(("authorization", "content-type", "user-agent", "te"))
"""Metadata names with another meaning."""
_TAKEN_PREFIXES = ("grpc-", "dmesh-")


def outgoing(fields: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the fields of a propagator that can be gRPC metadata, smallest first.

    Fields beyond the size limit are dropped: baggage rather than the short trace fields.
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
    """Return the valid fields of a caller for the propagators; none if they exceed the size limit.

    Args:
        fields: Untrusted fields of a call.
        wanted: Names that the propagators read.
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
