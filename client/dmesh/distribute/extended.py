"""Part of a strategy for libraries: `Strategy.extended`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dmesh.distribute import scopes
from dmesh.distribute.agreement import call_in_replicas
from dmesh.distribute.base import ExtendedBase, StrategyBase
from dmesh.distribute.combining import Array, as_value, check_rank, describe_values
from dmesh.distribute.distributed_variable import DistributedVariable
from dmesh.distribute.options import CommunicationOptions
from dmesh.distribute.reduce_op import ReduceOp, as_reduce_op
from dmesh.distribute.replica_context import ReplicaContext
from dmesh.distribute.replicas import Replicas
from dmesh.distribute.steps import SoloStep, ThreadedStep
from dmesh.distribute.values import DistributedValues, Mirrored, regroup, select_replica
from dmesh.errors import StrategyTypeError, StrategyValueError
from dmesh.structure import flatten, rebuild

__all__ = ["StrategyExtended"]


class StrategyExtended(ExtendedBase):
    """Part of a strategy for libraries that build on strategies.

    Args:
        strategy: The strategy.
        replicas: Its replicas.
    """

    def __init__(self, strategy: StrategyBase, replicas: Replicas) -> None:
        self._strategy = strategy
        self.replicas = replicas

    # -- members -------------------------------------------------------------------------------

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The first device of each replica, on all clients, by replica."""
        return tuple(replica.devices[0] for replica in self.replicas.placement.replicas)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices with variables: the replicas' devices."""
        return self.worker_devices

    @property
    def num_hosts(self) -> int:
        """Number of clients that have replicas."""
        return self.replicas.placement.num_clients

    @property
    def num_replicas_per_host(self) -> int:
        """Number of replicas of each client."""
        return self.replicas.local_size

    @property
    def allows_input_per_replica(self) -> bool:
        """True if each replica may have its own input pipeline; see `InputReplicationMode`."""
        devices = self.worker_devices
        return self.replicas.placement.num_clients == 1 and not any("device:TPU:" in name for name in devices)

    # -- running ------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function as every replica; see `Strategy.run`."""
        scopes.require_cross_replica(self._strategy)
        replicas = self.replicas
        local = replicas.placement.local
        if len(local) > 1:
            return regroup(self._call_in_threads(fn, args, kwargs or {}))
        if args or kwargs:
            replicas.check_parts((args, kwargs))
            args, kwargs = select_replica(0, (list(args), dict(kwargs or {})))
        step = SoloStep(local, replicas.agreement)
        return step.run(self._body(ReplicaContext(self._strategy, local[0], 0, step), fn, args, kwargs or {}))

    def _call_in_threads(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Run a function as each replica of this client, and return their results."""
        replicas = self.replicas
        replicas.check_parts((args, kwargs))
        local = replicas.placement.local
        step = ThreadedStep(local, replicas.agreement, replicas.timeout)
        bodies = []
        for index, replica in enumerate(local):
            own_args, own_kwargs = select_replica(index, (list(args), dict(kwargs)))
            context = ReplicaContext(self._strategy, replica, index, step)
            bodies.append(self._body(context, fn, own_args, own_kwargs))
        return step.run(bodies)

    def _body(
        self, context: ReplicaContext, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], Any]:
        frame = scopes.Frame(self._strategy, context)

        def body() -> Any:
            result = scopes.call_in(frame, fn, args, kwargs)
            context.require_finished()
            return result

        return body

    # -- combining ----------------------------------------------------------------------------------

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce a value over all replicas.

        Args:
            reduce_op: SUM or MEAN.
            value: A distributed value.
            destinations: Variable, or name of a device, that needs the result. Every client has it
                in any case.
            options: Size and time limit of the exchanges.

        Raises:
            StrategyTypeError: `destinations` is a list.
            StrategyValueError: The value is not distributed.
            StrategyError: The caller is in a replica.
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values at once; see `reduce_to`."""
        scopes.require_cross_replica(self._strategy)
        op = as_reduce_op(reduce_op)
        CommunicationOptions.check(options)
        for _, destinations in value_destination_pairs:
            if isinstance(destinations, list | tuple):
                raise StrategyTypeError("destinations must be one variable or device, not a list of them")
        return self._reduce_many(op, [value for value, _ in value_destination_pairs], options)

    def reduce_values(self, op: ReduceOp, value: Any) -> Any:
        """Reduce each distributed value of a nested structure over all replicas."""
        return rebuild(value, self._reduce_many(op, flatten(value), None))

    def _reduce_many(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions | None
    ) -> list[Any]:
        results: list[Any] = [None] * len(values)
        columns: dict[int, list[Array]] = {}
        for position, value in enumerate(values):
            parts = self._parts(value)
            if parts is None:
                results[position] = self._reduce_plain(op, value)
            else:
                columns[position] = [as_value(part, f"reduce {op.value}") for part in parts]
        if columns:
            combiner = self.replicas.combiner
            compiled = [
                combiner.reduction(op, list(own), options) for own in zip(*columns.values(), strict=True)
            ]
            self.replicas.agree([f"reduce {op.value} of {reduction.values}" for reduction, _ in compiled])
            reduced = combiner.reduce(compiled[0][0], [arrays for _, arrays in compiled], options)
            for position, array in zip(columns, reduced, strict=True):
                results[position] = array
        return results

    def _parts(self, value: Any) -> Sequence[Any] | None:
        """Return the parts of a value on this client's replicas; None if it is not distributed."""
        if isinstance(value, DistributedValues):
            self.replicas.check_parts(value)
            return value.values
        # What the only replica of a client returns is not wrapped.
        return (value,) if self.replicas.local_size == 1 else None

    def _reduce_plain(self, op: ReduceOp, value: Any) -> Any:
        if op is ReduceOp.MEAN or (np.isscalar(value) and value == 0):
            return value
        raise StrategyValueError(
            f"{value!r:.200} is not distributed, so it has no {op.value} over replicas: pass what "
            "strategy.run returned"
        )

    def gather_values(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' parts of each distributed value of a nested structure."""
        columns = []
        for leaf in flatten(value):
            parts = self._parts(leaf)
            if parts is None:
                raise StrategyValueError(
                    f"{leaf!r:.200} is not distributed, so there is nothing to gather: pass what "
                    "strategy.run returned"
                )
            columns.append([as_value(part, "gather") for part in parts])
        for array in (array for column in columns for array in column):
            check_rank(array, axis, "gather")
        self.replicas.agree(
            [
                f"gather along axis {axis} of {describe_values(of_replica, axis)}"
                for of_replica in zip(*columns, strict=True)
            ]
        )
        return rebuild(value, self.replicas.combiner.gather(columns, axis))

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Mirrored:
        """Broadcast the first client's value to all replicas.

        Args:
            tensor: The value; of the same shape and dtype on all clients.
            destinations: As for `reduce_to`.
        """
        del destinations
        scopes.require_cross_replica(self._strategy)
        array = as_value(tensor, "broadcast_to").copy()
        [first] = self.replicas.from_first([array], "broadcast_to")
        return Mirrored([first] * self.replicas.local_size)

    # -- variables ----------------------------------------------------------------------------------

    def update(
        self,
        var: DistributedVariable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Update each copy of a variable separately.

        In a replica, all replicas must call it, and their arguments are collected first.

        Args:
            var: The variable.
            fn: Called as `fn(var, *args, **kwargs)` for each copy of this client: it reads and assigns
                that copy, and of distributed arguments it gets that replica's part.
            args: More arguments of `fn`.
            kwargs: Its keyword arguments.
            group: True if the results of `fn` are not needed.

        Returns:
            None if `group`, otherwise the result of `fn` for each copy.

        Raises:
            StrategyValueError: The variable is not one of this strategy's.
        """
        if not self.variable_created_in_scope(var):
            raise StrategyValueError(f"{var!r:.200} was not created in the scope of {self._strategy!r}")
        replica = scopes.frame().replica
        if replica is not None and replica.strategy is self._strategy and scopes.has_strategy():

            def merged(strategy: StrategyBase, *merged_args: Any, **merged_kwargs: Any) -> Any:
                return self._update(var, fn, merged_args, merged_kwargs, group)

            return replica.merge_call(merged, args, kwargs)
        scopes.require_cross_replica(self._strategy)
        return self._update(var, fn, args, dict(kwargs or {}), group)

    def _update(
        self,
        var: DistributedVariable,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        group: bool,
    ) -> Any:
        returned = []
        for index in range(self.replicas.local_size):
            own_args, own_kwargs = select_replica(index, (list(args), kwargs))
            with scopes.entered(scopes.Frame(self._strategy, None, index)):
                returned.append(fn(var, *own_args, **own_kwargs))
        return None if group else regroup(returned)

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: DistributedVariable) -> Iterator[None]:
        """Create variables on the devices of another one: all of a strategy's variables are on all replicas.

        Raises:
            StrategyValueError: It is not one of this strategy's variables.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise StrategyValueError(
                f"{colocate_with_variable!r:.200} was not created in the scope of {self._strategy!r}, so no "
                "variable can be where it is"
            )
        yield

    def variable_created_in_scope(self, v: object) -> bool:
        """Return whether an object is a variable that was created in the strategy's scope."""
        return getattr(v, "distribute_strategy", None) is self._strategy

    def read_var(self, v: DistributedVariable) -> Array:
        """Return a variable's value for all replicas, combined if the variable is combined on read."""
        return v.read_value()

    def create_variable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DistributedVariable:
        """Create a variable on all replicas; see `dmesh.Variable` for the arguments.

        In a replica, all replicas must do so, and get the same variable.
        """
        replica = scopes.frame().replica
        if replica is None:
            return DistributedVariable(self._strategy, *args, **kwargs)

        def perform(values: Sequence[Any]) -> list[DistributedVariable]:
            with scopes.entered(scopes.Frame(self._strategy)):
                first_args, first_kwargs = values[0]
                return [DistributedVariable(self._strategy, *first_args, **first_kwargs)] * len(values)

        description = call_in_replicas(f"creation of variable {kwargs.get('name', 'Variable')!r}")
        created: DistributedVariable = replica.exchange(description, perform, (args, kwargs))
        return created

    def value_container(self, value: Any) -> Any:
        """Return the distributed object of a replica's part; replicas use variables themselves."""
        return value

    # -- logical devices ----------------------------------------------------------------------------

    @contextmanager
    def experimental_logical_device(self, logical_device_id: int) -> Iterator[None]:
        """Place the computations of a block on one of the logical devices of each replica.

        NumPy computes all of them on the host; only the number of the device is checked.

        Raises:
            StrategyValueError: There is not.
        """
        self.check_logical_device(logical_device_id, "logical_device_id")
        yield

    def check_logical_device(self, logical_device_id: int, what: str) -> None:
        """Raise an error for a logical device that replicas do not have.

        Raises:
            StrategyValueError: They do not have it.
        """
        count = self.num_logical_devices
        if isinstance(logical_device_id, bool) or not isinstance(logical_device_id, int | np.integer):
            raise StrategyValueError(f"{what} must be an integer, got {logical_device_id!r:.200}")
        if not 0 <= logical_device_id < count:
            raise StrategyValueError(
                f"{what} is {logical_device_id}, but each replica has {count} logical "
                f"device{'s' if count > 1 else ''}: it must be from 0 to {count - 1}"
            )

    @property
    def num_logical_devices(self) -> int:
        """Number of logical devices of each replica."""
        return len(self.replicas.placement.replicas[0].devices)
