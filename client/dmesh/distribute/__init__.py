"""Strategies and cluster resolvers, under the names of `tf.distribute`.

`dmesh.distribute.cluster_resolver` asks Slurm, Kubernetes, Open MPI and others for the cluster's members.
Strategies run a function on replicas in step and keep the variables that they share in sync; see
`docs/strategy.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmesh._lazy_imports import lazy_getattr
from dmesh.distribute import scopes

if TYPE_CHECKING:
    from dmesh.distribute import cluster_resolver, coordinator, experimental
    from dmesh.distribute.coordinator.server import Server
    from dmesh.distribute.current import get_replica_context, get_strategy
    from dmesh.distribute.default_strategy import MirroredStrategy, OneDeviceStrategy
    from dmesh.distribute.distributed_variable import DistributedVariable
    from dmesh.distribute.extended import StrategyExtended
    from dmesh.distribute.input_dataset import DistributedDataset, DistributedIterator
    from dmesh.distribute.input_options import InputContext, InputOptions, InputReplicationMode
    from dmesh.distribute.multi_worker import MultiWorkerMirroredStrategy
    from dmesh.distribute.options import RunOptions
    from dmesh.distribute.pending_reduction import PendingReduction
    from dmesh.distribute.reduce_op import ReduceOp
    from dmesh.distribute.replica_context import ReplicaContext
    from dmesh.distribute.scopes import (
        experimental_set_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from dmesh.distribute.strategy import Strategy
    from dmesh.distribute.tpu_strategy import TPUStrategy
    from dmesh.distribute.values import DistributedValues, Mirrored, PerReplica

_HOMES: dict[str, tuple[str, ...]] = {
    "cluster_resolver": (),
    "coordinator": (),
    "coordinator.server": ("Server",),
    "current": ("get_replica_context", "get_strategy"),
    "default_strategy": ("MirroredStrategy", "OneDeviceStrategy"),
    "distributed_variable": ("DistributedVariable",),
    "experimental": (),
    "extended": ("StrategyExtended",),
    "input_dataset": ("DistributedDataset", "DistributedIterator"),
    "input_options": ("InputContext", "InputOptions", "InputReplicationMode"),
    "multi_worker": ("MultiWorkerMirroredStrategy",),
    "options": ("RunOptions",),
    "pending_reduction": ("PendingReduction",),
    "reduce_op": ("ReduceOp",),
    "replica_context": ("ReplicaContext",),
    "scopes": (
        "experimental_set_strategy",
        "has_strategy",
        "in_cross_replica_context",
    ),
    "strategy": ("Strategy",),
    "tpu_strategy": ("TPUStrategy",),
    "values": ("DistributedValues", "Mirrored", "PerReplica"),
}
"""Modules of this package and their public names, which are imported at the first use."""

__getattr__ = lazy_getattr(__name__, _HOMES)


def _default_frame() -> scopes.Frame:
    from dmesh.distribute.default_strategy import default_strategy

    strategy = default_strategy()
    return scopes.Frame(strategy, strategy.only_replica)


scopes.set_default(_default_frame)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "cluster_resolver",
    "coordinator",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "DistributedVariable",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "PendingReduction",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
]
