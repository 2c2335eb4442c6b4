"""The strategy and the replica of the calling code: `get_strategy`, `get_replica_context`."""

from __future__ import annotations

from typing import cast

from dmesh.distribute import scopes
from dmesh.distribute.replica_context import ReplicaContext
from dmesh.distribute.strategy import Strategy

__all__ = ["get_replica_context", "get_strategy"]


def get_strategy() -> Strategy:
    """Return the strategy of the calling code's scope or replica; outside of both, the default strategy."""
    return cast(Strategy, scopes.frame().strategy)


def get_replica_context() -> ReplicaContext | None:
    """Return the replica of the calling code; None in a scope outside `Strategy.run`.

    Outside of all scopes it is replica 0 of 1.
    """
    return cast(ReplicaContext | None, scopes.frame().replica)
