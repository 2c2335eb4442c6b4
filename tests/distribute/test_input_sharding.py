"""How batches are divided among workers and replicas, against what TensorFlow 2.21 answers."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.data import Dataset, FixedLenFeature, Options
from dmesh.data.experimental import SHARD_HINT, AutoShardPolicy, TFRecordWriter
from dmesh.data.iterator import DatasetIterator
from dmesh.distribute.input_sharding import batch_sizes, divide, effective_policy, with_entropy
from dmesh.errors import ShardHintError, ShardingError, UnshardableSourceError

OFF, AUTO, FILE, DATA, HINT = AutoShardPolicy

GOLDEN = [
    ((1, 4, 10, 7), "AUTO", [[[0, 1], [2, 3], [4, 5], [6], [7], [8], [9], []]]),
    ((1, 4, 10, 7), "OFF", [[[0, 1], [2, 3], [4, 5], [6], [7, 8], [9]]]),
    ((1, 4, 8, 8), "AUTO", [[[0, 1], [2, 3], [4, 5], [6, 7]]]),
    ((1, 4, 8, 8), "OFF", [[[0, 1], [2, 3], [4, 5], [6, 7]]]),
    ((1, 4, 9, 8), "AUTO", [[[0, 1], [2, 3], [4, 5], [6, 7], [8], [], [], []]]),
    ((1, 4, 9, 8), "OFF", [[[0, 1], [2, 3], [4, 5], [6, 7], [8]]]),
    ((1, 4, 3, 3), "AUTO", [[[0], [1], [2], []]]),
    ((1, 4, 3, 3), "OFF", [[[0], [1], [2], []]]),
    (
        (2, 2, 16, 7),
        "AUTO",
        [[[0, 1], [4, 5], [7, 8], [11, 12], [14], []], [[2, 3], [6], [9, 10], [13], [15], []]],
    ),
    (
        (2, 2, 16, 7),
        "OFF",
        [
            [[0, 1], [2, 3], [4, 5], [6], [7, 8], [9, 10], [11, 12], [13], [14, 15]],
            [[0, 1], [2], [3, 4], [5, 6], [7, 8], [9], [10, 11], [12, 13], [14, 15]],
        ],
    ),
    ((2, 2, 7, 3), "AUTO", [[[0], [2], [3], [5], [6], []], [[1], [], [4], [], [], []]]),
    (
        (2, 2, 7, 3),
        "OFF",
        [[[0], [1], [2], [], [3], [4], [5], [], [6]], [[0], [], [1], [2], [3], [], [4], [5], [6], []]],
    ),
    ((2, 2, 10, 8), "AUTO", [[[0, 1], [4, 5], [8], []], [[2, 3], [6, 7], [9], []]]),
    (
        (2, 2, 10, 8),
        "OFF",
        [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]],
    ),
    ((2, 1, 10, 4), "AUTO", [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]),
    (
        (2, 1, 10, 4),
        "OFF",
        [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]],
    ),
    (
        (3, 2, 13, 5),
        "AUTO",
        [[[0], [3], [5], [8], [10], []], [[1], [4], [6], [9], [11], []], [[2], [], [7], [], [12], []]],
    ),
    (
        (3, 2, 13, 5),
        "OFF",
        [
            [[0], [1], [2], [3], [4], [], [5], [6], [7], [8], [9], [], [10], [11], [12]],
            [[0], [1], [2], [], [3], [4], [5], [6], [7], [], [8], [9], [10], [11], [12], []],
            [[0], [], [1], [2], [3], [4], [5], [], [6], [7], [8], [9], [10], [], [11], [12]],
        ],
    ),
    ((1, 2, 5, 4), "AUTO", [[[0, 1], [2, 3], [4], []]]),
    ((1, 2, 5, 4), "OFF", [[[0, 1], [2, 3], [4]]]),
    ((2, 2, 2, 8), "AUTO", [[[0], []], [[1], []]]),
    ((2, 2, 2, 8), "OFF", [[[0, 1]], [[0, 1]]]),
]
"""Workers, replicas, numbers, size of a batch; the policy; what each worker's replicas get in turn.

Run with `Dataset.range(numbers).batch(size)`, rebatched and sharded as TensorFlow's strategies do it.
"""


def shares(dataset, policy, workers, replicas):
    """Returns what each worker's replicas get in turn."""
    node = dataset.node
    chosen = effective_policy(node, policy, workers)
    pipelines = [divide(node, chosen, workers, replicas, worker) for worker in range(workers)]
    return [[element.tolist() for element in DatasetIterator(pipeline)] for pipeline in pipelines]


@pytest.mark.parametrize(("case", "policy", "expected"), GOLDEN)
def test_the_reference_divides_so(case, policy, expected):
    workers, replicas, numbers, size = case
    dataset = Dataset.range(numbers).batch(size)
    assert shares(dataset, AutoShardPolicy[policy], workers, replicas) == expected


@pytest.fixture
def three_files(tmp_path):
    for index in range(3):
        np.save(tmp_path / f"{index}.npy", np.arange(10 * index, 10 * index + 5))
    return sorted(tmp_path.iterdir())


@pytest.mark.parametrize("policy", [AUTO, FILE])
def test_the_reference_divides_files_so(three_files, policy):
    batches = Dataset.from_npy(three_files).batch(5)
    assert shares(batches, policy, 2, 1) == [
        [[0, 1, 2], [3, 4], [20, 21, 22], [23, 24]], [[10, 11], [12, 13, 14]],
    ]  # fmt: skip
    assert shares(batches, policy, 2, 2) == [
        [[0, 1], [2], [3], [4], [20, 21], [22], [23], [24]], [[10], [11], [12, 13], [14]],
    ]  # fmt: skip


@pytest.fixture
def two_record_files(tmp_path):
    for index in range(2):
        with TFRecordWriter(tmp_path / f"{index}.tfrecord") as writer:
            for number in range(20):
                writer.write_record({"x": 100 * index + number})
    return str(tmp_path / "*.tfrecord")


def test_the_reference_takes_and_skips_in_each_workers_files(two_record_files):
    """With FILE, and AUTO: `take` and `skip` come after the division. Compared with TensorFlow 2.21."""

    def numbers():
        return Dataset.from_tfrecord(two_record_files, {"x": FixedLenFeature((), np.int64)}).map(
            lambda row: row["x"]
        )

    for policy in (AUTO, FILE):
        assert shares(numbers().take(5).batch(4), policy, 2, 1) == [
            [[0, 1], [2, 3], [4]], [[100, 101], [102, 103], [104]],
        ]  # fmt: skip
        assert shares(numbers().skip(16).batch(4), policy, 2, 1) == [
            [[16, 17], [18, 19]], [[116, 117], [118, 119]],
        ]  # fmt: skip
    assert shares(numbers().take(5).batch(5), DATA, 2, 1) == [[[0, 1, 2]], [[3, 4]]], "5 rows, not 10"


def test_the_reference_numbers_elements_once_for_all_workers(two_record_files, caplog):
    """With `enumerate` a dataset comes from a range, too, and AUTO becomes DATA. As TensorFlow 2.21 does."""

    def numbered():
        rows = Dataset.from_tfrecord(two_record_files, {"x": FixedLenFeature((), np.int64)})
        return rows.enumerate().map(lambda number, row: number * 1000 + row["x"]).take(5).batch(2)

    assert effective_policy(numbered().node, AUTO, 2) is DATA
    assert shares(numbered(), AUTO, 2, 1) == [[[0], [2002], [4004]], [[1001], [3003], []]]
    with pytest.raises(UnshardableSourceError, match="comes from Range"):
        shares(numbered(), FILE, 2, 1)
    assert "AUTO becomes DATA" in caplog.text


def test_the_reference_follows_a_hint_so():
    hinted = Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).batch(2)
    assert shares(hinted, HINT, 2, 1) == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    assert shares(hinted, HINT, 2, 2) == [
        [[0], [2], [], [], [4], [6], [], []], [[], [], [1], [3], [], [], [5], [7], [], []],
    ]  # fmt: skip
    assert shares(hinted, HINT, 1, 2) == [[[0], [1], [2], [3], [4], [5], [6], [7]]]
    assert shares(Dataset.range(8).batch(2), HINT, 2, 1) == [[[n] for n in range(8)]] * 2, "as with OFF"


def test_batches_of_unknown_size_are_cut_as_the_reference_does():
    cut = Dataset.range(10).batch(4).map(lambda x: x + 1)
    assert shares(cut, OFF, 1, 4) == [[[1], [2], [3], [4], [5], [6], [7], [8], [9], [10], [], []]]
    known = Dataset.range(8).batch(4, drop_remainder=True).map(lambda x: x + 1)
    assert shares(known, OFF, 1, 3) == [[[1, 2], [3], [4], [5, 6], [7], [8]]]
    mixed = Dataset.zip(Dataset.range(8).batch(4), Dataset.range(8).batch(2)).map(lambda a, b: a)
    assert shares(mixed, OFF, 1, 2) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]


counts = st.integers(1, 4)


@given(st.integers(0, 60), counts, counts)
def test_sizes_add_up_to_the_global_batch_in_every_step(rows, workers, replicas):
    sizes = [batch_sizes(rows, workers, replicas, worker) for worker in range(workers)]
    for own in sizes:
        assert len(own) == workers * replicas
        assert max(own) - min(own) <= 1
    for step in range(workers):
        taken = [size for own in sizes for size in own[step * replicas : (step + 1) * replicas]]
        assert sum(taken) == rows, "each step of all workers is one global batch"


@given(st.integers(0, 40), st.integers(1, 17), counts, counts)
def test_data_gives_every_row_to_one_replica_in_its_step(numbers, size, workers, replicas):
    divided = shares(Dataset.range(numbers).batch(size), DATA, workers, replicas)
    total = workers * replicas
    batches = [list(range(numbers))[start : start + size] for start in range(0, numbers, size)]
    assert {len(own) for own in divided} == {len(batches) * replicas}, "all workers make the same steps"
    for step, batch in enumerate(batches):
        parts = [part for own in divided for part in own[step * replicas : (step + 1) * replicas]]
        assert sorted(number for part in parts for number in part) == batch
        assert max(map(len, parts)) == -(-len(batch) // total)


@given(st.lists(st.integers(0, 9), min_size=4, max_size=6), st.integers(1, 9), counts, counts)
def test_files_give_every_row_to_one_worker(tmp_path_factory, lengths, size, workers, replicas):
    folder = tmp_path_factory.mktemp("files")
    start = 0
    for index, length in enumerate(lengths):
        np.save(folder / f"{index}.npy", np.arange(start, start + length))
        start += length
    dataset = Dataset.from_npy(sorted(folder.iterdir())).batch(size)
    divided = shares(dataset, FILE, workers, replicas)
    rows = [number for own in divided for part in own for number in part]
    assert sorted(rows) == list(range(start))
    steps = min(len(own) // replicas for own in divided)
    if workers * replicas > 1:
        for step in range(steps - 1):  # the last one of a worker may be incomplete
            taken = [part for own in divided for part in own[step * replicas : (step + 1) * replicas]]
            assert sum(map(len, taken)) == size


def test_auto_says_that_it_becomes_data(caplog):
    with caplog.at_level(logging.WARNING, "dmesh"):
        assert effective_policy(Dataset.range(3).batch(1).node, AUTO, 2) is DATA
        assert effective_policy(Dataset.range(3).batch(1).node, AUTO, 1) is DATA
    [record] = caplog.records
    assert "AUTO becomes DATA: the dataset comes from Range" in record.getMessage()


def test_a_hint_without_marker_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, "dmesh"):
        assert effective_policy(Dataset.range(3).node, HINT, 2) is HINT
    assert "has no effect on a dataset without shard(SHARD_HINT, SHARD_HINT)" in caplog.text


def test_policies_that_cannot_be_followed_are_refused(three_files):
    hinted = Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).batch(2)
    for policy in (OFF, AUTO, FILE, DATA):
        with pytest.raises(ShardHintError, match=f"its policy is {policy.name}") as caught:
            effective_policy(hinted.node, policy, 2)
        assert isinstance(caught.value, RuntimeError)
    with pytest.raises(
        UnshardableSourceError, match=r"FILE cannot be followed: .* comes from Range"
    ) as caught:
        effective_policy(Dataset.range(8).node, FILE, 2)
    assert isinstance(caught.value, LookupError)
    mixed = Dataset.zip(Dataset.from_npy(three_files), Dataset.range(15))
    with pytest.raises(UnshardableSourceError):
        effective_policy(mixed.node, FILE, 2)
    assert effective_policy(mixed.node, AUTO, 2) is DATA
    assert effective_policy(Dataset.range(8).node, FILE, 1) is FILE, "one worker has nothing to divide"
    for policy in (AUTO, FILE):
        with pytest.raises(ShardingError, match=r"only 3 file\(s\), .* each of 4 workers") as caught:
            effective_policy(Dataset.from_npy(three_files).node, policy, 4)
        assert isinstance(caught.value, ValueError)


def test_shuffles_without_a_seed_can_be_given_one_order():
    shuffled = Dataset.range(50).shuffle(50).map(lambda x: x).shuffle(3, seed=4)
    other = Dataset.range(50).shuffle(50).map(lambda x: x).shuffle(3, seed=4)

    def order(dataset, entropy):
        return [int(x) for x in DatasetIterator(with_entropy(dataset.node, entropy))]

    assert order(shuffled, 5) == order(other, 5) != order(other, 6)


def test_options_say_the_policy():
    options = Options()
    options.experimental_distribute.auto_shard_policy = 2
    assert options.experimental_distribute.auto_shard_policy is DATA
    assert [int(policy) for policy in (OFF, AUTO, FILE, DATA, HINT)] == [-1, 0, 1, 2, 3]
