"""`all_reduce_many`: the same bits as so many single calls, in fewer collectives."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.collectives.ranks import LIMIT, Cluster, cluster

from dmesh.collectives.bucketing import all_reduce_many, fill_buckets
from dmesh.errors import CollectiveMismatchError, CollectiveTypeError, CollectiveValueError

DTYPES = [np.dtype(text) for text in ("?", "i1", "i8", "f2", "f4", "f8", "F")] + [
    np.dtype(ml_dtypes.bfloat16)
]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
LISTS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=7)


@pytest.fixture(
    scope="module",
    params=[{}, {"shm": ("native",)}, {"shm": ("dedicated",)}],
    ids=["messages", "native", "dedicated"],
)
def three(request):
    with cluster(3, **request.param) as made:
        yield made


def values(rank: int, kinds: list[tuple[np.dtype, tuple[int, ...]]]) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    return [(random.standard_normal(shape) * 9).astype(dtype) for dtype, shape in kinds]


def same(first: np.ndarray, second: np.ndarray) -> bool:
    return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=LISTS,
    limit=st.integers(1, 200),
    async_op=st.booleans(),
    with_out=st.booleans(),
    op=st.sampled_from(["sum", "mean", "max"]),
)
def test_it_gives_what_single_calls_give(three: Cluster, kinds, limit, async_op, with_out, op) -> None:
    if op == "max":
        kinds = [(dtype, shape) for dtype, shape in kinds if dtype != np.dtype("F")]

    def body(communicator) -> None:
        group = communicator.world
        arrays = values(communicator.rank, kinds)
        expected = [group.all_reduce(array, op) for array in arrays]
        out = [np.empty_like(array) for array in expected] if with_out else None
        found = all_reduce_many(arrays, op, group=group, out=out, bucket_bytes=limit, async_op=async_op)
        if async_op:
            found = found.result(LIMIT)
        assert len(found) == len(arrays)
        assert all(map(same, found, expected))
        assert all(map(same, arrays, values(communicator.rank, kinds))), "inputs stay as they are"
        if out is not None:
            assert all(one is other for one, other in zip(found, out, strict=True))

    for result in three.run(body):
        assert result is None, result


def test_arrays_of_one_dtype_travel_together() -> None:
    with cluster(2) as made:

        def body(communicator) -> int:
            arrays = [
                np.ones(3, "f4"),
                np.ones(2),
                np.ones((2, 2), "f4"),
                np.ones(100, "f4"),
                np.ones((), "f4"),
            ]
            all_reduce_many(arrays, group=communicator.world, bucket_bytes=64)
            return communicator.world._generation.streams[None].issued

        assert made.run(body) == [4, 4]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 8, []),
        ([1, 1, 1], 8, [(0, 1), (2,)]),
        ([3, 1, 1], 8, [(0,), (1, 2)]),
        ([1, 9, 1], 8, [(0,), (1,), (2,)]),
        ([0, 0, 2, 0], 8, [(0, 1, 2, 3)]),
    ],
)
def test_buckets_are_filled_in_order(sizes, limit, expected) -> None:
    found = fill_buckets([np.empty(size, "f4") for size in sizes], limit)
    assert [tuple(bucket) for bucket in found] == expected


def test_dtypes_have_buckets_of_their_own_in_the_order_of_their_first_arrays() -> None:
    arrays = [np.empty(1, dtype) for dtype in ("f4", "f8", "f4", "f8", "i4")]
    found = fill_buckets(arrays, 100)
    assert found == [[0, 2], [1, 3], [4]]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"arrays": [np.ones(1)], "out": []}, CollectiveValueError, "1 arrays, but 0 in out="),
        ({"arrays": [np.ones(1)], "bucket_bytes": 0}, CollectiveValueError, "positive"),
        ({"arrays": [np.ones(1), np.array(["a"])]}, CollectiveTypeError, "no meaning"),
        ({"arrays": [np.ones(1)], "out": [np.ones(1, "f4")]}, CollectiveTypeError, "float32"),
        ({"arrays": [np.ones(1)], "op": "product"}, CollectiveValueError, "unknown reduction"),
        ({"arrays": [object()]}, CollectiveTypeError, "references"),
    ],
)
def test_nothing_is_sent_before_everything_was_checked(arguments, error, words) -> None:
    with cluster(1) as made:
        group = made.communicators[0].world
        with pytest.raises(error, match=words):
            all_reduce_many(**arguments, group=group)
        assert group.failure is None
        assert all_reduce_many([1, 2.0], group=group) == [1, 2.0]


def test_other_lists_on_other_ranks_are_a_mismatch_for_all() -> None:
    with cluster(2) as made:

        def body(communicator) -> str:
            arrays = [np.ones(2 + communicator.rank), np.ones(3)]
            with pytest.raises(CollectiveMismatchError):
                all_reduce_many(arrays, group=communicator.world)
            with pytest.raises(CollectiveMismatchError):
                all_reduce_many(arrays, group=communicator.world, async_op=True).result(LIMIT)
            return "told"

        assert made.run(body) == ["told", "told"]
