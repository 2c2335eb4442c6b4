"""Any chain of transforms against a naive executor that goes row by row; saved positions; shares."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data import naive

from dmesh.data import AUTOTUNE, Dataset, Options
from dmesh.data.experimental import AutoShardPolicy
from dmesh.data.iterator import DatasetIterator
from dmesh.distribute.input_sharding import divide
from dmesh.errors import ArgumentTypeError, DatasetError

# -- any chain -----------------------------------------------------------------------------------------------

steps = st.one_of(
    st.tuples(st.just("shuffle"), st.integers(1, 30), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("repeat"), st.integers(0, 3)),
    st.tuples(st.just("take"), st.integers(-1, 25)),
    st.tuples(st.just("skip"), st.integers(-1, 8)),
    st.tuples(st.just("shard"), st.integers(1, 3), st.integers(0, 2)),
    st.tuples(st.just("batch"), st.integers(1, 6), st.booleans()),
    st.tuples(st.just("unbatch")),
    st.tuples(st.just("rebatch"), st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(any)),
    st.tuples(st.just("map"), st.sampled_from([None, 3])),
    st.tuples(st.just("filter")),
    st.tuples(st.just("prefetch"), st.integers(0, 3)),
    st.tuples(st.just("enumerate"), st.integers(0, 5)),
    st.tuples(st.just("concatenate"), st.integers(0, 2)),
)

sources = st.sampled_from(["arrays", "range", "generator", "dict"])
lengths = st.integers(0, 23)
chains = st.lists(steps, max_size=6)


def build(source, length, chain):
    """Returns a dataset, and a function that returns what a naive executor makes of the same chain."""
    dataset, elements = naive.source(source, length)
    for step in chain:
        if not naive.fits(step, dataset, elements):
            continue
        dataset, elements = naive.apply(step, dataset, elements)
        if len(elements(0)) > 300:
            break
    return dataset, elements


@settings(max_examples=120, deadline=None)
@given(sources, lengths, chains)
def test_a_chain_gives_what_a_naive_executor_gives(source, length, chain):
    dataset, elements = build(source, length, chain)
    for reading in range(2):
        assert naive.plain(dataset) == elements(reading), dataset
    number = dataset.cardinality()
    assert number < 0 or number == len(elements(0))


@settings(max_examples=80, deadline=None)
@given(sources, lengths, chains, st.data())
def test_a_restored_iterator_continues_with_the_same_elements(source, length, chain, data):
    dataset, elements = build(source, length, chain)
    expected = elements(0)
    taken = data.draw(st.integers(0, len(expected)))
    iterator = iter(dataset)
    before = [next(iterator) for _ in range(taken)]
    state = json.loads(json.dumps(iterator.state()))
    rest = naive.plain(iterator)
    assert naive.plain(before) + rest == expected
    again = iter(dataset)
    again.restore(state)
    more = data.draw(st.integers(0, len(rest)))
    first = naive.plain([next(again) for _ in range(more)])
    third = iter(build(source, length, chain)[0])  # as in another process
    third.restore(again.state())
    assert first + naive.plain(third) == first + naive.plain(again) == rest
    again.restore(state)
    assert naive.plain(again) == rest, "an iterator goes back"


@settings(max_examples=80, deadline=None)
@given(sources, lengths, chains, st.integers(1, 7), st.integers(1, 3), st.integers(1, 3))
def test_shares_of_workers_make_up_the_whole(source, length, chain, size, workers, replicas):
    dataset, _ = build(source, length, [step for step in chain if step[0] not in ("batch", "rebatch")])
    dataset = dataset.batch(size)
    whole = naive.plain(dataset)
    total = workers * replicas
    shares = []
    for worker in range(workers):
        fresh, _ = build(source, length, [step for step in chain if step[0] not in ("batch", "rebatch")])
        node = divide(fresh.batch(size).node, AutoShardPolicy.DATA, workers, replicas, worker)
        shares.append(list(DatasetIterator(node)))
    assert {len(share) for share in shares} == {len(whole) * replicas}
    for step, batch in enumerate(whole):
        parts = [share[step * replicas + replica] for replica in range(replicas) for share in shares]
        rows = [row for part in parts for row in naive.rows(naive.plain([part])[0])]
        assert sorted(map(repr, rows)) == sorted(map(repr, naive.rows(batch)))
        assert max(len(naive.rows(naive.plain([part])[0])) for part in parts) == math.ceil(
            len(naive.rows(batch)) / total
        )


def test_the_order_of_a_seed_does_not_depend_on_the_source_or_on_the_number_of_workers():
    rows = np.arange(40)
    indexed = Dataset.from_tensor_slices(rows).shuffle(7, seed=3).repeat(2).batch(8)
    streamed = Dataset.from_generator(lambda: iter(rows)).shuffle(7, seed=3).repeat(2).batch(8)
    assert naive.plain(indexed) == naive.plain(streamed)

    def steps_of(workers):
        dataset = Dataset.from_tensor_slices(rows).shuffle(7, seed=3).repeat(2).batch(8)
        shares = [
            list(DatasetIterator(divide(dataset.node, AutoShardPolicy.DATA, workers, 1, worker)))
            for worker in range(workers)
        ]
        return [sorted(int(row) for part in parts for row in part) for parts in zip(*shares, strict=True)]

    # Each pipeline of its own is the first reading of a dataset of its own.
    assert steps_of(1)[0] == sorted(
        naive.plain(Dataset.from_tensor_slices(rows).shuffle(7, seed=3).batch(8))[0]
    )


# -- what is read --------------------------------------------------------------------------------------------


class Watched:
    """Rows that note which of them are asked for."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.read.append(index)
        return np.full(2, index)


def test_only_rows_that_are_needed_are_read():
    rows = Watched(1000)
    dataset = Dataset.from_torch(rows).shuffle(1000, seed=1).skip(100).shard(4, 1).take(10).batch(5)
    assert rows.read == []
    got = [int(row[0]) for batch in dataset for row in batch]
    assert rows.read == got
    assert len(got) == 10


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_worker_reads_its_share_only(ahead):
    read = []
    for worker in range(2):
        rows = Watched(64)
        dataset = Dataset.from_torch(rows).shuffle(64, seed=1).map(lambda x: x * 2).batch(8).prefetch(ahead)
        divided = divide(dataset.node, AutoShardPolicy.DATA, 2, 2, worker)
        parts = list(DatasetIterator(divided))
        assert [int(row[0]) for part in parts for row in part] == [2 * index for index in rows.read]
        read.append(rows.read)
    assert sorted(read[0] + read[1]) == list(range(64))


def test_a_batch_is_one_copy():
    rows = np.arange(24.0).reshape(8, 3)
    whole = list(Dataset.from_tensor_slices(rows).batch(4))
    assert all(batch.base is None and batch.flags.owndata for batch in whole)


@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_of_any_layout(order):
    rows = np.asarray(np.arange(60).reshape(20, 3), order=order)[::2]
    dataset = Dataset.from_tensor_slices(rows).shuffle(10, seed=2)
    expected = [row.tolist() for row in dataset]
    fresh = Dataset.from_tensor_slices(rows).shuffle(10, seed=2).batch(3).unbatch()
    assert [row.tolist() for row in fresh] == expected


def test_the_last_keys_of_a_shuffled_stream_are_not_copied_for_each_of_them():
    iterator = iter(Dataset.from_generator(lambda: iter(range(5000))).shuffle(5000, seed=1))
    elements = [next(iterator)]
    tracemalloc.start()
    elements.append(next(iterator))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5000
    assert sorted(map(int, [*elements, *iterator])) == list(range(5000))


# -- functions -----------------------------------------------------------------------------------------------


PROGRAM = """
import os
from dmesh.data import Dataset

def square(x):
    return x * x, os.getpid()

def fail_at_three(x):
    if x == 3:
        raise ZeroDivisionError("three")
    return x

if __name__ == "__main__":
    squares = [(int(x), int(pid)) for x, pid in Dataset.range(8).map(square, 2, processes=True)]
    print([x for x, _ in squares], os.getpid() in [pid for _, pid in squares])
    iterator = iter(Dataset.range(10).map(fail_at_three, 2, processes=True))
    print([int(next(iterator)) for _ in range(3)])
    try:
        next(iterator)
    except ZeroDivisionError as error:
        print(error)
"""


def test_processes_work_on_elements_in_order(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[0, 1, 4, 9, 16, 25, 36, 49] False", "[0, 1, 2]", "three"], (
        done.stderr
    )
    with pytest.raises(ArgumentTypeError, match="top level of a module"):
        Dataset.range(3).map(lambda x: x, AUTOTUNE, processes=True)


def square(x):
    return x * x


# -- positions -----------------------------------------------------------------------------------------------


def test_an_order_without_a_seed_is_restored_too():
    iterator = iter(Dataset.range(50).shuffle(50).repeat(2))
    for _ in range(20):
        next(iterator)
    state = iterator.state()
    fresh = iter(Dataset.range(50).shuffle(50).repeat(2))  # with another order of its own
    fresh.restore(state)
    assert naive.plain(fresh) == naive.plain(iterator)


def test_epochs_go_on_after_a_restored_one():
    def epochs(dataset, number):
        return [naive.plain(dataset) for _ in range(number)]

    first, second, third = epochs(Dataset.range(30).shuffle(30, seed=1), 3)
    dataset = Dataset.range(30).shuffle(30, seed=1)
    assert naive.plain(dataset) == first
    iterator = iter(dataset)
    assert [int(next(iterator)) for _ in range(10)] == second[:10]
    fresh = Dataset.range(30).shuffle(30, seed=1)
    resumed = iter(fresh)
    resumed.restore(iterator.state())
    assert naive.plain(resumed) == second[10:]
    assert naive.plain(fresh) == third


def test_states_of_other_datasets_are_refused():
    state = iter(Dataset.range(5).batch(2)).state()
    with pytest.raises(DatasetError, match="over Batch <- Range, but the dataset is Range"):
        iter(Dataset.range(5)).restore(state)
    for wrong in (None, {}, {"dataset": "Range"}, [1]):
        with pytest.raises(ArgumentTypeError, match="state"):
            iter(Dataset.range(5)).restore(wrong)


def test_a_position_is_that_of_the_elements_given_out_not_of_those_read_ahead():
    iterator = iter(Dataset.range(100).map(square, 8).prefetch(10))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 4]
    state = iterator.state()
    iterator.close()
    fresh = iter(Dataset.range(100).map(square, 8).prefetch(10))
    fresh.restore(state)
    assert int(next(fresh)) == 9
    fresh.close()


def test_an_error_of_what_is_read_ahead_comes_after_the_elements_before_it():
    def generate():
        yield from range(3)
        raise ZeroDivisionError("three")

    iterator = iter(Dataset.from_generator(generate).map(square, 4))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 4]
    with pytest.raises(ZeroDivisionError, match="three"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("source", [Dataset.range(5), Dataset.from_generator(lambda: iter(range(5)))])
@pytest.mark.parametrize("way", ["map", "filter", "parallel", "prefetch", "batch"])
def test_the_position_after_an_error_is_before_the_element_that_was_not_given_out(source, way):
    broken = True

    def fail(x):
        if broken and x == 3:
            raise ZeroDivisionError
        return True if way == "filter" else x

    if way == "filter":
        dataset = source.filter(fail)
    else:
        dataset = source.map(fail, 2 if way == "parallel" else None)
        after = {"prefetch": lambda made: made.prefetch(2), "batch": lambda made: made.batch(1)}
        dataset = dataset.apply(after.get(way, lambda made: made))
    iterator = iter(dataset)
    got = [int(np.squeeze(next(iterator))) for _ in range(3)]
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    broken = False
    iterator.restore(iterator.state())
    assert got + [int(np.squeeze(x)) for x in iterator] == list(range(5))


def test_options_do_not_change_elements():
    assert naive.plain(Dataset.range(3).with_options(Options())) == [0, 1, 2]
