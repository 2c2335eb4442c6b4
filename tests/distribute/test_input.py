"""Distributed input, on one worker and on the workers of a fake cluster."""

from __future__ import annotations

import gc
import json
import threading
import time
from itertools import count

import numpy as np
import pytest

from dmesh import collectives, config
from dmesh.data import Dataset, Options, TensorSpec
from dmesh.data.experimental import SHARD_HINT, AutoShardPolicy
from dmesh.distribute import DistributedDataset, DistributedIterator, InputContext, InputOptions
from dmesh.distribute import InputReplicationMode as Mode
from dmesh.distribute.input import (
    distribute_datasets_from_function,
    experimental_distribute_dataset,
    experimental_distribute_values_from_function,
)
from dmesh.distribute.input_options import ValueContext
from dmesh.distribute.input_workers import InputWorkers
from dmesh.distribute.values import PerReplica
from dmesh.errors import (
    ArgumentTypeError,
    DatasetError,
    InputModeError,
    OutOfRangeError,
    PeerLostError,
    RemoteInputError,
    ShardHintError,
    UnshardableSourceError,
)
from dmesh.testing import FakeCluster

FOUR = InputWorkers(replicas_per_worker=4, allow_per_replica=True)


def parts(values):
    return [part.tolist() for part in values.values]


def steps(dataset):
    return [parts(values) for values in dataset]


def batches(numbers, size, **more):
    return Dataset.range(numbers).batch(size, **more)


def with_policy(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("dmesh-input")]


@pytest.fixture(autouse=True)
def _no_threads_left():
    yield
    if threads():
        gc.collect()  # errors and their frames hold iterators
    deadline = time.monotonic() + 10
    while threads():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# -- one worker ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "size", "expected"),
    [
        (10, 8, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8], [9], [], []]]),
        (9, 8, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8], [], [], []]]),
        (7, 7, [[[0, 1], [2, 3], [4, 5], [6]]]),
        (3, 3, [[[0], [1], [2], []]]),
        (0, 3, []),
    ],
)
@pytest.mark.parametrize("buffer", [-1, 0, 1, 2, None])
def test_the_reference_gives_four_replicas_so(numbers, size, expected, buffer):
    options = InputOptions(
        experimental_fetch_to_device=buffer is not None, experimental_per_replica_buffer_size=buffer or 0
    )
    dataset = experimental_distribute_dataset(FOUR, batches(numbers, size), options)
    assert steps(dataset) == steps(dataset) == expected


def test_elements_and_specs_are_distributed_values():
    rows = {"x": np.zeros((8, 3), np.float32), "y": np.arange(8)}
    dataset = experimental_distribute_dataset(FOUR, Dataset.from_tensor_slices(rows).batch(8))
    [step] = dataset
    assert isinstance(dataset, DistributedDataset)
    assert isinstance(step["x"], PerReplica)
    assert step["x"].values[1].shape == (2, 3)
    iterator = iter(dataset)
    assert isinstance(iterator, DistributedIterator)
    for spec in (dataset.element_spec, iterator.element_spec):
        assert spec["x"].values == (TensorSpec([None, 3], np.float32),) * 4
    alone = experimental_distribute_dataset(InputWorkers(), batches(4, 2))
    assert [value.tolist() for value in alone] == [[0, 1], [2, 3]], "one replica gets bare values"
    assert alone.element_spec == TensorSpec([None], np.int64)


def test_the_end_is_told_in_three_ways():
    iterator = iter(experimental_distribute_dataset(FOUR, batches(10, 8)))
    told = [iterator.get_next_as_optional() for _ in range(3)]
    assert [optional.has_value() for optional in told] == [True, True, False]
    assert parts(told[1].get_value()) == [[8], [9], [], []]
    with pytest.raises(OutOfRangeError, match="no more elements"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        iterator.next()
    assert parts(iter(experimental_distribute_dataset(FOUR, batches(4, 4))).get_next()) == [
        [0],
        [1],
        [2],
        [3],
    ]


def test_what_the_end_is_told_by_has_a_spec():
    """As in TensorFlow: that of the value where there is one, that of the dataset after the end."""
    iterator = iter(experimental_distribute_dataset(FOUR, batches(9, 8)))
    told = [iterator.get_next_as_optional() for _ in range(4)]
    lengths = [[spec.shape for spec in optional.element_spec.values] for optional in told]
    assert lengths == [[(2,)] * 4, [(1,), (0,), (0,), (0,)], [(None,)] * 4, [(None,)] * 4]
    assert {spec.dtype for optional in told for spec in optional.element_spec.values} == {np.dtype(np.int64)}
    alone = iter(experimental_distribute_dataset(InputWorkers(), [{"x": np.zeros((4, 2), np.float32)}]))
    assert alone.get_next_as_optional().element_spec == {"x": TensorSpec([4, 2], np.float32)}


def test_any_iterable_that_begins_anew_can_be_distributed():
    lists = [(np.arange(4), np.zeros((4, 1))), (np.arange(4, 6), np.zeros((2, 1)))]
    dataset = experimental_distribute_dataset(FOUR, lists)
    assert [parts(x) for x, _ in dataset] == [[[0], [1], [2], [3]], [[4], [5], [], []]]
    assert [y.values[3].shape for _, y in dataset] == [(1, 1), (0, 1)]
    for wrong in (iter(lists), None, 3):
        with pytest.raises(ArgumentTypeError):
            experimental_distribute_dataset(FOUR, wrong)


def test_batches_are_needed():
    with pytest.raises(DatasetError, match=r"splitting a batch.*Call batch\(\) on the dataset first"):
        next(iter(experimental_distribute_dataset(FOUR, Dataset.range(8))))
    with pytest.raises(DatasetError, match="only 2 elements are left for 4 replicas"):
        steps(distribute_datasets_from_function(FOUR, lambda context: Dataset.range(6)))


def test_an_endless_dataset_is_made_only_as_far_as_the_buffer():
    made = []

    def generate():
        for number in count():
            made.append(number)
            yield np.full(4, number)

    dataset = experimental_distribute_dataset(
        FOUR, Dataset.from_generator(generate), InputOptions(experimental_per_replica_buffer_size=3)
    )
    iterator = iter(dataset)
    assert not made
    assert not threads()
    next(iterator)
    time.sleep(0.05)
    assert len(made) <= 6  # one is out, three wait, one is in the hand
    assert len(threads()) == 1
    iterator.close()
    iterator.close()
    assert iterator.get_next_as_optional().has_value() is False


def test_the_thread_ends_when_the_iterator_is_forgotten():
    iterator = iter(experimental_distribute_dataset(FOUR, Dataset.from_tensors([[1.0]]).repeat().batch(4)))
    next(iterator)
    assert threads()
    del iterator  # the fixture waits for the thread's end


def test_an_error_comes_out_of_the_thread_and_ends_the_reading():
    def fail(x):
        if 5 in x:
            raise ZeroDivisionError("five")
        return x

    iterator = iter(experimental_distribute_dataset(FOUR, batches(8, 4).map(fail)))
    next(iterator)
    with pytest.raises(ZeroDivisionError, match="five"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_next_is_refused_in_a_replicas_function():
    inside = threading.local()
    workers = InputWorkers(replicas_per_worker=2, in_replica=lambda: getattr(inside, "replica", False))
    iterator = iter(experimental_distribute_dataset(workers, batches(4, 2)))
    inside.replica = True
    with pytest.raises(ValueError, match=r"Call it outside: strategy\.run"):
        next(iterator)
    inside.replica = False
    assert parts(next(iterator)) == [[0], [1]]
    iterator.close()


# -- from functions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (10, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [], [], []]]),
        (11, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10], [], []]]),
    ],
)
def test_every_replica_takes_the_next_element_of_its_workers_dataset(numbers, expected):
    contexts = []

    def make(context):
        contexts.append(context)
        return batches(numbers, 2)

    dataset = distribute_datasets_from_function(FOUR, make)
    assert steps(dataset) == steps(dataset) == expected
    assert contexts == [InputContext(1, 0, 4)], "the function is called once"


def test_a_pipeline_for_each_replica():
    contexts = []

    def make(context):
        contexts.append(context)
        return batches(2 * context.input_pipeline_id + 2, 2)

    options = InputOptions(experimental_replication_mode=Mode.PER_REPLICA)
    dataset = distribute_datasets_from_function(FOUR, make, options)
    assert steps(dataset) == [
        [[0, 1], [0, 1], [0, 1], [0, 1]], [[], [2, 3], [2, 3], [2, 3]],
        [[], [], [4, 5], [4, 5]], [[], [], [], [6, 7]],
    ]  # fmt: skip
    assert contexts == [InputContext(4, index, 4) for index in range(4)]


def test_options_are_checked_as_in_the_reference():
    def distribute(mode, fetch, place, workers=FOUR):
        options = InputOptions(
            experimental_replication_mode=mode,
            experimental_fetch_to_device=fetch,
            experimental_place_dataset_on_device=place,
        )
        return steps(distribute_datasets_from_function(workers, lambda context: batches(8, 2), options))

    same = [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    repeated = [[[n, n + 1]] * 4 for n in (0, 2, 4, 6)]
    assert distribute(Mode.PER_WORKER, True, False) == distribute(Mode.PER_WORKER, False, False) == same
    assert distribute(Mode.PER_REPLICA, True, False) == distribute(Mode.PER_REPLICA, False, True) == repeated
    for fetch in (True, False):
        with pytest.raises(ValueError, match=r"needs InputReplicationMode\.PER_REPLICA"):
            distribute(Mode.PER_WORKER, fetch, True)
    with pytest.raises(ValueError, match="exclude each other"):
        distribute(Mode.PER_REPLICA, True, True)
    with pytest.raises(NotImplementedError, match="single worker without TPUs"):
        distribute(Mode.PER_REPLICA, True, True, InputWorkers(replicas_per_worker=4))
    options = InputOptions(experimental_replication_mode=Mode.PER_REPLICA)
    with pytest.raises(InputModeError, match="with distribute_datasets_from_function only"):
        experimental_distribute_dataset(FOUR, None, options)
    placed = InputOptions(experimental_place_dataset_on_device=True)
    assert steps(experimental_distribute_dataset(FOUR, batches(4, 4), placed)) == [[[0], [1], [2], [3]]]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: distribute_datasets_from_function(FOUR, 3), TypeError, "takes an InputContext, got int"),
        (lambda: distribute_datasets_from_function(FOUR, lambda c: None), TypeError, "returned None"),
        (lambda: distribute_datasets_from_function(FOUR, lambda c: iter([])), TypeError, "only once"),
        (lambda: experimental_distribute_dataset(FOUR, [], 3), TypeError, "InputOptions, got int"),
        (lambda: experimental_distribute_values_from_function(FOUR, 3), TypeError, "a ValueContext, got int"),
        (lambda: InputOptions(experimental_per_replica_buffer_size=-2), ValueError, "at least -1"),
        (lambda: InputOptions(experimental_replication_mode="x"), TypeError, "InputReplicationMode, got 'x'"),
        (lambda: InputWorkers(num_workers=0), ValueError, "at least one worker"),
        (lambda: InputWorkers(2, 2), ValueError, "worker 2 must be from 0 to 1"),
        (lambda: InputWorkers(2, 1), ValueError, "0 of 1"),
        (
            lambda: InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(7),
            ValueError,
            "7 cannot be",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_contexts_are_those_of_the_reference():
    assert InputContext() == InputContext(1, 0, 1)
    assert str(InputContext(2, 1, 4)) == "dmesh.distribute.InputContext(input pipeline id 1, total: 2)"
    assert InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(8) == 2
    assert ValueContext() == ValueContext(0, 1)
    assert repr(ValueContext(1, 2)) == (
        "dmesh.distribute.ValueContext(replica id 1, total replicas in sync: 2)"
    )
    assert InputOptions() == InputOptions(True, Mode.PER_WORKER, False, 1)


def test_values_from_a_function():
    values = experimental_distribute_values_from_function(
        FOUR, lambda context: context.replica_id_in_sync_group * 10 + context.num_replicas_in_sync
    )
    assert values.values == (4, 14, 24, 34)
    alone = experimental_distribute_values_from_function(InputWorkers(), lambda context: {"a": 1})
    assert isinstance(alone["a"], PerReplica), "also a single value is wrapped"
    assert alone["a"].values == (1,)


# -- several workers -----------------------------------------------------------------------------------------


def workers_here(replicas=2):
    world = collectives.world()
    return InputWorkers(world.size, world.rank, replicas, group=world)


def run(size, make, replicas=2, **more):
    """Returns the steps of each worker; `make` distributes the input."""

    def program():
        dataset = make(workers_here(replicas))
        return [steps(dataset), steps(dataset)]

    with FakeCluster(size) as cluster:
        return cluster.run(program, **more)


def test_two_workers_share_every_batch():
    def make(workers):
        return experimental_distribute_dataset(workers, batches(10, 8))

    first = [[[0, 1], [4, 5]], [[8], []]]
    second = [[[2, 3], [6, 7]], [[9], []]]
    assert run(2, make) == [[first, first], [second, second]]


def test_workers_go_on_with_nothing_until_the_last_has_ended(tmp_path):
    for index, length in enumerate((5, 1, 5)):
        np.save(tmp_path / f"{index}.npy", np.arange(10 * index, 10 * index + length))

    def make(workers):
        return experimental_distribute_dataset(workers, Dataset.from_npy(str(tmp_path / "*.npy")).batch(4))

    [one, again], [other, other_again] = run(2, make)
    assert one == again == [[[0], [1]], [[2], [3]], [[4], [20]], [[21], [22]], [[23], [24]]]
    assert other == other_again == [[[10], []], [[], []], [[], []], [[], []], [[], []]]


def test_a_worker_without_any_element_gets_empty_ones(tmp_path):
    np.save(tmp_path / "0.npy", np.ones((3, 2), np.float32))
    np.save(tmp_path / "1.npy", np.ones((0, 2), np.float32))

    def program():
        dataset = Dataset.from_npy(str(tmp_path / "*.npy")).batch(4)
        return [
            [(part.shape, str(part.dtype)) for part in step.values]
            for step in experimental_distribute_dataset(workers_here(), dataset)
        ]

    with FakeCluster(2) as cluster:
        one, other = cluster.run(program)
    assert one == [[((1, 2), "float32"), ((1, 2), "float32")], [((1, 2), "float32"), ((0, 2), "float32")]]
    assert other == [[((0, 2), "float32")] * 2] * 2


def test_nobody_knows_what_empty_elements_look_like():
    def program():
        workers = workers_here()
        length = 3 if workers.worker_index == 0 else 0
        return steps(
            distribute_datasets_from_function(
                workers, lambda context: Dataset.from_generator(lambda: iter([[1]] * length))
            )
        )

    with FakeCluster(2) as cluster:
        outcomes = cluster.run(program, check=False)
    for outcome in outcomes:
        assert isinstance(outcome, DatasetError)
        assert "the input of worker 1 has ended" in str(outcome)


def test_each_worker_makes_a_dataset_of_its_own():
    def make(workers):
        def dataset_fn(context):
            size = context.get_per_replica_batch_size(8)
            numbers = Dataset.range(10).shard(context.num_input_pipelines, context.input_pipeline_id)
            return numbers.batch(size)

        return distribute_datasets_from_function(workers, dataset_fn)

    [one, _], [other, _] = run(2, make)
    assert one == [[[0, 2], [4, 6]], [[8], []]]
    assert other == [[[1, 3], [5, 7]], [[9], []]]


def test_endless_input_needs_no_agreement_after_the_first_step():
    def program():
        def dataset_fn(context):
            return Dataset.from_tensors([[float(context.input_pipeline_id)]]).repeat().batch(2)

        iterator = iter(distribute_datasets_from_function(workers_here(), dataset_fn))
        taken = [next(iterator) for _ in range(3 + 2 * config.client_id())]
        iterator.close()
        return float(taken[-1].values[1].mean()), len(taken)

    with FakeCluster(2) as cluster:
        assert cluster.run(program) == [(0.0, 3), (1.0, 5)]


def test_a_repeated_input_without_rows_ends_on_no_worker_alone():
    """A repetition is endless only if its source has elements, which nothing says of a filter's."""

    def program():
        def dataset_fn(context):
            own = Dataset.range(4).filter(lambda x: context.input_pipeline_id == 0)
            return own.batch(2).repeat()

        iterator = iter(distribute_datasets_from_function(workers_here(), dataset_fn))
        taken = [parts(next(iterator)) for _ in range(3)]
        iterator.close()
        return taken

    with FakeCluster(2) as cluster:
        assert cluster.run(program) == [[[[0, 1], [2, 3]]] * 3, [[[], []]] * 3]


def test_unseeded_shuffles_lose_and_double_nothing():
    def make(workers):
        return experimental_distribute_dataset(workers, Dataset.range(40).shuffle(40).batch(7))

    outcomes = run(3, make)
    for epoch in range(2):
        rows = [number for worker in outcomes for step in worker[epoch] for part in step for number in part]
        assert sorted(rows) == list(range(40))
    assert outcomes[0][0] != outcomes[0][1], "another order in each epoch"


def test_a_reading_by_one_worker_alone_does_not_change_the_others_order():
    def make(workers):
        dataset = Dataset.range(40).shuffle(40, seed=3).batch(8)
        if workers.worker_index == 0:
            list(dataset)  # which counts as a reading of that dataset, on this worker only
        return experimental_distribute_dataset(workers, dataset)

    outcomes = run(2, make)
    rows = [number for worker in outcomes for step in worker[0] for part in step for number in part]
    assert sorted(rows) == list(range(40))


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_restored_iterator_continues_with_the_same_steps(ahead):
    options = InputOptions(experimental_per_replica_buffer_size=ahead)

    def program():
        def make():
            dataset = Dataset.range(40).shuffle(40).repeat(2).map(lambda x: x + 1).batch(7).prefetch(1)
            return experimental_distribute_dataset(workers_here(), dataset, options)

        distributed = make()
        iterator = iter(distributed)
        assert iterator.state() == {}
        before = [parts(next(iterator)) for _ in range(4)]
        state = json.loads(json.dumps(iterator.state()))
        rest = [parts(values) for values in iterator]
        following = steps(distributed)
        fresh = make()
        resumed = iter(fresh)
        resumed.restore(state)
        return before, rest, [parts(values) for values in resumed], following, steps(fresh)

    with FakeCluster(2) as cluster:
        outcomes = cluster.run(program)
    rows = [
        number for before, rest, *_ in outcomes for step in before + rest for part in step for number in part
    ]
    assert sorted(rows) == sorted([*range(1, 41)] * 2)
    for _, rest, resumed, following, again in outcomes:
        assert resumed == rest
        assert again == following, "and so do the epochs after it"


def test_a_state_is_checked():
    iterator = iter(experimental_distribute_dataset(FOUR, batches(8, 4)))
    with pytest.raises(ArgumentTypeError, match="state must be"):
        iterator.restore([1])
    next(iterator)
    with pytest.raises(DatasetError, match="takes a new iterator"):
        iterator.restore(iterator.state())
    other = iter(experimental_distribute_dataset(FOUR, Dataset.range(8).map(lambda x: x).batch(4)))
    other.restore(iterator.state())
    with pytest.raises(DatasetError, match="state of an iterator over Split <- Batch <- Range"):
        next(other)
    iterator.close()


def test_policies_across_workers():
    def off(workers):
        return experimental_distribute_dataset(workers, with_policy(batches(4, 4), AutoShardPolicy.OFF))

    def hint(workers):
        hinted = Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).batch(2)
        return experimental_distribute_dataset(workers, with_policy(hinted, AutoShardPolicy.HINT))

    everything = [[[0], [1]], [[2], [3]]]
    assert [worker[0] for worker in run(2, off)] == [everything, everything]
    one, other = (worker[0] for worker in run(2, hint))
    assert one == [[[0], [2]], [[], []], [[4], [6]], [[], []], [[], []]]
    assert other == [[[], []], [[1], [3]], [[], []], [[5], [7]], [[], []]]
    for policy, dataset, error in [
        (AutoShardPolicy.FILE, batches(4, 4), UnshardableSourceError),
        (AutoShardPolicy.DATA, Dataset.range(4).shard(SHARD_HINT, SHARD_HINT), ShardHintError),
    ]:

        def refused(workers, dataset=dataset, policy=policy):
            return experimental_distribute_dataset(workers, with_policy(dataset, policy))

        for outcome in run(2, refused, check=False):
            assert isinstance(outcome, error)


def test_an_error_on_one_worker_reaches_all():
    def make(workers):
        def fail(x):
            if workers.worker_index == 1 and 4 in x:
                raise ZeroDivisionError("no four")
            return x

        return experimental_distribute_dataset(workers, batches(8, 4).map(fail))

    for buffer in (0, 2):
        options = InputOptions(experimental_per_replica_buffer_size=buffer)

        def program(options=options):
            return steps(make(workers_here()))

        with FakeCluster(3) as cluster:
            one, failed, other = cluster.run(program, check=False)
        assert isinstance(failed, ZeroDivisionError)
        for outcome in (one, other):
            assert isinstance(outcome, RemoteInputError)
            assert outcome.worker == 1
            assert "the input of worker 1 failed" in str(outcome)
            assert "ZeroDivisionError: no four" in str(outcome)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_step_that_another_worker_could_not_make_has_not_been_taken(ahead):
    options = InputOptions(experimental_per_replica_buffer_size=ahead)

    def program():
        workers, broken = workers_here(), True

        def fail(x):
            if broken and workers.worker_index == 1 and 4 in x:
                raise ZeroDivisionError("no four")
            return x

        iterator = iter(experimental_distribute_dataset(workers, batches(12, 4).map(fail), options))
        next(iterator)
        with pytest.raises((ZeroDivisionError, RemoteInputError)):
            next(iterator)
        broken = False
        again = iter(experimental_distribute_dataset(workers, batches(12, 4).map(fail), options))
        again.restore(iterator.state())
        return [row for values in again for part in parts(values) for row in part]

    with FakeCluster(2) as cluster:
        one, other = cluster.run(program)
    assert sorted(one + other) == [*range(4, 12)]


@pytest.mark.parametrize("dataset", [batches(8, 4), batches(8, 4).repeat()], ids=["ends", "endless"])
def test_a_state_that_one_worker_cannot_take_is_an_error_on_all(dataset):
    def program():
        workers = workers_here()
        distributed = experimental_distribute_dataset(workers, dataset)
        iterator = iter(distributed)
        next(iterator)
        state = iterator.state()
        again = iter(distributed)
        if workers.worker_index == 1:
            state["pipelines"] = [{**state["pipelines"][0], "dataset": "another one"}]
        again.restore(state)
        return next(again)

    with FakeCluster(2) as cluster:
        one, other = cluster.run(program, check=False)
    assert isinstance(other, DatasetError)
    assert isinstance(one, RemoteInputError)
    assert "the input of worker 1 failed" in str(one)


def test_all_workers_restore_or_none():
    def program():
        workers = workers_here()
        distributed = experimental_distribute_dataset(workers, batches(8, 4))
        iterator = iter(distributed)
        if workers.worker_index == 0:
            state = {"epoch": 0, "pipelines": [iter(batches(8, 4)).state()]}
            iterator.restore(state)
        return next(iterator)

    with FakeCluster(2) as cluster:
        for outcome in cluster.run(program, check=False):
            assert isinstance(outcome, DatasetError)
            assert "all workers must restore() a state, or none: worker 0 has 1, worker 1 has 0" in str(
                outcome
            )


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda workers: experimental_distribute_dataset(workers, batches(8, 4 + workers.worker_index)),
            "batches of the same global size: worker 0 has 4, worker 1 has 5",
        ),
        (
            lambda workers: experimental_distribute_dataset(
                workers, with_policy(batches(8, 4), -workers.worker_index)
            ),
            "in the same way: worker 0 has DATA, worker 1 has OFF",
        ),
        (
            lambda workers: experimental_distribute_dataset(
                InputWorkers(2, workers.worker_index, workers.worker_index + 1, group=workers.group),
                batches(8, 4),
            ),
            "the same number of replicas: worker 0 has 1, worker 1 has 2",
        ),
    ],
)
def test_inputs_that_do_not_go_together_are_refused_on_all_workers(make, match):
    for outcome in run(2, make, check=False):
        assert isinstance(outcome, DatasetError)
        assert match in str(outcome)


def test_epochs_that_do_not_go_together_are_refused():
    def program():
        workers = workers_here()
        first, second = (experimental_distribute_dataset(workers, batches(8, 4)) for _ in range(2))
        steps(first)
        return steps(first if workers.worker_index == 0 else second)

    with FakeCluster(2) as cluster:
        for outcome in cluster.run(program, check=False):
            assert isinstance(outcome, DatasetError)
            assert "equally often: worker 0 has 1, worker 1 has 0" in str(outcome)


def test_a_lost_worker_is_named():
    def program():
        dataset = experimental_distribute_dataset(workers_here(), batches(8, 4))
        iterator = iter(dataset)
        next(iterator)
        if config.client_id() == 1:
            raise SystemExit("gone")
        return next(iterator)

    with FakeCluster(2) as cluster:
        survivor, _ = cluster.run(program, check=False)
    assert isinstance(survivor, PeerLostError)
    assert survivor.rank == 1
