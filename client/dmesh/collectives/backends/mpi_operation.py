"""A call under way in MPI: its steps, its wait, and the memory that MPI uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from dmesh.collectives.backends.base import Operation
from dmesh.collectives.backends.mpi_world import MpiWorld
from dmesh.errors import CollectiveError

Steps = Generator[Sequence[Any], None, Sequence[Any]]
"""Yields the MPI requests that must be complete before the next step; returns those that outlive the call."""

_SPIN = 0.0003
"""Seconds of waiting for other ranks before the first nap. MPI itself yields the processor if it must."""
_LONGEST_NAP = 0.015
"""Longest nap, in seconds, while waiting for other ranks: that takes about one percent of a core."""
_MOVING_SPIN = 0.02
"""Seconds of waiting before the first nap while data moves, which it does only when MPI is called."""
_MOVING_NAP = 0.00005
_EXPLAINED_WITHIN = 2.0
"""Seconds in which the group finds out which rank is gone, after an error of MPI's."""
_ANSWERED_WITHIN = 5.0
"""Seconds in which the other ranks say what they called, after a mismatch."""
_ARRIVES_WITHIN = 5.0
"""Seconds in which data of a rank arrives after the rank's goodbye."""


class MismatchedCall(Exception):
    """Another rank has called something else."""


class MpiOperation(Operation):
    """A call under way in MPI.

    Args:
        world: The MPI launch.
        begin: Given a list for all memory that MPI gets, returns the steps of the call.
        others: The other ranks that take part.
        on_mismatch: Called again and again while another rank is there with another call.
    """

    def __init__(
        self,
        world: MpiWorld,
        begin: Callable[[list[Any]], Steps],
        others: tuple[int, ...],
        on_mismatch: Callable[[], None],
    ) -> None:
        self._world = world
        self._memory: list[Any] = []
        self._steps = begin(self._memory)
        self._others = others
        self._on_mismatch = on_mismatch
        self._requests: list[Any] = []
        self._unknown = False  # whether MPI may have a request that is not in the list
        self._complete = False
        self._mismatched = False
        self._trouble: Exception | None = None
        self._error: BaseException | None = None
        self._since = time.monotonic()  # beginning of the step, or of the trouble
        self._goodbyes: dict[int, float] = {}
        world.hold(self)

    def progress(self, seconds: float) -> bool:
        """Go on with the call; see `Operation.progress`."""
        deadline = time.monotonic() + seconds
        while True:
            if self._error is not None:
                raise self._error
            if self._go_on():
                return True
            now = time.monotonic()
            quiet = now - self._since
            if self._mismatched and quiet > _ANSWERED_WITHIN:
                raise CollectiveError("a rank has called something else, and does not say what")
            if self._trouble is not None and quiet > _EXPLAINED_WITHIN:
                raise CollectiveError(f"MPI has failed: {self._trouble}") from self._trouble
            if now >= deadline:
                return False
            moving = len(self._memory) > 1  # at first, the descriptor alone
            if quiet > (_MOVING_SPIN if moving else _SPIN):
                nap = _MOVING_NAP if moving else min(quiet / 10, _LONGEST_NAP)
                time.sleep(min(nap, deadline - now))

    def _go_on(self) -> bool:
        """Begin all steps that can begin; return whether the last one is complete."""
        if self._mismatched:
            self._on_mismatch()
        if self._mismatched or self._trouble is not None:
            return False
        try:
            while not self._complete:
                self._requests = [request for request in self._requests if not request.Test()]
                if self._requests:
                    return False
                self._unknown = True  # Ctrl-C may come when MPI has begun, and this list is empty
                try:
                    self._requests = list(next(self._steps))
                except StopIteration as end:
                    self._requests, self._complete = list(end.value), True
                self._unknown = False
                self._since = time.monotonic()
        except MismatchedCall:
            self._mismatched, self._unknown, self._since = True, False, time.monotonic()
        except self._world.mpi.Exception as error:
            self._trouble, self._unknown, self._since = error, True, time.monotonic()
        return self._complete

    def missing(self) -> tuple[int, ...]:
        """Return all other ranks: MPI does not say whose data is missing. Any thread."""
        return () if self._complete else self._others

    def fail(self, error: BaseException) -> None:
        """Make every pending and later `progress` raise `error`; see `Operation.fail`."""
        self._error = self._error or error

    def may_still_come(self, rank: int) -> bool:
        """Return whether MPI may still deliver data of a rank whose goodbye has come over TCP."""
        now = time.monotonic()
        return now - self._goodbyes.setdefault(rank, now) < _ARRIVES_WITHIN

    def revoke(self) -> None:
        """End the operation; memory that MPI still uses is kept, and none of it is the caller's to write."""
        if not self._unknown:
            (self._world.retire if self._requests else self._world.release)(self)

    def is_done_with_memory(self) -> bool:
        """Return whether MPI has let go of a revoked operation's memory; see `MpiWorld.retire`."""
        self._requests = [request for request in self._requests if not request.Test()]
        if not self._requests:
            self._memory.clear()
        return not self._requests
