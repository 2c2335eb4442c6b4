"""Loops that say how far they are: on a terminal, elsewhere, and to the server."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable

import numpy as np
import pytest
from tests.coordination.conftest import eventually

import dmesh
from dmesh.errors import ArgumentTypeError, ConfigurationError
from dmesh.runtime.progress import Loops, Progress
from dmesh.testing import ManualClock
from dmesh.v1 import progress_pb2 as pb


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def loop(clock: ManualClock, total: int | None = 100, *, stream: io.StringIO | None = None) -> Progress[int]:
    return Progress(range(total or 0), total, "train", "steps", stream is not None, clock, stream)


def shown(terminal: io.StringIO) -> list[str]:
    return [line.rstrip("\x1b[K\n") for line in terminal.getvalue().split("\r") if line]


def test_a_terminal_has_one_line_that_is_drawn_a_few_times_a_second() -> None:
    clock, terminal = ManualClock(100.0), Terminal()
    for _ in loop(clock, stream=terminal):
        clock.advance(0.0625)
    lines = shown(terminal)
    assert len(lines) == 25 + 1  # each fourth step is more than 0.2 s after the last; and the end
    assert lines[0] == "[....................] train: 4/100 steps (4%), 16.0 steps/s, 0:06 left"
    assert lines[-1] == "[####################] train: 100/100 steps (100%), 16.0 steps/s, 0:06"
    assert terminal.getvalue().endswith("\n")
    assert terminal.getvalue().count("\n") == 1


def test_elsewhere_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("dmesh"), "propagate", False)  # as if nobody had configured it
    clock = ManualClock(100.0)
    for _ in loop(clock, stream=io.StringIO()):
        clock.advance(1.0)
    assert capsys.readouterr().err.splitlines() == [
        f"dmesh: train: {done}/100 steps ({done}%), 1.0 steps/s, {tail}"
        for done, tail in ((10, "1:30 left"), (40, "1:00 left"), (70, "0:30 left"), (100, "1:40"))
    ]
    for _ in loop(clock, 5, stream=io.StringIO()):
        clock.advance(0.1)  # over in less than a second: not worth a line
    assert capsys.readouterr().err == ""


def test_lines_go_to_a_logger_if_the_program_has_one(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    with caplog.at_level(logging.INFO, "dmesh"), loop(clock, 2, stream=io.StringIO()) as steps:
        steps.update(2)
        clock.advance(2.0)
    assert caplog.messages == ["train: 2/2 steps (100%), 1.0 steps/s, 0:02"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("total", "done", "seconds", "words"),
    [
        (None, 7, 2.0, "train: 7 steps, 3.5 steps/s, 0:02"),
        (4000, 10, 40.0, "train: 10/4000 steps (0%), 4.0 s each, 4:26:00 left"),
        (3, 0, 0.0, "train: 0/3 steps (0%), 0:00"),
        (0, 0, 0.0, "train: 0 steps, 0:00"),
        (2, 5, 1.0, "train: 5/2 steps (250%), 5.0 steps/s, 0:00 left"),
    ],
)
def test_what_is_said(total: int | None, done: int, seconds: float, words: str) -> None:
    clock = ManualClock()
    steps = loop(clock, total)
    steps.update(done)
    clock.advance(seconds)
    assert steps.describe(done / seconds if seconds else 0.0) == words


def test_the_server_is_told_of_loops_under_way_or_else_of_the_last_one() -> None:
    clock, loops = ManualClock(), Loops()

    def told() -> list[tuple[str, int, bool]]:
        report = pb.ProgressReport()
        loops.fill(report)
        return [(one.name, one.done, one.over) for one in report.loops]

    assert told() == []
    outer, inner = loop(clock), loop(clock)
    outer.name, inner.name = "epochs", "batches"
    loops.add(outer)
    loops.add(inner)
    outer.update()
    inner.update(3)
    assert told() == [("epochs", 1, False), ("batches", 3, False)]
    inner.close()
    assert told() == [("epochs", 1, False)]
    outer.close()
    assert told() == told() == [("epochs", 1, True)]
    loops.add(loop(clock))
    assert told() == [("train", 0, False)]
    for number in range(9):
        another = loop(clock)
        another.name = str(number)
        loops.add(another)
    assert len(told()) == 4


def test_the_speed_is_that_of_the_last_half_minute() -> None:
    clock = ManualClock()
    steps = loop(clock, 10_000)
    for _ in range(60):
        steps.update(10)
        clock.advance(1.0)
        steps.report()
    assert steps.report().rate == pytest.approx(10.0)
    for _ in range(60):
        steps.update(1)
        clock.advance(1.0)
        steps.report()
    said = steps.report()
    assert said.rate == pytest.approx(1.0, abs=0.1)
    assert (said.name, said.unit, said.done, said.total) == ("train", "steps", 660, 10_000)
    assert (said.elapsed_ms, said.over) == (120_000, False)


def test_the_length_is_found_if_there_is_one() -> None:
    assert dmesh.progress([1, 2, 3], show=False).total == 3
    assert dmesh.progress((n for n in range(3)), show=False).total is None
    assert dmesh.progress((n for n in range(3)), 3, show=False).total == 3
    steps = dmesh.progress(range(5), desc="x", show=False)
    assert list(steps) == [0, 1, 2, 3, 4]
    assert (steps.done, steps.over) == (5, True)
    with pytest.raises(ConfigurationError, match="this loop is over"):
        list(steps)


def test_a_loop_that_is_left_early_is_over() -> None:
    steps = dmesh.progress(range(5), show=False)
    for number in steps:
        if number == 2:
            break
    eventually(lambda: steps.over, "the end")
    assert steps.done == 2


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((7,), ArgumentTypeError, "something to iterate over, got int"),
        ((None, 1.5), ArgumentTypeError, "total must be a number of steps, got 1.5"),
        ((None, -1), ConfigurationError, "from 0, got -1"),
        ((None, 1, 7), ArgumentTypeError, "desc and unit must be text, got 7 and 'steps'"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        dmesh.progress(*arguments)


@pytest.mark.parametrize("steps", [0.5, "1", None])
def test_a_part_of_a_step_is_refused_here_and_not_by_the_heartbeats(steps: object) -> None:
    under_way = dmesh.progress(total=3, show=False)
    with pytest.raises(ArgumentTypeError, match="steps must be an integer, got"):
        under_way.update(steps)  # type: ignore[arg-type]
    under_way.update(np.int64(2))
    assert under_way.report().done == 2


def test_nothing_to_iterate_over_is_said() -> None:
    with pytest.raises(ArgumentTypeError, match=r"call update\(\) for each step"):
        list(dmesh.progress(total=3, show=False))


def test_two_threads_may_have_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMESH_LAUNCHER", "none")
    loops: Loops = Loops()
    make: Callable[[], None] = lambda: [loops.add(loop(ManualClock())) for _ in range(100)] and None  # noqa: E731
    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = pb.ProgressReport()
    loops.fill(report)
    assert len(report.loops) == 4
