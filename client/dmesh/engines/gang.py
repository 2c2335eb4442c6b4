"""Ranks on workers of another system: starts them together, watches them, restarts failed ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from dmesh.engines.coordinator import coordinator, settings_of
from dmesh.engines.failures import Ended, error_of, results
from dmesh.engines.rank import Call, Place, Report, own_place
from dmesh.errors import EngineError
from dmesh.launcher.registry import registered

_AFTER_FAILURE = 5.0
"""Seconds in which the other ranks can detect a failure and report."""


@dataclass(frozen=True)
class Ending:
    """Event of an engine: a rank ended."""

    rank: int
    """The rank."""
    report: Report | None = None
    """Its report; None if its process ended without one."""
    how: str = ""
    """How its process ended, as part of a sentence; empty if it has a report."""


class Gang(Protocol):
    """Processes of an engine, one for each rank. All of them run before the first rank starts."""

    places: list[Place]
    """Each rank's process."""

    def start(self, rank: int, variables: Mapping[str, str], call: Call) -> None:
        """Start a rank in its process."""

    def wait(self, timeout: float | None) -> Ending | None:
        """Return the next rank that ended; None after the timeout."""

    def replace(self, rank: int, timeout: float) -> None:
        """Find another process for a rank that lost its own.

        Raises:
            EngineError: The engine has none within the timeout.
        """

    def abandon(self, cluster: str) -> None:
        """End the running ranks, as far as the engine can."""

    def close(self) -> None:
        """Return the processes to the engine."""


@dataclass
class _Run:
    """A launch under way."""

    gang: Gang
    call: Call
    variables: Mapping[str, str] = field(repr=False)
    replace_timeout: float
    clock: Callable[[], float]
    running: set[int] = field(default_factory=set)
    restarts: dict[int, int] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)

    def start(self, rank: int) -> None:
        own = {
            "DTENSOR_CLIENT_ID": str(rank),
            "RANK": str(rank),
            "DMESH_RESTART_COUNT": str(self.restarts.get(rank, 0)),
        }
        self.running.add(rank)
        self.gang.start(rank, {**self.variables, **own}, self.call)

    def wait_for_all(self) -> None:
        """Wait until all ranks have ended, or for a few seconds after a failure without a restart."""
        deadline: float | None = None
        while self.running:
            timeout = None if deadline is None else deadline - self.clock()
            if timeout is not None and timeout <= 0:
                return
            ending = self.gang.wait(timeout)
            if ending is None:
                continue
            ended = Ended(
                ending.rank,
                self.gang.places[ending.rank],
                ending.report,
                ending.how,
                restarts=self.restarts.get(ending.rank, 0),
            )
            self.running.discard(ending.rank)
            if ended.failed and deadline is None and self._may_be_restarted(ended):
                self._restart(ended)
                continue
            self.ended.append(ended)
            if ended.failed and deadline is None:
                deadline = self.clock() + _AFTER_FAILURE

    def _may_be_restarted(self, ended: Ended) -> bool:
        return ended.restarts < self.call.max_restarts and bool(self.running)

    def _restart(self, ended: Ended) -> None:
        if ended.report is None:
            try:
                self.gang.replace(ended.rank, self.replace_timeout)
            except EngineError as error:
                raise error from error_of(ended)
        self.restarts[ended.rank] = ended.restarts + 1
        self.start(ended.rank)


def run(gang: Gang, call: Call, clock: Callable[[], float] = time.monotonic) -> list[object]:
    """Run a function in all ranks, in processes of an engine, and return their results by rank.

    Args:
        gang: The processes. They are returned to the engine at the end.
        call: What to run.
        clock: Monotonic time in seconds.

    Raises:
        RankFailedError: A rank failed.
        EngineError: The engine has no process for a restarted rank.
        ConfigurationError: See `coordinator`.
    """
    own = own_place()
    environ = {**os.environ, **call.variables}
    with closing(gang), coordinator(own, gang.places, environ) as found:
        variables = {**call.variables, **found, **_shared(call)}
        run = _Run(gang, call, variables, settings_of(environ).init_timeout, clock)
        jobs = {"DTENSOR_JOBS": found["DMESH_COORDINATOR"]}  # `registered` reads the address from here
        try:
            with registered({**found, **jobs}, os.environ):
                for rank in range(call.ranks):
                    run.start(rank)
                run.wait_for_all()
        finally:
            if run.running:
                gang.abandon(found["DMESH_CLUSTER"])
    return results(run.ended, sorted(run.running))


def _shared(call: Call) -> dict[str, str]:
    variables = {
        "DTENSOR_JOBS": "",  # overrides a value in the workers' environment
        "DMESH_NUM_CLIENTS": str(call.ranks),
        "WORLD_SIZE": str(call.ranks),
    }
    if call.max_restarts:
        variables["DMESH_RESTART_POLICY"] = "rejoin"
    return variables


def distinct(places: Sequence[Place], own: Place) -> list[int]:
    """Return the indices of places in distinct processes other than this one."""
    seen = {own.process}
    found = []
    for index, place in enumerate(places):
        if place.process not in seen:
            seen.add(place.process)
            found.append(index)
    return found
