"""Failure of a group: one value that every member gets, and the exceptions that are made of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dmesh.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError


class Cause(enum.Enum):
    """Kind of failure."""

    MISMATCH = "mismatch"
    """Ranks called different collectives."""
    TIMEOUT = "timeout"
    """A rank's time ran out; `Failure.ranks` are those it waited for."""
    LOST = "lost"
    """A member died or failed; `Failure.ranks` is that member."""
    LEFT = "left"
    """A call needed a member whose program had ended normally; `Failure.ranks` is that member.

    The cluster has not lost it: groups whose calls do not need it go on.
    """
    BROKEN = "broken"
    """A rank could not go on, for a reason of its own."""
    CLOSED = "closed"
    """This client has shut its collectives down."""
    RENEWED = "renewed"
    """The generation is over: lost clients have been replaced, and all groups begin anew."""
    JOINING = "joining"
    """This client has replaced a lost one, and has not passed a barrier with the others yet."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first cause of a group's failure."""

    cause: Cause
    message: str
    """Description for people, the same on every rank."""
    ranks: tuple[int, ...] = ()
    reason: str = ""
    """For a loss: how it was detected. For a skipped call: the barrier in which that rank waits;
    `ranks` begins with the rank that has made the call."""

    def during(self, what: str) -> CollectiveError:
        """Return a new exception for a call under way, such as `barrier(), collective #3 of group world`."""
        if self.cause in (Cause.MISMATCH, Cause.TIMEOUT):
            return self._error(self.message)
        return self._error(f"{self.message} (during {what})")

    def afterwards(self, group: str) -> CollectiveError:
        """Return a new exception for a call on a group that failed before."""
        if self.cause in (Cause.CLOSED, Cause.RENEWED, Cause.JOINING):
            return self._error(self.message)
        if self.cause in (Cause.LOST, Cause.LEFT):
            advice = "shrink() returns a group of the members that are left, if all of them call it."
        else:
            advice = "reset() makes it work again, if all its members call it."
        return self._error(
            f"{group} has failed and cannot be used any more: {self.message.rstrip('.')}. {advice}"
        )

    def _error(self, message: str) -> CollectiveError:
        # A new one each time: an exception that several threads raise would collect all their tracebacks.
        match self.cause:
            case Cause.MISMATCH:
                return CollectiveMismatchError(message)
            case Cause.TIMEOUT:
                return CollectiveTimeoutError(message, self.ranks)
            case Cause.LOST | Cause.LEFT:
                return PeerLostError(message, self.ranks[0] if self.ranks else -1)
            case _:
                return CollectiveError(message)
