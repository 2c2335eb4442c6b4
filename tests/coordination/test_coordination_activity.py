"""What a process says it is doing, and what is made of what others say."""

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future

import pytest

from dmesh import coordination
from dmesh.coordination.activity import Activity, ActivityTracker
from dmesh.coordination.cluster_settings import ClusterSettings, RestartPolicy
from dmesh.coordination.liveness import LivenessBoard
from dmesh.coordination.members import Liveness, Member, MemberState, Process
from dmesh.errors import ConfigurationError
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# Operations and progress ------------------------------------------------------------------------------------


def test_an_operation_is_known_while_it_lasts_and_its_end_is_progress():
    clock = Clock()
    tracker = ActivityTracker(clock)
    before = tracker.progress
    assert not tracker.waiting
    with tracker.during("barrier 'a'"):
        clock.now += 62
        with tracker.during("waiting for key 'b'"):
            assert tracker.report().operation == "waiting for key 'b'"
            assert tracker.report().age == 62
        assert tracker.report().operation == "barrier 'a'"
        assert tracker.report().age == 0
        assert tracker.waiting
        assert tracker.progress != before
    assert tracker.report().operation == ""
    assert not tracker.waiting


def test_an_operation_that_fails_is_over_too():
    tracker = ActivityTracker()
    before = tracker.progress
    with pytest.raises(KeyError), tracker.during("waiting for key 'b'"):
        raise KeyError
    assert not tracker.waiting
    assert tracker.progress != before


def test_an_operation_is_rendered_only_when_somebody_asks():
    class Expensive:
        asked = 0

        def __str__(self) -> str:
            self.asked += 1
            return "all_reduce \n\ud800" + "x" * 500

    tracker, operation = ActivityTracker(), Expensive()
    with tracker.during(operation):
        assert operation.asked == 0
        message = tracker.report_proto()
    assert len(message.operation) == 200
    assert message.operation.startswith("all_reduce ??x"), "one line of valid text"


def test_what_another_thread_does_is_not_the_main_threads_operation():
    tracker = ActivityTracker()
    with tracker.during("main's"):
        other = threading.Thread(target=lambda: tracker.during("other's").__enter__())
        other.start()
        other.join()
        assert tracker.report().operation == "main's"
    assert tracker.report().operation == ""
    assert tracker.waiting, "the other thread's"


def test_progress_is_public():
    from dmesh.coordination.activity import TRACKER

    before = TRACKER.progress
    coordination.progress()
    assert TRACKER.progress != before


ASKED = """
    import sys, threading
    from dmesh.coordination.activity import ActivityTracker
    tracker = ActivityTracker()
    def answer():
        sys.stdin.readline()
        report = tracker.report()
        print(report.operation, "|", report.where, "|", *report.stack, sep="\\n", flush=True)
        import os; os._exit(0)
    threading.Thread(target=answer, daemon=True).start()
    def stuck():
"""


@pytest.mark.parametrize("how", ["import time; time.sleep(1000)", "open(read).read()", "while True: pass"])
def test_the_stack_is_told_whatever_the_main_thread_does(tmp_path, how):
    """Asleep, in a system call, or computing: a thread tells where."""
    read, write = os.pipe()
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(ASKED)
        + f"    read = {read}\n    print('begun', flush=True)\n    {how}\n"
        + "with tracker.during('step 7'):\n    stuck()\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[read],
    )
    try:
        assert process.stdout.readline() == "begun\n"
        out, _ = process.communicate("now\n", timeout=60)
    finally:
        process.kill()
        os.close(read)
        os.close(write)
    operation, where, stack = out.split("|\n")
    assert operation.strip() == "step 7"
    assert where.startswith("train.py:")
    assert where.strip().endswith(" in stuck")
    assert [line.rpartition(" in ")[2] for line in stack.split("\n") if line][:2] == ["<module>", "stuck"]


def test_a_deep_stack_is_cut_at_the_outer_end():
    tracker = ActivityTracker()

    def deeper(depth: int) -> Activity:
        return deeper(depth - 1) if depth else tracker.report()

    stack = deeper(200).stack
    assert len(stack) == 50
    assert stack[-1].endswith(" in report")
    assert all(len(frame) <= 300 for frame in stack)


def test_where_it_hangs_is_a_line_of_the_users():
    frames = (
        "/u/train.py:31 in step",
        "/v/lib/python3.11/site-packages/dmesh/coordination/agent.py:3 in _await",
    )
    assert Activity("barrier 'b'", 1.0, frames).where == "train.py:31 in step"
    assert Activity("barrier 'b'", 1.0, frames[1:]).where == "agent.py:3 in _await", "better than nothing"
    assert Activity("", 1.0, ()).where == ""
    assert Activity("barrier 'b'", 1.0, frames).describe() == " in barrier 'b' at train.py:31 in step"
    assert Activity("", 1.0, frames[:1]).describe() == " at train.py:31 in step"


@pytest.mark.parametrize(
    "room", ["distribute/steps.py", "tpu/experimental.py", "data/dataset.py", "runtime/connecting.py"]
)
def test_dmesh_itself_is_not_the_users_program_in_a_checkout_either(room):
    frames = ("/u/train.py:31 in step", f"/src/dmesh/client/dmesh/{room}:3 in wait")
    assert Activity("", 1.0, frames).where == "train.py:31 in step"


# What others say --------------------------------------------------------------------------------------------


def member(liveness: int, *, incarnation: int = 7, reason: str = "", operation: str = "") -> Member:
    message = common_pb2.Member(
        task=common_pb2.Task(job="worker", index=2),
        incarnation=incarnation,
        state=common_pb2.MEMBER_STATE_CONNECTED,
        process=common_pb2.Process(host="h", pid=9),
        liveness=liveness,
        reason=reason,
    )
    if liveness == common_pb2.LIVENESS_STUCK:
        message.activity.CopyFrom(
            common_pb2.Activity(operation=operation, age_ms=61_000, stack=["/u/train.py:31 in step"])
        )
    return Member.from_proto(message)


WAITED = "5 members have waited for it for 62 s at barrier 'b'"
NAME = "rank 2, /job:worker/task:2 (host h, pid 9),"


def test_a_stuck_member_is_announced_once_per_change_while_this_process_waits():
    tracker = ActivityTracker()
    lines: list[str] = []
    board = LivenessBoard(1, tracker, lines.append)
    stuck = member(common_pb2.LIVENESS_STUCK, reason=WAITED)
    board.update([stuck])
    assert lines == [], "it holds up nobody here"
    with tracker.during("barrier 'b'"):
        board.update([stuck])
        board.update([member(common_pb2.LIVENESS_STUCK, reason=WAITED.replace("62", "122"))])
        assert lines == [f"{NAME} is stuck at train.py:31 in step: {WAITED}"]
        board.update([member(common_pb2.LIVENESS_STUCK, reason=WAITED, operation="all_reduce")])
        assert lines[1:] == [f"{NAME} is stuck in all_reduce at train.py:31 in step: {WAITED}"]
    board.update([member(common_pb2.LIVENESS_LIVE)])
    board.update([member(common_pb2.LIVENESS_LIVE)])
    assert lines[2:] == [f"{NAME} recovered: it was stuck"]


def test_a_blocked_member_and_this_process_itself():
    tracker = ActivityTracker()
    lines: list[str] = []
    board = LivenessBoard(7, tracker, lines.append)
    with tracker.during("barrier 'b'"):
        board.update([member(common_pb2.LIVENESS_BLOCKED, incarnation=8, reason="no heartbeat for 15 s")])
    board.update([member(common_pb2.LIVENESS_STUCK, reason=WAITED)])
    assert lines == [
        f"{NAME} is blocked: no heartbeat for 15 s",
        f"other ranks are waiting for this process, which is stuck at train.py:31 in step: {WAITED}",
    ]


def test_liveness_of_members_that_this_version_does_not_know():
    assert member(99).liveness is Liveness.UNKNOWN
    assert member(99).trouble == ""
    assert Member("worker", 0, 1, MemberState.CONNECTED, Process()).liveness is Liveness.UNKNOWN


# An agent's listeners ---------------------------------------------------------------------------------------


def test_liveness_and_rejoining_reach_listeners(join, server):
    agent = join(server.address, size=1)
    told: Future = Future()
    slot: Future = Future()
    agent.add_liveness_listener(told.set_result)
    agent.add_rejoin_listener(slot.set_result)
    agent._events.on_liveness([member(common_pb2.LIVENESS_STUCK, reason=WAITED)])
    agent._events.on_rejoined(5, [member(common_pb2.LIVENESS_LIVE)])
    assert told.result(60).activity.where == "train.py:31 in step"
    assert slot.result(60).rank == 2


def test_a_wait_is_reported_again_on_the_next_session(join, server):
    class Box(list):
        send = enter_barrier = list.append

        def put(self, request):
            self.append(request)

    agent = join(server.address, size=3, start=False)
    first, second, third = Box(), Box(), Box()
    agent._events.on_attached(first, again=False)
    agent.report_waiting("", (), 0.0)  # nothing was reported, so nothing is over
    agent.report_waiting("all_reduce number 3", (1, 2), 61.5)
    agent._events.on_detached()
    agent._events.on_attached(second, again=False)
    agent.report_waiting("", (), 0.0)
    agent._events.on_attached(third, again=False)
    report = pb.Waiting(
        operation="all_reduce number 3",
        tasks=[common_pb2.Task(job="worker", index=1), common_pb2.Task(job="worker", index=2)],
        age_ms=61_500,
    )
    assert first == [pb.SessionRequest(waiting=report)]
    assert second == [pb.SessionRequest(waiting=report), pb.SessionRequest(waiting=pb.Waiting())]
    assert third == []


def test_heartbeats_and_answers_tell_of_this_process(join, server):
    tracker = ActivityTracker()
    agent = join(server.address, size=1, start=False, tracker=tracker)
    before = agent._events.progress()
    tracker.mark()
    assert agent._events.progress() != before
    with tracker.during("step 3"):
        assert agent._events.on_status_request().operation == "step 3"


# Settings of a cluster --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        ClusterSettings(),
        ClusterSettings(RestartPolicy.REJOIN, 0.5, 2.0, 60.0),
        ClusterSettings(RestartPolicy.FAIL_FAST, stuck_after=0.0),
    ],
)
def test_cluster_settings_cross_the_wire(settings):
    assert (
        ClusterSettings.from_proto(pb.ClusterSettings.FromString(settings.to_proto().SerializeToString()))
        == settings
    )


def test_a_wish_of_never_is_not_the_absence_of_a_wish():
    assert ClusterSettings(stuck_after=0.0).to_proto().stuck_after_ms == -1
    assert ClusterSettings().to_proto() == pb.ClusterSettings()
    assert ClusterSettings(lease=0.0001 + 0.001).to_proto().lease_ms == 1


def test_cluster_settings_are_checked():
    with pytest.raises(ConfigurationError, match="lease must be a number of seconds"):
        ClusterSettings(lease=-1.0)
