"""A replica's view of itself and the other replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from dmesh.distribute import scopes
from dmesh.distribute.agreement import Description, call_in_replicas
from dmesh.distribute.base import ReplicaBase, StrategyBase
from dmesh.distribute.combining import as_value, check_rank, describe_values
from dmesh.distribute.options import CommunicationOptions
from dmesh.distribute.pending_reduction import PENDING_BYTES, Buckets, PendingReduction
from dmesh.distribute.placement import Replica
from dmesh.distribute.reduce_op import ReduceOp, as_reduce_op
from dmesh.distribute.steps import Perform, Step
from dmesh.distribute.values import regroup, select_replica
from dmesh.errors import StrategyError, StrategyTypeError
from dmesh.structure import flatten, is_nested, outline, rebuild

__all__ = ["ReplicaContext"]


class ReplicaContext(ReplicaBase):
    """Replica in which the calling function runs; `get_replica_context()` returns it.

    Args:
        strategy: Strategy of the replica.
        replica: Number and devices of the replica.
        index: Its position among those of this client.
        step: The call of `run` that it belongs to; None for the only replica of the default strategy.
    """

    __slots__ = ("_pending", "_replica", "_step")

    def __init__(self, strategy: StrategyBase, replica: Replica, index: int, step: Step | None) -> None:
        self.strategy = strategy
        self.index = index
        self._replica = replica
        self._step = step
        self._pending: PendingReduction | None = None

    @property
    def replica_id_in_sync_group(self) -> int:
        """Its number among all replicas, from 0."""
        return self._replica.id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas on all clients."""
        return self.strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of this replica, by name: one, or its logical devices in their order."""
        return self._replica.devices

    def __repr__(self) -> str:
        return (
            f"<ReplicaContext: replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync} of "
            f"{self.strategy!r}>"
        )

    def __enter__(self) -> None:
        """Enter this replica's scope, which must already be active.

        Raises:
            StrategyError: The caller is not this replica.
        """
        self._require_own()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it."""

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce values over all replicas; every replica gets the result.

        Args:
            reduce_op: SUM or MEAN.
            value: An array or number, or a nested structure of such; with the same outline, shapes and dtypes
                on all replicas.
            options: Size and time limit of the exchanges; the same on all clients.

        Returns:
            Arrays in the same structure, read-only because the replicas of one client share them.

        Raises:
            ReplicaError: A replica failed, did not arrive, or made another call.
            CollectiveError: A client is lost, or did not come.
            StrategyError: The caller is not this replica.
        """
        op = as_reduce_op(reduce_op)
        if options is not None:
            CommunicationOptions.check(options)
        self._require_own()
        combiner = self.strategy.extended.replicas.combiner
        reduction, arrays = combiner.reduction(op, value, options)

        def perform(values: Sequence[Any]) -> list[Any]:
            return [combiner.reduce(reduction, values, options)] * len(values)

        reduced = self.exchange(reduction.description, perform, arrays)
        return reduction.rebuild(value, reduced)

    def begin_all_reduce(
        self, reduce_op: ReduceOp | str, like: Any, options: CommunicationOptions | None = None
    ) -> PendingReduction:
        """Begin an all-reduce of arrays that are added one by one, while this replica continues computing.

        Arrays travel in buckets, from the last one to the first: hand them over in that order, as gradients
        become ready. All replicas must call it, and `result()` of its result. A replica has one such
        reduction at a time.

        ```python
        pending = dmesh.distribute.get_replica_context().begin_all_reduce("MEAN", like=weights)
        for layer in reversed(range(len(weights))):
            pending.put(layer, gradient_of(layer))  # travels while the next one is computed
        gradients = pending.result()
        ```

        Args:
            reduce_op: SUM or MEAN.
            like: List, tuple or dict of arrays with the shapes and dtypes of those to come, such as the
                weights; the same on all replicas.
            options: Size of the buckets (`bytes_per_pack`; 0 for 4 MB), and limit of each exchange.

        Returns:
            An object with `put(key, array)` and `result()`.

        Raises:
            ReplicaError: As for `all_reduce`.
            StrategyTypeError: `like` is no list, tuple or dict of arrays.
            StrategyError: The caller is not this replica, or has begun another reduction.
        """
        op = as_reduce_op(reduce_op)
        CommunicationOptions.check(options)
        self._require_own()
        if self._pending is not None:
            raise StrategyError(f"begin_all_reduce was called before result() of {self._pending!r}")
        if not isinstance(like, list | tuple | Mapping) or any(
            is_nested(leaf) for leaf in (like.values() if isinstance(like, Mapping) else like)
        ):
            raise StrategyTypeError(
                f"begin_all_reduce needs a list, tuple or dict of arrays, got {type(like).__name__} "
                f"{outline(like):.200}"
            )
        replicas = self.strategy.extended.replicas
        combiner = replicas.combiner
        limit = combiner.bytes_per_pack(options) or PENDING_BYTES
        reduction = combiner.compiled("begin_all_reduce", op, like, limit)[0]

        def perform(values: Sequence[Any]) -> list[Any]:
            timeout, group = combiner.timeout(options), replicas.overlapping()
            return [Buckets(combiner, reduction, len(values), group, timeout)] * len(values)

        buckets = self.exchange(reduction.description, perform, None)
        self._pending = PendingReduction(buckets, self.index, like, self.exchange, self._finish)
        return self._pending

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the values of all replicas; every replica gets the result.

        Args:
            value: An array, or a nested structure of such; along `axis` the replicas' lengths may differ.
            axis: Along which.
            options: As for `all_reduce`.

        Returns:
            Arrays in the same structure, read-only because the replicas of one client share them.

        Raises:
            ReplicaError: As for `all_reduce`.
            StrategyValueError: A value has no such axis.
        """
        CommunicationOptions.check(options)
        self._require_own()
        arrays = [as_value(leaf, "all_gather") for leaf in flatten(value)]
        for array in arrays:
            check_rank(array, axis, "all_gather")
        combiner = self.strategy.extended.replicas.combiner

        def perform(values: Sequence[Any]) -> list[Any]:
            return [combiner.gather(list(zip(*values, strict=True)), axis)] * len(values)

        nested = "" if outline(value) == "*" else f" in {outline(value)}"
        text = f"all_gather along axis {axis} of {describe_values(arrays, axis)}{nested}"
        return rebuild(value, self.exchange(call_in_replicas(text), perform, arrays))

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for all replicas, and call a function once on each client, outside of the replicas.

        Args:
            merge_fn: Called with the strategy, and then the arguments of all replicas: `PerReplica` values
                where there are several.
            args: This replica's arguments.
            kwargs: Its keyword arguments.

        Returns:
            This replica's part of the result of `merge_fn`.

        Raises:
            ReplicaError: As for `all_reduce`.
            StrategyError: The caller is not this replica.
        """
        self._require_own()
        strategy = self.strategy
        if self._step is None:
            with scopes.entered(scopes.Frame(strategy)):
                return merge_fn(strategy, *args, **(kwargs or {}))

        def perform(values: Sequence[Any]) -> list[Any]:
            merged_args, merged_kwargs = regroup(list(values))
            with scopes.entered(scopes.Frame(strategy)):
                merged = merge_fn(strategy, *merged_args, **merged_kwargs)
            return [select_replica(index, merged) for index in range(len(values))]

        name = getattr(merge_fn, "__qualname__", type(merge_fn).__name__)
        own = (tuple(args), dict(kwargs or {}))
        return self.exchange(call_in_replicas(f"merge_call of {name} with {outline(own)}"), perform, own)

    def experimental_logical_device(self, logical_device_id: int) -> AbstractContextManager[None]:
        """Place the computations of a block on a logical device; see the method of `strategy.extended`."""
        return self.strategy.extended.experimental_logical_device(logical_device_id)

    # -- for the rest of the package ----------------------------------------------------------------

    def require_finished(self) -> None:
        """Raise an error if a step ends with an unfinished reduction.

        Raises:
            StrategyError: There is one.
        """
        if self._pending is not None:
            raise StrategyError(f"the replica returned before result() of {self._pending!r}")

    def _finish(self) -> None:
        self._pending = None

    def require_running(self) -> None:
        """Raise an error if the step has failed in other replicas; see `Step.require_running`."""
        if self._step is not None:
            self._step.require_running()

    def exchange(self, description: Description, perform: Perform, value: Any) -> Any:
        """Wait for all replicas in a call of this package; see `Step.exchange`."""
        if self._step is None:
            return perform((value,))[0]
        return self._step.exchange(self.index, description, perform, value)

    def _require_own(self) -> None:
        here = scopes.frame()
        if here.replica is self:
            return
        if here.replica is None:
            raise StrategyError(
                f"{self!r} was used outside of its replica: this must be called by the function that "
                "strategy.run runs"
            )
        if here.strategy is not self.strategy:
            raise StrategyError(
                f"two strategies are mixed: this is a replica of {here.strategy!r}, but something was asked "
                f"of {self!r}"
            )
        raise StrategyError(f"this is {here.replica!r}, but something was asked of {self!r}")
