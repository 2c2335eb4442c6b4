"""What all clusters of one server share, and the way from a token or session to its cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dmesh_server.core.deadlines import Deadlines
from dmesh_server.core.model import Limits

if TYPE_CHECKING:
    from dmesh_server.core.cluster import Cluster
    from dmesh_server.core.key_value import KeyValueStore


@dataclass(slots=True)
class Shared:
    """What all clusters of one server share."""

    limits: Limits
    """Bounds and times."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """Everything that must happen at a time."""
    waiting: dict[int, KeyValueStore] = field(default_factory=dict)
    """Where the blocked read or watch of a token waits."""
    sessions: dict[int, Cluster] = field(default_factory=dict)
    """Which cluster an attached session belongs to."""
