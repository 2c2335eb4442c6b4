"""Stand-alone script that becomes a client, run as `python -I -S exec_client.py PARENT CPUS COMMAND...`.

It stands between fork and exec, where a Python callback of the launcher would be unsafe: it asks the kernel
to kill this process when the launcher dies (Linux), binds it to CPUs, if there are any (`0,1`), then replaces
itself by the client's command. Only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Replace this process by the client; return an exit code only if that fails."""
    parent, cpus, command = int(argv[1]), argv[2], argv[3:]
    # An ignored signal stays ignored over exec: a launcher in a shell's background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the request was in place
            return 128 + signal.SIGKILL
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    try:
        os.execv(command[0], command)  # noqa: S606 - no shell, and the command is the launcher's own
    except OSError as error:
        sys.stderr.write(f"dmesh run: cannot start {command[0]}: {error}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv))
