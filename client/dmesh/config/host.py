"""Processes of this host: identity, existence, listening ports; and its NUMA nodes.

Linux only; on other systems the functions return empty values.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATE, _THREADS, _START_TIME = 0, 17, 19
"""Indices of fields in /proc/PID/stat, counted after the program's name."""


_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
_MOST_ARGUMENTS, _LONGEST_PROGRAM = 64, 80


@dataclass(frozen=True, slots=True)
class Listener:
    """Process that listens on a TCP port."""

    pid: int
    """Its id."""
    program: str
    """Its program; empty if unknown."""

    def describe(self) -> str:
        """Return its description: `dmesh serve (pid 4711)`."""
        return f"{self.program or 'a process'} (pid {self.pid})"


def listener_on(port: int) -> Listener | None:
    """Return the process that listens on a TCP port of this host; None if unknown.

    The kernel shows the sockets of other users' processes only to root.
    """
    inodes = set(_listening_inodes(port))
    for entry in _PROC.glob("[0-9]*") if inodes else ():
        pid = int(entry.name)
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            for descriptor in (entry / "fd").iterdir():
                if os.readlink(descriptor) in inodes:
                    return Listener(pid, _program(pid))
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    """Yield the names of the sockets that listen on a port, as in `/proc/PID/fd`."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except (OSError, ValueError):
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENS and fields[1].endswith(f":{port:04X}"):
                yield f"socket:[{fields[9]}]"


def _program(pid: int) -> str:
    """Return the program of a process without arguments, which may be secrets: `train.py`, `dmesh serve`."""
    try:
        raw = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[:_MOST_ARGUMENTS]
    except OSError:
        return ""
    words = [word.decode("utf-8", "replace") for word in raw if word]
    if words and os.path.basename(words[0]).startswith("python"):
        rest = [word for word in words[1:] if word == "-m" or not word.startswith("-")]
        words = (rest[1:] if rest[:1] == ["-m"] else rest) or words
    if not words:
        return ""
    name = os.path.basename(words[0])
    text = f"dmesh {words[1]}" if name == "dmesh" and len(words) > 1 else name
    return "".join(char if char.isprintable() else "?" for char in text[:_LONGEST_PROGRAM])


def boot_id() -> str:
    """Return the random identity of the running kernel; empty if unknown.

    Processes with the same identity are on the same machine, even if they see different host names.
    """
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Return the identity of this process's pid namespace; empty if unknown.

    Process ids are comparable only if boot id and pid namespace are equal.
    """
    try:
        # A /proc of another namespace would show other processes under the same ids.
        return os.readlink(_PROC / "self/ns/pid") if os.readlink(_PROC / "self") == str(os.getpid()) else ""
    except OSError:
        return ""


def network_namespace() -> str:
    """Return the identity of this process's network namespace; empty if unknown.

    Two processes share a loopback interface only if boot id and network namespace are equal.
    """
    try:
        return os.readlink(_PROC / "self/ns/net")
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """Return the start time of a process, in clock ticks since the boot; 0 if unknown.

    Process ids are reused, but a pair of id and start time is unique.
    """
    fields = _stat(pid)
    return int(fields[_START_TIME]) if fields else 0


def is_gone(pid: int, started: int) -> bool:
    """Return whether a process has certainly ended.

    Args:
        pid: Its id, in this process's pid namespace.
        started: Its `start_ticks`; 0 if unknown.

    Returns:
        True if the process does not exist, another one has its id, or it is a zombie.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it exists, and belongs to another user
    fields = _stat(pid)
    if not fields:
        return False  # /proc does not show it to this user
    if started and int(fields[_START_TIME]) != started:
        return True
    # If only the main thread has ended, the process still exists.
    return fields[_STATE] in ("Z", "X") and int(fields[_THREADS]) <= 1


def own_cpus() -> frozenset[int]:
    """Return the CPUs on which this process may run; all of them if the system does not tell."""
    known = hasattr(os, "sched_getaffinity")
    return frozenset(os.sched_getaffinity(0) if known else range(os.cpu_count() or 1))


def numa_nodes(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node, by number; empty if /sys does not show them.

    Args:
        root: The root of the file system.
    """
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    found = {int(folder.name[4:]): _cpu_list(folder / "cpulist") for folder in folders}
    return dict(sorted((node, cpus) for node, cpus in found.items() if cpus is not None))


def own_nodes(root: Path = Path("/"), allowed: Collection[int] | None = None) -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node on which this process may run, by number, without empty nodes.

    Args:
        root: The root of the file system.
        allowed: CPUs that may be used; None for those of this process.
    """
    usable = own_cpus() if allowed is None else frozenset(allowed)
    return {node: found for node, cpus in numa_nodes(root).items() if (found := cpus & usable)}


def cores(cpus: Collection[int], root: Path = Path("/")) -> list[frozenset[int]]:
    """Group CPUs by core; each CPU is its own group if /sys does not show the cores.

    Args:
        cpus: Numbers of the CPUs.
        root: The root of the file system.
    """
    folder, left, found = root / "sys/devices/system/cpu", set(cpus), []
    for cpu in sorted(cpus):
        if cpu in left:
            threads = _cpu_list(folder / f"cpu{cpu}/topology/thread_siblings_list") or frozenset()
            found.append(frozenset({cpu, *threads} & left))
            left -= found[-1]
    return found


def _cpu_list(path: Path) -> frozenset[int] | None:
    """Return the CPUs in a file such as `0-3,8-11`; None if it cannot be read."""
    try:
        ranges = [
            entry.partition("-") for entry in path.read_text(encoding="ascii").strip().split(",") if entry
        ]
    except OSError:
        return None
    return frozenset(
        itertools.chain(*(range(int(first), int(last or first) + 1) for first, _, last in ranges))
    )


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the program's name; none if they cannot be read."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The name may have spaces and parentheses, but there are none after its closing ")".
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > _START_TIME else []
