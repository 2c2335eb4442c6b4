"""One call of `Strategy.run` on a client: its replicas, and their exchanges with all others.

A client's only replica runs in the thread that called `run`. Several run in threads of their own: a replica
that makes a call of all replicas waits in it. When all replicas of this client wait or have ended, the thread
that called `run` compares their states with the other clients (see `agreement`) and carries out the call for
all of them.
"""

from __future__ import annotations

import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dmesh.distribute.agreement import RETURNED, Agreement, Description, ReplicaState
from dmesh.distribute.placement import Replica
from dmesh.distribute.replica_threads import replica_threads
from dmesh.errors import CollectiveError, ReplicaError

__all__ = ["Perform", "SoloStep", "Step", "ThreadedStep"]

_SHARE_OF_TIMEOUT = 0.8
"""Share of the limit of a collective after which a replica of this client is absent. Less than all of it, so
that other clients, which wait in a collective meanwhile, learn which replica it was."""

Perform = Callable[[Sequence[Any]], Sequence[Any]]
"""Takes a value from each replica of this client, and returns the result for each."""


class Step(ABC):
    """The replicas of this client during one call of `run`.

    Args:
        replicas: The replicas of this client.
        agreement: Comparison with those of the other clients.
    """

    __slots__ = ("_agreement", "_failure", "_replicas")

    def __init__(self, replicas: Sequence[Replica], agreement: Agreement) -> None:
        self._replicas = replicas
        self._agreement = agreement
        self._failure: BaseException | None = None

    @abstractmethod
    def exchange(self, index: int, description: Description, perform: Perform, value: Any) -> Any:
        """Wait until all replicas have made the same call, carry it out, and return the replica's result.

        Args:
            index: Position of the calling replica among those of this client.
            description: Description of the call, in which all replicas must agree.
            perform: Function that carries it out.
            value: Value of the calling replica.

        Raises:
            ReplicaError: A replica failed or did not come, or the replicas made different calls.
            CollectiveError: A client was lost, or did not arrive in time.
        """

    def require_running(self) -> None:
        """Refuse to go on in a step that has failed: no other replica waits for this one.

        Raises:
            ReplicaError: It has failed.
        """
        failure = self._failure
        if failure is not None:
            replicas = getattr(failure, "replicas", ())
            raise ReplicaError(
                f"the step of all replicas has ended: {_text_of(failure)}", replicas
            ) from failure

    def _perform(self, perform: Perform, values: Sequence[Any]) -> Sequence[Any]:
        """Carry out a call on which all replicas have agreed."""
        try:
            return perform(values)
        except (CollectiveError, ReplicaError):
            raise  # the other clients get it, too
        except Exception as error:
            self._report([_raised(error)] * len(values), error)
            raise

    def _report(self, states: Sequence[ReplicaState], error: BaseException) -> None:
        """Report an error to the other clients; here it is raised in any case."""
        try:
            self._agreement.compare(states)
        except CollectiveError as obstacle:
            error.add_note(f"the other clients did not get this error: {obstacle}")


class SoloStep(Step):
    """Step of a client with one replica, in the thread that called `run`."""

    __slots__ = ()

    def run(self, body: Callable[[], Any]) -> Any:
        """Run the replica, and return its function's result.

        Raises:
            ReplicaError: A replica of another client failed, or the replicas made different calls.
            CollectiveError: A client was lost, or did not arrive in time.
            Exception: The replica's function raised it.
        """
        try:
            result = self._body(body)
            if self._failure is not None:
                raise self._failure  # the program has caught it, but the step cannot go on
            self._agreement.check(RETURNED)
        except BaseException as error:
            self._failure = self._failure or error
            raise
        return result

    def _body(self, body: Callable[[], Any]) -> Any:
        try:
            return body()
        except BaseException as error:
            # Others know a failure of the step already; an interrupted program must not wait for them.
            if self._failure is None and not isinstance(error, KeyboardInterrupt):
                error.add_note(f"raised by replica {self._replicas[0].id}")
                self._report([_raised(error)], error)
            raise

    def exchange(self, index: int, description: Description, perform: Perform, value: Any) -> Any:
        """Wait for the other clients; see `Step.exchange`."""
        if self._failure is not None:
            self.require_running()
        try:
            self._agreement.check(description)
            return self._perform(perform, (value,))[0]
        except BaseException as error:
            self._failure = error
            raise


_COMPUTING = ReplicaState("computing")


@dataclass(slots=True, eq=False)
class _Running:
    """One of several replicas of this client, as its step sees it."""

    state: ReplicaState = _COMPUTING
    """State of the replica."""
    description: Description | None = None
    """Description of the call in which it waits, or of its end."""
    perform: Perform | None = None
    """Function that carries the call out."""
    value: Any = None
    """The replica's value for the call."""
    result: Any = None
    """Result of the call, or at the end of its function."""
    error: BaseException | None = None
    """Exception that its function raised."""

    def compute(self, result: Any) -> None:
        """Go on with the result of a call."""
        self.state, self.description, self.perform, self.value = _COMPUTING, None, None, None
        self.result = result


class ThreadedStep(Step):
    """Step of a client with several replicas, each in a thread of its own.

    Args:
        replicas: The replicas of this client.
        agreement: Comparison with those of the other clients.
        timeout: Limit of a collective in seconds.
        clock: Seconds, monotonic.
    """

    __slots__ = ("_clock", "_over", "_patience", "_resumed", "_running", "_settled")

    def __init__(
        self,
        replicas: Sequence[Replica],
        agreement: Agreement,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(replicas, agreement)
        self._patience = timeout * _SHARE_OF_TIMEOUT
        self._clock = clock
        lock = threading.Lock()
        self._settled = threading.Condition(lock)  # for the thread that called `run`
        self._resumed = threading.Condition(lock)  # for the replicas
        self._running = [_Running() for _ in replicas]
        self._over = False

    # -- in the thread that called `run` ------------------------------------------------------------

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the replicas, and return their functions' results.

        Raises:
            ReplicaError: A replica of another client failed, or the replicas made different calls.
            CollectiveError: A client was lost, or did not arrive in time.
            Exception: A replica of this client raised it.
        """
        try:
            for index, body in enumerate(bodies):
                replica_threads.start(
                    partial(contextvars.copy_context().run, self._body, index, body),
                    f"dmesh-replica-{self._replicas[index].id}",
                )
            while not self._over:
                self._await_all()
                self._settle()
        except BaseException as error:
            with self._resumed:
                self._failure = error
                self._resumed.notify_all()
            raise
        return [replica.result for replica in self._running]

    def _await_all(self) -> None:
        """Wait until all replicas of this client wait or have ended, or one is overdue."""
        deadline: float | None = None
        with self._settled:
            while computing := self._count_computing():
                if deadline is None and computing < len(self._running):
                    deadline = self._clock() + self._patience
                left = None if deadline is None else deadline - self._clock()
                if left is not None and left <= 0:
                    break
                self._settled.wait(left)
            waiting = next((one.state for one in self._running if one.perform is not None), None)
            where = "the end of the step" if waiting is None else waiting.text
            for one in self._running:
                if one.state is _COMPUTING:
                    one.state, one.description = ReplicaState("missing from", where), None

    def _count_computing(self) -> int:
        return sum(one.state is _COMPUTING for one in self._running)

    def _settle(self) -> None:
        """Compare the replicas' states, and carry out the call in which they wait, if any."""
        with self._settled:  # a replica that is overdue may come at any time
            states = [one.state for one in self._running]
            first = self._running[0].description
            alike = first is not None and all(one.description is first for one in self._running)
            perform = self._running[0].perform
            values = [one.value for one in self._running]
            errors = [(one.error, own.id) for one, own in zip(self._running, self._replicas, strict=True)]
        for error, replica in errors:
            if error is not None:
                error.add_note(f"raised by replica {replica}")
                self._report(states, error)
                raise error
        if alike and first is not None:
            self._agreement.check(first)
        elif (difference := self._agreement.compare(states)) is not None:
            raise difference
        if perform is None:
            self._over = True
            return
        results = self._perform(perform, values)
        with self._resumed:
            for one, result in zip(self._running, results, strict=True):
                one.compute(result)
            self._resumed.notify_all()

    # -- in the threads of replicas --------------------------------------------------------------------------

    def _body(self, index: int, body: Callable[[], Any]) -> None:
        own = self._running[index]
        description: Description | None = RETURNED
        try:
            own.result = body()
            state = RETURNED.state
        except BaseException as error:  # noqa: BLE001 -- raised by `run`
            own.error = error
            state, description = _raised(error), None
        with self._settled:
            if self._failure is None:
                self._wait_at(own, state, description)

    def _wait_at(self, own: _Running, state: ReplicaState, description: Description | None) -> None:
        """Note that a replica waits or has ended; the lock is held."""
        own.state, own.description = state, description
        # The first one starts the clock, the last one ends the wait.
        if self._count_computing() in (0, len(self._running) - 1):
            self._settled.notify()

    def exchange(self, index: int, description: Description, perform: Perform, value: Any) -> Any:
        """Wait for all replicas; see `Step.exchange`."""
        own = self._running[index]
        with self._resumed:
            self.require_running()
            own.perform, own.value = perform, value
            self._wait_at(own, description.state, description)
            self._resumed.wait_for(lambda: own.perform is None or self._failure is not None)
            self.require_running()
            return own.result


def _text_of(error: BaseException) -> str:
    """Return an exception's type and message."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 -- of the user's class; the step must end with the exception itself
        message = "(with a message that cannot be shown)"
    return f"{type(error).__name__}: {message}".rstrip(": ")


def _raised(error: BaseException) -> ReplicaState:
    return ReplicaState("raised", _text_of(error))
