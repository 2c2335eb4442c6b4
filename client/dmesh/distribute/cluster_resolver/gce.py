"""Finds the machines of an instance group of Google Compute Engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dmesh.config.addresses import check_port, join_address, shown
from dmesh.config.settings import JOB_NAME_PATTERN
from dmesh.distribute.cluster_resolver.base import ClusterResolver
from dmesh.distribute.cluster_resolver.google_api import build_service, execute, prepare, require_client
from dmesh.distribute.cluster_resolver.lookup_policy import LookupPolicy
from dmesh.errors import ClusterLookupError, ClusterNotReadyError, ConfigurationError, ResolverError
from dmesh.train import ClusterSpec

_MOST_PAGES = 1000


class GCEClusterResolver(ClusterResolver):
    """Finds the running machines of an instance group through the Compute API.

    The machines are the tasks of one job, sorted by address. Pass a different `task_id` on each machine,
    because the resolver cannot determine it.

    Args:
        project: The project's id.
        zone: The instance group's zone.
        instance_group: Its name.
        port: Port on which each machine listens.
        task_type: Job of the machines; it cannot be changed later.
        task_id: Index of this machine.
        rpc_layer: Protocol to put before the masters' addresses.
        credentials: Credentials of google-auth; None or `default` for the application's default credentials.
        service: An API object of `googleapiclient.discovery`, such as of `build("compute", "v1")`; then
            `credentials` are not used.
        discovery_url: Template of the address of the API's description, with `{api}` and `{apiVersion}`.
        policy: Limits of its requests.

    Raises:
        MissingExtraError: googleapiclient is not installed, and there is no `service`.
        ConfigurationError: An argument has a bad value.
        ClusterLookupDeniedError: There are no credentials.
        ClusterLookupError: The API's description cannot be read.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: object = "default",
        service: Any = None,
        *,
        discovery_url: str | None = None,
        policy: LookupPolicy | None = None,
    ) -> None:
        for what, value in (("project", project), ("zone", zone), ("instance_group", instance_group)):
            if not isinstance(value, str) or not value:
                raise ConfigurationError(f"{what} is {value!r:.200}; expected its name")
        if not isinstance(task_type, str) or (task_type and not JOB_NAME_PATTERN.fullmatch(task_type)):
            raise ConfigurationError(
                f"task_type is {task_type!r:.200}; expected at most 128 letters, digits, dots, dashes or "
                "underscores"
            )
        self._port = check_port("port", port)
        self._project, self._zone, self._group = project, zone, instance_group
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._policy = policy or LookupPolicy()
        name = type(self).__name__
        if service is None:
            require_client(name)
            service = build_service("compute", "v1", credentials, discovery_url, self._policy, name)
        self._service = service

    def cluster_spec(self) -> ClusterSpec:
        """Return the group's running machines.

        Raises:
            ConfigurationError: The name of the project, zone or group is not valid.
            ClusterNotReadyError: A machine stopped during the lookup, or has no address.
            ClusterLookupError: The API does not know the group, refuses the request, or does not answer.
        """
        addresses = sorted(map(self._address, self._names()))
        return ClusterSpec({str(self._task_type): addresses})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task.

        Args:
            task_type: Its job; this process's if None.
            task_id: Its index; this process's if None.
            rpc_layer: Protocol before `://` in the address; the resolver's own if None.

        Returns:
            The address; empty if there is no index.

        Raises:
            ClusterSpecError: The task does not exist.
            ClusterNotReadyError: A machine stopped during the lookup, or has no address.
            ClusterLookupError: The API does not know the group, refuses the request, or does not answer.
        """
        return self._master_or_own(task_type, task_id, rpc_layer)

    @property
    def task_type(self) -> str | None:
        """Job of the machines."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise ResolverError(
            f"task_type is {self._task_type!r} and cannot be set to {task_type!r:.200}: the machines of the "
            f"instance group are tasks of one job. Create another {type(self).__name__}"
        )

    def _names(self) -> Iterator[str]:
        """Yield the names of the group's running machines, page by page."""
        question = f"the instance group {self._group} of zone {self._zone} in project {self._project}"
        request = prepare(
            lambda: self._service.instanceGroups().listInstances,
            question,
            project=self._project,
            zone=self._zone,
            instanceGroup=self._group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        for _ in range(_MOST_PAGES):
            page = execute(request, question, self._policy)
            for item in page.get("items") or ():
                url = item.get("instance") if isinstance(item, Mapping) else None
                if not isinstance(url, str):
                    raise ClusterLookupError(f"{question} has an entry without a machine: {item!r:.200}")
                yield url.rpartition("/")[2]
            request = prepare(
                lambda: self._service.instanceGroups().listInstances_next,
                question,
                previous_request=request,
                previous_response=page,
            )
            if request is None:
                return
        raise ClusterLookupError(f"{question} has more than the limit of {_MOST_PAGES} pages")

    def _address(self, name: str) -> str:
        question = f"the machine {name} of zone {self._zone}"
        request = prepare(
            lambda: self._service.instances().get,
            question,
            project=self._project,
            zone=self._zone,
            instance=name,
        )
        machine = execute(request, question, self._policy)
        status = machine.get("status", "RUNNING")
        if status != "RUNNING":
            raise ClusterNotReadyError(
                f"the machine {name} of the instance group {self._group} is no longer running; its "
                f"status is {shown(str(status))}. Try again when the group is complete"
            )
        interfaces: Any = machine.get("networkInterfaces") or [{}]
        ip = interfaces[0].get("networkIP")
        if not isinstance(ip, str) or not ip:
            raise ClusterNotReadyError(f"the machine {name} has no address yet; try again")
        return join_address(ip, self._port)
