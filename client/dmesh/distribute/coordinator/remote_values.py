"""Results of scheduled functions, and per-worker values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

from dmesh.coordination.waiting import Bell
from dmesh.errors import StrategyError, WaitTimeoutError

__all__ = ["PerWorkerDataset", "PerWorkerValue", "RemoteValue"]

Wait = Callable[[Callable[[], bool], float | None], bool]
"""Waits until a condition holds, for some seconds at most; returns whether it does."""


class RemoteValue:
    """Future of a function that `ClusterCoordinator.schedule` scheduled."""

    def __init__(self, what: str, bell: Bell, wait: Wait) -> None:
        self._what = what
        self._bell = bell
        self._wait = wait
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the function to end, and return its result.

        Args:
            timeout: Seconds to wait; None for no limit.

        Raises:
            RemoteFunctionError: The function raised an error; this error is also of its built-in type.
            FunctionCancelledError: It was not run, because another one had failed.
            WaitTimeoutError: It has not ended in time.
        """
        if not self._wait(lambda: self._done, timeout):
            raise WaitTimeoutError(f"{self._what} has not ended within {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._value

    get = fetch

    def set_value(self, value: Any) -> None:
        """Take the result."""
        self._value, self._done = value, True
        self._bell.ring()

    def set_error(self, error: BaseException) -> None:
        """Set the error that `fetch` raises."""
        self._error, self._done = error, True
        self._bell.ring()

    def __repr__(self) -> str:
        state = "not ready" if not self._done else "ready" if self._error is None else repr(self._error)
        return f"<RemoteValue of {self._what}: {state}>"


class PerWorkerValue:
    """A per-worker value, such as an iterator, as an argument of scheduled functions.

    Args:
        name: Its name on the workers.
        payload: The function that makes it, encoded.
    """

    def __init__(self, name: str, payload: bytes) -> None:
        self.name = name
        self.payload = payload

    def __next__(self) -> NoReturn:
        raise StrategyError(
            "an iterator of a per-worker dataset is on the workers: pass it to a scheduled function, which "
            "calls next() on it"
        )


class PerWorkerDataset:
    """A dataset that each worker creates; returned by `ClusterCoordinator.create_per_worker_dataset`.

    Args:
        make: Makes a value of the workers' iterators.
    """

    def __init__(self, make: Callable[[], PerWorkerValue]) -> None:
        self._make = make

    def __iter__(self) -> PerWorkerValue:
        """Return a per-worker iterator, as an argument for `schedule`."""
        return self._make()


def forever(timeout: float | None) -> float:
    """Return a time-out as a number of seconds."""
    return math.inf if timeout is None else timeout
