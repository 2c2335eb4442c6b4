"""The cluster that this process belongs to, whatever it was found with."""

from __future__ import annotations

from dataclasses import dataclass

from dmesh.config import client as config
from dmesh.distribute.cluster_resolver.base import ClusterResolver
from dmesh.distribute.cluster_resolver.tfconfig import TFConfigClusterResolver
from dmesh.runtime import context
from dmesh.train import ClusterSpec


@dataclass(frozen=True)
class FoundResolver:
    """The resolver that has found this process's cluster."""

    resolver: ClusterResolver
    """The program's, or a launcher's."""


class JoinedClusterResolver(ClusterResolver):
    """Answers what `dmesh.jobs()`, `dmesh.job_name()` and `dmesh.client_id()` say at the moment.

    For clusters that no other resolver knows completely: those of `DTENSOR_JOBS` and `dmesh run`, and those
    whose launcher knows no addresses.
    """

    _rpc_layer = "grpc"

    def cluster_spec(self) -> ClusterSpec:
        """Returns the clients, as tasks of one job; none in local mode.

        Raises:
            ConfigurationError: An environment variable is malformed.
        """
        jobs = config.jobs()
        return ClusterSpec({config.job_name(): jobs} if jobs else {})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the task that is named, or of this one.

        Args:
            task_type: Job of the task; this process's if None.
            task_id: Its index; this process's if None.
            rpc_layer: What stands before `://` in the answer; the resolver's own if None.

        Returns:
            The address; empty in local mode.

        Raises:
            ClusterSpecError: There is no such task.
            ConfigurationError: An environment variable is malformed.
        """
        return self._master_or_own(task_type, task_id, rpc_layer) if config.jobs() else ""

    @property
    def task_type(self) -> str | None:
        """The job that all clients share, or what was set."""
        return config.job_name() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This client's id, or what was set."""
        return config.client_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id


def cluster_of_this_process() -> ClusterResolver:
    """Returns the resolver that has found this process's cluster, if it knows all tasks; else one that does.

    Where this process is alone, that is one of `TF_CONFIG`, as in TensorFlow: its cluster has no task if the
    variable is not set, and `task_type` and `task_id` are None.

    Raises:
        ConfigurationError: An environment variable is malformed.
    """
    found = context.find(FoundResolver)
    if found is not None and found.resolver.num_processes is None:
        return found.resolver
    return JoinedClusterResolver() if config.jobs() else TFConfigClusterResolver()
