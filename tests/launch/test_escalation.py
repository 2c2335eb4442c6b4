"""When clients are asked to end and when they are made to, without a process or a clock."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st

from dmesh.launcher.escalation import Escalation, Phase


def test_after_a_failure_the_others_have_time_then_sigterm_then_sigkill() -> None:
    escalation = Escalation(timeout_after_failure=3, terminate_grace=5)
    assert escalation.on_failure(10) is None
    assert escalation.deadline == 13
    assert escalation.on_failure(11) is None  # the second one changes nothing
    assert escalation.on_time(12.9) is None
    assert escalation.on_time(13.1) is signal.SIGTERM
    assert escalation.deadline == 18.1
    assert escalation.on_time(18.2) is signal.SIGKILL
    assert escalation.deadline is None
    assert escalation.on_time(99) is None


def test_no_time_means_sigterm_at_once() -> None:
    assert Escalation(0, 5).on_failure(10) is signal.SIGTERM


def test_ctrl_c_has_no_limit_and_a_failure_after_it_sets_none() -> None:
    escalation = Escalation(3, 5)
    assert escalation.on_signal(signal.SIGINT, 1) is signal.SIGINT
    assert escalation.on_failure(2) is None
    assert escalation.deadline is None
    assert escalation.phase is Phase.INTERRUPTED


def test_sigterm_has_a_limit() -> None:
    escalation = Escalation(3, 5)
    assert escalation.on_signal(signal.SIGTERM, 1) is signal.SIGTERM
    assert escalation.on_time(6) is signal.SIGKILL


def test_a_second_signal_kills_but_not_the_same_request_delivered_twice() -> None:
    escalation = Escalation(3, 5)
    assert escalation.on_signal(signal.SIGTERM, 1) is signal.SIGTERM
    assert escalation.on_signal(signal.SIGTERM, 1.05) is None
    assert escalation.on_signal(signal.SIGINT, 2) is signal.SIGKILL
    assert escalation.requested is signal.SIGTERM
    assert escalation.on_signal(signal.SIGINT, 3) is None


def test_ctrl_c_after_a_failure_keeps_the_limit() -> None:
    escalation = Escalation(3, 5)
    escalation.on_failure(0)
    assert escalation.on_signal(signal.SIGINT, 1) is signal.SIGINT
    assert escalation.on_time(3) is signal.SIGTERM


def test_closed_output_ends_the_job_once() -> None:
    escalation = Escalation(3, 5)
    assert escalation.on_output_closed(0) is signal.SIGTERM
    assert escalation.on_output_closed(1) is None
    assert escalation.on_time(5) is signal.SIGKILL


_EVENTS = st.lists(
    st.tuples(st.sampled_from(["failure", "int", "term", "hup", "closed", "time"]), st.floats(0, 4)),
    max_size=30,
)


@given(_EVENTS)
def test_it_never_goes_back_and_kills_at_most_once_and_every_deadline_is_the_last(events) -> None:
    escalation = Escalation(3, 5)
    now, severity, kills = 0.0, 0, 0
    order = [Phase.RUNNING, Phase.INTERRUPTED, Phase.FAILED, Phase.TERMINATING, Phase.KILLED]
    for event, step in events:
        now += step
        action = {
            "failure": escalation.on_failure,
            "closed": escalation.on_output_closed,
            "time": escalation.on_time,
            "int": lambda now: escalation.on_signal(signal.SIGINT, now),
            "term": lambda now: escalation.on_signal(signal.SIGTERM, now),
            "hup": lambda now: escalation.on_signal(signal.SIGHUP, now),
        }[event](now)
        assert order.index(escalation.phase) >= severity
        severity = order.index(escalation.phase)
        kills += action is signal.SIGKILL
        assert kills <= 1
        assert (escalation.deadline is None) == (
            escalation.phase in (Phase.RUNNING, Phase.INTERRUPTED, Phase.KILLED)
        )
    if escalation.phase in (Phase.FAILED, Phase.TERMINATING):  # left alone, it comes to its end
        for _ in range(2):
            now = escalation.deadline or now
            escalation.on_time(now)
        assert escalation.phase is Phase.KILLED
