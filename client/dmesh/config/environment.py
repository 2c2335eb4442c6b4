"""Reading single environment variables; errors name the variable."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from dmesh.config.addresses import HOST_PATTERN, is_ipv6, shown, split_address
from dmesh.config.interfaces import MOST_INTERFACES, NAME_PATTERN
from dmesh.errors import ConfigurationError
from dmesh.security.tokens import ADVICE, is_printable

JOB_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
"""Pattern of the name of a job or a cluster; the coordination server has the same rule."""
INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
"""Pattern of an integer."""
LONGEST_TIME = 1e8
"""Maximum of all times, seconds."""


def text(environ: Mapping[str, str], variable: str) -> str | None:
    """Return a variable, stripped of white space; None if it is unset or empty."""
    return environ.get(variable, "").strip() or None


def name(environ: Mapping[str, str], variable: str) -> str | None:
    """Return a variable that becomes part of device names; None if it is unset or empty.

    Raises:
        ConfigurationError: The value is malformed.
    """
    raw = text(environ, variable)
    if raw is not None and not JOB_NAME_PATTERN.fullmatch(raw):
        raise ConfigurationError(
            f"{variable} is {shown(raw)}; expected 1 to 128 letters, digits, dots, dashes or underscores, "
            "because it becomes part of device names. Choose another name"
        )
    return raw


def address(environ: Mapping[str, str], variable: str) -> str | None:
    """Return a variable that is HOST:PORT; None if it is unset or empty.

    Raises:
        ConfigurationError: The value is malformed.
    """
    raw = text(environ, variable)
    if raw is not None:
        split_address(raw, variable)
    return raw


def bind_host(environ: Mapping[str, str]) -> str | None:
    """Return `DMESH_BIND_HOST`, without brackets; None if it is unset or empty.

    Raises:
        ConfigurationError: The value is malformed.
    """
    raw = text(environ, "DMESH_BIND_HOST")
    if raw is None:
        return None
    host = raw[1:-1] if raw.startswith("[") and raw.endswith("]") else raw
    if not (HOST_PATTERN.fullmatch(host) or is_ipv6(host)):
        raise ConfigurationError(
            f"DMESH_BIND_HOST is {shown(raw)}; expected a host name or an IP address of this machine, "
            "without a port, such as 0.0.0.0. The port comes from this client's entry of DTENSOR_JOBS"
        )
    return host


def interfaces(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names in `DMESH_INTERFACES`, none for `0`; None if it is unset or empty.

    Raises:
        ConfigurationError: The value is malformed.
    """
    raw = text(environ, "DMESH_INTERFACES")
    if raw is None or raw == "0":
        return None if raw is None else ()
    names = tuple(entry.strip() for entry in raw.split(","))
    if (
        len(set(names)) < len(names)
        or len(names) > MOST_INTERFACES
        or not all(map(NAME_PATTERN.fullmatch, names))
    ):
        raise ConfigurationError(
            f"DMESH_INTERFACES is {shown(raw)}; expected the names of 1 to {MOST_INTERFACES} different "
            "network interfaces of this host, separated by commas, such as eth0,eth1, or 0 for only the "
            "interface of this client's address"
        )
    return names


def token(environ: Mapping[str, str]) -> str | None:
    """Return `DMESH_TOKEN`; None if it is unset or empty.

    Raises:
        ConfigurationError: The value is malformed.
    """
    raw = text(environ, "DMESH_TOKEN")
    if raw is not None and not is_printable(raw):
        raise ConfigurationError(
            "DMESH_TOKEN (not shown) has a space or a character that is not printable ASCII. Expected "
            f"letters, digits and punctuation; {ADVICE}"
        )
    return raw


def flag(environ: Mapping[str, str], variable: str) -> bool:
    """Return a variable as a truth value; False if it is unset or empty.

    Raises:
        ConfigurationError: The value is malformed.
    """
    raw = text(environ, variable)
    if raw is None or raw.lower() in ("0", "false", "no", "off"):
        return False
    if raw.lower() in ("1", "true", "yes", "on"):
        return True
    raise ConfigurationError(f"{variable} is {shown(raw)}; expected 1 or 0. Unset it for the default, 0")


def number(environ: Mapping[str, str], variable: str, maximum: int, advice: str) -> int | None:
    """Return a variable as an integer from 1 to `maximum`; None if it is unset or empty.

    Raises:
        ConfigurationError: The value is malformed.
    """
    raw = text(environ, variable)
    if raw is None:
        return None
    if not INTEGER.fullmatch(raw) or not 1 <= int(raw) <= maximum:
        raise ConfigurationError(
            f"{variable} is {shown(raw)}; expected an integer from 1 to {maximum}, or {advice}"
        )
    return int(raw)


def optional_seconds(
    environ: Mapping[str, str], variable: str, minimum: float, maximum: float
) -> float | None:
    """Return a variable as a number of seconds within limits; None if it is unset or empty.

    Raises:
        ConfigurationError: The value is malformed.
    """
    raw = text(environ, variable)
    if raw is None:
        return None
    try:
        seconds = float(raw)
    except ValueError:
        seconds = math.nan
    if not minimum <= seconds <= maximum:  # false for NaN, too
        raise ConfigurationError(
            f"{variable} is {shown(raw)}; expected a number of seconds from {minimum:g} to {maximum:.0f}, or "
            "unset it to use the cluster's"
        )
    return seconds


def seconds(environ: Mapping[str, str], variable: str, default: float) -> float:
    """Return a variable as a number of seconds greater than 0, or a default.

    Raises:
        ConfigurationError: The value is malformed.
    """
    raw = text(environ, variable)
    if raw is None:
        return default
    try:
        seconds = float(raw)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIME:  # false for NaN, too
        raise ConfigurationError(
            f"{variable} is {shown(raw)}; expected a number of seconds greater than 0 and at most "
            f"{LONGEST_TIME:.0f}, or unset it for the default, {default:g}"
        )
    return seconds
