"""Several clusters as one."""

from __future__ import annotations

from dmesh.distribute.cluster_resolver.base import ClusterResolver, format_master_url
from dmesh.errors import ArgumentTypeError, ConfigurationError, DuplicateTaskError
from dmesh.train import ClusterSpec


class UnionResolver(ClusterResolver):
    """Puts the clusters of several resolvers together; whatever else it is asked, the first one answers.

    Where all resolvers have a job's tasks without gaps, those of later ones are numbered on from those of the
    earlier ones. Otherwise every task keeps its index, and no two may have the same.

    Args:
        *resolvers: The resolvers, at least one.
        **overrides: `rpc_layer`, `task_type` and `task_id`, in place of the first resolver's.

    Raises:
        ConfigurationError: There is no resolver, or an override of another name.
        ArgumentTypeError: One of them is not a ClusterResolver.
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
        """Asks all resolvers and puts their answers together.

        Raises:
            DuplicateTaskError: Two of them have the same task of a job that one of them has with gaps.
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
                        f"{job!r}, and cannot be numbered on because one of them leaves tasks out; give each "
                        "task another index"
                    )
                known.update(tasks)
        return ClusterSpec(merged)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the task that is named, or else the first resolver's master.

        Args:
            task_type: Job of the task; counts with `task_id` only.
            task_id: Its index in all clusters together.
            rpc_layer: What stands before `://` in the answer; the resolver's own if None.

        Raises:
            ClusterSpecError: There is no such task.
            DuplicateTaskError: See `cluster_spec`.
        """
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return format_master_url(address, rpc_layer or self.rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Asks the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        """The first resolver's."""
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
