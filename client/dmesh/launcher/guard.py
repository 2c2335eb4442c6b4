"""Stand-alone script that outlives the launcher by one instant, run as `python -I -S guard.py`.

The launcher writes to its standard input: `+PGID` when a client's process group exists, `-PGID` when it is
gone, `/PATH` for a directory of the run. When that pipe closes, the launcher has ended, perhaps by `kill -9`;
whatever groups are left are killed, with grandchildren, and the directories are removed. Works wherever there
are process groups and pipes. Only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> int:
    """Wait for the launcher's end, then kill what it left."""
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
    if directories:
        from shutil import rmtree  # most runs have none, and this script starts in milliseconds

        for directory in directories:
            rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
