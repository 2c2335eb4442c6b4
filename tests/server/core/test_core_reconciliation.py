"""A barrier's success waits for no disk, and a crash at any moment gives nobody two outcomes, or none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.server.core.driving import Driver, worker

from dmesh_server.core.effects import BarrierResult, Done, Persist
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.model import Limits, PassedBarrier


def test_a_success_is_lazy_and_a_failure_is_not() -> None:
    d = joined(2)
    d.enter(0)
    d.enter(1)
    assert [effect.lazy for effect in d.effects if isinstance(effect, Persist)] == [True]
    d.enter(0, instance=1)
    d.apply(d.cancel(0))
    assert [effect.lazy for effect in d.effects if isinstance(effect, Persist)] == [False]


def test_whatever_else_an_event_changes_is_not_lazy() -> None:
    d = joined(3)
    d.enter(0, participants=(0, 1))
    d.apply(d.leave(1))
    assert [effect.lazy for effect in d.effects if isinstance(effect, Persist)] == [False]


@pytest.mark.parametrize("presents_first", [True, False], ids=["told-first", "untold-first"])
@pytest.mark.parametrize("participants", [(), (0, 1)], ids=["all", "pair"])
def test_killed_between_two_pushes(presents_first: bool, participants: Sequence[int]) -> None:
    d, success = crashed_after_success(participants)
    if presents_first:
        attach(d, 0, success, participants)
        d.join(1)
        d.enter(1, participants=participants)
    else:
        d.join(1)
        d.enter(1, participants=participants)
        assert d.results(1) == []
        attach(d, 0, success, participants)
    assert d.results(1) == [success]
    # Once more, with what the successor has kept: it is over, for all.
    d.restart()
    d.join(0, 1)
    d.enter(1, participants=participants)
    assert d.results(1) == [success]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_who_has_passed_and_who_is_in_the_next_and_who_was_not_told(order: Sequence[int]) -> None:
    # 0 was told and waits in the next instance already; 1 was told; 2 was not.
    d = joined(3)
    for index in range(3):
        d.enter(index)
    success = d.success("b", 0)
    d.enter(0, instance=1)
    d.restart(kept=0)
    outcomes: list[BarrierResult] = []
    for index in order:
        attach(d, index, success if index < 2 else None)
        outcomes += d.results(2) if 2 in d.sessions else []
        if index != 1:
            d.enter(index, instance=1 if index == 0 else 0)
            outcomes += d.results(2) if 2 in d.sessions else []
    assert outcomes == [success]
    d.enter(1, instance=1)
    assert not d.results(0)
    d.enter(2, instance=1)
    assert [d.results(index) for index in range(3)] == [[d.success("b", 1)]] * 3


def test_those_who_go_on_are_not_taken_back() -> None:
    # Both present what they have passed once more, when they are further.
    d, success = crashed_after_success()
    attach(d, 0, success)
    d.enter(0, instance=1)
    d.join(1)
    d.enter(1)
    assert d.results(1) == [success]
    d.enter(1, instance=1)
    assert d.results(0) == [d.success("b", 1)]
    attach(d, 0, success)
    attach(d, 1, d.success("b", 1))
    d.enter(0, instance=2)
    d.enter(1, instance=2)
    assert d.results(0) == [d.success("b", 2)]


def test_what_is_remembered_is_not_contradicted() -> None:
    d, success = crashed_after_success()
    d.join(1)
    d.enter(1, timeout=1.0)
    d.advance(5.1)
    (failure,) = d.results(1)
    assert failure.error is not None
    attach(d, 0, success)
    assert not d.results(1)
    d.enter(1)
    assert d.results(1) == [failure], "who was told of a failure is not told of a success"


def test_nobody_times_out_who_may_still_be_on_the_way() -> None:
    d, success = crashed_after_success()
    d.join(1)
    d.enter(1, timeout=0.5)
    d.advance(4.0)
    assert not d.results(1)
    attach(d, 0, success)
    assert d.results(1) == [success]


def test_nobody_was_told_so_all_present_themselves_again() -> None:
    d = joined(2)
    d.enter(0)
    d.enter(1)
    success = d.success("b", 0)
    d.restart(kept=0)
    d.join(0, 1)
    d.enter(1)
    d.enter(0)
    assert d.results(0) == d.results(1) == [success]


def test_later_records_carry_the_result_along() -> None:
    d = joined(3)
    for index in range(3):
        d.enter(index)
    success = d.success("b", 0)
    d.apply(d.set("key"))
    d.restart(kept=0)
    d.join(2)
    d.enter(2)
    assert d.results(2) == [success]


def test_who_leaves_before_its_session_is_back_says_what_it_has_passed() -> None:
    d, success = crashed_after_success()
    d.join(1)
    d.enter(1)
    d.accepted(d.present(0, [PassedBarrier("b", 0, (), success.epoch)]), Done)
    assert d.results(1) == [success]
    d.accepted(d.leave(0), Done)
    d.accepted(d.present(0, [PassedBarrier("b", 1, (), success.epoch)]), Done)
    assert not d.results(1), "who has left says nothing new"


def test_of_many_successes_lost_at_once_the_latest_is_enough() -> None:
    d = joined(2)
    for instance in range(5):
        d.enter(0, instance=instance)
        d.enter(1, instance=instance)
    success = d.success("b", 4)
    d.restart(kept=2)
    attach(d, 1, success)
    d.join(0)
    d.enter(0, instance=4)
    assert d.results(0) == [success]


def test_who_knows_better_than_a_restarted_server_is_believed() -> None:
    # The client has passed so many barriers since that it does not present this one any more.
    d = joined(2)
    for instance in range(5):
        d.enter(0, instance=instance)
        d.enter(1, instance=instance)
    d.restart(kept=1)
    d.join(0, 1)
    d.enter(0, instance=5)
    d.enter(1, instance=5)
    assert d.results(0) == [d.success("b", 5)]


def test_a_barrier_of_others_is_not_ended() -> None:
    d = joined(3)
    d.restart()
    d.join(0, 1, 2)
    d.enter(0, participants=(0, 1))
    attach(d, 2, BarrierResult("b", 0, None, 3))
    assert not d.results(0)
    d.enter(1, participants=(0, 1))
    assert d.results(0) == [d.success("b", 0)]


def test_the_epoch_is_the_restarts_if_the_client_does_not_know_it() -> None:
    d, success = crashed_after_success()
    d.join(1)
    d.enter(1)
    attach(d, 0, BarrierResult("b", 0, None, 0))
    assert d.results(1) == [success]


@pytest.mark.parametrize(
    ("passed", "kind"),
    [
        ([PassedBarrier("", 0, ())], ErrorKind.INVALID_ARGUMENT),
        ([PassedBarrier("b", -1, ())], ErrorKind.INVALID_ARGUMENT),
        ([PassedBarrier("b", 0, (worker(1),))], ErrorKind.INVALID_ARGUMENT),
        ([PassedBarrier("b", 0, (worker(0), worker(9)))], ErrorKind.UNKNOWN_TASK),
        ([PassedBarrier("b", 0, ()), PassedBarrier("b", 1, ())], ErrorKind.INVALID_ARGUMENT),
        ([PassedBarrier(str(n), 0, ()) for n in range(4)], ErrorKind.LIMIT_EXCEEDED),
    ],
)
def test_what_cannot_have_been_passed_is_refused(passed: list[PassedBarrier], kind: ErrorKind) -> None:
    d = Driver(2, Limits(max_passed=3))
    d.join(0, 1)
    d.enter(1)
    good = PassedBarrier("good", 0, ())
    assert d.refused(d.present(0, [good, *passed])).kind is kind
    assert not d.results(1)
    assert not [record for record in d.lazy if record.kind == "barrier"], "nothing of it was taken"


def joined(tasks: int) -> Driver:
    d = Driver(tasks)
    d.join(*range(tasks))
    return d


def crashed_after_success(participants: Sequence[int] = ()) -> tuple[Driver, BarrierResult]:
    """Two workers pass a barrier; 0 is told, 1 is not, and of the success nothing is durable."""
    d = joined(3 if participants else 2)
    d.enter(0, participants=participants)
    d.enter(1, participants=participants)
    success = d.success("b", 0)
    d.restart(kept=0)
    return d, success


def attach(d: Driver, index: int, passed: BarrierResult | None, participants: Sequence[int] = ()) -> None:
    listed = tuple(map(worker, participants))
    presented = [] if passed is None else [PassedBarrier("b", passed.instance, listed, passed.epoch)]
    d.apply(d.attach(index))
    if passed is not None:
        d.apply(d.present(index, presented))
