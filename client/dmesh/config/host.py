"""Processes of this host: identity and existence. Linux only; elsewhere nothing is known."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_STATE, _THREADS, _START_TIME = 0, 17, 19
"""Fields of /proc/PID/stat, counted after the program's name."""


def boot_id() -> str:
    """Returns the random identity of the running kernel, or an empty string where there is none.

    Two processes with the same one are on the same machine, whatever their host names say.
    """
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Returns the identity of this process's pid namespace, or an empty string if it is not known.

    Process ids mean the same process only where boot id and pid namespace are equal.
    """
    try:
        # A /proc of another namespace would show other processes under the same ids.
        return os.readlink(_PROC / "self/ns/pid") if os.readlink(_PROC / "self") == str(os.getpid()) else ""
    except OSError:
        return ""


def network_namespace() -> str:
    """Returns the identity of this process's network namespace, or an empty string if it is not known.

    Two processes have one loopback interface only where boot id and network namespace are equal.
    """
    try:
        return os.readlink(_PROC / "self/ns/net")
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """Returns when a process started, in clock ticks since the boot; 0 if that is not known.

    A process id is used again, the pair of id and start is not.
    """
    fields = _stat(pid)
    return int(fields[_START_TIME]) if fields else 0


def is_gone(pid: int, started: int) -> bool:
    """Tells whether a process has certainly ended.

    Args:
        pid: Its id, in this process's pid namespace.
        started: What `start_ticks` said of it; 0 if that is not known.

    Returns:
        True if there is no such process, another one has its id, or it waits as a zombie to be reaped.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it exists, and belongs to somebody else
    fields = _stat(pid)
    if not fields:
        return False  # not ours to see
    if started and int(fields[_START_TIME]) != started:
        return True
    # The first thread may have ended before the others: then the process is there.
    return fields[_STATE] in ("Z", "X") and int(fields[_THREADS]) <= 1


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat behind the program's name; none if they cannot be read."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The name may contain spaces and parentheses; nothing after the last ")" does.
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > _START_TIME else []
