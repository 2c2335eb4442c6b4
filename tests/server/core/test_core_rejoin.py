"""With the restart policy REJOIN, a process that is gone is replaced while the others wait for it."""

from __future__ import annotations

import pytest
from tests.server.core.driving import Driver, worker

from dmesh_server.core.effects import Attached, Registered
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import Register
from dmesh_server.core.model import ClusterSettings, Limits, MemberState, PassedBarrier, RestartPolicy

REJOIN = ClusterSettings(RestartPolicy.REJOIN)


def test_a_new_process_takes_the_task_slot_and_everybody_is_told() -> None:
    d = joined(3)
    d.lose(2)
    epoch = d.state().epoch
    answer = d.accepted(d.register(2, 99), Registered)
    assert (answer.rejoined, answer.epoch) == (True, epoch + 1)
    d.advance(1.0)
    d.accepted(d.attach(2, 99), Attached)
    assert d.member(2).incarnation == 99
    assert d.state_of(2) is MemberState.CONNECTED
    # A retry of the registration is answered alike.
    assert d.accepted(d.register(2, 99), Registered).rejoined


def test_the_notice_names_the_one_who_went_and_the_one_who_came() -> None:
    d = joined(3)
    d.lose(2)
    assert [member.incarnation for member in d.notices(0)[0].departed] == [1002]
    d.advance(1.0)
    d.apply(d.register(2, 99))
    (outgoing,) = d.notices(0)
    assert ([m.incarnation for m in outgoing.rejoined], outgoing.departed) == ([99], ())
    assert outgoing.epoch == d.state().epoch


def test_changes_in_quick_succession_are_told_together_and_come_out_right() -> None:
    d = joined(3)
    d.apply(d.report(1))
    d.apply(d.report(2))
    d.apply(d.register(2, 99))
    d.apply(d.register(1, 98))
    d.apply(d.attach(1, 98))
    d.apply(d.leave(1))
    assert d.refused(d.leave(1)).kind is ErrorKind.FENCED
    report = d.report(1)
    d.apply(type(report)(report.token, d.caller(1, 98), report.request_id, "no"))
    d.advance(1.0)
    (outgoing,) = d.notices(0)
    assert [(m.task.index, m.incarnation) for m in outgoing.departed] == [(2, 1002), (1, 98)]
    assert [(m.task.index, m.incarnation) for m in outgoing.rejoined] == [(2, 99)]


@pytest.mark.parametrize("crash", [False, True])
def test_a_former_holder_is_fenced_for_ever(crash: bool) -> None:
    d = joined(2)
    for incarnation in (99, 98):
        d.lose(1)
        d.apply(d.register(1, incarnation))
        d.apply(d.attach(1, incarnation))
    d.lose(1)  # The task slot is empty now, and 98 was its last holder.
    if crash:
        d.restart()
        d.join(0)
    for incarnation in (1001, 99):
        for event in (
            d.register(1, incarnation, request_id="new"),
            d.register(1, incarnation),
            d.attach(1, incarnation),
            d.get("key", caller=d.caller(1, incarnation)),
        ):
            error = d.refused(event)
            assert error.kind is ErrorKind.FENCED
            assert "another process has taken the task since" in error.message
    assert d.refused(d.register(1, 98, request_id="new")).kind is ErrorKind.FENCED
    assert d.accepted(d.register(1, 97), Registered).rejoined


def test_whoever_left_is_not_replaced() -> None:
    d = joined(3)
    d.apply(d.leave(2))
    assert d.refused(d.register(2, 99)).kind is ErrorKind.CLUSTER_ENDING
    d.enter(0)
    (result,) = d.results(0)
    assert result.error is not None
    assert result.error.kind is ErrorKind.BARRIER_FAILED


def test_a_task_slot_that_is_held_is_not_free() -> None:
    d = joined(2)
    assert d.refused(d.register(1, 99)).kind is ErrorKind.TASK_TAKEN
    d.close(1)
    assert d.refused(d.register(1, 99)).kind is ErrorKind.TASK_TAKEN, "it may still come back"


def test_a_task_slot_is_not_taken_without_end() -> None:
    d = Driver(2, Limits(max_rejoins=2))
    join(d, 0, 1)
    for incarnation in (99, 98):
        d.lose(1)
        d.accepted(d.register(1, incarnation), Registered)
        d.apply(d.attach(1, incarnation))
    d.lose(1)
    error = d.refused(d.register(1, 97))
    assert error.kind is ErrorKind.LIMIT_EXCEEDED
    assert "taken by 3 processes one after another" in error.message


def test_a_barrier_waits_for_the_new_holder() -> None:
    d = joined(3)
    d.enter(0)
    d.enter(2)
    d.lose(2)
    assert not d.results(0), "the barrier goes on"
    (status,) = d.state().barriers
    assert (status.arrived, status.missing) == ((worker(0),), (worker(1), worker(2)))
    d.apply(d.register(2, 99))
    d.apply(d.attach(2, 99))
    d.enter(2, instance=-1)
    d.enter(1)
    assert [d.results(index) for index in range(3)] == [[d.success("b", 0)]] * 3


def test_a_barrier_in_which_only_the_departed_was_is_forgotten() -> None:
    d = joined(3)
    d.enter(2, timeout=5.0)
    d.lose(2)
    assert d.state().barriers == ()
    d.advance(10.0)
    d.enter(0)
    assert [status.instance for status in d.state().barriers] == [0]


def test_the_deadline_stands() -> None:
    d = joined(3)
    d.enter(0, timeout=5.0)
    d.enter(2)
    d.lose(2)
    d.advance(5.0)
    (result,) = d.results(0)
    assert result.error is not None
    assert result.error.kind is ErrorKind.BARRIER_TIMEOUT
    assert "host2, pid 72, last seen 5.0 s ago, was lost: its connection closed" in result.error.message
    assert "start a new process for each of them" in result.error.message


def test_a_barrier_begun_without_the_departed_waits_as_well() -> None:
    d = joined(2)
    d.lose(1)
    d.enter(0)
    assert not d.results(0)
    d.apply(d.register(1, 99))
    d.apply(d.attach(1, 99))
    d.enter(1, instance=-1)
    assert d.results(0) == [d.success("b", 0)]


def test_a_new_holder_counts_from_its_first_result() -> None:
    d = joined(2)
    for instance in range(3):
        d.enter(0, instance=instance)
        d.enter(1, instance=instance)
    replace(d, 1)
    d.enter(1, instance=-1)
    assert not d.results(1), "the last result is not its own"
    d.enter(0, instance=3)
    assert d.results(1) == [d.success("b", 3)]
    d.enter(1, instance=4)
    d.enter(0, instance=4)
    assert d.results(1) == [d.success("b", 4)]


@pytest.mark.parametrize("crash", [False, True])
def test_a_new_holder_that_missed_its_first_result_gets_that_one(crash: bool) -> None:
    d = joined(2)
    d.enter(0)
    d.enter(1)
    replace(d, 1)
    d.enter(1, instance=-1)
    d.close(1)
    d.enter(0, instance=1)
    success = d.success("b", 1)
    assert d.results(0) == [success]
    if crash:
        d.restart()
        d.apply(d.attach(0))
    d.apply(d.attach(1, 99))
    d.enter(0, instance=2)
    d.enter(1, instance=-1)
    assert d.results(1) == [success]
    assert not d.results(0), "it is not counted as in the next one"


@pytest.mark.parametrize("first", [0, 1])
def test_a_new_holder_and_a_success_that_a_crash_has_undone(first: int) -> None:
    # 1 was replaced; 0 was told that instance 1 is over, 1 was not, and the server has forgotten.
    d = joined(2)
    d.enter(0)
    d.enter(1)
    replace(d, 1)
    d.enter(1, instance=-1)
    d.enter(0, instance=1)
    success = d.success("b", 1)
    d.restart(kept=0)
    told = []
    for index in (first, 1 - first):
        if index == 0:
            d.apply(d.attach(0))
            d.apply(d.present(0, [PassedBarrier("b", 1, (), success.epoch)]))
        else:
            d.apply(d.attach(1, 99))
            d.enter(1, instance=-1)
        told += d.results(1) if 1 in d.sessions else []
    assert told == [success]


@pytest.mark.parametrize("first", ["newcomer", "untold", "told"])
def test_a_process_that_comes_after_the_crash_has_no_part_in_what_was_before(first: str) -> None:
    # All pass; 0 is told, 1 and 2 are not, and the server forgets. 1 comes back, is lost and replaced.
    d = joined(3)
    for index in range(3):
        d.enter(index)
    success = d.success("b", 0)
    d.restart(kept=0)
    d.apply(d.attach(1))
    d.lose(1)
    d.accepted(d.register(1, 99), Registered)
    outcomes = []
    for step in {"newcomer": (1, 2, 0), "untold": (2, 1, 0), "told": (0, 1, 2)}[first]:
        match step:
            case 0:
                d.apply(d.attach(0))
                d.apply(d.present(0, [PassedBarrier("b", 0, (), success.epoch)]))
            case 1:
                d.apply(d.attach(1, 99))
                d.enter(1, instance=-1)
            case 2:
                d.apply(d.attach(2))
                d.enter(2)
        outcomes += d.results(2) if 2 in d.sessions else []
        assert not d.results(1), "it waits in the next one"
    assert outcomes == [success]
    (status,) = d.state().barriers
    assert (status.instance, status.arrived) == (1, (worker(1),))


def test_a_new_holder_has_a_part_in_a_failure_that_came_after_it() -> None:
    d = joined(2)
    replace(d, 1)
    d.enter(0, timeout=1.0)
    d.advance(1.0)
    (failure,) = d.results(0)
    d.enter(1, instance=-1)
    assert d.results(1) == [failure]
    d.enter(1, instance=1)
    d.enter(0, instance=1)
    assert d.results(1) == [d.success("b", 1)]


def test_the_policy_outlives_a_restart() -> None:
    d = joined(2)
    d.lose(1)
    d.restart()
    d.join(0)
    answer = d.accepted(d.register(1, 99), Registered)
    assert (answer.rejoined, answer.settings.restart_policy) == (True, RestartPolicy.REJOIN)
    d.restart()
    d.join(0)
    assert d.accepted(d.register(1, 99), Registered).rejoined


def test_answers_kept_for_the_departed_are_not_given_to_its_successor() -> None:
    d = joined(2)
    event = d.set("key", index=1)
    d.apply(event)
    replace(d, 1)
    assert not [record for record in d.durable.values() if record.kind == "reply"]
    retried = d.refused(event)
    assert isinstance(retried, CoreError)
    assert retried.kind is ErrorKind.FENCED
    d.restart()


def test_a_cluster_whose_members_are_all_gone_ends_nevertheless() -> None:
    d = joined(2)
    d.apply(d.set("key"))
    first = d.state().incarnation
    d.lose(0)
    d.lose(1)
    answer = d.accepted(d.register(0, 99), Registered)
    assert answer.cluster_incarnation != first
    assert not answer.rejoined
    assert answer.settings.restart_policy is RestartPolicy.FAIL_FAST, "a new generation, a new wish"


def join(d: Driver, *indices: int) -> None:
    for index in indices:
        event: Register = d.register(index, settings=REJOIN)
        d.accepted(event, Registered)
        d.apply(d.attach(index))


def joined(tasks: int) -> Driver:
    d = Driver(tasks)
    join(d, *range(tasks))
    return d


def replace(d: Driver, index: int) -> None:
    """Loses a worker, and lets a new process take its task slot and attach."""
    d.lose(index)
    d.accepted(d.register(index, 99), Registered)
    d.apply(d.attach(index, 99))
