"""Record of one call of a collective, a transfer or a barrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Pending(Protocol):
    """A call under way. Its `str` names it to a person; it is asked for only when somebody reads it."""

    def waits_for(self) -> tuple[int, ...]:
        """Return the ranks that block the call. Any thread."""


@dataclass(slots=True)
class CallRecord:
    """One call of a collective, a transfer or a barrier. A call under way goes on changing."""

    group: str
    """Name of the group; empty for barriers of the coordination service."""
    sequence: int
    """Number of the call in its stream."""
    call: str
    """Operation, dtype, shape and arguments."""
    nbytes: int
    """Bytes of the larger of input and output."""
    called: float
    """Time of the call, in seconds of the monotonic clock."""
    began: float | None = None
    """Time when it began; later than `called` for an asynchronous call that was queued."""
    waited: float = 0.0
    """Seconds spent waiting for peers."""
    ended: float | None = None
    """Time when it ended."""
    error: str | None = None
    """The error it failed with."""
    work: Pending | None = None
    """The call itself, while it is under way."""
    stream: int = 0
    """Id of the stream that `sequence` counts in: the same on all members. 0 for barriers."""
    timed: bool = True
    """True if `waited` is known."""
    scope: object = None
    """The context in which the call was made, if a reader asks for scopes."""

    def __str__(self) -> str:
        work = self.work
        return f"{self.call}, #{self.sequence} of {self.group}" if work is None else str(work)

    def waits_for(self) -> tuple[int, ...]:
        """Return the ranks that block the call; none once it has ended. Any thread."""
        work = self.work
        return () if work is None else work.waits_for()
