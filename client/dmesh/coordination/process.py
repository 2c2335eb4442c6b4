"""Facts about this process, so that others can name it and find it."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import sys
import time
from pathlib import Path

from dmesh._version import __version__
from dmesh.coordination.members import Process

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STAT = Path("/proc/self/stat")
_UPTIME = Path("/proc/uptime")
_START_TIME_FIELD = 19  # of /proc/self/stat, counted after the program's name


def new_incarnation() -> int:
    """Draws the random number that tells this process from its predecessors: 64 bits, never 0."""
    return secrets.randbits(64) or 1


def boot_id() -> str:
    """Returns the random identity of the running kernel, or an empty string where there is none.

    Two processes with the same one are on the same machine, whatever their host names say.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def started_at() -> float:
    """Returns the wall-clock start of this process, seconds since the Unix epoch. For display only."""
    try:
        # The name may contain spaces and parentheses; nothing after the last ")" does.
        fields = _STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        since_boot = float(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")
        age = float(_UPTIME.read_text(encoding="ascii").split()[0]) - since_boot
    except (OSError, ValueError, IndexError):
        age = 0.0
    return time.time() - max(0.0, age)


def this_process() -> Process:
    """Collects the facts about this process."""
    return Process(
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=boot_id(),
        program=os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python",
        dmesh_version=__version__,
        python_version=platform.python_version(),
        started_at_unix_ms=int(started_at() * 1000),
    )
