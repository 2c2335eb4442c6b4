"""Finds the hosts of a TPU through Google's API, the environment, or the metadata of this machine."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dmesh.config.addresses import WILDCARD_HOSTS, join_address, split_address
from dmesh.config.settings import JOB_NAME_PATTERN, Settings
from dmesh.devices.device import known_members, num_local_devices
from dmesh.distribute.cluster_resolver.base import ClusterResolver, format_master_url
from dmesh.distribute.cluster_resolver.gce_metadata import METADATA_POLICY, MetadataServer
from dmesh.distribute.cluster_resolver.lookup_policy import LookupPolicy
from dmesh.distribute.cluster_resolver.tpu_api_client import find_tpu
from dmesh.distribute.cluster_resolver.tpu_client import DEFAULT_PORT, LocalTpu, TpuClient
from dmesh.distribute.cluster_resolver.tpu_metadata import (
    TPUSystemMetadata,
    cores_per_member,
    describe_system,
)
from dmesh.errors import ClusterSpecError, ConfigurationError, ResolverError
from dmesh.runtime import context
from dmesh.tpu.accelerator import TpuSystem
from dmesh.train import ClusterSpec

if TYPE_CHECKING:
    from dmesh.coordination.server import HostedServer
    from dmesh.v1.topology_pb2 import TopologyProto, TPUHardwareFeature


class TPUClusterResolver(ClusterResolver):
    """Finds the hosts of a TPU through Google's cloud or the environment.

    The hosts are the tasks of the cluster, and each runs the program. `dmesh.tpu` describes the TPU's cores.

    ```python
    resolver = TPUClusterResolver("my-tpu", zone="us-central1-b")     # queries the TPU API v2
    resolver = TPUClusterResolver("grpc://10.0.0.2:8470,10.0.0.3")    # needs no query
    resolver = TPUClusterResolver()                                   # reads the environment
    ```

    Args:
        tpu: The name of a TPU; or `grpc://HOST:PORT` of its hosts, separated by commas, by default port
            8470; or `local` for a TPU in this machine. If empty or None, the first of these decides:
            `KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`, `TPU_NAME`, `TPU_CONFIG`, `TPU_WORKER_HOSTNAMES`, the metadata
            of a TPU VM, `TPU_ACCELERATOR_TYPE` (a TPU in this machine). A list must have one entry.
        zone: Zone of a TPU given by name; this machine's if empty.
        project: Its project; this machine's if empty.
        job_name: Job of the TPU's hosts.
        coordinator_name: Job of the coordinator; None for a cluster spec without a coordinator.
        coordinator_address: Its address. If None, and there is a name, the resolver starts a coordination
            server in this process, until the end of the `with` block or of the process.
        credentials: Credentials of google-auth; None or `default` for the application's default credentials.
        service: An API object of `googleapiclient.discovery`; then `credentials` are not used.
        discovery_url: Template of the address of the API's description, with `{api}` and `{apiVersion}`. The
            environment variable `TPU_API_DISCOVERY_URL` overrides it.
        accelerator_type: The TPU's type, such as `v2-8`; overrides the API and the environment.
        policy: Limits of requests to the API.
        metadata: Client of the metadata server.

    Raises:
        MissingExtraError: The TPU has a name and googleapiclient is not installed.
        ConfigurationError: An argument has a bad value.
        TpuNotFoundError: Neither the arguments nor the environment name or describe a TPU.
        ClusterLookupError: Zone or project are not given, and no metadata server has them.
        NotImplementedError: `tpu` is a list of several TPUs.
    """

    def __init__(
        self,
        tpu: str | Sequence[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: object = "default",
        service: Any = None,
        discovery_url: str | None = None,
        *,
        accelerator_type: str | None = None,
        policy: LookupPolicy | None = None,
        metadata: MetadataServer | None = None,
    ) -> None:
        environ = context.environment()
        for what, name in (("job_name", job_name), ("coordinator_name", coordinator_name or "coordinator")):
            if not isinstance(name, str) or not JOB_NAME_PATTERN.fullmatch(name):
                raise ConfigurationError(
                    f"{what} is {name!r:.200}; expected 1 to 128 letters, digits, dots, dashes or underscores"
                )
        if coordinator_name == job_name:
            raise ConfigurationError(
                f"coordinator_name and job_name are both {job_name!r}; the coordinator is a job of its own"
            )
        self._client = find_tpu(
            tpu, zone, project, credentials, service, discovery_url, policy or LookupPolicy(), environ,
            metadata or MetadataServer(METADATA_POLICY, environ),
        )  # fmt: skip
        self._accelerator_type = accelerator_type
        self._job_name = job_name
        self._rpc_layer = "grpc"
        self._tpu_topology: TopologyProto | None = None
        self._server: HostedServer | None = None
        self._coordinator_name = coordinator_name
        self._coordinator_address = coordinator_address
        if coordinator_name and not coordinator_address:
            from dmesh.runtime.bootstrap import (
                start_coordinator,  # of all of the SDK, which others need not wait for
            )

            settings = Settings.load()
            host = settings.bind_host or self._client.get_local_ip()
            # Other hosts need a real address of this machine instead of the wildcard address.
            reachable = self._client.get_local_ip() if host in WILDCARD_HOSTS else host
            self._server = start_coordinator(host, settings)
            _, port = split_address(self._server.address, "the coordinator")
            self._coordinator_address = join_address(reachable, port)

    @staticmethod
    def connect(
        tpu: str | Sequence[str] | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Find a TPU, join the cluster of its hosts and initialize it.

        Args:
            tpu: As for the class.
            zone: As for the class.
            project: As for the class.

        Returns:
            The resolver.

        Raises:
            DMeshError: See the class, `dmesh.config.experimental_connect_to_cluster` and
                `dmesh.tpu.experimental.initialize_tpu_system`.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        # Imported here, because these modules are above this package.
        system: Any = importlib.import_module("dmesh.tpu.experimental")
        config: Any = importlib.import_module("dmesh.config")
        config.experimental_connect_to_cluster(resolver)
        system.initialize_tpu_system(resolver)
        return resolver

    @property
    def cloud_tpu_client(self) -> TpuClient:
        """The TPU's state, health, type and version."""
        return self._client

    def cluster_spec(self) -> ClusterSpec:
        """Return the TPU's hosts, and the coordinator if it has a name.

        Returns:
            The spec; an empty one for a local TPU. If there are several slices, the hosts of this slice and
            the first host of all; `num_processes` is then the number of hosts.

        Raises:
            ResolverError: There are several slices, and the address of the first one is unknown.
            ClusterNotReadyError: The TPU does not run, or is not healthy.
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        hosts = [
            join_address(endpoint["ipAddress"], endpoint["port"])
            for endpoint in self._client.network_endpoints()
        ]
        slices = self._client.multislice()
        if slices is None and not hosts and self._client.is_here():
            return ClusterSpec({})
        jobs: dict[str, Any] = {self.task_type: hosts}
        if slices is not None:
            hosts = hosts or [join_address(self._client.get_local_ip(), DEFAULT_PORT)]
            known = dict(enumerate(hosts, slices.slice_id * len(hosts)))
            if slices.coordinator is not None:  # all hosts must use the same name of it
                known[0] = join_address(slices.coordinator, DEFAULT_PORT)
            elif slices.slice_id and not context.environment().get("DMESH_COORDINATOR", "").strip():
                raise ResolverError(
                    "there are several slices, and the address of the first one is unknown. Set "
                    "MEGASCALE_COORDINATOR_ADDRESS to its first host, or DMESH_COORDINATOR to a coordination "
                    "server"
                )
            jobs[self.task_type] = known
        if self._coordinator_name and self._coordinator_address:
            jobs[self._coordinator_name] = [self._coordinator_address]
        return ClusterSpec(jobs)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the given task, by default of the TPU's first host.

        Args:
            task_type: Job of the task.
            task_id: Its index.
            rpc_layer: Protocol before `://` in the address; `grpc` if None.

        Returns:
            The address, with the protocol before it. Empty for a local TPU, and for one whose only host is
            this machine, because there is nothing to connect to.

        Raises:
            ClusterSpecError: There is no such task, or the TPU has no host.
            ClusterNotReadyError: The TPU does not run, or is not healthy.
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        named = task_type is not None and task_id is not None
        if isinstance(self._client, LocalTpu):
            return ""
        if not named and self._client.is_here() and self._client.multislice() is None:
            return ""
        spec = self.cluster_spec()
        if task_type is None or task_id is None:
            task_type, task_id = self.task_type, self._task_id or 0
            task_id = task_id if self.num_processes is None else min(spec.task_indices(task_type))
            if not spec.job_tasks(task_type):
                raise ClusterSpecError(f"the TPU {self._client.name()} has no hosts")
        return format_master_url(spec.task_address(task_type, task_id), rpc_layer or self._rpc_layer)

    def get_master(self) -> str:
        """Return `master()`."""
        return self.master()

    def get_job_name(self) -> str:
        """Return the job of the TPU's hosts."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """Return the task that hosts the coordination service: the first host."""
        return f"/job:{self.get_job_name()}/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Return the size of the TPU system and its devices.

        After the initialization they come from the members' devices, before it from the TPU's type.

        Raises:
            ResolverError: The hosts have different numbers of cores.
            TopologyError: The type of TPU does not exist.
            ClusterNotReadyError: The TPU does not run, or is not healthy.
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        spec = self.cluster_spec()
        job = self.task_type
        hosts = self.num_processes or (spec.num_tasks(job) if spec else len(known_members()) or 1)
        return describe_system(job, hosts, self.num_accelerators()["TPU"])

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of TPU cores of each host.

        After the initialization it comes from the members' devices, before it from the TPU's type.

        Args:
            task_type: Ignored: all hosts are equal.
            task_id: Ignored.
            config_proto: Ignored; for TensorFlow's sessions.

        Returns:
            A dict with the number of cores under "TPU"; 0 if the type is unknown.

        Raises:
            ResolverError: The hosts have different numbers of cores.
            TopologyError: The type of TPU does not exist.
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        del task_type, task_id, config_proto
        members = known_members()
        cores = cores_per_member(members) if members else None
        if cores is None and isinstance(self._client, LocalTpu):
            cores = num_local_devices("TPU")
        if cores is None:
            cores = self._cores_of_type()
        return {"TPU": cores}

    @property
    def accelerator_type(self) -> str | None:
        """The TPU's type, such as `v2-8`; None if unknown.

        Raises:
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        return self._accelerator_type or self._client.accelerator_type()

    @property
    def task_type(self) -> str:
        """Job of the TPU's hosts."""
        return self._task_type or self._job_name

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Index of this machine among the TPU's hosts, from the environment or the metadata; by default 0.

        Hosts of several slices are numbered slice by slice.

        Raises:
            ConfigurationError: A variable of the environment is malformed.
            ClusterLookupError: The metadata server does not answer.
        """
        if self._task_id is not None:
            return self._task_id
        worker, slices = self._client.worker_id() or 0, self._client.multislice()
        return worker if slices is None else slices.slice_id * self._hosts_of_slice() + worker

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def num_processes(self) -> int | None:
        """Number of hosts if there are several slices, as only this slice's hosts are known; otherwise None.

        Raises:
            ResolverError: The `MEGASCALE_*` variables are malformed or incomplete.
        """
        slices = self._client.multislice()
        return None if slices is None else slices.num_slices * self._hosts_of_slice()

    def _hosts_of_slice(self) -> int:
        return len(self._client.network_endpoints()) or 1

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Store a topology; `tpu_hardware_feature` returns its features from now on.

        Args:
            serialized_tpu_topology: Result of `Topology.serialized()`.

        Raises:
            TopologyError: The bytes are not a topology.
        """
        from dmesh.tpu.topology import Topology
        from dmesh.v1.topology_pb2 import TopologyProto

        Topology(serialized=serialized_tpu_topology)  # raises if it is malformed
        self._tpu_topology = TopologyProto.FromString(serialized_tpu_topology)

    @property
    def tpu_hardware_feature(self) -> TPUHardwareFeature | None:
        """The TPU's special hardware; None before `set_tpu_topology`."""
        return None if self._tpu_topology is None else self._tpu_topology.tpu_hardware_feature

    def __enter__(self) -> Self:
        """Return the resolver."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the coordination server, if one was started."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def __deepcopy__(self, memo: object) -> TPUClusterResolver:
        """Return the resolver itself."""
        return self

    def _cores_of_type(self) -> int:
        kind = self.accelerator_type
        if kind is None:
            return 0
        system = TpuSystem.find(kind, context.environment())
        hosts = len(self._client.network_endpoints()) or system.num_hosts
        if system.num_cores % hosts:
            raise ResolverError(
                f"the {system.num_cores} cores of the TPU {self._client.name()}, a {kind}, cannot be divided "
                f"equally among its {hosts} hosts. Check its addresses and its type"
            )
        return system.num_cores // hosts

    def __repr__(self) -> str:
        return f"<TPUClusterResolver of {self._client.name()}, job {self.task_type}>"
