"""Replicas on the cores of a TPU system."""

from __future__ import annotations

import numpy as np
import pytest
from tests.distribute.replicas import on_each, replica_id

import dmesh
from dmesh.distribute import TPUStrategy, experimental, get_replica_context
from dmesh.errors import (
    NotInitializedError,
    StrategyTypeError,
    StrategyValueError,
    TpuNotFoundError,
)
from dmesh.testing import FakeCluster
from dmesh.tpu.experimental import DeviceAssignment, Topology, initialize_tpu_system


def on_tpu(clients, program, *args):
    """Runs a program as clients that share a v2-8."""
    with FakeCluster(clients, timeout=20, environ={"TPU_ACCELERATOR_TYPE": "v2-8"}) as cluster:
        return cluster.run(program, *args)


def assigned(shape, replicas):
    """Returns an assignment for the TPU system that is initialized."""
    return DeviceAssignment.build(initialize_tpu_system(), computation_shape=shape, num_replicas=replicas)


@pytest.mark.parametrize("clients", [1, 2])
def test_every_core_is_a_replica(clients) -> None:
    def program():
        initialize_tpu_system()
        strategy = TPUStrategy()
        assert strategy.num_replicas_in_sync == 8
        assert strategy.extended.num_replicas_per_host == 8 // clients
        assert strategy.extended.num_hosts == clients

        def replica():
            context = get_replica_context()
            return context.devices, int(context.all_reduce("SUM", replica_id()))

        return on_each(replica)(strategy)

    outcomes = [outcome for client in on_tpu(clients, program) for outcome in client]
    assert outcomes == [
        ((f"/job:worker/replica:0/task:{core // (8 // clients)}/device:TPU:{core % (8 // clients)}",), 28)
        for core in range(8)
    ]


@pytest.mark.parametrize("clients", [1, 2])
def test_a_replica_may_have_several_logical_devices(clients) -> None:
    def program():
        strategy = TPUStrategy(experimental_device_assignment=assigned([1, 1, 1, 2], 4))
        assert strategy.num_replicas_in_sync == 4
        assert strategy.extended.num_logical_devices == 2
        assert len(set(strategy.extended.worker_devices)) == 4
        with strategy.extended.experimental_logical_device(1):
            pass
        return on_each(lambda: get_replica_context().devices)(strategy)

    devices = [name for client in on_tpu(clients, program) for replica in client for name in replica]
    assert len(set(devices)) == len(devices) == 8


def test_values_on_logical_devices_stay_what_they_are() -> None:
    def program():
        strategy = TPUStrategy(experimental_device_assignment=assigned([1, 1, 1, 2], 4))
        value = np.ones((4, 3))
        assert strategy.experimental_assign_to_logical_device(value, 1) is value
        assert strategy.experimental_split_to_logical_devices(value, [2, 1]) is value
        assert strategy.experimental_replicate_to_logical_devices(value) is value
        for wrong in (-1, 2, "0"):
            with pytest.raises(StrategyValueError, match="logical_device_id"):
                strategy.experimental_assign_to_logical_device(value, wrong)
            with pytest.raises(ValueError, match="logical_device_id"):
                strategy.extended.experimental_logical_device(wrong).__enter__()
        for dimensions, why in (
            ([2], "a number for each of the 2 dimensions"),
            ([1, 2], "dimension 1 of the array has length 3, which cannot be split into 2"),
            ([0, 1], "cannot be split into 0"),
            ([4, 1], "makes 4 parts, but each replica has 2 logical devices"),
        ):
            with pytest.raises(ValueError, match=why):
                strategy.experimental_split_to_logical_devices(value, dimensions)
        spmd = TPUStrategy(None, assigned([1, 1, 1, 2], 4), True)
        with pytest.raises(ValueError, match="experimental_spmd_xla_partitioning=False"):
            spmd.experimental_assign_to_logical_device(value, 0)

    on_tpu(1, program)


def test_without_an_assignment_each_replica_has_one_logical_device() -> None:
    def program():
        strategy = TPUStrategy()
        assert strategy.experimental_assign_to_logical_device(1.0, 0) == 1.0
        with pytest.raises(ValueError, match="it must be from 0 to 0"):
            strategy.experimental_assign_to_logical_device(1.0, 1)

    on_tpu(1, program)


def test_assignments_that_cannot_be() -> None:
    def program():
        with pytest.raises(StrategyValueError, match=r"replica 0 has cores of the clients \[0, 1\]"):
            TPUStrategy(experimental_device_assignment=assigned([2, 2, 1, 2], 1))
        with pytest.raises(StrategyValueError, match="client 0 has 1, client 1 has 0"):
            TPUStrategy(experimental_device_assignment=assigned([1, 1, 1, 1], 1))
        other = Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])
        with pytest.raises(StrategyValueError, match="build it for what initialize_tpu_system returned"):
            TPUStrategy(experimental_device_assignment=DeviceAssignment(other, [[[0, 0, 0, 0]]]))

    on_tpu(2, program)


def test_arguments_of_the_wrong_type() -> None:
    with pytest.raises(StrategyTypeError, match="must be a cluster resolver"):
        TPUStrategy("grpc://10.0.0.1:8470")
    with pytest.raises(TypeError, match=r"DeviceAssignment\.build returns"):
        TPUStrategy(None, [[0]])


def test_without_a_tpu_system_there_is_no_strategy(monkeypatch) -> None:
    with pytest.raises(TpuNotFoundError, match="initialize_tpu_system"):
        TPUStrategy()
    monkeypatch.setenv("DTENSOR_JOBS", "localhost:10000,localhost:10001")
    with pytest.raises(NotInitializedError, match="are not connected yet"):
        TPUStrategy()


def test_the_former_form_of_the_strategy(caplog) -> None:
    def program():
        strategy = experimental.TPUStrategy(device_assignment=assigned([1, 1, 1, 2], 4))
        with pytest.warns(DeprecationWarning, match="use run"):
            result = strategy.experimental_run_v2(lambda x, y: x + y, (1,), {"y": 2})
        return strategy.experimental_local_results(result)

    assert on_tpu(1, program) == [(3, 3, 3, 3)]
    assert "is deprecated: use dmesh.distribute.TPUStrategy" in caplog.text


def test_variables_on_a_tpu_system() -> None:
    def program():
        strategy = TPUStrategy()
        with strategy.scope():
            weight = dmesh.Variable(0.0, aggregation=dmesh.VariableAggregation.MEAN)
        strategy.run(lambda: weight.assign_add(replica_id()))
        return float(weight)

    assert on_tpu(2, program) == [3.5, 3.5]
