"""Clients that do not say which task slot they take are each given one of their own."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.server.core.driving import Driver, worker, workers

from dmesh_server.core.effects import Registered
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.model import ClusterSettings, RestartPolicy, Task
from dmesh_server.core.registration import ANY_TASK

REJOIN = ClusterSettings(restart_policy=RestartPolicy.REJOIN)


def claim(d: Driver, incarnation: int, **changes: object) -> Task:
    return d.accepted(d.register(ANY_TASK, incarnation, **changes), Registered).task


def lose(d: Driver, index: int, incarnation: int) -> None:
    d.apply(replace(d.report(index), caller=d.caller(index, incarnation)))


def test_task_slots_are_handed_out_in_order_around_those_that_were_asked_for() -> None:
    d = Driver(4)
    d.join(1)
    assert [claim(d, incarnation) for incarnation in (7, 8, 9)] == [worker(0), worker(2), worker(3)]
    assert {m.task.index: m.incarnation for m in d.state().members} == {0: 7, 1: 1001, 2: 8, 3: 9}


def test_a_retry_gives_the_same_task_slot_also_after_a_restart_of_the_server() -> None:
    d = Driver(3)
    request = d.register(ANY_TASK, 7)
    first = d.accepted(request, Registered)
    assert d.accepted(request, Registered) == first
    assert claim(d, 8) == worker(1)
    d.restart()
    assert claim(d, 7) == worker(0)
    assert claim(d, 9) == worker(2)
    # Who knows its task slot from then on, is its holder.
    assert d.accepted(d.register(0, 7), Registered).task == worker(0)


def test_one_too_many_is_told_who_is_there() -> None:
    d = Driver(2)
    claim(d, 7)
    claim(d, 8)
    error = d.refused(d.register(ANY_TASK, 9))
    assert error.kind is ErrorKind.TASK_TAKEN
    assert "all 2 task slots of job 'worker' in cluster 'c' are held: /job:worker/task:0" in error.message
    assert error.fields == ("caller.task.job",)
    assert [member.task for member in error.members] == [worker(0), worker(1)]


def test_another_number_of_clients_is_refused_even_if_all_task_slots_are_held() -> None:
    d = Driver(1)
    claim(d, 7)
    error = d.refused(d.register(ANY_TASK, 8, jobs=workers(2)))
    assert error.kind is ErrorKind.SPEC_MISMATCH
    assert error.message.startswith("a client of job 'worker' (host")


def test_a_job_that_does_not_exist() -> None:
    d = Driver(2)
    unknown = d.register(ANY_TASK, 7)
    caller = unknown.caller
    error = d.refused(replace(unknown, caller=replace(caller, task=Task("chief", ANY_TASK))))
    assert error.kind is ErrorKind.UNKNOWN_TASK
    claim(d, 8)
    error = d.refused(replace(unknown, caller=replace(caller, task=Task("chief", ANY_TASK))))
    assert error.kind is ErrorKind.UNKNOWN_TASK


def test_the_task_slot_of_a_lost_member_goes_to_the_next_where_the_cluster_wants_that() -> None:
    d = Driver(2)
    assert [claim(d, n, settings=REJOIN) for n in (7, 8)] == [worker(0), worker(1)]
    lose(d, 0, 7)
    answer = d.accepted(d.register(ANY_TASK, 9, settings=REJOIN), Registered)
    assert (answer.task, answer.rejoined) == (worker(0), True)
    # The former holder is not given another one.
    assert d.refused(d.register(ANY_TASK, 7, settings=REJOIN)).kind is ErrorKind.FENCED


def test_the_task_slot_of_a_lost_member_stays_empty_where_its_loss_is_everybodys() -> None:
    d = Driver(2)
    claim(d, 7)
    claim(d, 8)
    lose(d, 0, 7)
    assert d.refused(d.register(ANY_TASK, 9)).kind is ErrorKind.CLUSTER_ENDING


def test_a_cluster_that_has_ended_begins_anew_at_the_first_task_slot() -> None:
    d = Driver(2)
    claim(d, 7)
    claim(d, 8)
    for index, incarnation in ((0, 7), (1, 8)):
        lose(d, index, incarnation)
    assert [claim(d, n) for n in (9, 10)] == [worker(0), worker(1)]


@given(
    size=st.integers(1, 5),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("claim"), st.integers(1, 8)),
            st.tuples(st.just("fixed"), st.integers(0, 4)),
            st.tuples(st.just("lose"), st.integers(1, 8)),
            st.tuples(st.just("restart"), st.just(0)),
        ),
        max_size=30,
    ),
)
def test_no_two_processes_are_ever_told_the_same_task_slot(size: int, steps: list[tuple[str, int]]) -> None:
    """Whatever comes between: retries, clients with ids of their own, losses, restarts of the server."""
    d = Driver(size)
    told: dict[int, Task] = {}
    lost: set[int] = set()
    for what, number in steps:
        if what == "restart":
            d.restart()
        elif what == "lose":
            if number in told and number not in lost:
                lose(d, told[number].index, number)
                lost.add(number)
        elif what == "fixed":
            d.answer(d.register(number, 1000 + number, settings=REJOIN))
        else:
            answer = d.answer(d.register(ANY_TASK, number, settings=REJOIN))
            if isinstance(answer, Registered):
                assert told.setdefault(number, answer.task) == answer.task
        state = d.core.cluster_state("c")
        holders = {} if state is None else {member.task: member.incarnation for member in state.members}
        for number, task in told.items():
            if number not in lost:
                assert holders[task] == number, "who was told a task slot holds it until it is lost"
