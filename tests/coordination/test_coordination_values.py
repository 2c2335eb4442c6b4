"""The parts that need no server: retries, contact, errors, instances, heartbeats, names."""

from __future__ import annotations

import itertools
import os
import threading

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh import errors
from dmesh.coordination import faults
from dmesh.coordination.barriers import Barriers, participant_tasks, timeout_ms
from dmesh.coordination.calls import Announcer
from dmesh.coordination.carrier import Heartbeats
from dmesh.coordination.channel import Contact, channel_options
from dmesh.coordination.dispatcher import EventDispatcher
from dmesh.coordination.identity import Identity
from dmesh.coordination.members import Member, MemberState, Process, Task
from dmesh.coordination.process import new_incarnation, started_at, this_process
from dmesh.coordination.retry import RetryPolicy
from dmesh.coordination.stream import GrpcStream
from dmesh.v1 import common_pb2, coordination_pb2

WORKER = Task("worker", 0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# Retries and contact


def test_delays_grow_to_the_maximum() -> None:
    policy = RetryPolicy(initial=0.1, factor=2.0, maximum=0.5, jitter=0.2)
    nominal = list(itertools.islice(policy.delays(lambda: 0.5), 5))
    assert nominal == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])


@given(st.floats(0, 1, exclude_max=True))
def test_delays_stay_within_the_jitter(draw: float) -> None:
    policy = RetryPolicy()
    delay = next(policy.delays(lambda: draw))
    assert 0.8 * policy.initial <= delay <= 1.2 * policy.initial


@pytest.mark.parametrize(
    "bad", [{"initial": 0}, {"factor": 0.5}, {"jitter": 1}, {"initial": 2, "maximum": 1}]
)
def test_unusable_policies_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="retry policy"):
        RetryPolicy(**bad)


def test_contact_is_lost_after_silence_and_failure_only() -> None:
    clock = Clock()
    contact = Contact(clock)
    contact.heard()
    clock.now += 100
    assert contact.silence == 100
    assert not contact.lost_for(20), "silence alone may be this process's own absence"
    contact.failed()
    assert not contact.lost_for(20), "a single failure this moment does not count"
    clock.now += 2
    assert contact.lost_for(20)
    contact.heard()
    assert not contact.lost_for(20)
    contact.failed()
    clock.now += 19
    assert not contact.lost_for(20)
    clock.now += 2
    assert contact.lost_for(20)


def test_a_connection_that_lives_is_never_lost() -> None:
    clock = Clock()
    contact = Contact(clock)
    contact.heard()
    contact.connected()
    contact.failed()
    clock.now += 1000
    assert contact.blocked
    assert not contact.lost_for(20), "a server that is blocked is waited for as long as it takes"
    contact.disconnected(15)
    assert not contact.blocked
    assert contact.silence == 15, "it may have answered pings until then"
    clock.now += 4
    assert not contact.lost_for(20)
    clock.now += 2
    assert contact.lost_for(20)
    contact.disconnected(15)
    assert contact.lost_for(20), "only the end of a connection is a sign that there was one"


def test_no_proxy_unless_asked() -> None:
    assert dict(channel_options())["grpc.enable_http_proxy"] == 0
    assert dict(channel_options(use_proxy=True))["grpc.enable_http_proxy"] == 1


def test_announcer_speaks_once_per_interval() -> None:
    clock, said = Clock(), []
    announcer = Announcer(said.append, 10.0, clock)
    assert not announcer.due
    clock.now += 10
    assert announcer.due
    announcer.say("waiting")
    assert said == ["waiting"]
    assert not announcer.due
    assert announcer.left == 10


# Errors


def test_every_kind_of_error_has_a_class() -> None:
    for name, kind in common_pb2.ErrorKind.items():
        if kind:
            error = faults.from_error(common_pb2.Error(kind=kind, message="what happened")).exception()
            assert isinstance(error, errors.DMeshError), name
            assert str(error) == "what happened"


@pytest.mark.parametrize(
    ("kind", "cls", "builtin"),
    [
        (common_pb2.ERROR_KIND_TASK_TAKEN, errors.ClientIdTakenError, RuntimeError),
        (common_pb2.ERROR_KIND_SPEC_MISMATCH, errors.JobMismatchError, ValueError),
        (common_pb2.ERROR_KIND_FENCED, errors.FencedError, RuntimeError),
        (common_pb2.ERROR_KIND_BARRIER_TIMEOUT, errors.BarrierTimeoutError, TimeoutError),
        (common_pb2.ERROR_KIND_BARRIER_MISMATCH, errors.BarrierMismatchError, ValueError),
        (common_pb2.ERROR_KIND_KEY_NOT_FOUND, errors.KeyNotFoundError, KeyError),
        (common_pb2.ERROR_KIND_KEY_NOT_INTEGER, errors.KeyTypeError, TypeError),
        (common_pb2.ERROR_KIND_DEADLINE_EXCEEDED, errors.KeyWaitTimeoutError, TimeoutError),
        (common_pb2.ERROR_KIND_SHUTTING_DOWN, errors.CoordinatorUnavailableError, ConnectionError),
    ],
)
def test_kinds_become_classes_that_also_are_builtins(kind: int, cls: type, builtin: type) -> None:
    member = common_pb2.Member(task=common_pb2.Task(job="worker", index=3), incarnation=5)
    fault = faults.from_error(common_pb2.Error(kind=kind, message="m", members=[member]))
    error = fault.exception()
    assert type(error) is cls
    assert isinstance(error, builtin)
    assert fault.exception() is not error, "each thread gets its own"
    if isinstance(error, errors.CoordinationError):
        assert [m.rank for m in error.members] == [3]


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (
            "UNKNOWN_TASK",
            ["caller.task.job", "caller.task.index"],
            "m. Check DTENSOR_CLIENT_ID and DTENSOR_JOB_NAME.",
        ),
        ("TASK_TAKEN", ["caller.task.job"], "m. Start as many clients as DMESH_NUM_CLIENTS says"),
        (
            "SPEC_MISMATCH",
            ["settings.restart_policy"],
            "m. Leave DMESH_RESTART_POLICY unset, or set it alike",
        ),
        (
            "SPEC_MISMATCH",
            ["settings.lease_ms"],
            "m. Leave DMESH_LEASE unset, or set it alike for all clients.",
        ),
        ("INVALID_ARGUMENT", ["settings.stuck_after_ms"], "m. Correct DMESH_STUCK_AFTER."),
        (
            "INVALID_ARGUMENT",
            ["settings.heartbeat_interval_ms", "settings.lease_ms"],
            "m. Correct DMESH_HEARTBEAT_INTERVAL and DMESH_LEASE.",
        ),
        ("INVALID_ARGUMENT", ["a field of a later release"], "m."),
    ],
)
def test_a_refused_field_names_the_settings_it_comes_from(kind: str, fields: list[str], said: str) -> None:
    error = common_pb2.Error(
        kind=common_pb2.ErrorKind.Value(f"ERROR_KIND_{kind}"), message="m.", fields=fields
    )
    assert str(faults.from_error(error).exception()).startswith(said)


def test_an_unknown_kind_is_still_an_error() -> None:
    assert isinstance(faults.Fault(12345, "new").exception(), errors.CoordinationError)


class FakeRpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple = ()) -> None:
        self._answer = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._answer[0]

    def details(self) -> str:
        return self._answer[1]

    def trailing_metadata(self) -> tuple:
        return self._answer[2]


def test_the_servers_error_wins_over_the_status() -> None:
    inner = common_pb2.Error(kind=common_pb2.ERROR_KIND_FENCED, message="fenced", epoch=7)
    error = FakeRpcError(
        grpc.StatusCode.UNAVAILABLE, "x", (("other", "1"), ("dmesh-error-bin", inner.SerializeToString()))
    )
    fault = faults.from_rpc(error)
    assert fault.from_server
    assert fault.fences
    assert not fault.transient
    assert (fault.message, fault.epoch) == ("fenced", 7)


def test_garbage_beside_the_status_is_ignored() -> None:
    error = FakeRpcError(grpc.StatusCode.UNAVAILABLE, "gone", (("dmesh-error-bin", b"\xff\xff"),))
    fault = faults.from_rpc(error)
    assert not fault.from_server
    assert fault.transient
    assert fault.message == "gone"


@pytest.mark.parametrize(
    ("code", "details", "transient"),
    [
        (grpc.StatusCode.UNAVAILABLE, "", True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", True),
        (grpc.StatusCode.UNKNOWN, "Stream removed", True),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", True),
        (grpc.StatusCode.INTERNAL, "a bug", False),
        (grpc.StatusCode.UNIMPLEMENTED, "", False),
        (grpc.StatusCode.PERMISSION_DENIED, "", False),
    ],
)
def test_which_statuses_are_worth_another_attempt(
    code: grpc.StatusCode, details: str, transient: bool
) -> None:
    assert faults.from_rpc(FakeRpcError(code, details)).transient is transient


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused", "nothing listens there"),
        ("errors resolving x:1: [lookup failed for x:1: Domain name not found]", "its name is not known"),
        ("connection attempt timed out before receiving SETTINGS frame", "nothing was answered"),
        ("Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got", "does not speak gRPC"),
        ("something new", "something new"),
    ],
)
def test_causes_are_said_in_plain_words(details: str, words: str) -> None:
    error = faults.unavailable("h:1", details, 2.5, doing="joining cluster 'c'", ever_connected=False)
    assert words in str(error)
    assert "the coordinator at h:1 did not answer within 2.5 s" in str(error)
    assert "dmesh serve --listen h:1" in str(error)


def test_too_large_a_message_is_a_limit() -> None:
    fault = faults.from_rpc(FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max"))
    assert isinstance(fault.exception(), errors.LimitExceededError)


# Barriers


def result(name: str, instance: int, kind: int = 0) -> coordination_pb2.BarrierResult:
    error = common_pb2.Error(kind=kind, message="m") if kind else None
    return coordination_pb2.BarrierResult(name=name, instance=instance, error=error)


def test_instances_are_counted_by_name() -> None:
    barriers, sent = Barriers(), []
    barriers.attach(sent.append)
    for name, instance in (("a", 0), ("a", 1), ("b", 0), ("a", 2)):
        arrival = barriers.enter(name, (), 0)
        assert sent[-1].instance == instance
        barriers.resolve(result(name, instance))
        assert arrival.wait(0)
        assert arrival.fault is None
    assert barriers.instance("a") == 3


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        (common_pb2.ERROR_KIND_BARRIER_TIMEOUT, True),
        (common_pb2.ERROR_KIND_BARRIER_FAILED, True),
        (common_pb2.ERROR_KIND_BARRIER_CANCELLED, True),
        (common_pb2.ERROR_KIND_BARRIER_MISMATCH, True),
        (common_pb2.ERROR_KIND_UNKNOWN_TASK, False),
        (common_pb2.ERROR_KIND_LIMIT_EXCEEDED, False),
    ],
)
def test_outcomes_count_and_refusals_do_not(kind: int, counts: bool) -> None:
    barriers = Barriers()
    arrival = barriers.enter("a", (), 0)
    barriers.resolve(result("a", 0, kind))
    assert arrival.wait(0)
    assert arrival.fault is not None
    assert barriers.instance("a") == int(counts)


def test_arrivals_without_outcome_are_presented_to_each_new_session() -> None:
    barriers, first, second = Barriers(), [], []
    early = barriers.enter("early", (WORKER,), 5)
    barriers.attach(first.append)
    barriers.enter("late", (), 0)
    barriers.resolve(result("late", 0))
    barriers.detach()
    barriers.attach(second.append)
    assert [request.name for request in first] == ["early", "late"]
    assert second == [early.request]


def test_a_server_that_stops_settles_nothing() -> None:
    barriers, sent = Barriers(), []
    arrival = barriers.enter("a", (), 0)
    barriers.resolve(result("a", 0, common_pb2.ERROR_KIND_SHUTTING_DOWN))
    assert not arrival.wait(0)
    barriers.attach(sent.append)
    assert sent == [arrival.request]


def test_stale_and_foreign_outcomes_are_dropped() -> None:
    barriers = Barriers()
    arrival = barriers.enter("a", (), 0)
    barriers.resolve(result("a", 7))
    barriers.resolve(result("b", 0))
    assert not arrival.wait(0)


def test_an_interrupted_wait_presents_the_same_instance_again() -> None:
    barriers, sent = Barriers(), []
    barriers.attach(sent.append)
    barriers.give_up(barriers.enter("a", (), 0))
    barriers.resolve(result("a", 0))
    barriers.enter("a", (), 0)
    assert [request.instance for request in sent] == [0, 0]


def test_the_count_of_old_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmesh.coordination.barriers.MAX_NAMES", 2)
    barriers = Barriers()
    for name in ("a", "b", "a", "c"):
        instance = barriers.instance(name)
        barriers.enter(name, (), 0)
        barriers.resolve(result(name, instance))
    assert [barriers.instance(name) for name in ("a", "b", "c")] == [2, 0, 1]


def test_two_waits_at_one_barrier_are_refused_at_once() -> None:
    barriers = Barriers()
    barriers.enter("a", (), 0)
    with pytest.raises(errors.BarrierMismatchError, match="another thread of this process already waits"):
        barriers.enter("a", (), 0)


def test_waking_is_not_settling() -> None:
    barriers = Barriers()
    arrival = barriers.enter("a", (), 0)
    barriers.wake()
    assert not arrival.wait(60)
    barriers.resolve(result("a", 0))
    assert arrival.wait(60)


def test_participants_are_ranks_or_tasks() -> None:
    assert participant_tasks(None, WORKER, 4) == ()
    assert participant_tasks([2, "/job:worker/task:0"], WORKER, 4) == (WORKER, Task("worker", 2))
    assert participant_tasks({0, 1}, WORKER, 4) == (WORKER, Task("worker", 1))
    assert participant_tasks(range(2), WORKER, 4) == (WORKER, Task("worker", 1))


@pytest.mark.parametrize(
    ("participants", "match"),
    [
        ([], "needs participants"),
        ([0, 0], "listed more than once"),
        ([0, 4], "does not exist; ranks go from 0 to 3"),
        ([0, -1], "does not exist"),
        ([0, True], "not a participant"),
        ([0, 1.0], "not a participant"),
        ([0, "worker"], "write it as"),
        ("01", "must be a collection"),
        (3, "must be a collection"),
    ],
)
def test_bad_participants_are_refused(participants: object, match: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=match):
        participant_tasks(participants, WORKER, 4)


def test_who_calls_must_take_part() -> None:
    with pytest.raises(errors.BarrierMismatchError, match="is not among its participants"):
        participant_tasks([1, 2], WORKER, 4)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "3", True])
def test_bad_timeouts_are_refused(bad: object) -> None:
    with pytest.raises(errors.ConfigurationError, match="positive number of seconds"):
        timeout_ms(bad)


def test_short_timeouts_are_not_rounded_to_none() -> None:
    assert timeout_ms(None) == 0
    assert timeout_ms(0.0001) == 1
    assert timeout_ms(1.5) == 1500


@pytest.mark.parametrize("name", ["", "x" * 257, 3])
def test_bad_names_are_refused(name: object) -> None:
    with pytest.raises(errors.ConfigurationError, match="name"):
        Barriers().enter(name, (), 0)


# Heartbeats


def beat(heartbeats: Heartbeats) -> coordination_pb2.Heartbeat | None:
    encoded = heartbeats.take()
    return encoded and coordination_pb2.SessionRequest.FromString(encoded).heartbeat


def test_heartbeats_come_on_time() -> None:
    clock = Clock()
    heartbeats = Heartbeats(3.0, lambda: 7, clock)
    heartbeats.start()
    assert beat(heartbeats) is None
    clock.now += 2
    assert heartbeats.left == 1
    clock.now += 1
    assert beat(heartbeats) == coordination_pb2.Heartbeat(sequence=1, progress=7)
    assert beat(heartbeats) is None
    clock.now += 30
    assert beat(heartbeats).sequence == 2
    assert beat(heartbeats) is None, "ten missed heartbeats are one"


def test_no_heartbeat_before_the_session_is_attached() -> None:
    clock = Clock()
    heartbeats = Heartbeats(3.0, lambda: 0, clock)
    clock.now += 3
    assert beat(heartbeats) is None
    assert heartbeats.left == 3


class NoLink:
    address = "nowhere:1"


def test_heartbeats_go_before_what_waits_for_the_stream() -> None:
    clock = Clock()
    stream = GrpcStream(NoLink(), Heartbeats(3.0, lambda: 7, clock))
    stream.heartbeats.start()
    stream.enter_barrier(coordination_pb2.EnterBarrier(name="a"))
    clock.now += 3
    drawn = [coordination_pb2.SessionRequest.FromString(next(stream)) for _ in range(2)]
    assert [request.WhichOneof("kind") for request in drawn] == ["heartbeat", "enter_barrier"]


def test_a_closed_stream_ends_whoever_draws_from_it() -> None:
    stream = GrpcStream(NoLink(), Heartbeats(3600.0, lambda: 0))
    drawn: list[object] = []
    thread = threading.Thread(target=lambda: drawn.extend(stream))
    thread.start()
    stream.put(coordination_pb2.SessionRequest(heartbeat=coordination_pb2.Heartbeat(sequence=9)))
    stream.close()
    thread.join(60)
    assert not thread.is_alive()
    stream.put(coordination_pb2.SessionRequest())
    assert list(stream) == []


# Notices


def member(index: int, state: MemberState = MemberState.LOST) -> Member:
    return Member("worker", index, 100 + index, state, Process("h", 9))


def test_each_departure_is_told_once_to_each_listener_also_to_a_late_one() -> None:
    notices, early, late = EventDispatcher("test-notices"), [], []
    notices.add_departure_listener(early.append)
    notices.departed([member(1), member(2)])
    notices.departed([member(2), member(3)])
    notices.add_departure_listener(late.append)
    notices.close()
    assert [m.rank for m in early] == [1, 2, 3]
    assert [m.rank for m in late] == [1, 2, 3]


def test_a_listener_that_fails_does_not_silence_the_others(caplog: pytest.LogCaptureFixture) -> None:
    notices, told = EventDispatcher("test-notices"), []

    def fail(_: Member) -> None:
        raise RuntimeError("broken listener")

    notices.add_departure_listener(fail)
    notices.add_departure_listener(told.append)
    notices.departed([member(1)])
    notices.close()
    assert told == [member(1)]
    assert "broken listener" in caplog.text


def test_a_listener_may_close_the_notices() -> None:
    notices, closed = EventDispatcher("test-notices"), threading.Event()

    def close(_: Member) -> None:
        notices.close()
        closed.set()

    notices.add_departure_listener(close)
    notices.departed([member(1)])
    assert closed.wait(60)
    notices.close()


def test_a_listener_hears_of_a_departure_when_the_program_is_over(server, join, spawn) -> None:
    """Python 3.12 and later start no thread for the first one any more."""
    other = join(server.address, 0)
    child = spawn(
        """
        import atexit, queue
        departed = queue.SimpleQueue()

        def over():
            say("over")
            say(departed.get(timeout=30).state.name)
            agent.leave()

        agent.start()
        agent.add_departure_listener(departed.put)
        atexit.register(over)
        """,
        server.address,
        1,
    )
    child.wait_for("over")
    other.leave()
    assert child.wait(60) == 0
    assert child.out.endswith("LEFT")
    assert child.err == ""


def test_final_failures_are_told_to_late_listeners_and_others_are_not() -> None:
    for final in (True, False):
        notices, told = EventDispatcher("test-notices"), []
        notices.failed(errors.FencedError("out"), final=final)
        notices.add_failure_listener(told.append)
        notices.close()
        assert len(told) == int(final)


# Names and facts


def test_tasks_are_read_and_written() -> None:
    task = Task("worker", 12)
    assert str(task) == "/job:worker/task:12"
    assert Task.parse("/job:worker/task:12") == task
    assert Task.parse("/job:worker/replica:0/task:12") == task
    assert Task.from_proto(task.to_proto()) == task


@given(st.text())
def test_no_other_text_is_a_task(text: str) -> None:
    if not text.startswith("/job:"):
        with pytest.raises(errors.ConfigurationError, match="/job:NAME/task:N"):
            Task.parse(text)


def test_members_describe_themselves() -> None:
    assert member(2).describe() == "/job:worker/task:2 (host h, pid 9)"
    assert member(2).task == "/job:worker/task:2"
    vacant = Member("worker", 3, 0, MemberState.REGISTERED, Process())
    assert vacant.describe() == "/job:worker/task:3 (never registered)"


def test_a_state_from_the_future_is_unknown() -> None:
    assert Member.from_proto(common_pb2.Member(state=77)).state is MemberState.UNKNOWN


def test_facts_about_this_process() -> None:
    process = this_process()
    assert process.pid == os.getpid()
    assert process.host
    assert process.program
    assert Process.from_proto(process.to_proto()) == process
    assert abs(started_at() - started_at()) < 1
    assert len({new_incarnation() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("job", "index", "match"),
    [
        ("other", 0, "is not one of the cluster's: worker"),
        ("worker", 2, "it has 2 tasks"),
        ("worker", -1, "has 2"),
    ],
)
def test_an_identity_must_be_one_of_the_clusters(job: str, index: int, match: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=match):
        Identity.of_this_process(job, index, {"worker": ("a:1", "b:2")})


def test_a_coordinator_that_refuses_at_once_is_said_to_have_had_no_time() -> None:
    error = faults.unavailable("h:1", "Connection refused", 0.0, doing="asking it", ever_connected=False)
    assert "the coordinator at h:1 did not answer (connection refused" in str(error)
    error = faults.unavailable("h:1", "Connection refused", 0.0, doing="asking it", ever_connected=True)
    assert "no contact with the coordinator at h:1 (connection refused" in str(error)
