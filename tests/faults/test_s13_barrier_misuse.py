"""Scenario 13: barriers that are used wrongly are refused at once, and say who is missing."""

from __future__ import annotations

import time

import pytest
from tests.faults.processes import errors, eventually, results

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SIZE = 6


@pytest.fixture
def clients(make_server, make_cluster):
    server = make_server().start()
    return make_cluster(SIZE, server.address)


def arrived(client, name: str) -> int:
    return client.do(
        f"next((len(b.arrived) for b in agent.cluster_state().barriers if b.name == {name!r}), 0)",
        thread=True,
    )


def test_different_participants_are_refused_for_all(clients, figures):
    """Nobody waits for the timeout: the mismatch is told to those who wait and to the one who came."""
    first = [clients[index].submit("agent.barrier('b', [0, 1, 2], timeout=80)") for index in (0, 1)]
    eventually(lambda: arrived(clients[5], "b") == 2, "two to have arrived")
    started = time.monotonic()
    second = clients[2].submit("agent.barrier('b', [0, 2], timeout=80)")
    told = errors([second])
    assert told[0].kind == "BarrierMismatchError"
    assert "[" in told[0].message or "task" in told[0].message
    figures.add("mismatch told after", max(error.at for error in told) - started)
    assert told[0].at - started < 60
    # The one who asked rightly makes it whole, or the barrier was failed for all at once: never a hang.
    third = clients[2].submit("agent.barrier('b', [0, 1, 2], timeout=10)")
    for future in (*first, third):
        error = future.exception(80)
        assert error is None or error.kind in ("BarrierMismatchError", "BarrierTimeoutError")


def test_an_outsider_is_refused(clients):
    (told,) = errors([clients[3].submit("agent.barrier('inner', [0, 1], timeout=80)")])
    assert told.kind == "BarrierMismatchError"
    results([clients[index].submit("agent.barrier('inner', [0, 1], timeout=80)") for index in (0, 1)])


def test_a_task_that_does_not_exist_is_refused(clients):
    (told,) = errors([clients[0].submit("agent.barrier('b', [0, 99], timeout=80)")])
    assert "99" in told.message


def test_order_and_repetition_of_participants_do_not_matter(clients):
    spelled = ("[2, 0, 1]", "[0, 1, 2]", "['/job:worker/task:1', 2, 0]")
    results(
        [clients[index].submit(f"agent.barrier('b', {spelled[index]}, timeout=80)") for index in range(3)]
    )


def test_timeout_names_all_who_are_missing(clients):
    """Not just the first, and to everybody who waits the same."""
    waiting = [clients[index].submit("agent.barrier('late', timeout=1.5)") for index in (0, 4)]
    for error in errors(waiting):
        assert error.kind == "BarrierTimeoutError"
        assert [member["rank"] for member in error.members] == [1, 2, 3, 5]
        assert all(member["pid"] == clients[member["rank"]].pid for member in error.members)
        for rank in (1, 2, 3, 5):
            assert f"task:{rank}" in error.message
    # Who comes after that is told the same, at once; then all are in step again.
    late = errors([clients[index].submit("agent.barrier('late', timeout=80)") for index in (1, 2, 3, 5)])
    assert {error.kind for error in late} == {"BarrierTimeoutError"}
    results([client.submit("agent.barrier('late', timeout=80)") for client in clients])


def test_late_caller_of_a_finished_barrier_gets_its_result(clients):
    """A cancelled instance, too, is the same for those who come to it late."""
    waiting = clients[0].submit("agent.barrier('c', timeout=80)")
    eventually(lambda: arrived(clients[5], "c") == 1, "one to have arrived")
    clients[1].do("agent.cancel_barrier('c')")
    told = errors([waiting, *(client.submit("agent.barrier('c', timeout=80)") for client in clients[1:])])
    assert {error.kind for error in told} == {"BarrierCancelledError"}
    results([client.submit("agent.barrier('c', timeout=80)") for client in clients])


def test_the_first_deadline_holds(clients):
    """A later caller's longer limit does not keep the first one waiting."""
    first = clients[0].submit("agent.barrier('d', timeout=1)")
    eventually(lambda: arrived(clients[5], "d") == 1 or first.done(), "the first to have arrived")
    second = clients[1].submit("agent.barrier('d', timeout=80)")
    assert {error.kind for error in errors([first, second])} == {"BarrierTimeoutError"}
