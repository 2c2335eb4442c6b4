"""This machine as the place where a job's clients run."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
from collections.abc import Iterator

from dmesh.launcher.orphans import Guard, adopt_orphans
from dmesh.launcher.plan import ClientPlan
from dmesh.launcher.process import ClientProcess, Terminal


class LocalHost:
    """Starts clients as children of this process, and leaves none of them behind."""

    deadline: float | None = None
    """Time of the next call of `on_time`: none."""

    def __init__(self) -> None:
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        """Watches the clients' output."""
        self._guard: Guard | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter a context in which clients can be started."""
        with contextlib.closing(self.selector), adopt_orphans(), contextlib.closing(Guard()) as self._guard:
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
        """Take note of the time: nothing is due here."""
