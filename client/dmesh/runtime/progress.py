"""Progress of a program's loops: a line on rank 0's terminal, and a few numbers for observers.

A step costs an addition and, on rank 0, a look at the clock. The numbers go to the coordination server with
the progress reports that clients send with their heartbeats anyway.
"""

from __future__ import annotations

import operator
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TextIO, TypeVar, overload

from dmesh._locks import Lock
from dmesh._log import announce
from dmesh.coordination.agent_source import opened_agent
from dmesh.errors import ArgumentTypeError, ConfigurationError
from dmesh.runtime import context, ranks
from dmesh.v1 import progress_pb2 as pb

Item = TypeVar("Item")

_WINDOW = 30.0
"""Seconds over which the speed is measured."""
_REDRAW = 0.2
"""Seconds between two updates of a line on a terminal."""
_FIRST_LINE, _NEXT_LINES = 10.0, 30.0
"""Seconds until the first line where there is no terminal, and from one to the next."""
_WORTH_A_LINE = 1.0
"""Seconds that a loop must take to get a last line where there is no terminal."""
_MOST_LOOPS = 4
_LONGEST_NAME, _LONGEST_UNIT = 100, 20
_BAR = 20


class Speed:
    """Steps per second over the last half minute."""

    def __init__(self, began: float) -> None:
        self._samples = deque([(began, 0)])

    def at(self, now: float, done: int) -> float:
        """Take note that so many steps are done; return the speed, 0.0 if there is none yet."""
        samples = self._samples
        while len(samples) > 1 and samples[1][0] <= now - _WINDOW:
            samples.popleft()
        then, before = samples[0]
        if now - samples[-1][0] >= _WINDOW / 16:
            samples.append((now, done))
        return (done - before) / (now - then) if now > then and done > before else 0.0


class Progress(Generic[Item]):
    """A loop that says how far it is; see `dmesh.progress`. Also a context, for loops without an iterable."""

    def __init__(
        self,
        items: Iterable[Item] | None,
        total: int | None,
        name: str,
        unit: str,
        show: bool,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
    ) -> None:
        self.total = total
        """Number of steps in all; None if unknown."""
        self.name = name
        """Name of the loop."""
        self.unit = unit
        """Unit of the steps, in the plural."""
        self.done = 0
        """Number of steps that are done."""
        self._items = items
        self._clock = clock
        self._began = clock()
        self._ended: float | None = None
        self._reported = Speed(self._began)
        self._line = _Line(self, clock, stream or sys.stderr) if show else None
        loops = _loops()
        if loops is not None:
            loops.add(self)

    @property
    def elapsed(self) -> float:
        """Seconds since the loop began, or that it has taken."""
        return (self._clock() if self._ended is None else self._ended) - self._began

    @property
    def over(self) -> bool:
        """True after the end of the loop."""
        return self._ended is not None

    def __iter__(self) -> Iterator[Item]:
        if self._items is None:
            raise ArgumentTypeError("this progress has no iterable: call update() for each step")
        if self.over:
            raise ConfigurationError("this loop is over; call dmesh.progress again for another one")
        clock, line = self._clock, self._line
        with self:
            for item in self._items:
                yield item
                self.done += 1
                if line is not None and clock() >= line.due:
                    line.show()

    def update(self, steps: int = 1) -> None:
        """Take note that steps are done.

        Args:
            steps: How many more.

        Raises:
            ArgumentTypeError: It is no integer.
        """
        try:
            self.done += operator.index(steps)
        except TypeError:
            raise ArgumentTypeError(f"steps must be an integer, got {steps!r:.200}") from None
        line = self._line
        if line is not None and self._clock() >= line.due:
            line.show()

    def close(self) -> None:
        """End the loop, and keep its number of finished steps."""
        if self._ended is None:
            self._ended = self._clock()
            if self._line is not None:
                self._line.end()

    def __enter__(self) -> Progress[Item]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def report(self) -> pb.LoopProgress:
        """Return the report for the server. One thread at a time."""
        done = self.done
        return pb.LoopProgress(
            name=self.name[:_LONGEST_NAME],
            unit=self.unit[:_LONGEST_UNIT],
            done=done,
            total=self.total or 0,
            rate=self._reported.at(self._began + self.elapsed, done),
            elapsed_ms=round(self.elapsed * 1000),
            over=self.over,
        )

    def describe(self, speed: float) -> str:
        """Return how far the loop is, in words: `train: 1200/5000 steps (24%), 12.3 steps/s, 5:09 left`."""
        done, total = self.done, self.total
        words = f"{self.name}: " if self.name else ""
        words += f"{done}/{total} {self.unit} ({done / total:.0%})" if total else f"{done} {self.unit}"
        if speed > 0:
            words += f", {speed:.1f} {self.unit}/s" if speed >= 1 else f", {1 / speed:.1f} s each"
        if total and speed > 0 and not self.over:
            return f"{words}, {_span(max(0, total - done) / speed)} left"
        return f"{words}, {_span(self.elapsed)}"


class Loops:
    """Loops of this process, as a source of its progress reports; see `coordination.reports`."""

    def __init__(self) -> None:
        self._open: tuple[Progress[Any], ...] = ()
        self._last: pb.LoopProgress | None = None
        """The last loop that was over, which is reported until another one begins."""
        self._lock = Lock()

    def add(self, loop: Progress[Any]) -> None:
        """Report this loop from now on."""
        with self._lock:
            self._open = (*(known for known in self._open if not known.over), loop)

    def fill(self, report: pb.ProgressReport) -> None:
        """Add the loops to a report."""
        with self._lock:
            reports = [loop.report() for loop in self._open]
            self._open = tuple(loop for loop, said in zip(self._open, reports, strict=True) if not said.over)
            under_way = [said for said in reports if not said.over]
            if not under_way and reports:
                self._last = reports[-1]
            report.loops.extend(under_way[:_MOST_LOOPS] or ([] if self._last is None else [self._last]))


class _Line:
    """A loop's line on a terminal, which is drawn again and again; elsewhere a line now and then."""

    def __init__(self, loop: Progress[Any], clock: Callable[[], float], stream: TextIO) -> None:
        self._loop = loop
        self._clock = clock
        self._stream = stream
        self._terminal = stream.isatty()
        began = clock()
        self._speed = Speed(began)
        self.due = began + (_REDRAW if self._terminal else _FIRST_LINE)
        """Time from which on it wants to be shown."""

    def show(self) -> None:
        """Show how far the loop is."""
        now, total = self._clock(), self._loop.total
        self.due = now + (_REDRAW if self._terminal else _NEXT_LINES)
        if not self._terminal and total and self._loop.done >= total:
            return  # the last line comes at the end
        words = self._loop.describe(self._speed.at(now, self._loop.done))
        if not self._terminal:
            announce(words, warning=False)
            return
        if total:
            filled = min(_BAR, self._loop.done * _BAR // total)
            words = f"[{'#' * filled}{'.' * (_BAR - filled)}] {words}"
        self._stream.write(f"\r{words[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        self._stream.flush()

    def end(self) -> None:
        """Show the loop's end: its average speed."""
        loop = self._loop
        if self._terminal:
            self.show()
            self._stream.write("\n")
            self._stream.flush()
        elif loop.elapsed >= _WORTH_A_LINE:
            announce(loop.describe(loop.done / loop.elapsed), warning=False)


@overload
def progress(
    items: Iterable[Item],
    total: int | None = None,
    desc: str = "",
    *,
    unit: str = "steps",
    show: bool | None = None,
) -> Progress[Item]: ...


@overload
def progress(
    items: None = None,
    total: int | None = None,
    desc: str = "",
    *,
    unit: str = "steps",
    show: bool | None = None,
) -> Progress[object]: ...


def progress(
    items: Iterable[Item] | None = None,
    total: int | None = None,
    desc: str = "",
    *,
    unit: str = "steps",
    show: bool | None = None,
) -> Progress[Item]:
    """Report the progress of a loop while it runs.

    Rank 0 shows a line with steps, speed and time left on its terminal; where standard error is no terminal,
    as under `dmesh run`, it prints a line after 10 seconds, every 30 seconds and at the end. All ranks tell
    the coordination server with their heartbeats, for `dmesh top`, `dmesh status`, the dashboard and
    `GET /api/v1/clusters/NAME/progress`.

    ```python
    for batch in dmesh.progress(batches, desc="train"):
        step(batch)

    with dmesh.progress(total=100, desc="tune") as tuning:
        while tuning.done < 100:
            tuning.update(10)
    ```

    Args:
        items: What to iterate over; None for a loop of your own, which calls `update`.
        total: Number of steps in all; None for the length of `items`, if it has one.
        desc: What the loop is called; the same on all ranks, whose numbers are put together by it.
        unit: What steps are called, in the plural.
        show: Whether this rank shows a line; None for rank 0 alone.

    Returns:
        The loop, to iterate over. `done`, `total` and `elapsed` say how far it is.

    Raises:
        ConfigurationError: `total` is negative.
        ArgumentTypeError: `total` is no integer, `desc` or `unit` no text, or there is nothing to iterate
            over in `items`.
    """
    if items is not None and not isinstance(items, Iterable):
        raise ArgumentTypeError(f"progress() takes something to iterate over, got {type(items).__name__}")
    if not isinstance(desc, str) or not isinstance(unit, str):
        raise ArgumentTypeError(f"desc and unit must be text, got {desc!r:.100} and {unit!r:.100}")
    if total is None and items is not None:
        try:
            total = len(items)  # type: ignore[arg-type]
        except TypeError:
            total = None  # nobody knows, as of a generator
    elif total is not None:
        if isinstance(total, bool) or not isinstance(total, int):
            raise ArgumentTypeError(f"total must be a number of steps, got {total!r:.200}")
        if total < 0:
            raise ConfigurationError(f"total must be a number of steps from 0, got {total}")
    return Progress(items, total, desc, unit, ranks.rank() == 0 if show is None else show)


def _loops() -> Loops | None:
    """Return the loops that this client reports to the server; None if it reports nothing."""
    agent, state = opened_agent(), context.current_or_none()
    if agent is None or state is None:
        return None
    with _beginning:
        loops = state.find(Loops)
        if loops is None:
            loops = Loops()
            state.put(loops)
            agent.add_report_source(loops)
    return loops


_beginning = Lock()


def _span(seconds: float) -> str:
    """Return a duration as a clock shows it: `0:09`, `5:09`, `1:02:03`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
