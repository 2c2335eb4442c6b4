"""Descriptions of a TPU from several sources: its hosts, its type, its state.

- `LocalTpu`: a TPU in this machine, `tpu="local"`.
- `TpuAtAddresses`: a TPU given by its hosts' addresses, `tpu="grpc://..."`, or GKE's endpoints.
- `TpuInEnvironment`: a TPU slice of GKE, from the variables of its pods.
- `TpuOfThisVm`: the TPU of a TPU VM, from its metadata.
- `tpu_api_client.CloudTpu`: a TPU given by name, from Google's API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict

from dmesh.config import client as config
from dmesh.config.addresses import HOST_PATTERN, is_ipv6, shown, split_address
from dmesh.distribute.cluster_resolver.gce_metadata import MetadataServer
from dmesh.distribute.cluster_resolver.multislice import Multislice
from dmesh.errors import ClusterLookupError, ConfigurationError, ResolverError

DEFAULT_PORT = 8470
"""Default port of a TPU's hosts."""
ENDPOINTS_VARIABLE = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
NAME_VARIABLE = "TPU_NAME"
CONFIG_VARIABLE = "TPU_CONFIG"
HOSTNAMES_VARIABLE = "TPU_WORKER_HOSTNAMES"
TYPE_VARIABLE = "TPU_ACCELERATOR_TYPE"
_WORKER_VARIABLES = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")
_GRPC = "grpc://"
_MOST_HOSTS = 65_536


class NetworkEndpoint(TypedDict):
    """Address of a TPU's host, with the API's field names."""

    ipAddress: str
    port: int


class TpuClient:
    """A TPU. Values that its source does not know are None.

    Args:
        environ: The environment variables.
        metadata: The metadata server, if there is one.
    """

    def __init__(self, environ: Mapping[str, str], metadata: MetadataServer) -> None:
        self._environ = environ
        self._metadata = metadata

    def name(self) -> str:
        """Return the TPU's name, or a description."""
        raise NotImplementedError

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Return the addresses of its hosts, in order.

        Raises:
            ClusterNotReadyError: The TPU does not run.
            ResolverError: Its hosts are unknown.
        """
        raise NotImplementedError

    def is_here(self) -> bool:
        """Return whether this machine is the TPU's only host, so that there is nothing to connect to.

        Raises:
            ResolverError: Its hosts are unknown.
        """
        return False

    def api_available(self) -> bool:
        """Return whether Google's API knows this TPU; without the API, state and health are unknown."""
        return False

    def accelerator_type(self) -> str | None:
        """Return its type, such as `v2-8`."""
        return self._environ.get(TYPE_VARIABLE, "").strip() or None

    def state(self) -> str | None:
        """Return its state, such as READY."""
        return None

    def health(self) -> str | None:
        """Return its health, such as HEALTHY."""
        return None

    def runtime_version(self) -> str | None:
        """Return the version of its software."""
        return None

    def symptoms(self) -> Sequence[Mapping[str, str]]:
        """Return its problems."""
        return ()

    def recoverable(self) -> bool:
        """Return whether a program on it can continue sooner or later; if not, a new TPU must be created."""
        return True

    def wait_for_healthy(self, timeout_s: float = 1200, interval: float = 30) -> None:
        """Wait until the TPU is healthy.

        Args:
            timeout_s: Maximum time to wait, seconds.
            interval: Seconds between two checks.

        Raises:
            ResolverError: The TPU did not become healthy, or its health is unknown.
        """
        del timeout_s, interval
        raise ResolverError(
            f"the health of the TPU {shown(self.name())} is unknown, because it was not given by name. Pass "
            "its name, for which Google's API reports the health"
        )

    def worker_id(self) -> int | None:
        """Return the index of this machine among the TPU's hosts.

        Raises:
            ConfigurationError: A variable of the environment is malformed.
        """
        for variable in _WORKER_VARIABLES:
            if text := self._environ.get(variable, "").strip():
                return _host_number(text, variable)
        return None

    def multislice(self) -> Multislice | None:
        """Return this slice's index among several; None for a single slice, or if unknown.

        Raises:
            ConfigurationError: A value of the environment or the metadata is malformed.
            ResolverError: A value is missing.
        """
        return None

    def get_local_ip(self) -> str:
        """Return the address at which the TPU's hosts reach this machine.

        Raises:
            ClusterLookupError: The metadata server does not have it.
        """
        if not self._metadata.in_google_cloud():
            return "127.0.0.1"
        return self._metadata.require(
            "instance/network-interfaces/0/ip", "the address of this machine", "Pass coordinator_address=..."
        )


class LocalTpu(TpuClient):
    """A TPU in this machine."""

    def name(self) -> str:
        """Return `local`."""
        return "local"

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Return no addresses, because there is nothing to connect to."""
        return []

    def is_here(self) -> bool:
        """Return True."""
        return True

    def worker_id(self) -> int:
        """Return this client's id: all processes that share this machine's TPU are clients.

        Raises:
            ConfigurationError: A variable of the environment is malformed.
        """
        return config.client_id()

    def get_local_ip(self) -> str:
        """Return 127.0.0.1."""
        return "127.0.0.1"


class TpuAtAddresses(TpuClient):
    """A TPU given by its hosts' addresses.

    Args:
        text: `grpc://HOST:PORT` of the hosts, separated by commas; the default port is 8470.
        source: Origin of the addresses, for errors.
        environ: The environment variables.
        metadata: The metadata server, if there is one.

    Raises:
        ConfigurationError: An address is malformed.
    """

    def __init__(self, text: str, source: str, environ: Mapping[str, str], metadata: MetadataServer) -> None:
        super().__init__(environ, metadata)
        self._text = text
        self._endpoints = read_endpoints(text, source)

    def name(self) -> str:
        """Return the text of the addresses."""
        return self._text

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Return the addresses."""
        return [endpoint.copy() for endpoint in self._endpoints]


class TpuInEnvironment(TpuClient):
    """A TPU slice of GKE, described by its pods' environment variables."""

    def name(self) -> str:
        """Return `TPU_NAME`, or the host names."""
        return self._environ.get(NAME_VARIABLE) or self._environ[HOSTNAMES_VARIABLE]

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Return the hosts of `TPU_WORKER_HOSTNAMES`.

        Raises:
            ConfigurationError: A host name is malformed.
        """
        return read_endpoints(self._environ[HOSTNAMES_VARIABLE], HOSTNAMES_VARIABLE)

    def multislice(self) -> Multislice | None:
        """Return the values of the `MEGASCALE_*` variables.

        Raises:
            ConfigurationError: One of them is malformed.
            ResolverError: One of them is missing.
        """
        return Multislice.read(self._environ.get)

    def is_here(self) -> bool:
        """Return whether only one host, this pod, is listed.

        Raises:
            ConfigurationError: A host name is malformed.
        """
        return len(self.network_endpoints()) == 1


class TpuOfThisVm(TpuClient):
    """The TPU of this TPU VM, from its metadata."""

    def exists(self) -> bool:
        """Return whether this machine is a TPU VM.

        Raises:
            ClusterLookupError: The metadata server does not answer.
        """
        return bool(self._metadata.attribute("worker-network-endpoints") or self._type_of_metadata())

    def name(self) -> str:
        """Return the TPU's name, or the machine's name if the metadata lacks it."""
        name = self._metadata.tpu_env().get("NODE_ID") or self._metadata.attribute("instance-id")
        return name or self._metadata.get("instance/name") or "this TPU VM"

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Return the hosts of the attribute `worker-network-endpoints`; none if the metadata lacks it.

        Raises:
            ClusterLookupError: The metadata server does not answer, or its reply is malformed.
        """
        entries = self._metadata.attribute("worker-network-endpoints")
        if entries is None:
            return []
        # Each is ...:...:IP; only the address is used, which may have colons.
        hosts = [entry.strip().split(":", 2)[-1] for entry in entries.split(",") if entry.strip()]
        if not hosts or not all(HOST_PATTERN.fullmatch(host) or is_ipv6(host) for host in hosts):
            raise ClusterLookupError(
                "the attribute worker-network-endpoints of this machine has no list of hosts: "
                f"{shown(entries)}. Pass the TPU's name, or its addresses as tpu='grpc://HOST:PORT,...'"
            )
        return [NetworkEndpoint(ipAddress=host, port=DEFAULT_PORT) for host in hosts]

    def is_here(self) -> bool:
        """Return whether the metadata lists only this host.

        Raises:
            ClusterLookupError: The metadata server does not answer, or its reply is malformed.
        """
        return len(self.network_endpoints()) <= 1

    def multislice(self) -> Multislice | None:
        """Return the values of the `MEGASCALE_*` variables of the environment, or else of the metadata.

        Raises:
            ConfigurationError: One of them is malformed.
            ResolverError: One of them is missing.
            ClusterLookupError: The metadata server does not answer.
        """
        return Multislice.read(lambda name: self._environ.get(name) or self._metadata.tpu_env().get(name))

    def accelerator_type(self) -> str | None:
        """Return the TPU's type from the environment, or else from the metadata.

        Raises:
            ClusterLookupError: The metadata server does not answer.
        """
        return super().accelerator_type() or self._type_of_metadata()

    def _type_of_metadata(self) -> str | None:
        said = self._metadata.attribute("accelerator-type")
        return said or self._metadata.tpu_env().get("ACCELERATOR_TYPE") or None

    def worker_id(self) -> int | None:
        """Return the index of this machine among the TPU's hosts.

        Raises:
            ClusterLookupError: The metadata server does not answer.
        """
        worker = super().worker_id()
        return worker_of_metadata(self._metadata) if worker is None else worker


def worker_of_metadata(metadata: MetadataServer) -> int | None:
    """Return the index of this machine among a TPU's hosts, from its metadata; None if it is not one.

    Raises:
        ClusterLookupError: The metadata server does not answer.
    """
    text = metadata.attribute("agent-worker-number") or metadata.tpu_env().get("WORKER_ID")
    return None if text is None else _host_number(text, "the attribute agent-worker-number")


def read_endpoints(text: str, source: str) -> list[NetworkEndpoint]:
    """Parse `grpc://HOST:PORT,...`; `grpc://` and the port are optional.

    Args:
        text: The addresses.
        source: Origin of the addresses, for errors.

    Raises:
        ConfigurationError: There is no address, or one is malformed.
    """
    endpoints = []
    for entry in text.split(","):
        address = entry.strip().removeprefix(_GRPC).rstrip("/")
        if not address:
            raise ConfigurationError(
                f"{source} is {shown(text)}: an address is empty. Expected grpc://HOST:PORT of the TPU's "
                "hosts, separated by commas"
            )
        if is_ipv6(address):
            address = f"[{address}]"
        if ":" not in address.rpartition("]")[2]:
            address = f"{address}:{DEFAULT_PORT}"
        host, port = split_address(address, source)
        endpoints.append(NetworkEndpoint(ipAddress=host, port=port))
    if len(endpoints) > _MOST_HOSTS:
        raise ConfigurationError(f"{source} has {len(endpoints)} addresses, more than any TPU has hosts")
    return endpoints


def read_node_config(text: str) -> tuple[str | None, str | None, str | None]:
    """Parse `TPU_CONFIG`, a JSON object.

    Returns:
        The TPU's name, its project and its zone, each None if missing.

    Raises:
        ConfigurationError: The text is not such an object.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{CONFIG_VARIABLE} is not JSON: {error}. Correct or unset it") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{CONFIG_VARIABLE} is JSON, but not an object. Correct or unset it")
    values = [config.get(key) or None for key in ("tpu_node_name", "project", "zone")]
    if not all(value is None or isinstance(value, str) for value in values):
        raise ConfigurationError(
            f"{CONFIG_VARIABLE}: tpu_node_name, project and zone must be text. Correct or unset it"
        )
    return values[0], values[1], values[2]


def _host_number(text: str, source: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigurationError(
            f"{source} is {shown(text)}; expected the index of this host within its TPU, from 0"
        )
    return int(text)
