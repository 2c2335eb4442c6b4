"""Barriers among real members: all arrive, or all get the same error."""

from __future__ import annotations

import re
import threading

import pytest

from dmesh.errors import (
    BarrierCancelledError,
    BarrierError,
    BarrierMismatchError,
    BarrierTimeoutError,
    CollectiveMismatchError,
    ConfigurationError,
    CoordinationError,
)


@pytest.fixture
def trio(server, join):
    return [join(server.address, index, 3) for index in range(3)]


def test_everybody_passes_again_and_again(trio, background) -> None:
    rounds = 20

    def work(agent) -> None:
        for _ in range(rounds):
            agent.barrier("step", timeout=60)

    for future in [background(work, agent) for agent in trio]:
        future.result(60)


def test_nobody_passes_before_the_last(trio, background, eventually, arrived) -> None:
    early = [background(agent.barrier, "b") for agent in trio[:2]]
    eventually(arrived(trio[0], "b", 2))
    assert not any(future.done() for future in early)
    trio[2].barrier("b")
    for future in early:
        future.result(60)


def test_a_subset_by_rank_and_by_task(trio, background) -> None:
    other = background(trio[2].barrier, "pair", ["/job:worker/task:2", "/job:worker/task:0"])
    trio[0].barrier("pair", [0, 2], timeout=60)
    other.result(60)


def test_a_timeout_names_all_that_are_missing(server, join) -> None:
    alone = join(server.address, 0, 3)
    late = join(server.address, 2, 3)
    with pytest.raises(BarrierTimeoutError) as caught:
        alone.barrier("b", timeout=0.2)
    text = str(caught.value)
    assert "/job:worker/task:1 (never registered)" in text
    assert f"/job:worker/task:2 (host {late.identity.process.host}, pid {late.identity.process.pid}" in text
    assert [member.rank for member in caught.value.members] == [1, 2]
    with pytest.raises(BarrierTimeoutError) as repeated:
        late.barrier("b", timeout=0.2)
    assert str(repeated.value) == str(caught.value), "a late caller gets the same result"


def test_the_own_limit_holds_although_the_first_gave_more(trio, background, eventually, arrived) -> None:
    patient = background(trio[0].barrier, "b")
    eventually(arrived(trio[0], "b", 1))
    with pytest.raises(BarrierTimeoutError, match=r"this process's limit of 0\.1 s") as caught:
        trio[1].barrier("b", timeout=0.1)
    assert [member.rank for member in caught.value.members] == [2]
    trio[2].barrier("b", timeout=60)
    patient.result(60)
    trio[1].barrier("b", timeout=60)  # it had arrived, so it was counted, and is told now


def test_cancelling_ends_it_for_all(trio, background, eventually, arrived) -> None:
    waiting = [background(agent.barrier, "b") for agent in trio[:2]]
    eventually(arrived(trio[0], "b", 2))
    trio[2].cancel_barrier("b")
    for future in waiting:
        with pytest.raises(BarrierCancelledError, match="/job:worker/task:2"):
            future.result(60)
    with pytest.raises(BarrierCancelledError):
        trio[2].barrier("b")
    for future in [background(agent.barrier, "b") for agent in trio]:
        future.result(60)


def test_cancelling_what_is_not_under_way_is_refused(trio) -> None:
    with pytest.raises(CoordinationError):
        trio[0].cancel_barrier("nothing")


def test_different_participants_fail_it_for_all(trio, background, eventually, arrived) -> None:
    waiting = background(trio[0].barrier, "b", [0, 1])
    eventually(arrived(trio[0], "b", 1))
    with pytest.raises(BarrierMismatchError, match="its callers named different participants"):
        trio[1].barrier("b", [0, 1, 2])
    with pytest.raises(BarrierMismatchError, match="its callers named different participants"):
        waiting.result(60)
    other = background(trio[0].barrier, "b", [0, 1])
    trio[1].barrier("b", [0, 1], timeout=60)
    other.result(60)


def test_an_outsider_is_refused_and_disturbs_nobody(trio, background, eventually, arrived) -> None:
    waiting = background(trio[0].barrier, "b", [0, 1])
    eventually(arrived(trio[0], "b", 1))
    with pytest.raises(BarrierMismatchError):
        trio[2].barrier("b", [1, 2])
    trio[1].barrier("b", [0, 1], timeout=60)
    waiting.result(60)


def test_bad_input_is_refused_before_anything_is_sent(trio) -> None:
    for arguments, match in (
        ({"name": ""}, "name"),
        ({"name": "b", "participants": [0, 9]}, "ranks go from 0 to 2"),
        ({"name": "b", "participants": []}, "participants"),
        ({"name": "b", "timeout": 0}, "timeout"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            trio[0].barrier(**arguments)
    assert trio[0].cluster_state().barriers == ()


def test_the_same_barrier_in_two_threads_is_refused(trio, background, eventually, arrived) -> None:
    waiting = background(trio[0].barrier, "b")
    eventually(arrived(trio[0], "b", 1))
    with pytest.raises(BarrierMismatchError, match="another thread of this process"):
        trio[0].barrier("b")
    for agent in trio[1:]:
        background(agent.barrier, "b")
    waiting.result(60)


def test_many_barriers_at_once(trio, background) -> None:
    calls = [background(agent.barrier, f"b{number}") for number in range(8) for agent in trio]
    for call in calls:
        call.result(60)


def test_a_participant_that_is_killed_fails_it(server, join, spawn, background, eventually, arrived) -> None:
    agents = [join(server.address, index, 3) for index in range(2)]
    child = spawn("agent.start(); say('ready'); agent.barrier('other', [2, 0])", server.address, 2, 3)
    child.wait_for("ready")
    waiting = [background(agent.barrier, "b") for agent in agents]
    eventually(arrived(agents[0], "b", 2))
    child.end()
    for future in waiting:
        with pytest.raises(BarrierError) as caught:  # in a fraction of the lease of 120 s
            future.result(60)
        assert f"/job:worker/task:2 (host {caught.value.members[0].process.host}, pid {child.pid})" in str(
            caught.value
        )
        assert [member.rank for member in caught.value.members] == [2]
    with pytest.raises(BarrierError, match="task:2"):
        agents[0].barrier("later", timeout=60)


def test_a_participant_that_leaves_fails_it(trio, background, eventually, arrived) -> None:
    waiting = background(trio[0].barrier, "b")
    eventually(arrived(trio[0], "b", 1))
    trio[1].leave()
    with pytest.raises(BarrierError, match=r"task:1 .* left"):
        waiting.result(60)


def test_who_waits_is_told_for_whom(server, join, background, quick) -> None:
    said: list[str] = []
    enough = threading.Event()

    def announce(message: str) -> None:
        said.append(message)
        if len(said) >= 2:
            enough.set()

    first = join(server.address, 0, 3, announce=announce, patience=quick)
    second = join(server.address, 1, 3)
    waiting = background(first.barrier, "b", timeout=300)
    assert enough.wait(60)
    assert re.search(r"still waiting at barrier 'b' \(instance 0\), for \d+ of 300 s", said[0])
    assert (
        f"/job:worker/task:1 (host {second.identity.process.host}, pid {second.identity.process.pid}"
        in said[0]
    )
    assert "/job:worker/task:2 (never registered)" in said[0]
    third = join(server.address, 2, 3)
    background(second.barrier, "b")
    third.barrier("b", timeout=60)
    waiting.result(60)


def test_a_wait_that_this_process_ends_by_itself(trio, background, eventually, arrived) -> None:
    """As the data plane does when it knows that a participant will never come."""
    waiting = background(trio[0].barrier, "b")
    eventually(arrived(trio[0], "b", 1))
    [arrival] = trio[0].barriers.waiting()
    assert arrival.thread in trio[0].barriers.callers()
    trio[0].barriers.fail("other", CollectiveMismatchError("of another barrier"))
    trio[0].barriers.fail("b", CollectiveMismatchError("rank 1 has not called it"))
    with pytest.raises(CollectiveMismatchError, match="rank 1 has not called it"):
        waiting.result(60)
    assert trio[0].barriers.waiting() == []
    again = [background(agent.barrier, "b") for agent in trio]
    for future in again:
        future.result(60)
