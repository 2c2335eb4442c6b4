"""Diagnosis of a failed job: the first failure, and the ones that followed from it.

When one client of a job dies, the others fail too: they lose a peer, their barrier fails, the launcher ends
them. The order in which the processes end does not tell cause from consequence: a client that raises an
exception says goodbye to its peers before its interpreter has ended, and a peer that loses it may be gone
sooner. The exceptions do tell.
"""

from __future__ import annotations

import enum
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dmesh.consequences import LOST_SOMEBODY, WAITED_IN_VAIN

_HEADER = "Traceback (most recent call last):"
_GROUP_HEADER = "  + Exception Group " + _HEADER
_NATIVE_HEADER = "Fatal Python error:"
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_LONGEST_TRACEBACK = 200
_AFTER_EXCEPTION = 10
_AFTER_NATIVE_HEADER = 60
_TAIL = 5
_LONGEST_LINE = 500


@dataclass(frozen=True)
class Traceback:
    """A traceback as it was printed."""

    lines: tuple[str, ...]
    """As written; the middle of a very long one is left out."""
    exception: str
    """Last line of it: the exception's type and message; empty if it was cut off."""

    @property
    def type_name(self) -> str:
        """The exception's class without its module."""
        return self.exception.partition(":")[0].rpartition(".")[2].strip()


class ErrorTail:
    """Last traceback and last lines of a client's standard error. Bounded."""

    def __init__(self) -> None:
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._block: list[str] = []
        self._in_frames = False
        self._after = 0
        self._chained = False
        self._exception = ""

    def feed(self, line: bytes) -> None:
        """Take the next line, without its end."""
        text = line.decode("utf-8", "replace").rstrip("\r")[:_LONGEST_LINE]
        if text.strip():
            self._tail.append(text)
        if text.startswith(_CHAIN):
            self._chained = True
        if text.startswith((_HEADER, _GROUP_HEADER)):
            self._start(text)
        elif text.startswith(_NATIVE_HEADER):  # says first what happened, then where
            self._start(text)
            self._exception, self._in_frames, self._after = text, False, _AFTER_NATIVE_HEADER
        elif self._in_frames:
            self._append(text)
            if text and not text[0].isspace():
                self._exception, self._in_frames, self._after = text, False, _AFTER_EXCEPTION
        elif self._after > 0:  # the rest of a message of several lines
            self._after -= 1
            self._append(text)

    @property
    def traceback(self) -> Traceback | None:
        """The last traceback that was printed."""
        if not self._block:
            return None
        lines = list(self._block)
        while lines and not lines[-1].strip():
            lines.pop()
        return Traceback(tuple(lines), self._exception)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last few lines that are not empty."""
        return tuple(self._tail)

    def _start(self, text: str) -> None:
        if not self._chained:
            self._block = []
        self._chained, self._in_frames, self._after = False, True, 0
        self._exception = ""
        self._append(text)

    def _append(self, text: str) -> None:
        self._block.append(text)
        if len(self._block) > _LONGEST_TRACEBACK:  # keep the beginning, and the end, which says what
            del self._block[_LONGEST_TRACEBACK // 2]


class Role(enum.IntEnum):
    """Part of a client's end in the job's failure; the failure began with the lowest of a job."""

    CAUSE = 0
    ENDED_WHILE_FAILING = 1
    """Had printed an exception of its own and was ending, perhaps waiting for its peers."""
    WAITED_IN_VAIN = 2
    LOST_SOMEBODY = 3
    ENDED_BY_LAUNCHER = 4
    SUCCEEDED = 5


@dataclass(frozen=True)
class Outcome:
    """End of one client."""

    rank: int
    """Its client id."""
    pid: int
    """Its process id."""
    status: int
    """Exit code, or minus the number of the signal that killed it."""
    order: int
    """Number of clients that ended before it."""
    seconds: float
    """Seconds that it ran."""
    ended_by: signal.Signals | None = None
    """The signal that the launcher had sent to it, if any."""
    traceback: Traceback | None = None
    """Last traceback that it printed, before the launcher's signal if there was one."""
    last_lines: tuple[str, ...] = ()
    """The end of its standard error."""
    restarts: int = 0
    """Number of earlier starts of its rank."""
    host: str = ""
    """Name of its host; empty for this machine."""
    lost: str = ""
    """Reason why nothing is known of its end, with `status` made up; empty if its end was seen."""

    @property
    def role(self) -> Role:
        """Part of its end in the job's failure."""
        if self.lost:
            return Role.CAUSE
        if self.status == 0:
            return Role.SUCCEEDED
        type_name = self.traceback.type_name if self.traceback is not None else ""
        if self.ended_by is not None:
            own = type_name and type_name not in WAITED_IN_VAIN | LOST_SOMEBODY
            return Role.ENDED_WHILE_FAILING if own else Role.ENDED_BY_LAUNCHER
        if self.status > 0 and type_name in WAITED_IN_VAIN:
            return Role.WAITED_IN_VAIN
        if self.status > 0 and type_name in LOST_SOMEBODY:
            return Role.LOST_SOMEBODY
        return Role.CAUSE

    @property
    def exit_code(self) -> int:
        """Its exit code as a shell would give it: 128 + number for a signal that was not the launcher's."""
        if self.role is Role.ENDED_WHILE_FAILING:
            return 1  # what Python ends with after an exception
        return self.status if self.status >= 0 else 128 - self.status

    def how(self) -> str:
        """Return how it ended, as a part of a sentence."""
        if self.lost:
            return "was lost with the connection to its host"
        if self.ended_by is not None:
            return f"was ended by dmesh run ({self.ended_by.name})"
        if self.status >= 0:
            return f"ended with exit code {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was killed by signal {-self.status}"


def rank_failures(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the failed clients: the first failure, then the consequences in the order of their ends."""
    failed = [outcome for outcome in outcomes if outcome.role is not Role.SUCCEEDED]
    if not failed:
        return ()
    first = min(failed, key=lambda outcome: (outcome.role, outcome.order))
    rest = sorted((outcome for outcome in failed if outcome is not first), key=lambda outcome: outcome.order)
    return (first, *rest)
