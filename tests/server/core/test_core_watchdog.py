"""Members that are there but get nowhere, blocked or stuck: how they are found, named and cleared."""

from __future__ import annotations

import math

import pytest
from tests.server.core.driving import Driver, worker

from dmesh_server.core.effects import Effect, LivenessChange, Push, Registered, StatusRequest
from dmesh_server.core.events import Heartbeat, ReportStatus, ReportWaiting
from dmesh_server.core.model import (
    Activity,
    ClusterSettings,
    Limits,
    Liveness,
    Member,
    MemberState,
    RestartPolicy,
)

SETTINGS = ClusterSettings(stuck_after=20.0)
STACK = ("train.py:3 in <module>", "train.py:9 in step")


# Blocked.


def test_silence_with_a_session_is_blocked_not_lost() -> None:
    d = joined(2)
    d.beat(15.0, 1)
    assert d.member(0).liveness is Liveness.BLOCKED
    assert d.state_of(0) is MemberState.CONNECTED
    assert d.member(0).reason.startswith("no heartbeat for 15.0 s although its connection answers")
    assert d.ends(d.sessions[0]) == []
    d.beat(100.0, 1)
    assert d.state_of(0) is MemberState.CONNECTED


def test_all_are_told_who_is_blocked_and_who_is_live_again() -> None:
    d = joined(2)
    d.now += 0.1
    d.apply(Heartbeat(d.sessions[1], 1))
    d.advance(15.0 - 0.05)
    assert d.liveness(1) == [(0, Liveness.BLOCKED)]
    d.advance(1.0)
    d.apply(Heartbeat(d.sessions[0], 1))
    assert d.liveness(1)[0] == (0, Liveness.LIVE)
    assert d.member(0).reason == ""
    # Its lease runs again.
    d.beat(15.1, 1)
    assert d.member(0).liveness is Liveness.BLOCKED


def test_a_blocked_member_whose_connection_breaks_is_lost() -> None:
    d = joined(2)
    d.beat(16.0, 1)
    d.close(0)
    d.advance(5.1)
    assert d.state_of(0) is MemberState.LOST
    assert "its connection closed" in d.member(0).reason
    assert d.member(0).liveness is Liveness.LIVE


def test_a_blocked_member_that_attaches_again_is_live() -> None:
    d = joined(2)
    d.beat(16.0, 1)
    d.close(0)
    d.apply(d.attach(0))
    assert d.member(0).liveness is Liveness.LIVE
    d.beat(10.0, 0, 1)


def test_a_new_session_is_told_who_is_blocked() -> None:
    d = joined(3)
    d.beat(16.0, 1, 2)
    d.apply(d.attach(2))
    assert d.liveness(2) == [(0, Liveness.BLOCKED)]


def test_a_barrier_that_times_out_says_who_is_blocked() -> None:
    d = joined(2)
    d.enter(1, timeout=18.0)
    d.beat(18.0, 1)
    errors = [e.message.error for e in d.effects if isinstance(e, Push) and hasattr(e.message, "error")]
    (error,) = errors
    assert error is not None
    assert "blocked: no heartbeat for 15.0 s although its connection answers" in error.message
    assert [member.liveness for member in error.members] == [Liveness.BLOCKED]


def test_ten_thousand_blocked_members_do_not_cost_the_square() -> None:
    d = Driver(300, Limits())
    d.join(*range(300))
    effects = d.advance(15.0)
    told = [(len(push.sessions), len(push.message.members)) for push in changes(effects)]
    assert told == [(300, 66)], "one notice at once, and no larger than its readers permit"
    effects = d.advance(10.0)
    assert sum(len(push.message.members) for push in changes(effects)) == 300 - 66
    assert len(changes(effects)) == 4


def test_what_is_over_before_it_was_told_is_not_told() -> None:
    d = joined(3)
    d.advance(0.01)
    d.apply(Heartbeat(d.sessions[1], 1))
    d.advance(5.0)
    d.apply(Heartbeat(d.sessions[2], 1))
    assert [names(push) for push in changes(d.advance(9.995))] == [{0: Liveness.BLOCKED}]
    assert not changes(d.advance(0.01)), "held back, for the last notice was a moment ago"
    assert d.member(1).liveness is Liveness.BLOCKED
    d.apply(Heartbeat(d.sessions[1], 2))
    assert not changes(d.advance(1.0))


# Stuck.


def test_who_is_waited_for_for_too_long_is_asked() -> None:
    d = joined(3)
    d.enter(0)
    d.beat(9.0, 0, 1, 2)
    d.enter(1)
    effects = d.beat(19.0, 0, 1, 2)
    assert not questions(effects), "the latest arrival was less than 20 s ago"
    effects = d.beat(2.0, 0, 1, 2)
    assert [push.sessions for push in questions(effects)] == [(d.sessions[2],)]


def test_who_stands_still_is_stuck_and_everybody_is_told_where() -> None:
    d = joined(3)
    number = asked(d)
    answer(d, number)
    assert d.liveness(0) == [(2, Liveness.STUCK)]
    (change,) = [message for message in d.pushed(0) if isinstance(message, LivenessChange)]
    (member,) = change.members
    assert member.reason == "2 members have waited for it for 20.0 s at barrier 'b'"
    assert member.activity == Activity("all_reduce", 25.0, STACK)
    assert (member.devices, member.peer_addresses) == ((), ())
    assert d.member(2).liveness is Liveness.STUCK


def test_who_gets_on_is_not_stuck_and_is_asked_again_when_it_may_be() -> None:
    d = joined(3)
    number = asked(d)
    answer(d, number, age=5.0)
    assert d.member(2).liveness is Liveness.LIVE
    assert not questions(d.beat(14.5, 0, 1, 2))
    (again,) = questions(d.beat(2.0, 0, 1, 2))
    answer(d, again.message.id, age=21.0)  # type: ignore[union-attr]
    assert d.member(2).liveness is Liveness.STUCK


def test_progress_clears_it() -> None:
    d = stuck()
    d.apply(Heartbeat(d.sessions[2], 1, 0))
    assert d.member(2).liveness is Liveness.STUCK
    d.advance(1.0)
    d.apply(Heartbeat(d.sessions[2], 2, 1))
    assert d.member(2).liveness is Liveness.LIVE
    assert d.liveness(0) == [(2, Liveness.LIVE)]


def test_progress_of_which_the_answer_knew_does_not() -> None:
    # Its last progress is younger than its last heartbeat, and older than half of 20 s.
    d = joined(3)
    d.enter(0)
    d.enter(1)
    d.advance(8.0)
    d.beat(12.0, 0, 1)
    (push,) = questions(d.effects)
    answer(d, push.message.id, age=11.0)  # type: ignore[union-attr]
    d.apply(Heartbeat(d.sessions[2], 1, 7))
    assert d.member(2).liveness is Liveness.STUCK
    d.apply(Heartbeat(d.sessions[2], 2, 8))
    assert d.member(2).liveness is Liveness.LIVE


def test_its_arrival_clears_it() -> None:
    d = stuck()
    d.enter(2)
    assert d.results(0)
    assert d.member(2).liveness is Liveness.LIVE


def test_it_is_cleared_when_nobody_waits_any_more() -> None:
    d = stuck()
    d.apply(d.cancel(0))
    assert d.member(2).liveness is Liveness.LIVE
    d = stuck(rejoin=True)
    d.apply(d.report(0))
    assert d.member(2).liveness is Liveness.STUCK
    d.apply(d.report(1))
    assert d.member(2).liveness is Liveness.LIVE


def test_it_is_asked_again_while_it_stays_so() -> None:
    d = stuck()
    effects = d.beat(60.0, 0, 1, 2)
    assert len(questions(effects)) == 3
    answer(d, questions(effects)[-1].message.id, age=90.0, stack=("train.py:10 in save",))  # type: ignore[union-attr]
    assert d.liveness(0) == [(2, Liveness.STUCK)], "it is somewhere else"
    assert d.member(2).reason == "2 members have waited for it for 80.5 s at barrier 'b'"


def test_the_same_answer_is_no_news() -> None:
    d = stuck()
    (push,) = questions(d.beat(20.1, 0, 1, 2))
    answer(d, push.message.id, age=45.0)  # type: ignore[union-attr]
    assert d.liveness(0) == []


def test_a_barrier_that_times_out_names_the_stuck_with_operation_and_frame() -> None:
    d = joined(3)
    d.enter(0, timeout=30.0)
    d.enter(1)
    (push,) = questions(d.beat(20.0, 0, 1, 2))
    answer(d, push.message.id)  # type: ignore[union-attr]
    d.advance(10.0)
    (result,) = d.results(0)
    assert result.error is not None
    assert (
        "host2, pid 72, last seen 10.0 s ago, stuck in all_reduce at train.py:9 in step: 2 members have "
        "waited for it for 20.0 s at barrier 'b')" in result.error.message
    )
    (member,) = result.error.members
    assert (member.liveness, member.activity) == (Liveness.STUCK, Activity("all_reduce", 25.0, STACK))
    assert d.member(2).liveness is Liveness.LIVE, "nobody waits for it any more"
    d.restart()
    d.join(0, 1, 2)
    d.enter(2)
    (again,) = d.results(2)
    assert again.error is not None
    assert again.error.members[0].activity == Activity("all_reduce", 25.0, STACK)


def test_an_answer_to_another_question_is_ignored() -> None:
    d = joined(3)
    number = asked(d)
    answer(d, number + 1)
    answer(d, number, index=1)
    assert d.member(2).liveness is Liveness.LIVE


def test_nobody_is_asked_if_the_cluster_does_not_want_it() -> None:
    d = Driver(2)
    for index in (0, 1):
        d.accepted(d.register(index, settings=ClusterSettings(stuck_after=-1.0)), Registered)
        d.apply(d.attach(index))
    d.enter(0)
    d.apply(ReportWaiting(d.sessions[0], "all_reduce", (worker(1),), 1e6))
    assert not questions(d.beat(1000.0, 0, 1))


def test_a_lone_arrival_does_not_ask_thousands() -> None:
    d = Driver(200, Limits(stuck_after=5.0))
    d.join(*range(200))
    d.enter(0)
    (push,) = questions(d.advance(5.0))
    assert len(push.sessions) == 64


def test_what_a_member_says_of_itself_is_bounded_and_on_one_line() -> None:
    d = joined(3)
    number = asked(d)
    activity = Activity("a\nb" + "x" * 500, math.inf, tuple(f"{n}\t" + "y" * 500 for n in range(99)))
    d.apply(ReportStatus(d.sessions[2], number, activity))
    assert d.member(2).liveness is Liveness.LIVE, "an age that is no number proves nothing"
    (push,) = questions(d.beat(21.0, 0, 1, 2))
    d.apply(ReportStatus(d.sessions[2], push.message.id, Activity(activity.operation, 99.0, activity.stack)))  # type: ignore[union-attr]
    found = d.member(2).activity
    assert found is not None
    assert (found.operation[:4], len(found.operation)) == ("a?bx", 200)
    assert ([len(frame) for frame in found.stack], found.stack[0][:4]) == ([300] * 50, "49?y")


# Waits in collectives.


def test_a_wait_that_the_core_does_not_see() -> None:
    d = joined(3)
    d.apply(ReportWaiting(d.sessions[0], "all_reduce number 12", (worker(2), worker(2), worker(0)), 21.0))
    (number,) = d.asked(2)
    assert not d.asked(0)
    answer(d, number, operation="")
    assert d.member(2).reason == "1 member has waited for it for 21.0 s in all_reduce number 12"
    d.apply(ReportWaiting(d.sessions[1], "all_reduce number 12", (worker(2),), 21.0))
    assert d.asked(2) == [], "it was asked a moment ago"
    d.apply(ReportWaiting(d.sessions[0], "", (), 0.0))
    assert d.member(2).liveness is Liveness.STUCK, "1 waits for it still"
    d.apply(ReportWaiting(d.sessions[1], "", (), 0.0))
    assert d.member(2).liveness is Liveness.LIVE


def test_a_report_is_over_with_its_session() -> None:
    d = joined(3)
    d.apply(ReportWaiting(d.sessions[0], "all_reduce", (worker(2),), 21.0))
    answer(d, d.asked(2)[0])
    assert d.member(2).liveness is Liveness.STUCK
    d.close(0)
    assert d.member(2).liveness is Liveness.LIVE


def test_who_is_held_up_by_another_is_not_stuck_itself() -> None:
    # A ring: 0 waits for 1, and 1 for 2, who stands still.
    d = joined(3)
    d.apply(ReportWaiting(d.sessions[0], "all_reduce", (worker(1),), 21.0))
    (first,) = d.asked(1)
    answer(d, first, index=1)
    assert d.member(1).liveness is Liveness.STUCK, "nothing else is known yet"
    d.apply(ReportWaiting(d.sessions[1], "all_reduce", (worker(2),), 21.0))
    answer(d, d.asked(2)[0])
    assert [d.member(index).liveness for index in range(3)] == [Liveness.LIVE, Liveness.LIVE, Liveness.STUCK]


def test_who_waits_at_a_barrier_is_held_up_as_well() -> None:
    d = joined(3)
    d.enter(1, "other", participants=(1, 2))
    d.apply(ReportWaiting(d.sessions[0], "all_reduce", (worker(1),), 21.0))
    answer(d, d.asked(1)[0], index=1)
    assert d.member(1).liveness is Liveness.LIVE


def test_those_who_wait_for_each_other_are_all_stuck() -> None:
    d = joined(3)
    d.apply(ReportWaiting(d.sessions[0], "all_reduce", (worker(1),), 21.0))
    first = d.asked(1)
    d.apply(ReportWaiting(d.sessions[1], "all_gather", (worker(0),), 21.0))
    answer(d, first[0], index=1)
    second = d.asked(0) or [2]
    answer(d, second[0], index=0)
    assert [d.member(index).liveness for index in (0, 1)] == [Liveness.STUCK] * 2


def test_nonsense_in_a_report_does_no_harm() -> None:
    d = joined(2)
    for age in (math.nan, -math.inf, math.inf, -5.0, 1e300):
        d.apply(ReportWaiting(d.sessions[0], "x\n" * 500, (worker(7), worker(1)), age))
    d.apply(ReportWaiting(d.sessions[0], "", (worker(7),), 1.0))
    d.apply(ReportWaiting(99, "", (), 1.0))
    assert d.ends(99)
    d.apply(ReportStatus(99, 1, Activity("", 0.0, ())))
    assert d.ends(99)


@pytest.mark.parametrize("crash", [False, True])
def test_a_departure_and_a_restart_end_all_trouble(crash: bool) -> None:
    d = stuck()
    if crash:
        d.restart()
        d.join(0, 1, 2)
    else:
        d.lose(2)
    assert [d.member(index).liveness for index in range(3)] == [Liveness.LIVE] * 3


def joined(tasks: int, settings: ClusterSettings = SETTINGS) -> Driver:
    d = Driver(tasks)
    for index in range(tasks):
        d.accepted(d.register(index, settings=settings), Registered)
        d.apply(d.attach(index))
    d.beat(30.0, *range(tasks))
    return d


def asked(d: Driver) -> int:
    """0 and 1 wait for 2 until it is asked; returns the number of the question."""
    d.enter(0)
    d.enter(1)
    (push,) = questions(d.beat(20.0, 0, 1, 2))
    assert isinstance(push.message, StatusRequest)
    return push.message.id


def answer(
    d: Driver,
    number: int,
    *,
    index: int = 2,
    age: float = 25.0,
    operation: str = "all_reduce",
    stack: tuple[str, ...] = STACK,
) -> None:
    d.apply(ReportStatus(d.sessions[index], number, Activity(operation, age, stack)))


def stuck(*, rejoin: bool = False) -> Driver:
    """0 and 1 wait for 2, who is stuck."""
    policy = RestartPolicy.REJOIN if rejoin else None
    d = joined(3, ClusterSettings(policy, stuck_after=20.0))
    answer(d, asked(d))
    assert d.member(2).liveness is Liveness.STUCK
    d.advance(0.5)
    return d


def questions(effects: list[Effect]) -> list[Push]:
    return [e for e in effects if isinstance(e, Push) and isinstance(e.message, StatusRequest)]


def changes(effects: list[Effect]) -> list[Push]:
    return [e for e in effects if isinstance(e, Push) and isinstance(e.message, LivenessChange)]


def names(push: Push) -> dict[int, Liveness]:
    members: tuple[Member, ...] = push.message.members  # type: ignore[union-attr]
    return {member.task.index: member.liveness for member in members}
