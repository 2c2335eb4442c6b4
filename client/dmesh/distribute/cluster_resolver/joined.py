"""Resolver of the cluster to which this process belongs."""

from __future__ import annotations

from dataclasses import dataclass

from dmesh.config import client as config
from dmesh.distribute.cluster_resolver.base import ClusterResolver
from dmesh.distribute.cluster_resolver.tfconfig import TFConfigClusterResolver
from dmesh.runtime import context
from dmesh.train import ClusterSpec


@dataclass(frozen=True)
class FoundResolver:
    """The resolver that found this process's cluster."""

    resolver: ClusterResolver
    """Resolver of the program or of a launcher."""


class JoinedClusterResolver(ClusterResolver):
    """Resolver with the current values of `dmesh.jobs()`, `dmesh.job_name()` and `dmesh.client_id()`.

    It is for clusters that no other resolver knows completely: those of `DTENSOR_JOBS` and `dmesh run`, and
    those whose launcher does not know the addresses.
    """

    _rpc_layer = "grpc"

    def cluster_spec(self) -> ClusterSpec:
        """Return the clients as tasks of one job; no tasks in local mode.

        Raises:
            ConfigurationError: An environment variable is malformed.
        """
        jobs = config.jobs()
        return ClusterSpec({config.job_name(): jobs} if jobs else {})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the given task, by default of this process's.

        Args:
            task_type: Job of the task; this process's if None.
            task_id: Its index; this process's if None.
            rpc_layer: Protocol before `://` in the address; the resolver's own if None.

        Returns:
            The address; empty in local mode.

        Raises:
            ClusterSpecError: The task does not exist.
            ConfigurationError: An environment variable is malformed.
        """
        return self._master_or_own(task_type, task_id, rpc_layer) if config.jobs() else ""

    @property
    def task_type(self) -> str | None:
        """Job of all clients, or the value that was set."""
        return config.job_name() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This client's id, or the value that was set."""
        return config.client_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id


def cluster_of_this_process() -> ClusterResolver:
    """Return the resolver that found this process's cluster, or another one if it does not know all tasks.

    For a single process, that is a `TFConfigClusterResolver`, as in TensorFlow: if the variable is not set,
    its cluster has no tasks, and `task_type` and `task_id` are None.

    Raises:
        ConfigurationError: An environment variable is malformed.
    """
    found = context.find(FoundResolver)
    if found is not None and found.resolver.num_processes is None:
        return found.resolver
    return JoinedClusterResolver() if config.jobs() else TFConfigClusterResolver()
