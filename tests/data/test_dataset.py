"""`Dataset` against plain Python lists, and against what TensorFlow 2.21 answers."""

from __future__ import annotations

from collections import namedtuple
from copy import deepcopy
from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    Options,
    TensorSpec,
)
from dmesh.data.experimental import SHARD_HINT, AutoShardPolicy, DistributeOptions, Optional
from dmesh.errors import ArgumentTypeError, DatasetError, ShardHintError

Point = namedtuple("Point", "x y")
sizes = st.integers(0, 30)


def values(dataset):
    return [element.tolist() for element in dataset]


def batched(numbers, size, drop):
    whole = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    return [piece for piece in whole if len(piece) == size or not drop]


# -- operators against lists ---------------------------------------------------------------------------------


@given(sizes, st.integers(1, 12), st.booleans())
def test_batch_and_unbatch(length, size, drop):
    numbers = list(range(length))
    dataset = Dataset.range(length).batch(size, drop)
    expected = batched(numbers, size, drop)
    assert values(dataset) == expected
    assert len(dataset) == dataset.cardinality() == len(expected)
    assert values(dataset.unbatch()) == [number for piece in expected for number in piece]


@given(sizes, st.integers(1, 12), st.booleans())
def test_batches_are_the_same_however_they_are_made(length, size, drop):
    rows = np.arange(length * 2).reshape(length, 2)
    straight = Dataset.from_tensor_slices(rows).batch(size, drop)
    one_by_one = Dataset.from_tensor_slices(rows).map(lambda row: row).batch(size, drop)
    assert values(straight) == values(one_by_one) == batched(rows.tolist(), size, drop)


@given(sizes, st.integers(1, 9), st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any))
def test_rebatch_makes_the_sizes_in_turn_and_loses_nothing(length, size, wanted):
    made = values(Dataset.range(length).batch(size).rebatch(wanted))
    assert [number for piece in made for number in piece] == list(range(length))
    for index, piece in enumerate(made[:-1]):
        assert len(piece) == wanted[index % len(wanted)]


@given(sizes, st.integers(1, 40), st.integers(-5, 2**70), st.booleans())
def test_shuffle_keeps_every_element_and_its_order_follows_from_the_seed(length, buffer, seed, reshuffle):
    def make():
        return Dataset.range(length).shuffle(buffer, seed, reshuffle)

    dataset = make()
    first, second = values(dataset), values(dataset)
    assert sorted(first) == sorted(second) == list(range(length))
    again = make()
    assert [values(again), values(again)] == [first, second]
    if not reshuffle:
        assert first == second
    for position, number in enumerate(first):
        assert number < position + buffer, "no element comes before it can have been in the buffer"


def test_shuffle_mixes_evenly_and_differs_from_epoch_to_epoch():
    dataset = Dataset.range(8).shuffle(8, seed=3)
    epochs = [tuple(values(dataset)) for _ in range(400)]
    assert len(set(epochs)) > 390
    means = np.mean(epochs, axis=0)
    assert np.all(np.abs(means - 3.5) < 0.5)


def test_shuffle_without_seed_has_an_order_of_its_own_that_may_be_kept():
    orders = {tuple(values(Dataset.range(50).shuffle(50))) for _ in range(3)}
    assert len(orders) == 3
    kept = Dataset.range(50).shuffle(50, reshuffle_each_iteration=False)
    assert values(kept) == values(kept)


@given(sizes, st.integers(-2, 35), st.integers(-2, 35), st.integers(1, 5), st.data())
def test_take_skip_shard_and_repeat(length, taken, skipped, shards, data):
    numbers = list(range(length))
    index = data.draw(st.integers(0, shards - 1))
    cases = [
        (Dataset.range(length).take(taken), numbers if taken < 0 else numbers[:taken]),
        (Dataset.range(length).skip(skipped), [] if skipped < 0 else numbers[skipped:]),
        (Dataset.range(length).shard(shards, index), numbers[index::shards]),
        (Dataset.range(length).repeat(shards), numbers * shards),
        (Dataset.range(length).repeat().take(40), (numbers * 40)[:40] if numbers else []),
        (Dataset.range(length).concatenate(Dataset.range(shards)), numbers + list(range(shards))),
    ]
    for dataset, expected in cases:
        assert values(dataset) == expected
        assert dataset.cardinality() == len(expected), dataset


@given(sizes, st.sampled_from([None, 1, 3, AUTOTUNE]))
def test_map_and_filter(length, calls):
    dataset = Dataset.range(length).map(lambda x: x * x, calls).filter(lambda x: x % 2 == 0)
    assert values(dataset) == [x * x for x in range(length) if x % 2 == 0]
    assert dataset.cardinality() == UNKNOWN_CARDINALITY
    assert bool(dataset)


@given(sizes, sizes)
def test_zip_and_enumerate(one, other):
    zipped = Dataset.zip(Dataset.range(one), Dataset.range(other).enumerate(start=5))
    assert [(int(a), (int(i), int(b))) for a, (i, b) in zipped] == [
        (a, (b + 5, b)) for a, b in zip(range(one), range(other), strict=False)
    ]
    assert len(zipped) == min(one, other)
    assert [int(number) for number, _ in Dataset.range(one).enumerate(-3)] == list(range(-3, one - 3))


def test_zip_keeps_the_structure_that_it_is_given():
    one, other = Dataset.range(3), Dataset.range(10, 20)
    assert values(Dataset.zip(one)) == values(Dataset.zip(datasets=one)) == [0, 1, 2]
    points = Dataset.zip(Point(one, other))
    assert list(points) == [Point(0, 10), Point(1, 11), Point(2, 12)]
    assert isinstance(next(iter(points.batch(2))), Point)
    nested = Dataset.zip({"a": one, "b": (other, points)})
    scalar = TensorSpec([], np.int64)
    assert nested.element_spec == {"a": scalar, "b": (scalar, Point(scalar, scalar))}
    assert list(nested)[1] == {"a": 1, "b": (11, Point(1, 11))}
    [batch] = nested.batch(4)
    np.testing.assert_array_equal(batch["b"][1].y, [10, 11, 12])
    assert [a + x + y for a, (x, y) in Dataset.zip(one, (other, one))] == [10, 13, 16]
    reader = iter(nested)
    next(reader)
    again = iter(nested)
    again.restore(reader.state())
    assert list(again) == list(reader)


@pytest.mark.parametrize(
    "given",
    [{}, {"datasets": ()}, {"datasets": [Dataset.range(1)]}, {"datasets": (Dataset.range(1), [])}],
    ids=["nothing", "empty", "list", "list inside"],
)
def test_zip_refuses_what_is_no_structure_of_datasets(given):
    with pytest.raises(ArgumentTypeError, match=r"Dataset.zip\(\) takes"):
        Dataset.zip(**given)
    with pytest.raises(ArgumentTypeError, match="not both"):
        Dataset.zip(Dataset.range(1), datasets=Dataset.range(1))


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-5, 5).filter(bool), st.integers(1, 4))
def test_range_is_that_of_python(start, stop, step, size):
    assert values(Dataset.range(start, stop, step)) == list(range(start, stop, step))
    assert values(Dataset.range(start, stop, step).batch(size)) == batched(
        list(range(start, stop, step)), size, False
    )


def test_cardinalities_are_those_of_the_reference():
    ten = Dataset.range(10).batch(4)
    datasets = [
        ten, Dataset.range(10).batch(4, drop_remainder=True), ten.repeat(3), ten.repeat(), ten.take(2),
        ten.skip(2), ten.shard(2, 0), ten.shard(2, 1), ten.repeat().take(7), ten.repeat().skip(7),
        ten.unbatch(), ten.repeat().filter(lambda x: True), ten.filter(lambda x: True).repeat(0),
        Dataset.range(0).batch(4).repeat(),
    ]  # fmt: skip
    assert [dataset.cardinality() for dataset in datasets] == [3, 2, 9, -1, 2, 1, 2, 1, 7, -1, -2, -2, 0, 0]
    assert Dataset.zip(ten.repeat(), ten).cardinality() == 3
    assert ten.concatenate(ten.repeat()).cardinality() == INFINITE_CARDINALITY


# -- structures ----------------------------------------------------------------------------------------------


def test_structures_come_through_every_step():
    source = {"p": Point(np.arange(6), np.arange(12).reshape(6, 2)), "t": (np.arange(6) * 1.5,)}
    dataset = Dataset.from_tensor_slices(source).shuffle(3, seed=1).repeat(2).batch(4).prefetch(1)
    rows = [row for batch in dataset for row in range(len(batch["p"].x))]
    assert len(rows) == 12
    batch = next(iter(dataset))
    assert isinstance(batch["p"], Point)
    assert np.array_equal(batch["p"].y[:, 0], batch["p"].x * 2)
    assert np.array_equal(batch["t"][0], batch["p"].x * 1.5)
    assert dataset.element_spec == {
        "p": Point(TensorSpec([None], np.int64), TensorSpec([None, 2], np.int64)),
        "t": (TensorSpec([None], np.float64),),
    }


def test_the_items_of_a_tuple_are_arguments_and_lists_are_arrays():
    dataset = Dataset.from_tensor_slices(([1, 2, 3], [[1.0], [2.0], [3.0]])).map(lambda a, b: [a, b[0]])
    assert values(dataset) == [[1, 1], [2, 2], [3, 3]]
    named = Dataset.from_tensors(Point(1, 2)).map(lambda p: p.x + p.y)
    assert values(named) == [3]


def test_source_arrays_cannot_be_changed_through_elements():
    rows = np.zeros((4, 2))
    for element in Dataset.from_tensor_slices(rows):
        with pytest.raises(ValueError, match="read-only"):
            element += 1
    for batch in Dataset.from_tensor_slices(rows).batch(2):
        batch += 1  # a copy
    assert not rows.any()
    assert rows.flags.writeable


def test_specs_after_map_come_from_one_element_with_rows_left_open():
    calls = []

    def double(x):
        calls.append(x)
        return {"twice": x * 2, "rows": np.zeros((3, 1), np.float32)}

    dataset = Dataset.range(10).batch(4).map(double)
    expected = {"twice": TensorSpec([None], np.int64), "rows": TensorSpec([3, 1], np.float32)}
    assert dataset.element_spec == dataset.element_spec == expected
    assert len(calls) == 1
    assert Dataset.range(10).batch(5, drop_remainder=True).map(double).element_spec["twice"].shape == (5,)
    assert Dataset.range(4).shuffle(2).prefetch(2).element_spec == TensorSpec([], np.int64)


def test_a_spec_says_what_fits():
    spec = TensorSpec([None, 2], np.float32, name="x")
    assert spec.is_compatible_with(np.zeros((7, 2), np.float32))
    assert not spec.is_compatible_with(np.zeros((7, 3), np.float32))
    assert not spec.is_compatible_with(np.zeros((7, 2)))
    assert TensorSpec([], str).is_compatible_with("any length")
    assert TensorSpec(3).shape == (3,)
    with pytest.raises(DatasetError, match="at least 0"):
        TensorSpec([-1])


def test_a_spec_is_compared_with_another_spec():
    some_rows, anything = TensorSpec([None, 2], np.float32), TensorSpec(None, np.float32)
    assert some_rows.is_compatible_with(TensorSpec([7, 2], np.float32))
    assert TensorSpec([7, 2], np.float32).is_compatible_with(some_rows)
    assert anything.is_compatible_with(some_rows)
    assert some_rows.is_compatible_with(anything)
    for other in (TensorSpec([7, 3], np.float32), TensorSpec([2], np.float32), TensorSpec([7, 2], np.int32)):
        assert not some_rows.is_compatible_with(other)


def test_the_number_of_dimensions_may_be_unknown():
    anything = TensorSpec(None, np.int64)
    assert anything.shape is None
    assert anything.is_compatible_with(np.zeros((2, 3), np.int64))
    assert not anything.is_compatible_with(np.zeros(2))
    ragged = Dataset.from_generator(lambda: iter([1, [2, 3], [[4]]]), anything)
    assert ragged.element_spec == anything
    assert values(ragged) == [1, [2, 3], [[4]]]
    assert values(ragged.skip(1).batch(1).unbatch()) == [[2, 3], [[4]]]
    for dataset in (
        ragged.batch(2),
        ragged.unbatch(),
        ragged.take(0),
        ragged.batch(2).rebatch(1),
        ragged.map(lambda x: x * 2),
    ):
        assert dataset.element_spec == anything
    both = Dataset.range(2).concatenate(Dataset.range(4).batch(2))
    assert both.element_spec == anything
    assert values(both) == [0, 1, [0, 1], [2, 3]]
    empty = Dataset.from_generator(lambda: iter([]), anything)
    assert values(empty.map(lambda x: x + 1)) == []


@pytest.mark.parametrize(
    ("length", "sizes", "drop", "rows"),
    [
        (4, 2, False, 2),
        (4, [2, 2], False, 2),
        (4, [2, 1, 1], False, None),
        (4, [0, 2], False, None),
        (5, [2, 2], False, None),
        (5, 2, True, 2),
        (None, 2, False, None),
        (None, [2, 2], True, 2),
    ],
)
def test_the_spec_of_rebatch_has_the_rows_of_all_batches(length, sizes, drop, rows):
    source = Dataset.range(8).batch(4) if length is None else Dataset.range(20).batch(length, True)
    dataset = source.rebatch(sizes, drop)
    assert dataset.element_spec == TensorSpec([rows], np.int64)
    assert all(dataset.element_spec.is_compatible_with(batch) for batch in dataset)
    assert dataset.batch(1).element_spec == TensorSpec([None, rows], np.int64)


# -- generators and other iterables --------------------------------------------------------------------------


def test_a_generator_is_read_again_and_closed():
    closed = []

    def generate(stop):
        try:
            yield from range(stop)
        finally:
            closed.append(True)

    dataset = Dataset.from_generator(generate, TensorSpec([], np.int32), args=(4,))
    assert values(dataset) == values(dataset) == [0, 1, 2, 3]
    assert all(element.dtype == np.int32 for element in dataset)
    closed.clear()
    iterator = iter(dataset.map(lambda x: x).batch(2))
    next(iterator)
    iterator.close()
    assert closed == [True]


def test_what_a_generator_yields_is_checked():
    def make(*yielded):
        return Dataset.from_generator(lambda: iter(yielded), TensorSpec([2], np.int8))

    assert values(make([1, 2])) == [[1, 2]]
    for wrong in ([1, 2, 3], [1, 300], [1.5, 2.5]):
        with pytest.raises(ArgumentTypeError, match="element 1 of the generator has an array of"):
            list(make([1, 2], wrong))
    with pytest.raises(
        DatasetError, match=r"element 0 of the generator has the structure \(\*, \*\), expected \*"
    ):
        list(make((1, 2)))
    changing = Dataset.from_generator(lambda: iter([(1, 2), 3]))
    with pytest.raises(DatasetError, match=r"element 1 of the generator has the structure \*"):
        list(changing)


def test_an_iterable_that_can_be_read_again_is_a_dataset():
    class Loader:
        def __iter__(self):
            return iter([[np.ones((2, 3)), np.zeros(2)], [np.ones((1, 3)), np.zeros(1)]])

    dataset = Dataset.from_iterable(Loader())
    assert [(x.shape, y.shape) for x, y in dataset] == [((2, 3), (2,)), ((1, 3), (1,))]
    assert dataset.element_spec == (TensorSpec([None, 3], float), TensorSpec([None], float))
    assert dataset.cardinality() == UNKNOWN_CARDINALITY
    assert len(Dataset.from_iterable([[1, 2], [3]])) == 2
    assert Dataset.from_iterable(dataset) is dataset


@pytest.mark.parametrize("once", [iter([1]), (x for x in [1]), zip([1], strict=True)])
def test_what_can_be_read_once_only_is_refused(once):
    with pytest.raises(ArgumentTypeError, match=r"can be read only once.*from_generator"):
        Dataset.from_iterable(once)


@pytest.mark.parametrize("other", [3, None, "text", np.zeros(3), {"a": [1]}])
def test_what_is_no_dataset_is_refused(other):
    with pytest.raises(ArgumentTypeError, match="expected a dmesh"):
        Dataset.from_iterable(other)


# -- errors of the reference ---------------------------------------------------------------------------------


def bad(function, error, match):
    return pytest.param(function, error, match, id=match)


ten = Dataset.range(10)


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        bad(lambda: ten.batch(0), DatasetError, "batch_size must be at least 1, got 0"),
        bad(lambda: ten.batch(2.5), ArgumentTypeError, "batch_size must be an integer, got 2.5"),
        bad(lambda: ten.batch(True), ArgumentTypeError, "batch_size must be an integer, got True"),
        bad(lambda: ten.rebatch([0, 0]), DatasetError, "needs a size of at least 1"),
        bad(lambda: ten.rebatch([2, -1]), DatasetError, "at least 0, got -1"),
        bad(lambda: ten.shuffle(0), DatasetError, "buffer_size must be at least 1"),
        bad(lambda: ten.prefetch(-2), DatasetError, "buffer_size must be at least -1"),
        bad(lambda: ten.shard(0, 0), DatasetError, "num_shards must be at least 1, got 0"),
        bad(lambda: ten.shard(2, 2), DatasetError, "index must be from 0 to 1, got 2"),
        bad(lambda: ten.shard(2, -1), DatasetError, "index must be from 0 to 1, got -1"),
        bad(lambda: list(ten.shard(SHARD_HINT, SHARD_HINT)), ShardHintError, "AutoShardPolicy.HINT"),
        bad(lambda: Dataset.range(1, 5, 0), DatasetError, "must not be 0"),
        bad(lambda: Dataset.range(), ArgumentTypeError, "1 to 3 integers, got 0"),
        bad(lambda: ten.concatenate(Dataset.from_tensors(1.0)), ArgumentTypeError, "same dtypes"),
        bad(lambda: ten.concatenate(Dataset.from_tensors((1, 2))), ArgumentTypeError, "has the structure"),
        bad(lambda: ten.concatenate([1]), ArgumentTypeError, "takes a Dataset, got list"),
        bad(lambda: Dataset.from_tensor_slices(([1, 2], [1, 2, 3])), DatasetError, r"equal first.*\[2, 3\]"),
        bad(
            lambda: Dataset.from_tensor_slices(1),
            DatasetError,
            "along their first dimension, but one has none",
        ),
        bad(lambda: Dataset.from_tensor_slices(()), DatasetError, "at least one array"),
        bad(lambda: Dataset.from_tensors(None), ArgumentTypeError, "NoneType None"),
        bad(
            lambda: Dataset.from_tensors({"a": (1, object())}),
            ArgumentTypeError,
            r"\['a'\]\[1\], object .*cannot become",
        ),
        bad(
            lambda: Dataset.from_tensors([[1], [1, 2]]),
            ArgumentTypeError,
            "use a tuple or a dict instead of a list",
        ),
        bad(lambda: Dataset.from_generator([1]), ArgumentTypeError, "function that returns an iterator"),
        bad(lambda: Dataset.from_generator(list, np.int32), ArgumentTypeError, "structure of dmesh.data.T"),
        bad(lambda: ten.map(3), ArgumentTypeError, "map_func must be a function, got int"),
        bad(lambda: ten.map(abs, 0), DatasetError, "num_parallel_calls must be at least 1"),
        bad(lambda: list(ten.map(lambda x: None)), ArgumentTypeError, r"what the function given to map\(\)"),
        bad(lambda: list(ten.filter(lambda x: x)), ArgumentTypeError, "must return a bool, got int64"),
        bad(lambda: list(ten.unbatch()), DatasetError, "without dimensions"),
        bad(lambda: ten.apply(lambda d: 3), ArgumentTypeError, "must return a Dataset, got int"),
        bad(lambda: ten.with_options(3), ArgumentTypeError, "takes dmesh.data.Options"),
        bad(lambda: Dataset(3), ArgumentTypeError, "create a Dataset with"),
        bad(lambda: len(ten.repeat()), TypeError, "is infinite"),
        bad(lambda: len(ten.filter(lambda x: True)), TypeError, "unknown until"),
        bad(lambda: Dataset.from_generator(lambda: iter([])).element_spec, DatasetError, "output_signature"),
        bad(
            lambda: list(Dataset.from_generator(lambda: iter([[1], [1, 2]])).batch(2)),
            DatasetError,
            r"element 0 of the batch has \(1,\), element 1 has \(2,\)",
        ),
        bad(
            lambda: list(Dataset.from_generator(lambda: iter([1, 1.5])).batch(2)),
            DatasetError,
            "element 0 of the batch is int64, element 1 is float64",
        ),
        bad(
            lambda: list(Dataset.from_tensors(([1, 2], [1])).rebatch(1)),
            DatasetError,
            r"equal numbers of rows, but the element's have \[2, 1\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(function, error, match):
    with pytest.raises(error, match=match):
        function()


def test_an_error_of_the_users_function_is_that_error():
    def fail(x):
        if x == 3:
            raise ZeroDivisionError("three")
        return x

    for calls in (None, 3):
        iterator = iter(Dataset.range(10).map(fail, calls))
        assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ZeroDivisionError, match="three"):
            next(iterator)


def test_arguments_about_speed_change_no_order():
    dataset = Dataset.range(20).map(lambda x: x * 2, AUTOTUNE, False)
    batched = dataset.batch(3, drop_remainder=True, num_parallel_calls=AUTOTUNE, deterministic=False)
    assert [batch.tolist() for batch in batched] == np.arange(0, 36, 2).reshape(6, 3).tolist()


# -- options and the rest ------------------------------------------------------------------------------------


def test_the_last_options_win_and_come_through():
    options = Options()
    assert options.experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    dataset = Dataset.range(4).with_options(options).batch(2)
    assert dataset.options() == options
    assert dataset.with_options(Options()).options() == options, "options that say nothing change nothing"
    automatic = Options()
    automatic.experimental_distribute.auto_shard_policy = AutoShardPolicy.AUTO
    assert dataset.with_options(automatic).options() == automatic == Options() != options
    assert values(dataset) == [[0, 1], [2, 3]]
    with pytest.raises(TypeError, match="AutoShardPolicy, got 'x'"):
        options.experimental_distribute.auto_shard_policy = "x"
    with pytest.raises(AttributeError):
        options.unknown = 1


def test_options_that_are_changed_later_change_no_dataset():
    options = Options()
    dataset = Dataset.range(4).with_options(options)
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    assert dataset.options() == Options()


def test_options_of_a_dataset_cannot_be_changed_but_copied():
    dataset = Dataset.range(4).with_options(Options())
    found = dataset.options()
    with pytest.raises(ValueError, match="pass it to with_options"):
        found.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    with pytest.raises(ValueError, match="pass it to with_options"):
        found.experimental_distribute.num_devices = 2
    with pytest.raises(ValueError, match="pass it to with_options"):
        found.experimental_distribute = DistributeOptions()
    assert dataset.options() == dataset.with_options(found).options() == Options()
    mine = deepcopy(found)
    mine.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    assert dataset.with_options(mine).options() == mine != found


def test_many_datasets_follow_each_other():
    dataset = Dataset.from_tensors(0)
    for number in range(1, 2000):
        dataset = dataset.concatenate(Dataset.from_tensors(number))
    assert (len(dataset), dataset.element_spec) == (2000, TensorSpec((), np.int64))
    assert values(dataset.map(lambda x: x + 1)) == list(range(1, 2001))
    iterator = iter(dataset)
    for _ in range(1500):
        next(iterator)
    again = iter(dataset)
    again.restore(iterator.state())
    assert next(again) == 1500


def test_reduce_apply_and_numpy_iterator():
    assert Dataset.range(5).reduce(0, lambda total, x: total + int(x)) == 10
    assert values(Dataset.range(4).apply(lambda dataset: dataset.batch(2))) == [[0, 1], [2, 3]]
    assert list(Dataset.range(3).as_numpy_iterator()) == [0, 1, 2]
    assert "Batch <- Range" in repr(Dataset.range(3).batch(2))


def test_endless_datasets_are_read_as_far_as_needed():
    dataset = Dataset.from_generator(count).map(lambda x: x + 1).batch(3)
    assert [batch.tolist() for batch in islice(dataset, 2)] == [[1, 2, 3], [4, 5, 6]]


def test_an_optional_has_a_value_or_none():
    full, empty = Optional.from_value(3), Optional.empty(TensorSpec([]))
    assert full.has_value()
    assert full.get_value() == 3
    assert not empty.has_value()
    assert empty.element_spec == TensorSpec([])
    assert full.element_spec == TensorSpec([], np.int64)
    pair = Optional.from_value({"x": np.zeros((2, 3)), "y": (1.5,)})
    assert pair.element_spec == {"x": TensorSpec([2, 3], np.float64), "y": (TensorSpec([], np.float64),)}
    with pytest.raises(DatasetError, match="no value"):
        empty.get_value()
