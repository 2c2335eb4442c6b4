"""Waiting for the next epoch, looking one member up, and how far a barrier is."""

from __future__ import annotations

import pytest
from tests.server.core.driving import OBSERVER, Driver, worker

from dmesh_server.core.effects import BarrierProgress
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import Abandon, GetBarrier, GetClusterState, GetMember
from dmesh_server.core.model import Caller, ClusterState, Member, MemberState


def wait(d: Driver, timeout: float | None = None, caller: Caller = OBSERVER) -> int:
    event = GetClusterState(d.token(), caller, d.state().epoch, timeout)
    d.apply(event)
    assert event.token not in d.replies(), "it does not wait"
    return event.token


def test_everybody_who_waits_is_told_of_the_next_epoch() -> None:
    d = Driver(3)
    d.join(0)
    epoch = d.state().epoch
    waiting = [wait(d), wait(d, 60.0), wait(d, None, d.caller(0))]
    d.apply(d.register(1))
    told = [d.replies()[token] for token in waiting]
    for state in told:
        assert isinstance(state, ClusterState)
        assert state.epoch == epoch + 1
        assert [member.task for member in state.members] == [worker(0), worker(1)]
    token = wait(d)
    d.apply(d.leave(1))
    state = d.replies()[token]
    assert isinstance(state, ClusterState)
    assert [member.state for member in state.members] == [MemberState.CONNECTED, MemberState.LEFT]


def test_an_epoch_that_is_over_is_not_waited_for() -> None:
    d = Driver()
    d.join(0)
    for known in (0, d.state().epoch - 1, d.state().epoch + 7):
        state = d.accepted(GetClusterState(d.token(), OBSERVER, known, None), ClusterState)
        assert len(state.members) == 1


def test_who_waited_long_enough_is_told_that_nothing_changed() -> None:
    d = Driver()
    d.join(0)
    epoch = d.state().epoch
    token = wait(d, 5.0)
    d.beat(4.0, 0)
    assert token not in d.replies()
    effects = d.beat(2.0, 0)
    (state,) = [e.answer for e in effects if getattr(e, "token", None) == token]
    assert isinstance(state, ClusterState)
    assert (state.epoch, state.members) == (epoch, ())


def test_a_wait_ends_with_its_caller_its_member_and_its_cluster() -> None:
    d = Driver()
    d.join(0, 1)
    abandoned, members, observers = wait(d), wait(d, None, d.caller(1)), wait(d)
    d.apply(Abandon(abandoned))
    d.apply(d.report(1))
    replies = d.replies()
    assert abandoned not in replies
    lost = replies[members]
    assert isinstance(lost, CoreError)
    assert lost.kind is ErrorKind.FENCED
    assert isinstance(replies[observers], ClusterState)
    token = wait(d)
    d.apply(d.leave(0))
    ended = d.replies()[token]
    assert isinstance(ended, CoreError)
    assert ended.kind is ErrorKind.CLUSTER_ENDING


def test_one_member_is_looked_up() -> None:
    d = Driver(2)
    d.join(0)
    found = d.accepted(GetMember(d.token(), OBSERVER, worker(0)), Member)
    assert (found.incarnation, found.state) == (1000, MemberState.CONNECTED)
    vacant = d.accepted(GetMember(d.token(), d.caller(0), worker(1)), Member)
    assert vacant.incarnation == 0
    error = d.refused(GetMember(d.token(), OBSERVER, worker(2)))
    assert (error.kind, "/job:worker/task:0-1" in error.message) == (ErrorKind.UNKNOWN_TASK, True)


def test_how_far_a_barrier_is() -> None:
    d = Driver(2)
    d.join(0, 1)
    query = GetBarrier(d.token(), OBSERVER, "b")
    assert d.accepted(query, BarrierProgress) == BarrierProgress(0, None)
    d.enter(0, "b", timeout=30.0)
    progress = d.accepted(query, BarrierProgress)
    assert progress.finished == 0
    assert progress.current is not None
    assert (progress.current.arrived, progress.current.missing) == ((worker(0),), (worker(1),))
    d.enter(1, "b")
    assert d.accepted(query, BarrierProgress) == BarrierProgress(1, None)
    bad = GetBarrier(d.token(), OBSERVER, "")
    assert d.refused(bad).kind is ErrorKind.INVALID_ARGUMENT


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_times_that_cannot_be_waited_for_are_refused(timeout: float) -> None:
    d = Driver()
    d.join(0)
    event = GetClusterState(d.token(), OBSERVER, d.state().epoch, timeout)
    assert d.refused(event).kind is ErrorKind.INVALID_ARGUMENT
