"""Tracebacks of many processes on one terminal: whole, but not again and again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmesh.launcher.folding import ShownTracebacks, TracebackFolder

HEADER = b"Traceback (most recent call last):"
STACK = [HEADER, b'  File "train.py", line 3, in <module>', b"    main()"]
ERROR = b"ValueError: no"


def shown(folder: TracebackFolder, lines: list[bytes]) -> list[bytes]:
    """What becomes of a burst of lines."""
    return folder.feed(lines, 0.0) + folder.release()


def test_a_stack_is_shown_once() -> None:
    seen = ShownTracebacks()
    assert shown(TracebackFolder(seen), [*STACK, ERROR]) == [*STACK, ERROR]
    assert shown(TracebackFolder(seen), [*STACK, ERROR]) == [ERROR]
    assert shown(TracebackFolder(seen), [*STACK, b"KeyError: 3"]) == [b"KeyError: 3"]
    other = [*STACK[:2], b"    other()", ERROR]
    assert shown(TracebackFolder(seen), other) == other


def test_a_message_of_several_lines_is_shown_once() -> None:
    seen = ShownTracebacks()
    lines = [*STACK, ERROR, b"details:", b"  more"]
    assert shown(TracebackFolder(seen), lines) == lines
    assert shown(TracebackFolder(seen), lines) == [ERROR]


def test_a_consequence_needs_no_stack() -> None:
    lines = [*STACK, b"dmesh.errors.PeerLostError: lost rank 1"]
    assert shown(TracebackFolder(ShownTracebacks()), lines) == lines[-1:]


def test_the_failure_of_a_group_needs_no_second_stack() -> None:
    """A rank that is still in an earlier call fails with the same error, from another line."""
    failure = b"dmesh.errors.CollectiveMismatchError: collective #2 of group world: ..."
    seen = ShownTracebacks()
    assert shown(TracebackFolder(seen), [*STACK, failure]) == [*STACK, failure]
    assert shown(TracebackFolder(seen), [*STACK[:2], b"    other()", failure]) == [failure]


def test_a_chain_is_one_traceback() -> None:
    chain = [
        *STACK,
        b"KeyError: 3",
        b"",
        b"During handling of the above exception, another exception occurred:",
    ]
    lines = [*chain, b"", *STACK, ERROR]
    seen = ShownTracebacks()
    assert shown(TracebackFolder(seen), lines) == lines
    assert shown(TracebackFolder(seen), lines) == [ERROR]


def test_a_traceback_waits_for_its_end_and_other_lines_do_not() -> None:
    folder = TracebackFolder(ShownTracebacks())
    assert folder.feed([b"one", *STACK], 1.0) == [b"one"]
    assert folder.due is not None
    assert folder.due > 1.0
    assert folder.feed([ERROR], 2.0) == []
    assert folder.due > 2.0
    assert folder.release() == [*STACK, ERROR]
    assert folder.due is None
    assert folder.feed([b"two"], 3.0) == [b"two"]


@given(st.lists(st.sampled_from([HEADER, b"  File", b"", ERROR, b"PeerLostError: x", b"text"]), max_size=30))
def test_no_line_of_the_first_traceback_is_lost_but_those_of_consequences(lines: list[bytes]) -> None:
    out = shown(TracebackFolder(ShownTracebacks()), lines)
    if b"PeerLostError: x" not in lines:
        assert out == lines
    assert not set(out) - set(lines)
