"""Groups that are split by colors."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.ranks import cluster
from tests.collectives.test_values import values

from dmesh import collectives
from dmesh.errors import CollectiveMismatchError, CollectiveValueError
from dmesh.testing import FakeCluster

WAYS = {"messages": {}, "native": {"shm": ("native",)}, "dedicated": {"shm": ("dedicated",)}}


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def clusters(request):
    with contextlib.ExitStack() as stack:
        yield {size: stack.enter_context(cluster(size, **request.param)) for size in range(1, 6)}


@values
@given(data=st.data(), size=st.integers(1, 5))
def test_ranks_of_a_color_in_the_order_of_their_keys(clusters, data, size):
    colors = data.draw(st.lists(st.none() | st.integers(-1, 2), min_size=size, max_size=size))
    keys = data.draw(st.lists(st.integers(-2, 2), min_size=size, max_size=size))

    def body(communicator):
        rank = communicator.rank
        group = communicator.world.split(colors[rank], keys[rank])
        return group if group is None else (group.ranks, group.rank, group.all_gather(rank).tolist())

    for rank, got in enumerate(clusters[size].all(body)):
        alike = [at for at in range(size) if colors[at] == colors[rank]]
        ordered = sorted(alike, key=lambda at: (keys[at], at))
        expected = (tuple(ordered), ordered.index(rank), ordered)
        assert got == (None if colors[rank] is None else expected)


def test_groups_are_split_again_and_are_others_each_time():
    with cluster(4) as ranks:

        def body(communicator):
            half = communicator.world.split(communicator.rank // 2)
            again = communicator.world.split(communicator.rank // 2)
            alone = half.split(half.rank, 7)
            assert half.id != again.id
            assert half.label == f"group world/color={communicator.rank // 2}"
            assert alone.ranks == (communicator.rank,)
            assert alone.name == f"world/color={communicator.rank // 2}/color={half.rank}"
            first = half.all_reduce(1, async_op=True)  # independent of each other
            return again.all_reduce(10).item() + first.result().item()

        assert ranks.all(body) == [22] * 4


def test_what_is_no_color_is_refused_before_anything_is_sent():
    with cluster(2) as ranks:

        def body(communicator):
            world = communicator.world
            for color, key in (("red", 0), (0, 1.5), (True, 0), (1 << 63, 0), (0, None)):
                with pytest.raises(CollectiveValueError, match=r"(color|key).*of split"):
                    world.split(color, key)
            return world.split(np.int32(1), np.int64(-communicator.rank)).ranks

        assert ranks.all(body) == [(1, 0)] * 2


@pytest.mark.parametrize("way", WAYS)
def test_another_call_on_another_rank(way):
    with cluster(3, **WAYS[way]) as ranks:

        def body(communicator):
            communicator.world.barrier()
            if communicator.rank == 1:
                return communicator.world.all_gather(np.zeros(4, np.int64))
            return communicator.world.split(0)

        for error in ranks.run(body):
            assert isinstance(error, CollectiveMismatchError)
            assert "split()" in str(error)
            assert "all_gather(int64, shape (4,))" in str(error)


def test_the_function_splits_the_world_or_a_group():
    def program():
        rank = collectives.world().rank
        half = collectives.split(rank % 2)
        return half.ranks, collectives.split(None if rank == 3 else 5, -rank, group=half)

    with FakeCluster(4) as ranks:
        results = ranks.run(program)
    assert [result[0] for result in results] == [(0, 2), (1, 3)] * 2
    assert [group and group.ranks for _, group in results] == [(2, 0), (1,), (2, 0), None]
