"""All-reduces that are planned once and called again and again."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.arrays import FORMS, in_form, random_array, same
from tests.collectives.ranks import LIMIT, cluster
from tests.collectives.test_values import clusters, values  # noqa: F401 - a fixture

import dmesh.collectives
from dmesh import native
from dmesh.collectives import NULL_PEER, plan, plan_all_reduce, plan_all_reduce_many
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
        CollectiveTypeError, match=r"\(max, float32, shape \(2, 3\)\) in group world.* called with float64"
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


ROWS = ("reduce_scatter", "scatter", "all_to_all")
PLANNED = {
    "all_reduce": {"op": "sum"},
    "reduce": {"root": 0, "op": "max"},
    "reduce_scatter": {},
    "scan": {},
    "exscan": {},
    "broadcast": {"root": 0},
    "all_gather": {},
    "gather": {"root": 0},
    "scatter": {"root": 0},
    "all_to_all": {},
    "permute": {"pairs": [(0, 0)]},
    "barrier": {},
}


@values
@given(
    kind=st.sampled_from(list(PLANNED)), size=st.integers(1, 5), dtype=st.sampled_from(["i4", "f8"]),
    length=st.integers(0, 40), form=st.sampled_from(FORMS), ragged=st.booleans(), use_out=st.booleans(),
)  # fmt: skip
def test_a_plan_of_any_function_gives_what_the_function_gives(
    clusters, kind, size, dtype, length, form, ragged, use_out  # noqa: F811
):  # fmt: skip
    """Of what its array holds when it is called, whatever the array's form, and of others like it."""
    function = getattr(dmesh.collectives, kind)
    lengths = [length] * size
    if ragged and kind in ("all_gather", "gather", *ROWS):
        lengths = [max(length - rank, 0) for rank in range(size)]
        named = {**PLANNED[kind], "counts": "exchange" if kind == "all_gather" and use_out else lengths}
    else:
        ragged, named = False, dict(PLANNED[kind])

    def body(communicator):
        group, rank, mine = communicator.world, communicator.rank, dict(named)
        exchanged = mine.get("counts") == "exchange" or (
            ragged and kind in ("all_to_all", "scatter") and "out" not in mine
        )
        shape = (lengths[rank],)
        if kind in ROWS and (kind != "scatter" or rank == 0):
            shape = (sum(lengths),) if ragged else (size, length)
        arrays = [random_array(np.dtype(dtype), shape, 9 * number + rank) for number in range(4)]
        inputs = () if kind == "barrier" else (in_form(arrays[0], form),)
        if use_out and kind != "barrier" and mine.get("counts") != "exchange":
            wanted = function(*inputs, group=group, **mine)
            if wanted is not None:
                mine["out"] = np.empty_like(wanted)
        made = plan(function, *inputs, group=group, **mine)
        for number, x in enumerate(arrays[:-1]):
            if inputs:
                inputs[0][...] = x
            wanted = function(*inputs, group=group, **{**mine, "out": None} if inputs else mine)
            got = made(async_op=True).result(LIMIT) if number == 1 else made()
            assert got is made.result or (made.result is None and exchanged)
            if wanted is None:
                assert got is None
            else:
                same(got, wanted)
        if inputs:
            another = arrays[-1].astype(inputs[0].dtype)
            wanted = function(another, group=group, **{**mine, "out": None})
            got = made(another)
            assert got is None if wanted is None else got.tobytes() == wanted.tobytes()

    clusters[size].all(body)


def test_plans_of_transfers(ranks):
    def body(communicator):
        group, rank = communicator.world, communicator.rank
        x, y = np.empty(3), np.empty(3)
        sends = [plan(dmesh.collectives.send, x, (rank + 1) % 3, group=group)]
        receives = [plan(dmesh.collectives.recv, y, (rank + 2) % 3, group=group, out=y)]
        sends.append(plan(dmesh.collectives.send, x, (rank + 1) % 3, tag=4, group=group))
        receives.append(plan(dmesh.collectives.recv, None, (rank + 2) % 3, tag=4, group=group))
        for number in range(12):
            x[:] = rank * 100 + number
            tagged = number % 2
            begun = sends[tagged](async_op=True)
            got = receives[tagged]() if number % 3 else receives[tagged](async_op=True).result(LIMIT)
            assert got is y or tagged
            assert got.tolist() == [(rank + 2) % 3 * 100 + number] * 3
            assert begun.result(LIMIT) is None
        nobody = plan(dmesh.collectives.send, x, NULL_PEER, group=group)
        assert nobody() is None
        assert nobody(async_op=True).result(LIMIT) is None

    ranks.all(body)


@native_only
@pytest.mark.parametrize(
    ("kind", "named"),
    [("reduce_scatter", {}), ("broadcast", {"root": 0}), ("all_gather", {}), ("reduce", {"root": 1}),
     ("gather", {"root": 0}), ("all_to_all", {}), ("barrier", {})],
)  # fmt: skip
def test_other_prepared_calls_enter_no_python_either(kind, named):
    """The rank that comes last makes its call without Python; the other one may wait there."""
    with cluster(2, shm=("native",)) as ranks:
        waits = threading.Event()

        def body(communicator):
            group, entered = communicator.world, []
            x = () if kind == "barrier" else (np.ones((2, 3)),)
            made = plan(getattr(dmesh.collectives, kind), *x, group=group, **named)
            made()
            resume = group._resume
            if communicator.rank == 0:
                group._resume = lambda endpoint: waits.set() or resume(endpoint)
                made()
                return 0
            if kind not in ("broadcast", "gather", "reduce"):
                assert waits.wait(LIMIT)  # the root of a broadcast, or who sends to one, does not wait
            sys.setprofile(lambda frame, event, argument: entered.append(event))
            try:
                made()
            finally:
                sys.setprofile(None)
            return entered.count("call") if waits.is_set() else 0

        assert ranks.all(body) == [0, 0]


def test_what_plan_refuses(ranks):
    group = ranks.communicators[0].world
    for function in (np.sum, dmesh.collectives.all_gather_object, dmesh.collectives.iprobe, "all_reduce"):
        with pytest.raises(CollectiveTypeError, match="plan needs a function of"):
            plan(function, np.ones(3), group=group)
    with pytest.raises(CollectiveTypeError, match="timeout belong"):
        plan(dmesh.collectives.all_reduce, np.ones(3), timeout=3, group=group)
    with pytest.raises(CollectiveTypeError, match=r"plan of all_reduce: .*root"):
        plan(dmesh.collectives.all_reduce, np.ones(3), root=3, group=group)
    with pytest.raises(CollectiveValueError, match="an array that each call reads, got list"):
        plan(dmesh.collectives.all_reduce, [1, 2], group=group)
    with pytest.raises(CollectiveValueError, match="root=3"):
        plan(dmesh.collectives.broadcast, np.ones(3), 3, group=group)
    barrier = plan(dmesh.collectives.barrier, group=group)
    with pytest.raises(CollectiveTypeError, match=r"barrier.* takes no array argument"):
        barrier(np.ones(3))
    receives = plan(dmesh.collectives.recv, np.ones(3), 1, group=group)
    with pytest.raises(CollectiveTypeError, match="takes no array argument"):
        receives(np.ones(3))


def test_many_arrays_planned(ranks):
    shapes, kinds = [(3,), (2, 50), (), (0,), (300,)], ["f4", "f8", "f4", "i4", "f4"]

    def body(communicator):
        group, rank = communicator.world, communicator.rank
        like = [np.zeros(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
        made = plan_all_reduce_many(like, "mean", group=group, bucket_bytes=512)
        for number in range(4):
            arrays = [
                random_array(x.dtype, x.shape, 100 * number + 10 * at + rank) for at, x in enumerate(like)
            ]
            wanted = dmesh.collectives.all_reduce_many(arrays, "mean", group=group, bucket_bytes=512)
            if number == 2:
                for place, x in zip(made.inputs, arrays, strict=True):
                    place[...] = x
                got = made()
            else:
                got = made(arrays, async_op=True).result(LIMIT) if number == 1 else made(arrays)
            assert got is made.results
            for x, y in zip(got, wanted, strict=True):
                assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        assert plan_all_reduce_many([], group=group)() == []
        with pytest.raises(CollectiveValueError, match=r"5 arrays in .* called with 1 arrays"):
            made(like[:1])
        before = [place.copy() for place in made.inputs]
        with pytest.raises(CollectiveTypeError, match="called with float64"):
            made([np.ones_like(x) for x in like[:-1]] + [np.zeros(300)])
        assert all((x == y).all() for x, y in zip(before, made.inputs, strict=True)), "nothing was copied"
        with pytest.raises(CollectiveValueError, match="bucket_bytes must be positive"):
            plan_all_reduce_many(like, group=group, bucket_bytes=0)

    ranks.all(body)
