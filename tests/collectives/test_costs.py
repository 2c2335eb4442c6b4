"""The cost model: its counts against the programs, its times against simulated ones, both against books."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.test_schedules import PIPELINED, arguments_of

from dmesh.collectives.schedules import bruck, chain, direct, doubling, ring, trees
from dmesh.collectives.schedules.choice import MOST_DIRECT, MOST_PEERS, choose, select
from dmesh.collectives.schedules.cost import COSTS, Model, cost
from dmesh.collectives.schedules.program import make
from dmesh.collectives.schedules.timing import finish_times, load

MODEL = Model(60_000, 25_000, 700, 300, 20_000)
WITHOUT_CONNECTIONS = MODEL._replace(connection=0)
SPARSE = [schedule for schedule in COSTS if schedule.__module__.rpartition(".")[2] != "direct"]
SPARSE.remove(trees.broadcast_scattered)
BLOCKS = ("all_to_all", "reduce_scatter", "scatter")
"""Kinds whose count is that of a block."""
KINDS = (*BLOCKS, "all_gather", "gather", "broadcast", "all_reduce", "reduce")
PLAIN = {
    "all_gather": direct.all_gather,
    "all_to_all": direct.all_to_all,
    "reduce_scatter": direct.reduce_scatter_equal,
}


def loads(schedule, size, count, ranks=None, pieces=1):
    arguments = arguments_of(schedule, count, pieces)
    return [load(make(schedule, size, rank, *arguments)) for rank in ranks or range(size)]


@pytest.mark.parametrize("schedule", COSTS)
@pytest.mark.parametrize("size", [2, 3, 8, 13, 33])
def test_the_model_counts_what_the_programs_do(schedule, size):
    for count, pieces in ((1, 1), (7, 2), (1000, 1), (1000, 4)):
        if schedule.__name__.endswith("_scattered") and count < size:
            continue
        found = loads(schedule, size, count, pieces=pieces)
        most = [max(column) for column in zip(*found, strict=True)]
        of = cost(schedule, size, count, pieces if schedule in PIPELINED else 1)
        tokens = 2 * of.hops  # count as elements, where parts are empty and in barriers
        assert most[0] <= of.messages
        assert most[1] <= of.elements + tokens
        assert most[3] <= of.peers
        programs = [
            make(schedule, size, rank, *arguments_of(schedule, count, pieces)) for rank in range(size)
        ]
        simulated = max(finish_times(programs, WITHOUT_CONNECTIONS, 4))
        assert 0.6 < of.picoseconds(WITHOUT_CONNECTIONS, 4) / simulated < 4.0


@pytest.mark.parametrize("schedule", SPARSE)
@pytest.mark.parametrize("size", [129, 4096])
def test_large_groups_need_few_connections(schedule, size):
    ranks = (0, 1, size // 2, size - 1)
    if "chain" in schedule.__name__ or "ring" in schedule.__name__:
        size, ranks = 129, (0, 1, 64, 128)
    for found in loads(schedule, size, 2, ranks):
        assert found.peers <= min(cost(schedule, size, 2).peers, 3 * math.log2(size) + 3)


@pytest.mark.parametrize("size", [5, 8, 31, 64, 96, 128])
def test_textbook_bounds(size):
    """Thakur, Rabenseifner and Gropp 2005; Chan et al. 2007. Every sample has elements that all divide."""
    count = 96 * 128 * 5 * 31
    rounds, share, is_power = math.ceil(math.log2(size)), count // size, size & size - 1 == 0
    ranks = (0, 1, size // 2, size - 1)

    def each(schedule, elements, pieces=1):
        return loads(schedule, size, elements, ranks, pieces)

    for found in each(ring.all_reduce_ring, count):
        assert (found.messages, found.peers) == (2 * (size - 1), 2)
        assert abs(found.elements - 2 * (size - 1) * share) <= 2 * size
    for found in each(ring.all_gather_ring, share):
        assert found[:2] == (size - 1, (size - 1) * share)
    for found in each(bruck.all_gather_bruck, share):
        assert found[:2] == (rounds, (size - 1) * share)
    for found in each(bruck.all_to_all_bruck, share):
        assert found.messages == rounds
        assert found.elements <= rounds * share * (size + 1) // 2
    if is_power:
        for found in each(doubling.all_reduce_doubling, count):
            assert found[:2] == (rounds, rounds * count)
            assert found.peers == rounds
        for found in each(doubling.all_reduce_halving, count):
            assert found[:2] == (2 * rounds, 2 * (size - 1) * share)
            assert found.peers == rounds
        for found in each(doubling.reduce_scatter_halving, share):
            assert found[:2] == (rounds, (size - 1) * share)
    else:  # two more steps, with whole arrays
        for found in each(doubling.all_reduce_halving, count):
            assert found.messages <= 2 * (rounds - 1) + 1
            assert found.elements <= 3 * count
    for found in each(chain.all_reduce_chain, count, 16):  # both directions: the ring's bound
        assert found.elements <= 2 * count
        assert found.peers <= 2


def test_no_schedule_is_faster_than_is_possible():
    """An all-reduce takes the logarithm of hops, and each rank sends nearly two arrays (Chan et al.)."""
    for size in (4, 13, 64):
        for schedule in (s for s in COSTS if s.__name__.startswith("all_reduce")):
            of = cost(schedule, size, 64 * 13, 4)
            assert of.hops >= (1 if of.peers == size - 1 else math.ceil(math.log2(size)))
            assert of.elements >= 64 * 13


@pytest.mark.parametrize("kind", KINDS)
def test_short_arrays_take_few_hops_and_long_ones_little_traffic(kind):
    """With more bytes a choice never sends more of each array; and no rank has O(n) peers for short ones."""
    for size in (17, 100, 128, 1000):
        share = []
        for count in (1, 100, 10_000, 1_000_000):
            blocks = size if kind in BLOCKS else 1
            schedule, pieces = choose(kind, size, count, 4 * count * blocks, MODEL, True)
            of = cost(schedule, size, count, *pieces)
            share.append(of.elements / count)
            if count == 1:
                assert of.peers <= 3 * math.log2(size) + 3
                assert of.hops <= 3 * math.log2(size) + 3
        assert share[-1] <= 1.1 * share[0]


@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(MOST_DIRECT + 1, 300),
    count=st.integers(1, 10**7),
    pinned=st.booleans(),
)
def test_a_choice_is_the_cheapest_of_those_with_few_peers(kind, size, count, pinned):
    blocks = size if kind in BLOCKS else 1
    schedule, pieces = choose(kind, size, count, 8 * count * blocks, MODEL, pinned)
    assert cost(schedule, size, count, *pieces).peers <= MOST_PEERS
    if kind in PLAIN and size <= MOST_PEERS:
        chosen = cost(schedule, size, count, *pieces).picoseconds(MODEL, 8)
        assert chosen <= cost(PLAIN[kind], size, count).picoseconds(MODEL, 8)


def test_small_groups_and_pinned_orders():
    """Up to 16 ranks all pairs exchange; beyond, reductions fold in the order of ranks unless any will do."""
    few = select("all_gather", MOST_DIRECT, 0, 5, 20, 0, (), True, 0, 0, 0, MODEL, True)
    assert load(few).peers == MOST_DIRECT - 1
    for count in (1, 1000, 10**6):
        for kind in ("all_reduce", "reduce", "reduce_scatter"):
            for size in (17, 128):
                schedule, _ = choose(kind, size, count, 4 * count, MODEL, True)
                assert schedule.__module__.rpartition(".")[2] in ("direct", "bruck", "chain", "trees")
    assert choose("all_reduce", 128, 10**5, 4 * 10**5, MODEL, False)[0] is doubling.all_reduce_halving
