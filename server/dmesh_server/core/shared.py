"""State that all clusters of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dmesh_server.core.deadlines import Deadlines
from dmesh_server.core.lease import Leases
from dmesh_server.core.model import Limits
from dmesh_server.core.quotas import Quotas

if TYPE_CHECKING:
    from dmesh_server.core.errors import CoreError
    from dmesh_server.core.transaction import Transaction

__all__ = ["Shared", "WaitingCalls"]


class WaitingCalls(Protocol):
    """Blocked reads and watches of one cluster, by token: a `key_value.KeyValueStore`."""

    def dismiss(self, token: int, error: CoreError | None, transaction: Transaction) -> None:
        """End a blocked call."""

    def time_out(self, token: int, transaction: Transaction) -> None:
        """End a blocked read whose time is over."""


@dataclass(slots=True)
class Shared:
    """State that all clusters of one server share; `cluster.ServerState` adds their sessions."""

    limits: Limits
    """Bounds and times."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """Everything that must happen at a time."""
    leases: Leases = field(init=False)
    """All leases."""
    waiting: dict[int, WaitingCalls] = field(default_factory=dict)
    """The store in which each blocked token waits."""
    quotas: Quotas = field(default_factory=Quotas)
    """Bounds on tenants."""

    def __post_init__(self) -> None:
        self.leases = Leases(self.limits, self.deadlines)
