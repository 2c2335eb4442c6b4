"""Arrays that replicas hand over one by one, and what becomes of a step that fails meanwhile."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.distribute.replicas import LAYOUTS, on_clients, on_each, replica_id

from dmesh.distribute import MirroredStrategy, get_replica_context
from dmesh.distribute import replicas as of_strategies
from dmesh.distribute.options import CommunicationOptions
from dmesh.errors import (
    ReplicaError,
    ReplicaMismatchError,
    StrategyError,
    StrategyTypeError,
    StrategyValueError,
)

SMALL = CommunicationOptions(bytes_per_pack=64)


@pytest.fixture(params=[1, 64], ids=["no core to spare", "cores to spare"], autouse=True)
def cores(request, monkeypatch):
    """Where there are cores to spare, buckets travel beside the computation."""
    monkeypatch.setattr(of_strategies, "own_cpus", lambda: frozenset(range(request.param)))
    return request.param


def like(dtype: object = np.float32) -> dict[str, np.ndarray]:
    shapes = {"a": (3, 5), "b": (), "c": (7,), "d": (0, 2), "e": (40,)}
    return {key: np.zeros(shape, dtype) for key, shape in shapes.items()}


@pytest.mark.parametrize(("clients", "replicas"), LAYOUTS)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_the_result_is_that_of_an_all_reduce_in_whichever_order(clients, replicas, op) -> None:
    def replica():
        context = get_replica_context()
        own = {key: np.asarray(zeros + replica_id() + 0.5) for key, zeros in like().items()}
        wanted = context.all_reduce(op, own)
        for order in (sorted(own), sorted(own, reverse=True), ["c", "a", "e", "b", "d"]):
            pending = context.begin_all_reduce(op, like(), SMALL)
            for key in order:
                pending.put(key, own[key].copy())
            found = pending.result()
            assert found.keys() == wanted.keys()
            for key in own:
                np.testing.assert_array_equal(found[key], wanted[key], strict=True)
                assert not found[key].flags.writeable
        return True

    assert on_clients(clients, replicas, on_each(replica)) == [(True,) * replicas] * clients


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, np.bool_])
def test_dtypes_are_those_of_an_all_reduce(dtype) -> None:
    def replica():
        context = get_replica_context()
        own = [np.full(3, 1, dtype), np.full((2, 2), 1, dtype)]
        pending = context.begin_all_reduce("MEAN", own)
        for at in (1, 0):
            pending.put(at, own[at].copy())
        for found, wanted in zip(pending.result(), context.all_reduce("MEAN", own), strict=True):
            np.testing.assert_array_equal(found, wanted, strict=True)

    on_clients(2, 1, on_each(replica))
    on_clients(1, 2, on_each(replica))


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=12),
    limit=st.integers(1, 400),
    data=st.data(),
)
def test_sums_agree_with_float64(shapes, limit, data) -> None:
    rng = np.random.default_rng(5)
    values = [[rng.uniform(0.5, 2, shape).astype(np.float32) for shape in shapes] for _ in range(2)]
    order = data.draw(st.permutations(range(len(shapes))))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DMESH_NUM_CPU_DEVICES", "2")
        strategy = MirroredStrategy()

    def replica():
        own = values[replica_id()]
        options = CommunicationOptions(bytes_per_pack=limit)
        pending = get_replica_context().begin_all_reduce("SUM", tuple(own), options)
        for at in order:
            pending.put(at, own[at].copy())
        return pending.result()

    for found in strategy.experimental_local_results(strategy.run(replica)):
        assert type(found) is tuple
        for got, one, other in zip(found, *values, strict=True):
            np.testing.assert_allclose(got, one.astype(float) + other, rtol=1e-6)


@pytest.mark.parametrize("cores", [64], indirect=True)
def test_a_bucket_travels_while_the_replica_computes(cores) -> None:
    arrived = threading.Barrier(2, timeout=20)

    def replica():
        pending = get_replica_context().begin_all_reduce("SUM", [np.zeros(8), np.zeros(8)], SMALL)
        pending.put(1, np.ones(8))
        first = pending._buckets._reduced[0]
        np.testing.assert_array_equal(first.result(20), np.full(8, 2.0))  # before the other array is there
        arrived.wait()
        pending.put(0, np.ones(8))
        return pending.result()

    on_clients(2, 1, on_each(replica))


def test_what_is_put_is_checked_before_it_is_taken() -> None:
    def replica():
        context = get_replica_context()
        with pytest.raises(StrategyTypeError, match="needs a list, tuple or dict of arrays"):
            context.begin_all_reduce("SUM", np.ones(2))
        with pytest.raises(StrategyTypeError, match="needs a list, tuple or dict of arrays"):
            context.begin_all_reduce("SUM", [[np.ones(2)]])
        pending = context.begin_all_reduce("SUM", [np.ones(2), np.ones(3)])
        with pytest.raises(StrategyError, match="before result"):
            context.begin_all_reduce("SUM", [np.ones(2)])
        with pytest.raises(StrategyValueError, match="the key 2; missing are 0, 1"):
            pending.put(2, np.ones(2))
        with pytest.raises(StrategyValueError, match=r"put of 1 needs the shape \(3,\), got \(2,\)"):
            pending.put(1, np.ones(2))
        with pytest.raises(StrategyTypeError, match="put of 1 needs float64, got float32"):
            pending.put(1, np.ones(3, np.float32))
        pending.put(1, np.ones(3))
        with pytest.raises(StrategyValueError, match="the key 1; missing are 0"):
            pending.put(1, np.ones(3))
        with pytest.raises(StrategyValueError, match="missing are 0"):
            pending.result()
        assert repr(pending) == "<PendingReduction: 1 of 2 arrays are missing>"
        pending.put(0, np.ones(2))
        return [float(one.sum()) for one in pending.result()]

    for clients, replicas in LAYOUTS:
        count = clients * replicas
        for of_client in on_clients(clients, replicas, on_each(replica)):
            assert list(of_client) == [[2.0 * count, 3.0 * count]] * replicas


def test_the_only_replica_of_the_default_strategy_has_it_too() -> None:
    context = get_replica_context()
    pending = context.begin_all_reduce("MEAN", [np.ones(2)])
    pending.put(0, np.full(2, 3.0))
    np.testing.assert_array_equal(pending.result()[0], [3.0, 3.0])


def failing(kind: str):
    def replica():
        context = get_replica_context()
        count = 3 if kind == "other shapes" and replica_id() == 1 else 2
        pending = context.begin_all_reduce("SUM", [np.zeros(8)] * count, SMALL)
        pending.put(count - 1, np.ones(8))
        if replica_id() == 1:
            if kind == "raises":
                raise KeyError("no gradient")
            if kind == "returns":
                return
            if kind == "all_reduce":
                context.all_reduce("SUM", 1.0)
        for at in range(count - 1):
            pending.put(at, np.ones(8))
        pending.result()

    return replica


@pytest.mark.parametrize(("clients", "replicas"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("raises", "no gradient"),
        ("returns", r"before result\(\) of <PendingReduction: 1 of 2"),
        ("all_reduce", "waiting in all_reduce SUM of float64"),
        ("other shapes", r"waiting in begin_all_reduce SUM of float64\[8\], float64\[8\], float64\[8\]"),
    ],
)
def test_a_replica_that_fails_meanwhile_is_named_to_all_and_the_next_step_runs(
    clients, replicas, kind, text
) -> None:
    def well():
        pending = get_replica_context().begin_all_reduce("SUM", [np.zeros(8)] * 2, SMALL)
        for at in (1, 0):
            pending.put(at, np.ones(8))
        return float(pending.result()[0][0])

    def program(strategy):
        strategy.run(well)
        with pytest.raises((ReplicaError, KeyError, StrategyError), match=text) as caught:
            strategy.run(failing(kind))
        again = strategy.experimental_local_results(strategy.run(well))
        assert again == (clients * replicas,) * replicas
        return caught.value

    at = 1 // replicas
    for client, error in enumerate(on_clients(clients, replicas, program, timeout=30.0)):
        if kind in ("raises", "returns") and client == at:
            assert error.__notes__ == ["raised by replica 1"]
        else:
            assert isinstance(
                error, ReplicaMismatchError if kind in ("all_reduce", "other shapes") else ReplicaError
            )
            assert 1 in error.replicas
