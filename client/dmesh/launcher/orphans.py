"""Clean-up of a job's processes: a guard that outlives the launcher, and adoption of orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dmesh.launcher.guard import is_marked

RUN_ID = "DMESH_RUN_ID"
"""Variable with the id of a client's run, after those of the runs around it and colons."""
_GUARD = Path(__file__).with_name("guard.py")
_PR_SET_CHILD_SUBREAPER = 36
_TERMINATE_GRACE, _KILL_GRACE = 1.0, 5.0
"""Seconds that orphans have to end after SIGTERM, and after SIGKILL."""


def stand_alone(script: Path) -> list[str]:
    """Return the command that runs a script of the standard library only, which starts in milliseconds."""
    return [sys.executable, "-I", "-S", str(script)]


class Guard:
    """A process that kills the clients' remaining processes when the launcher ends, however it ends."""

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(8)
        """Id of the run in its clients' environments."""
        self.groups: set[int] = set()
        """Watched process groups, one for each client."""
        self.sessions: set[int] = set()
        """Sessions of all clients so far."""
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            [*stand_alone(_GUARD), RUN_ID, self.run_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the launcher
            bufsize=0,
        )
        self.pid = self._process.pid

    def mark(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return a client's environment with the id of the run, by which its descendants are found."""
        around = environment.get(RUN_ID, "")
        return {**environment, RUN_ID: f"{around}:{self.run_id}" if around else self.run_id}

    def watch(self, group: int) -> None:
        """Make the guard responsible for a process group."""
        self.groups.add(group)
        self.sessions.add(group)
        self._write(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Tell the guard that a process group is gone."""
        self.groups.discard(group)
        self._write(f"-{group}\n")

    def remove(self, directory: Path) -> None:
        """Make the guard remove a directory at the end.

        Args:
            directory: Its absolute path, without line breaks.
        """
        self._write(f"{directory}\n")

    def close(self) -> None:
        """End the guard, and kill the clients' remaining processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        # If the guard was killed, the job continues; on Linux the kernel still watches.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())


class Orphans:
    """Descendants of the clients whose own parent has ended; this process becomes their parent (Linux).

    So it learns of their end, and they are not left as zombies where nobody else looks after them. Those in
    sessions of their own, which no signal to a client's group reaches, are found here at the end.

    Args:
        guard: It knows the clients.
        shared: This process has children of its own, which must be left alone.
    """

    def __init__(self, guard: Guard, *, shared: bool = False) -> None:
        self._guard = guard
        self._shared = shared
        self._known: set[int] = set()
        """Orphans found so far: one that has ended has no environment any more."""
        self._others: set[int] = set()
        """Children that this process had before: of a shell that it has replaced, for example."""

    @contextlib.contextmanager
    def adopted(self) -> Iterator[None]:
        """Adopt orphans while entered; none of them is left at the end."""
        if sys.platform != "linux":
            yield
            return
        self._others = _children()
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            try:
                yield
            finally:
                self._end()
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def reap(self) -> None:
        """Reap the orphans that have ended."""
        if sys.platform != "linux":
            return
        try:
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
        except ChildProcessError:
            return
        for pid in self._found():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _end(self) -> None:
        """Ask the orphans to end, then kill them, and those whom they leave."""
        for number, grace in ((signal.SIGTERM, _TERMINATE_GRACE), (signal.SIGKILL, _KILL_GRACE)):
            deadline = time.monotonic() + grace
            signaled: set[int] = set()
            self.reap()
            while left := self._found():
                for pid in left - signaled:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
                signaled |= left
                if (seconds := deadline - time.monotonic()) <= 0:
                    break
                _await_end(left, seconds)
                self.reap()

    def _found(self) -> set[int]:
        """Return the orphans, also ended ones."""
        found = _children() - self._guard.groups - {self._guard.pid} - self._others
        self._known = {pid for pid in found if not self._shared or self._is_marked(pid)}
        return self._known

    def _is_marked(self, pid: int) -> bool:
        if pid in self._known:
            return True
        with contextlib.suppress(OSError):
            return os.getsid(pid) in self._guard.sessions or is_marked(pid, RUN_ID, self._guard.run_id)
        return False


def _children() -> set[int]:
    """Return the children of this process."""
    try:
        tasks = [*Path("/proc/self/task").iterdir()]
        return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    except OSError:  # this kernel has no such file, or a thread has just ended
        return {
            pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _parent(pid) == os.getpid()
        }


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _await_end(pids: Iterable[int], seconds: float) -> None:
    """Wait until one of these processes has ended, or the time is up."""
    with contextlib.ExitStack() as files:
        poll = select.poll()
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:  # it has ended and another process has reaped it, or the kernel has no such files
                seconds = min(seconds, 0.01)
                continue
            files.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
