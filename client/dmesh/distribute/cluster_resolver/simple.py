"""Resolver of a cluster that the program describes."""

from __future__ import annotations

from collections.abc import Mapping

from dmesh.distribute.cluster_resolver.base import ClusterResolver, format_master_url
from dmesh.errors import ArgumentTypeError
from dmesh.train import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Returns the values that were passed to it.

    Args:
        cluster_spec: The cluster.
        master: Address of the master.
        task_type: Job of this process.
        task_id: Index of this process.
        environment: Value of `environment`.
        num_accelerators: Result of `num_accelerators`; None for no accelerators.
        rpc_layer: Protocol to put before the masters' addresses.

    Raises:
        ArgumentTypeError: `cluster_spec` is not a ClusterSpec, or `master` is not a str.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise ArgumentTypeError(
                f"cluster_spec must be a dmesh.train.ClusterSpec, got {type(cluster_spec).__name__}. "
                "Convert a dict with ClusterSpec(the_dict)"
            )
        if not isinstance(master, str):
            raise ArgumentTypeError(f"master must be a str, got {master!r:.200}")
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._accelerators = None if num_accelerators is None else dict(num_accelerators)
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster spec."""
        return self._cluster_spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the given task, by default the master.

        Args:
            task_type: Job of the task; used only with `task_id`.
            task_id: Its index.
            rpc_layer: Protocol before `://` in the address; the resolver's own if None.

        Raises:
            ClusterSpecError: The task does not exist.
        """
        master = self._master
        if task_type is not None and task_id is not None:
            master = self.cluster_spec().task_address(task_type, task_id)
        return format_master_url(master, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the numbers that were passed, for every task."""
        del task_type, task_id, config_proto
        return dict(self._accelerators or {})

    @property
    def environment(self) -> str:
        """The environment that was passed."""
        return self._environment
