"""Reading a launcher's environment variables at every call; errors name the variable."""

from __future__ import annotations

import hashlib
import re

from dmesh.config.addresses import shown
from dmesh.errors import ConfigurationError, ResolverError
from dmesh.runtime.context import environment

_INTEGER = re.compile(r"[0-9]{1,9}", re.ASCII)
_FIRST_PORT, _STEP, _STEPS = 10_000, 16, 1_392
"""First ports of launches: from 10,000 in steps of 16, at least 256 below the usual ephemeral ports."""
LAST_PORT = 65_535


def text(name: str) -> str | None:
    """Return a variable of this process, stripped of white space; None if unset or empty."""
    return environment().get(name, "").strip() or None


def required_text(name: str, place: str) -> str:
    """Return a variable that `place` sets in every process.

    Args:
        name: The variable.
        place: Description of the launcher, as in "not running inside ...?".

    Raises:
        ResolverError: The variable is not set.
    """
    value = text(name)
    if value is None:
        raise ResolverError(
            f"{name} is not in the environment. Is this process not running inside {place}? Start it there, "
            "or use another cluster resolver"
        )
    return value


def integer(name: str) -> int | None:
    """Return a variable as a non-negative integer; None if unset or empty.

    Raises:
        ConfigurationError: The value is not such a number.
    """
    value = text(name)
    if value is None:
        return None
    if not _INTEGER.fullmatch(value):
        raise ConfigurationError(
            f"{name} is {shown(value)}; expected an integer from 0. Leave it as the launcher sets it"
        )
    return int(value)


def required_integer(name: str, place: str) -> int:
    """Return a variable that `place` sets in every process, as a non-negative integer.

    Raises:
        ResolverError: The variable is not set.
        ConfigurationError: The value is not such a number.
    """
    required_text(name, place)
    number = integer(name)
    assert number is not None
    return number


def port_base(identity: str, count: int) -> int:
    """Return the first of `count` ports for a job's tasks on one host.

    It is `DMESH_PORT_BASE` if that is set. Otherwise it is derived from the job's identity: all tasks of a
    job get the same port without communicating, and two jobs on one host usually get different ones.

    Raises:
        ConfigurationError: `DMESH_PORT_BASE` is not a port, or has fewer than `count` ports after it.
    """
    chosen = integer("DMESH_PORT_BASE")
    if chosen is None:
        digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
        chosen = _FIRST_PORT + int.from_bytes(digest) % _STEPS * _STEP
    return checked_port_base(chosen, count, "DMESH_PORT_BASE")


def checked_port_base(base: object, count: int, what: str) -> int:
    """Return a first port, after checking that `count` ports follow.

    Raises:
        ConfigurationError: `base` is not a port, or fewer than `count` ports follow.
    """
    if isinstance(base, bool) or not isinstance(base, int) or not 1 <= base <= LAST_PORT - max(count, 1) + 1:
        raise ConfigurationError(
            f"{what} is {base!r:.200}; expected the first of {max(count, 1)} free ports in a row, an integer "
            f"from 1 to {LAST_PORT - max(count, 1) + 1}"
        )
    return base
