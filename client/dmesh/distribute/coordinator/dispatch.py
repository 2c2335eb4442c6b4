"""Assignment of functions to workers. Pure decisions: no threads, clocks or messages.

A worker runs one function at a time. A lost worker's function is run by another one, before those that wait.
The first error of a function is kept, and raised by the next call of the program; then those that wait are
cancelled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Result(Protocol):
    """Recipient of the outcome of a function; see `remote_values.RemoteValue`."""

    def set_value(self, value: object) -> None:
        """Take the result."""

    def set_error(self, error: BaseException) -> None:
        """Take the error."""


class WorkerId(NamedTuple):
    """A worker's process."""

    client: int
    """Its client id."""
    incarnation: str
    """Number of the process, which distinguishes it from earlier ones of the client."""


@dataclass(eq=False)
class Closure:
    """Function with its arguments, to be run by a worker."""

    number: int
    """Its unique number."""
    what: str
    """The function's name, for messages."""
    payload: bytes
    """Function and arguments, encoded."""
    result: Result
    """Recipient of the outcome."""
    resources: tuple[tuple[int | str, str, bytes], ...] = ()
    """Per-worker arguments: position or keyword, name, and the encoded function that creates it."""


Assignment = tuple[WorkerId, Closure]


@dataclass
class Dispatch:
    """Waiting and running functions, and the workers."""

    queue: deque[Closure] = field(default_factory=deque)
    """Waiting functions, in order."""
    workers: dict[WorkerId, Closure | None] = field(default_factory=dict)
    """Workers that are present, with the function that each runs."""
    error: BaseException | None = None
    """The first error, until it is raised."""
    draining: bool = False
    """True while an error is being raised: no more functions are started."""

    @property
    def running(self) -> list[Assignment]:
        """Running functions, and their workers."""
        return [(worker, closure) for worker, closure in self.workers.items() if closure is not None]

    @property
    def idle(self) -> bool:
        """True if no function is waiting or running."""
        return not self.queue and not self.running

    def submit(self, closure: Closure) -> list[Assignment]:
        """Add a function; return the functions to start."""
        self.queue.append(closure)
        return self._assign()

    def ready(self, worker: WorkerId) -> list[Assignment]:
        """Add a worker; return the functions to start."""
        self.workers.setdefault(worker, None)
        return self._assign()

    def gone(self, worker: WorkerId) -> list[Assignment]:
        """Remove a worker; return the functions to start on others."""
        closure = self.workers.pop(worker, None)
        if closure is not None:
            self.queue.appendleft(closure)
        return self._assign()

    def finished(self, worker: WorkerId, number: int) -> tuple[Closure | None, list[Assignment]]:
        """Record that a worker has finished a function; return the function, and the functions to start.

        The function is None if the worker does not run it any more.
        """
        closure = self.workers.get(worker)
        if closure is None or closure.number != number:
            return None, []
        self.workers[worker] = None
        return closure, self._assign()

    def fail(self, error: BaseException) -> None:
        """Store an error, unless there is one already."""
        if self.error is None:
            self.error = error

    def cancel(self) -> list[Closure]:
        """Remove and return the waiting functions."""
        cancelled = list(self.queue)
        self.queue.clear()
        return cancelled

    def _assign(self) -> list[Assignment]:
        begun: list[Assignment] = []
        for worker, closure in self.workers.items():
            if closure is None and self.queue and not self.draining:
                self.workers[worker] = self.queue.popleft()
                begun.append((worker, self.workers[worker]))  # type: ignore[arg-type]
        return begun
