"""Collectives of blocks whose lengths differ per rank, against NumPy's concatenate and split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.arrays import ALL_DTYPES, FORMS, in_form, meaningful, random_array, reduced, same
from tests.collectives.ranks import Cluster, cluster
from tests.collectives.test_values import clusters, values  # noqa: F401 - a fixture

from dmesh import native
from dmesh.collectives import Op
from dmesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTypeError,
    CollectiveValueError,
    PeerLostError,
)

SHAPES = st.lists(st.integers(0, 3), max_size=2)
LENGTHS = st.lists(st.integers(0, 9), min_size=25, max_size=25)


def cut(array: np.ndarray, lengths: list[int], axis: int) -> list[np.ndarray]:
    return np.split(array, np.cumsum(lengths)[:-1], axis)


@values
@given(
    size=st.integers(1, 5), dtype=st.sampled_from(ALL_DTYPES), others=SHAPES, lengths=LENGTHS,
    form=st.sampled_from(FORMS), seed=st.integers(0, 99), root=st.integers(0, 4), exchanges=st.booleans(),
    use_out=st.booleans(), asynchronous=st.booleans(), data=st.data(),
)  # fmt: skip
def test_movements(
    clusters: dict[int, Cluster],  # noqa: F811
    size, dtype, others, lengths, form, seed, root, exchanges, use_out, asynchronous, data,
):  # fmt: skip
    root, axis = root % size, data.draw(st.integers(-len(others) - 1, len(others)))
    counts = lengths[:size]
    table = [lengths[row * size : (row + 1) * size] for row in range(size)]

    def arrays(*lengths):
        at = axis % (len(others) + 1)
        return [
            random_array(dtype, (*others[:at], length, *others[at:]), seed * 10 + number)
            for number, length in enumerate(lengths)
        ]

    joined, cuts = arrays(*counts), arrays(*map(sum, table))
    whole = arrays(sum(counts))[0]
    blocks = [cut(x, row, axis) for x, row in zip(cuts, table, strict=True)]
    scattered = cut(whole, counts, axis)

    def body(communicator):
        group, rank = communicator.world, communicator.rank
        known = "exchange" if exchanges else counts

        def call(function, *args, like, **options):
            out = np.zeros_like(np.ascontiguousarray(like)) if use_out and like is not None else None
            result = function(*args, axis=axis, out=out, async_op=asynchronous, **options)
            result = result.result(60) if asynchronous else result
            assert out is None or result is out
            return result

        x, received = in_form(joined[rank], form), [row[rank] for row in table]
        expected = {
            "all_gather": np.concatenate(joined, axis),
            "gather": np.concatenate(joined, axis) if rank == root else None,
            "scatter": scattered[rank],
            "all_to_all": np.concatenate([row[rank] for row in blocks], axis),
        }
        found = {
            "all_gather": call(group.all_gather, x, counts=known, like=expected["all_gather"]),
            "gather": call(group.gather, x, root, counts=known, like=expected["gather"]),
            "scatter": call(
                group.scatter, in_form(whole, form) if rank == root else np.zeros_like(x), root,
                counts=counts if rank == root else known, like=expected["scatter"],
            ),
            "all_to_all": call(
                group.all_to_all, in_form(cuts[rank], form), counts=table[rank],
                recv_counts=None if exchanges else received, like=expected["all_to_all"],
            ),
        }  # fmt: skip
        return found, expected

    for found, expected in clusters[size].all(body):
        for kind, result in expected.items():
            if result is None:
                assert found[kind] is None
            else:
                same(found[kind], result)


@values
@given(size=st.integers(1, 5), dtype=st.sampled_from(["?", "i2", "f4", "f8", "bfloat16", "F"]),
       op=st.sampled_from(["sum", "max", "mean", "any"]), others=SHAPES, lengths=LENGTHS,
       seed=st.integers(0, 9), data=st.data())  # fmt: skip
def test_reduce_scatter(clusters, size, dtype, op, others, lengths, seed, data):  # noqa: F811
    dtype = next(known for known in ALL_DTYPES if known == dtype)
    if not meaningful(op, dtype):
        return
    axis, counts = data.draw(st.integers(0, len(others))), lengths[:size]
    shape = (*others[:axis], sum(counts), *others[axis:])
    arrays = [random_array(dtype, shape, seed * 10 + rank) for rank in range(size)]
    expected = cut(reduced(arrays, op), counts, axis)
    results = clusters[size].all(
        lambda c: c.world.reduce_scatter(arrays[c.rank], op, axis=axis, counts=counts)
    )
    for found, wanted in zip(results, expected, strict=True):
        same(found, wanted)


def test_reduce_scatter_by_other_operations(clusters):  # noqa: F811
    weighted = Op(lambda a, b: 2 * a + b, name="weighted", elementwise=True)

    def body(communicator):
        group, x, counts = communicator.world, np.arange(6) * (communicator.rank + 1), [1, 0, 5]
        with pytest.raises(CollectiveValueError, match="may be called with pieces"):
            group.reduce_scatter(x, Op(np.add, name="whole"), counts=counts)
        return [group.reduce_scatter(x, op, counts=counts) for op in (np.maximum, "max_location", weighted)]

    for rank, (largest, located, folded) in enumerate(clusters[3].all(body)):
        part = np.split(np.arange(6), [1, 1])[rank]
        same(largest, 3 * part)
        assert located["value"].tolist() == (3 * part).tolist()
        same(folded, 11 * part)


@values
@given(size=st.integers(1, 5), count=st.integers(0, 9), others=SHAPES, data=st.data())
def test_equal_blocks_along_an_axis(clusters, size, count, others, data):  # noqa: F811
    axis = data.draw(st.integers(0, len(others)))
    shape = (*others[:axis], count * size, *others[axis:])
    arrays = [random_array(np.dtype("f4"), shape, rank) for rank in range(size)]

    def body(communicator):
        group, rank = communicator.world, communicator.rank
        like = np.split(arrays[0], size, axis)[0]
        return (
            group.gather(arrays[rank], axis=axis),
            group.scatter(arrays[0] if rank == 0 else np.zeros_like(like), axis=axis),
            group.all_to_all(arrays[rank], axis=axis),
        )

    for rank, (gathered, block, exchanged) in enumerate(clusters[size].all(body)):
        if rank == 0:
            same(gathered, np.concatenate(arrays, axis))
        same(block, np.split(arrays[0], size, axis)[rank])
        same(exchanged, np.concatenate([np.split(x, size, axis)[rank] for x in arrays], axis))


def test_large_blocks(clusters):  # noqa: F811
    counts = [0, 300_001, 5]

    def body(communicator):
        group, rank = communicator.world, communicator.rank
        x = np.arange(counts[rank]) + rank
        gathered = group.all_gather(x, counts="exchange")
        back = group.all_to_all(np.full(600, rank), counts=np.array([100, 200, 300]))
        return gathered, back, group.reduce_scatter(gathered, counts=counts)

    for rank, (gathered, back, block) in enumerate(clusters[3].all(body)):
        same(gathered, np.concatenate([np.arange(n) + other for other, n in enumerate(counts)]))
        same(back, np.repeat([0, 1, 2], 100 * (rank + 1)))
        same(block, 3 * (np.arange(counts[rank]) + rank))


@pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")
@pytest.mark.parametrize("single_copy_from", [None, 1])
def test_arrays_in_shared_memory_and_arrays_that_are_read_in_place(single_copy_from):
    counts = [40_000, 0, 9_000]
    with cluster(3, shm=("native",), single_copy_from=single_copy_from) as ranks:
        ranks.all(lambda communicator: communicator.world.barrier())

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            place = communicator.pool.empty((49_000,), "i8") if rank != 1 else np.empty(49_000, "i8")
            place[:] = np.arange(49_000) + rank
            out = communicator.pool.empty((49_000,), "i8")
            mine = place[49_000 - counts[rank] :]  # up to the end of the memory
            return (
                group.all_gather(mine, counts=counts, out=out).copy(),
                group.scatter(place, counts=counts),
                group.all_to_all(place, counts=np.roll(counts, rank)),
                group.reduce_scatter(place, counts=counts),
                group.permute(place, [(0, 1), (1, 0)]),
            )

        arrays = [np.arange(49_000) + rank for rank in range(3)]
        parts = [x[49_000 - n :] for x, n in zip(arrays, counts, strict=True)]
        cuts = [cut(x, np.roll(counts, rank), 0) for rank, x in enumerate(arrays)]
        moved = [arrays[1], arrays[0], 0 * arrays[0]]
        for rank, (joined, block, exchanged, reduced_block, permuted) in enumerate(ranks.all(body)):
            same(joined, np.concatenate(parts))
            same(block, cut(arrays[0], counts, 0)[rank])
            same(exchanged, np.concatenate([row[rank] for row in cuts]))
            same(reduced_block, cut(sum(arrays), counts, 0)[rank])
            same(permuted, moved[rank])


WAYS = pytest.mark.parametrize(
    "shm", [(), ("native",), ("dedicated",)], ids=["messages", "native", "dedicated"]
)

MISMATCHES = {
    "counts of all_gather": (
        lambda g, x: g.all_gather(x, counts=[2, 2, 2 + (g.rank == 1)]),
        ["all_gather(counts=[2, 2, 3], axis=0, int64, shape (*,))", "all_gather(counts=[2, 2, 2], axis=0"],
    ),
    "known on some ranks": (
        lambda g, x: g.all_gather(x, counts="exchange" if g.rank else [2, 2, 2]),
        ["all_gather(counts=exchange, axis=0, int64, shape (*,))", "counts=[2, 2, 2]"],
    ),
    "without counts": (
        lambda g, x: g.all_gather(x, counts="exchange") if g.rank else g.all_gather(x),
        ["all_gather(counts=exchange, axis=0, int64, shape (*,))", "all_gather(int64, shape (2,))"],
    ),
    "other axes": (
        lambda g, x: g.gather(np.zeros((2, 3 + (g.rank == 1))), counts="exchange"),
        ["gather(root=0, counts=exchange, axis=0, float64, shape (*, 3))", "shape (*, 4)"],
    ),
    "counts of scatter": (
        lambda g, x: g.scatter(np.zeros(6), counts=[1, 2, 3] if g.rank else [3, 2, 1]),
        ["called scatter with counts=[1, 2, 3], the root (position 0) with counts=[3, 2, 1]"],
    ),
    "counts of all_to_all": (
        lambda g, x: g.all_to_all(np.zeros(3), counts=[1, 1, 1], recv_counts=[1, 1, 1 + (g.rank == 1)]),
        ["position 2 called all_to_all with counts that send 1 to position 1, which expects 2"],
    ),
    "counts of reduce_scatter": (
        lambda g, x: g.reduce_scatter(np.zeros(3), counts=[1, 2, 0] if g.rank else [1, 1, 1]),
        ["reduce_scatter(sum, counts=[1, 2, 0], axis=0, float64", "counts=[1, 1, 1]"],
    ),
}


@WAYS
@pytest.mark.parametrize(("call", "sides"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_an_error_on_all_ranks(call, sides, shm):
    with cluster(3, shm=shm) as ranks:
        ranks.all(lambda communicator: communicator.world.barrier())
        for error in ranks.run(lambda c: call(c.world, np.arange(2))):
            assert type(error) is CollectiveMismatchError, repr(error)
            for side in sides:
                assert side in str(error)


CALLS = {
    "all_gather": lambda g: g.all_gather(np.zeros(5 + g.rank), counts="exchange"),
    "gather": lambda g: g.gather(np.zeros(5 + g.rank), counts=[5, 6, 7]),
    "scatter": lambda g: g.scatter(np.zeros(9), counts=[4, 5, 0]),
    "all_to_all": lambda g: g.all_to_all(np.zeros(9), counts=[4, 5, 0]),
    "reduce_scatter": lambda g: g.reduce_scatter(np.zeros(9), counts=[4, 5, 0]),
}


@WAYS
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_lost_rank_fails_the_call_of_all_others(call, shm):
    with cluster(3, shm=shm) as ranks:
        ranks.all(lambda communicator: call(communicator.world))

        def body(communicator):
            if communicator.rank == 2:
                ranks.network.kill(2, "killed by the test")
                return None
            return call(communicator.world)

        for error in ranks.run(body)[:2]:
            assert type(error) is PeerLostError, repr(error)
            assert error.rank == 2


@WAYS
def test_an_unfit_out_is_found_after_the_exchange(shm):
    with cluster(2, shm=shm) as ranks:
        out = {0: np.zeros(3), 1: np.zeros(4)}
        first, second = ranks.run(
            lambda c: c.world.all_gather(np.zeros(1 + c.rank), out=out[c.rank], counts="exchange")
        )
        assert type(second) is CollectiveValueError
        assert "out= of all_gather has shape (4,), but the result's is (3,)" in str(second)
        assert isinstance(first, CollectiveError) or first is out[0]


BAD_VALUES = {
    "too few": (
        lambda g: g.all_gather(np.zeros(2), counts=[2, 2]),
        "counts of all_gather must be a list of 3 lengths",
    ),
    "negative": (lambda g: g.all_gather(np.zeros(2), counts=[2, -1, 2]), "none may be negative"),
    "fractional": (lambda g: g.gather(np.zeros(2), counts=[2, 1.0, 2]), "counts of gather must be a list"),
    "a number": (lambda g: g.gather(np.zeros(2), counts=2), "counts of gather must be a list of 3 lengths"),
    "another word": (lambda g: g.gather(np.zeros(2), counts="all"), "or 'exchange', got 'all'"),
    "another length": (
        lambda g: g.all_gather(np.zeros((2, 4)), axis=1, counts=[3, 3, 3]),
        "length 3 along axis 1, but its shape is (2, 4)",
    ),
    "another sum": (
        lambda g: g.all_to_all(np.zeros(4), counts=[1, 1, 1]),
        "the counts of all_to_all are 3 in all, but the length of axis 0 is 4",
    ),
    "no own counts": (lambda g: g.all_to_all(np.zeros(4), counts="exchange"), "cannot be 'exchange' here"),
    "no counts to reduce": (
        lambda g: g.reduce_scatter(np.zeros(4), counts="exchange"),
        "counts of reduce_scatter cannot be 'exchange' here",
    ),
    "the root's unknown": (
        lambda g: g.scatter(np.zeros(4), g.rank, counts="exchange"),
        "cannot be 'exchange'",
    ),
    "only received": (lambda g: g.all_to_all(np.zeros(3), recv_counts=[1, 1, 1]), "needs counts=, too"),
    "a scalar": (lambda g: g.all_gather(1.0, counts="exchange"), "axis=0 of all_gather is out of range"),
    "indivisible": (
        lambda g: g.scatter(np.zeros(4), g.rank, axis=0),
        "not a multiple of 3; counts= says how",
    ),
    "out of other axes": (
        lambda g: g.all_gather(np.zeros((2, 3)), counts="exchange", out=np.zeros((9, 2))),
        "has shape (9, 2), but the result's is (9, 3)",
    ),
    "out where there is no result": (
        lambda g: g.gather(np.zeros(1), (g.rank + 1) % 3, counts=[1, 1, 1], out=np.zeros(3)),
        "out= of gather is for the root (position",
    ),
    "scatter of what": (
        lambda g: g.scatter(None, (g.rank + 1) % 3, counts=[1, 1, 1]),
        "scatter must know what it will receive",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_refused_before_anything_is_sent(call, message):
    with cluster(3) as ranks:
        for error in ranks.run(lambda communicator: call(communicator.world)):
            assert type(error) is CollectiveValueError, repr(error)
            assert message in str(error)
        assert all(not communicator.events.records() for communicator in ranks.communicators)


def test_objects_are_refused():
    with cluster(1) as ranks, pytest.raises(CollectiveTypeError, match="never pickles"):
        ranks.communicators[0].world.all_gather(np.array([None]), counts="exchange")


def test_calls_with_and_without_counts_mix():
    """Numbers of asynchronous calls are given when they are made, whatever they exchange first."""
    with cluster(3) as ranks:

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            futures = [
                group.all_gather(np.full(rank, step), counts="exchange", async_op=True)
                if step % 2
                else group.all_reduce(step, async_op=True)
                for step in range(20)
            ]
            return [future.result(60) for future in futures]

        for results in ranks.all(body):
            for step, result in enumerate(results):
                same(result, np.full(3, step) if step % 2 else np.array(3 * step))
