"""Which worker runs which function. Pure decisions: no threads, clocks or messages.

A worker runs one function at a time. What a lost worker ran is run by another one, before what waits. The
first error of a function is kept, and raised by the next call of the program; then what waits is cancelled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Result(Protocol):
    """Where the outcome of a function goes; see `remote_values.RemoteValue`."""

    def set_value(self, value: object) -> None:
        """Take the result."""

    def set_error(self, error: BaseException) -> None:
        """Take the error."""


class WorkerId(NamedTuple):
    """A worker's process."""

    client: int
    """Its client id."""
    incarnation: str
    """Number of the process, which tells it from others at its place."""


@dataclass(eq=False)
class Closure:
    """A function with its arguments, to be run by some worker."""

    number: int
    """Its number, which no other function has."""
    what: str
    """The function's name, for messages."""
    payload: bytes
    """Function and arguments, encoded."""
    result: Result
    """Where the outcome goes."""
    resources: tuple[tuple[int | str, str, bytes], ...] = ()
    """Arguments that the worker has itself: position or keyword, name, and what makes it."""


Assignment = tuple[WorkerId, Closure]


@dataclass
class Dispatch:
    """Functions that wait and that are run, and the workers."""

    queue: deque[Closure] = field(default_factory=deque)
    """Functions that no worker runs, in the order in which they will be."""
    workers: dict[WorkerId, Closure | None] = field(default_factory=dict)
    """Workers that are there, with what each runs."""
    error: BaseException | None = None
    """The first error, until it is raised."""
    draining: bool = False
    """True while an error is being raised: nothing is begun any more."""

    @property
    def running(self) -> list[Assignment]:
        """What is run, and where."""
        return [(worker, closure) for worker, closure in self.workers.items() if closure is not None]

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing is run."""
        return not self.queue and not self.running

    def submit(self, closure: Closure) -> list[Assignment]:
        """Add a function; return what is to be begun."""
        self.queue.append(closure)
        return self._assign()

    def ready(self, worker: WorkerId) -> list[Assignment]:
        """Note that a worker is there; return what is to be begun."""
        self.workers.setdefault(worker, None)
        return self._assign()

    def gone(self, worker: WorkerId) -> list[Assignment]:
        """Note that a worker is gone; return what is to be begun by others."""
        closure = self.workers.pop(worker, None)
        if closure is not None:
            self.queue.appendleft(closure)
        return self._assign()

    def finished(self, worker: WorkerId, number: int) -> tuple[Closure | None, list[Assignment]]:
        """Note that a worker has run a function; return the function, and what is to be begun.

        The function is None if this is old news: of one that is not what the worker runs.
        """
        closure = self.workers.get(worker)
        if closure is None or closure.number != number:
            return None, []
        self.workers[worker] = None
        return closure, self._assign()

    def fail(self, error: BaseException) -> None:
        """Keep an error, unless there is one already."""
        if self.error is None:
            self.error = error

    def cancel(self) -> list[Closure]:
        """Take the functions that wait off the queue, and return them."""
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
