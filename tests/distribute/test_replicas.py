"""Replicas in step: what they exchange, and what becomes of those that fall out of step."""

from __future__ import annotations

import signal
import threading
from queue import Queue

import numpy as np
import pytest
from tests.distribute.replicas import LAYOUTS, on_clients, on_each, replica_id

from dmesh import Variable, VariableSynchronization
from dmesh.distribute import (
    MirroredStrategy,
    PerReplica,
    ReduceOp,
    combining,
    get_replica_context,
    in_cross_replica_context,
)
from dmesh.distribute.options import CommunicationOptions
from dmesh.errors import (
    CollectiveTimeoutError,
    CollectiveTypeError,
    PeerLostError,
    ReplicaError,
    ReplicaMismatchError,
    ReplicaTimeoutError,
    StrategyTypeError,
    StrategyValueError,
)
from dmesh.testing import FakeCluster


@pytest.mark.parametrize(("clients", "replicas"), LAYOUTS)
def test_all_reduce_of_nested_structures(clients, replicas) -> None:
    count = clients * replicas

    def replica():
        own = replica_id()
        context = get_replica_context()
        value = {"a": np.full(3, own + 1.0), "b": (own, [np.float32(own)])}
        return context.all_reduce("SUM", value), context.all_reduce(ReduceOp.MEAN, value)

    total = count * (count - 1) / 2
    for outcome in on_clients(clients, replicas, on_each(replica)):
        for summed, mean in outcome:
            np.testing.assert_array_equal(summed["a"], np.full(3, total + count))
            assert summed["b"] == (total, [total])
            assert summed["b"][1][0].dtype == np.float32
            assert summed["b"][0].dtype == np.int64
            np.testing.assert_array_equal(mean["a"], np.full(3, total / count + 1))
            assert mean["b"] == (total / count, [total / count])
            assert not summed["a"].flags.writeable


@pytest.mark.parametrize(("clients", "replicas"), LAYOUTS)
def test_all_gather_in_the_order_of_replicas_with_lengths_that_differ(clients, replicas) -> None:
    def replica():
        own = replica_id()
        context = get_replica_context()
        return context.all_gather({"rows": np.full((own + 1, 2), own)}, 0), context.all_gather(
            np.full((2, own), own), axis=-1
        )

    for outcome in on_clients(clients, replicas, on_each(replica)):
        for gathered, wide in outcome:
            ids = range(clients * replicas)
            expected = np.concatenate([np.full((own + 1, 2), own) for own in ids])
            np.testing.assert_array_equal(gathered["rows"], expected)
            np.testing.assert_array_equal(
                wide, np.concatenate([np.full((2, own), own) for own in ids], axis=1)
            )


@pytest.mark.parametrize(("clients", "replicas"), LAYOUTS)
def test_merge_call_sees_all_replicas_of_a_client(clients, replicas) -> None:
    def merge(strategy, value, *, factor):
        assert in_cross_replica_context()
        assert strategy is get_strategy_of[threading.get_ident()]
        return strategy.reduce("SUM", value, axis=None) * strategy.experimental_local_results(factor)[0]

    get_strategy_of = {}

    def program(strategy):
        get_strategy_of[threading.get_ident()] = strategy

        def replica():
            return get_replica_context().merge_call(merge, args=(replica_id(),), kwargs={"factor": 2})

        return strategy.experimental_local_results(strategy.run(replica))

    count = clients * replicas
    assert on_clients(clients, replicas, program) == [(count * (count - 1),) * replicas] * clients


def test_what_merge_call_returns_for_each_replica_is_taken_apart() -> None:
    def replica():
        return get_replica_context().merge_call(
            lambda strategy, own: PerReplica([value + 10 for value in own.values]), args=(replica_id(),)
        )

    assert on_clients(1, 3, on_each(replica)) == [(10, 11, 12)]


def test_results_have_the_same_bits_on_all_replicas_and_in_every_run() -> None:
    values = np.random.default_rng(3).standard_normal((4, 1000)) * 10.0 ** np.arange(-2, 2)[:, None]

    def replica():
        return get_replica_context().all_reduce("MEAN", values[replica_id()]).tobytes()

    seen = {bits for _ in range(3) for outcome in on_clients(2, 2, on_each(replica)) for bits in outcome}
    assert len(seen) == 1


def test_arguments_are_taken_apart_and_results_put_together() -> None:
    def program(strategy):
        parts = PerReplica([np.arange(2), np.arange(3)])
        result = strategy.run(lambda x, y, *, z: {"sum": x.sum() + y, "z": z}, (parts, 1), {"z": [parts]})
        assert result["sum"].values == (2, 4)
        assert (
            [len(value) for value in result["z"].values[0:2]] if isinstance(result["z"], PerReplica) else True
        )
        with pytest.raises(StrategyValueError, match="has 3 values, but this client has 2 replicas"):
            strategy.run(lambda x: x, (PerReplica([1, 2, 3]),))
        with pytest.raises(StrategyValueError, match="3 values, but this client has 2"):
            strategy.reduce("SUM", PerReplica([1, 2, 3]), axis=None)

    on_clients(1, 2, program)


def test_threads_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=20)
    assert on_clients(1, 3, on_each(lambda: barrier.wait() >= 0)) == [(True,) * 3]


# -- out of step ---------------------------------------------------------------------------------------------


def outcomes(clients, replicas, replica, **options):
    """Returns what `run` raised on each client; the clients go on and end together."""

    def program(strategy):
        with pytest.raises(Exception) as caught:
            strategy.run(replica)
        assert strategy.run(lambda: get_replica_context().all_reduce("SUM", 1)) is not None
        return caught.value

    return on_clients(clients, replicas, program, **options)


@pytest.mark.parametrize(("clients", "replicas"), [(1, 4), (4, 1), (2, 2)])
def test_a_replica_that_never_reaches_the_all_reduce_is_named_to_all(clients, replicas) -> None:
    def replica():
        if replica_id() != 2:
            get_replica_context().all_reduce("SUM", np.ones(3))

    for error in outcomes(clients, replicas, replica):
        assert isinstance(error, ReplicaMismatchError)
        assert isinstance(error, ValueError)
        assert error.replicas == (2,)
        where = {1: "client 0", 2: "client 1", 4: "client 2"}[clients]
        assert f"replica 2 ({where}): returned" in str(error)
        assert "waiting in all_reduce SUM of float64[3]" in str(error)
        if clients > 1:
            assert f"; see rank {2 // replicas}, /job:worker/task:{2 // replicas} (host " in str(error)


@pytest.mark.parametrize(("clients", "replicas"), [(1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize(
    ("usual", "odd", "text"),
    [
        (lambda c: c.all_reduce("SUM", np.ones(3)), lambda c: c.all_reduce("SUM", np.ones(4)), "float64[4]"),
        (
            lambda c: c.all_reduce("SUM", np.ones(3)),
            lambda c: c.all_reduce("MEAN", np.ones(3)),
            "all_reduce MEAN",
        ),
        (lambda c: c.all_reduce("SUM", 1), lambda c: c.all_reduce("SUM", 1.0), "all_reduce SUM of float64[]"),
        (lambda c: c.all_reduce("SUM", [1]), lambda c: c.all_reduce("SUM", {"a": 1}), "in {'a': *}"),
        (
            lambda c: c.all_reduce("SUM", [1.0] * 300),
            lambda c: c.all_reduce("SUM", [1.0] * 299 + [1]),
            " ... (#",
        ),
        (
            lambda c: c.all_gather(np.ones((1, 2)), 0),
            lambda c: c.all_gather(np.ones((1, 3)), 0),
            "all_gather along axis 0 of float64[?,3]",
        ),
        (
            lambda c: c.all_reduce("SUM", 1),
            lambda c: c.merge_call(print_nothing),
            "merge_call of print_nothing with ((), {})",
        ),
        (
            lambda c: c.merge_call(print_nothing, args=(1,)),
            lambda c: c.merge_call(print_nothing, args=([1],)),
            "merge_call of print_nothing with (([*]), {})",
        ),
    ],
)
def test_replicas_that_call_different_things_are_named_to_all(clients, replicas, usual, odd, text) -> None:
    def replica():
        context = get_replica_context()
        (odd if replica_id() == 3 else usual)(context)

    for error in outcomes(clients, replicas, replica):
        assert isinstance(error, ReplicaMismatchError)
        assert error.replicas == (3,)
        assert text in str(error)


def print_nothing(strategy) -> None:
    """A function to merge."""


@pytest.mark.parametrize(("clients", "replicas"), [(1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("others_wait", [True, False])
def test_a_replica_that_raises_ends_all_and_is_named(clients, replicas, others_wait) -> None:
    ended = Queue()

    def replica():
        if replica_id() == 1:
            raise KeyError("no such row")
        try:
            if others_wait:
                get_replica_context().all_reduce("SUM", 1.0)
        except ReplicaError as error:
            ended.put(str(error))
            raise

    errors = outcomes(clients, replicas, replica)
    for _ in range(clients * replicas - 1 if others_wait else 0):
        assert "no such row" in ended.get(timeout=20), "`run` does not wait for the other replicas to end"
    assert ended.empty()
    at = 1 // replicas
    for client, error in enumerate(errors):
        if client == at:
            assert isinstance(error, KeyError)
            assert error.__notes__ == ["raised by replica 1"]
        else:
            assert type(error) is ReplicaError
            assert error.replicas == (1,)
            assert f"replica 1 (client {at}) raised KeyError: 'no such row'" in str(error)


@pytest.mark.parametrize(("clients", "replicas"), [(1, 2), (2, 1)])
def test_an_exception_that_cannot_be_shown_ends_all_the_same(clients, replicas) -> None:
    class UnshowableError(Exception):
        def __str__(self):
            raise KeyError("no message")

    def replica():
        if replica_id() == 1:
            raise UnshowableError
        get_replica_context().all_reduce("SUM", 1.0)

    errors = outcomes(clients, replicas, replica)
    assert isinstance(errors[-1], UnshowableError)
    for error in errors[:-1]:
        assert "replica 1 (client 1) raised UnshowableError" in str(error)


def test_a_replica_that_does_not_come_in_time_is_named_to_all() -> None:
    waiting, release = threading.Event(), threading.Event()

    def replica():
        if replica_id() == 3:
            release.wait(20)
        elif replica_id() == 2:
            waiting.set()  # client 1 begins to count first, so that it tells the other one in time
        else:
            assert waiting.wait(20)
        return get_replica_context().all_reduce("SUM", 1.0)

    def program(strategy):
        with pytest.raises(ReplicaTimeoutError) as caught:
            strategy.run(replica)
        return caught.value

    try:
        errors = on_clients(2, 2, program, timeout=2.0)
    finally:
        release.set()
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert error.replicas == (3,)
        assert "replica 3 (client 1) did not come in time" in str(error)


@pytest.mark.parametrize(("clients", "replicas"), [(1, 2), (2, 2)])
def test_a_function_that_is_merged_and_raises_is_named_to_all(clients, replicas) -> None:
    def merge(strategy, value):
        if strategy.extended.replicas.placement.client == clients - 1:
            raise ZeroDivisionError("in the merged function")
        return strategy.reduce("SUM", value, axis=None)

    def replica():
        get_replica_context().merge_call(merge, args=(1.0,))

    errors = outcomes(clients, replicas, replica)
    assert isinstance(errors[-1], ZeroDivisionError)
    for error in errors[:-1]:
        assert isinstance(error, ReplicaError)
        assert error.replicas == (2, 3)
        assert "replica 2 (client 1) raised ZeroDivisionError: in the merged function" in str(error)


def test_a_failure_that_a_replica_catches_still_ends_the_step() -> None:
    def replica():
        context = get_replica_context()
        try:
            context.all_reduce("SUM", np.ones(1 + replica_id() // 3))
        except ReplicaError:
            return "went on"
        raise AssertionError

    for clients, replicas in ((4, 1), (1, 4)):
        for error in outcomes(clients, replicas, replica):
            assert isinstance(error, ReplicaMismatchError)


def test_values_that_cannot_be_sent_are_refused() -> None:
    def replica():
        context = get_replica_context()
        with pytest.raises(StrategyTypeError, match="objects cannot be combined"):
            context.all_reduce("SUM", object())
        with pytest.raises(StrategyValueError, match="a scalar has no axis"):
            context.all_gather(1.0, 0)
        with pytest.raises(StrategyValueError, match="axis 2 for an array of 1"):
            context.all_gather(np.ones(1), 2)
        with pytest.raises(StrategyValueError, match="not a valid ReduceOp"):
            context.all_reduce("MAX", 1.0)
        with pytest.raises(StrategyTypeError, match="CommunicationOptions"):
            context.all_reduce("SUM", 1.0, options={})
        with pytest.raises(StrategyValueError, match="bytes_per_pack"):
            CommunicationOptions(bytes_per_pack=-1)
        with pytest.raises(StrategyValueError, match="timeout_seconds"):
            CommunicationOptions(timeout_seconds=0)
        return context.all_reduce("SUM", 1.0, CommunicationOptions(bytes_per_pack=64, timeout_seconds=9))

    assert on_clients(2, 2, on_each(replica)) == [(4.0, 4.0)] * 2
    with pytest.raises(CollectiveTypeError):
        on_clients(1, 2, on_each(lambda: get_replica_context().all_reduce("SUM", np.array("text"))))


def test_a_killed_client_is_named_to_all_others() -> None:
    with FakeCluster(3, num_cpu_devices=2) as cluster:
        from dmesh.distribute import MultiWorkerMirroredStrategy

        def program():
            strategy = MultiWorkerMirroredStrategy()

            def replica():
                context = get_replica_context()
                for step in range(10):
                    context.all_reduce("SUM", 1.0)
                    if step == 3 and replica_id() == 3:
                        cluster.kill(1)

            strategy.run(replica)

        errors = cluster.run(program, check=False)
    for client in (0, 2):
        assert isinstance(errors[client], PeerLostError)
        assert errors[client].rank == 1


def test_clients_that_call_different_things_outside_of_replicas() -> None:
    def program(strategy):
        with pytest.raises(ReplicaMismatchError) as caught:
            if strategy.extended.replicas.placement.client:
                strategy.run(lambda: None)
            else:
                strategy.reduce("SUM", PerReplica([1.0, 1.0]), axis=None)
        return str(caught.value)

    for message in on_clients(2, 2, program):
        assert "replicas 0-1 (client 0): taking part in reduce SUM of float64[]" in message
        assert "replicas 2-3 (client 1): returned" in message


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_exits_ends_all(replicas) -> None:
    def replica():
        if replica_id() == 1:
            raise SystemExit(3)
        get_replica_context().all_reduce("SUM", 1.0)

    def program(strategy):
        with pytest.raises((SystemExit, ReplicaError)) as caught:
            strategy.run(replica)
        return str(caught.value)

    messages = on_clients(4 // replicas, replicas, program)
    at = 1 // replicas
    assert messages[at] == "3"
    assert all("raised SystemExit: 3" in text for client, text in enumerate(messages) if client != at)


def test_an_interrupt_ends_the_step_and_its_replicas(monkeypatch) -> None:
    monkeypatch.setenv("DMESH_NUM_CPU_DEVICES", "2")
    strategy = MirroredStrategy()
    ended = threading.Semaphore(0)
    release = threading.Event()

    def replica():
        if replica_id() == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            release.wait(20)
        with pytest.raises(ReplicaError, match="KeyboardInterrupt"):
            get_replica_context().all_reduce("SUM", 1.0)
        ended.release()

    with pytest.raises(KeyboardInterrupt):
        strategy.run(replica)
    release.set()
    for _ in range(2):
        assert ended.acquire(timeout=20)
    assert strategy.experimental_local_results(strategy.run(replica_id)) == (0, 1)


def test_a_replica_that_the_step_did_not_wait_for_changes_nothing_any_more(monkeypatch) -> None:
    monkeypatch.setenv("DMESH_NUM_CPU_DEVICES", "2")
    strategy = MirroredStrategy()
    with strategy.scope():
        count = Variable(0.0, synchronization=VariableSynchronization.ON_READ)
    release, late = threading.Event(), Queue()

    def replica():
        if replica_id() == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            release.wait(20)
            with pytest.raises(ReplicaError, match="KeyboardInterrupt") as caught:
                count.assign_add(1.0)
            late.put(caught.value)

    with pytest.raises(KeyboardInterrupt):
        strategy.run(replica)
    release.set()
    assert isinstance(late.get(timeout=20), ReplicaError)
    assert [float(copy) for copy in count.values] == [0, 0]


def test_a_client_whose_only_replica_does_not_come_is_named() -> None:
    release = threading.Event()

    def program(strategy):
        try:
            strategy.run(lambda: replica_id() == 1 and release.wait(20))
        except CollectiveTimeoutError as error:
            return error
        finally:
            release.set()

    errors = on_clients(2, 1, program, timeout=1.0)
    assert errors[0].missing == (1,)


def test_an_all_reduce_is_compiled_once_for_its_dtypes_and_shapes(monkeypatch) -> None:
    made = []
    compile_reduction = combining.Reduction.__init__
    monkeypatch.setattr(
        combining.Reduction,
        "__init__",
        lambda self, *args, **named: (made.append(args), compile_reduction(self, *args, **named))[1],
    )

    def replica():
        context = get_replica_context()
        for value in range(3):
            context.all_reduce("SUM", [np.full(3, value), np.full((2, 2), value, np.float32)])
            context.all_reduce("SUM", {"a": float(value)})

    on_clients(1, 1, on_each(replica))
    assert len(made) == 2


@pytest.mark.parametrize(("clients", "replicas"), [(2, 1), (1, 2)])
def test_buckets_of_different_sizes_are_a_mismatch_on_all(clients, replicas) -> None:
    def replica():
        options = CommunicationOptions(bytes_per_pack=64 * (1 + replica_id()))
        get_replica_context().all_reduce("SUM", [np.ones(8), np.ones(8)], options)

    for error in outcomes(clients, replicas, replica):
        assert isinstance(error, ReplicaMismatchError)
        assert "64 bytes together" in str(error)
        assert "128 bytes together" in str(error)


@pytest.mark.parametrize(("clients", "replicas"), LAYOUTS)
@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_of_any_layout_and_byte_order(clients, replicas, order) -> None:
    def replica():
        context = get_replica_context()
        wide = np.arange(24, dtype=f"{order}f4").reshape(4, 6)
        fixed = np.ones(3, f"{order}i8")
        fixed.flags.writeable = False
        values = [wide[::2, ::3], np.asfortranarray(wide), fixed, np.zeros((0, 3), f"{order}f4"), wide[0, :1]]
        for many in (values, values[:1], tuple(values[1:])):
            for op in ("SUM", "MEAN"):
                for found, value in zip(context.all_reduce(op, many), many, strict=True):
                    wanted = value.astype(float) * (clients * replicas if op == "SUM" else 1)
                    np.testing.assert_array_equal(found, wanted)
                    assert found.dtype.isnative

    on_clients(clients, replicas, on_each(replica))


@pytest.mark.parametrize("clients", [1, 2])
def test_results_have_memory_of_their_own(clients) -> None:
    def replica():
        context = get_replica_context()
        value, many = np.ones(4), [np.ones(4), np.ones(4)]
        first, [second, _] = context.all_reduce("SUM", value), context.all_reduce("SUM", many)
        value[...] = many[0][...] = 7
        context.all_reduce("SUM", value)
        context.all_reduce("SUM", many)
        return first.tolist(), second.tolist()

    for [(first, second)] in on_clients(clients, 1, on_each(replica)):
        assert first == second == [clients] * 4


def test_arrays_of_objects_are_refused_before_anything_is_exchanged() -> None:
    def replica():
        context = get_replica_context()
        for value in (np.array([object()]), [np.ones(1), np.array([object()])]):
            with pytest.raises(StrategyTypeError, match="objects cannot be combined"):
                context.all_reduce("SUM", value)

    on_clients(1, 2, on_each(replica))
