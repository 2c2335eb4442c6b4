"""The cluster that `TF_CONFIG` describes, as Kubeflow, Vertex AI and many scripts set it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dmesh.config.addresses import shown
from dmesh.distribute.cluster_resolver.base import ClusterResolver, format_master_url
from dmesh.distribute.cluster_resolver.variables import text
from dmesh.errors import ConfigurationError
from dmesh.train import ClusterSpec

_ADVICE = 'an object such as {"cluster": {"worker": ["host1:10000"]}, "task": {"type": "worker", "index": 0}}'


class TFConfigClusterResolver(ClusterResolver):
    """Reads the environment variable `TF_CONFIG`, a JSON object, at every call.

    It has `cluster`, the jobs with their tasks' addresses; `task`, with this process's `type` and `index`;
    and perhaps `rpc_layer` and `session_master`. What is given here comes before what is there.

    Args:
        task_type: Job of this process.
        task_id: Index of this process.
        rpc_layer: Protocol to put before the masters' addresses.
        environment: What `environment` answers.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Returns the jobs in `cluster`; none if the variable is not set or has no cluster.

        Raises:
            ConfigurationError: The variable is not a JSON object.
            ArgumentTypeError: `cluster` is not a cluster.
            ClusterSpecError: Likewise.
        """
        return ClusterSpec(_load().get("cluster", {}))

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns `session_master`, or else the address of the task that is named, or of this one.

        Args:
            task_type: Job of the task; this process's if None.
            task_id: Its index; this process's if None.
            rpc_layer: What stands before `://` in the answer; the resolver's own if None.

        Returns:
            The address; empty if there is at most one task. `session_master` as it is there.

        Raises:
            ConfigurationError: The variable is malformed.
            ClusterSpecError: There is no such task.
        """
        session_master = _load().get("session_master")
        if session_master is not None:
            return str(session_master)
        spec = self.cluster_spec()
        if not spec or sum(spec.num_tasks(job) for job in spec.jobs) <= 1:
            return ""
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            raise ConfigurationError(
                "TF_CONFIG does not say which task this is, and neither did the caller; add "
                '"task": {"type": "worker", "index": 0}, or pass task_type and task_id'
            )
        return format_master_url(spec.task_address(job, index), rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Returns how many accelerators a task has, by type; see `ClusterResolver.num_accelerators`.

        Args:
            task_type: Job of the task; this process's if None.
            task_id: Its index; this process's if None.
            config_proto: Has no meaning here.
        """
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        return super().num_accelerators(job, index, config_proto)

    @property
    def environment(self) -> str:
        """The environment that it was made with."""
        return self._environment or ""

    @property
    def task_type(self) -> str | None:
        """Job of this process: what was set, or else the task's `type`; None if neither is known."""
        if self._task_type is not None:
            return self._task_type
        kind = _task().get("type")
        return None if kind is None else str(kind)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Index of this process: what was set, or else the task's `index`; None if neither is known."""
        if self._task_id is not None:
            return self._task_id
        index = _task().get("index")
        if index is None:
            return None
        if isinstance(index, str) and index.isascii() and index.isdecimal() and len(index) < 10:
            return int(index)
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ConfigurationError(
                f"the task's index in TF_CONFIG is {index!r:.200}; expected an integer from 0"
            )
        return index

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The value that was set, or else `rpc_layer`."""
        if self._rpc_layer is not None:
            return self._rpc_layer
        layer = _load().get("rpc_layer")
        return None if layer is None else str(layer)

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


def detected() -> TFConfigClusterResolver | None:
    """Returns a resolver for the cluster in `TF_CONFIG`; None if there is none, or not who this process is.

    Raises:
        ConfigurationError: The variable is malformed.
        ArgumentTypeError: Its cluster is none.
        ClusterSpecError: Likewise.
    """
    resolver = TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    return resolver if spec and resolver.task_type is not None and resolver.task_id is not None else None


def _load() -> Mapping[str, Any]:
    raw = text("TF_CONFIG")
    if raw is None:
        return {}
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"TF_CONFIG is not JSON: {error}. It begins {shown(raw[:80])}; expected {_ADVICE}"
        ) from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"TF_CONFIG is {shown(raw)}; expected {_ADVICE}")
    return config


def _task() -> Mapping[str, Any]:
    task = _load().get("task", {})
    if not isinstance(task, dict):
        raise ConfigurationError(f"the task in TF_CONFIG is {task!r:.200}; expected {_ADVICE}")
    return task
