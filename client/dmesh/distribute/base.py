"""Bases of strategies and replicas, with the attributes that scopes and variables need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # this module is loaded with the package, and those load the collectives
    from dmesh.distribute.agreement import Description
    from dmesh.distribute.replicas import Replicas

__all__ = ["ExtendedBase", "ReplicaBase", "StrategyBase"]


class ExtendedBase(ABC):
    """Base of the part of a strategy for libraries: see `extended.StrategyExtended`."""

    replicas: Replicas
    """The replicas, and the exchange of their values."""

    @abstractmethod
    def create_variable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Create a variable on all replicas."""

    @abstractmethod
    def experimental_logical_device(self, logical_device_id: int) -> AbstractContextManager[None]:
        """Place the computations of a block on one of the logical devices of each replica."""


class StrategyBase(ABC):
    """Base of strategies: see `strategy.Strategy`."""

    @property
    @abstractmethod
    def extended(self) -> ExtendedBase:
        """Part of the strategy for libraries."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas on all clients."""
        return self.extended.replicas.placement.size


class ReplicaBase(ABC):
    """Base of a replica's view of itself: see `replica_context.ReplicaContext`."""

    __slots__ = ("index", "strategy")

    strategy: StrategyBase
    """The replica's strategy."""
    index: int
    """Position among this client's replicas."""

    @property
    @abstractmethod
    def replica_id_in_sync_group(self) -> int:
        """Number among all replicas, from 0."""

    @abstractmethod
    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for all replicas, and call a function once on each client."""

    @abstractmethod
    def require_running(self) -> None:
        """Raise an error if the step has failed in other replicas."""

    @abstractmethod
    def exchange(
        self, description: Description, perform: Callable[[Sequence[Any]], Sequence[Any]], value: Any
    ) -> Any:
        """Wait for all replicas, and return this one's part of the result of `perform` on all values."""
