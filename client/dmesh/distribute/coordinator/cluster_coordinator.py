"""Coordinator of a cluster: schedules functions on the workers, and collects their results."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from dmesh._locks import Lock
from dmesh.collectives.object_encoding import decode, encode
from dmesh.collectives.objects import Serializer
from dmesh.coordination.activity import TRACKER
from dmesh.coordination.agent_source import current_agent
from dmesh.coordination.members import Member
from dmesh.coordination.waiting import Bell
from dmesh.distribute.coordinator.channel import Channel
from dmesh.distribute.coordinator.dispatch import Assignment, Closure, Dispatch, WorkerId
from dmesh.distribute.coordinator.messages import Encoding, decode_error
from dmesh.distribute.coordinator.remote_values import (
    PerWorkerDataset,
    PerWorkerValue,
    RemoteValue,
    forever,
)
from dmesh.errors import (
    CoordinatorUnavailableError,
    DMeshError,
    FunctionCancelledError,
    PeerLostError,
    StrategyError,
    StrategyTypeError,
    StrategyValueError,
)
from dmesh.structure import flatten, map_structure

__all__ = ["ClusterCoordinator"]

MOST_QUEUED = 100_000
"""Functions that may wait; `schedule` waits while there are as many."""


class ClusterCoordinator:
    """Coordinator that runs functions on the other clients, which call `run_worker`.

    ```python
    with dmesh.distribute.coordinator.ClusterCoordinator() as coordinator:
        results = [coordinator.schedule(train_on, args=(name,)) for name in names]
        coordinator.join()
        losses = coordinator.fetch(results)
    ```

    A function runs on whichever worker is free, one at a time on each. If its worker is lost, it runs again
    on another one: at least once, and maybe more often. If it raises, the next call of `schedule`, `join` or
    `done` raises that, and functions that wait are cancelled.

    Functions, arguments and results are small messages of the coordination service (1 MiB, unless it
    is set otherwise): they say which files to read, say, and large arrays go through files or collectives.

    Args:
        strategy: Kept for `strategy`; without influence, as no task holds variables for others.
        serializer: Encoding of functions, arguments and results, as for `dmesh.collectives.send_object`; the
            workers need the same. None: functions are found by name, values are plain ones.

    Raises:
        NotInitializedError: `dmesh.initialize_accelerator_system` has not been called.
        StrategyValueError: There is a coordinator in this cluster already.
        CollectiveTypeError: The serializer is none.
    """

    def __init__(self, strategy: Any = None, *, serializer: Serializer | None = None) -> None:
        self._strategy = strategy
        self._encoding = Encoding(serializer)
        self._agent = current_agent()
        self._client = self._agent.identity.task.index
        self._lock = Lock()
        self._bell = Bell()
        self._dispatch = Dispatch()
        # Ignore results for an earlier coordinator, whose functions a worker may still run.
        self._numbers = itertools.count(secrets.randbits(48))
        self._fatal: BaseException | None = None
        """Error that ended it before it was closed."""
        self._closed = False
        self._channel = Channel(
            self._agent, self._on_ready, self._on_gone, self._on_result, on_failure=self._fail
        )
        self._channel.start()
        self._agent.add_departure_listener(self._on_departure)

    # Public methods ----------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Any:
        """The strategy that was given."""
        return self._strategy

    @property
    def workers(self) -> tuple[int, ...]:
        """Client ids of the present workers."""
        with self._lock:
            return tuple(sorted(worker.client for worker in self._dispatch.workers))

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Have a worker run a function; return at once.

        Args:
            fn: A function at the top level of the program or of a module that the workers name; any that
                the serializer encodes, if there is one.
            args: Its arguments. An iterator of a per-worker dataset is replaced by the worker's own.
            kwargs: Its keyword arguments.

        Returns:
            Its result, which is not there yet.

        Raises:
            RemoteFunctionError: A function that was scheduled before has failed; it is also the built-in
                error that the function raised. Those that waited are cancelled, none runs any more.
            StrategyTypeError: The function has no name by which a worker finds it.
            CollectiveTypeError: An argument is no plain value.
            StrategyValueError: An argument is a `RemoteValue`.
            PeerLostError: All other clients are gone.
        """
        payload, resources = self._encoded(fn, args or (), kwargs or {})
        self._check()
        self._raise_error()
        self._wait(lambda: len(self._dispatch.queue) < MOST_QUEUED, None)
        what = getattr(fn, "__qualname__", repr(fn))
        closure = Closure(
            next(self._numbers), what, payload, RemoteValue(what, self._bell, self._wait), resources
        )
        with self._lock:
            self._check()
            self._begin(self._dispatch.submit(closure))
        return closure.result  # type: ignore[return-value]

    def join(self, timeout: float | None = None) -> None:
        """Wait until all scheduled functions have ended.

        Args:
            timeout: Seconds to wait; None for no limit.

        Raises:
            RemoteFunctionError: One has failed, as for `schedule`.
            PeerLostError: All other clients are gone.
            StrategyError: The time ran out; the functions still run.
        """
        self._check()
        if not self._wait(lambda: self._dispatch.error is not None or self._dispatch.idle, timeout):
            raise StrategyError(f"after {timeout:g} s: {self._state()}")
        self._raise_error()

    def done(self) -> bool:
        """Return whether all scheduled functions have ended.

        Raises:
            RemoteFunctionError: One has failed, as for `schedule`.
        """
        self._check()
        self._raise_error()
        with self._lock:
            return self._dispatch.idle

    def fetch(self, val: Any) -> Any:
        """Wait for results, and return them.

        Args:
            val: A `RemoteValue`, or a structure (list, tuple, dict) with some.

        Returns:
            The same structure with the results of the functions; other values as they are.

        Raises:
            RemoteFunctionError: A function has failed.
            FunctionCancelledError: A function was cancelled.
        """
        return map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """Have each worker make a dataset for itself, when it first needs it.

        Args:
            dataset_fn: Returns a dataset, or another iterable; sent as the functions of `schedule` are. It
                may ask for `experimental_get_current_worker_index()`.

        Returns:
            An object whose iterator is an argument for `schedule`. A worker that replaces a lost
            one begins at the beginning.

        Raises:
            StrategyTypeError: The function has no name by which a worker finds it.
        """
        payload = self._encoding.encode_call(dataset_fn, (), {})
        return PerWorkerDataset(lambda: PerWorkerValue(secrets.token_hex(8), payload))

    def close(self) -> None:
        """End the workers, and cancel functions that wait. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._dispatch.draining = True
        self._cancel(FunctionCancelledError("the coordinator was closed before it was run"))
        self._channel.close(in_order=self._fatal is None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        """Close it."""
        self.close()
        return False

    # Waiting and failing ------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise StrategyError("the coordinator is closed")
        if self._fatal is not None:
            raise self._fatal

    def _wait(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition holds; log periodically what is missing."""
        if condition():
            return True
        self._give_up_if_alone()
        deadline = time.monotonic() + forever(timeout)
        announcer = self._agent.announcer()
        with TRACKER.during("waiting for scheduled functions"):
            while not self._bell.wait_for(
                lambda: condition() or self._fatal is not None,
                max(0.0, min(deadline - time.monotonic(), announcer.left)),
            ):
                if time.monotonic() >= deadline:
                    return False
                if announcer.due:
                    announcer.say(f"still waiting: {self._state()}")
        if self._fatal is not None:
            raise self._fatal
        return True

    def _state(self) -> str:
        with self._lock:
            running, waiting = self._dispatch.running, len(self._dispatch.queue)
            some = bool(self._dispatch.workers)
        if not some:
            return (
                f"{waiting} functions are scheduled, but no worker is there: the other clients call "
                "dmesh.distribute.coordinator.run_worker()"
            )
        where = ", ".join(f"client {worker.client} runs {closure.what}" for worker, closure in running[:16])
        return f"{where or 'no worker runs anything'}; {waiting} more functions are scheduled"

    def _raise_error(self) -> None:
        """Cancel waiting functions, wait for running ones, and raise the first error."""
        with self._lock:
            error, self._dispatch.error = self._dispatch.error, None
            if error is None:
                return
            self._dispatch.draining = True
        try:
            self._wait(lambda: not self._dispatch.running, None)
        finally:
            with self._lock:
                cancelled = self._dispatch.cancel()
                self._dispatch.draining = self._closed
                self._dispatch.error = None
        for closure in cancelled:
            closure.result.set_error(
                FunctionCancelledError(
                    f"{closure.what} was not run, because another function failed: {error}"
                )
            )
        raise error

    def _cancel(self, error: BaseException) -> None:
        """Set an error as the result of all unfinished functions."""
        with self._lock:
            left = self._dispatch.cancel() + [closure for _, closure in self._dispatch.running]
        for closure in left:
            closure.result.set_error(error)
        self._bell.ring()

    def _fail(self, error: BaseException) -> None:
        """Shut down: no more functions can run."""
        with self._lock:
            if self._closed or self._fatal is not None:
                return
            self._fatal = error
            self._dispatch.draining = True
        self._cancel(error)

    def _on_departure(self, member: Member) -> None:
        if not self._closed:
            self._give_up_if_alone()

    def _give_up_if_alone(self) -> None:
        """Fail if functions are waiting and no client is left to run them."""
        with self._lock:
            if self._closed or self._dispatch.workers or self._dispatch.idle:
                return
        if self._agent.cluster_settings.rejoin:
            return
        state = self._agent.cluster_state()
        others = [member for member in state.members if member.index != self._client]
        if state.vacant or any(not member.state.departed for member in others):
            return
        reasons = "; ".join(
            f"client {member.index}: {member.reason or 'it has left'}" for member in others[:16]
        )
        lost = others[0].index if others else -1
        self._fail(
            PeerLostError(f"no client is left to run functions: {reasons or 'there is no other one'}", lost)
        )

    # Messages -----------------------------------------------------------------------------------------------

    def _encoded(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bytes, tuple[tuple[int | str, str, bytes], ...]]:
        """Return a serialized call, and its per-worker arguments."""
        if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
            raise StrategyTypeError(
                "schedule() takes the arguments as a tuple and the keyword arguments as a dict, got "
                f"{type(args).__name__} and {type(kwargs).__name__}"
            )
        for leaf in flatten([*args, *kwargs.values()]):
            if isinstance(leaf, RemoteValue):
                raise StrategyValueError(f"{leaf!r} is no argument: fetch() returns the result itself")
        items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        own = {at: item for at, item in items if isinstance(item, PerWorkerValue)}
        payload = self._encoding.encode_call(
            fn,
            [None if at in own else item for at, item in enumerate(args)],
            {at: None if at in own else item for at, item in kwargs.items()},
        )
        return payload, tuple((at, item.name, item.payload) for at, item in own.items())

    def _begin(self, assignments: list[Assignment]) -> None:
        for worker, closure in assignments:
            self._channel.later(lambda worker=worker, closure=closure: self._send_call(worker, closure))  # type: ignore[misc]

    def _send_call(self, worker: WorkerId, closure: Closure) -> None:
        message = {
            "number": closure.number,
            "what": closure.what,
            "index": worker.client - (worker.client > self._client),
            "payload": closure.payload,
            "resources": [list(resource) for resource in closure.resources],
        }
        try:
            self._channel.send(worker, "call", encode(message))
        except CoordinatorUnavailableError:
            raise
        except DMeshError as error:  # it is too large, say
            self._finish(worker, closure.number, None, error)

    def _on_ready(self, worker: WorkerId) -> None:
        with self._lock:
            self._begin(self._dispatch.ready(worker))
        self._bell.ring()

    def _on_gone(self, worker: WorkerId) -> None:
        with self._lock:
            self._begin(self._dispatch.gone(worker))
        self._give_up_if_alone()
        self._bell.ring()

    def _on_result(self, worker: WorkerId, message: bytes) -> None:
        reply = decode(message)
        try:
            result = None if "error" in reply else self._encoding.decode_value(reply["value"])
            error = None
        except Exception as failure:  # noqa: BLE001 -- the serializer's; `fetch` raises it
            result, error = None, failure
        self._finish(worker, reply["number"], result, error or reply.get("error"))
        self._bell.ring()

    def _finish(self, worker: WorkerId, number: int, value: Any, error: Any) -> None:
        """Set the outcome of a function: its result, an error, or a worker's description of one."""
        with self._lock:
            closure, begun = self._dispatch.finished(worker, number)
            if closure is None:
                return
            if isinstance(error, Mapping):
                error = decode_error(closure.what, worker.client, error)
            if error is not None:
                self._dispatch.fail(error)
            self._begin(begun)
        if error is None:
            closure.result.set_value(value)
        else:
            closure.result.set_error(error)
