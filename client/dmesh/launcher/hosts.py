"""Hosts of a `dmesh run`: `--hosts` and host files, and the commands that start an agent there."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dmesh.config.addresses import HOST_PATTERN, is_ipv6, shown
from dmesh.errors import ConfigurationError

_ENTRY = re.compile(r"([^:\[\]]*(?:\[[^\]]*\])?)(?::([^:]*))?", re.ASCII)
_SLOTS = re.compile(r"[0-9]{1,6}", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?", re.ASCII)
_KEEP_ALIVE = (
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
"""Options of OpenSSH's client: no terminal, no questions, and an end when the host is gone. A command's own
options come before them, and the first one counts."""


@dataclass(frozen=True)
class Host:
    """One host, and how many clients it gets."""

    target: str
    """The host as ssh or srun knows it, perhaps with `USER@` before it."""
    slots: int
    """Number of clients."""

    @property
    def name(self) -> str:
        """The host's name for people."""
        return self.target.rpartition("@")[2]


@dataclass(frozen=True)
class Way:
    """How a host is reached."""

    name: str
    """`ssh`, `srun` or `here`."""
    command: tuple[str, ...]
    """The process that runs the host's agent; its standard input and output are the agent's."""
    python: str
    """The host's Python, for errors."""
    attempt: str = ""
    """Command line with which a person can try the way; empty for none."""


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of `--hosts a:4,user@b:4,[::1]:2`; one without a number has one slot.

    Raises:
        ConfigurationError: It is malformed.
    """
    where = f"--hosts {shown(text)}"
    found = []
    for entry in text.split(","):
        parts = _ENTRY.fullmatch(entry.strip())
        if parts is None:
            raise ConfigurationError(f"{where}: cannot read {shown(entry)}; expected hosts such as a:4,b:4")
        found.append(Host(_checked(parts[1], where), _slots("1" if parts[2] is None else parts[2], where)))
    return _merged(found)


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Return the hosts of a file in Open MPI's form: `HOST slots=N max_slots=N`, comments after `#`.

    A host without a number has one slot; of one that is there several times the slots are added.

    Raises:
        ConfigurationError: The file cannot be read, or is malformed.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--hostfile {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace("=", " = ").split()
        if not words:
            continue
        where = f"line {number} of {path}"
        target, rest = _checked(words[0], where), words[1:]
        slots = "1"
        while rest:
            if len(rest) < 3 or rest[1] != "=":
                raise ConfigurationError(f"{where} is {shown(line)}; expected HOST slots=N")
            key, value, rest = rest[0], rest[2], rest[3:]
            if key in ("slots", "count", "cpu"):
                slots = value
            elif key not in ("max_slots", "max-slots"):
                raise ConfigurationError(
                    f"{where} has {shown(key)}, which is not a known option; expected HOST slots=N"
                )
        found.append(Host(target, _slots(slots, where)))
    if not found:
        raise ConfigurationError(f"--hostfile {path} lists no hosts; expected lines such as: host1 slots=4")
    return _merged(found)


def take_slots(hosts: Sequence[Host], clients: int | None, source: str) -> tuple[Host, ...]:
    """Return the hosts that get clients: the first ones are filled first.

    Args:
        hosts: With all of their slots.
        clients: Number of clients; all slots if None.
        source: How an error names the list.

    Raises:
        ConfigurationError: There are fewer slots.
    """
    total = sum(host.slots for host in hosts)
    if clients is None:
        return tuple(hosts)
    if clients > total:
        raise ConfigurationError(
            f"-n {clients} is more than the {total} slots of {source}: "
            f"{', '.join(f'{host.name}:{host.slots}' for host in hosts[:8])}"
            f"{', ...' if len(hosts) > 8 else ''}. Give hosts more slots, as in {hosts[0].name}:{clients}"
        )
    taken, left = [], clients
    for host in hosts:
        if left > 0:
            taken.append(replace(host, slots=min(host.slots, left)))
            left -= host.slots
    return tuple(taken)


def is_here(host: Host) -> bool:
    """Return whether a host is this machine by its name, so that nothing has to be asked to get there."""
    own = socket.gethostname().lower()
    return host.target.lower() in ("localhost", "127.0.0.1", "[::1]", own, own.partition(".")[0])


def split_ssh(text: str) -> tuple[str, ...]:
    """Return program and arguments of `--ssh` or `DMESH_SSH`; no shell takes part.

    Raises:
        ConfigurationError: There are none, or a quote is not closed.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"--ssh {shown(text)} cannot be split into words: {error}") from error
    if not words:
        raise ConfigurationError("--ssh is empty; expected a program, such as ssh, or 'ssh -F file'")
    return words


def ssh_command(ssh: Sequence[str], host: Host, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one on a host.

    Args:
        ssh: Program and arguments. One of the name `ssh` gets options of OpenSSH's client.
        host: The host.
        command: What is to run there; a shell of the user's splits it there.
    """
    options = _KEEP_ALIVE if Path(ssh[0]).name == "ssh" else ()
    return [*ssh, *options, host.target.replace("[", "").replace("]", ""), shlex.join(command)]


def agent_command(python: str) -> tuple[str, ...]:
    """Return the command of a host's agent.

    Args:
        python: The host's Python.
    """
    return (python, "-P", "-m", "dmesh.launcher.agent")  # -P: nothing of the home directory's is imported


def exported(names: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `-x NAME` and `-x NAME=VALUE`.

    Raises:
        ConfigurationError: A name cannot be one, or is not set here.
    """
    found = {}
    for text in names:
        name, equals, value = text.partition("=")
        if not name.isidentifier():
            raise ConfigurationError(f"-x {shown(text)} names no variable; expected NAME or NAME=VALUE")
        if not equals and name not in environment:
            raise ConfigurationError(f"-x {name}: it is not set here; set it, or pass {name}=VALUE")
        found[name] = value if equals else environment[name]
    return found


def _checked(target: str, where: str) -> str:
    user, at, name = target.rpartition("@")
    is_host = is_ipv6(name[1:-1]) if name.startswith("[") else HOST_PATTERN.fullmatch(name)
    if is_host and (not at or _USER.fullmatch(user)):
        return target
    raise ConfigurationError(
        f"{where} has {shown(target)}; expected a host name or an IP address (IPv6 in brackets), perhaps "
        "with USER@ before it, and :N behind it"
    )


def _slots(text: str, where: str) -> int:
    if _SLOTS.fullmatch(text) and int(text) > 0:
        return int(text)
    raise ConfigurationError(f"{where} has {shown(text)} slots; expected a number of clients from 1")


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.target] = slots.get(host.target, 0) + host.slots
    return tuple(Host(target, count) for target, count in slots.items())
