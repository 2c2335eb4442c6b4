"""What a strategy makes of what replicas returned."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.distribute.replicas import LAYOUTS, on_clients, replica_id

from dmesh import Variable, VariableAggregation, VariableSynchronization
from dmesh.distribute import MirroredStrategy, OneDeviceStrategy, PerReplica, get_replica_context
from dmesh.errors import ReplicaMismatchError, StrategyValueError


def rows(own: int) -> np.ndarray:
    """A batch of another size on each replica; the first has none."""
    return np.arange(own * 2.0).reshape(own, 2)


@pytest.mark.parametrize(("clients", "replicas"), LAYOUTS)
def test_reduce_over_replicas_and_axes(clients, replicas) -> None:
    def program(strategy):
        scalars = strategy.run(lambda: {"loss": replica_id() * 1.0, "count": 1})
        batches = strategy.run(lambda: rows(replica_id()))
        return (
            strategy.reduce("SUM", scalars, axis=None),
            strategy.reduce("MEAN", scalars, axis=None)["loss"],
            strategy.reduce("SUM", batches, axis=0),
            strategy.reduce("MEAN", batches, axis=0) if clients * replicas > 1 else None,
            strategy.reduce("SUM", batches, axis=(0, 1)),
        )

    count = clients * replicas
    everything = np.concatenate([rows(own) for own in range(count)])
    for summed, mean, over_rows, mean_of_rows, over_all in on_clients(clients, replicas, program):
        assert summed == {"loss": count * (count - 1) / 2, "count": count}
        assert mean == (count - 1) / 2
        np.testing.assert_array_equal(over_rows, everything.sum(axis=0))
        if mean_of_rows is not None:
            np.testing.assert_allclose(mean_of_rows, everything.mean(axis=0), rtol=1e-15)
        assert over_all == everything.sum()


def test_means_of_nested_structures_along_an_axis() -> None:
    def program(strategy):
        value = strategy.run(lambda: {"x": rows(replica_id()), "y": [np.array([replica_id()])]})
        mean = strategy.reduce("MEAN", value, axis=0)
        assert not mean["x"].flags.writeable
        with pytest.raises(StrategyValueError, match="is not distributed"):
            strategy.reduce("MEAN", {**value, "y": [np.ones(2)]}, axis=0)
        return mean

    everything = np.concatenate([rows(own) for own in range(4)])
    for mean in on_clients(2, 2, program):
        np.testing.assert_allclose(mean["x"], everything.mean(axis=0), rtol=1e-15)
        assert mean["y"] == [1.5]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_a_mean_along_an_axis_has_the_dtype_of_one_over_replicas_alone(dtype) -> None:
    def program(strategy):
        value = strategy.run(lambda: np.ones(3, dtype))
        return [strategy.reduce("MEAN", value, axis).dtype for axis in (0, None)]

    assert on_clients(2, 2, program) == [[np.dtype(dtype)] * 2] * 2


@pytest.mark.parametrize(("clients", "replicas"), LAYOUTS)
def test_gather_in_the_order_of_replicas(clients, replicas) -> None:
    def program(strategy):
        return strategy.gather(strategy.run(lambda: rows(replica_id())), 0)

    everything = np.concatenate([rows(own) for own in range(clients * replicas)])
    for gathered in on_clients(clients, replicas, program):
        np.testing.assert_array_equal(gathered, everything)


def test_values_that_are_not_distributed() -> None:
    def program(strategy):
        assert strategy.reduce("MEAN", 3.0, axis=None) == 3.0
        assert strategy.reduce("SUM", 0, axis=None) == 0
        np.testing.assert_array_equal(strategy.reduce("MEAN", np.ones((4, 2)), axis=0), [1, 1])
        with pytest.raises(ValueError, match=r"3\.0 is not distributed"):
            strategy.reduce("SUM", 3.0, axis=None)
        with pytest.raises(StrategyValueError, match="is not distributed, so it has no SUM"):
            strategy.reduce("SUM", np.ones(2), axis=0)
        with pytest.raises(StrategyValueError, match="nothing to gather"):
            strategy.gather(np.ones(2), 0)
        assert strategy.experimental_local_results(7) == (7,)
        nested = {"a": PerReplica([1, 2]), "b": [None, 3]}
        assert strategy.experimental_local_results(nested) == (
            {"a": 1, "b": [None, 3]},
            {"a": 2, "b": [None, 3]},
        )
        with pytest.raises(StrategyValueError, match="belongs to another strategy"):
            strategy.experimental_local_results([PerReplica([1, 2, 3])])

    on_clients(1, 2, program)


@pytest.mark.parametrize("axis", [1, -2, (0, 1), (0, 0), "0", 0.0, True, ["0"]])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_axes_that_cannot_be_reduced(op, axis) -> None:
    strategy = OneDeviceStrategy("CPU:0")
    with pytest.raises(ValueError, match="reduce got axis") as caught:
        strategy.reduce(op, strategy.run(lambda: np.ones(2)), axis)
    assert type(caught.value) is StrategyValueError


def test_values_that_cannot_be_gathered() -> None:
    strategy = OneDeviceStrategy("CPU:0")
    with pytest.raises(StrategyValueError, match="a scalar has no axis"):
        strategy.gather(1.0, 0)
    with pytest.raises(StrategyValueError, match="axis -2 for an array of 1"):
        strategy.gather(np.ones(1), -2)
    np.testing.assert_array_equal(strategy.gather(np.ones(1), 0), [1])


def test_a_replica_whose_value_is_unlike_the_others_is_named_to_all() -> None:
    def program(strategy):
        values = strategy.run(lambda: np.ones(2 + replica_id() // 3))
        with pytest.raises(ReplicaMismatchError) as reduced:
            strategy.reduce("SUM", values, axis=None)
        with pytest.raises(ReplicaMismatchError) as gathered:
            strategy.gather(strategy.run(lambda: np.ones((1, 2 + replica_id() // 3))), 0)
        return [(caught.value.replicas, str(caught.value)) for caught in (reduced, gathered)]

    for (reduced, why), (gathered, _) in on_clients(2, 2, program):
        assert reduced == gathered == (3,)
        assert "replica 3 (client 1): taking part in reduce SUM of float64[3]" in why


@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.sampled_from(["float16", "int32", "bool"]))
def test_sums_and_means_are_those_of_all_rows(lengths, dtype) -> None:
    parts = [(np.arange(length * 3) % 2).reshape(length, 3).astype(dtype) for length in lengths]

    def program(strategy):
        value = PerReplica(parts)
        together = np.concatenate(parts)
        np.testing.assert_array_equal(strategy.reduce("SUM", value, axis=0), together.sum(axis=0))
        if len(together):
            mean = strategy.reduce("MEAN", value, axis=0)
            np.testing.assert_allclose(mean, together.astype(float).mean(axis=0), rtol=1e-3)

    on_clients(1, 2, program)


# -- accumulation: as the collectives do, whatever the dtype -------------------------------------------------

SHORT = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)]


def one_client(monkeypatch, replicas: int) -> MirroredStrategy:
    monkeypatch.setenv("DMESH_NUM_CPU_DEVICES", str(replicas))
    return MirroredStrategy()


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("rows", [1_000, 100_000])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_mean_of_many_rows_of_a_short_float_is_their_mean(monkeypatch, replicas, rows, dtype) -> None:
    strategy = one_client(monkeypatch, replicas)
    value = PerReplica([np.full((rows, 2), 100, dtype)] * replicas)
    hundred = np.array(100, dtype)
    for axis in (0, (0, 1), 1):
        mean = strategy.reduce("MEAN", value, axis)
        assert mean.dtype == dtype
        np.testing.assert_array_equal(mean.astype(float), float(hundred))


def test_a_mean_of_integers_along_an_axis_does_not_overflow(monkeypatch) -> None:
    strategy = one_client(monkeypatch, 2)
    largest = np.full(3, np.iinfo(np.int64).max)
    assert strategy.reduce("MEAN", PerReplica([largest, largest]), axis=0) == float(largest[0])
    assert strategy.reduce("MEAN", PerReplica([np.full(300, 200, np.uint8)] * 2), axis=0) == 200.0


def test_a_mean_of_many_rows_on_all_clients() -> None:
    def program(strategy):
        value = strategy.run(lambda: np.full(1_000, 100, ml_dtypes.bfloat16))
        return [float(strategy.reduce(op, value, axis=0)) for op in ("MEAN", "SUM")]

    for clients, replicas in LAYOUTS:
        total = float(np.array(100_000 * clients * replicas, ml_dtypes.bfloat16))
        assert on_clients(clients, replicas, program) == [[100.0, total]] * clients


def numbers(dtype: np.dtype, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    drawn = np.random.default_rng(seed).uniform(0.5, 8, shape)
    return drawn.astype(dtype)


def tolerance(dtype: np.dtype, terms: int) -> float:
    """Relative error of a sum of positive numbers that is added up in float32, at least, and rounded once."""
    accumulator = np.float64 if dtype == np.float64 else np.float32
    return float(ml_dtypes.finfo(dtype).eps) + terms * float(np.finfo(accumulator).eps)


@given(
    dtype=st.sampled_from([*map(np.dtype, (np.float32, np.float64)), *SHORT[:2]]),
    replicas=st.integers(1, 4),
    rows=st.integers(1, 400),
    seed=st.integers(0, 1 << 30),
)
def test_all_that_adds_up_agrees_with_float64(dtype, replicas, rows, seed) -> None:
    parts = [numbers(dtype, seed + replica, (rows, 2)) for replica in range(replicas)]
    reference = np.stack([part.astype(np.float64) for part in parts])
    rtol = tolerance(dtype, rows * replicas)

    with pytest.MonkeyPatch.context() as monkeypatch:
        strategy = one_client(monkeypatch, replicas)

    def same(found, wanted) -> None:
        np.testing.assert_allclose(np.asarray(found).astype(np.float64), wanted, rtol=rtol)

    value = PerReplica(parts)
    for axis, over in ((None, 0), (0, (0, 1)), ((0, 1), (0, 1, 2))):
        same(strategy.reduce("SUM", value, axis), reference.sum(over))
        same(strategy.reduce("MEAN", value, axis), reference.mean(over))
    same(strategy.extended.reduce_to("SUM", value), reference.sum(0))

    with strategy.scope():
        variables = {
            op: Variable(np.zeros((rows, 2)), dtype=dtype, aggregation=VariableAggregation[op])
            for op in ("SUM", "MEAN")
        }
        reads = {
            op: Variable(
                np.zeros((rows, 2)),
                dtype=dtype,
                aggregation=VariableAggregation[op],
                synchronization=VariableSynchronization.ON_READ,
            )
            for op in ("SUM", "MEAN")
        }

    def step(part):
        context = get_replica_context()
        for op in ("SUM", "MEAN"):
            variables[op].assign(part)
            reads[op].assign(part)
        return [context.all_reduce(op, part) for op in ("SUM", "MEAN")], context.all_gather(part, 0)

    reduced, gathered = strategy.run(step, (value,))
    for op, wanted, found in zip(
        ("SUM", "MEAN"), (reference.sum(0), reference.mean(0)), reduced, strict=True
    ):
        same(variables[op], wanted)
        same(reads[op], wanted)
        same(strategy.experimental_local_results(found)[0], wanted)
    np.testing.assert_array_equal(
        strategy.experimental_local_results(gathered)[0], np.concatenate(parts), strict=True
    )
