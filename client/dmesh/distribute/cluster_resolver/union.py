"""Resolver that combines several clusters."""

from __future__ import annotations

from dmesh.distribute.cluster_resolver.base import ClusterResolver, format_master_url
from dmesh.errors import ArgumentTypeError, ConfigurationError, DuplicateTaskError
from dmesh.train import ClusterSpec


class UnionResolver(ClusterResolver):
    """Combines the clusters of several resolvers; everything else comes from the first one.

    If all resolvers have a job's tasks without gaps, the tasks of later resolvers get the following indices.
    Otherwise all tasks keep their indices, which must be distinct.

    Args:
        *resolvers: The resolvers, at least one.
        **overrides: `rpc_layer`, `task_type` and `task_id`, which override the first resolver's.

    Raises:
        ConfigurationError: There is no resolver, or an override has another name.
        ArgumentTypeError: An argument is not a ClusterResolver.
    """

    def __init__(self, *resolvers: ClusterResolver, **overrides: object) -> None:
        unknown = overrides.keys() - {"rpc_layer", "task_type", "task_id"}
        if unknown:
            raise ConfigurationError(
                f"UnionResolver has no argument {', '.join(sorted(unknown))}; it has rpc_layer, task_type "
                "and task_id"
            )
        rpc_layer, task_type, task_id = (
            overrides.get(name) for name in ("rpc_layer", "task_type", "task_id")
        )
        if not resolvers:
            raise ConfigurationError("UnionResolver needs at least one cluster resolver, got none")
        for position, resolver in enumerate(resolvers):
            if not isinstance(resolver, ClusterResolver):
                raise ArgumentTypeError(
                    f"argument {position} of UnionResolver must be a ClusterResolver, got "
                    f"{type(resolver).__name__}"
                )
        for name, value, kind in (
            ("rpc_layer", rpc_layer, str), ("task_type", task_type, str), ("task_id", task_id, int),
        ):  # fmt: skip
            if value is not None and not isinstance(value, kind):
                raise ArgumentTypeError(f"{name} must be {kind.__name__} or None, got {value!r:.200}")
        self._resolvers = resolvers
        self._rpc_layer = rpc_layer if isinstance(rpc_layer, str) else None
        self._task_type = task_type if isinstance(task_type, str) else None
        self._task_id = task_id if isinstance(task_id, int) else None

    def cluster_spec(self) -> ClusterSpec:
        """Return the combined cluster.

        Raises:
            DuplicateTaskError: Two resolvers have the same task of a job in which one resolver has gaps.
        """
        clusters = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        sparse = {job for cluster in clusters for job, tasks in cluster.items() if isinstance(tasks, dict)}
        merged: dict[str, dict[int, str]] = {}
        for cluster in clusters:
            for job, tasks in cluster.items():
                known = merged.setdefault(job, {})
                if isinstance(tasks, list):
                    start = 0 if job in sparse else len(known)
                    tasks = dict(enumerate(tasks, start))
                if twice := known.keys() & tasks.keys():
                    raise DuplicateTaskError(
                        f"more than one cluster has task {', '.join(map(str, sorted(twice)[:20]))} of job "
                        f"{job!r}, and the tasks cannot be renumbered because one cluster has gaps. Give "
                        "each task a different index"
                    )
                known.update(tasks)
        return ClusterSpec(merged)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the given task, by default the first resolver's master.

        Args:
            task_type: Job of the task; used only with `task_id`.
            task_id: Its index in the combined cluster.
            rpc_layer: Protocol before `://` in the address; the resolver's own if None.

        Raises:
            ClusterSpecError: The task does not exist.
            DuplicateTaskError: See `cluster_spec`.
        """
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return format_master_url(address, rpc_layer or self.rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the numbers of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        """The first resolver's environment."""
        return self._resolvers[0].environment

    @property
    def task_type(self) -> str | None:
        """The value that was set here, or else the first resolver's."""
        return self._resolvers[0].task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The value that was set here, or else the first resolver's."""
        return self._resolvers[0].task_id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The value that was set here, or else the first resolver's."""
        return self._resolvers[0].rpc_layer if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


UnionClusterResolver = UnionResolver
