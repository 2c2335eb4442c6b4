"""Plans whose result all ranks of a host have in common."""

from __future__ import annotations

import gc
import logging
import threading
import time

import numpy as np
import pytest
from tests.collectives.ranks import cluster

from dmesh import native
from dmesh.arrays.transfer.execute import gather_rows
from dmesh.collectives import plan_all_gather, plan_broadcast, plan_shared_all_reduce
from dmesh.collectives.shared_results import common_memory
from dmesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTypeError,
    CollectiveValueError,
    NotInitializedError,
    PeerLostError,
)
from dmesh.testing.keys import FakeKeys

NATIVE = ["native"] if native.core() is not None else []
WAYS = ["messages", *NATIVE, *(["dedicated"] if NATIVE else [])]
needs_core = pytest.mark.skipif(not NATIVE, reason=f"no native core: {native.reason()}")


@pytest.fixture(scope="module", params=WAYS)
def ranks(request):
    with cluster(3, shm=() if request.param == "messages" else (request.param,)) as made:
        made.common = request.param == "native"
        yield made


def contribution(rank: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.random.default_rng([rank, number]).normal(size=shape), "f4")


@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 0, 0], [1, 1000, 7]])
def test_an_all_gather_of_arrays_of_different_lengths(ranks, counts):
    def body(communicator):
        group, rank = communicator.world, communicator.rank
        like, known = np.empty((counts[rank], 5), "f4"), rank % 2 == 0
        plans = [plan_all_gather(like, counts=given, group=group) for given in (counts, "exchange")]
        with pytest.raises(CollectiveValueError, match="counts of all_gather"):
            plan_all_gather(like, counts=[4, 4, 4], group=group)
        for number in range(4):
            parts = [contribution(other, number, (n, 5)) for other, n in enumerate(counts)]
            for plan in plans:
                assert plan.is_common == (ranks.common and sum(counts) > 0)
                if known:
                    plan.input[...] = parts[rank]
                assert plan(None if known else parts[rank]).tobytes() == np.concatenate(parts).tobytes()

    ranks.all(body)


@pytest.mark.parametrize("shape", [(), (5,), (100, 300)])
def test_an_all_gather_gives_what_all_gather_gives_and_the_last_result_holds_until_the_next_call(
    ranks, shape
):
    def body(communicator):
        group, rank = communicator.world, communicator.rank
        plan = plan_all_gather(np.empty(shape, "f4"), group=group)
        assert plan.is_common == ranks.common
        for number in range(6):
            everything = np.stack([contribution(other, number, shape) for other in range(3)])
            if number % 2:
                got = plan(everything[rank, ...])
            else:
                plan.input[...] = everything[rank]
                got = plan()
            assert got.tobytes() == everything.tobytes()
            with pytest.raises(ValueError, match="read-only"):
                got[...] = 0
            time.sleep(0.001 * rank)  # others write to the next one while this rank still reads
            plan.input[...] = -1
            assert got.tobytes() == everything.tobytes()

    ranks.all(body)


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("shape", [(), (5,), (100, 300)])
def test_a_broadcast_gives_the_array_of_its_root(ranks, shape, root):
    def body(communicator):
        group, rank = communicator.world, communicator.rank
        plan = plan_broadcast(np.empty(shape, "f4"), root, group=group)
        for number in range(6):
            wanted = contribution(root, number, shape)
            got = plan(wanted if rank == root else None)
            assert got.tobytes() == wanted.tobytes()
            assert not got.flags.writeable

    ranks.all(body)


@pytest.mark.parametrize("shape", [(), (5,), (100, 300)])
@pytest.mark.parametrize("op", ["sum", "max", "mean"])
def test_an_all_reduce_gives_the_bits_of_all_reduce(ranks, shape, op):
    def body(communicator):
        group, rank = communicator.world, communicator.rank
        plan = plan_shared_all_reduce(np.empty(shape, "f4"), op, group=group)
        for number in range(5):
            x = np.asarray(contribution(rank, number, shape))
            wanted = group.all_reduce(x, op)
            if number % 2:
                got = plan(x)
            else:
                plan.input[...] = x
                got = plan()
            assert got.tobytes() == wanted.tobytes()
            assert not got.flags.writeable

    ranks.all(body)


def test_results_of_another_type_and_empty_ones(ranks):
    def body(communicator):
        group = communicator.world
        plan = plan_shared_all_reduce(np.zeros(4, "?"), group=group)
        plan.input[:] = [True, False, communicator.rank == 0, True]
        assert plan().tolist() == [3, 0, 1, 3]
        assert plan_all_gather(np.empty((0, 2)), group=group)().shape == (3, 0, 2)

    ranks.all(body)


def test_members_that_plan_different_things_are_told_so_and_the_group_goes_on(ranks):
    def body(communicator):
        plan_all_gather(np.empty(3 + (communicator.rank == 1)), group=communicator.world)

    for error in ranks.run(body):
        assert isinstance(error, CollectiveMismatchError), error
        assert "rank 1 planned plan_all_gather(float64, shape (4,))" in str(error)
    ranks.all(lambda c: c.world.barrier())


def test_what_does_not_fit_the_plan_is_refused_before_anything_is_sent(ranks):
    def body(communicator):
        group = communicator.world
        for plan in (
            plan_all_gather(np.empty(3), group=group),
            plan_shared_all_reduce(np.empty(3), group=group),
        ):
            for wrong in (np.empty(3, "f4"), [1.0, 2.0, 3.0]):
                with pytest.raises(CollectiveTypeError):
                    plan(wrong)
            with pytest.raises(CollectiveValueError, match=r"shape \(4,\)"):
                plan(np.empty(4))
        with pytest.raises(CollectiveValueError, match="root"):
            plan_broadcast(np.empty(3), 3, group=group)
        with pytest.raises(CollectiveValueError):
            plan_shared_all_reduce(np.empty(3), "median", group=group)
        group.barrier()

    ranks.all(body)


def test_there_must_be_a_group():
    with pytest.raises(NotInitializedError):
        plan_all_gather(np.empty(3))


@needs_core
def test_memory_is_lent_again_once_all_have_forgotten_it():
    with cluster(3, shm=("native",)) as ranks:

        def body(communicator):
            group, held, lenders = communicator.world, None, set()
            for number in range(60):
                plan = plan_all_gather(np.empty(2**18, np.uint8), group=group)
                assert plan.is_common
                plan.input[:] = number
                got = plan()
                del plan
                if communicator.rank == 2:
                    held, got = got, held  # one more is in use
                if got is not None:
                    lenders.add(got.__array_interface__["data"][0])
                del got
                group.barrier()
                if held is not None:
                    assert (held == number).all()
            return len(lenders)

        assert max(ranks.all(body)) < 8


@needs_core
def test_who_is_lost_is_not_waited_for_and_the_others_hold_what_they_have():
    with cluster(3, shm=("native",)) as ranks:

        def make(communicator):
            plan = plan_all_gather(np.empty(1000), group=communicator.world)
            plan.input[:] = communicator.rank
            return plan, plan()

        made = ranks.all(make)
        ranks.network.kill(1, "killed by the test")
        for plan, got in (made[0], made[2]):
            with pytest.raises(PeerLostError):
                plan()
            assert got.sum() == 3000
        ranks.replace(1)
        ranks.renew()
        for plan, _ in (made[0], made[2]):
            with pytest.raises(CollectiveError, match="make another one"):
                plan()
        lender = ranks.communicators[0].pool
        del made, plan, got, _
        gc.collect()
        again = ranks.all(make)
        assert all(plan.is_common for plan, _ in again)
        assert len(lender._loans) == 1, "what was lent to the lost one is still lent"


@needs_core
def test_what_came_to_nothing_is_not_lent_for_ever():
    with cluster(2, shm=("native",)) as ranks:

        def mismatched(communicator):
            plan_all_gather(np.empty(3 + communicator.rank), group=communicator.world)

        for error in ranks.run(mismatched):
            assert isinstance(error, CollectiveMismatchError)
        assert ranks.communicators[0].pool.has_spare(1)
        assert ranks.communicators[0].pool._loans == []
    with cluster(2, shm=("native@a", "native@b")) as ranks:
        plans = ranks.all(lambda c: plan_all_gather(np.full(3, c.rank), group=c.world))
        assert not any(plan.is_common for plan in plans)
        assert ranks.communicators[0].pool.has_spare(1)
        assert ranks.communicators[0].pool._loans == []


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_does_not_outlive_a_reset(way):
    """A call that failed may have given one rank the next buffer, and another one not."""
    with cluster(2, shm=() if way == "messages" else (way,)) as ranks:

        def body(communicator):
            group = communicator.world
            plan = plan_all_gather(np.empty(3), group=group)
            plan(np.ones(3))
            with pytest.raises(CollectiveMismatchError):
                group.all_reduce(np.ones(1 + group.rank))
            group.reset()
            with pytest.raises(CollectiveError, match="was made before group world was reset: make another"):
                plan(np.ones(3))
            assert plan_all_gather(np.empty(3), group=group)(np.full(3, 2.0)).tolist() == [[2] * 3] * 2

        ranks.all(body)


@needs_core
def test_memory_that_one_member_cannot_map_is_not_used_again_before_the_others_have_left_it():
    used, left = threading.Event(), threading.Event()

    def refuse(*_: object) -> None:
        raise OSError("on another host")

    def body(communicator):
        group, pool, calls = communicator.world, communicator.pool, []

        def call(request):
            result = group.call(request, None, False)
            calls.append(request)
            if communicator.rank == 1 and len(calls) == 2:
                assert used.wait(30)
            return result

        if communicator.rank == 2:
            pool.borrow = refuse
        assert common_memory(group, "memory", 1 << 20, call=call) is None
        gc.collect()
        if communicator.rank == 1:
            left.set()
        if communicator.rank == 0:
            array = pool.empty((1 << 20) + 4096, "u1")
            array[:] = 0
            used.set()
            assert left.wait(30)
            assert not array.any()
            assert pool.has_spare(1)
            again = pool.empty((1 << 20) + 4096, "u1")
            assert again.ctypes.data < array.ctypes.data, "what was lent can be used again"

    with cluster(3, shm=("native",)) as ranks:
        ranks.all(body)


@needs_core
def test_members_on_several_hosts_find_out_once_that_they_share_no_memory(caplog):
    with cluster(2, shm=("native@a", "native@b")) as ranks, caplog.at_level(logging.INFO, "dmesh"):

        def body(communicator):
            group = communicator.world
            (collectives,) = group.streams
            for calls in (3, 1, 1):
                before, shard = collectives.issued, np.full(1 << 17, communicator.rank, "f8")
                rows = gather_rows(group, [shard], [1 << 17, 1 << 17])
                assert rows[:: 1 << 17].tolist() == [0, 1]
                assert collectives.issued - before <= calls

        ranks.all(body)
        said = [line for line in caplog.messages if "result of its own" in line]
        assert len(said) == 2, "one line of each rank"


def keys(ranks):
    """Gives all ranks a store."""
    made = FakeKeys()
    for communicator in ranks.communicators:
        communicator.store = lambda: made


def go_on_by_reset(ranks):
    ranks.all(lambda communicator: communicator.world.reset())


def go_on_by_shrinking(ranks):
    keys(ranks)
    ranks.all(lambda communicator: communicator.world.shrink())


def go_on_by_renewal(ranks):
    ranks.replace(2)
    ranks.renew()


@needs_core
@pytest.mark.parametrize("go_on", [go_on_by_reset, go_on_by_shrinking, go_on_by_renewal])
def test_what_was_lent_in_a_call_that_failed_is_not_lent_for_ever(go_on):
    with cluster(3, shm=("native",)) as ranks:
        pool = ranks.communicators[0].pool

        def body(communicator):
            if communicator.rank == 2:
                communicator.world.barrier()
            else:
                plan_all_gather(np.empty(3), group=communicator.world)

        for error in ranks.run(body):
            assert isinstance(error, CollectiveMismatchError)
            del error
        gc.collect()
        assert pool.has_spare(1)
        assert len(pool._loans) == 1, "others may still map it"
        go_on(ranks)
        assert pool.has_spare(1)
        assert pool._loans == []
