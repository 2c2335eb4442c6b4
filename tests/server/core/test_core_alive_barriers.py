"""Barriers of those alive: who is waited for as members come and go, and what all are told."""

from __future__ import annotations

import random

import pytest
from tests.server.core.driving import Driver, worker

from dmesh_server.core.effects import BarrierResult
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.events import EnterBarrier
from dmesh_server.core.model import ClusterSettings, Participant, RestartPolicy

REJOIN = ClusterSettings(RestartPolicy.REJOIN)


def enter(
    d: Driver, index: int, *participants: int, instance: int = 0, timeout: float | None = None
) -> list[BarrierResult]:
    """Lets a worker come; returns what it is told at once."""
    listed = tuple(map(worker, participants))
    d.apply(EnterBarrier(d.sessions[index], "b", instance, listed, timeout, alive=True))
    return d.results(index)


def present(*indices: int) -> tuple[Participant, ...]:
    return tuple(Participant(worker(index), 1000 + index) for index in indices)


def test_all_are_told_who_came_with_which_incarnation() -> None:
    d = Driver(3)
    d.join(2, 0, 1)
    assert enter(d, 2) == []
    assert enter(d, 0) == []
    (result,) = enter(d, 1)
    assert (result.error, result.instance, result.present) == (None, 0, present(0, 1, 2))
    assert d.results(0) == d.results(2) == [result]


def test_only_members_are_waited_for() -> None:
    d = Driver(4)
    d.join(0, 1, 2)
    d.lose(2)
    assert enter(d, 0) == []
    (result,) = enter(d, 1)
    assert result.present == present(0, 1)


def test_a_departure_ends_the_wait_for_the_departed() -> None:
    d = Driver(3)
    d.join(0, 1, 2)
    enter(d, 0)
    enter(d, 2)
    d.lose(2)
    assert d.results(0) == [], "one is alive and missing"
    d.apply(d.leave(1))
    (result,) = d.results(0)
    assert result.present == present(0)


def test_who_registers_meanwhile_is_waited_for() -> None:
    d = Driver(3)
    d.join(0, 1)
    enter(d, 0)
    d.join(2)
    enter(d, 1)
    assert d.results(0) == []
    (result,) = enter(d, 2)
    assert result.present == present(0, 1, 2)


def test_the_successor_of_a_lost_member_is_waited_for() -> None:
    d = Driver(3)
    for index in (0, 1, 2):
        d.apply(d.register(index, settings=REJOIN))
        d.apply(d.attach(index))
    enter(d, 0)
    d.lose(1)
    d.apply(d.register(1, 77, settings=REJOIN))
    d.apply(d.attach(1, 77))
    enter(d, 2)
    assert d.results(0) == []
    (result,) = enter(d, 1, instance=-1)
    successor = Participant(worker(1), 77)
    assert result.present == (*present(0), successor, *present(2))


def test_some_of_the_cluster() -> None:
    d = Driver(4)
    d.join(0, 1, 2, 3)
    assert enter(d, 0, 0, 1, 2) == []
    d.lose(3)
    assert enter(d, 1, 2, 1, 0) == []
    d.lose(2)
    (result,) = d.results(0)
    assert result.present == present(0, 1)


def test_a_timeout_names_those_alive_that_are_missing() -> None:
    d = Driver(3)
    d.join(0, 1)
    enter(d, 0, timeout=2.0)
    d.beat(3.0, 0, 1)
    (result,) = d.results(0)
    assert result.error is not None
    assert result.error.kind is ErrorKind.BARRIER_TIMEOUT
    assert [member.task for member in result.error.members] == [worker(1)]
    assert "1 of 2 tasks are missing" in result.error.message


@pytest.mark.parametrize("alive_first", [False, True])
def test_both_kinds_under_one_name_are_an_error(alive_first: bool) -> None:
    d = Driver(2)
    d.join(0, 1)
    for index, alive in ((0, alive_first), (1, not alive_first)):
        d.apply(EnterBarrier(d.sessions[index], "b", 0, (), None, alive))
    for index in (0, 1):
        (result,) = d.results(index)
        assert result.error is not None
        assert result.error.kind is ErrorKind.BARRIER_MISMATCH


def test_a_result_is_told_again_after_a_crash() -> None:
    d = Driver(2)
    d.join(0, 1)
    enter(d, 0)
    (result,) = enter(d, 1)
    d.restart(0)
    for index in (0, 1):
        d.apply(d.attach(index))
        (again,) = enter(d, index)
        assert again == result, "it is durable before anybody is told"


@pytest.mark.parametrize("seed", range(20))
def test_a_random_history_agrees_with_who_is_there(seed: int) -> None:
    chance, d, size = random.Random(seed), Driver(5), 5
    alive: set[int] = set()
    arrived: set[int] = set()
    gone: set[int] = set()
    instance = 0
    for _ in range(60):
        index = chance.randrange(size)
        before = set(arrived)
        if index not in alive:
            if index in gone or gone:
                continue
            d.join(index)
            alive.add(index)
        elif chance.random() < 0.1 and len(alive) > 1:
            d.apply(d.leave(index))
            alive.discard(index)
            arrived.discard(index)
            gone.add(index)
        elif index not in arrived:
            arrived.add(index)
            d.apply(EnterBarrier(d.sessions[index], "b", instance, (), None, alive=True))
        if arrived and arrived == alive:
            for one in arrived:
                (result,) = d.results(one)
                assert (result.instance, result.present) == (instance, present(*sorted(alive)))
            instance += 1
            arrived.clear()
        else:
            assert all(not d.results(one) for one in before)
