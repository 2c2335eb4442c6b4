"""Where code is: outside of scopes, in a scope, in a replica; and what is refused where."""

from __future__ import annotations

import contextvars
import gc
import json
import threading

import numpy as np
import pytest
from tests.distribute.replicas import on_clients, replica_id

import dmesh
from dmesh.distribute import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ReduceOp,
    RunOptions,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from dmesh.distribute.cluster_resolver import SimpleClusterResolver
from dmesh.errors import NotInitializedError, StrategyError, StrategyTypeError, StrategyValueError


def test_outside_of_all_scopes_there_is_one_replica() -> None:
    assert not has_strategy()
    assert not in_cross_replica_context()
    context = get_replica_context()
    assert context is not None
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert context.strategy is get_strategy()
    assert context.devices == ("/device:CPU:0",)


def test_the_default_replica_exchanges_with_nobody() -> None:
    context = get_replica_context()
    assert context is not None
    assert context.all_reduce("sum", {"a": 3.0}) == {"a": 3.0}
    np.testing.assert_array_equal(context.all_gather(np.ones(2), 0), [1, 1])
    assert context.merge_call(lambda strategy, x: (in_cross_replica_context(), x), args=(5,)) == (True, 5)
    assert get_strategy().run(lambda x: x + 1, args=(1,)) == 2
    assert get_strategy().reduce("MEAN", 2.0, axis=None) == 2.0
    assert get_strategy().experimental_local_results(3) == (3,)


def test_a_scope_is_outside_of_replicas_and_may_be_entered_again() -> None:
    strategy = OneDeviceStrategy("CPU:0")
    with strategy.scope() as entered, strategy.scope():
        assert entered is strategy
        assert get_strategy() is strategy
        assert has_strategy()
        assert in_cross_replica_context()
        assert get_replica_context() is None
    assert not has_strategy()


def test_a_scope_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), OneDeviceStrategy("CPU:0").scope():
        raise KeyError
    assert not has_strategy()


def test_a_scope_that_nobody_holds_is_not_left() -> None:
    strategy = OneDeviceStrategy("CPU:0")

    def program():
        strategy.scope().__enter__()
        gc.collect()
        return get_strategy()

    assert contextvars.copy_context().run(program) is strategy
    assert repr(strategy) == "<OneDeviceStrategy: 1 replica on 1 client>"


def test_a_scope_is_its_threads_own() -> None:
    seen = []
    with OneDeviceStrategy("CPU:0").scope():
        thread = threading.Thread(target=lambda: seen.append(has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_strategies_are_not_mixed() -> None:
    one, other = OneDeviceStrategy("CPU:0"), OneDeviceStrategy("CPU:0")
    with one.scope():
        with pytest.raises(StrategyError, match="two strategies are mixed"):
            other.scope().__enter__()
        with pytest.raises(RuntimeError, match="two strategies are mixed"):
            other.run(lambda: None)
        with pytest.raises(RuntimeError, match="two strategies are mixed"):
            other.reduce("SUM", 1.0, axis=None)
    with pytest.raises(StrategyError, match="left more often"):
        one.scope().__exit__(None, None, None)


def test_a_variable_is_not_used_in_another_strategys_scope() -> None:
    one, other = OneDeviceStrategy("CPU:0"), OneDeviceStrategy("CPU:0")
    with one.scope():
        variable = dmesh.Variable(1.0, name="w")
    with other.scope(), pytest.raises(StrategyError, match="variable 'w' belongs to"):
        variable.assign(2.0)


def test_the_strategy_for_the_rest_of_the_program() -> None:
    strategy = OneDeviceStrategy("CPU:0")
    experimental_set_strategy(strategy)
    try:
        assert get_strategy() is strategy
        assert in_cross_replica_context()
        with strategy.scope(), pytest.raises(StrategyError, match="must not be called inside"):
            experimental_set_strategy(None)
    finally:
        experimental_set_strategy(None)
    assert not has_strategy()


def test_what_is_for_code_outside_of_replicas_is_refused_within() -> None:
    def program(strategy):
        def replica():
            for call in (
                lambda: strategy.reduce("SUM", 1.0, axis=None),
                lambda: strategy.run(lambda: None),
                lambda: strategy.extended.reduce_to("SUM", 1.0),
                lambda: strategy.extended.broadcast_to(1.0),
                lambda: strategy.scope().__enter__(),
            ):
                with pytest.raises(RuntimeError, match=r"merge_call"):
                    call()
            with pytest.raises(RuntimeError, match=r"all_gather"):
                strategy.gather(np.ones(1), 0)

        strategy.run(replica)

    on_clients(1, 2, program)


def test_a_replica_context_is_of_use_to_its_replica_alone() -> None:
    def program(strategy):
        contexts = strategy.experimental_local_results(strategy.run(get_replica_context))
        with strategy.scope(), pytest.raises(StrategyError, match="outside of its replica"):
            contexts[0].all_reduce("SUM", 1.0)
        with pytest.raises(StrategyError, match="two strategies are mixed"):
            contexts[0].merge_call(lambda strategy: None)

        def replica():
            own = get_replica_context()
            with own:
                pass
            with pytest.raises(StrategyError, match="but something was asked of"):
                contexts[0].all_gather(np.ones(1), 0)

        strategy.run(replica)

    on_clients(1, 2, program)


def test_replicas_know_themselves() -> None:
    def program(strategy):
        assert strategy.num_replicas_in_sync == 4
        assert strategy.extended.num_hosts == strategy.extended.num_replicas_per_host == 2
        assert strategy.extended.worker_devices == tuple(map(str, dmesh.local_devices("CPU")))
        assert len(strategy.extended.worker_devices) == 2, "those of this worker, as in TensorFlow"
        assert strategy.extended.parameter_devices == strategy.extended.worker_devices
        assert "4 replicas on 2 clients" in repr(strategy)

        def replica():
            context = get_replica_context()
            assert context.strategy is strategy
            assert get_strategy() is strategy
            assert has_strategy()
            assert not in_cross_replica_context()
            assert f"replica {replica_id()} of 4" in repr(context)
            return replica_id(), context.num_replicas_in_sync, context.devices

        return strategy.experimental_local_results(strategy.run(replica))

    assert on_clients(2, 2, program) == [
        tuple(
            (2 * client + index, 4, (f"/job:worker/replica:0/task:{client}/device:CPU:{index}",))
            for index in range(2)
        )
        for client in range(2)
    ]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.run(7), StrategyTypeError, "needs a function"),
        (lambda s: s.run(print, args=3), StrategyValueError, "must be a list or tuple, got int"),
        (lambda s: s.run(print, kwargs=3), StrategyValueError, "must be a dict, got int"),
        (lambda s: s.run(print, options=3), StrategyTypeError, "must be RunOptions"),
        (lambda s: s.reduce("MAX", 3.0, axis=None), ValueError, "'MAX' is not a valid ReduceOp"),
        (lambda s: s.reduce(sum, 3.0, axis=None), TypeError, "must be a ReduceOp or its name"),
        (lambda s: OneDeviceStrategy(0), StrategyTypeError, "name of a device"),
        (lambda s: OneDeviceStrategy("CPU:7"), StrategyValueError, "no device of this client; it has"),
        (lambda s: MirroredStrategy("CPU:0"), StrategyTypeError, "a list of names"),
        (lambda s: MirroredStrategy([]), StrategyValueError, "at least one device"),
        (lambda s: MirroredStrategy(["CPU:0", "cpu:0"]), StrategyValueError, "named twice"),
        (lambda s: MirroredStrategy(["TPU:0"]), StrategyValueError, "has none"),
        (lambda s: MultiWorkerMirroredStrategy(3), StrategyTypeError, "must be a ClusterResolver"),
        (lambda s: MultiWorkerMirroredStrategy(None, 3), StrategyTypeError, "CommunicationOptions"),
    ],
)
def test_arguments_that_cannot_be(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(OneDeviceStrategy("CPU:0"))


def test_options_for_compilers_change_nothing() -> None:
    assert OneDeviceStrategy("CPU:0").run(lambda: 5, options=RunOptions()) == 5


def test_reductions_have_names_in_any_case() -> None:
    assert ReduceOp("SUM") is ReduceOp.SUM
    assert OneDeviceStrategy("CPU:0").reduce("sUm", 3.0, axis=None) == 3.0


def test_clients_that_have_not_met_are_not_trained_with(monkeypatch) -> None:
    monkeypatch.setenv("DTENSOR_JOBS", "localhost:10000,localhost:10001")
    with pytest.raises(NotInitializedError, match="initialize_accelerator_system"):
        MultiWorkerMirroredStrategy()


def test_without_other_clients_no_cluster_is_needed() -> None:
    strategy = MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 1
    resolver = strategy.cluster_resolver
    assert (resolver.task_type, resolver.task_id) == (None, None), "nobody says, as in TensorFlow"
    assert resolver.cluster_spec() == {}
    assert resolver.master() == ""
    given = SimpleClusterResolver(dmesh.train.ClusterSpec({}))
    assert MultiWorkerMirroredStrategy(given).cluster_resolver is given


def test_a_strategy_of_a_cluster_of_one_knows_its_task(monkeypatch) -> None:
    cluster = {"cluster": {"chief": ["localhost:10000"]}, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    resolver = MultiWorkerMirroredStrategy().cluster_resolver
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    assert resolver.cluster_spec() == cluster["cluster"]
    monkeypatch.setenv("DTENSOR_JOBS", "localhost:10001")
    resolver = MultiWorkerMirroredStrategy().cluster_resolver
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.cluster_spec() == {"worker": ["localhost:10001"]}


def test_the_clients_of_a_strategy_are_the_tasks_of_its_resolver() -> None:
    def program(strategy):
        resolver = strategy.cluster_resolver
        jobs = dmesh.jobs()
        assert resolver.cluster_spec() == {"worker": jobs}
        assert resolver.master() == f"grpc://{jobs[dmesh.client_id()]}"
        assert resolver.master("worker", 1) == f"grpc://{jobs[1]}"
        assert resolver.num_accelerators()["GPU"] == 0
        return resolver.task_type, resolver.task_id

    assert on_clients(2, 1, program) == [("worker", 0), ("worker", 1)]


def test_the_scope_of_the_default_strategy_changes_nothing() -> None:
    strategy = get_strategy()
    with strategy.scope() as entered, strategy.scope():
        assert entered is strategy
        assert get_replica_context() is strategy.only_replica
        assert not in_cross_replica_context()
        assert not has_strategy()
        assert get_replica_context().all_reduce("SUM", 3.0) == 3.0
        assert type(dmesh.Variable(1.0)) is dmesh.Variable
        with OneDeviceStrategy("CPU:0").scope():
            assert get_replica_context() is None
            with pytest.raises(RuntimeError, match="two strategies are mixed"):
                strategy.scope().__enter__()
        experimental_set_strategy(None)
    assert get_replica_context() is strategy.only_replica
