"""Stand-alone script that outlives the launcher by one instant, run as `python -I -S guard.py VARIABLE RUN`.

The launcher writes to its standard input: `+PGID` when a client's process group exists, `-PGID` when it is
gone, `/PATH` for a directory of the run. When that pipe closes, the launcher has ended, perhaps by `kill -9`;
whatever groups are left are killed, with grandchildren, and the directories are removed. Works wherever there
are process groups and pipes. On Linux, processes in other sessions are killed, too, if VARIABLE has the id
RUN in their environment. Only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_ROUNDS, _PAUSE = 200, 0.01
"""Most looks for processes of the run, and seconds between them: what is being killed may still be there."""


def marked(variable: str, run: str) -> list[int]:
    """Return the processes whose environment has the id of a run; Linux only."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if name.isdigit() and int(name) != os.getpid() and is_marked(int(name), variable, run):
                    found.append(int(name))
    return found


def is_marked(pid: int, variable: str, run: str) -> bool:
    """Return whether a process's environment has the id of a run, possibly among ids of enclosing runs.

    Raises:
        OSError: It has ended, or is another user's, or this is not Linux.
    """
    with open(f"/proc/{pid}/environ", "rb") as file:
        entries = file.read().split(b"\0")
    before = f"{variable}=".encode()
    return any(
        run.encode() in entry[len(before) :].split(b":") for entry in entries if entry.startswith(before)
    )


def main(variable: str, run: str) -> int:
    """Wait for the launcher's end, then kill its remaining processes."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    directories: list[str] = []
    for line in sys.stdin:
        if not line.endswith("\n"):
            break  # half a line: the launcher died while it wrote, and half a number is another number
        if line[0] == "/":
            directories.append(line[:-1])
        else:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(_ROUNDS):
        left = marked(variable, run)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(_PAUSE)
    if directories:
        from shutil import rmtree  # most runs have none, and this script starts in milliseconds

        for directory in directories:
            rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
