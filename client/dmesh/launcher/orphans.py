"""Clean-up of a job's processes: a guard that outlives the launcher, and adoption of orphans."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")
_PR_SET_CHILD_SUBREAPER = 36


def stand_alone(script: Path) -> list[str]:
    """Return the command that runs a script of the standard library only, which starts in milliseconds."""
    return [sys.executable, "-I", "-S", str(script)]


@contextlib.contextmanager
def adopt_orphans() -> Iterator[None]:
    """Make this process, while entered, the parent of its descendants whose own parent has ended (Linux).

    So it learns of their end, too, and they are not left as zombies where nobody else looks after them.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Guard:
    """A process that kills the clients' process groups when the launcher ends, however it ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            stand_alone(_GUARD),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the launcher
            bufsize=0,
        )

    def watch(self, group: int) -> None:
        """Make the guard responsible for a process group."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Tell the guard that a process group is gone."""
        self._tell(f"-{group}\n")

    def remove(self, directory: Path) -> None:
        """Make the guard remove a directory at the end.

        Args:
            directory: Its absolute path, without line breaks.
        """
        self._tell(f"{directory}\n")

    def close(self) -> None:
        """End the guard; groups that it still watches are killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # Should somebody have killed the guard, the job goes on; on Linux the kernel still watches.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
