"""Looking inside sharded arrays: `dmesh.debug`."""

from __future__ import annotations

from dmesh.array.display import visualize_sharding
from dmesh.array.ledger import Moved, bytes_moved

__all__ = ["bytes_moved", "Moved", "visualize_sharding"]
