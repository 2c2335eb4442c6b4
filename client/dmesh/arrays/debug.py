"""Looking inside sharded arrays: `dmesh.debug`."""

from __future__ import annotations

from dmesh.arrays.display import visualize_sharding
from dmesh.arrays.ledger import Moved, bytes_moved

__all__ = ["bytes_moved", "Moved", "visualize_sharding"]
