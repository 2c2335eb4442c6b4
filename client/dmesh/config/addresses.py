"""Addresses of clients and servers: `HOST:PORT`, `[IPV6]:PORT`, Google's BNS names."""

from __future__ import annotations

import ipaddress
import re

from dmesh.errors import ConfigurationError

BNS_PREFIX = "/bns/"
"""Prefix of an address in Google's internal naming, which ends in a task number and optionally a port."""
HOST_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", re.ASCII)
"""Characters of a host name or an IPv4 address."""

WILDCARD_HOSTS = ("0.0.0.0", "::")  # noqa: S104 -- only names, not bound here
"""Hosts that mean all addresses of a machine: valid for listening, not for connecting."""

_DIGITS = re.compile(r"[0-9]+", re.ASCII)
_NOWHERE = ".invalid:1"


def split_address(text: str, what: str, *, any_port: bool = False) -> tuple[str, int]:
    """Split `HOST:PORT` or `[IPV6]:PORT`.

    Args:
        text: The address.
        what: Its name in errors, e.g. `DMESH_COORDINATOR` or `entry 1 of DTENSOR_JOBS`.
        any_port: Whether port 0, for any free one, is valid.

    Returns:
        The host, without brackets, and the port, 1 to 65535, or 0.

    Raises:
        ConfigurationError: The text is not such an address.
    """
    text = text.strip()
    if text.startswith(BNS_PREFIX):
        raise ConfigurationError(
            f"{what} is {shown(text)}: BNS addresses resolve only inside Google, so clients cannot "
            "connect to it. Expected HOST:PORT, such as host1:10000"
        )
    if "/" in text:
        raise _bad_address(what, text, "it has a slash", "leave out the scheme (http://) and the path")
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or not port.startswith(":"):
            raise _bad_address(
                what, text, "an IPv6 address needs both brackets and a port", "write it as [::1]:10000"
            )
        port = port[1:]
        if not is_ipv6(host):
            raise _bad_address(what, text, f"{shown(host)} is not an IPv6 address", "correct it")
    else:
        host, colon, port = text.rpartition(":")
        if not colon:
            raise _bad_address(what, text, "it has no port", "add one, such as :10000")
        if ":" in host:
            raise _bad_address(
                what, text, "it has more than one colon", "put an IPv6 address in brackets, as in [::1]:10000"
            )
        if not host:
            raise _bad_address(what, text, "it has no host", "write localhost, or the name of the machine")
        if not HOST_PATTERN.fullmatch(host):
            raise _bad_address(what, text, f"{shown(host)} is not a host name", "correct it")
    if not _DIGITS.fullmatch(port):
        raise _bad_address(
            what, text, f"its port {shown(port)} is not a number", "give a port from 1 to 65535"
        )
    if len(port) > 5 or not (0 if any_port else 1) <= int(port) <= 65_535:
        raise _bad_address(
            what, text, f"its port {shown(port)} is not from 1 to 65535",
            "choose one that is free on that machine; the other clients must know it, so it cannot be 0",
        )  # fmt: skip
    return host, int(port)


def _bad_address(what: str, text: str, problem: str, advice: str) -> ConfigurationError:
    return ConfigurationError(f"{what} is {shown(text)}: {problem}. Expected HOST:PORT; {advice}")


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT; IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unknown_address(client: int) -> str:
    """Return the placeholder for a client's unknown address: a name that cannot exist."""
    return f"client-{client}{_NOWHERE}"


def is_unknown(address: str) -> bool:
    """Return whether an address is such a placeholder."""
    return address.endswith(_NOWHERE)


def check_port(what: str, port: object) -> int:
    """Return a port as a number.

    Args:
        what: Its name in errors.
        port: The number, perhaps as text.

    Raises:
        ConfigurationError: The port is not from 1 to 65535.
    """
    text = str(port)
    number = int(text) if _DIGITS.fullmatch(text) and len(text) <= 5 else 0
    if isinstance(port, bool) or not 1 <= number <= 65_535:
        raise ConfigurationError(f"{what} is {shown(text)}; expected a port from 1 to 65535")
    return number


def is_ipv6(host: str) -> bool:
    """Return whether a text is an IPv6 address, without brackets."""
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is of the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_bns_order(jobs: tuple[str, ...]) -> None:
    """Raise an error unless BNS addresses are sorted by task number.

    Args:
        jobs: The addresses of all clients, by client id.

    Raises:
        ConfigurationError: The addresses are not sorted, or some have no task number.
    """
    tasks = [job.rsplit("/", 1)[-1].split(":", 1)[0] for job in jobs]
    numbered = [bool(_DIGITS.fullmatch(task)) and len(task) <= 18 for task in tasks]
    if any(numbered) and not all(numbered):
        odd = jobs[numbered.index(False)]
        raise ConfigurationError(
            "DTENSOR_JOBS mixes BNS addresses that end in a task number, such as "
            f"{jobs[numbered.index(True)]}, with {shown(odd)}, which does not; they cannot be put in "
            "order. Use the same form for all"
        )
    keys: list[tuple[int, str]] = [
        (int(task), "") if number else (0, job)
        for job, task, number in zip(jobs, tasks, numbered, strict=True)
    ]
    for index in range(1, len(jobs)):
        if keys[index] < keys[index - 1]:
            raise ConfigurationError(
                f"DTENSOR_JOBS is not sorted: {jobs[index - 1]} comes before {jobs[index]}. Sort BNS "
                "addresses by their task number (2 before 10): a client's id is its position in the list"
            )


def shown(value: str) -> str:
    """Quote a value for a message, shortened: a job list may have thousands of entries."""
    return repr(value if len(value) <= 200 else f"{value[:200]}...")
