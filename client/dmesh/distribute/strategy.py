"""Base of all strategies: replicas that run the same function in step, and variables that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dmesh.distribute import input as inputs
from dmesh.distribute import scopes
from dmesh.distribute.base import StrategyBase
from dmesh.distribute.combining import as_value, finish_along, sum_along
from dmesh.distribute.extended import StrategyExtended
from dmesh.distribute.input_dataset import DistributedDataset
from dmesh.distribute.input_options import InputContext, InputOptions, ValueContext
from dmesh.distribute.input_workers import InputWorkers
from dmesh.distribute.options import RunOptions
from dmesh.distribute.reduce_op import ReduceOp, as_reduce_op
from dmesh.distribute.replicas import Replicas
from dmesh.distribute.values import DistributedValues, PerReplica
from dmesh.errors import StrategyTypeError, StrategyValueError
from dmesh.structure import flatten, is_nested, map_structure, rebuild

if TYPE_CHECKING:
    from dmesh.distribute.cluster_resolver.base import ClusterResolver

__all__ = ["Strategy"]


class Strategy(StrategyBase):
    """Replicas on one or several clients that train in step.

    All clients make the same strategies and call the same methods in the same order. Each runs its own
    replicas; variables that are created in the strategy's scope exist on all of them and are kept in sync.

    Args:
        replicas: The replicas.
        cluster_resolver: The resolver that found the clients, if known.
    """

    def __init__(self, replicas: Replicas, cluster_resolver: ClusterResolver | None = None) -> None:
        self._cluster_resolver = cluster_resolver
        self._extended = self._extend(replicas)

    def _extend(self, replicas: Replicas) -> StrategyExtended:
        return StrategyExtended(self, replicas)

    def __repr__(self) -> str:
        clients = self._extended.num_hosts
        return (
            f"<{type(self).__name__}: {self.num_replicas_in_sync} "
            f"replica{'s' if self.num_replicas_in_sync > 1 else ''} on {clients} "
            f"client{'s' if clients > 1 else ''}>"
        )

    @property
    def extended(self) -> StrategyExtended:
        """Extended interface, for libraries that build on strategies."""
        return self._extended

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that found the clients; None if the strategy does without one."""
        return self._cluster_resolver

    def scope(self) -> scopes.Scope[Self]:
        """Return a context in which this is the current strategy: variables created in it are replicated.

        Entering it raises StrategyError in another strategy's scope.
        """
        return scopes.Scope(self)

    # -- running ------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Run a function on every replica, including those of other clients, and wait for all of them.

        A client with several replicas runs them at the same time, in threads.

        Args:
            fn: The function; it may use `get_replica_context()`.
            args: Its positional arguments. Each replica gets its own part of `DistributedValues` among them.
            kwargs: Its keyword arguments.
            options: For compilers; NumPy has none.

        Returns:
            What the replicas of this client returned, as `PerReplica` values in the same nested structure;
            bare if the client has a single replica.

        Raises:
            ReplicaError: A replica of another client failed, or did not reach a call in which others wait.
            ReplicaMismatchError: Replicas made different calls, or one returned before the others.
            CollectiveError: A client was lost, or did not arrive in time.
            StrategyValueError: An argument is not valid.
            StrategyError: The caller is in a replica, or in another strategy's scope.
            Exception: The exception that a replica of this client raised.
        """
        if not callable(fn):
            raise StrategyTypeError(f"run needs a function, got {type(fn).__name__}")
        if not isinstance(args, list | tuple):
            raise StrategyValueError(
                f"positional arguments must be a list or tuple, got {type(args).__name__}"
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise StrategyValueError(f"arguments by name must be a dict, got {type(kwargs).__name__}")
        if options is not None and not isinstance(options, RunOptions):
            raise StrategyTypeError(f"options must be RunOptions or None, got {type(options).__name__}")
        return self._extended.call_for_each_replica(fn, args, kwargs)

    # -- input -----------------------------------------------------------------------------------------------

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Divide a dataset of global batches among all replicas.

        Args:
            dataset: A `dmesh.data.Dataset`, or anything else that yields structures of NumPy arrays each time
                it is iterated. Every element is a batch for all replicas together.
            options: Options of the distribution.

        Returns:
            An iterable that yields a distributed value for each step, for `run`.

        Raises:
            InputModeError: The options ask for a pipeline for each replica.
            ArgumentTypeError: The argument is not a dataset, or can be read only once.
            ShardingError: The dataset cannot be divided as its own options ask.
        """
        return inputs.experimental_distribute_dataset(self._input_workers(), dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distribute the datasets that a function makes: one for each client, of batches for one replica.

        Args:
            dataset_fn: Is called once, with an `InputContext`.
            options: Options of the distribution.

        Returns:
            An iterable that yields a distributed value for each step, for `run`.

        Raises:
            InputModeError: The options ask for a pipeline for each replica, which is not possible.
            DatasetError: The options contradict each other.
            ArgumentTypeError: `dataset_fn` is no function, or did not return a dataset.
        """
        return inputs.distribute_datasets_from_function(self._input_workers(), dataset_fn, options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return `distribute_datasets_from_function(dataset_fn, options)`: its former name."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return the distributed value that a function makes, called once for each replica of this client.

        Args:
            value_fn: Takes a `ValueContext`, returns the replica's value or structure of values.

        Raises:
            ArgumentTypeError: It is no function.
        """
        placement = self._extended.replicas.placement
        mine = iter(placement.local)

        def of_next(context: ValueContext) -> Any:
            # Where a device assignment mixes the clients, their replicas do not have consecutive numbers.
            return value_fn(dataclasses.replace(context, replica_id_in_sync_group=next(mine).id))

        return inputs.experimental_distribute_values_from_function(
            self._input_workers(), of_next if callable(value_fn) else value_fn
        )

    def _input_workers(self) -> InputWorkers:
        replicas = self._extended.replicas
        return InputWorkers(
            num_workers=replicas.placement.num_clients,
            worker_index=0 if replicas.group is None else replicas.group.rank,
            replicas_per_worker=replicas.local_size,
            group=replicas.group,
            in_replica=lambda: scopes.has_strategy() and not scopes.in_cross_replica_context(),
            allow_per_replica=self._extended.allows_input_per_replica,
        )

    # -- combining ----------------------------------------------------------------------------------

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Reduce the replicas' results to one value; all clients get it.

        Args:
            reduce_op: SUM or MEAN.
            value: A `PerReplica` value, as `run` returns it, or a nested structure of such.
            axis: None to combine element by element over the replicas alone; otherwise the axes along which
                each replica's value is reduced, too. A MEAN then weighs replicas by how much they have.

        Returns:
            The result; it cannot be written to.

        Raises:
            StrategyError: The caller is in a replica, or in another strategy's scope.
            StrategyValueError: There is no such reduction or axis, or the value is not distributed.
            ReplicaMismatchError: The replicas' values, or the clients' calls, do not fit.
        """
        scopes.require_cross_replica(self)
        op = as_reduce_op(reduce_op)
        if axis is None:
            return self._extended.reduce_values(op, value)
        axes = tuple(axis) if isinstance(axis, list | tuple) else (axis,)
        totals = self._of_parts(lambda part: sum_along(op, as_value(part, "reduce"), axes), value)
        dtypes = [as_value(_value_of(leaf, 0), "reduce").dtype for leaf in flatten(value)]
        counts: Any = [1] * len(dtypes)
        if op is ReduceOp.SUM:
            totals = self._extended.reduce_values(op, totals)
        else:
            counts = self._of_parts(
                lambda part: np.prod([np.shape(part)[one] for one in axes], dtype=int), value
            )
            if not self._is_plain(value):
                totals, counts = self._extended.reduce_values(ReduceOp.SUM, (totals, counts))
            counts = flatten(counts)
        leaves = zip(dtypes, flatten(totals), counts, strict=True)
        return rebuild(value, [finish_along(op, dtype, total, count) for dtype, total, count in leaves])

    def _of_parts(self, function: Callable[[Any], Any], value: Any) -> Any:
        return map_structure(
            lambda leaf: (
                PerReplica(map(function, leaf.values))
                if isinstance(leaf, DistributedValues)
                else function(leaf)
            ),
            value,
        )

    def _is_plain(self, value: Any) -> bool:
        several = self._extended.num_replicas_per_host > 1
        return several and not any(isinstance(leaf, DistributedValues) for leaf in flatten(value))

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the replicas' results, in the order of the replicas; all clients get the whole.

        Args:
            value: A `PerReplica` value, or a nested structure of such.
            axis: Along which; the replicas' lengths may differ there and nowhere else.

        Raises:
            StrategyError: The caller is in a replica, or in another strategy's scope.
            StrategyValueError: A value is a scalar, has no such axis, or is not distributed.
            ReplicaMismatchError: The replicas' values, or the clients' calls, do not fit.
        """
        scopes.require_cross_replica(
            self,
            "strategy.gather is for code outside of replicas: in a replica use "
            "dmesh.distribute.get_replica_context().all_gather()",
        )
        return self._extended.gather_values(value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this client's replicas, in their order.

        Args:
            value: Result of `run`. Of a nested structure each replica's is returned; a value that is not
                distributed as `(value,)`.
        """
        if isinstance(value, DistributedValues):
            return value.values
        if not is_nested(value):
            return (value,)
        self._extended.replicas.check_parts(value)
        return tuple(
            map_structure(lambda leaf: _value_of(leaf, index), value)  # noqa: B023 -- called at once
            for index in range(self._extended.num_replicas_per_host)
        )


def _value_of(leaf: Any, index: int) -> Any:
    return leaf.values[index] if isinstance(leaf, DistributedValues) else leaf
