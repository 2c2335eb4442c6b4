"""Former name of `dmesh.distribute.coordinator`."""

from __future__ import annotations

from dmesh.distribute.coordinator.cluster_coordinator import ClusterCoordinator
from dmesh.distribute.coordinator.remote_values import PerWorkerValue as PerWorkerValues
from dmesh.distribute.coordinator.remote_values import RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
