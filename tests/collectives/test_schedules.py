"""Every schedule, for any group, message and order of events: each element ends where it should."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.simulator import Deadlock, simulate

from dmesh.collectives import schedules
from dmesh.collectives.schedules import Buffer, barrier, bounds, make

SIZES = st.integers(1, 9)
COUNTS = st.integers(1, 13)
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
    return ("folded", *(f"{rank}.{index}" for rank in range(size)))


@given(SIZES, COUNTS, SEEDS)
def test_all_gather(size, count, seed):
    programs = [make(schedules.all_gather, size, rank, count) for rank in range(size)]
    inputs = [array(rank, count) for rank in range(size)]
    for output in simulate(programs, inputs, chooser(seed)):
        assert output == concatenated(inputs)


@given(SIZES, COUNTS, SEEDS)
def test_all_to_all(size, count, seed):
    programs = [make(schedules.all_to_all, size, rank, count) for rank in range(size)]
    inputs = [array(rank, size * count) for rank in range(size)]
    outputs = simulate(programs, inputs, chooser(seed))
    for rank, output in enumerate(outputs):
        assert output == concatenated(
            inputs[other][rank * count : (rank + 1) * count] for other in range(size)
        )


@pytest.mark.parametrize("schedule", [schedules.broadcast_tree, schedules.broadcast_scattered])
@given(size=SIZES, count=COUNTS, root=st.integers(0, 8), seed=SEEDS, in_place=st.booleans())
def test_broadcast(schedule, size, count, root, seed, in_place):
    root %= size
    if schedule is schedules.broadcast_scattered and size == 1:
        return
    programs = [make(schedule, size, rank, root, count) for rank in range(size)]
    inputs = [array(rank, count) if rank == root or in_place else [] for rank in range(size)]
    outputs = simulate(programs, inputs, chooser(seed), in_place)
    assert outputs == [array(root, count)] * size


@given(SIZES, COUNTS, st.integers(0, 8), SEEDS)
def test_gather_and_scatter(size, count, root, seed):
    root %= size
    inputs = [array(rank, count) for rank in range(size)]
    programs = [make(schedules.gather, size, rank, root, count) for rank in range(size)]
    outputs = simulate(programs, inputs, chooser(seed))
    for rank, output in enumerate(outputs):
        assert output == (concatenated(inputs) if rank == root else [])
    whole = concatenated(inputs)
    programs = [make(schedules.scatter, size, rank, root, count) for rank in range(size)]
    outputs = simulate(programs, [whole if rank == root else [] for rank in range(size)], chooser(seed))
    assert outputs == inputs


@given(SIZES, COUNTS, SEEDS, st.data())
def test_permute(size, count, seed, data):
    sources = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    targets = data.draw(
        st.lists(st.integers(0, size - 1), unique=True, min_size=len(sources), max_size=len(sources))
    )
    pairs = tuple(zip(sources, targets, strict=True))
    programs = [make(schedules.permute, size, rank, pairs, count) for rank in range(size)]
    outputs = simulate(programs, [array(rank, count) for rank in range(size)], chooser(seed))
    origin = {target: source for source, target in pairs}
    for rank, output in enumerate(outputs):
        assert output == (array(origin[rank], count) if rank in origin else [])


@given(st.integers(0, 8), SEEDS, st.booleans())
def test_transfer(count, seed, buffered):
    programs = [
        make(schedules.transfer, 2, 0, 1, count, True, buffered),
        make(schedules.transfer, 2, 1, 0, count, False, buffered),
    ]
    outputs = simulate(programs, [array(0, count), []], chooser(seed))
    assert outputs == [[], array(0, count)]


@pytest.mark.parametrize("schedule", [schedules.all_reduce_flat, schedules.all_reduce_scattered])
@given(size=SIZES, count=COUNTS, seed=SEEDS, in_place=st.booleans())
def test_all_reduce(schedule, size, count, seed, in_place):
    """Contributions are folded in the order of ranks, by every schedule alike."""
    if schedule is schedules.all_reduce_scattered and count < size:
        return
    programs = [make(schedule, size, rank, count) for rank in range(size)]
    outputs = simulate(programs, [array(rank, count) for rank in range(size)], chooser(seed), in_place)
    assert outputs == [[folded(size, index) for index in range(count)]] * size


@given(SIZES, COUNTS, SEEDS)
def test_reduce_scatter(size, count, seed):
    programs = [make(schedules.reduce_scatter, size, rank, count) for rank in range(size)]
    outputs = simulate(programs, [array(rank, size * count) for rank in range(size)], chooser(seed))
    for rank, output in enumerate(outputs):
        assert output == [folded(size, index) for index in range(rank * count, (rank + 1) * count)]


@pytest.mark.parametrize("schedule", [schedules.reduce_flat, schedules.reduce_scattered])
@given(size=SIZES, count=COUNTS, root=st.integers(0, 8), seed=SEEDS)
def test_reduce(schedule, size, count, root, seed):
    root %= size
    if schedule is schedules.reduce_scattered and count < size:
        return
    programs = [make(schedule, size, rank, root, count) for rank in range(size)]
    outputs = simulate(programs, [array(rank, count) for rank in range(size)], chooser(seed))
    assert outputs[root] == [folded(size, index) for index in range(count)]


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
        lambda size, rank: make(schedules.all_gather, size, rank, 1),
        lambda size, rank: make(schedules.all_to_all, size, rank, 1),
        lambda size, rank: make(schedules.broadcast_tree, size, rank, 0, 20),
        lambda size, rank: make(schedules.broadcast_scattered, size, rank, 0, 20),
        lambda size, rank: make(schedules.gather, size, rank, 0, 1),
        lambda size, rank: make(schedules.scatter, size, rank, 0, 1),
        lambda size, rank: make(schedules.permute, size, rank, (), 1),
        lambda size, rank: make(schedules.all_reduce_flat, size, rank, 1),
        lambda size, rank: make(schedules.all_reduce_scattered, size, rank, 20),
        lambda size, rank: make(schedules.reduce_scatter, size, rank, 1),
        lambda size, rank: make(schedules.reduce_flat, size, rank, 0, 1),
        lambda size, rank: make(schedules.reduce_scattered, size, rank, 0, 20),
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
