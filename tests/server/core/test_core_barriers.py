"""The rules of barriers."""

from __future__ import annotations

import pytest
from tests.server.core.driving import OBSERVER, Driver, worker

from dmesh_server.core.effects import BarrierResult, Done
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import CancelBarrier, EnterBarrier
from dmesh_server.core.model import Limits, Task


def failure(result: BarrierResult) -> CoreError:
    assert result.error is not None
    return result.error


def joined(tasks: int, *indices: int, limits: Limits | None = None) -> Driver:
    d = Driver(tasks, limits)
    d.join(*(indices or range(tasks)))
    return d


def test_the_last_arrival_lets_everybody_go() -> None:
    d = joined(3)
    for index in (2, 0):
        d.enter(index, "step")
        assert not d.effects
    (status,) = d.state().barriers
    assert (status.name, status.instance, status.arrived, status.missing) == (
        "step",
        0,
        (worker(2), worker(0)),
        (worker(1),),
    )
    d.enter(1, "step")
    for index in range(3):
        assert d.results(index) == [d.success("step", 0)]
    assert d.state().barriers == ()
    assert d.advance(1000) is not None


def test_a_barrier_of_some_tasks_does_not_concern_the_others() -> None:
    d = joined(3)
    d.enter(0, participants=(0, 2))
    d.enter(2, participants=(2, 0))
    assert d.results(0) == d.results(2) == [d.success("b", 0)]
    assert not d.results(1)


def test_an_empty_list_means_every_task() -> None:
    d = joined(2)
    d.enter(0)
    d.enter(1, participants=(1, 0))
    assert d.results(0) == [d.success("b", 0)]


def test_a_barrier_of_one_ends_at_once() -> None:
    d = joined(2)
    d.enter(1, participants=(1,), timeout=5.0)
    assert d.results(1) == [d.success("b", 0)]
    assert d.core.next_deadline() is not None


def test_a_name_is_used_again_instance_by_instance() -> None:
    d = joined(2)
    for instance in range(5):
        d.enter(0, instance=instance)
        d.enter(1, instance=instance)
        assert d.results(0) == d.results(1) == [d.success("b", instance)]


def test_minus_one_is_the_instance_under_way_or_the_next() -> None:
    d = joined(2)
    d.enter(0, instance=-1)
    d.enter(1, instance=-1)
    assert d.results(0) == [d.success("b", 0)]
    d.enter(1, instance=1)
    d.enter(0, instance=-1)
    assert d.results(1) == [d.success("b", 1)]


def test_the_first_arrival_of_an_unknown_name_says_which_instance_it_is() -> None:
    d = joined(2)
    d.enter(0, instance=7)
    d.enter(1, instance=7)
    assert d.results(0) == [d.success("b", 7)]


def test_a_late_caller_of_the_finished_instance_gets_its_result() -> None:
    d = joined(2)
    d.enter(0)
    d.enter(1)
    d.enter(0)
    assert d.results(0) == [d.success("b", 0)]
    d.enter(1, instance=1)
    d.enter(0, instance=0)
    assert d.results(0) == [d.success("b", 0)], "even while the next one is under way"


def test_an_arrival_presented_again_counts_once() -> None:
    d = joined(3)
    d.enter(0)
    d.close(0)
    d.apply(d.attach(0))
    d.enter(0)
    assert not d.effects
    d.enter(1)
    assert not d.effects
    d.enter(2)
    assert d.results(0) == [d.success("b", 0)]


def test_a_result_that_finds_no_session_is_kept_for_the_next() -> None:
    d = joined(2)
    d.enter(0)
    d.close(0)
    d.enter(1)
    assert d.results(1)
    d.apply(d.attach(0))
    assert not d.results(0)
    d.enter(0)
    assert d.results(0) == [d.success("b", 0)]


def test_a_timeout_names_everybody_who_is_missing() -> None:
    d = joined(4, 0, 1, 2)
    d.enter(0, "step", timeout=5.0)
    d.beat(4.2, 0, 1, 2)
    d.advance(0.7)
    d.enter(1, "step", timeout=60.0)
    d.advance(0.2)
    for index in (0, 1):
        (result,) = d.results(index)
        error = failure(result)
        assert error.kind is ErrorKind.BARRIER_TIMEOUT
        assert error.message == (
            "barrier 'step' (instance 0) timed out after 5.0 s: 2 of 4 tasks are missing: "
            "/job:worker/task:2 (host host2, pid 72, last seen 0.8 s ago), "
            "/job:worker/task:3 (never registered). "
            "Check that tasks that never registered were started with this coordinator's address. "
            "Tasks that are alive are late, stuck, or do not call this barrier: see their logs."
        )
        assert [member.task for member in error.members] == [worker(2), worker(3)]
        assert [member.incarnation for member in error.members] == [1002, 0]
        assert error.epoch == d.state().epoch
    d.enter(2, "step")
    assert failure(d.results(2)[0]) == error, "who comes late learns the same"
    d.enter(2, "step", 1)
    assert not d.effects, "and the next instance is a new one"


def test_a_timeout_of_very_many_stays_readable() -> None:
    d = joined(1000, 0)
    d.enter(0, timeout=1.0)
    d.advance(1.0)
    error = failure(d.results(0)[0])
    assert "999 of 1000 tasks are missing" in error.message
    assert "/job:worker/task:1 (never registered)" in error.message
    assert "and 967 more: /job:worker/task:33-999" in error.message
    assert len(error.message) < 4000
    assert len(error.members) == 999


@pytest.mark.parametrize("arrived", [True, False])
def test_a_participants_departure_fails_the_barrier_for_all(arrived: bool) -> None:
    d = joined(4, 0, 1, 2)
    d.enter(0)
    d.enter(1) if arrived else None
    session = d.sessions[1]
    d.lose(1)
    (result,) = d.results(0)
    error = failure(result)
    assert error.kind is ErrorKind.BARRIER_FAILED
    assert (
        "barrier 'b' (instance 0) failed: /job:worker/task:1 (host host1, pid 71) was lost: its connection "
        "closed without a goodbye, and its process is gone." in error.message
    )
    assert [member.task for member in error.members] == [worker(1)]
    assert not d.pushed(session=session)
    assert not d.state().barriers
    d.enter(2)
    assert d.results(2) == [result], "who comes late learns the same"
    d.enter(2, instance=1)
    assert failure(d.results(2)[0]).kind is ErrorKind.BARRIER_FAILED, "and so does every later instance"
    assert d.results(2)[0].instance == 1


def test_a_clean_leave_fails_the_barrier_too() -> None:
    d = joined(2)
    d.enter(0)
    d.apply(d.leave(1))
    assert "/job:worker/task:1 (host host1, pid 71) left. 1 of 2" in failure(d.results(0)[0]).message


def test_a_reported_error_fails_the_barrier_with_its_message() -> None:
    d = joined(2)
    d.enter(0)
    d.apply(d.report(1, "ValueError: bad input"))
    assert "failed: ValueError: bad input" in failure(d.results(0)[0]).message


def test_a_barrier_of_others_survives_a_departure() -> None:
    d = joined(3)
    d.enter(0, participants=(0, 1))
    d.lose(2)
    assert not d.results(0)
    d.enter(1, participants=(0, 1))
    assert d.results(0) == [d.success("b", 0)]


def test_different_participants_fail_the_barrier_for_everybody() -> None:
    d = joined(4)
    d.enter(0, participants=(0, 1, 2))
    d.enter(2, participants=(0, 1, 2))
    d.enter(1, participants=(0, 1, 3))
    results = [d.results(index) for index in (0, 1, 2)]
    assert results[0] == results[1] == results[2]
    error = failure(results[0][0])
    assert error.kind is ErrorKind.BARRIER_MISMATCH
    assert (
        "/job:worker/task:0 (host host0, pid 70) called it for /job:worker/task:0-2, "
        "/job:worker/task:1 (host host1, pid 71) for /job:worker/task:0-1,3" in error.message
    )
    assert [member.task for member in error.members] == [worker(0), worker(1)]


def test_an_outsider_is_refused_alone() -> None:
    d = joined(4)
    d.enter(0, participants=(0, 1))
    d.enter(2, participants=(2, 3))
    error = failure(d.results(2)[0])
    assert error.kind is ErrorKind.BARRIER_MISMATCH
    assert "is under way for /job:worker/task:0-1" in error.message
    assert "different names" in error.message
    d.enter(3, participants=(0, 1))
    assert "without being one of them" in failure(d.results(3)[0]).message
    d.enter(1, participants=(0, 1))
    assert d.results(0) == [d.success("b", 0)]
    d.enter(2, participants=(2, 3))
    error = failure(d.results(2)[0])
    assert error.kind is ErrorKind.BARRIER_MISMATCH, "another group's success is not its own"
    assert "is already over; it was called for /job:worker/task:0-1" in error.message


def test_a_wrong_instance_is_refused_alone() -> None:
    d = joined(2)
    d.enter(0, instance=3)
    d.enter(1, instance=2)
    (result,) = d.results(1)
    assert (failure(result).kind, result.instance) == (ErrorKind.BARRIER_MISMATCH, 2)
    assert (
        "for instance 2 (the number that it has finished), but instance 3 is under way"
        in failure(result).message
    )
    d.enter(1, instance=3)
    assert d.results(0) == [d.success("b", 3)]
    d.enter(0, instance=5)
    assert "but instance 4 is next" in failure(d.results(0)[0]).message


def test_malformed_arrivals_are_refused_alone() -> None:
    d = joined(2)

    def refused(name: str, instance: int, participants: tuple[Task, ...], timeout: float | None) -> CoreError:
        d.apply(EnterBarrier(d.sessions[0], name, instance, participants, timeout))
        (result,) = d.results(0)
        assert result.name == name
        return failure(result)

    assert "1-256 printable" in refused("", 0, (), None).message
    assert "1-256 printable" in refused("x" * 257, 0, (), None).message
    assert "1-256 printable" in refused("a\nb", 0, (), None).message
    assert "instance -2" in refused("b", -2, (), None).message
    for timeout in (0.0, -1.0, float("nan"), float("inf")):
        assert refused("b", 0, (), timeout).kind is ErrorKind.INVALID_ARGUMENT
    assert "listed twice" in refused("b", 0, (worker(0), worker(0)), None).message
    unknown = refused("b", 0, (worker(0), worker(5)), None)
    assert unknown.kind is ErrorKind.UNKNOWN_TASK
    assert "/job:worker/task:5 is not a task of cluster 'c'" in unknown.message
    assert not d.state().barriers
    assert "never registered" not in refused("b", 0, (Task("\n", 0),), None).message


def test_a_cancellation_ends_the_barrier_for_all() -> None:
    d = joined(3)
    d.enter(0, "step")
    d.enter(1, "step")
    cancel = d.cancel(2, "step")
    d.accepted(cancel, Done)
    results = [d.results(index) for index in (0, 1)]
    error = failure(results[0][0])
    assert error.kind is ErrorKind.BARRIER_CANCELLED
    assert "'step' (instance 0) was cancelled by /job:worker/task:2 (host host2, pid 72)" in error.message
    assert results[0] == results[1]
    d.enter(2, "step")
    assert d.results(2) == results[0]
    d.accepted(cancel, Done)
    d.accepted(d.cancel(0, "step", 0), Done)
    d.enter(0, "step", 1)
    d.accepted(cancel, Done)
    assert len(d.state().barriers) == 1, "a retry does not cancel the next instance"


def test_only_participants_cancel_and_only_what_is_under_way() -> None:
    d = joined(3)
    error = d.refused(d.cancel(0))
    assert (error.kind, "not under way" in error.message) == (ErrorKind.BARRIER_MISMATCH, True)
    d.enter(0, participants=(0, 1))
    assert "not one of them" in d.refused(d.cancel(2)).message
    assert d.refused(d.cancel(0, instance=1)).kind is ErrorKind.BARRIER_MISMATCH
    d.enter(1, participants=(0, 1))
    assert "it is over and succeeded" in d.refused(d.cancel(0, instance=0)).message
    observer = CancelBarrier(d.token(), OBSERVER, "r", "b", -1)
    assert d.refused(observer).kind is ErrorKind.INVALID_ARGUMENT


def test_the_oldest_results_are_forgotten_first() -> None:
    d = joined(2, limits=Limits(max_barriers=2))
    for name in ("x", "y", "x", "z"):
        d.enter(0, name, -1)
        d.enter(1, name, -1)
    d.flush()
    assert {r.key for r in d.durable.values() if r.kind == "barrier"} == {"x", "z"}
    d.enter(0, "x", 1)
    assert d.results(0) == [d.success("x", 1)]
    d.enter(0, "y", 4)
    assert [status.instance for status in d.state().barriers] == [4], "y is unknown again"


def test_the_number_of_barriers_under_way_is_limited() -> None:
    d = joined(2, limits=Limits(max_barriers=2))
    d.enter(0, "x")
    d.enter(0, "y")
    d.enter(0, "z")
    assert failure(d.results(0)[0]).kind is ErrorKind.LIMIT_EXCEEDED
    d.enter(1, "x")
    d.enter(0, "z")
    assert len(d.state().barriers) == 2
