"""Variables that exist on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from dmesh.distribute import scopes
from dmesh.distribute.agreement import Description, call_in_replicas
from dmesh.distribute.base import ReplicaBase, StrategyBase
from dmesh.distribute.combining import Array, describe_values, frozen
from dmesh.distribute.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization
from dmesh.distribute.values import DistributedValues, PerReplica
from dmesh.distribute.variable import Variable
from dmesh.errors import StrategyError, StrategyTypeError, StrategyValueError

__all__ = ["DistributedVariable"]


class DistributedVariable(Variable, DistributedValues):
    """A variable with a copy on each replica; `dmesh.Variable` makes one in a strategy's scope.

    With `synchronization=ON_WRITE`, as by default, the copies are the same: assigned values are combined
    by the aggregation (SUM, MEAN or ONLY_FIRST_REPLICA), and all of them must take part. With the aggregation
    NONE each replica assigns to its own copy, and keeping them in sync is the program's task.

    With `synchronization=ON_READ` each replica assigns to a copy of its own. Outside of replicas the value is
    that of the copies together, by the aggregation; reading it is a collective then, which all clients must
    take part in. Assigning there gives each copy the value, or with SUM its share of it.

    Args:
        strategy: Strategy of the replicas.
        *args: As for `Variable`.
        **kwargs: As for `Variable`.
    """

    def __init__(self, strategy: StrategyBase, *args: Any, **kwargs: Any) -> None:
        Variable.__init__(self, *args, **kwargs)
        if self.synchronization is VariableSynchronization.NONE:
            raise StrategyValueError(
                f"variable {self.name!r}: synchronization NONE is not supported by {strategy!r}; "
                "use ON_WRITE or ON_READ"
            )
        self._strategy = strategy
        self._replicas = strategy.extended.replicas
        what = f"creation of variable {self.name!r} ({self.synchronization.name}, {self.aggregation.name})"
        [first] = self._replicas.from_first([self._value], what)
        del self._value
        self._copies: list[Array] = [first] * self._replicas.local_size
        self._descriptions: dict[str, Description] = {}

    @property
    def distribute_strategy(self) -> StrategyBase:
        """The strategy in whose scope it was created."""
        return self._strategy

    @property
    def device(self) -> str:
        """The name of the device that has the caller's copy; outside of replicas, this client's first one."""
        here, index = scopes.frame(), 0
        if here.strategy is self._strategy:
            index = here.update or (0 if here.replica is None else here.replica.index)
        return self._replicas.placement.local[index].devices[0]

    @property
    def values(self) -> tuple[Array, ...]:
        """The copies of this client's replicas, ordered by id, read-only."""
        return tuple(self._copies)

    def part(self, index: int) -> DistributedVariable:
        """Return the variable: replicas use the variable itself, and read their own copy."""
        return self

    def __repr__(self) -> str:
        # The copies of this client: the value may be a collective to get.
        alike = all(copy is self._copies[0] for copy in self._copies)
        shown = repr(self._copies[0]) if alike else repr(PerReplica(self._copies))
        return (
            f"<DistributedVariable {self.name!r} {self.dtype}{list(self.shape)}, "
            f"{self.synchronization.name}, {self.aggregation.name}, on {self._strategy!r}: {shown}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        twin._copies = list(self._copies)
        return twin

    @property
    def _on_read(self) -> bool:
        return self.synchronization is VariableSynchronization.ON_READ

    # -- reading ------------------------------------------------------------------------------------

    def read_value(self) -> Array:
        """Return the value: in a replica, that of its copy; outside, that of all copies.

        It cannot be written to, and later assignments do not change it.

        Raises:
            StrategyError: The caller is in another strategy's scope.
            StrategyValueError: The copies are to be combined, and the aggregation does not say how.
            ReplicaMismatchError: Other clients make another call.
        """
        index = self._index()
        if index is not None:
            return self._copies[index]
        if not self._on_read:
            return self._copies[0]
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            [first] = self._replicas.from_first(self._copies[:1], f"read of variable {self.name!r}")
            return first
        op = ReduceOp.from_variable_aggregation(self.aggregation)
        self._replicas.agree([f"read of variable {self.name!r}"])
        return self._reduced(op, self._copies)

    def _reduced(self, op: ReduceOp, values: Sequence[Array]) -> Array:
        """Return the values of all replicas together, once they have agreed on it."""
        combiner = self._replicas.combiner
        reduction, _ = combiner.reduction(op, values[0])
        [value] = combiner.reduce(reduction, [(value,) for value in values])
        return value

    def _index(self) -> int | None:
        """Return the index of the caller's copy; None outside replicas."""
        here = scopes.frame()
        if here.strategy is not self._strategy:
            if scopes.has_strategy():
                raise StrategyError(
                    f"two strategies are mixed: variable {self.name!r} belongs to {self._strategy!r}, but "
                    f"{here.strategy!r} is the current one here"
                )
            return None
        if here.update is not None:
            return here.update
        return None if here.replica is None else here.replica.index

    # -- assigning ----------------------------------------------------------------------------------

    def _update(self, what: str, how: Callable[[Array, Array], Array], value: Any) -> None:
        index = self._index()
        here = scopes.frame()
        if index is None:
            self._update_outside(what, how, value)
            return
        checked = self._checked(what, value)
        if here.replica is not None:
            here.replica.require_running()
        if here.replica is None or self._on_read or self.aggregation is VariableAggregation.NONE:
            self._copies[index] = self._updated(how, self._copies[index], checked)
        else:
            self._update_together(here.replica, what, how, checked)

    def _update_together(
        self, replica: ReplicaBase, what: str, how: Callable[[Array, Array], Array], value: Array
    ) -> None:
        """Assign the values of all replicas together."""

        def perform(values: Sequence[Array]) -> list[None]:
            self._update_all(how, self._aggregated(what, values))
            return [None] * len(values)

        description = self._descriptions.get(what)
        if description is None:
            description = self._descriptions[what] = call_in_replicas(
                f"{what} of variable {self.name!r}, aggregated by {self.aggregation.name}, "
                f"with {describe_values([value])}"
            )
        replica.exchange(description, perform, value)

    def _aggregated(self, what: str, values: Sequence[Array]) -> Array:
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            [value] = self._replicas.combiner.first(values[:1])
        else:
            value = self._reduced(ReduceOp.from_variable_aggregation(self.aggregation), values)
        kept = value.astype(self.dtype, copy=False)
        if not np.can_cast(value.dtype, self.dtype, "same_kind") and not np.array_equal(kept, value):
            # On all clients, as all have the same value.
            raise StrategyTypeError(
                f"{what} of variable {self.name!r}, which is {self.dtype}: the {self.aggregation.name} of "
                f"what the replicas assign is {value.dtype} and would not stay what it is. Give the variable "
                "another dtype, or another aggregation"
            )
        return kept

    def _update_all(self, how: Callable[[Array, Array], Array], value: Array) -> None:
        if all(copy is self._copies[0] for copy in self._copies):
            self._copies[:] = [self._updated(how, self._copies[0], value)] * len(self._copies)
        else:
            self._copies[:] = [self._updated(how, copy, value) for copy in self._copies]

    def _update_outside(self, what: str, how: Callable[[Array, Array], Array], value: Any) -> None:
        """Assign outside replicas; all clients must assign the same value."""
        summed = self._on_read and self.aggregation is VariableAggregation.SUM
        if summed and what != "assign":
            raise StrategyValueError(
                f"{what} of variable {self.name!r} is not defined outside of replicas: reads return the SUM "
                "of its copies. Use assign, or call it in a replica"
            )
        if isinstance(value, PerReplica):
            self._update_from_parts(what, how, value)
            return
        if isinstance(value, DistributedValues):
            value = np.asarray(value)
        checked = self._checked(what, value)
        if summed:
            self._copies[:] = self._shares(checked)
        else:
            self._update_all(how, checked)

    def _update_from_parts(self, what: str, how: Callable[[Array, Array], Array], value: PerReplica) -> None:
        if self._on_read or self.aggregation is VariableAggregation.NONE:
            raise StrategyValueError(
                f"{what} of variable {self.name!r} outside of replicas got a value for each replica, and "
                f"{self.synchronization.name} with {self.aggregation.name} does not say how to make one of "
                "them: combine them with strategy.reduce first"
            )
        if len(value.values) != len(self._copies):
            raise StrategyValueError(
                f"{what} of variable {self.name!r} got {len(value.values)} values, but this client has "
                f"{len(self._copies)} replicas"
            )
        parts = [self._checked(what, part) for part in value.values]
        self._replicas.agree(
            [f"{what} of variable {self.name!r} with {describe_values([part])}" for part in parts]
        )
        self._update_all(how, self._aggregated(what, parts))

    def _shares(self, value: Array) -> list[Array]:
        """Return a share of a value for each copy; the shares of all replicas add up to the value."""
        size = self._replicas.placement.size
        if self.dtype.kind not in "iu":
            return [frozen((value / size).astype(self.dtype))] * len(self._copies)
        share, rest = np.divmod(value, size)
        return [
            frozen((share + (replica.id < rest)).astype(self.dtype))
            for replica in self._replicas.placement.local
        ]
