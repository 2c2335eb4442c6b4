"""All-reduces that are planned once and called again and again."""

from __future__ import annotations

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster

from dmesh import native
from dmesh.collectives import plan_all_reduce
from dmesh.errors import CollectiveTypeError, CollectiveValueError, NotInitializedError

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
