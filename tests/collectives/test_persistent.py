"""All-reduces that are planned once and called again and again."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster

from dmesh import native
from dmesh.collectives import plan_all_reduce
from dmesh.errors import (
    CollectiveMismatchError,
    CollectiveTypeError,
    CollectiveValueError,
    NotInitializedError,
    PeerLostError,
)

WAYS = ["messages", *(["native", "dedicated"] if native.core() is not None else [])]


@pytest.fixture(scope="module", params=WAYS)
def ranks(request):
    with cluster(3, shm=() if request.param == "messages" else (request.param,)) as made:
        yield made


@pytest.mark.parametrize("shape", [(), (5,), (100, 300)])
def test_calls_give_what_all_reduce_gives_in_one_array(ranks, shape):
    def body(communicator):
        plan = plan_all_reduce(np.empty(shape, "f4"), group=communicator.world)
        for number in range(4):
            x = np.random.default_rng([communicator.rank, number]).normal(size=shape).astype("f4")
            wanted = communicator.world.all_reduce(x)
            assert plan(np.asarray(x)) is plan.result
            assert plan.result.tobytes() == wanted.tobytes()
            plan.result[...] = 0
            plan.input[...] = x
            assert plan().tobytes() == wanted.tobytes()
            plan.result[...] = 0
            assert plan(async_op=True).result(LIMIT).tobytes() == wanted.tobytes()
            assert plan.input.tobytes() == x.tobytes()

    ranks.all(body)


def test_results_of_another_type(ranks):
    def body(communicator):
        plan = plan_all_reduce(np.zeros(4, "?"), group=communicator.world)
        plan.input[:] = [True, False, communicator.rank == 0, True]
        return plan().tolist()

    assert ranks.all(body) == [[3, 0, 1, 3]] * 3


@pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")
def test_input_and_result_are_in_shared_memory_where_there_is_some():
    with cluster(2, shm=("native",)) as ranks:
        communicator = ranks.communicators[0]
        plan = plan_all_reduce(np.empty(100_000), group=communicator.world)
        registered = communicator.shared_memory.registered
        assert registered.contains(plan.input)
        assert registered.contains(plan.result)


def test_what_does_not_fit_the_plan_is_refused_before_anything_is_sent(ranks):
    world = ranks.communicators[0].world
    plan = plan_all_reduce(np.zeros((2, 3), "f4"), "max", group=world)
    with pytest.raises(
        CollectiveTypeError, match=r"max of float32 \(2, 3\) in group world.* called with float64"
    ):
        plan(np.zeros((2, 3)))
    with pytest.raises(CollectiveTypeError, match="called with list"):
        plan([[1, 2, 3]] * 2)
    with pytest.raises(CollectiveValueError, match=r"of shape \(3, 2\)"):
        plan(np.zeros((3, 2), "f4"))
    assert ranks.all(lambda c: int(c.world.all_reduce(np.array(1)))) == [3, 3, 3]


def test_what_cannot_be_planned(ranks):
    world = ranks.communicators[0].world
    with pytest.raises(CollectiveTypeError):
        plan_all_reduce(np.zeros(3, "f4"), "bitwise_and", group=world)
    with pytest.raises(CollectiveValueError):
        plan_all_reduce(np.zeros(3), "average", group=world)
    with pytest.raises(NotInitializedError):
        plan_all_reduce(np.zeros(3))


native_only = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")


@native_only
@pytest.mark.parametrize("way", ["native", "dedicated"])
def test_a_prepared_call_enters_no_python(way):
    """Nor does one with another array like the planned one.

    A rank that waits for the other for long does so in Python: each call is looked at on the rank that comes
    last, when the other one waits.
    """
    waits = [threading.Event() for _ in range(8)]
    with cluster(2, shm=(way,)) as ranks:

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            plan = plan_all_reduce(np.empty(4), group=group)
            x, found, entered = np.full(4, 2.0), [], []
            plan.input[:] = rank
            plan()
            assert group.endpoint is not None
            resume = group._resume
            for number, event in enumerate(waits):
                arguments = (x,) if number & 2 else ()
                if number & 1 == rank:
                    group._resume = lambda endpoint, event=event: event.set() or resume(endpoint)
                    found.append(plan(*arguments)[0])
                    continue
                assert event.wait(LIMIT)
                sys.setprofile(lambda frame, event, argument: entered.append(event))
                try:
                    result = plan(*arguments)
                finally:
                    sys.setprofile(None)
                found.append(result[0])
            return found, entered.count("call")

        assert ranks.all(body) == [([1, 1, 4, 4] * 2, 0)] * 2


@native_only
def test_a_prepared_plan_and_a_plain_call_are_one_collective():
    with cluster(3, shm=("native",)) as ranks:

        def body(communicator):
            group, x = communicator.world, np.full(5, communicator.rank, "i4")
            plan = plan_all_reduce(x, "max", group=group)
            plan(x)
            for number in range(30):
                got = plan(x) if (number + communicator.rank) % 3 else group.all_reduce(x, "max")
                assert got.tolist() == [2] * 5
            assert [record.call for record in communicator.events.records(1)] == [
                "all_reduce(max, int32, shape (5,))"
            ]

        ranks.all(body)


@native_only
def test_what_a_prepared_plan_refuses():
    with cluster(2, shm=("native",)) as ranks:

        def body(communicator):
            plan = plan_all_reduce(np.empty((3, 4)), group=communicator.world)
            plan(np.ones((3, 4)))
            for bad in (np.ones((3, 4), "f4"), [1.0], 1.0):
                with pytest.raises(CollectiveTypeError):
                    plan(bad)
            for bad in (np.ones(12), np.ones((4, 3))):
                with pytest.raises(CollectiveValueError):
                    plan(bad)
            whole = np.ones((2, 3, 4))
            assert (plan(whole[:, :, ::-1][1]) == 2).all(), "an array with gaps is copied"
            assert plan(plan.result).tolist() == [[4] * 4] * 3, "the result may be the contribution"
            with pytest.raises(TypeError):
                plan(whole[0], 1)

        ranks.all(body)


@native_only
def test_a_plan_outlives_a_reset():
    """It is prepared anew for the endpoint that the group has then."""
    with cluster(2, shm=("native",)) as ranks:

        def body(communicator):
            group = communicator.world
            plan = plan_all_reduce(np.empty(3), group=group)
            for number in range(3):
                for _ in range(3):
                    assert plan(np.full(3, float(number + group.rank))).tolist() == [2 * number + 1] * 3
                with pytest.raises(CollectiveMismatchError):
                    group.all_reduce(np.ones(1 + group.rank))
                with pytest.raises(CollectiveMismatchError):
                    plan()
                group.reset()

        ranks.all(body)


@native_only
def test_a_prepared_call_that_waits_fails_with_its_group():
    with cluster(2, shm=("native",)) as ranks:
        plans = ranks.all(lambda communicator: plan_all_reduce(np.empty(3), group=communicator.world))
        ranks.all(lambda communicator: plans[communicator.rank]())
        kill = threading.Timer(0.05, ranks.network.kill, (1, "killed by the test"))
        kill.start()
        (error,) = ranks.run(lambda communicator: plans[0](), (0,))
        kill.join(LIMIT)
        assert type(error) is PeerLostError, error
