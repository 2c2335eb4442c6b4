"""What goes wrong on one rank goes wrong on all, says whose fault it is, and nothing hangs."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster

from dmesh.collectives.backends import registered
from dmesh.collectives.backends.base import Backend
from dmesh.collectives.backends.tcp.messages import MessageBackend
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.position_query import PositionQuery
from dmesh.collectives.request import Reduction
from dmesh.collectives.services import WaitPolicy
from dmesh.collectives.work import Work
from dmesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InitializationTimeoutError,
    PeerLostError,
)

X = np.zeros((3, 4), np.float32)
LARGE = np.zeros(100_000, np.float32)
QUICK = WaitPolicy(ask_after=(0.02, 0.1), ask_every=0.2, answers_within=LIMIT, announce=lambda message: None)


def sequence(*calls):
    """Rank i makes call i of `calls`; the last one stands for all further ranks."""
    return lambda communicator: calls[min(communicator.rank, len(calls) - 1)](communicator.world)


MISMATCHES = {
    "another operation": (lambda g: g.all_reduce(X), lambda g: g.all_gather(X)),
    "another reduction": (lambda g: g.all_reduce(X, "sum"), lambda g: g.all_reduce(X, "max")),
    "another dtype": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X.astype("f8"))),
    "another shape": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X.T)),
    "another size": (lambda g: g.all_reduce(LARGE), lambda g: g.all_reduce(LARGE[1:])),
    "small and large": (lambda g: g.all_reduce(LARGE[:1]), lambda g: g.all_reduce(LARGE)),
    "a barrier": (lambda g: g.barrier(), lambda g: g.broadcast(X)),
    "another axis": (
        lambda g: g.reduce_scatter(np.zeros((6, 6)), axis=0),
        lambda g: g.reduce_scatter(np.zeros((6, 6)), axis=1),
    ),
    "another permutation": (lambda g: g.permute(X, [(0, 1)]), lambda g: g.permute(X, [(1, 0)])),
    "empty arrays": (lambda g: g.all_reduce(X[:0]), lambda g: g.all_reduce(X[:, :0])),
    # In these, no message of one meets one of the other: they wait for each other.
    "gather to different roots": (lambda g: g.gather(X, 0), lambda g: g.gather(X, 1)),
    "reduce to different roots": (lambda g: g.reduce(X, root=0), lambda g: g.reduce(X, root=1)),
    "broadcast from different roots": (lambda g: g.broadcast(X, 1), lambda g: g.broadcast(X, 0)),
    "large from different roots": (lambda g: g.broadcast(LARGE, 1), lambda g: g.broadcast(LARGE, 0)),
    "scatter from different roots": (
        lambda g: g.scatter(X[: g.size] if g.rank == 1 else X[0], 1),
        lambda g: g.scatter(X[: g.size] if g.rank == 0 else X[0], 0),
    ),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_is_an_error_on_all_ranks_and_names_both_sides(case, size):
    with cluster(size, wait_policy=QUICK) as ranks:
        ranks.all(lambda communicator: communicator.world.barrier())
        errors = ranks.run(sequence(*MISMATCHES[case]))
        for error in errors:
            assert type(error) is CollectiveMismatchError, error
            assert str(error).startswith("collective #2 of group world: rank 0 called ")
            assert ", rank 1 called " in str(error) or ", rank 2 called " in str(error)


def test_the_message_of_a_mismatch():
    with cluster(2) as ranks:
        errors = ranks.run(
            sequence(lambda g: g.all_reduce(X), lambda g: g.all_reduce(X[0].astype("i8"), "max"))
        )
    for error in errors:
        assert str(error) == (
            "collective #1 of group world: rank 0 called all_reduce(sum, float32, shape (3, 4)), "
            "rank 1 called all_reduce(max, int64, shape (4,)). "
            "All ranks must make the same calls in the same order."
        )


def test_a_mismatch_among_many_names_the_odd_one_out():
    with cluster(5, wait_policy=QUICK) as ranks:

        def body(communicator):
            return communicator.world.gather(X, 1 if communicator.rank == 3 else 0)

        for error in ranks.run(body):
            assert type(error) is CollectiveMismatchError, error
            assert "rank 3 called gather(root=1, float32, shape (3, 4))" in str(error)
            assert "called gather(root=0, float32, shape (3, 4))" in str(error)


def test_a_transfer_mismatch_is_an_error_at_both_ends():
    with cluster(3, wait_policy=QUICK) as ranks:
        body = sequence(lambda g: g.send(LARGE, 2), lambda g: None, lambda g: g.recv(LARGE[0], 0))
        sender, _, receiver = ranks.run(body)
        for error in (sender, receiver):
            assert type(error) is CollectiveMismatchError
            assert str(error).startswith(
                "transfer #1 from rank 0 to rank 2 of group world: "
                "rank 0 called send(float32, shape (100000,)), rank 2 called recv(float32, shape ())"
            )


def test_an_asynchronous_call_that_waits_in_its_queue_is_compared_too():
    """Rank 0 waits for a collective that rank 1 has called otherwise, but is not at yet."""
    with cluster(2, wait_policy=QUICK) as ranks:

        def body(communicator):
            group = communicator.world
            if communicator.rank == 0:
                first = group.barrier(async_op=True)
                return [group.gather(X, 0), first.result(LIMIT)]
            return group.gather(X, 1)  # as number 1, against the barrier

        for error in ranks.run(body):
            assert type(error) is CollectiveMismatchError


# -- lost peers ----------------------------------------------------------------------------------------------

CALLS = {
    "all_reduce": lambda g: g.all_reduce(X),
    "all_reduce large": lambda g: g.all_reduce(LARGE),
    "all_gather": lambda g: g.all_gather(X),
    "all_to_all": lambda g: g.all_to_all(np.zeros((g.size, 2))),
    "reduce_scatter": lambda g: g.reduce_scatter(np.zeros((g.size, 2))),
    "reduce": lambda g: g.reduce(X, root=1),
    "broadcast": lambda g: g.broadcast(X, 1),
    "broadcast large": lambda g: g.broadcast(LARGE, 1),
    "gather": lambda g: g.gather(X, 1),
    "scatter": lambda g: g.scatter(np.zeros((g.size, 2)) if g.rank == 1 else np.zeros(2), 1),
    "permute": lambda g: g.permute(X, [(0, 1)]),
    "barrier": lambda g: g.barrier(),
}


def assert_lost(error, rank, reason=""):
    assert type(error) is PeerLostError, error
    assert error.rank == rank
    assert f"lost rank {rank}, /job:worker/task:{rank} " in str(error)
    assert reason in str(error)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("call", CALLS)
def test_a_peer_that_dies_while_others_wait(call, victim):
    with cluster(4) as ranks:
        ranks.all(lambda communicator: communicator.world.barrier())
        survivors = tuple(rank for rank in range(4) if rank != victim)
        waiting = threading.Timer(0.05, ranks.network.kill, (victim, "killed by the test"))
        waiting.start()
        errors = ranks.run(lambda communicator: CALLS[call](communicator.world), survivors)
        waiting.join()
        for error in errors:
            assert_lost(error, victim, "killed by the test")
        for error in ranks.run(lambda communicator: communicator.world.barrier(), survivors):
            assert_lost(error, victim, "group world has failed and cannot be used any more")


def test_a_peer_that_died_before():
    with cluster(3) as ranks:
        ranks.network.kill(1)
        ranks.settle()
        for error in ranks.run(lambda communicator: communicator.world.all_reduce(X), (0, 2)):
            assert_lost(error, 1)


@pytest.mark.parametrize("frames", range(8))
def test_a_peer_that_dies_in_the_middle(frames):
    """After any number of its messages has been delivered."""
    with cluster(3) as ranks:
        network = ranks.network
        for other in (0, 1):
            network.hold(2, other)

        def body(communicator):
            group = communicator.world
            return [group.all_reduce(X + step) for step in range(3)] and group.all_reduce(LARGE)

        def kill():
            for _ in range(frames):
                network.release(2, 0)
                network.hold(2, 0)
            network.kill(2)

        timer = threading.Timer(0.05, kill)
        timer.start()
        errors = ranks.run(body)
        timer.join()
        for error in errors[:2]:
            assert_lost(error, 2)
        assert isinstance(errors[2], CollectiveError)


def test_the_coordination_service_says_who_is_gone():
    with cluster(3) as ranks:
        failed = threading.Timer(
            0.05,
            lambda: [
                c.lose(1, "ZeroDivisionError: the learning rate", hearsay=True) for c in ranks.communicators
            ],
        )
        failed.start()
        for error in ranks.run(lambda communicator: communicator.world.all_reduce(X), (0, 2)):
            assert_lost(error, 1, "ZeroDivisionError: the learning rate")
        failed.join()


def test_who_ends_without_a_shutdown_says_why():
    """The reason comes before the goodbye, so that nobody reports a mere departure."""
    with cluster(3) as ranks:
        ended = threading.Timer(
            0.05, ranks.communicators[1].close, (1.0, "ZeroDivisionError: the learning rate")
        )
        ended.start()
        for error in ranks.run(lambda communicator: communicator.world.all_reduce(X), (0, 2)):
            assert_lost(error, 1, "ZeroDivisionError: the learning rate")
        ended.join()


def test_who_finds_out_tells_the_others():
    """Ranks 0 and 3 hear nothing of the death of rank 2 themselves."""
    with cluster(4) as ranks:
        found = threading.Timer(0.05, ranks.communicators[1].on_peer_lost, (2, "no route"))
        found.start()
        for error in ranks.run(lambda communicator: communicator.world.all_reduce(X), (0, 1, 3)):
            assert_lost(error, 2, "no route")
        found.join()


def test_who_is_refused_tells_those_who_wait():
    """Rank 1 was idle when it lost rank 2; rank 0 waits for rank 1 and has no quarrel with rank 2."""
    patience = WaitPolicy(ask_after=(), ask_every=1000)
    with cluster(3, wait_policy=patience) as ranks:
        ranks.communicators[1].on_peer_lost(2, "no route")

        def body(communicator):
            return communicator.world.permute(X, [(0, 1)])

        for error in ranks.run(body, (0, 1)):
            assert_lost(error, 2, "no route")


def test_the_first_cause_is_what_everybody_reports():
    """Survivors that end one after the other are not taken for the cause."""
    with cluster(4) as ranks:

        def body(communicator):
            try:
                communicator.world.all_reduce(X)
            finally:
                ranks.network.kill(communicator.rank)  # ends without a goodbye

        first = threading.Timer(0.05, ranks.network.kill, (3,))
        first.start()
        for error in ranks.run(body, (0, 1, 2)):
            assert_lost(error, 3)
        first.join()


def test_only_the_groups_of_the_lost_peer_fail():
    with cluster(4) as ranks:
        pairs = ranks.all(lambda c: c.new_group([0, 1] if c.rank < 2 else [2, 3], "pair"))
        ranks.network.kill(3)
        ranks.settle()
        for error in ranks.run(lambda c: c.world.barrier(), (0, 1, 2)):
            assert_lost(error, 3)
        assert [total.item() for total in ranks.run(lambda c: pairs[c.rank].all_reduce(1), (0, 1))] == [2, 2]
        (error,) = ranks.run(lambda c: pairs[2].all_reduce(1), (2,))
        assert_lost(error, 3)
        (error,) = ranks.run(lambda c: c.new_group([2, 3]).all_reduce(1), (2,))
        assert_lost(error, 3)
        survivors = ranks.run(lambda c: c.new_group([0, 1, 2]).all_reduce(1).item(), (0, 1, 2))
        assert survivors == [3, 3, 3]


def test_a_clean_leave_does_not_harm_what_the_leaver_had_finished():
    """Rank 0 is done and goes while the others still exchange their parts."""
    with cluster(3, wait_policy=QUICK) as ranks:
        ranks.network.hold(1, 2)
        left = threading.Event()

        def body(communicator):
            group = communicator.world
            if communicator.rank == 0:
                group.all_gather(X)
                communicator.close(linger=1.0)
                left.set()
                ranks.network.release(1, 2)
                return "left"
            group.all_gather(X)
            assert left.wait(LIMIT)
            return "complete"

        assert ranks.run(body) == ["left", "complete", "complete"]
        ranks.settle(1, 2)
        for error in ranks.run(lambda communicator: communicator.world.barrier(), (1, 2)):
            assert_lost(error, 0, "it has left the cluster")


def test_a_clean_leave_fails_what_the_leaver_is_waited_for_in():
    with cluster(3, wait_policy=QUICK) as ranks:
        leaves = threading.Timer(0.05, ranks.communicators[0].close, (1.0,))
        leaves.start()
        for error in ranks.run(lambda communicator: communicator.world.all_gather(X), (1, 2)):
            assert_lost(error, 0, "it has left the cluster")
        leaves.join()


# -- time-outs -----------------------------------------------------------------------------------------------


def test_a_time_out_names_who_is_behind_and_at_what():
    with cluster(3, wait_policy=QUICK) as ranks:

        def body(communicator):
            group = communicator.world
            group.barrier()
            group.all_gather(X)
            if communicator.rank == 2:
                return "elsewhere"
            return group.all_reduce(X, timeout=0.3 if communicator.rank == 0 else None)

        errors = ranks.run(body)
        assert errors[2] == "elsewhere"
        for error in errors[:2]:
            assert type(error) is CollectiveTimeoutError
            assert error.missing == (2,)
            assert str(error) == (
                "collective #3 of group world: rank 0 waited 0.3 s in all_reduce(sum, float32, shape (3, 4)) "
                "for rank 2: rank 2, /job:worker/task:2 (thread of this process), has finished #2 "
                "(all_gather(float32, shape (3, 4))) and has not called #3"
            )
        ranks.settle()
        (late,) = ranks.run(lambda communicator: communicator.world.all_reduce(X), (2,))
        assert type(late) is CollectiveTimeoutError
        assert "rank 0 waited 0.3 s" in str(late)


def test_a_time_out_says_what_the_missing_rank_does_instead():
    with cluster(2, wait_policy=QUICK) as ranks:

        def body(communicator):
            if communicator.rank == 0:
                return communicator.world.barrier(timeout=0.3)
            return communicator.world.recv(X, 0)

        waiting, receiving = ranks.run(body)
        assert "has not called #1; it is in recv(float32, shape (3, 4)), #1 of group world" in str(waiting)
        assert "collective #1 of group world: rank 0 waited 0.3 s in barrier()" in str(receiving)


def test_a_time_out_for_a_silent_rank():
    with cluster(3, wait_policy=replace(QUICK, answers_within=0.1)) as ranks:
        ranks.network.hold(2, 0)
        ranks.network.hold(2, 1)
        errors = ranks.run(lambda communicator: communicator.world.all_reduce(X, timeout=0.3))
        for error in errors[:2]:
            assert type(error) is CollectiveTimeoutError
            assert error.missing == (2,)
            assert "rank 2, /job:worker/task:2 (thread of this process), has not answered" in str(error)
        # Rank 2 had all it needed for this call; the next one fails.
        ranks.settle()
        (late,) = ranks.run(lambda communicator: communicator.world.all_reduce(X), (2,))
        assert type(late) is CollectiveTimeoutError


def test_a_time_out_for_a_rank_that_has_not_made_the_group():
    with cluster(2, wait_policy=QUICK) as ranks:

        def body(communicator):
            if communicator.rank == 0:
                return communicator.new_group([0, 1], "late").barrier(timeout=0.3)
            return None

        error, _ = ranks.run(body)
        assert type(error) is CollectiveTimeoutError
        assert "of group late" in str(error)
        assert "has not made this group" in str(error)
        # It makes it after the failure, and is told.
        ranks.settle()
        (late,) = ranks.run(lambda communicator: communicator.new_group([0, 1], "late").barrier(), (1,))
        assert type(late) is CollectiveTimeoutError
        assert "rank 0 waited 0.3 s" in str(late)


def test_a_transfer_that_nobody_takes():
    with cluster(3, wait_policy=QUICK) as ranks:
        (error,) = ranks.run(lambda communicator: communicator.world.send(LARGE, 2, timeout=0.2), (0,))
        assert type(error) is CollectiveTimeoutError
        assert error.missing == (2,)
        assert str(error).startswith(
            "transfer #1 from rank 0 to rank 2 of group world: rank 0 waited 0.2 s in send("
        )


def test_the_communicators_limit_holds_when_the_caller_names_none():
    with cluster(2, wait_policy=QUICK, timeout=0.2) as ranks:
        (error,) = ranks.run(lambda communicator: communicator.world.barrier(), (0,))
        assert "waited 0.2 s in barrier()" in str(error)


def test_a_long_wait_is_announced():
    said: list[str] = []
    heard = threading.Event()

    def announce(message):
        said.append(message)
        heard.set()

    patience = WaitPolicy(ask_after=(0.02,), ask_every=0.05, announce_every=0.2, announce=announce)
    with cluster(2, wait_policy=patience) as ranks:

        def body(communicator):
            if communicator.rank == 1:
                assert heard.wait(LIMIT)
            communicator.world.barrier()

        ranks.all(body)
    assert "rank 0 has waited 0 s in barrier(), collective #1 of group world for rank 1: rank 1, " in said[0]
    assert said[0].endswith("has not called #1")


def test_connect_all_names_who_did_not_come():
    with cluster(3, wait_policy=QUICK) as ranks:
        ranks.all(lambda communicator: communicator.connect_all(LIMIT))
    with cluster(3, wait_policy=QUICK) as ranks:
        errors = ranks.run(lambda communicator: communicator.connect_all(0.3), (0, 2))
        for error in errors:
            assert type(error) is InitializationTimeoutError
            assert str(error).startswith("not all of the 3 clients connected in time: ")
            assert "waited 0.3 s in all_gather(" in str(error)
            assert "rank 1, /job:worker/task:1 (thread of this process), has not made this group" in str(
                error
            )


def test_who_gives_up_connecting_later_is_told_the_cause(monkeypatch):
    """Not that the one who gave up first has left."""
    with cluster(2) as ranks:
        left = threading.Event()

        def first(timeout):
            raise InitializationTimeoutError("1 of 3 clients did not connect")

        def second(timeout):
            assert left.wait(LIMIT)
            ranks.settle(1)
            raise PeerLostError("rank 0 is gone: it said goodbye", 0)

        monkeypatch.setattr(ranks.communicators[0].transport, "connect_all", first)
        monkeypatch.setattr(ranks.communicators[1].transport, "connect_all", second)

        def body(communicator):
            try:
                communicator.connect_all(5.0)
            finally:
                communicator.close(0.0)
                left.set()

        for error in ranks.run(body):
            assert type(error) is InitializationTimeoutError
            assert "1 of 3 clients did not connect" in str(error)


# -- failures of a rank's own, and afterwards ----------------------------------------------------------------


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_a_rank_that_cannot_go_on_tells_the_others(monkeypatch, interruption):
    with cluster(3) as ranks:
        fold = Reduction.fold

        def broken(self, contribution, accumulator, first):
            if threading.current_thread() is culprit[0]:
                raise interruption("no more")
            fold(self, contribution, accumulator, first)

        monkeypatch.setattr(Reduction, "fold", broken)
        culprit = [None]

        def body(communicator):
            if communicator.rank == 1:
                culprit[0] = threading.current_thread()
            return communicator.world.all_reduce(LARGE)

        errors = ranks.run(body)
        assert type(errors[1]) is interruption
        for error in (errors[0], errors[2]):
            assert type(error) is CollectiveError
            assert "rank 1 gave up all_reduce(sum, float32, shape (100000,)), collective #1" in str(error)
            assert f"{interruption.__name__}: no more" in str(error)


def test_a_failed_group_stays_failed_and_others_go_on():
    with cluster(2, wait_policy=QUICK) as ranks:
        other = ranks.all(lambda communicator: communicator.new_group([1, 0]))
        ranks.run(sequence(lambda g: g.all_reduce(X), lambda g: g.all_reduce(X[0])))
        for call in CALLS.values():
            for error in ranks.run(lambda communicator, call=call: call(communicator.world)):
                assert type(error) is CollectiveMismatchError
                assert str(error).startswith(
                    "group world has failed and cannot be used any more: collective #1"
                )
                assert str(error).endswith("reset() makes it work again, if all its members call it.")
        assert [r.item() for r in ranks.all(lambda c: other[c.rank].all_reduce(2))] == [4, 4]
        assert [r.item() for r in ranks.all(lambda c: c.new_group([0, 1]).all_reduce(2))] == [4, 4]


def test_a_failure_reaches_calls_of_other_threads_and_queued_ones():
    with cluster(2, wait_policy=QUICK) as ranks:

        def body(communicator):
            group = communicator.world
            if communicator.rank == 1:
                return group.recv(X, 0)  # rank 0 never sends
            pending = [group.barrier(async_op=True) for _ in range(3)]
            with pytest.raises(CollectiveTimeoutError):
                group.gather(X, 0, timeout=0.2)
            return [type(future.exception(LIMIT)) for future in pending]

        queued, receiving = ranks.run(body)
        assert queued == [CollectiveTimeoutError] * 3
        assert type(receiving) is CollectiveTimeoutError


def test_closing_ends_what_is_under_way():
    with cluster(2) as ranks:
        closes = threading.Timer(0.05, ranks.communicators[0].close, (0.0,))
        closes.start()
        (error,) = ranks.run(lambda communicator: communicator.world.barrier(), (0,))
        closes.join()
        assert "shut down" in str(error)
        (error,) = ranks.run(lambda communicator: communicator.world.barrier(), (0,))
        assert str(error) == "the collectives of this client have been shut down"
        (error,) = ranks.run(lambda communicator: communicator.new_group([0]).barrier(), (0,))
        assert "shut down" in str(error)


class Turnstile:
    """A lock that lets another thread through as soon as the one that fails the group has had it once."""

    def __init__(self, lock, begin):
        self._lock = lock
        self._begin = begin
        self._failing = threading.current_thread()
        self._first = True

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *raised):
        self._lock.__exit__(*raised)
        if threading.current_thread() is self._failing and self._first:
            self._first = False
            self._begin()


def test_who_began_a_call_in_the_moment_of_a_failure_has_told_the_others_when_it_raises(monkeypatch):
    """Otherwise they hear of its end, by whatever way, before they hear what it ended for."""
    with cluster(3) as ranks:
        first, second, _ = ranks.communicators
        term = first.world._generation
        raised: list[BaseException] = []

        def call():
            try:
                first.world.barrier()
            except PeerLostError as error:
                raised.append(error)

        caller = threading.Thread(target=call)

        def begin():
            caller.start()
            assert ranks.wait_until(lambda: bool(term.streams[None].calls)), "the call has not begun"

        monkeypatch.setattr(term, "lock", Turnstile(term.lock, begin))
        first.lose(2, "it has ended")
        caller.join(LIMIT)
        assert [error.rank for error in raised] == [2]
        ranks.settle(1)
        failure = second.world.failure
        assert failure is not None
        assert failure.ranks == (2,)


# -- failures that a call finds out by itself ----------------------------------------------------------------


@pytest.mark.parametrize("shm", [(), ("native",), ("dedicated",), ("encrypted",)])
def test_a_call_that_times_out_as_the_group_fails_gets_the_failure(monkeypatch, shm):
    """Another thread has failed the group, and has not come to abort this call yet."""
    with cluster(2, wait_policy=replace(QUICK, answers_within=0.01), shm=shm) as ranks:
        ranks.all(lambda c: c.world.barrier())
        group = ranks.communicators[0].world
        monkeypatch.setattr(Work, "abort", lambda self, failure: None)
        original = PositionQuery.ask

        def ask(self, *, all_ranks=False):
            if all_ranks:  # the time is up
                group.fail(Failure(Cause.BROKEN, "rank 1 gave up", (1,)), notify=False)
            original(self, all_ranks=all_ranks)

        monkeypatch.setattr(PositionQuery, "ask", ask)
        (error,) = ranks.run(lambda c: c.world.all_reduce(X, timeout=0.1), (0,))
        assert type(error) is CollectiveError
        assert "rank 1 gave up" in str(error)


def test_a_call_notices_the_failure_of_its_group_without_being_aborted(monkeypatch):
    """A second Ctrl-C can end the thread that fails the group before it has aborted the others' calls."""
    with cluster(2, wait_policy=replace(QUICK, look_every=0.01)) as ranks:
        monkeypatch.setattr(Work, "abort", lambda self, failure: None)
        group = ranks.communicators[0].world

        def fail(communicator):
            assert ranks.wait_until(lambda: bool(group.streams[0].calls)), "the call has not begun"
            group.fail(Failure(Cause.BROKEN, "rank 1 gave up", (1,)), notify=False)

        thread = threading.Thread(target=fail, args=(None,))
        thread.start()
        (error,) = ranks.run(lambda c: c.world.all_reduce(X), (0,))
        thread.join()
        assert type(error) is CollectiveError
        assert "rank 1 gave up" in str(error)


class Closed(Backend):
    """A program's own backend, which takes no calls and notes how it is closed."""

    name = "closed"
    capabilities = MessageBackend.capabilities

    def __init__(self, notes, problem=None):
        self.notes, self.problem = notes, problem

    def supports(self, request, stream, sequence):
        return False

    def start(self, request, buffers, call):
        raise AssertionError

    def close(self, *, orderly):
        self.notes.append(orderly)
        if self.problem is not None:
            raise self.problem


def test_a_backend_that_a_group_gets_as_it_fails_is_closed(monkeypatch):
    notes = []

    def make(place):
        group = ranks.communicators[place.position].world
        group.fail(Failure(Cause.BROKEN, "the test fails it"))
        return Closed(notes)

    monkeypatch.setitem(registered.factories, "closed", make)
    with cluster(2) as ranks:
        errors = ranks.run(lambda c: c.world.barrier())
        assert ["the test fails it" in str(error) for error in errors] == [True] * 2
        assert notes in ([False], [False] * 2)  # whoever hears of it in time does not choose


def test_a_backend_that_cannot_be_closed_does_not_keep_other_groups_from_failing(monkeypatch, caplog):
    notes = []
    monkeypatch.setitem(
        registered.factories, "closed", lambda place: Closed(notes, RuntimeError("the test raises it"))
    )
    with cluster(2) as ranks:
        groups = ranks.all(lambda c: [c.world, *(c.new_group([0, 1]) for _ in range(3))])
        ranks.all(lambda c: [group.barrier() for group in groups[c.rank]])
        ranks.network.kill(1)
        assert ranks.wait_until(lambda: all(group.failure for group in groups[0]))
        assert notes
    assert "the backend 'closed' could not be closed" in caplog.text
    assert "the test raises it" in caplog.text
