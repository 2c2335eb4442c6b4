"""Finds the pods of an indexed job or a stateful set in Kubernetes by their names, without a request."""

from __future__ import annotations

import re
import socket

from dmesh.config.addresses import HOST_PATTERN, check_port, shown
from dmesh.distribute.cluster_resolver.base import ClusterResolver, format_master_url
from dmesh.errors import ConfigurationError, ResolverError
from dmesh.runtime import context
from dmesh.train import ClusterSpec

DEFAULT_PORT = 8470
"""Default port of clients in pods."""
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Variable with the index of a pod of an indexed job."""
MOST_PODS = 65_536
_ORDINAL = re.compile(r"(.+)-([0-9]{1,9})", re.ASCII)


class KubernetesServiceResolver(ClusterResolver):
    """Finds the pods of an indexed job or a stateful set by their names, without a request.

    The pods are called `NAME-0`, `NAME-1` and so on, and a headless service publishes these names in DNS. The
    host name or `JOB_COMPLETION_INDEX` tells which pod this process is in.

    Args:
        service: Name of the headless service.
        size: Number of pods.
        port: Port on which each pod listens.
        job_name: Job of the pods.
        rpc_layer: Protocol to put before the masters' addresses.

    Raises:
        ConfigurationError: An argument has a bad value.
        ResolverError: This host's name does not end in a number.
    """

    def __init__(
        self,
        service: str,
        size: int,
        port: int = DEFAULT_PORT,
        *,
        job_name: str = "worker",
        rpc_layer: str | None = "grpc",
    ) -> None:
        if not isinstance(service, str) or not HOST_PATTERN.fullmatch(service):
            raise ConfigurationError(f"service is {service!r:.200}; expected the name of a headless service")
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_PODS:
            raise ConfigurationError(f"size is {size!r:.200}; expected a number of pods, from 1")
        self._service, self._size = service, size
        self._port = check_port("port", port)
        self._job_name = job_name
        self._rpc_layer = rpc_layer
        self._own()

    def cluster_spec(self) -> ClusterSpec:
        """Return the names of all pods."""
        name, _ = self._own()
        return ClusterSpec(
            {self.task_type: [f"{name}-{index}.{self._service}:{self._port}" for index in range(self._size)]}
        )

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the given task, by default of the first pod.

        Raises:
            ClusterSpecError: The task does not exist.
        """
        job = self.task_type if task_type is None else task_type
        address = self.cluster_spec().task_address(job, 0 if task_id is None else task_id)
        return format_master_url(address, rpc_layer or self._rpc_layer)

    @property
    def task_type(self) -> str:
        """Job of the pods."""
        return self._task_type or self._job_name

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Index of this process's pod."""
        return self._own()[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _own(self) -> tuple[str, int]:
        environ = context.environment()
        hostname = (environ.get("HOSTNAME") or socket.gethostname()).partition(".")[0]
        match = _ORDINAL.fullmatch(hostname)
        index = environ.get(INDEX_VARIABLE) or (match[2] if match else "")
        if match is None or match[2] != index or int(index) >= self._size:
            raise ResolverError(
                f"this host's name is {shown(hostname)}, and {INDEX_VARIABLE} is "
                f"{shown(environ.get(INDEX_VARIABLE, ''))}; expected a pod of an indexed job or a stateful "
                f"set, with a name such as NAME-NUMBER and a number from 0 to {self._size - 1}"
            )
        return match[1], int(index)
