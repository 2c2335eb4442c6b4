"""A rank waits in a barrier for ranks that wait for it in a call: an error at once, and no false alarm."""

from __future__ import annotations

import math
import threading
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, Cluster

from dmesh.collectives import position_query, services
from dmesh.collectives.control_messages import NOT_BLOCKED, Blocked, Position
from dmesh.collectives.position_query import PositionQuery, blocked_in
from dmesh.collectives.services import BarrierWait, Members, WaitPolicy
from dmesh.errors import CollectiveMismatchError, DMeshError

QUICK = WaitPolicy(ask_after=(0.01,), ask_every=0.05, look_every=0.02, announce=lambda message: None)
ME = threading.get_ident


class Barriers:
    """The barriers of one rank, which wait until the test lets them pass."""

    def __init__(self) -> None:
        self.waiting: dict[str, BarrierWait] = {}
        self.callers: set[int] = set()
        self.outcomes: dict[str, SimpleQueue[DMeshError | None]] = {}

    def waits(self) -> list[BarrierWait]:
        return list(self.waiting.values())

    def threads(self) -> set[int]:
        return self.callers

    def fail(self, name: str, error: DMeshError) -> None:
        if self.waiting.pop(name, None) is not None:
            self.outcomes[name].put(error)

    def barrier(
        self,
        name: str,
        ranks: frozenset[int] | None = None,
        timeout: float = math.inf,
        *,
        leaving: bool = False,
    ) -> None:
        """Waits for its outcome; raises it if it is an error."""
        self.callers.add(ME())
        outcome = self.outcomes.setdefault(name, SimpleQueue())
        self.waiting[name] = BarrierWait(name, ranks, ME(), timeout, leaving)
        error = outcome.get(timeout=LIMIT)
        self.waiting.pop(name, None)
        if error is not None:
            raise error

    def release(self, name: str) -> None:
        """Lets the wait in a barrier pass, now or when it begins."""
        self.outcomes.setdefault(name, SimpleQueue()).put(None)


@pytest.fixture(params=[(), ("native",)], ids=["messages", "shared-memory"])
def ranks(request):
    """Three ranks that have made one call."""
    made = Cluster(3, QUICK, shm=request.param)
    for communicator in made.communicators:
        communicator.barriers = Barriers()
    yield made
    made.close()


def begin(communicator) -> None:
    """Makes the first call, on the thread that makes the others and has called barriers."""
    communicator.barriers.callers.add(ME())
    communicator.world.all_reduce(np.ones(2))


@pytest.fixture
def answers(monkeypatch):
    """Counts the answers of ranks that have not made a call."""
    count = threading.Semaphore(0)
    answered = PositionQuery.answered

    def counted(self, rank, answer):
        answered(self, rank, answer)
        count.release()

    monkeypatch.setattr(PositionQuery, "answered", counted)
    return count


def hear(answers: threading.Semaphore, count: int = 40) -> None:
    """Waits for the answers to ten questions of each rank: many more than any proof needs."""
    for _ in range(count):
        assert answers.acquire(timeout=LIMIT)


@pytest.mark.parametrize("leaving", [False, True])
def test_all_ranks_get_one_error_that_names_both_sides(ranks, leaving):
    def body(communicator):
        begin(communicator)
        if communicator.rank == 1:
            communicator.barriers.barrier("saved", leaving=leaving)
        else:
            communicator.world.all_reduce(np.ones(3))

    errors = ranks.run(body)
    assert {type(error) for error in errors} == {CollectiveMismatchError}
    place = "the shutdown of the system" if leaving else "barrier 'saved'"
    for text in map(str, errors):
        assert text.startswith(
            ("collective #2 of group world: rank 0 ", "collective #2 of group world: ranks 0")
        )
        assert "called all_reduce(sum, float64, shape (3,))" in text
        assert f"rank 1 has not called it and never will: it is waiting in {place}" in text
    with pytest.raises(CollectiveMismatchError):
        ranks.communicators[1].world.barrier()


def test_two_ranks_that_skipped_are_both_freed(ranks):
    def body(communicator):
        begin(communicator)
        if communicator.rank:
            communicator.barriers.barrier("saved")
        else:
            communicator.world.all_reduce(np.ones(3))

    errors = ranks.run(body)
    assert {type(error) for error in errors} == {CollectiveMismatchError}
    assert "rank 0 called all_reduce" in str(errors[0])


def test_a_group_that_the_rank_in_the_barrier_has_not_made(ranks, monkeypatch):
    # Each rank of the test is a thread of its own.
    monkeypatch.setattr(position_query, "_others", lambda thread: [])

    def body(communicator):
        begin(communicator)
        if communicator.rank == 2:
            return
        if communicator.rank == 1:
            communicator.barriers.barrier("saved")
        communicator.new_group((0, 1), "pair").barrier()

    errors = ranks.run(body)
    assert {type(error) for error in errors[:2]} == {CollectiveMismatchError}
    assert "collective #1 of group pair: rank 0 called barrier(), but rank 1 has not called it" in str(
        errors[0]
    )


def test_the_first_two_of_the_default_questions_prove_it():
    """They are asked within a second."""
    questions = WaitPolicy().ask_after[:2]
    assert questions[1] < 1.0
    ranks = Cluster(2, WaitPolicy(ask_after=questions, ask_every=1000, announce=lambda message: None))
    try:
        for communicator in ranks.communicators:
            communicator.barriers = Barriers()

        def body(communicator):
            begin(communicator)
            if communicator.rank == 1:
                communicator.barriers.barrier("saved")
                return
            assert ranks.wait_until(lambda: bool(ranks.communicators[1].barriers.waiting))
            communicator.world.all_reduce(np.ones(3))

        assert isinstance(ranks.run(body)[0], CollectiveMismatchError)
    finally:
        ranks.close()


# What is no proof -------------------------------------------------------------------------------------------


def results(ranks, body):
    """Returns what ranks compute, of which none may fail."""
    return [result.tolist() for result in ranks.all(body)]


def test_an_asynchronous_call_leaves_its_thread_free_for_the_barrier(ranks, answers):
    def body(communicator):
        begin(communicator)
        barriers = communicator.barriers
        if communicator.rank == 1:
            hear_and_release.start()
            barriers.barrier("saved")
            return communicator.world.all_reduce(np.ones(1))
        pending = communicator.world.all_reduce(np.ones(1), async_op=True)
        barriers.barrier("saved")
        return pending.result(LIMIT)

    def release():
        hear(answers)
        for communicator in ranks.communicators:
            communicator.barriers.release("saved")

    hear_and_release = threading.Thread(target=release)
    assert results(ranks, body) == [[3.0]] * 3
    hear_and_release.join(LIMIT)


def test_another_thread_makes_the_calls_of_the_rank_in_the_barrier(ranks, answers):
    def body(communicator):
        if communicator.rank != 1:
            begin(communicator)
            return communicator.world.all_reduce(np.ones(1))
        found = []
        begun = threading.Event()

        def calls():
            communicator.world.all_reduce(np.ones(2))
            begun.set()
            hear(answers)
            found.append(communicator.world.all_reduce(np.ones(1)))
            communicator.barriers.release("over")

        thread = threading.Thread(target=calls)
        thread.start()
        assert begun.wait(LIMIT)
        communicator.barriers.barrier("over")
        thread.join(LIMIT)
        return found[0]

    assert results(ranks, body) == [[3.0]] * 3


def test_another_thread_comes_to_the_barrier_of_the_rank_in_the_call(ranks, answers):
    def body(communicator):
        begin(communicator)
        if communicator.rank != 1:
            other = threading.Thread(target=communicator.barriers.barrier, args=("others",))
            other.start()  # it has called a barrier, and may come to the next one
            total = communicator.world.all_reduce(np.ones(1))
            communicator.barriers.release("others")
            other.join(LIMIT)
            return total
        threading.Thread(target=lambda: (hear(answers), communicator.barriers.release("saved"))).start()
        communicator.barriers.barrier("saved")
        return communicator.world.all_reduce(np.ones(1))

    assert results(ranks, body) == [[3.0]] * 3


@pytest.mark.parametrize("how", [{"timeout": 30.0}, {"ranks": frozenset({1})}], ids=["limited", "of others"])
def test_a_barrier_that_may_end_without_the_caller(ranks, answers, how):
    def body(communicator):
        begin(communicator)
        if communicator.rank == 1:
            threading.Thread(target=lambda: (hear(answers), communicator.barriers.release("saved"))).start()
            communicator.barriers.barrier("saved", **how)
        return communicator.world.all_reduce(np.ones(1), timeout=LIMIT)

    assert results(ranks, body) == [[3.0]] * 3


# The rules --------------------------------------------------------------------------------------------------


def waiting(**changes) -> Barriers:
    """Barriers in which this thread waits."""
    barriers = Barriers()
    wait = {"name": "b", "ranks": None, "thread": ME(), "gives_up_in": math.inf, "leaving": False, **changes}
    barriers.waiting["b"] = BarrierWait(**wait)
    return barriers


def test_a_rank_is_blocked_if_no_other_thread_can_make_the_call():
    assert blocked_in(services.Barriers(), {ME()}, 0) == NOT_BLOCKED
    assert blocked_in(waiting(), {ME()}, 0) == Blocked("b", 0, False)
    assert blocked_in(waiting(gives_up_in=2.5, leaving=True), {ME()}, 0) == Blocked("b", 2500, True)
    assert blocked_in(waiting(ranks=frozenset({1, 2})), {ME()}, 0) == NOT_BLOCKED
    other, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (other.set(), over.wait(LIMIT)))
    thread.start()
    assert other.wait(LIMIT)
    assert blocked_in(waiting(), {ME(), thread.ident}, 0) == NOT_BLOCKED
    assert blocked_in(waiting(), set(), 0) == NOT_BLOCKED, "the other thread could make the first call"
    over.set()
    thread.join(LIMIT)
    assert blocked_in(waiting(), {ME(), thread.ident}, 0) == Blocked("b", 0, False), "it has ended"


def test_a_rank_counts_once_it_has_said_the_same_twice():
    barriers = Barriers()
    barriers.callers.add(ME())
    members = Members(SimpleNamespace(rank=0, barriers=barriers), (0, 1), "g", 7)
    calls = PositionQuery(members, 0, None, 1, "barrier()", tuple)

    def answered(question, blocked):
        calls.answered(1, Position(0, 7, None, 1, question, "absent", 0, "", "", (), blocked))

    there = Blocked("b", 0, False)
    answered(1, there)
    answered(1, there)  # the same question
    assert calls.never_come(5.0) == {}
    answered(2, there)
    assert calls.never_come(5.0) == {1: there}
    answered(3, Blocked("c", 0, False))
    assert calls.never_come(5.0) == {}
    answered(4, Blocked("c", 0, False))
    assert calls.never_come(5.0) == {}
    answered(5, Blocked("c", 4000, False))
    assert calls.never_come(5.0) == {}, "the barrier may give up before the call does"
    assert calls.never_come(3.0) == {1: Blocked("c", 4000, False)}
    answered(6, NOT_BLOCKED)
    assert calls.never_come(3.0) == {}
