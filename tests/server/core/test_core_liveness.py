"""How members are found to be gone: broken sessions, leases, goodbyes; and how they are not."""

from __future__ import annotations

from tests.server.core.driving import Driver

from dmesh_server.core.effects import Attached, Done, HeartbeatAck, Registered
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.events import Attach, EnterBarrier, Heartbeat, SessionClosed, Shutdown, Tick
from dmesh_server.core.model import ClusterSettings, Limits, Liveness, MemberState


def test_a_session_makes_a_member_connected_and_heartbeats_are_acknowledged() -> None:
    d = Driver()
    d.apply(d.register(0))
    epoch = d.accepted(d.attach(0), Attached).epoch
    assert d.state_of(0) is MemberState.CONNECTED
    d.apply(Heartbeat(d.sessions[0], 5))
    assert d.pushed(0) == [HeartbeatAck(5, epoch)]
    assert epoch == d.state().epoch


def test_a_session_that_comes_back_within_its_grace_is_not_noticed() -> None:
    d = Driver()
    d.join(0, 1)
    epoch = d.state().epoch
    d.close(0)
    assert d.state_of(0) is MemberState.REGISTERED
    d.advance(0.29)
    d.accepted(d.attach(0), Attached)
    d.beat(60.0, 0, 1)
    assert d.state_of(0) is MemberState.CONNECTED
    assert d.state().epoch == epoch


def test_a_session_that_does_not_come_back_is_a_loss() -> None:
    d = Driver()
    d.join(0, 1)
    d.close(0)
    d.advance(0.31)
    assert d.state_of(0) is MemberState.LOST
    assert d.member(0).reason == "its connection closed without a goodbye"
    assert d.refused(d.attach(0)).kind is ErrorKind.FENCED


def test_silence_without_a_session_is_a_loss() -> None:
    d = Driver()
    d.join(0, 1)
    d.beat(14.9, 0, 1)
    d.restart()
    d.join(1)
    d.beat(15.1, 1)
    assert d.state_of(0) is MemberState.LOST
    assert d.refused(d.get("key", caller=d.caller(0))).kind is ErrorKind.FENCED


def test_a_stopped_or_cut_off_process_is_told_from_a_killed_one() -> None:
    # What does not answer the transport's pings loses its session long after its last heartbeat.
    d = Driver()
    d.join(0, 1)
    d.beat(6.4, 1)
    d.lose(0)
    assert d.member(0).reason == "no sign of life for 6.7 s: it was stopped, or its network is cut"
    assert [member.reason for outgoing in d.notices(1) for member in outgoing.departed] == [
        d.member(0).reason
    ]


def test_the_session_of_a_member_that_is_declared_failed_ends_fenced() -> None:
    d = Driver()
    d.join(0)
    session = d.sessions[0]
    d.apply(d.report(0))
    assert d.ends(session) == [ErrorKind.FENCED]
    d.apply(Heartbeat(session, 9))
    assert d.ends(session) == [ErrorKind.NOT_REGISTERED], "it is told to attach again, and then is fenced"
    d.apply(SessionClosed(session))
    assert d.effects == []


def test_heartbeats_keep_a_member_for_ever_and_cost_one_deadline() -> None:
    d = Driver(1)
    d.join(0)
    for _ in range(100):
        d.beat(3.0, 0)
    assert d.state_of(0) is MemberState.CONNECTED
    assert d.core.next_deadline() is not None
    assert d.core.next_deadline() <= d.now + d.limits.lease  # type: ignore[operator]


def test_any_call_of_a_connected_member_is_a_sign_of_life() -> None:
    d = Driver(1)
    d.join(0)
    for _ in range(4):
        d.advance(10.0)
        d.apply(d.set("key"))
    for _ in range(4):
        d.advance(10.0)
        d.enter(0, "nobody else", -1)
    assert d.state_of(0) is MemberState.CONNECTED


def test_a_member_must_open_a_session_within_its_lease_whatever_else_it_does() -> None:
    d = Driver()
    d.apply(d.register(0))
    d.advance(10.0)
    d.apply(d.set("key"))
    d.advance(5.0)
    assert d.state_of(0) is MemberState.LOST
    assert d.member(0).reason == "it did not open a session within 15.0 s of its registration"


def test_a_clean_goodbye_is_no_loss_and_can_be_repeated() -> None:
    d = Driver()
    d.join(0, 1)
    session = d.sessions[0]
    goodbye = d.leave(0)
    d.accepted(goodbye, Done)
    assert d.state_of(0) is MemberState.LEFT
    assert d.ends(session) == []
    d.accepted(goodbye, Done)
    d.accepted(d.leave(0, "by another name"), Done)
    assert d.state_of(0) is MemberState.LEFT
    d.apply(SessionClosed(session))
    d.advance(20.0)
    assert d.state_of(0) is MemberState.LEFT


def test_leaving_with_a_reason_and_reporting_an_error_are_failures() -> None:
    d = Driver(3)
    d.join(0, 1, 2)
    d.accepted(d.leave(0, "exited without a shutdown"), Done)
    report, session = d.report(1, "ValueError: no"), d.sessions[1]
    d.accepted(report, Done)
    assert d.ends(session) == [ErrorKind.FENCED]
    assert [d.state_of(0), d.state_of(1)] == [MemberState.FAILED] * 2
    assert [d.member(0).reason, d.member(1).reason] == ["exited without a shutdown", "ValueError: no"]
    d.accepted(report, Done)
    assert d.refused(d.report(1)).kind is ErrorKind.FENCED


def test_a_normal_end_of_the_program_is_a_clean_leave_with_a_reason() -> None:
    d = Driver(2)
    d.join(0, 1)
    d.accepted(d.leave(0, "its program ended normally", clean=True), Done)
    assert d.state_of(0) is MemberState.LEFT
    assert d.member(0).reason == "its program ended normally"
    d.enter(1)
    (result,) = d.results(1)
    assert result.error is not None
    assert "left: its program ended normally" in result.error.message


def test_reports_and_reasons_have_a_size() -> None:
    d = Driver()
    d.join(0)
    assert d.refused(d.report(0, "")).kind is ErrorKind.INVALID_ARGUMENT
    assert d.refused(d.report(0, "x" * 4097)).kind is ErrorKind.INVALID_ARGUMENT
    assert d.refused(d.leave(0, "x" * 4097)).kind is ErrorKind.INVALID_ARGUMENT
    assert d.state_of(0) is MemberState.CONNECTED


def test_a_newer_session_replaces_an_older_one() -> None:
    d = Driver()
    d.join(0)
    old = d.sessions[0]
    d.accepted(d.attach(0), Attached)
    assert d.ends(old) == [ErrorKind.NOT_REGISTERED]
    d.apply(SessionClosed(old))
    d.advance(1.0)
    assert d.state_of(0) is MemberState.CONNECTED


def test_sessions_that_are_not_attached_are_told_so() -> None:
    d = Driver()
    d.join(0)
    for event in (Heartbeat(99, 1), EnterBarrier(99, "b", 0, (), None)):
        d.apply(event)
        assert d.ends(99) == [ErrorKind.NOT_REGISTERED]
    assert d.apply(SessionClosed(99)) == []
    assert d.refused(Attach(d.token(), d.caller(0), d.sessions[0])).kind is ErrorKind.INVALID_ARGUMENT


def test_nobody_is_lost_for_a_stall_of_the_server() -> None:
    d = Driver()
    d.join(0, 1)
    d.close(1)
    d.now += 100.0
    d.apply(Tick())
    assert [d.state_of(0), d.state_of(1)] == [MemberState.CONNECTED, MemberState.REGISTERED]
    d.advance(0.31)
    assert d.state_of(1) is MemberState.LOST, "the grace began anew, and is over"
    d.advance(14.0)
    assert d.member(0).liveness is Liveness.LIVE
    d.advance(1.0)
    assert d.member(0).liveness is Liveness.BLOCKED, "so did the lease"


def test_a_stall_counts_by_the_heartbeats_of_each_cluster() -> None:
    quick = ClusterSettings(heartbeat_interval=0.1, lease=0.5)
    d = Driver(2)
    d.apply(d.register(0, settings=quick))
    d.apply(d.register(1))
    d.apply(d.attach(1))
    d.now += 0.7
    d.apply(Tick())
    assert d.state_of(0) is MemberState.REGISTERED
    d.advance(0.51)
    assert d.state_of(0) is MemberState.LOST


def test_deadlines_take_effect_on_a_tick_only() -> None:
    d = Driver()
    d.join(0)
    d.now += 16.0
    d.apply(Heartbeat(d.sessions[0], 1))
    d.apply(Tick())
    assert d.state_of(0) is MemberState.CONNECTED


def test_an_idle_core_wants_no_tick() -> None:
    d = Driver()
    assert d.core.next_deadline() is None
    d.join(0)
    d.apply(d.leave(0))
    assert d.core.next_deadline() is None


def test_shutdown_ends_sessions_and_refuses_everything_but_goodbyes() -> None:
    d = Driver()
    d.join(0, 1)
    read, watch = d.get("key", None), d.watch()
    d.apply(read)
    d.apply(watch)
    d.apply(Shutdown())
    assert d.ends(d.sessions[0]) == d.ends(d.sessions[1]) == [ErrorKind.SHUTTING_DOWN]
    assert [getattr(answer, "kind", None) for answer in d.replies().values()] == [ErrorKind.SHUTTING_DOWN]
    assert [push.error.kind for push in d.watched(watch.token) if push.error] == [ErrorKind.SHUTTING_DOWN]
    assert d.core.next_deadline() is None
    assert d.refused(d.get("key")).kind is ErrorKind.SHUTTING_DOWN
    d.apply(Heartbeat(d.sessions[0], 1))
    assert d.ends(d.sessions[0]) == [ErrorKind.SHUTTING_DOWN]
    d.close(0)
    d.now += 60
    d.apply(Tick())
    d.apply(Shutdown())
    d.accepted(d.leave(0), Done)
    d.restart()
    assert [d.state_of(0), d.state_of(1)] == [MemberState.LEFT, MemberState.REGISTERED]


def test_leases_and_grace_can_be_set() -> None:
    d = Driver(2, Limits(heartbeat_interval=0.1, lease=0.5, session_grace=0.05))
    d.join(0, 1)
    d.advance(0.5)
    assert d.member(0).reason.startswith("no heartbeat for 0.5 s")
    d.close(0)
    d.close(1)
    d.advance(0.06)
    d.accepted(d.register(0, 5), Registered)
