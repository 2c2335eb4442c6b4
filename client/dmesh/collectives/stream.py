"""Calls of a group that are counted together: its collectives, or the transfers of one pair of ranks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from dmesh.collectives.failure import Failure
from dmesh.collectives.request import Descriptor, text_of
from dmesh.coordination.waiting import Bell
from dmesh.native import Endpoint

_SENT = 64
"""Transfers whose descriptors are kept: the receiver may come to one when its sender is several further."""


class UnderWay(Protocol):
    """A call of the stream that is not over."""

    sequence: int
    """Its number."""
    text: str
    """Wire descriptor."""
    record: Any
    """Its entry in the flight recorder."""

    @property
    def started(self) -> bool:
        """True if a backend carries it out already."""

    def waits_for(self) -> tuple[int, ...]:
        """Return the ranks that it waits for."""

    def abort(self, failure: Failure) -> None:
        """End it with the group's failure."""

    def answered(self, rank: int, answer: Any) -> None:
        """Take another rank's answer to where it is."""


class Stream:
    """Sequence numbers of a group's collectives, or of the transfers from one rank to another.

    In a group with native endpoints, calls from a certain number on go through an endpoint, one after the
    other: an endpoint carries one call at a time. Guarded by the generation's lock.

    Args:
        number: Id of the stream in messages, the same on all ranks.
        pair: Positions of sender and receiver; None for collectives.
    """

    def __init__(self, number: int, pair: tuple[int, int] | None) -> None:
        self.number = number
        self.pair = pair
        self.calls: dict[int, UnderWay] = {}
        """Calls under way that Python carries out, by number."""
        self.callers: set[int] = set()
        """Ids of the threads that have made calls; those of fast calls may be missing."""
        self.endpoint: Endpoint | None = None
        """Native endpoint, once the first call that uses it has been made."""
        self._issued = 0
        self._completed = 0
        self._last = ""
        self._sent: deque[tuple[int, str]] = deque(maxlen=_SENT)
        self._first = 0  # number of the first call that goes through an endpoint; 0: none does
        self._open: Callable[[], Endpoint] | None = None
        self._allowed = 1 if pair is None else sys.maxsize  # last call that may begin before `settle`
        self._bell = Bell()
        self._waiting = 0
        self._listener: Callable[[], object] | None = None

    @property
    def issued(self) -> int:
        """Number of the last call that was made."""
        return self._issued if self.endpoint is None else self.endpoint.issued

    @property
    def completed(self) -> int:
        """Number of the last call that is over."""
        return self._completed if self.endpoint is None else self.endpoint.completed

    def last(self) -> tuple[int, str]:
        """Return number and descriptor of the last call that is over; no text if it is forgotten."""
        number = self.completed
        return number, self._last if number == self._completed else self.recorded(number)[0]

    def recorded(self, number: int) -> tuple[str, int]:
        """Return descriptor and bytes of a call: of a transfer, or one that the endpoint took.

        An empty text and 0 if it is forgotten, and 0 if the endpoint did not take it.
        """
        recent = () if self.endpoint is None else self.endpoint.recent()
        return next(
            ((text_of(Descriptor(*found)), nbytes) for at, found, nbytes, *_ in recent if at == number),
            (dict(self._sent).get(number, ""), 0),
        )

    def uses_endpoint(self, number: int) -> bool:
        """Return whether a call can go through the endpoint, or through MPI."""
        return 0 < self._first <= number

    def issue(self) -> int:
        """Count a call, and return its number."""
        if self._open is not None and self._first == self._issued + 1:
            self._open_endpoint()
        if self.endpoint is not None:
            return self.endpoint.next_sequence()
        self._issued += 1
        return self._issued

    def complete(self, number: int, text: str) -> None:
        """Note that a call is over; to be followed by `wake`, without the lock."""
        if number > self._completed:
            self._last, self._completed = text, number
            if self.pair is not None:
                self._sent.append((number, text))
            if self.endpoint is not None and number > self.endpoint.completed:
                self.endpoint.completed = number

    def freeze(self) -> int:
        """Let no later call begin before `settle`; return the number of the last one that may."""
        self._allowed = self._issued
        return self._issued

    def settle(self, first: int, open_: Callable[[], Endpoint] | None) -> None:
        """Let calls begin: the group has chosen its backends.

        Args:
            first: Number of the first call that goes through an endpoint, or MPI; 0 if none does.
            open_: Opens the endpoint, if there is one.
        """
        self._first, self._open = first, open_
        if open_ is not None and self._issued >= first - 1:
            self._open_endpoint()
        self._allowed = sys.maxsize
        self._bell.ring()

    def _open_endpoint(self) -> None:
        assert self._open is not None
        endpoint = self._open()
        endpoint.issued, endpoint.completed = self._issued, self._first - 1
        endpoint.on_complete = self._listener
        self.endpoint, self._open = endpoint, None

    def wake(self) -> None:
        """Make the calls that wait for their turn look again."""
        if self._waiting:
            self._bell.ring()

    def ready(self, number: int, *, alone: bool = False) -> bool:
        """Return whether a call may begin now.

        Args:
            number: Of the call.
            alone: Whether all earlier calls must be over, in any case.
        """
        if alone and min(tuple(self.calls), default=number) < number:
            return False
        if not self.uses_endpoint(number):
            return number <= self._allowed
        return self.completed >= number - 1

    def wait(self, number: int, failed: Callable[[], bool], seconds: float, *, alone: bool = False) -> bool:
        """Wait until a call may begin; False if that takes longer, or the group has failed."""
        if self.ready(number, alone=alone):
            return True
        self._waiting += 1
        try:
            if self.endpoint is not None:
                self.endpoint.on_complete = self._wake_and_notify if self._listener else self._bell.ring
            self._bell.wait_for(lambda: failed() or self.ready(number, alone=alone), seconds)
        finally:
            self._waiting -= 1
            if self.endpoint is not None and not self._waiting:
                self.endpoint.on_complete = self._listener
        return self.ready(number, alone=alone)

    def on_complete(self, listener: Callable[[], object]) -> None:
        """Call `listener`, too, whenever the endpoint has completed a call that it took whole."""
        self._listener = listener if self._listener is None else partial(_both, self._listener, listener)
        if self.endpoint is not None and not self._waiting:
            self.endpoint.on_complete = self._listener

    def _wake_and_notify(self) -> None:
        self._bell.ring()
        assert self._listener is not None
        self._listener()


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()
