"""What operators may do from outside, and what is told of what happened."""

from __future__ import annotations

import pytest
from tests.server.core.driving import Driver, worker

from dmesh_server.core.effects import Noted, Operated
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import DropKey, Evict, StopBarrier
from dmesh_server.core.log_events import (
    BarrierEnded,
    ClusterEnded,
    ClusterFormed,
    MemberDeparted,
    MemberJoined,
)
from dmesh_server.core.model import Caller, ClusterSettings, MemberState, RestartPolicy, Task

OPERATOR = Caller("c")


def evict(d: Driver, index: int, incarnation: int | None = None, **changes: object) -> Evict:
    fields = {"by": "token 1234abcd", "task": worker(index), "reason": "too slow"} | changes
    return Evict(d.token(), OPERATOR, incarnation=incarnation or 1000 + index, **fields)  # type: ignore[arg-type]


def stop(d: Driver, name: str = "b", instance: int = 0) -> StopBarrier:
    return StopBarrier(d.token(), OPERATOR, "token 1234abcd", name, instance)


def drop(d: Driver, key: str, revision: int) -> DropKey:
    return DropKey(d.token(), OPERATOR, "token 1234abcd", key, revision)


def log_events(d: Driver) -> list[object]:
    return [effect.log_event for effect in d.effects if isinstance(effect, Noted)]


def test_an_evicted_member_has_failed_and_everybody_is_told() -> None:
    d = Driver(2)
    d.join(0, 1)
    assert d.accepted(evict(d, 1), Operated).changed
    (outgoing,) = d.notices(0)
    assert outgoing.departed[0].reason == "evicted by an operator (token 1234abcd): too slow"
    assert d.ends(d.sessions[1]) == [ErrorKind.FENCED]
    assert d.state_of(1) is MemberState.FAILED
    assert d.refused(d.set("k", index=1)).kind is ErrorKind.FENCED
    epoch = d.state().epoch
    assert not d.accepted(evict(d, 1), Operated).changed, "it is gone already"
    assert d.state().epoch == epoch


def test_only_the_process_that_was_meant_is_evicted() -> None:
    d = Driver(2)
    settings = ClusterSettings(RestartPolicy.REJOIN)
    d.apply(d.register(0, settings=settings))
    d.apply(d.attach(0))
    d.apply(d.register(1, settings=settings))
    d.apply(d.report(1))
    d.apply(d.register(1, 77, settings=settings))
    assert d.refused(evict(d, 1, 4711)).kind is ErrorKind.NOT_REGISTERED
    assert not d.accepted(evict(d, 1), Operated).changed, "its task slot has been taken since"
    assert d.state_of(1) is MemberState.REGISTERED
    assert d.accepted(evict(d, 1, 77), Operated).changed


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"task": Task("worker", 9)}, ErrorKind.UNKNOWN_TASK),
        ({"task": Task("x\n", 0)}, ErrorKind.UNKNOWN_TASK),
        ({"task": worker(1)}, ErrorKind.NOT_REGISTERED),
        ({"by": ""}, ErrorKind.INVALID_ARGUMENT),
        ({"by": "a\nb"}, ErrorKind.INVALID_ARGUMENT),
        ({"reason": "x" * 5000}, ErrorKind.INVALID_ARGUMENT),
    ],
)
def test_evictions_that_make_no_sense(changes: dict[str, object], kind: ErrorKind) -> None:
    d = Driver(2)
    d.join(0)
    assert d.refused(evict(d, 0, **changes)).kind is kind
    assert d.state_of(0) is MemberState.CONNECTED


def test_members_are_no_operators_and_clusters_must_be_there() -> None:
    d = Driver(2)
    d.join(0)
    event = StopBarrier(d.token(), d.caller(0), "me", "b", 0)
    assert d.refused(event).kind is ErrorKind.INVALID_ARGUMENT
    event = StopBarrier(d.token(), Caller("nothing"), "me", "b", 0)
    assert d.refused(event).kind is ErrorKind.NOT_REGISTERED


def test_a_stopped_barrier_fails_for_all_and_stays_stopped() -> None:
    d = Driver(2)
    d.join(0, 1)
    d.enter(0)
    assert d.accepted(stop(d), Operated).changed
    (result,) = d.results(0)
    assert result.error is not None
    assert result.error.kind is ErrorKind.BARRIER_CANCELLED
    assert "cancelled by an operator (token 1234abcd) after 1 of 2 tasks had arrived" in result.error.message
    assert not d.accepted(stop(d), Operated).changed
    assert d.refused(stop(d, instance=1)).kind is ErrorKind.BARRIER_MISMATCH
    assert d.refused(stop(d, instance=-1)).kind is ErrorKind.INVALID_ARGUMENT
    d.restart()
    assert not d.accepted(stop(d), Operated).changed, "also after a crash"


def test_a_key_is_dropped_as_it_was_seen() -> None:
    d = Driver(1)
    d.join(0)
    d.apply(d.set("k", b"1"))
    d.apply(d.set("k", b"2"))
    assert d.refused(drop(d, "k", 1)).kind is ErrorKind.KEY_EXISTS
    assert d.accepted(drop(d, "k", 2), Operated).changed
    assert not d.accepted(drop(d, "k", 2), Operated).changed
    assert d.refused(d.get("k")).kind is ErrorKind.KEY_NOT_FOUND
    d.apply(d.set("k", b"3"))
    assert d.refused(drop(d, "k", 2)).kind is ErrorKind.KEY_EXISTS, "that is another one"
    assert d.refused(drop(d, "", 1)).kind is ErrorKind.INVALID_ARGUMENT, "there cannot be such a key"
    assert isinstance(d.answer(drop(d, "k", 0)), CoreError)


def test_what_happened_is_told_once() -> None:
    d = Driver(2)
    d.apply(d.register(0))
    formed, joined = log_events(d)
    assert isinstance(formed, ClusterFormed)
    assert formed.tasks == 2
    assert isinstance(joined, MemberJoined)
    assert (joined.member.task, joined.member.devices, joined.rejoined) == (worker(0), (), False)
    d.apply(d.register(0))
    assert log_events(d) == [], "a retry"
    d.apply(d.attach(0))
    d.join(1)
    d.enter(0)
    assert log_events(d) == []
    d.now += 1.5
    d.enter(1)
    (ended,) = log_events(d)
    assert isinstance(ended, BarrierEnded)
    assert (ended.waited, ended.error, ended.missing_count, ended.participants) == (1.5, "", 0, 2)
    d.enter(0, instance=1)
    d.lose(0)  # nobody is left at the barrier to be told
    departed, failed = log_events(d)
    assert isinstance(departed, MemberDeparted)
    assert departed.member.state is MemberState.LOST
    assert isinstance(failed, BarrierEnded)
    assert (failed.error, failed.missing, failed.missing_count) == ("BARRIER_FAILED", (worker(1),), 1)
    d.apply(d.leave(1))
    assert [type(log_event) for log_event in log_events(d)] == [MemberDeparted, ClusterEnded]


def test_a_census_of_a_cluster() -> None:
    d = Driver(5)
    d.join(0, 1, 2, 3)
    d.apply(d.report(2))
    d.enter(0, participants=(0, 1, 3, 4))
    for key in ("a", "b/1", "b/2", "c"):
        d.apply(d.set(key, b"123"))
    views = d.core.views
    assert views.names() == ["c"]
    summary = views.summary("c")
    assert dict(summary.members) == {"FAILED": 1, "CONNECTED": 3}
    assert (summary.vacant, summary.barriers, summary.keys, summary.revision) == (1, 1, 4, 4)
    page = views.members("c", None, 2)
    assert [member.task.index for member in page.members] == [0, 1]
    assert (page.matching, page.more) == (4, True)
    page = views.members("c", page.members[-1].task, 2)
    assert [member.task.index for member in page.members] == [2, 3]
    assert not page.more
    assert [m.task.index for m in views.members("c", None, 9, {"FAILED", "LOST"}).members] == [2]
    ((barrier,), count) = views.barriers("c", 0, 10, 2)
    assert (count, barrier.missing_count, [m.task.index for m in barrier.missing]) == (1, 3, [1, 3])
    keys, more = views.keys("c", "b/", "", 1)
    assert ([key.key for key in keys], more) == (["b/1"], True)
    keys, more = views.keys("c", "b/", "b/1", 5)
    assert ([key.key for key in keys], more) == (["b/2"], False)
    assert views.member("c", worker(4)).incarnation == 0
    with pytest.raises(CoreError, match="nothing"):
        views.summary("nothing")
