"""Clusters and checkpoints of a training program, under the names of `tf.train`.

- `cluster_spec`: tasks of a cluster and their addresses.
- `checkpoints`: variables on disk. `checkpoint_manager`: numbered checkpoints in a directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh._lazy_imports import lazy_getattr
from dmesh.train.cluster_spec import ClusterSpec

if TYPE_CHECKING:
    from dmesh.train.checkpoint_manager import CheckpointManager, latest_checkpoint
    from dmesh.train.checkpoints import Checkpoint

__getattr__ = lazy_getattr(
    __name__,
    {"checkpoints": ("Checkpoint",), "checkpoint_manager": ("CheckpointManager", "latest_checkpoint")},
)

__all__ = ["Checkpoint", "CheckpointManager", "ClusterSpec", "latest_checkpoint"]
