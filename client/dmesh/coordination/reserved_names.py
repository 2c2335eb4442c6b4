"""Names of barriers and keys that are dmesh's own."""

from __future__ import annotations

from dmesh.errors import ConfigurationError

RESERVED_PREFIX = "dmesh/"
"""Begins the names of the SDK's own barriers and keys, which no script may use."""


def refuse_reserved(name: str, what: str) -> None:
    """Refuse a name that is dmesh's own.

    Raises:
        ConfigurationError: It begins with `RESERVED_PREFIX`.
    """
    if isinstance(name, str) and name.startswith(RESERVED_PREFIX):
        raise ConfigurationError(
            f"{what} that begin with {RESERVED_PREFIX!r} are dmesh's own, {name!r} is not yours to use"
        )
