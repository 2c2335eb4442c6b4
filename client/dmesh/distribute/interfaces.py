"""Interfaces of strategies and replicas, for the modules below those that define them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dmesh.distribute.combining import Array, Combiner
    from dmesh.distribute.placement import Placement
    from dmesh.distribute.reduce_op import ReduceOp

__all__ = ["ExtendedInterface", "ReplicaInterface", "StrategyInterface", "TeamInterface"]


class TeamInterface(Protocol):
    """Replicas of a strategy: see `team.Team`."""

    @property
    def placement(self) -> Placement:
        """All replicas."""

    @property
    def combiner(self) -> Combiner:
        """Exchange of values between the replicas."""

    @property
    def local_size(self) -> int:
        """Number of this client's replicas."""

    def agree(self, texts: Sequence[str]) -> None:
        """Raise ReplicaMismatchError unless all replicas take part in the same thing."""

    def from_first(self, values: Sequence[Array], what: str) -> list[Array]:
        """Return the values that the client of replica 0 has."""


class ExtendedInterface(Protocol):
    """Part of a strategy for libraries: see `extended.StrategyExtended`."""

    @property
    def team(self) -> TeamInterface:
        """The replicas."""

    def create_variable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Create a variable on all replicas."""


class StrategyInterface(Protocol):
    """Replicas that train in step: see `strategy.Strategy`."""

    @property
    def extended(self) -> ExtendedInterface:
        """More of the strategy, for libraries."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas on all clients."""

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function as every replica."""

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Reduce what replicas returned to one value."""

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate what replicas returned, in the order of the replicas."""

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this client's replicas, in their order."""


class ReplicaInterface(Protocol):
    """One replica: see `replica_context.ReplicaContext`."""

    strategy: StrategyInterface
    """The strategy that the replica belongs to."""
    index: int
    """Position among this client's replicas."""

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number among all replicas, from 0."""

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for all replicas, and call a function once on each client."""

    def require_running(self) -> None:
        """Refuse to go on if the step has failed without this replica."""

    def meet(self, text: str, perform: Callable[[Sequence[Any]], Sequence[Any]], brought: Any) -> Any:
        """Wait for all replicas, and return this one's part of what `perform` makes of all."""
