"""This machine as the place where a job's clients run."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
from collections.abc import Iterator, Sequence

from dmesh.launcher.orphans import Guard, Orphans
from dmesh.launcher.plan import ClientPlan
from dmesh.launcher.process import ClientProcess, Terminal


class LocalHost:
    """Starts clients as children of this process, and leaves none of them behind.

    Args:
        shared: This process has children of its own, which must be left alone.
    """

    deadline: float | None = None
    """Time of the next call of `on_time`: none."""
    unsent: Sequence[str] = ()
    """Hosts for which something waits to be sent: none."""

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        """Watches the clients' output."""
        self._guard: Guard | None = None
        self._orphans: Orphans | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter a context in which clients can be started."""
        with contextlib.closing(self.selector), contextlib.closing(Guard()) as self._guard:
            self._orphans = Orphans(self._guard, shared=self._shared)
            with self._orphans.adopted():
                yield

    def start(self, plan: ClientPlan, terminal: Terminal, now: float, restarts: int) -> ClientProcess:
        """Start a client; rank 0 has this process's standard input.

        Raises:
            OSError: It could not be started.
        """
        assert self._guard is not None, "entered() comes first"
        stdin = None if plan.rank == 0 else subprocess.DEVNULL
        return ClientProcess(plan, terminal, self.selector, self._guard, now, restarts, stdin)

    def on_time(self, now: float) -> None:
        """Reap the orphans that have ended."""
        if self._orphans is not None:
            self._orphans.reap()

    def pause(self) -> None:
        """Take note that this process is about to be stopped: the guard notices its end alone."""

    def resume(self) -> None:
        """Take note that this process goes on."""
