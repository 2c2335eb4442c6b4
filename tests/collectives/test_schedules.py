"""Every schedule, for any group, message and order of events: each element ends where it should."""

import functools
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.simulator import Deadlock, simulate

from dmesh.collectives.schedules import bruck, chain, direct, doubling, ring, scans, trees
from dmesh.collectives.schedules.cost import COSTS
from dmesh.collectives.schedules.direct import barrier
from dmesh.collectives.schedules.program import Buffer, bounds, make

SIZES = st.integers(1, 9)
COUNTS = st.integers(1, 13)
PIECES = st.integers(1, 4)
PIPELINED = (
    trees.broadcast_binary,
    chain.broadcast_chain,
    chain.all_reduce_chain,
    chain.reduce_chain,
    chain.reduce_scatter_chain,
)
"""Schedules that are told in how many pieces arrays travel."""
SEEDS = st.integers(0, 2**32)


def array(rank, count):
    return [f"{rank}.{index}" for index in range(count)]


def concatenated(lists):
    return list(itertools.chain.from_iterable(lists))


def chooser(seed):
    """Any order of events: at random, or one rank as far as it gets before the next."""
    generator = random.Random(seed)
    style = generator.choice(["random", "first", "last"])
    if style == "random":
        return generator.randrange
    return (lambda n: 0) if style == "first" else (lambda n: n - 1)


def folded(size, index):
    """A fold in the order of ranks."""
    return ("folded", functools.reduce(pair, (f"{rank}.{index}" for rank in range(size))))


def pair(a, b):
    return (a, b)


def pairs(values):
    return list(zip(values[::2], values[1::2], strict=True))


def tree_folded(size, index):
    """A fold by a balanced tree over the nodes, as `doubling` documents it."""
    nodes = 1 << size.bit_length() - 1
    doubled = size - nodes
    values = [f"{rank}.{index}" for rank in range(size)]
    values = pairs(values[: 2 * doubled]) + values[2 * doubled :]
    while len(values) > 1:
        values = pairs(values)
    return ("folded", values[0])


def ring_folded(size, index, owner):
    """A fold that begins with the rank after the owner."""
    order = ((owner + 1 + step) % size for step in range(size))
    return ("folded", functools.reduce(pair, (f"{rank}.{index}" for rank in order)))


@pytest.mark.parametrize("schedule", [direct.all_gather, ring.all_gather_ring, bruck.all_gather_bruck])
@given(SIZES, COUNTS, SEEDS)
def test_all_gather(schedule, size, count, seed):
    programs = [make(schedule, size, rank, count) for rank in range(size)]
    inputs = [array(rank, count) for rank in range(size)]
    for output in simulate(programs, inputs, chooser(seed)):
        assert output == concatenated(inputs)


@pytest.mark.parametrize("schedule", [direct.all_to_all, bruck.all_to_all_bruck])
@given(SIZES, COUNTS, SEEDS)
def test_all_to_all(schedule, size, count, seed):
    programs = [make(schedule, size, rank, count) for rank in range(size)]
    inputs = [array(rank, size * count) for rank in range(size)]
    outputs = simulate(programs, inputs, chooser(seed))
    for rank, output in enumerate(outputs):
        assert output == concatenated(
            inputs[other][rank * count : (rank + 1) * count] for other in range(size)
        )


@pytest.mark.parametrize(
    "schedule",
    [trees.broadcast_tree, trees.broadcast_scattered, trees.broadcast_binary, chain.broadcast_chain],
)
@given(size=SIZES, count=COUNTS, root=st.integers(0, 8), pieces=PIECES, seed=SEEDS, in_place=st.booleans())
def test_broadcast(schedule, size, count, root, pieces, seed, in_place):
    root %= size
    if schedule is trees.broadcast_scattered and size == 1:
        return
    cut = (pieces,) if schedule in PIPELINED else ()
    programs = [make(schedule, size, rank, root, count, *cut) for rank in range(size)]
    inputs = [array(rank, count) if rank == root or in_place else [] for rank in range(size)]
    outputs = simulate(programs, inputs, chooser(seed), in_place)
    assert outputs == [array(root, count)] * size


@pytest.mark.parametrize(
    ("gather", "scatter"), [(direct.gather, direct.scatter), (trees.gather_tree, trees.scatter_tree)]
)
@given(SIZES, COUNTS, st.integers(0, 8), SEEDS)
def test_gather_and_scatter(gather, scatter, size, count, root, seed):
    root %= size
    inputs = [array(rank, count) for rank in range(size)]
    programs = [make(gather, size, rank, root, count) for rank in range(size)]
    outputs = simulate(programs, inputs, chooser(seed))
    for rank, output in enumerate(outputs):
        assert output == (concatenated(inputs) if rank == root else [])
    whole = concatenated(inputs)
    programs = [make(scatter, size, rank, root, count) for rank in range(size)]
    outputs = simulate(programs, [whole if rank == root else [] for rank in range(size)], chooser(seed))
    assert outputs == inputs


@given(SIZES, COUNTS, SEEDS, st.data())
def test_permute(size, count, seed, data):
    sources = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    targets = data.draw(
        st.lists(st.integers(0, size - 1), unique=True, min_size=len(sources), max_size=len(sources))
    )
    pairs = tuple(zip(sources, targets, strict=True))
    programs = [make(direct.permute, size, rank, pairs, count) for rank in range(size)]
    outputs = simulate(programs, [array(rank, count) for rank in range(size)], chooser(seed))
    origin = {target: source for source, target in pairs}
    for rank, output in enumerate(outputs):
        assert output == (array(origin[rank], count) if rank in origin else [])


@given(st.integers(0, 8), SEEDS, st.booleans())
def test_transfer(count, seed, buffered):
    programs = [
        make(direct.transfer, 2, 0, 1, count, True, buffered),
        make(direct.transfer, 2, 1, 0, count, False, buffered),
    ]
    outputs = simulate(programs, [array(0, count), []], chooser(seed))
    assert outputs == [[], array(0, count)]


ALL_REDUCES = {
    direct.all_reduce_flat: folded,
    direct.all_reduce_scattered: folded,
    chain.all_reduce_chain: folded,
    bruck.all_reduce_gathered: folded,
    bruck.all_reduce_bruck: folded,
    doubling.all_reduce_doubling: tree_folded,
    doubling.all_reduce_halving: tree_folded,
    ring.all_reduce_ring: None,
}
"""Schedules, and the order in which each folds; the ring's depends on the element."""


@pytest.mark.parametrize("schedule", ALL_REDUCES)
@given(size=SIZES, count=COUNTS, pieces=PIECES, seed=SEEDS, in_place=st.booleans())
def test_all_reduce(schedule, size, count, pieces, seed, in_place):
    """Contributions are folded in the documented order, on all ranks, for arrays of any length."""
    if schedule is direct.all_reduce_scattered and count < size:
        return
    cut = (pieces,) if schedule in PIPELINED else ()
    programs = [make(schedule, size, rank, count, *cut) for rank in range(size)]
    outputs = simulate(programs, [array(rank, count) for rank in range(size)], chooser(seed), in_place)
    if schedule is ring.all_reduce_ring:
        owners = [owner for owner in range(size) for _ in range(*bounds(count, size, owner))]
        expected = [ring_folded(size, index, owner) for index, owner in enumerate(owners)]
    else:
        expected = [ALL_REDUCES[schedule](size, index) for index in range(count)]
    assert outputs == [expected] * size


REDUCE_SCATTERS = {
    direct.reduce_scatter_equal: folded,
    chain.reduce_scatter_chain: folded,
    bruck.reduce_scatter_bruck: folded,
    doubling.reduce_scatter_halving: tree_folded,
    ring.reduce_scatter_ring: ring_folded,
}


@pytest.mark.parametrize("schedule", REDUCE_SCATTERS)
@given(size=SIZES, count=COUNTS, pieces=PIECES, seed=SEEDS)
def test_reduce_scatter(schedule, size, count, pieces, seed):
    cut = (pieces,) if schedule in PIPELINED else ()
    programs = [make(schedule, size, rank, count, *cut) for rank in range(size)]
    outputs = simulate(programs, [array(rank, size * count) for rank in range(size)], chooser(seed))
    for rank, output in enumerate(outputs):
        owner = (rank,) if schedule is ring.reduce_scatter_ring else ()
        fold = REDUCE_SCATTERS[schedule]
        assert output == [fold(size, index, *owner) for index in range(rank * count, (rank + 1) * count)]


@given(SIZES, st.lists(st.integers(0, 5), min_size=81, max_size=81), SEEDS)
def test_blocks_of_any_lengths(size, lengths, seed):
    table = [lengths[row * 9 : row * 9 + size] for row in range(size)]
    rows = [*table, *zip(*table, strict=True)]
    spans = [list(itertools.pairwise(itertools.accumulate(row, initial=0))) for row in rows]
    programs = [
        make(direct.exchange, size, rank, spans[rank], spans[size + rank], True) for rank in range(size)
    ]
    inputs = [array(rank, sum(row)) for rank, row in enumerate(table)]
    for rank, output in enumerate(simulate(programs, inputs, chooser(seed))):
        assert output == concatenated(inputs[peer][slice(*spans[peer][rank])] for peer in range(size))
    programs = [make(direct.reduce_scatter, size, rank, spans[0], 0 in table[0]) for rank in range(size)]
    outputs = simulate(programs, [array(rank, sum(table[0])) for rank in range(size)], chooser(seed))
    for rank, output in enumerate(outputs):
        assert output == [folded(size, index) for index in range(*spans[0][rank])]


REDUCES = {
    direct.reduce_flat: folded,
    direct.reduce_scattered: folded,
    chain.reduce_chain: folded,
    trees.reduce_gathered: folded,
    doubling.reduce_tree: tree_folded,
}


@pytest.mark.parametrize("schedule", REDUCES)
@given(size=SIZES, count=COUNTS, root=st.integers(0, 8), pieces=PIECES, seed=SEEDS)
def test_reduce(schedule, size, count, root, pieces, seed):
    root %= size
    if schedule is direct.reduce_scattered and count < size:
        return
    cut = (pieces,) if schedule in PIPELINED else ()
    programs = [make(schedule, size, rank, root, count, *cut) for rank in range(size)]
    outputs = simulate(programs, [array(rank, count) for rank in range(size)], chooser(seed))
    assert outputs[root] == [REDUCES[schedule](size, index) for index in range(count)]


@given(SIZES, SEEDS)
def test_barrier_ends(size, seed):
    assert (
        simulate([make(barrier, size, rank) for rank in range(size)], [[]] * size, chooser(seed))
        == [[]] * size
    )


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize(
    "make",
    [
        lambda size, rank: make(barrier, size, rank),
        lambda size, rank: make(direct.all_gather, size, rank, 1),
        lambda size, rank: make(direct.all_to_all, size, rank, 1),
        lambda size, rank: make(trees.broadcast_tree, size, rank, 0, 20),
        lambda size, rank: make(trees.broadcast_scattered, size, rank, 0, 20),
        lambda size, rank: make(direct.gather, size, rank, 0, 1),
        lambda size, rank: make(direct.scatter, size, rank, 0, 1),
        lambda size, rank: make(direct.permute, size, rank, (), 1),
        lambda size, rank: make(direct.all_reduce_flat, size, rank, 1),
        lambda size, rank: make(direct.all_reduce_scattered, size, rank, 20),
        lambda size, rank: make(direct.reduce_scatter_equal, size, rank, 1),
        lambda size, rank: make(direct.reduce_scatter, size, rank, [(0, 1)] + [(1, 1)] * size, True),
        lambda size, rank: make(direct.exchange, size, rank, [(0, 0)] * size, [(0, 0)] * size, True),
        lambda size, rank: make(direct.reduce_flat, size, rank, 0, 1),
        lambda size, rank: make(direct.reduce_scattered, size, rank, 0, 20),
        *(
            lambda size, rank, schedule=schedule, arguments=arguments: make(schedule, size, rank, *arguments)
            for schedule, *arguments in (
                (ring.all_gather_ring, 1),
                (bruck.all_gather_bruck, 1),
                (bruck.all_to_all_bruck, 1),
                (trees.broadcast_binary, 0, 20, 2),
                (chain.broadcast_chain, 0, 20, 2),
                (trees.gather_tree, 1, 1),
                (trees.scatter_tree, 1, 1),
                (chain.all_reduce_chain, 2, 2),
                (bruck.all_reduce_gathered, 2),
                (bruck.all_reduce_bruck, 2),
                (doubling.all_reduce_doubling, 2),
                (doubling.all_reduce_halving, 2),
                (ring.all_reduce_ring, 2),
                (chain.reduce_scatter_chain, 1, 1),
                (bruck.reduce_scatter_bruck, 1),
                (doubling.reduce_scatter_halving, 1),
                (ring.reduce_scatter_ring, 1),
                (chain.reduce_chain, 1, 2, 2),
                (trees.reduce_gathered, 1, 2),
                (doubling.reduce_tree, 1, 2),
            )
        ),
    ],
)
def test_nobody_finishes_before_all_have_begun(make, size):
    """Or a rank could report success of what another has not called, or has called differently."""
    for absent in range(size):
        programs = [make(size, rank) for rank in range(size)]
        inputs = [array(rank, programs[rank].size(Buffer.INPUT)) for rank in range(size)]
        programs[absent] = type(programs[absent])((), programs[absent].sizes)
        with pytest.raises(Deadlock) as stuck:
            simulate(programs, inputs, random.Random(absent).randrange)
        # Not only because a message was not taken: a short one is off the sender's hands at once.
        waiting = {position for position, rest in stuck.value.args[0] if rest}
        assert waiting == set(range(size)) - {absent}


@given(st.integers(0, 50), st.integers(1, 9))
def test_parts_cover_everything_once(count, parts):
    pieces = [bounds(count, parts, index) for index in range(parts)]
    assert pieces[0][0] == 0
    assert pieces[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert max(stop - start for start, stop in pieces) - min(stop - start for start, stop in pieces) <= 1


@pytest.mark.parametrize("pieces", [0, 1, 3])
@given(size=SIZES, count=COUNTS, seed=SEEDS, inclusive=st.booleans(), in_place=st.booleans())
def test_scan(pieces, size, count, seed, inclusive, in_place):
    """Every rank folds what the ranks before it contribute, in their order; 0 pieces are a flat scan."""
    schedule, more = (scans.scan_chain, (pieces,)) if pieces else (scans.scan_flat, ())
    programs = [make(schedule, size, rank, count, inclusive, *more) for rank in range(size)]
    outputs = simulate(programs, [array(rank, count) for rank in range(size)], chooser(seed), in_place)
    for rank, output in enumerate(outputs):
        if rank + inclusive:
            assert output == [folded(rank + inclusive, index) for index in range(count)]


@given(SIZES, COUNTS, SEEDS, st.data())
def test_reduce_chain(size, count, seed, data):
    """Every rank gets its part of the whole fold."""
    spans = st.tuples(st.integers(0, count), st.integers(0, count)).map(sorted).map(tuple)
    parts = data.draw(st.lists(st.none() | spans, min_size=size, max_size=size))
    programs = [make(scans.reduce_chain, size, rank, count, parts) for rank in range(size)]
    outputs = simulate(programs, [array(rank, count) for rank in range(size)], chooser(seed))
    for part, output in zip(parts, outputs, strict=True):
        assert output == [folded(size, index)[1] for index in range(*(part or (0, 0)))]


def arguments_of(schedule, count, pieces=1, root=1):
    """What a schedule is told besides size and rank."""
    name = schedule.__name__
    rooted = name.startswith(("broadcast", "gather", "scatter", "reduce")) and "reduce_scatter_" not in name
    with_root = [root] if rooted and schedule is not direct.reduce_scatter_equal else []
    return [*with_root, count, *([pieces] if schedule in PIPELINED else [])]


@pytest.mark.parametrize("size", [11, 16, 21])
@pytest.mark.parametrize("schedule", list(COSTS))
def test_larger_groups(schedule, size):
    """Every element reaches its place in groups of many rounds, too; small ones are tested thoroughly."""
    programs = [make(schedule, size, rank, *arguments_of(schedule, size + 1, 3)) for rank in range(size)]
    inputs = [array(rank, program.size(Buffer.INPUT)) for rank, program in enumerate(programs)]
    for rank, output in enumerate(simulate(programs, inputs, random.Random(size).randrange)):
        if schedule in ALL_REDUCES and schedule is not ring.all_reduce_ring:
            assert output == [ALL_REDUCES[schedule](size, index) for index in range(size + 1)]
        elif schedule in REDUCES and rank == 1:
            assert output == [REDUCES[schedule](size, index) for index in range(size + 1)]
        else:
            assert schedule in (direct.gather, trees.gather_tree, *REDUCES) or None not in output
