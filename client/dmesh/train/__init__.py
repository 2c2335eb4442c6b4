"""Clusters and checkpoints of a training program, under the names of `tf.train`.

- `cluster_spec`: tasks of a cluster and their addresses.
- `checkpoints`: variables on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh._lazy_imports import lazy_getattr
from dmesh.train.cluster_spec import ClusterSpec

if TYPE_CHECKING:
    from dmesh.train.checkpoints import Checkpoint, CheckpointManager, latest_checkpoint

__getattr__ = lazy_getattr(
    __name__, {"checkpoints": ("Checkpoint", "CheckpointManager", "latest_checkpoint")}
)

__all__ = ["Checkpoint", "CheckpointManager", "ClusterSpec", "latest_checkpoint"]
