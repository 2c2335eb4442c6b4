"""Base class of cluster resolvers."""

from __future__ import annotations

import abc
from collections import defaultdict

from dmesh.devices.device import DEVICE_TYPES, known_members, num_local_devices
from dmesh.train import ClusterSpec


class ClusterResolver(abc.ABC):
    """Source of a cluster's tasks, and of this process's own task.

    A subclass implements `cluster_spec` and `master`, which query the cluster's manager at every call,
    because its answer may change. `task_type`, `task_id` and `rpc_layer` can be set; a resolver that
    determines them, or does not allow changes, overrides the properties.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the current tasks of the cluster."""

    @abc.abstractmethod
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the master, or of the given task.

        Args:
            task_type: Job of the task.
            task_id: Its index.
            rpc_layer: Protocol before `://` in the address; the resolver's own if None.

        Returns:
            The address, with the RPC layer as a prefix if there is one; empty if there is no master.
        """

    def _master_or_own(self, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
        """Return the URL of a task, by default of this process's task; empty if unknown."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return format_master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of accelerators, by type.

        After the initialization these are the devices of all clients, before it those of this process.

        Args:
            task_type: With `task_id`: count the devices of this task only.
            task_id: The task's index.
            config_proto: Ignored; for TensorFlow's sessions.

        Returns:
            The number of each existing type, GPU or TPU; 0 for every other key.
        """
        del config_proto
        counts: defaultdict[str, int] = defaultdict(int)
        wanted = (task_type, task_id) if task_type is not None and task_id is not None else None
        members = known_members()
        if members:
            for member in members:
                if wanted is None or wanted == (member.job, member.index):
                    for device in member.devices:
                        if device.type != "CPU":
                            counts[device.type] += 1
        elif wanted is None or wanted == (self.task_type, self.task_id):
            for kind in DEVICE_TYPES:
                if kind != "CPU" and (count := num_local_devices(kind)):
                    counts[kind] = count
        return counts

    @property
    def num_processes(self) -> int | None:
        """Number of tasks, if the resolver knows only the addresses of task 0 and of this process.

        None otherwise: `cluster_spec` has all tasks.
        """
        return None

    @property
    def environment(self) -> str:
        """Kind of environment in which the program runs; empty if unknown."""
        return ""

    @property
    def task_type(self) -> str | None:
        """Job of this process, such as `worker`; None if unknown."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Index of this process within its job; None if unknown."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """Protocol before the masters' addresses, such as `grpc`; None for none."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


def format_master_url(master: str, rpc_layer: str | None = None) -> str:
    """Return `RPC_LAYER://MASTER`, or the master alone if there is no layer, or no master."""
    return f"{rpc_layer}://{master}" if rpc_layer and master else master
