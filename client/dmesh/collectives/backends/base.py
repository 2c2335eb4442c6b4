"""Interface of a backend: it says which requests it supports, and carries each out as an operation.

A backend belongs to one group in one generation. Which of the group's backends takes a call follows from the
request alone, so all ranks choose the same one: the first that supports it. An `Operation` is a call under
way; it never waits longer than its limit, because `work.Work` owns the one loop in which a call waits,
asks the other ranks where they are, and gives up.

`dmesh.testing.backends` has a test suite that every backend must pass.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dmesh.collectives.backends.tcp.channel import Waits
from dmesh.collectives.request import Buffers, Pattern, Request
from dmesh.native import Endpoint


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Row of a backend in the table of docs/choosing-a-backend.md."""

    media: str
    """Carrier of the data."""
    arrays: str
    """Arrays that it takes."""
    operations: str
    """Operations that it carries out."""
    dtypes: str
    """Dtypes that it moves and reduces."""
    condition: str
    """Condition under which a group has it."""


class Operation(ABC):
    """A call under way in a backend. Driven by one thread; failed by any."""

    @abstractmethod
    def progress(self, seconds: float) -> bool:
        """Go on for at most so long; True once the call is complete.

        Raises:
            BaseException: What `fail` was given, or what the backend found out itself.
        """

    @abstractmethod
    def missing(self) -> tuple[int, ...]:
        """Return the ranks that the operation waits for, sorted. Any thread."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Make every pending and later `progress` raise `error`; only the first error counts. Any thread."""

    def may_still_come(self, rank: int) -> bool:
        """Return whether data of a rank that has said goodbye may still be on its way."""
        del rank
        return False

    @abstractmethod
    def revoke(self) -> None:
        """End the operation: no memory of the caller's is touched after this returns."""


class Stream(Protocol):
    """Calls of a group that are counted together: its collectives, or the transfers of one pair of ranks."""

    number: int
    """Id of the stream, the same on all ranks."""
    pair: tuple[int, int] | None
    """Positions of sender and receiver; None for collectives."""
    endpoint: Endpoint | None
    """Native endpoint, once the first call that uses it has been made."""

    @property
    def issued(self) -> int:
        """Number of the last call that was made."""

    @property
    def completed(self) -> int:
        """Number of the last call that is over."""

    def uses_endpoint(self, sequence: int) -> bool:
        """Return whether a call can go through the endpoint, or through MPI."""

    def on_complete(self, listener: Callable[[], object]) -> None:
        """Call `listener` whenever the endpoint has completed a call that it took whole."""


class Call(Protocol):
    """A call that a backend is to carry out, beside its request."""

    @property
    def stream(self) -> Stream:
        """Stream in which it is counted."""

    @property
    def sequence(self) -> int:
        """Its number there."""

    @property
    def order(self) -> int:
        """Of a transfer without a tag: its number among all transfers of its pair."""

    def ask_everybody(self) -> None:
        """Ask all other ranks where they are, because one of them has called something else."""


class Backend(ABC):
    """Carries out the calls of one group over one medium."""

    name: str
    """Short name, as in logs and docs/choosing-a-backend.md."""
    capabilities: Capabilities
    """Row in the table of docs/choosing-a-backend.md."""

    @abstractmethod
    def supports(self, request: Request, stream: Stream, sequence: int) -> bool:
        """Return whether it carries out a request: the same on all ranks that take part.

        Args:
            request: The call.
            stream: Stream in which it is counted.
            sequence: Its number there.
        """

    @abstractmethod
    def start(self, request: Request, buffers: Buffers, call: Call) -> Operation:
        """Begin a call, without waiting for other ranks.

        Args:
            request: What to do.
            buffers: The memory to do it with.
            call: Its place among the group's calls.
        """

    polls = False
    """True if nothing wakes a thread that waits for `arrival`."""

    def arrival(self, stream: Stream, sequence: int, seconds: float) -> tuple[str, int] | None:
        """Return descriptor and order of a transfer to this rank that its sender has begun, or None.

        The order is its number among all transfers from its sender, with or without a tag; 0 if unknown.

        Args:
            stream: Stream of the pair.
            sequence: The transfer's number there.
            seconds: Longest wait for it, if the medium wakes who waits.
        """
        del stream, sequence, seconds
        return None

    def close(self, *, orderly: bool) -> None:
        """Release the backend's resources without waiting.

        Args:
            orderly: Whether all calls are over, on the other ranks, too.
        """
        del orderly


class EndpointOpener(Protocol):
    """Opens a rank's native endpoints of a group."""

    def open_collectives(self) -> Endpoint:
        """Open the endpoint for collectives."""

    def open_transfers(self, sender: int, receiver: int) -> Endpoint:
        """Open the endpoint for transfers from one position to another, of which this rank is one."""


class Agreement(NamedTuple):
    """Outcome of `Exchange.agree`, the same on all members but for the counts."""

    level: int
    """The lowest level of any member."""
    against: int
    """First rank with that level."""
    sends_from: tuple[int, ...]
    """For each member, the number of the first transfer to it that neither has begun."""
    receives_from: tuple[int, ...]
    """The same for transfers from it."""


class Exchange(Protocol):
    """Messages among members of a group before its first call; all members make the same rounds."""

    ranks: Items[int]
    position: int

    def among(self, positions: Items[int]) -> Exchange:
        """Return an exchange among some of the members, while all others make as many rounds."""

    def swap(self, messages: Items[bytes]) -> Waits[list[bytes]]:
        """Send each member a message, all of equal length; return the members' messages for this one."""

    def agree(self, level: int) -> Waits[Agreement]:
        """Find out how far all members go along; on level 0 a member does not."""

    def check(self) -> None:
        """Raise the group's failure, if it has failed."""


class Search(Operation):
    """Search of a receive for its message; see `matching`."""

    request: Request
    """Then: the request of an ordinary receive."""

    @property
    @abstractmethod
    def status(self) -> object:
        """Description of the message that it matches."""

    @property
    @abstractmethod
    def polls(self) -> bool:
        """True if arrays may come of which no bell tells: it must look for them now and then."""


class Matcher(Protocol):
    """Finds what receives take; see `matching`."""

    def match(self, generation: Any, work: Any, request: Request) -> Search:
        """Begin to wait for the message of a receive."""

    def look(self, generation: Any, pattern: Pattern) -> object:
        """Return a description of the message that a receive would match now; None if there is none."""


Steps = Generator[Operation, None, None]


class Sequence(Operation):
    """Operations one after the other, as one. `steps` yields each when the one before is complete."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._error: BaseException | None = None
        self._current: Operation | None = None
        self._advance()

    def _advance(self) -> None:
        self._current = next(self._steps, None)
        if self._current is not None and self._error is not None:
            self._current.fail(self._error)

    def progress(self, seconds: float) -> bool:
        """Go on with the current operation; see `Operation.progress`."""
        deadline = time.monotonic() + seconds
        while (current := self._current) is not None:
            if not current.progress(max(deadline - time.monotonic(), 0.0)):
                return False
            current.revoke()
            self._advance()
        return True

    def missing(self) -> tuple[int, ...]:
        """Return a description of the current operation's wait."""
        return () if (current := self._current) is None else current.missing()

    def fail(self, error: BaseException) -> None:
        """Fail the current operation and all later ones."""
        self._error = self._error or error
        if (current := self._current) is not None:
            current.fail(error)

    def may_still_come(self, rank: int) -> bool:
        """Ask the current operation; see `Operation.may_still_come`."""
        return (current := self._current) is not None and current.may_still_come(rank)

    def revoke(self) -> None:
        """End the current operation and the sequence."""
        self._steps.close()
        current, self._current = self._current, None
        if current is not None:
            current.revoke()
