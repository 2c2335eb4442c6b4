"""One call of `Strategy.run`: the replicas of this client as threads, and where they meet.

A replica that calls something in which all take part waits there. When all replicas of this client wait or
have ended, the thread that called `run` compares places with the other clients (see `agreement`) and does for
all of them what they wait for. A single replica needs no thread: its own is the one that called `run`.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dmesh.distribute.agreement import Agreement, Place
from dmesh.distribute.placement import Replica
from dmesh.distribute.replica_threads import replica_threads
from dmesh.errors import CollectiveError, ReplicaError

__all__ = ["Meeting", "Step"]

_SHARE_OF_TIMEOUT = 0.8
"""Part of the time that a collective may take after which a replica of this client is absent. Less than all
of it, so that other clients, which wait in a collective meanwhile, hear which replica it was."""


@dataclass(frozen=True)
class Meeting:
    """Something in which all replicas take part."""

    text: str
    """Name of the meeting, with all in which the replicas must agree."""
    perform: Callable[[Sequence[Any]], Sequence[Any]]
    """Takes what each replica of this client brought and returns what each gets."""
    brought: Any
    """Value that this replica brought."""


_COMPUTING = Place("computing")


def _told(error: BaseException) -> str:
    """Returns an exception's type and message."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 -- of the user's class; the step must end with the exception itself
        message = "(with a message that cannot be shown)"
    return f"{type(error).__name__}: {message}".rstrip(": ")


def _raised(error: BaseException) -> Place:
    return Place("raised", _told(error))


@dataclass
class _State:
    """State of one of this client's replicas."""

    place: Place = _COMPUTING
    """Its place."""
    meeting: Meeting | None = None
    """The meeting that it waits for."""
    result: Any = None
    """Result of the meeting, or in the end of its function."""
    error: BaseException | None = None
    """Exception that its function raised."""


class Step:
    """The replicas of this client during one call of `run`.

    Args:
        replicas: Those of this client.
        agreement: With those of the others.
        timeout: Seconds that a collective may take.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        agreement: Agreement,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._agreement = agreement
        self._patience = timeout * _SHARE_OF_TIMEOUT
        self._clock = clock
        lock = threading.Lock()
        self._settled = threading.Condition(lock)  # for the thread that called `run`
        self._resumed = threading.Condition(lock)  # for the replicas
        self._states = [_State() for _ in replicas]
        self._failure: BaseException | None = None
        self._over = False

    # -- in the thread that called `run` ------------------------------------------------------------

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs the replicas, and returns what each returned.

        Raises:
            ReplicaError: A replica of another client failed, or the replicas took different ways.
            CollectiveError: A client is lost, or did not come.
            Exception: What a replica of this client raised.
        """
        try:
            if len(bodies) == 1:
                self._body(0, bodies[0])
                self._settle()
            else:
                self._run_threads(bodies)
        except BaseException as error:
            self._abandon(error)
            raise
        return [state.result for state in self._states]

    def _run_threads(self, bodies: Sequence[Callable[[], Any]]) -> None:
        for index, body in enumerate(bodies):
            replica_threads.start(
                partial(contextvars.copy_context().run, self._body, index, body),
                f"dmesh-replica-{self._replicas[index].id}",
            )
        while not self._over:
            self._await_all()
            self._settle()

    def _await_all(self) -> None:
        """Waits until all replicas of this client wait or have ended, or one is overdue."""
        deadline: float | None = None
        with self._settled:
            while running := self._running():
                if deadline is None and running < len(self._states):
                    deadline = self._clock() + self._patience
                left = None if deadline is None else deadline - self._clock()
                if left is not None and left <= 0:
                    break
                self._settled.wait(left)
            waiting = next((state.meeting for state in self._states if state.meeting is not None), None)
            where = "the end of the step" if waiting is None else waiting.text
            for state in self._states:
                if state.place is _COMPUTING:
                    state.place = Place("missing from", where)

    def _running(self) -> int:
        return sum(state.place is _COMPUTING for state in self._states)

    def _settle(self) -> None:
        """Compares places, and does what the replicas wait for, if they do."""
        states = self._states
        with self._settled:  # a replica that is overdue may come at any time
            places = [state.place for state in states]
            meetings = [state.meeting for state in states if state.meeting is not None]
            errors = [
                (state.error, replica.id) for state, replica in zip(states, self._replicas, strict=True)
            ]
        for error, replica in errors:
            if error is not None:
                error.add_note(f"raised by replica {replica}")
                self._tell(places, error)
                raise error
        difference = self._agreement.compare(places)
        if difference is not None:
            raise difference
        if not meetings:
            self._over = True
            return
        try:
            results = meetings[0].perform([meeting.brought for meeting in meetings])
        except (CollectiveError, ReplicaError):
            raise  # the other clients know
        except Exception as error:
            self._tell([_raised(error)] * len(states), error)
            raise
        with self._resumed:
            for state, result in zip(states, results, strict=True):
                state.place, state.meeting, state.result = _COMPUTING, None, result
            self._resumed.notify_all()

    def _tell(self, places: Sequence[Place], error: BaseException) -> None:
        """Lets the other clients know of an error of this one's, which is raised here in any case."""
        try:
            self._agreement.compare(places)
        except CollectiveError as obstacle:
            error.add_note(f"the other clients were not told: {obstacle}")

    def _abandon(self, error: BaseException) -> None:
        with self._resumed:
            if self._failure is None:
                self._failure = error
            self._resumed.notify_all()

    # -- in the threads of replicas --------------------------------------------------------------------------

    def _body(self, index: int, body: Callable[[], Any]) -> None:
        state = self._states[index]
        alone = len(self._states) == 1
        try:
            state.result = body()
            ended = Place("returned")
        except BaseException as error:
            if alone and (self._failure is not None or isinstance(error, KeyboardInterrupt)):
                raise  # the others know already, or must not be waited for
            state.error = error
            ended = _raised(error)
        with self._settled:
            if self._failure is None:
                self._settle_at(state, ended)
            elif alone:
                raise self._failure  # the program has caught it, but the step cannot go on

    def _settle_at(self, state: _State, place: Place, meeting: Meeting | None = None) -> None:
        """Notes where a replica is; the lock is held."""
        state.place, state.meeting = place, meeting
        # The first one starts the clock, the last one ends the wait.
        if self._running() in (0, len(self._states) - 1):
            self._settled.notify()

    def meet(self, index: int, meeting: Meeting) -> Any:
        """Waits until all replicas have come to a meeting; returns what this one gets of it.

        Args:
            index: Of the calling replica among those of this client.
            meeting: What it came for.

        Raises:
            ReplicaError: A replica failed or did not come, or the replicas came for different things.
            CollectiveError: A client is lost, or did not come.
        """
        state = self._states[index]
        with self._resumed:
            self.require_running()
            self._settle_at(state, Place("waiting in", meeting.text), meeting)
            if len(self._states) > 1:
                self._resumed.wait_for(lambda: state.meeting is None or self._failure is not None)
                self.require_running()
                return state.result
        try:
            self._settle()
        except BaseException as error:
            self._abandon(error)
            raise
        return state.result

    def require_running(self) -> None:
        """Refuses to go on in a step that has failed, whose replicas nobody waits for any more.

        Raises:
            ReplicaError: It has.
        """
        failure = self._failure
        if failure is not None:
            replicas = getattr(failure, "replicas", ())
            raise ReplicaError(f"the step of all replicas has ended: {_told(failure)}", replicas) from failure
