"""Epochs, look-ups of one member, and barriers of other kinds, with real agents."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.coordination.conftest import eventually

from dmesh import coordination
from dmesh.coordination import DepartureCause, MemberState
from dmesh.coordination.members import Task
from dmesh.coordination.retry import Patience
from dmesh.errors import (
    BarrierError,
    BarrierMismatchError,
    ConfigurationError,
    FencedError,
    WaitTimeoutError,
    WatchCompactedError,
)
from dmesh_server.core.model import Limits

SECONDS = 60.0


@pytest.fixture
def join(server, join):
    return functools.partial(join, server.address)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as executor:
        yield executor


def test_the_next_epoch_is_waited_for(join, pool) -> None:
    first = join(0, 3)
    epoch = first.epoch
    waiting = pool.submit(first.wait_for_epoch, epoch, SECONDS)
    second = join(1, 3)
    state = waiting.result(SECONDS)
    assert state.epoch == first.epoch == epoch + 1
    assert [member.rank for member in state.members] == [0, 1]
    waiting = pool.submit(first.wait_for_epoch, state.epoch)
    second.leave()
    assert [member.state for member in waiting.result(SECONDS).members][1] is MemberState.LEFT
    assert first.wait_for_epoch(0, 0).epoch == epoch + 2, "an epoch that is over is not waited for"


def test_an_epoch_that_does_not_come(join) -> None:
    agent = join(0, 1)
    started = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=f"within 0.2 s: its epoch is {agent.epoch}"):
        agent.wait_for_epoch(agent.epoch, 0.2)
    assert time.monotonic() - started >= 0.2
    for after, timeout in (("1", 1), (1, -1)):
        with pytest.raises(ConfigurationError):
            agent.wait_for_epoch(after, timeout)


def test_a_wait_outlives_its_attempts(join, pool) -> None:
    agent = join(0, 2, patience=Patience(attempt=0.1))
    waiting = pool.submit(agent.wait_for_epoch, agent.epoch, SECONDS)
    with pytest.raises(WaitTimeoutError):
        agent.wait_for_epoch(agent.epoch, 0.5)  # several attempts
    join(1, 2)
    assert len(waiting.result(SECONDS).members) == 2


def test_one_member_is_looked_up(join) -> None:
    agent = join(0, 3)
    other = join(1, 3)
    assert agent.member(1).incarnation == other.identity.incarnation
    assert agent.member("/job:worker/task:0").state is MemberState.CONNECTED
    assert agent.member(2).incarnation == 0
    with pytest.raises(ConfigurationError, match="not a task of cluster"):
        agent.member(3)


def test_a_barrier_of_those_alive_says_who_came(join, pool) -> None:
    agents = [join(index, 4) for index in range(3)]
    agents[2].report_error("gone")
    came = [pool.submit(agent.alive_barrier, "b", None, SECONDS) for agent in agents[:2]]
    expected = [(Task("worker", index), agents[index].identity.incarnation) for index in (0, 1)]
    for future in came:
        assert [(one.task, one.incarnation) for one in future.result(SECONDS)] == expected
    with pytest.raises(FencedError):
        agents[2].alive_barrier("b")


def test_a_departure_ends_the_wait_of_those_alive(join, pool) -> None:
    first, second = join(0, 2), join(1, 2)
    waiting = pool.submit(first.alive_barrier, "b", [0, 1], SECONDS)
    second.leave()
    assert [one.rank for one in waiting.result(SECONDS)] == [0]


def test_two_kinds_of_one_name(join, pool) -> None:
    first, second = join(0, 2), join(1, 2)
    waiting = pool.submit(first.alive_barrier, "b", None, SECONDS)
    with pytest.raises(BarrierMismatchError):
        second.barrier("b", timeout=SECONDS)
    with pytest.raises(BarrierMismatchError):
        waiting.result(SECONDS)


def test_arriving_without_waiting(join) -> None:
    first, second = join(0, 2), join(1, 2)
    pending = first.arrive("b", timeout=SECONDS)
    eventually(lambda: first.barrier_progress("b").arrived, "its own arrival")
    progress = first.barrier_progress("b")
    assert (progress.finished, progress.arrived) == (0, 1)
    assert progress.current is not None
    assert progress.current.missing == (Task("worker", 1),)
    assert not pending.done
    with pytest.raises(BarrierMismatchError, match="already waits"):
        first.arrive("b")
    second.barrier("b", timeout=SECONDS)
    pending.wait()
    assert pending.done
    assert second.barrier_progress("b").finished == 1
    assert first.barrier_progress("none").arrived == 0
    late = first.arrive("b")
    second.report_error("gone")
    with pytest.raises(BarrierError, match="gone"):
        late.wait()


def test_the_public_functions(join, monkeypatch) -> None:
    agent = join(0, 1)
    monkeypatch.setattr(coordination, "_agent", lambda: agent)
    monkeypatch.setattr("dmesh.coordination.barrier_functions.current_agent", lambda: agent)
    assert coordination.wait_for_epoch(0) == coordination.epoch()
    assert coordination.member(0).state is MemberState.CONNECTED
    assert [one.rank for one in coordination.alive_barrier("alive")] == [0]
    coordination.arrive("b").wait()
    with coordination.double_barrier("double"):
        assert coordination.barrier_progress("double/enter").finished == 1
        assert coordination.barrier_progress("double/leave").finished == 0
    assert coordination.barrier_progress("double/leave").finished == 1
    with pytest.raises(ZeroDivisionError), coordination.double_barrier("double"):
        raise ZeroDivisionError
    assert coordination.barrier_progress("double/leave").finished == 1


def test_why_a_member_failed_as_data(join, pool) -> None:
    first, second = join(0, 3), join(1, 3)
    waiting = pool.submit(first.barrier, "b", [0, 1], SECONDS)
    second.report_error("CUDA error: out of memory", code=1702)
    with pytest.raises(BarrierError) as caught:
        waiting.result(SECONDS)
    (failure,) = caught.value.failures
    assert (failure.cause, failure.code, failure.reason) == (
        DepartureCause.REPORTED_ERROR, 1702, "CUDA error: out of memory",
    )  # fmt: skip
    assert (failure.rank, failure.incarnation) == (1, second.identity.incarnation)
    assert first.member(1).cause is DepartureCause.REPORTED_ERROR
    assert first.member(0).cause is DepartureCause.NONE
    for code in ("7", 1 << 31, True):
        with pytest.raises(ConfigurationError, match="32 bits"):
            first.report_error("no", code=code)


def test_how_members_departed(join) -> None:
    agents = [join(index, 3) for index in range(3)]
    agents[1].leave()
    agents[2].leave("SystemExit: 3")
    assert [member.cause for member in agents[0].members()] == [
        DepartureCause.NONE, DepartureCause.LEFT, DepartureCause.EXITED,
    ]  # fmt: skip


@pytest.mark.parametrize("limits", [Limits(lease=120.0, watch_history=3)])
def test_a_watch_that_comes_too_late_is_told_where_it_can_start(join) -> None:
    agent = join(0, 1)
    for number in range(10):
        agent.key_value_set("k", str(number), allow_overwrite=True)
    with pytest.raises(WatchCompactedError) as caught:
        agent.watch("", 5)
    assert (caught.value.oldest_revision, caught.value.revision) == (8, 10)
    with agent.watch("", caught.value.oldest_revision) as watch:
        assert next(watch).text() == "7"
    with pytest.raises(WatchCompactedError) as caught:
        agent.watch("", 12)
    assert caught.value.revision == 10
