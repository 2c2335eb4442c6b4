"""Variables: plain ones, and those that exist on all replicas."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from tests.distribute.replicas import LAYOUTS, on_clients, replica_id

import dmesh
from dmesh import Variable, VariableAggregation, VariableSynchronization
from dmesh.distribute import (
    DistributedValues,
    DistributedVariable,
    OneDeviceStrategy,
    PerReplica,
    ReduceOp,
    get_strategy,
)
from dmesh.distribute.values import Mirrored
from dmesh.errors import ReplicaMismatchError, StrategyError, StrategyTypeError, StrategyValueError

NONE, SUM, MEAN, FIRST = (
    VariableAggregation.NONE,
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
)
ON_READ = VariableSynchronization.ON_READ

# -- without a strategy --------------------------------------------------------------------------------------


def test_a_variable_is_an_array_to_numpy() -> None:
    variable = Variable([1.0, 2.0], name="w")
    assert type(variable) is Variable
    np.testing.assert_array_equal(variable * 2 - np.ones(2), [1, 3])
    np.testing.assert_array_equal(np.array([[1.0, 1.0]]) @ variable, [3])
    np.testing.assert_array_equal(np.asarray(variable, dtype=np.float32), [1, 2])
    assert np.sum(variable) == 3
    assert (variable[1], len(variable), variable.ndim, variable.size, variable.shape) == (2, 2, 1, 2, (2,))
    assert float(Variable(1.5)) == 1.5
    assert int(Variable(2)) == range(3)[Variable(2)] == 2
    assert Variable(True)
    assert (variable == [1, 5]).tolist() == [True, False]


def test_a_variable_is_on_a_device(monkeypatch) -> None:
    assert Variable(1.0).device == "/job:localhost/replica:0/task:0/device:CPU:0"
    monkeypatch.setenv("DTENSOR_JOBS", "a:1,b:1")
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "1")
    assert Variable(1.0).device == "/job:worker/replica:0/task:1/device:CPU:0"


@pytest.mark.parametrize("synchronization", [VariableSynchronization.ON_WRITE, ON_READ])
def test_each_replica_has_its_copy_on_its_device(synchronization) -> None:
    def program(strategy):
        with strategy.scope():
            variable = Variable(1.0, synchronization=synchronization)
            assert variable.device == strategy.extended.worker_devices[0]
        assert variable.device == strategy.extended.worker_devices[0]
        in_updates = strategy.extended.update(variable, lambda copy: copy.device, group=False)
        in_replicas = strategy.run(lambda: variable.device)
        assert strategy.experimental_local_results(in_updates) == strategy.extended.worker_devices
        with OneDeviceStrategy("CPU:0").scope():
            assert variable.device == strategy.extended.worker_devices[0]
        return strategy.experimental_local_results(in_replicas)

    assert on_clients(2, 2, program) == [
        tuple(f"/job:worker/replica:0/task:{client}/device:CPU:{index}" for index in range(2))
        for client in range(2)
    ]


def test_a_value_that_was_read_stays() -> None:
    variable = Variable(np.zeros(2))
    before, copy = variable.read_value(), variable.numpy()
    copy[0] = 7
    assert variable.assign_add(np.ones(2)).assign_sub([0.0, 2.0]) is variable
    np.testing.assert_array_equal(variable.value(), [1, -1])
    np.testing.assert_array_equal(before, [0, 0])
    with pytest.raises(ValueError, match="read-only"):
        variable.read_value()[0] = 1


def test_assignments_take_the_arguments_that_tensorflow_has() -> None:
    variable = Variable(1.0)
    assert variable.assign(5.0, True, "name", True) is variable
    assert variable.assign_add(2.0, use_locking=True, name="name", read_value=False) is variable
    assert variable.assign_sub(1.0, False, None, read_value=False) is variable
    assert variable == 6


def test_what_is_assigned_is_copied() -> None:
    source = np.zeros(2)
    variable = Variable(source)
    source[0] = 1
    assert variable[0] == 0
    variable.assign(source)
    source[0] = 2
    assert variable[0] == 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Variable(), StrategyValueError, "'Variable' needs an initial_value"),
        (lambda: Variable(1.0, synchronization=3), StrategyValueError, "must be a VariableSynchronization"),
        (lambda: Variable(1.0, aggregation=3), StrategyValueError, "must be a VariableAggregation"),
        (lambda: Variable(1.0, synchronization=None), ValueError, "must be a VariableSynchronization"),
        (lambda: Variable(object()), StrategyTypeError, "objects"),
        (lambda: Variable(np.zeros(2)).assign(1.0), ValueError, r"needs the shape \(2,\), got \(\)"),
        (lambda: Variable(1).assign_add(1.5), TypeError, "is int64, got float64: convert it first$"),
    ],
)
def test_what_variables_refuse(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


def test_variables_are_not_changed_in_place() -> None:
    variable = Variable(1.0)
    with pytest.raises(StrategyTypeError, match="assign_add"):
        variable += 1.0


def test_what_a_variable_is_made_with() -> None:
    variable = Variable(lambda: [1, 2], dtype=np.float32, name="w", constraint=np.abs)
    assert (variable.dtype, variable.name, variable.constraint) == (np.float32, "w", np.abs)
    assert variable.trainable
    assert not Variable(0, synchronization=ON_READ).trainable
    assert Variable(0, True, synchronization=ON_READ).trainable
    assert Variable(0, aggregation=None).aggregation is NONE
    assert variable.synchronization is VariableSynchronization.AUTO
    assert variable.aggregation is NONE
    assert repr(variable) == "<Variable 'w' float32[2]: array([1., 2.], dtype=float32)>"


# -- on all replicas -----------------------------------------------------------------------------------------


def made(strategy, value=0.0, **options):
    with strategy.scope():
        return Variable(value, **options)


def on_each(strategy, function):
    strategy.run(lambda: (function(), None)[1])


@pytest.mark.parametrize(("clients", "replicas"), LAYOUTS)
@pytest.mark.parametrize(
    ("aggregation", "combined"), [(SUM, np.sum), (MEAN, np.mean), (FIRST, lambda values: values[0])]
)
def test_what_replicas_assign_is_combined(clients, replicas, aggregation, combined) -> None:
    values = [own + 1.0 for own in range(clients * replicas)]

    def program(strategy):
        variable = made(strategy, 10.0, aggregation=aggregation)
        seen = []
        for method in (variable.assign_add, variable.assign_sub, variable.assign):
            on_each(strategy, lambda method=method: method(values[replica_id()]))
            seen.append(float(variable))
            assert len(set(map(float, variable.values))) == 1
        return seen

    each = combined(np.array(values))
    assert on_clients(clients, replicas, program) == [[10 + each, 10.0, each]] * clients


def test_a_mean_that_is_no_integer_is_not_cut_off() -> None:
    def program(strategy):
        variable = made(strategy, 10, aggregation=MEAN, name="count")
        with pytest.raises(StrategyTypeError, match=r"'count', which is int64: .* MEAN .* is float64"):
            on_each(strategy, lambda: variable.assign_add(replica_id()))
        with pytest.raises(StrategyTypeError, match="MEAN"):
            variable.assign(PerReplica([0, 1]))
        assert int(variable) == 10
        on_each(strategy, lambda: variable.assign_add(1 + 2 * replica_id()))
        return int(variable)

    assert on_clients(2, 2, program) == [14, 14]


def test_without_an_aggregation_each_replica_assigns_to_its_copy() -> None:
    def program(strategy):
        variable = made(strategy, 5.0)
        on_each(strategy, lambda: variable.assign_add(replica_id()))
        seen = strategy.run(variable.read_value)
        assert float(variable) == float(variable.values[0])
        variable.assign_add(1.0)
        return [float(value) for value in (*strategy.experimental_local_results(seen), *variable.values)]

    assert on_clients(2, 2, program) == [[5, 6, 6, 7], [7, 8, 8, 9]]


def test_a_sum_counts_every_replica_also_if_all_assign_the_same_number() -> None:
    def program(strategy):
        variable = made(strategy, aggregation=SUM)
        on_each(strategy, lambda: variable.assign_add(1.0))
        return float(variable)

    assert on_clients(2, 2, program) == [4.0, 4.0]


@pytest.mark.parametrize(("clients", "replicas"), LAYOUTS)
@pytest.mark.parametrize(
    ("aggregation", "combined"), [(SUM, np.sum), (MEAN, np.mean), (FIRST, lambda values: values[0])]
)
def test_what_is_synchronized_on_read_is_combined_then(clients, replicas, aggregation, combined) -> None:
    count = clients * replicas

    def program(strategy):
        variable = made(strategy, synchronization=ON_READ, aggregation=aggregation)
        on_each(strategy, lambda: variable.assign_add(replica_id() + 1))
        within = strategy.experimental_local_results(strategy.run(variable.numpy))
        return [float(value) for value in within], float(variable)

    for client, (within, together) in enumerate(on_clients(clients, replicas, program)):
        assert within == [client * replicas + index + 1.0 for index in range(replicas)]
        assert together == combined(np.arange(count) + 1.0)


def test_assigning_a_sum_outside_of_replicas_gives_each_copy_its_share() -> None:
    def program(strategy):
        real = made(strategy, synchronization=ON_READ, aggregation=SUM)
        whole = made(strategy, [0, 0], synchronization=ON_READ, aggregation=SUM)
        mean = made(strategy, synchronization=ON_READ, aggregation=MEAN)
        real.assign(8.0)
        whole.assign([7, -7])
        mean.assign(8.0)
        mean.assign_add(1.0)
        for method in ("assign_add", "assign_sub"):
            with pytest.raises(ValueError, match=f"{method} of .* is not defined outside of replicas"):
                getattr(real, method)(1.0)
        return [float(copy) for copy in real.values], float(real), whole.numpy().tolist(), float(mean)

    assert on_clients(2, 2, program) == [([2.0, 2.0], 8.0, [7, -7], 9.0)] * 2


def test_copies_without_an_aggregation_have_no_value_together() -> None:
    def program(strategy):
        variable = made(strategy, synchronization=ON_READ)
        with pytest.raises(ValueError, match=r"VariableAggregation\.NONE is no reduction"):
            variable.read_value()
        assert "ON_READ, NONE" in repr(variable)

    on_clients(1, 2, program)


def test_synchronization_none_is_refused() -> None:
    with pytest.raises(StrategyValueError, match="NONE is not supported"):
        made(OneDeviceStrategy("CPU:0"), synchronization=VariableSynchronization.NONE)


def test_assigning_outside_of_replicas() -> None:
    def program(strategy):
        total = made(strategy, aggregation=SUM)
        plain = made(strategy)
        first = strategy.extended.replicas.placement.local[0].id
        parts = PerReplica([first + 0.0, first + 1.0])
        total.assign(parts)
        plain.assign(Mirrored([3.0, 3.0]))
        plain.assign_sub(1.0)
        with pytest.raises(StrategyValueError, match=r"combine them with strategy\.reduce"):
            plain.assign(parts)
        with pytest.raises(StrategyValueError, match="got 3 values, but this client has 2"):
            total.assign(PerReplica([1.0, 2.0, 3.0]))
        return float(total), float(plain)

    assert on_clients(2, 2, program) == [(6.0, 2.0)] * 2


def test_all_clients_begin_with_the_value_of_the_first() -> None:
    def program(strategy):
        return made(strategy, [float(dmesh.client_id()), 7.0]).numpy().tolist()

    assert on_clients(3, 1, program) == [[0.0, 7.0]] * 3


def test_variables_that_differ_between_clients_are_refused_on_all() -> None:
    def program(strategy):
        with pytest.raises(ReplicaMismatchError, match=r"creation of variable 'w' .* of float64\[1\]"):
            made(strategy, np.zeros(1 + dmesh.client_id()), name="w")

    on_clients(2, 1, program)


@pytest.mark.parametrize(("clients", "replicas"), LAYOUTS)
def test_replicas_may_create_a_variable_together(clients, replicas) -> None:
    def program(strategy):
        def replica():
            variable = Variable(replica_id() + 5.0, name="made inside", aggregation=SUM)
            variable.assign_add(1.0)
            return variable

        variable = strategy.run(replica)
        assert isinstance(variable, DistributedVariable)
        assert variable.distribute_strategy is strategy
        return float(variable)

    assert on_clients(clients, replicas, program) == [5.0 + clients * replicas] * clients


def test_a_distributed_variable_is_one_of_the_distributed_values() -> None:
    def program(strategy):
        variable = made(strategy, [1.0, 2.0], name="w", aggregation=MEAN)
        assert isinstance(variable, DistributedValues)
        assert len(strategy.experimental_local_results(variable)) == 2
        assert strategy.run(lambda v: v, args=(variable,)) is variable
        np.testing.assert_array_equal(strategy.reduce("SUM", variable, axis=None), [4, 8])
        np.testing.assert_array_equal(variable + variable, [2, 4])
        assert "'w' float64[2], AUTO, MEAN, on <MultiWorkerMirroredStrategy: 4 replicas" in repr(variable)
        on_each(strategy, lambda: variable.assign_add(np.ones(2)))
        return variable.numpy().tolist()

    assert on_clients(2, 2, program) == [[2.0, 3.0]] * 2


# -- for libraries -------------------------------------------------------------------------------------------


def test_each_copy_is_updated_by_itself() -> None:
    def program(strategy):
        variable = made(strategy, 10.0)
        extended = strategy.extended

        def update(var, part, *, factor):
            return var.assign_sub(part * factor).numpy()

        returned = extended.update(variable, update, (PerReplica([1.0, 2.0]),), {"factor": 2.0}, group=False)
        assert [float(value) for value in returned.values] == [8.0, 6.0]
        assert [float(value) for value in variable.values] == [8.0, 6.0]

        def replica():
            assert extended.update(variable, update, (1.0,), {"factor": 1.0}) is None

        strategy.run(replica)
        assert [float(value) for value in variable.values] == [7.0, 5.0]
        assert float(extended.read_var(variable)) == 7.0
        assert extended.value_container(variable) is variable
        with extended.colocate_vars_with(variable):
            made(strategy)
        with pytest.raises(StrategyValueError, match="not created in the scope"):
            extended.update(Variable(1.0), update)
        with pytest.raises(ValueError, match="not created in the scope"), extended.colocate_vars_with(3):
            pass

    on_clients(1, 2, program)


def test_reductions_for_libraries() -> None:
    def program(strategy):
        extended = strategy.extended
        variable = made(strategy)
        value = strategy.run(lambda: np.full(2, replica_id() + 1.0))
        np.testing.assert_array_equal(extended.reduce_to(ReduceOp.SUM, value, variable), [10, 10])
        first, second = extended.batch_reduce_to("MEAN", [(value, variable), (value, "CPU:0")])
        np.testing.assert_array_equal(first, second)
        mirrored = extended.broadcast_to(np.float64(dmesh.client_id() + 3))
        assert (float(mirrored), len(mirrored.values)) == (3.0, 2)
        with pytest.raises(TypeError, match="not a list"):
            extended.reduce_to("SUM", value, [variable])
        assert strategy.experimental_local_results(extended.call_for_each_replica(lambda: 1)) == (1, 1)
        with extended.experimental_logical_device(0):
            pass
        for wrong in (-1, 1, True, 1.0):
            with pytest.raises(ValueError, match="logical_device_id"):
                extended.experimental_logical_device(wrong).__enter__()

    on_clients(2, 2, program)


@pytest.mark.parametrize("clients", [1, 2])
def test_what_is_broadcast_is_copied(clients) -> None:
    def program(strategy):
        source = np.zeros(2)
        mirrored = strategy.extended.broadcast_to(source)
        source[0] = 1
        return np.asarray(mirrored).tolist()

    assert on_clients(clients, 1, program) == [[0, 0]] * clients


def test_another_strategys_variable_is_not_read_in_a_replica() -> None:
    variable = made(OneDeviceStrategy("CPU:0"), name="w")
    with pytest.raises(StrategyError, match="two strategies are mixed"):
        OneDeviceStrategy("CPU:0").run(variable.read_value)


@pytest.mark.parametrize("strategy", [None, OneDeviceStrategy("CPU:0")])
def test_a_copy_is_a_variable_of_its_own(strategy) -> None:
    model = {"w": Variable(1.0, name="w") if strategy is None else made(strategy, 1.0, name="w")}
    average = deepcopy(model)["w"]
    model["w"].assign(2.0)
    average.assign_add(4.0)
    assert (float(model["w"]), float(average)) == (2.0, 5.0)
    assert (average.name, average.distribute_strategy) == ("w", model["w"].distribute_strategy)


def test_iterating_is_that_of_an_array() -> None:
    assert list(map(float, Variable([1.0, 2.0]))) == [1.0, 2.0]
    with pytest.raises(TypeError, match="0-d"):
        list(Variable(1.0))

    def program(strategy):
        together = made(strategy, [0.0, 0.0], synchronization=ON_READ, aggregation=SUM)
        on_each(strategy, lambda: together.assign_add([1.0, 2.0]))
        if dmesh.client_id():
            return [float(item) for item in together]
        return together.numpy().tolist()  # one collective, as on the other client

    assert on_clients(2, 1, program) == [[2, 4]] * 2


def test_a_variable_is_formatted_as_its_value() -> None:
    assert f"{Variable(1 / 3):.2f}" == "0.33"
    assert f"{Mirrored([np.float64(2)] * 2):.1f}" == "2.0"
    variable = Variable(1.0)
    assert f"{variable}" == str(variable)


def test_a_plain_variable_is_the_default_strategys() -> None:
    variable = Variable(1.0)
    extended = get_strategy().extended
    assert variable.distribute_strategy is get_strategy()
    assert extended.update(variable, lambda var, delta: var.assign_add(delta), (2.0,)) is None
    assert float(extended.read_var(variable)) == 3.0
