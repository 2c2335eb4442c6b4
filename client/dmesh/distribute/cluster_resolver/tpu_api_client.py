"""TPUs by name, through Google's TPU API v2; and the choice of the source of a TPU."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from dmesh._log import logger
from dmesh.distribute.cluster_resolver.gce_metadata import MetadataServer
from dmesh.distribute.cluster_resolver.google_api import build_service, execute, prepare, require_client
from dmesh.distribute.cluster_resolver.lookup_policy import LookupPolicy
from dmesh.distribute.cluster_resolver.tpu_client import (
    CONFIG_VARIABLE,
    DEFAULT_PORT,
    ENDPOINTS_VARIABLE,
    HOSTNAMES_VARIABLE,
    NAME_VARIABLE,
    TYPE_VARIABLE,
    LocalTpu,
    NetworkEndpoint,
    TpuAtAddresses,
    TpuClient,
    TpuInEnvironment,
    TpuOfThisVm,
    read_node_config,
    worker_of_metadata,
)
from dmesh.errors import (
    ArgumentTypeError,
    ClusterLookupError,
    ClusterNotReadyError,
    ConfigurationError,
    TpuNotFoundError,
)

RESOLVER = "TPUClusterResolver"
_DISCOVERY_VARIABLE = "TPU_API_DISCOVERY_URL"
_GONE = {"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDING", "HIDDEN"}
_OUT_OF_MEMORY = {"OUT_OF_MEMORY", "HBM_OUT_OF_MEMORY"}
_RECENT = datetime.timedelta(seconds=90)


class CloudTpu(TpuClient):
    """A TPU given by name, queried through Google's API.

    Args:
        name: The TPU's name, or its full name, `projects/P/locations/Z/nodes/NAME`.
        zone: Its zone; this machine's if None.
        project: Its project; this machine's if None.
        credentials: Credentials of google-auth; None or `default` for the application's default credentials.
        service: An API object to use instead.
        discovery_url: Template of the address of the API's description.
        policy: Limits of its requests.
        environ: The environment variables.
        metadata: The metadata server, if there is one.

    Raises:
        MissingExtraError: googleapiclient is not installed.
        ClusterLookupError: Zone or project are not given, and no metadata server has them.
    """

    def __init__(
        self,
        name: str,
        zone: str | None,
        project: str | None,
        credentials: object,
        service: Any,
        discovery_url: str | None,
        policy: LookupPolicy,
        environ: Mapping[str, str],
        metadata: MetadataServer,
    ) -> None:
        super().__init__(environ, metadata)
        if service is None:
            require_client(RESOLVER)
        self._name = name
        self._credentials = credentials
        self._service = service
        self._policy = policy
        self._discovery_url = environ.get(_DISCOVERY_VARIABLE) or discovery_url or None
        if "/" in name:
            self._full_name = name
        else:
            project = project or metadata.project()
            self._full_name = f"projects/{project}/locations/{zone or metadata.zone()}/nodes/{name}"

    def name(self) -> str:
        """Return the TPU's name."""
        return self._name

    def api_available(self) -> bool:
        """Return True."""
        return True

    def node(self) -> Mapping[str, Any]:
        """Return the API's current description of the TPU.

        Raises:
            ConfigurationError: The name is not valid.
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        if self._service is None:
            self._service = build_service(
                "tpu", "v2", self._credentials, self._discovery_url, self._policy, RESOLVER
            )
        question = f"the TPU {self._full_name}"
        request = prepare(
            lambda: self._service.projects().locations().nodes().get, question, name=self._full_name
        )
        return execute(request, question, self._policy)

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Return the addresses of its hosts, in order.

        Raises:
            ClusterNotReadyError: The TPU does not run, or is not healthy.
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        node = self.node()
        state, health = node.get("state"), node.get("health")
        if state != "READY":
            raise ClusterNotReadyError(
                f"the TPU {self._full_name} is not ready; its state is {state}. "
                + (
                    "It will not become ready again: create a new one"
                    if state in _GONE
                    else "Wait until it is READY, and try again"
                )
            )
        if isinstance(health, str) and (health.startswith("UNHEALTHY") or health == "TIMEOUT"):
            raise ClusterNotReadyError(
                f"the TPU {self._full_name} is not healthy; its health is {health}"
                f"{_reported(node.get('healthDescription'))}. Wait until it is HEALTHY, or create a new one"
            )
        if node.get("networkEndpoints"):
            entries = node["networkEndpoints"]
        else:  # version 1 of the API has a single host here
            entries = [{"ipAddress": node.get("ipAddress"), "port": node.get("port")}]
        return [self._endpoint(entry) for entry in entries]

    def accelerator_type(self) -> str | None:
        """Return its type, such as `v2-8`.

        Raises:
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        return self._text("acceleratorType") or super().accelerator_type()

    def state(self) -> str | None:
        """Return its state, such as READY.

        Raises:
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        return self._text("state")

    def health(self) -> str | None:
        """Return its health, such as HEALTHY.

        Raises:
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        return self._text("health")

    def runtime_version(self) -> str | None:
        """Return the version of its software.

        Raises:
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        node = self.node()
        return node.get("runtimeVersion") or node.get("tensorflowVersion")

    def symptoms(self) -> Sequence[Mapping[str, str]]:
        """Return the problems that the API reports.

        Raises:
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        return tuple(self.node().get("symptoms") or ())

    def recoverable(self) -> bool:
        """Return whether a program on it can continue: the TPU exists, and did not just run out of memory.

        Raises:
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        node = self.node()
        if node.get("state") in ("TERMINATED", "PREEMPTED"):
            return False
        now = datetime.datetime.now(datetime.UTC)
        return not any(
            symptom.get("symptomType") in _OUT_OF_MEMORY and now - _time(symptom.get("createTime")) < _RECENT
            for symptom in node.get("symptoms") or ()
        )

    def wait_for_healthy(self, timeout_s: float = 1200, interval: float = 30) -> None:
        """Wait until the TPU is healthy.

        Args:
            timeout_s: Maximum time to wait, seconds.
            interval: Seconds between two checks.

        Raises:
            ClusterNotReadyError: The TPU did not become healthy in time.
            ClusterLookupError: The API does not know the TPU, refuses the request, or does not answer.
        """
        deadline = self._policy.clock() + timeout_s
        while (node := self.node()).get("health") != "HEALTHY":
            said = f"state {node.get('state')}, health {node.get('health')}"
            if self._policy.clock() + interval > deadline:
                raise ClusterNotReadyError(
                    f"the TPU {self._full_name} did not become healthy within {timeout_s:g} s ({said})"
                    f"{_reported(node.get('healthDescription'))}. Check it, or create a new one"
                )
            logger.warning("waiting until the TPU %s is healthy (%s)", self._full_name, said)
            self._policy.sleep(interval)

    def worker_id(self) -> int | None:
        """Return the index of this machine among its hosts; None if it is not one of them.

        Raises:
            ClusterLookupError: The metadata server does not answer.
        """
        worker = super().worker_id()
        if worker is not None or not self._metadata.in_google_cloud():
            return worker
        own = self._metadata.tpu_env().get("NODE_ID") or self._metadata.attribute("instance-id")
        return worker_of_metadata(self._metadata) if own == self._full_name.rpartition("/")[2] else None

    def _endpoint(self, entry: object) -> NetworkEndpoint:
        address = entry.get("ipAddress") if isinstance(entry, Mapping) else None
        if not isinstance(entry, Mapping) or not isinstance(address, str) or not address:
            raise ClusterNotReadyError(
                f"the TPU {self._full_name} is READY, but one of its hosts has no address yet; try again"
            )
        port = entry.get("port") or DEFAULT_PORT
        try:
            return NetworkEndpoint(ipAddress=address, port=int(port))
        except (TypeError, ValueError):
            raise ClusterLookupError(
                f"the TPU {self._full_name} has a host whose port is {port!r:.50}"
            ) from None

    def _text(self, key: str) -> str | None:
        value = self.node().get(key)
        return value if isinstance(value, str) else None


def find_tpu(
    tpu: str | Sequence[str] | None,
    zone: str | None,
    project: str | None,
    credentials: object,
    service: Any,
    discovery_url: str | None,
    policy: LookupPolicy,
    environ: Mapping[str, str],
    metadata: MetadataServer,
) -> TpuClient:
    """Choose the TPU and the source of its description.

    The first of these decides: `tpu`, if it is not empty; `KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`; `TPU_NAME`;
    `TPU_CONFIG`; `TPU_WORKER_HOSTNAMES`; the metadata of the machine, if it is a TPU VM;
    `TPU_ACCELERATOR_TYPE`, for a TPU in this machine.

    Args:
        tpu: `local`, a name, `grpc://...`, or a list of one of these; empty or None for the environment's.
        zone: The TPU's zone.
        project: Its project.
        credentials: Credentials of google-auth.
        service: An API object.
        discovery_url: Template of the address of the API's description.
        policy: Limits of its requests.
        environ: The environment variables.
        metadata: The metadata server, if there is one.

    Raises:
        ArgumentTypeError: `tpu` has another type.
        ConfigurationError: The list is empty, or an address is malformed.
        NotImplementedError: The list has several TPUs.
        MissingExtraError: googleapiclient is needed and not installed.
        TpuNotFoundError: Neither the arguments nor the environment name or describe a TPU.
        ClusterLookupError: Zone or project are not given, and no metadata server has them; or the
            metadata server, the only possible source, does not answer.
    """
    if isinstance(tpu, list | tuple):
        if not tpu:
            raise ConfigurationError("the list of TPUs is empty; name one")
        if len(tpu) > 1:
            raise NotImplementedError(
                f"got {len(tpu)} TPUs, but a resolver is for one. Use a resolver for each, and a "
                "UnionResolver of them"
            )
        tpu = tpu[0]
    if not (tpu is None or isinstance(tpu, str)):
        raise ArgumentTypeError(f"tpu must be a str or None, got {tpu!r:.200}")
    name, source = tpu, "tpu"
    if not name and (name := environ.get(ENDPOINTS_VARIABLE)):
        return TpuAtAddresses(name, ENDPOINTS_VARIABLE, environ, metadata)
    if not name:
        name, source = environ.get(NAME_VARIABLE), NAME_VARIABLE
    if not name and (config := environ.get(CONFIG_VARIABLE)):
        name, its_project, its_zone = read_node_config(config)
        project, zone = project or its_project, zone or its_zone
    if name == "local":
        return LocalTpu(environ, metadata)
    if name:
        if name.startswith("grpc://"):
            return TpuAtAddresses(name, source, environ, metadata)
        return CloudTpu(name, zone, project, credentials, service, discovery_url, policy, environ, metadata)
    if environ.get(HOSTNAMES_VARIABLE):
        return TpuInEnvironment(environ, metadata)
    return _tpu_of_this_machine(environ, metadata)


def _tpu_of_this_machine(environ: Mapping[str, str], metadata: MetadataServer) -> TpuClient:
    """Return the TPU of this machine, from its metadata or the environment."""
    described = environ.get(TYPE_VARIABLE, "").strip()
    skip = environ.get("TPU_SKIP_MDS_QUERY", "").lower() in ("1", "true", "yes")
    asked = not skip and metadata.in_google_cloud()
    if asked:
        vm = TpuOfThisVm(environ, metadata)
        try:
            if vm.exists():
                return vm
        except ClusterLookupError as error:
            if not described:
                raise
            logger.warning("%s; continuing with the TPU that %s describes", error, TYPE_VARIABLE)
    if described:
        return LocalTpu(environ, metadata)
    raise TpuNotFoundError(
        f"no TPU was named. Pass its name or tpu='grpc://HOST:PORT', or set {NAME_VARIABLE}, "
        f"{ENDPOINTS_VARIABLE} or {HOSTNAMES_VARIABLE}; for a TPU in this machine, set {TYPE_VARIABLE} "
        "to a type such as v2-8"
        + (". This machine is in Google's cloud, but is not a TPU VM" if asked else "")
    )


def _reported(description: object) -> str:
    return f" ({description})" if isinstance(description, str) and description else ""


def _time(text: object) -> datetime.datetime:
    try:
        moment = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return datetime.datetime.min.replace(tzinfo=datetime.UTC)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
