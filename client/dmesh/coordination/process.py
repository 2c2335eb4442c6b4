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
from dmesh.config import host
from dmesh.coordination.members import Process

_UPTIME = Path("/proc/uptime")


def new_incarnation() -> int:
    """Draw the random number that tells this process from its predecessors: 64 bits, never 0."""
    return secrets.randbits(64) or 1


def new_credential() -> bytes:
    """Draw the secret that proves to the server that a call comes from this process: 256 bits."""
    return secrets.token_bytes(32)


def started_at() -> float:
    """Return the wall-clock start of this process, seconds since the Unix epoch. For display only."""
    try:
        since_boot = host.start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
        age = float(_UPTIME.read_text(encoding="ascii").split()[0]) - since_boot if since_boot else 0.0
    except (OSError, ValueError, IndexError):
        age = 0.0
    return time.time() - max(0.0, age)


def this_process() -> Process:
    """Collect the facts about this process."""
    return Process(
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=host.boot_id(),
        program=os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python",
        dmesh_version=__version__,
        python_version=platform.python_version(),
        started_at_unix_ms=int(started_at() * 1000),
        pid_namespace=host.pid_namespace(),
        start_ticks=host.start_ticks(os.getpid()),
    )
