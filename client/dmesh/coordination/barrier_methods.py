"""Barriers as an agent offers them: with waiting and without, of all participants and of those alive."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection

from dmesh.coordination import barriers
from dmesh.coordination.activity import ActivityTracker
from dmesh.coordination.barriers import Arrival, Barriers
from dmesh.coordination.calls import Calls
from dmesh.coordination.identity import Identity
from dmesh.coordination.link import Link
from dmesh.coordination.members import BarrierProgress, ClusterState, Member, Participant, Task
from dmesh.coordination.session import Session
from dmesh.coordination.tracing import NO_TRACING, Tracing
from dmesh.errors import BarrierTimeoutError
from dmesh.v1 import coordination_pb2 as pb

STATUS_TIMEOUT = 5.0
"""Seconds for an answer about the cluster that is only nice to have."""
_NAMED_AT_ONCE = 16
"""Members that one line names; of the others it gives the number."""
_LOOK = 1.0
"""Seconds between two looks at the state of the session while a barrier is waited at."""

Participants = Collection[int | str] | None
"""Ranks or tasks; None for every task of the cluster."""


class BarrierMethods:
    """Operations of an agent on the cluster's barriers. Thread-safe.

    Args:
        identity: Who this process is.
        table: Its arrivals.
        session: Its session.
        link: Its connection.
        calls: Makes its calls.
        tracker: Knows what it is doing.
        tracing: Makes spans of barriers.
        learn: Takes note of what an answer says of the cluster.
    """

    def __init__(
        self,
        identity: Identity,
        table: Barriers,
        session: Session,
        link: Link,
        calls: Calls,
        tracker: ActivityTracker,
        tracing: Tracing,
        learn: Callable[[pb.GetClusterStateResponse], ClusterState],
    ) -> None:
        self._identity = identity
        self._caller = identity.caller()
        self._barriers = table
        self._session = session
        self._link = link
        self._calls = calls
        self._tracker = tracker
        self._tracing = tracing
        self._learn = learn
        self._on_world_barrier: Callable[[int], None] | None = None
        self._on_barrier: Callable[[Arrival], None] | None = None
        self._last_world_epoch = 0

    def set_world_barrier_listener(self, listener: Callable[[int], None]) -> None:
        """Set the listener for successful barriers of all tasks; it gets the cluster's epoch at their end.

        It runs on the thread that waited, before `barrier` returns; `barrier` raises its exceptions.
        """
        self._on_world_barrier = listener

    def set_barrier_listener(self, listener: Callable[[Arrival], None]) -> None:
        """Set the listener for every barrier at which this process stops waiting, whatever the outcome.

        It runs on the thread that waited, and must not raise.
        """
        self._on_barrier = listener

    @property
    def barriers(self) -> Barriers:
        """The barriers at which this process waits."""
        return self._barriers

    def past_barriers(self, most: int) -> list[Arrival]:
        """Return the last arrivals of this process at barriers, also waiting ones, oldest first."""
        return self._barriers.past(most)

    def barrier(self, name: str, participants: Participants = None, timeout: float | None = None) -> None:
        """Wait until all participants have called it.

        Args:
            name: The barrier's name. It may be used again: instances are counted.
            participants: Ranks or tasks, the same in every call; None for every task of the cluster.
            timeout: Seconds that the first caller gives the others; None for no limit.

        Raises:
            BarrierTimeoutError: Time ran out; `members` has everyone who did not come.
            BarrierError: A participant left, failed or was lost; `members` has it.
            BarrierCancelledError: A participant cancelled it.
            BarrierMismatchError: The callers name different participants, or this process is not one of them.
            CollectiveMismatchError: A participant waits for this process in a collective, and cannot come.
            CoordinatorUnavailableError: The coordinator has been silent for its lease and a margin.
        """
        self._enter(name, participants, timeout)

    def alive_barrier(
        self, name: str, participants: Participants = None, timeout: float | None = None
    ) -> tuple[Participant, ...]:
        """Wait until all participants that are members of the cluster have called it; return who they are.

        Args:
            name: The barrier's name, of which all calls are of this kind.
            participants: Ranks or tasks, the same in every call; None for every task of the cluster.
            timeout: Seconds that the first caller gives the others; None for no limit.

        Raises:
            BarrierError: As `barrier`, but not because a participant departs: it is no longer waited for.
        """
        return self._enter(name, participants, timeout, alive=True).present

    def arrive(
        self, name: str, participants: Participants = None, timeout: float | None = None
    ) -> PendingBarrier:
        """Arrive at a barrier without waiting for the others.

        Args:
            name: The barrier's name.
            participants: Ranks or tasks, the same in every call; None for every task of the cluster.
            timeout: Seconds that the first caller gives the others; None for no limit.
        """
        tasks, limit_ms = self._checked(participants, timeout)
        return PendingBarrier(self, self._barriers.enter(name, tasks, limit_ms), tasks, timeout)

    def barrier_progress(self, name: str) -> BarrierProgress:
        """Query a barrier: its number of finished instances, and the arrived and missing participants."""
        request = pb.GetBarrierRequest(caller=self._caller, name=name)
        response = self._calls.call(
            self._link.coordination.GetBarrier, request, doing=f"asking for barrier {name!r}", mutates=False
        )
        return BarrierProgress.from_proto(response)

    def cancel_barrier(self, name: str) -> None:
        """End the barrier for all who wait at it, and for those who have still to come."""
        request = pb.CancelBarrierRequest(
            caller=self._caller,
            request_id=secrets.token_hex(16),
            name=name,
            instance=self._barriers.instance(name),
        )
        self._calls.call(self._link.coordination.CancelBarrier, request, doing=f"cancelling barrier {name!r}")

    def wait_for(self, arrival: Arrival, tasks: tuple[Task, ...], timeout: float | None) -> None:
        """Wait for the outcome of an arrival, and raise it if it is an error."""
        started = time.monotonic()
        try:
            with self._tracker.during(f"barrier {arrival.name!r}"):
                limit = math.inf if timeout is None else timeout + self._calls.patience.slack
                if not arrival.wait(min(_LOOK, self._calls.patience.announce_interval, limit)):
                    self._wait_on(arrival, timeout, limit, started)
        finally:
            self._barriers.give_up(arrival)
            if self._on_barrier is not None:
                self._on_barrier(arrival)
        if arrival.error is not None:
            raise arrival.error
        if arrival.fault is not None:
            raise arrival.fault.exception()
        # At the epoch of the last barrier of all tasks, the membership has not changed.
        if arrival.epoch != self._last_world_epoch and (not tasks or tasks == self._identity.all_tasks):
            if self._on_world_barrier is not None:
                self._on_world_barrier(arrival.epoch)
            self._last_world_epoch = arrival.epoch

    def _checked(self, participants: Participants, timeout: float | None) -> tuple[tuple[Task, ...], int]:
        """Check the arguments of a barrier; return its tasks and its limit in milliseconds."""
        limit_ms = barriers.timeout_ms(timeout)
        tasks: tuple[Task, ...] = ()
        if participants is not None:
            job_size = len(self._identity.jobs[self._identity.job])
            tasks = barriers.participant_tasks(participants, self._identity.task, job_size)
        self._session.check()
        return tasks, limit_ms

    def _enter(
        self, name: str, participants: Participants, timeout: float | None, *, alive: bool = False
    ) -> Arrival:
        tasks, limit_ms = self._checked(participants, timeout)
        if self._tracing is NO_TRACING:
            arrival = self._barriers.enter(name, tasks, limit_ms, alive=alive)
            self.wait_for(arrival, tasks, timeout)
            return arrival
        with self._tracing.barrier(name, len(tasks)) as span:
            arrival = self._barriers.enter(name, tasks, limit_ms, span.carried, alive=alive)
            try:
                self.wait_for(arrival, tasks, timeout)
            finally:
                if arrival.fault is not None:
                    span.over(arrival.fault.status)
        return arrival

    def _wait_on(self, arrival: Arrival, timeout: float | None, limit: float, started: float) -> None:
        """Wait on for a barrier's outcome, with looks at the session and lines about the missing tasks."""
        announcer = self._calls.announcer(since=started)
        number = f" (instance {arrival.instance})" if arrival.instance >= 0 else ""
        title = f"barrier {arrival.name!r}{number}"
        while True:
            self._session.check()
            if self._session.gone:
                raise self._session.unavailable(f"waiting at {title}")
            waited = time.monotonic() - started
            over = waited >= limit
            if not over and not announcer.due:
                if arrival.wait(max(0.0, min(_LOOK, announcer.left, limit - waited))):
                    return
                continue
            missing, names = self._missing(arrival)
            if arrival.settled:
                return
            if over:
                raise BarrierTimeoutError(
                    f"{title} had no outcome within this process's limit of {timeout:g} s"
                    f"{self._calls.absence()}; missing: {names}. The first caller set a longer timeout, "
                    "or none, so the others may still be waiting. Give all callers the same timeout.",
                    missing,
                )
            of = "" if timeout is None else f" of {timeout:g}"
            announcer.say(
                f"still waiting at {title}, for {waited:.0f}{of} s{self._calls.absence()}; missing: {names}"
            )

    def _missing(self, arrival: Arrival) -> tuple[tuple[Member, ...], str]:
        """Query the missing participants of a barrier; do not wait for a slow answer."""
        request = pb.GetClusterStateRequest(caller=self._caller)
        response = self._calls.try_once(self._link.coordination.GetClusterState, request, STATUS_TIMEOUT)
        if response is None:
            return (), "unknown, because the coordinator does not answer"
        state = self._learn(response)
        for status in state.barriers:
            if status.name == arrival.name and arrival.instance in (status.instance, -1):
                names = state.describe(status.missing[:_NAMED_AT_ONCE])
                if len(status.missing) > _NAMED_AT_ONCE:
                    names += f", and {len(status.missing) - _NAMED_AT_ONCE} more"
                return state.holders(status.missing), names
        return (), "unknown"


class PendingBarrier:
    """Barrier at which this process has arrived without waiting. Made by `coordination.arrive`."""

    def __init__(
        self, methods: BarrierMethods, arrival: Arrival, tasks: tuple[Task, ...], timeout: float | None
    ) -> None:
        self._methods = methods
        self._arrival = arrival
        self._tasks = tasks
        self._timeout = timeout

    @property
    def name(self) -> str:
        """The barrier's name."""
        return self._arrival.name

    @property
    def done(self) -> bool:
        """True if the barrier is over: `wait` returns, or raises, at once."""
        return self._arrival.settled

    def wait(self) -> None:
        """Wait until all participants have come.

        Raises:
            BarrierError: As `coordination.barrier`.
        """
        self._methods.wait_for(self._arrival, self._tasks, self._timeout)
