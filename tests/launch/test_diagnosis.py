"""Cause and consequence, and the traceback that tells them apart."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.launcher.diagnosis import ErrorTail, Outcome, Role, Traceback, rank_failures


def outcome(
    rank: int, status: int, order: int, exception: str = "", ended_by: signal.Signals | None = None
) -> Outcome:
    traceback = Traceback(("Traceback (most recent call last):", exception), exception) if exception else None
    return Outcome(rank, 100 + rank, status, order, 1.0, ended_by, traceback)


LOST = "dmesh.errors.PeerLostError: /job:worker/task:2 (host h, pid 9) is gone"


def first(*outcomes: Outcome) -> int:
    return rank_failures(outcomes)[0].rank


def test_nothing_failed() -> None:
    assert rank_failures([outcome(0, 0, 0), outcome(1, 0, 1)]) == ()


def test_a_signal_from_elsewhere_is_the_cause_whenever_it_is_seen() -> None:
    assert first(outcome(0, 1, 0, LOST), outcome(1, 1, 1, LOST), outcome(2, -9, 2)) == 2


def test_an_exception_of_ones_own_is_the_cause() -> None:
    assert (
        first(
            outcome(0, 1, 0, LOST), outcome(1, 1, 1, "ValueError: x"), outcome(2, -15, 2, "", signal.SIGTERM)
        )
        == 1
    )


@pytest.mark.parametrize("told", ["ReplicaError: replica 2 raised x", "RemoteInputError: worker 2"])
def test_who_was_told_of_anothers_failure_is_not_the_cause(told) -> None:
    assert first(outcome(0, 1, 0, f"dmesh.errors.{told}"), outcome(2, 1, 1, "ValueError: x")) == 2
    assert first(outcome(0, 1, 0, LOST), outcome(2, 1, 1, "dmesh.errors.ReplicaTimeoutError: replica 1")) == 2


def test_an_exit_code_without_a_traceback_is_a_cause() -> None:
    assert first(outcome(0, 1, 0, LOST), outcome(1, 3, 1)) == 1


def test_a_wait_in_vain_comes_before_a_lost_peer() -> None:
    assert first(outcome(0, 1, 0, LOST), outcome(1, 1, 1, "dmesh.errors.BarrierTimeoutError: 60 s")) == 1


def test_among_equals_the_earliest() -> None:
    failures = rank_failures([outcome(0, 1, 2, LOST), outcome(1, 1, 1, LOST), outcome(2, 0, 0)])
    assert [failure.rank for failure in failures] == [1, 0]


def test_who_was_ended_by_the_launcher_is_not_the_cause() -> None:
    for exception in ("", LOST):
        mine = outcome(0, -15, 0, exception, signal.SIGTERM)
        assert mine.role is Role.ENDED_BY_LAUNCHER
        assert first(mine, outcome(1, 1, 1, LOST)) == 1
        assert mine.how() == "was ended by dmesh run (SIGTERM)"


def test_unless_it_was_failing_and_nobody_else_has_a_reason_of_their_own() -> None:
    mine = outcome(0, -15, 1, "ValueError: printed before the signal", signal.SIGTERM)
    assert mine.role is Role.ENDED_WHILE_FAILING
    assert mine.exit_code == 1
    assert first(mine, outcome(1, 1, 0, LOST)) == 0
    assert first(mine, outcome(1, 1, 0, "KeyError: 'x'")) == 1


def test_exit_codes_are_a_shells() -> None:
    assert outcome(0, 3, 0).exit_code == 3
    assert outcome(0, -9, 0).exit_code == 137
    assert outcome(0, -9, 0).how() == "was killed by SIGKILL"
    assert outcome(0, -60, 0).how() == "was killed by signal 60"


def tail_of(source: str) -> ErrorTail:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", source], stderr=subprocess.PIPE, check=False, timeout=90
    )
    tail = ErrorTail()
    for line in done.stderr.split(b"\n"):
        tail.feed(line)
    return tail


@pytest.mark.parametrize(
    ("source", "type_name", "ends_with"),
    [
        ("raise ValueError('a: b')", "ValueError", "ValueError: a: b"),
        ("import json; json.loads('{')", "JSONDecodeError", ""),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise RuntimeError('one\\ntwo\\nthree')", "RuntimeError", "three"),
        ("try:\n 1/0\nexcept ZeroDivisionError as e:\n raise OSError('x') from e", "OSError", "OSError: x"),
        ("try:\n 1/0\nexcept ZeroDivisionError as e:\n raise OSError('x')", "OSError", "OSError: x"),
        (
            "import logging\ntry: 1/0\nexcept Exception: logging.exception('hm')\nraise OSError('y')",
            "OSError",
            "y",
        ),
        ("def f(n): f(n + 1)\nf(0)", "RecursionError", "exceeded"),
    ],
)
def test_the_last_traceback_is_found(source, type_name, ends_with) -> None:
    traceback = tail_of(source).traceback
    assert traceback is not None
    assert traceback.type_name == type_name
    assert traceback.lines[0] == "Traceback (most recent call last):"
    assert ends_with in traceback.lines[-1]


def test_a_chain_is_kept_whole_and_an_earlier_traceback_is_not() -> None:
    source = (
        "import logging\ntry: {}['old']\nexcept KeyError: logging.exception('handled')\n"
        "try: 1/0\nexcept ZeroDivisionError as e: raise OSError('new') from e"
    )
    traceback = tail_of(source).traceback
    assert traceback is not None
    text = "\n".join(traceback.lines)
    assert "ZeroDivisionError" in text
    assert "OSError: new" in text
    assert "KeyError" not in text


def test_groups_and_native_crashes() -> None:
    group = tail_of("raise ExceptionGroup('several', [ValueError(1), TypeError(2)])").traceback
    assert group is not None
    assert "ExceptionGroup: several" in "\n".join(group.lines)
    assert "TypeError: 2" in "\n".join(group.lines)
    crash = tail_of("import ctypes; ctypes.string_at(0)").traceback
    assert crash is not None
    assert crash.exception == "Fatal Python error: Segmentation fault"
    assert any('File "<string>", line 1' in line for line in crash.lines)


def test_a_program_without_a_traceback_has_its_last_lines() -> None:
    tail = tail_of(
        "import sys; print('\\n'.join(map(str, range(9))), file=sys.stderr); sys.exit('no file x')"
    )
    assert tail.traceback is None
    assert tail.last_lines == ("5", "6", "7", "8", "no file x")


@given(
    st.lists(
        st.binary(max_size=80) | st.sampled_from([b"Traceback (most recent call last):", b"  File", b"E: x"])
    )
)
def test_any_bytes_are_bounded_and_harmless(lines) -> None:
    tail = ErrorTail()
    for line in [*lines, *([b"Traceback (most recent call last):"] + [b"  " + b"x" * 10_000] * 300)]:
        tail.feed(line)
    traceback = tail.traceback
    assert traceback is not None
    assert len(traceback.lines) <= 200
    assert max(map(len, traceback.lines)) <= 500
    assert len(tail.last_lines) <= 5
