"""Current activity of this process, for the clients that wait for it; cheap enough for every operation.

The thread that begins an operation records it (`with activity.TRACKER.during(...)`). It is formatted only on
request, when others have waited for a long time. A thread of the agent answers the request, also while the
main thread computes, sleeps, or runs C code that has released the GIL.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

from dmesh.v1 import common_pb2

_LONGEST_OPERATION = 200
_LONGEST_FRAME = 300
_MOST_FRAMES = 50
_OWN = str(Path(__file__).parents[1]) + "/"
_NOT_THE_USERS = (
    "/dmesh/coordination/",
    "/dmesh/collectives/",
    "/dmesh/data/",
    "/dmesh/distribute/",
    "/dmesh/mesh/",
    "/dmesh/runtime/",
    "/dmesh/tpu/",
    "/site-packages/",
    "/dist-packages/",
    "/lib/python",
    "<frozen ",
)
"""Parts of paths by which files outside of the user's own program are recognized."""


@dataclass(frozen=True, slots=True)
class Activity:
    """State of a process at the time of a status query."""

    operation: str
    """In words, such as `barrier 'loaded'`; empty if its main thread was in no operation of dmesh."""
    age: float
    """Seconds since its last progress, when it was asked."""
    stack: tuple[str, ...]
    """Its main thread's stack, innermost frame last: `FILE:LINE in FUNCTION`."""

    @property
    def where(self) -> str:
        """Position in the user's program: `train.py:31 in step`; empty if unknown."""
        for frame in reversed(self.stack):
            if not any(part in frame for part in _NOT_THE_USERS):
                return _short(frame)
        return _short(self.stack[-1]) if self.stack else ""

    def describe(self) -> str:
        """Return what follows "it is stuck": ` in barrier 'loaded' at train.py:31 in step`, or nothing."""
        operation = f" in {self.operation}" if self.operation else ""
        return operation + (f" at {self.where}" if self.stack else "")

    @classmethod
    def from_proto(cls, message: common_pb2.Activity) -> Activity:
        """Convert from the wire."""
        return cls(message.operation, message.age_ms / 1000, tuple(message.stack))


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a process, in short."""

    where: str
    """Position of its main thread in the user's program, `FILE:LINE in FUNCTION`; empty if unknown."""
    operation: str
    """In words; empty if its main thread is in no operation of dmesh."""
    age: float
    """Seconds since its last progress."""


def _short(frame: str) -> str:
    path, separator, function = frame.rpartition(" in ")
    return f"{(path or function).rpartition('/')[2]}{separator}{function if path else ''}"


class ActivitySource(Protocol):
    """A part of the program that keeps its own record of operations, such as the collectives' event ring."""

    def progress(self) -> tuple[int, float]:
        """Return how many operations have ended, and when the last did, in seconds of the monotonic clock."""

    def operations(self) -> Mapping[int, object]:
        """Return the operations under way by thread; their `str` names them to people."""


class ActivityTracker:
    """Knows what each thread of this process is waiting in, and counts its progress. Thread-safe.

    Takes no locks: the hot path is two assignments, and a signal handler may use it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._operations: dict[int, object] = {}
        self._count = 0
        self._progressed_at = clock()
        # A tuple that is replaced as a whole: other threads may be going through it.
        self._sources: tuple[weakref.ref[ActivitySource], ...] = ()

    def watch(self, source: ActivitySource) -> None:
        """Include the operations and the progress of `source`, as long as it lives. One thread at a time."""
        living = (reference for reference in self._sources if reference() is not None)
        self._sources = (*living, weakref.ref(source))

    def _living(self) -> list[ActivitySource]:
        return [source for reference in self._sources if (source := reference()) is not None]

    def _progress(self) -> list[tuple[int, float]]:
        return [source.progress() for source in self._living()]

    @property
    def progress(self) -> int:
        """A number that changes whenever the program gets on."""
        return self._count + sum(count for count, _ in self._progress())

    @property
    def waiting(self) -> bool:
        """True while a thread of this process is in an operation."""
        return bool(self._operations) or any(source.operations() for source in self._living())

    def mark(self) -> None:
        """Note that the program got on."""
        # Two threads at once may put the smaller number last: that is a change all the same.
        self._count = next(self._numbers)
        self._progressed_at = self._clock()

    def during(self, operation: object) -> During:
        """Make a context in which the calling thread is in an operation; progress is marked at its end.

        Args:
            operation: The operation; any thread may call its `str`, but only on request.
        """
        return During(self, operation)

    def begin(self, operation: object) -> object | None:
        """Note that the calling thread is in an operation; return what `end` needs. See `during`."""
        thread = threading.get_ident()
        previous = self._operations.get(thread)
        self._operations[thread] = operation
        return previous

    def end(self, previous: object | None) -> None:
        """Note the end of the calling thread's operation, with what `begin` returned. That is progress."""
        self.mark()
        if previous is None:
            self._operations.pop(threading.get_ident(), None)
        else:
            self._operations[threading.get_ident()] = previous

    def report(self) -> Activity:
        """Describe what the main thread is doing now. May be called by any thread."""
        return Activity(self._operation(), self._age(), _stack(sys._current_frames().get(_main_thread())))

    def position(self) -> Position:
        """Describe the same in short, with only the user's program of the stack. Any thread."""
        frame = sys._current_frames().get(_main_thread())
        return Position(_where(frame), self._operation(), self._age())

    def _operation(self) -> str:
        thread = _main_thread()
        found = (source.operations().get(thread) for source in self._living())
        operation = next((one for one in found if one is not None), self._operations.get(thread))
        return "" if operation is None else _clean(str(operation), _LONGEST_OPERATION)

    def _age(self) -> float:
        return max(0.0, self._clock() - self._last_progress())

    def _last_progress(self) -> float:
        return max([self._progressed_at, *(last for _, last in self._progress())])

    def report_proto(self) -> common_pb2.Activity:
        """Return the same as a protocol message."""
        report = self.report()
        return common_pb2.Activity(
            operation=report.operation, age_ms=int(report.age * 1000), stack=report.stack
        )


class During:
    """One operation of one thread; see `ActivityTracker.during`."""

    __slots__ = ("_operation", "_previous", "_tracker")

    def __init__(self, tracker: ActivityTracker, operation: object) -> None:
        self._tracker = tracker
        self._operation = operation
        self._previous: object | None = None

    def __enter__(self) -> None:
        self._previous = self._tracker.begin(self._operation)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tracker.end(self._previous)


TRACKER = ActivityTracker()
"""This process's own."""


def _main_thread() -> int:
    return threading.main_thread().ident or 0


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    frames: list[str] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append(_line(frame))
        frame = frame.f_back
    return tuple(reversed(frames))


def _where(frame: FrameType | None) -> str:
    """Return the innermost frame that is of the user's program; the innermost of all if none is."""
    innermost = "" if frame is None else _line(frame)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OWN) and not any(part in path for part in _NOT_THE_USERS):
            return _line(frame)
        frame = frame.f_back
    return innermost


def _line(frame: FrameType) -> str:
    code = frame.f_code
    # From the end: a long path says more there.
    text = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
    return _clean(text[-_LONGEST_FRAME:], _LONGEST_FRAME)


def _clean(text: str, longest: int) -> str:
    """Make text fit for the wire and for one line of a log."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable.encode("utf-8", "replace").decode()[:longest]
