"""Reading what a launcher says in environment variables: at every call, and with errors that name them."""

from __future__ import annotations

import hashlib
import re

from dmesh.config.addresses import shown
from dmesh.errors import ConfigurationError, ResolverError
from dmesh.runtime.context import environment

_INTEGER = re.compile(r"[0-9]{1,9}", re.ASCII)
_FIRST_PORT, _STEP, _STEPS = 10_000, 16, 1_392
"""Possible first ports of a launch; 256 are below those that systems hand out for connections."""
LAST_PORT = 65_535


def text(name: str) -> str | None:
    """Returns a variable of this process, without white space around it; None if unset or empty."""
    return environment().get(name, "").strip() or None


def required_text(name: str, place: str) -> str:
    """Returns a variable that is there in any process that `place` started.

    Args:
        name: The variable.
        place: What sets it, as in "not running inside ...?".

    Raises:
        ResolverError: It is not set.
    """
    value = text(name)
    if value is None:
        raise ResolverError(
            f"{name} is not in the environment. Is this process not running inside {place}? Start it there, "
            "or use another cluster resolver"
        )
    return value


def integer(name: str) -> int | None:
    """Returns a variable as a number from 0; None if unset or empty.

    Raises:
        ConfigurationError: It is no such number.
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
    """Returns a variable that is there in any process that `place` started, as a number from 0.

    Raises:
        ResolverError: It is not set.
        ConfigurationError: It is no such number.
    """
    required_text(name, place)
    number = integer(name)
    assert number is not None
    return number


def port_base(identity: str, count: int) -> int:
    """Returns the first of `count` ports for the tasks that a job has on one host.

    `DMESH_PORT_BASE` decides if it is set. Otherwise the job's identity does: all tasks of a job come to the
    same answer without asking each other, and two jobs that share a host most often to different ones.

    Raises:
        ConfigurationError: `DMESH_PORT_BASE` is not a port, or there are too few ports from there on.
    """
    chosen = integer("DMESH_PORT_BASE")
    if chosen is None:
        digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
        chosen = _FIRST_PORT + int.from_bytes(digest) % _STEPS * _STEP
    return checked_port_base(chosen, count, "DMESH_PORT_BASE")


def checked_port_base(base: object, count: int, what: str) -> int:
    """Refuses a first port from which there are not `count` ports.

    Raises:
        ConfigurationError: It is not a port, or there are too few from there on.
    """
    if isinstance(base, bool) or not isinstance(base, int) or not 1 <= base <= LAST_PORT - max(count, 1) + 1:
        raise ConfigurationError(
            f"{what} is {base!r:.200}; expected the first of {max(count, 1)} free ports in a row, an integer "
            f"from 1 to {LAST_PORT - max(count, 1) + 1}"
        )
    return base
