"""Resolver of the cluster in `TF_CONFIG`, which Kubeflow, Vertex AI and many scripts set."""

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

    The object has `cluster`, the jobs with their tasks' addresses; `task`, with this process's `type` and
    `index`; and optionally `rpc_layer` and `session_master`. Arguments override its values.

    Args:
        task_type: Job of this process.
        task_id: Index of this process.
        rpc_layer: Protocol to put before the masters' addresses.
        environment: Value of `environment`.
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
        """Return the jobs in `cluster`; no jobs if the variable is not set or has no cluster.

        Raises:
            ConfigurationError: The variable is not a JSON object.
            ArgumentTypeError: `cluster` is not a valid cluster.
            ClusterSpecError: `cluster` is not a valid cluster.
        """
        return ClusterSpec(_load().get("cluster", {}))

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return `session_master`, or else the address of the given task, by default of this process's.

        Args:
            task_type: Job of the task; this process's if None.
            task_id: Its index; this process's if None.
            rpc_layer: Protocol before `://` in the address; the resolver's own if None.

        Returns:
            `session_master` unchanged, or the address; empty if there is at most one task.

        Raises:
            ConfigurationError: The variable is malformed.
            ClusterSpecError: The task does not exist.
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
                "TF_CONFIG has no task, and no task was passed. Add "
                '"task": {"type": "worker", "index": 0}, or pass task_type and task_id'
            )
        return format_master_url(spec.task_address(job, index), rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of accelerators of a task, by type; see `ClusterResolver.num_accelerators`.

        Args:
            task_type: Job of the task; this process's if None.
            task_id: Its index; this process's if None.
            config_proto: Ignored.
        """
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        return super().num_accelerators(job, index, config_proto)

    @property
    def environment(self) -> str:
        """The environment that was passed."""
        return self._environment or ""

    @property
    def task_type(self) -> str | None:
        """Job of this process: the value that was set, or else the task's `type`; None if unknown."""
        if self._task_type is not None:
            return self._task_type
        kind = _task().get("type")
        return None if kind is None else str(kind)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Index of this process: the value that was set, or else the task's `index`; None if unknown."""
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
    """Return a resolver for the cluster in `TF_CONFIG`; None if the variable lacks the cluster or the task.

    Raises:
        ConfigurationError: The variable is malformed.
        ArgumentTypeError: Its cluster is not valid.
        ClusterSpecError: Its cluster is not valid.
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
