"""How members are found to be gone: broken sessions, leases, goodbyes; and how they are not."""

from __future__ import annotations

from dataclasses import replace

from tests.server.core.driving import Driver, worker

from dmesh_server.core.effects import Attached, Done, HeartbeatAck, ProcessQuery, Registered
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.events import (
    Abandon,
    Attach,
    EndSession,
    EnterBarrier,
    Evidence,
    Heartbeat,
    ReportProcess,
    SessionClosed,
    Shutdown,
    Tick,
)
from dmesh_server.core.model import Limits, Liveness, MemberState, Process


def test_a_session_makes_a_member_connected_and_heartbeats_are_acknowledged() -> None:
    d = Driver()
    d.apply(d.register(0))
    epoch = d.accepted(d.attach(0), Attached).epoch
    assert d.state_of(0) is MemberState.CONNECTED
    d.apply(Heartbeat(d.sessions[0], 5))
    assert d.pushed(0) == [HeartbeatAck(5, epoch)]
    assert epoch == d.state().epoch


def test_a_session_that_comes_back_in_time_is_not_noticed() -> None:
    d = Driver()
    d.join(0, 1)
    epoch = d.state().epoch
    d.close(0)
    assert d.state_of(0) is MemberState.REGISTERED
    d.advance(4.9)
    d.accepted(d.attach(0), Attached)
    d.beat(60.0, 0, 1)
    assert d.state_of(0) is MemberState.CONNECTED
    assert d.state().epoch == epoch


def test_a_session_that_does_not_come_back_is_a_loss() -> None:
    d = Driver()
    d.join(0, 1)
    d.close(0)
    d.advance(5.1)
    assert d.state_of(0) is MemberState.LOST
    assert d.member(0).reason == "its connection closed without a goodbye and was not built up again"
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
    d.beat(12.4, 1)
    d.close(0)
    d.advance(3.0)
    assert d.member(0).reason == "no sign of life for 15.0 s: it was stopped, or its network is cut"
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


def test_without_a_session_calls_alone_keep_a_member() -> None:
    d = Driver()
    d.apply(d.register(0))
    for _ in range(5):
        d.advance(10.0)
        d.apply(d.set("key"))
    d.advance(14.9)
    assert d.state_of(0) is MemberState.REGISTERED
    d.advance(0.2)
    assert d.state_of(0) is MemberState.LOST
    assert d.member(0).reason == "no sign of life for 15.0 s, and no session"


def test_an_open_call_keeps_a_member_without_a_session() -> None:
    d = Driver()
    d.apply(d.register(0))
    read = d.get("key", None)
    d.apply(read)
    d.advance(100.0)
    assert d.state_of(0) is MemberState.REGISTERED
    d.apply(Abandon(read.token))
    d.advance(15.1)
    assert d.state_of(0) is MemberState.LOST


def test_who_is_suspected_has_its_process_looked_for() -> None:
    d = Driver()
    d.apply(d.register(0, process=Process("host0", 70, "boot", pid_namespace="pid:[1]", start_ticks=7)))
    d.apply(d.attach(0))
    d.apply(SessionClosed(d.sessions[0], "10.0.0.1"))
    (probe,) = d.probes()
    assert (probe.task, probe.process.pid, probe.peer_addresses) == (worker(0), 70, ("host0:70",))
    assert probe.remote == "10.0.0.1"
    assert d.core.is_suspected(probe.lease)
    d.apply(d.attach(0))
    assert not d.core.is_suspected(probe.lease)


def test_a_process_that_is_gone_is_lost_at_once() -> None:
    d = Driver()
    d.join(0, 1)
    d.close(0)
    d.evidence(0, gone=True)
    assert d.member(0).reason == "its connection closed without a goodbye, and its process is gone"
    assert [member.state for notice in d.notices(1) for member in notice.departed] == [MemberState.LOST]


def test_a_process_that_exists_has_its_whole_lease() -> None:
    d = Driver()
    d.join(0, 1)
    d.close(0)
    d.evidence(0, gone=False)
    d.beat(14.9, 1)
    assert d.state_of(0) is MemberState.REGISTERED
    d.beat(0.2, 1)
    assert d.state_of(0) is MemberState.LOST


def test_evidence_counts_only_while_the_suspicion_lasts() -> None:
    d = Driver()
    d.join(0, 1)
    d.close(0)
    (probe,) = d.probes()
    d.apply(d.attach(0))
    late = Evidence("c", worker(0), probe.lease, True, "its process is gone")
    assert d.apply(late) == []
    assert d.state_of(0) is MemberState.CONNECTED
    assert d.apply(replace(late, cluster="unknown")) == d.apply(replace(late, task=worker(7))) == []


def neighbors(d: Driver, *places: str) -> None:
    for index, place in enumerate(places):
        process = Process(f"host{index}", 70 + index, "boot", pid_namespace=place, start_ticks=index + 1)
        d.apply(d.register(index, process=process))
        d.apply(d.attach(index))


def test_members_of_the_same_host_are_asked_for_a_process() -> None:
    d = Driver(5)
    neighbors(d, "pid:[1]", "pid:[2]", "pid:[1]", "pid:[1]", "pid:[1]")
    d.close(0)
    lease = d.probes()[0].lease
    query = ProcessQuery(worker(0), lease, 70, 1)
    assert [d.pushed(index) for index in range(1, 5)] == [[], [query], [query], []]
    d.apply(ReportProcess(d.sessions[1], worker(0), lease, True))
    assert d.state_of(0) is MemberState.REGISTERED, "it is on another host, and cannot know"
    d.apply(ReportProcess(d.sessions[2], worker(0), lease, True))
    assert d.state_of(0) is MemberState.LOST
    assert "its process is gone, says /job:worker/task:2" in d.member(0).reason


def test_who_ends_its_session_for_good_is_lost_at_once() -> None:
    d = Driver()
    d.join(0, 1)
    d.apply(EndSession(d.sessions[0]))
    assert d.ends(d.sessions[0]) == [ErrorKind.FENCED]
    assert d.state_of(0) is MemberState.LOST
    assert d.member(0).reason == "it ended its session without a goodbye"
    d.apply(EndSession(99))
    assert d.ends(99) == [ErrorKind.NOT_REGISTERED]


def test_a_member_that_is_blocked_has_time_to_come_back_when_its_connection_breaks() -> None:
    d = Driver()
    d.join(0, 1)
    d.beat(20.0, 1)
    assert d.member(0).liveness is Liveness.BLOCKED
    d.close(0)
    d.beat(4.9, 1)
    d.accepted(d.attach(0), Attached)
    assert d.member(0).liveness is Liveness.LIVE


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
    d.stall(100.0)
    assert [d.state_of(0), d.state_of(1)] == [MemberState.CONNECTED, MemberState.REGISTERED]
    d.advance(5.9)
    assert d.state_of(1) is MemberState.REGISTERED, "a moment more, for what was queued"
    d.advance(0.2)
    assert d.state_of(1) is MemberState.LOST
    d.advance(9.8)
    assert d.member(0).liveness is Liveness.LIVE
    d.advance(0.2)
    assert d.member(0).liveness is Liveness.BLOCKED


def test_an_attach_that_waited_for_the_server_is_in_time() -> None:
    for stall in (0.3, 1.0, 3.0, 30.0):
        d = Driver()
        d.join(0, 1)
        d.close(0)
        d.advance(4.9)
        d.stall(stall)
        d.advance(0.2)
        d.accepted(d.attach(0), Attached)


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


def test_leases_can_be_set() -> None:
    d = Driver(2, Limits(heartbeat_interval=0.1, lease=0.5))
    d.join(0, 1)
    d.advance(0.5)
    assert d.member(0).reason.startswith("no heartbeat for 0.5 s")
    d.close(0)
    d.close(1)
    d.advance(0.51)
    d.accepted(d.register(0, 5), Registered)
