"""A call's wait for other ranks: when it asks them, announces itself, and gives up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from typing import Protocol

from dmesh.collectives.events import CallRecord
from dmesh.collectives.failure import Failure
from dmesh.collectives.position_query import PositionQuery
from dmesh.collectives.services import Services

_LAST_LOOKS = 0.02
"""Seconds between looks for the last answers, when time has run out."""
Attempt = Callable[[float], bool]
"""Goes on for at most so many seconds; returns whether that was all."""


class Waiting(Protocol):
    """A call that waits; see `work.Work`."""

    record: CallRecord
    timeout: float

    @property
    def query(self) -> PositionQuery:
        """Questions to the other ranks."""

    def check(self) -> None:
        """Raise the group's failure, if it has failed."""

    def fail(self, failure: Failure) -> None:
        """Fail the group, and raise its failure."""

    def look_for_departures(self) -> None:
        """Fail the group if the call waits for a rank that has left."""


class Wait:
    """Wait of a call: when it asks the other ranks, announces itself, and gives up."""

    def __init__(self, work: Waiting, services: Services, began: float, deadline: float) -> None:
        policy = services.wait_policy
        self._work, self._services, self._deadline = work, services, deadline
        after = policy.ask_after
        self._asks = chain(after, count((after[-1] if after else 0.0) + policy.ask_every, policy.ask_every))
        self._began = began
        self._ask_at = began + next(self._asks)
        self._announce_at = began + policy.announce_every
        self._report_at = began + (services.stuck_after if services.stuck_after > 0 else float("inf"))
        self._reported = False
        self._look_at = began + policy.look_every

    @property
    def left(self) -> float:
        """Seconds until the next `look`."""
        at = min(self._ask_at, self._announce_at, self._report_at, self._deadline, self._look_at)
        return max(at - self._services.clock(), 0.0)

    def look(self, attempt: Attempt) -> bool:
        """Carry out due actions after a failed attempt; return True if a last attempt has succeeded.

        Raises:
            CollectiveError: The group has failed.
        """
        work, services = self._work, self._services
        work.check()
        work.look_for_departures()
        policy, time = services.wait_policy, services.clock()
        # A rank that waits for this one in a barrier will never make the call.
        if (failure := work.query.skipped(self._deadline - time)) is not None:
            work.fail(failure)
        if time >= self._deadline:
            self._time_out(attempt)
            return True
        if time >= self._ask_at:
            work.query.ask()
            self._ask_at = self._began + next(self._asks)
        if time >= self._announce_at:
            self._announce_at += policy.announce_every
            policy.announce(work.query.waiting_text(time - self._began))
        if time >= self._report_at:
            self._report_at = time + services.stuck_after
            self._reported = True
            services.events.waiting(work.record, work.query.blocking(), time - self._began)
        self._look_at = time + policy.look_every
        return False

    def _time_out(self, attempt: Attempt) -> None:
        """Query all ranks once more, so that the error is exact, and fail the group."""
        work, services = self._work, self._services
        query = work.query
        query.ask(all_ranks=True)
        give_up = services.clock() + services.wait_policy.answers_within
        while services.clock() < give_up and query.unanswered():
            if attempt(_LAST_LOOKS):
                return
            work.check()
        work.fail(query.timed_out(work.timeout))

    def end(self) -> None:
        """Report that the wait is over."""
        record = self._work.record
        if self._reported:
            self._services.events.waiting(record, (), 0.0)
        record.waited += self._services.clock() - self._began
