"""Facts about a TPU from any source: its hosts, its type, its state.

- `LocalTpu`: the TPU that this machine has itself, `tpu="local"`.
- `TpuAtAddresses`: its hosts' addresses were given, `tpu="grpc://..."`, or GKE's endpoints.
- `TpuInEnvironment`: the variables that GKE sets in the pods of a TPU slice.
- `TpuOfThisVm`: the metadata of a TPU VM.
- `tpu_api_client.CloudTpu`: a name, and Google's API.
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
    """Address of a TPU's host; the names are the API's."""

    ipAddress: str
    port: int


class TpuClient:
    """A TPU. What a source does not know is None.

    Args:
        environ: The environment variables.
        metadata: The metadata server, if there is one.
    """

    def __init__(self, environ: Mapping[str, str], metadata: MetadataServer) -> None:
        self._environ = environ
        self._metadata = metadata

    def name(self) -> str:
        """Returns the TPU's name, or whatever was given instead."""
        raise NotImplementedError

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Returns where its hosts listen, in order.

        Raises:
            ClusterNotReadyError: It does not run.
            ResolverError: Its hosts cannot be found out.
        """
        raise NotImplementedError

    def is_here(self) -> bool:
        """Tells whether this machine is its only host, so that there is nobody to connect to.

        Raises:
            ResolverError: Its hosts cannot be found out.
        """
        return False

    def api_available(self) -> bool:
        """Tells whether Google's API knows this TPU; without it, state and health are not known."""
        return False

    def accelerator_type(self) -> str | None:
        """Returns its type, such as `v2-8`."""
        return self._environ.get(TYPE_VARIABLE, "").strip() or None

    def state(self) -> str | None:
        """Returns its state, such as READY."""
        return None

    def health(self) -> str | None:
        """Returns its health, such as HEALTHY."""
        return None

    def runtime_version(self) -> str | None:
        """Returns the version of its software."""
        return None

    def symptoms(self) -> Sequence[Mapping[str, str]]:
        """Returns what is wrong with it."""
        return ()

    def recoverable(self) -> bool:
        """Tells whether a program on it can go on sooner or later; if not, it must be created anew."""
        return True

    def wait_for_healthy(self, timeout_s: float = 1200, interval: float = 30) -> None:
        """Waits until it is healthy.

        Args:
            timeout_s: How long at most, seconds.
            interval: Seconds between two looks.

        Raises:
            ResolverError: It did not become so, or nobody knows.
        """
        del timeout_s, interval
        raise ResolverError(
            f"the health of the TPU {shown(self.name())} is known to Google's API only, which is not asked "
            "for a TPU that was given by address; pass its name"
        )

    def worker_id(self) -> int | None:
        """Returns which of its hosts this machine is.

        Raises:
            ConfigurationError: A variable of the environment is malformed.
        """
        for variable in _WORKER_VARIABLES:
            if text := self._environ.get(variable, "").strip():
                return _host_number(text, variable)
        return None

    def multislice(self) -> Multislice | None:
        """Returns this slice's place among several; None if it works alone, or if nobody knows.

        Raises:
            ConfigurationError: The environment or the metadata has nonsense.
            ResolverError: Something of it is missing.
        """
        return None

    def get_local_ip(self) -> str:
        """Returns the address of this machine, which the TPU's hosts reach.

        Raises:
            ClusterLookupError: The metadata server does not say.
        """
        if not self._metadata.in_google_cloud():
            return "127.0.0.1"
        return self._metadata.require(
            "instance/network-interfaces/0/ip", "the address of this machine", "Pass coordinator_address=..."
        )


class LocalTpu(TpuClient):
    """The TPU that this machine has itself."""

    def name(self) -> str:
        """Returns `local`."""
        return "local"

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Returns none: there is nothing to connect to."""
        return []

    def is_here(self) -> bool:
        """Tells that it is."""
        return True

    def worker_id(self) -> int:
        """Returns this client's id: whoever shares this machine's TPU is a client.

        Raises:
            ConfigurationError: A variable of the environment is malformed.
        """
        return config.client_id()

    def get_local_ip(self) -> str:
        """Returns 127.0.0.1."""
        return "127.0.0.1"


class TpuAtAddresses(TpuClient):
    """A TPU whose hosts' addresses were given.

    Args:
        text: `grpc://HOST:PORT`, more of them after commas; without a port 8470 is meant.
        source: Where that comes from, as errors name it.
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
        """Returns the addresses as they were given."""
        return self._text

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Returns the addresses."""
        return [endpoint.copy() for endpoint in self._endpoints]


class TpuInEnvironment(TpuClient):
    """A TPU slice of GKE's, whose pods know themselves from environment variables."""

    def name(self) -> str:
        """Returns `TPU_NAME`, or the host names."""
        return self._environ.get(NAME_VARIABLE) or self._environ[HOSTNAMES_VARIABLE]

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Returns the hosts of `TPU_WORKER_HOSTNAMES`.

        Raises:
            ConfigurationError: A host name is malformed.
        """
        return read_endpoints(self._environ[HOSTNAMES_VARIABLE], HOSTNAMES_VARIABLE)

    def multislice(self) -> Multislice | None:
        """Returns what the `MEGASCALE_*` variables say.

        Raises:
            ConfigurationError: One of them is malformed.
            ResolverError: One of them is missing.
        """
        return Multislice.read(self._environ.get)

    def is_here(self) -> bool:
        """Tells whether one host is listed, which is this pod.

        Raises:
            ConfigurationError: A host name is malformed.
        """
        return len(self.network_endpoints()) == 1


class TpuOfThisVm(TpuClient):
    """The TPU of the TPU VM that the program runs on, as its metadata has it."""

    def exists(self) -> bool:
        """Tells whether this machine is a TPU VM.

        Raises:
            ClusterLookupError: The metadata server does not answer.
        """
        return bool(self._metadata.attribute("worker-network-endpoints") or self._type_of_metadata())

    def name(self) -> str:
        """Returns the TPU's name; that of the machine if its metadata does not have it."""
        name = self._metadata.tpu_env().get("NODE_ID") or self._metadata.attribute("instance-id")
        return name or self._metadata.get("instance/name") or "this TPU VM"

    def network_endpoints(self) -> list[NetworkEndpoint]:
        """Returns the hosts of the attribute `worker-network-endpoints`; none if the metadata lacks it.

        Raises:
            ClusterLookupError: The metadata server does not answer, or not so that it makes sense.
        """
        entries = self._metadata.attribute("worker-network-endpoints")
        if entries is None:
            return []
        # Each is ...:...:IP; the address is all that counts, and may itself have colons.
        hosts = [entry.strip().split(":", 2)[-1] for entry in entries.split(",") if entry.strip()]
        if not hosts or not all(HOST_PATTERN.fullmatch(host) or is_ipv6(host) for host in hosts):
            raise ClusterLookupError(
                "the attribute worker-network-endpoints of this machine has no list of hosts: "
                f"{shown(entries)}. Pass the TPU's name, or its addresses as tpu='grpc://HOST:PORT,...'"
            )
        return [NetworkEndpoint(ipAddress=host, port=DEFAULT_PORT) for host in hosts]

    def is_here(self) -> bool:
        """Tells whether the metadata lists no other host than this one.

        Raises:
            ClusterLookupError: The metadata server does not answer, or not so that it makes sense.
        """
        return len(self.network_endpoints()) <= 1

    def multislice(self) -> Multislice | None:
        """Returns what the `MEGASCALE_*` variables say, those of the environment before the metadata's.

        Raises:
            ConfigurationError: One of them is malformed.
            ResolverError: One of them is missing.
            ClusterLookupError: The metadata server does not answer.
        """
        return Multislice.read(lambda name: self._environ.get(name) or self._metadata.tpu_env().get(name))

    def accelerator_type(self) -> str | None:
        """Returns the TPU's type: what the environment says, or else the metadata.

        Raises:
            ClusterLookupError: The metadata server does not answer.
        """
        return super().accelerator_type() or self._type_of_metadata()

    def _type_of_metadata(self) -> str | None:
        said = self._metadata.attribute("accelerator-type")
        return said or self._metadata.tpu_env().get("ACCELERATOR_TYPE") or None

    def worker_id(self) -> int | None:
        """Returns which of the TPU's hosts this machine is.

        Raises:
            ClusterLookupError: The metadata server does not answer.
        """
        worker = super().worker_id()
        return worker_of_metadata(self._metadata) if worker is None else worker


def worker_of_metadata(metadata: MetadataServer) -> int | None:
    """Returns which host of a TPU this machine is, as its metadata has it; None if it is none.

    Raises:
        ClusterLookupError: The metadata server does not answer.
    """
    text = metadata.attribute("agent-worker-number") or metadata.tpu_env().get("WORKER_ID")
    return None if text is None else _host_number(text, "the attribute agent-worker-number")


def read_endpoints(text: str, source: str) -> list[NetworkEndpoint]:
    """Reads `grpc://HOST:PORT,...`; `grpc://` and the port may be missing.

    Args:
        text: The addresses.
        source: Where they come from, as errors name it.

    Raises:
        ConfigurationError: There is none, or one is malformed.
    """
    endpoints = []
    for entry in text.split(","):
        address = entry.strip().removeprefix(_GRPC).rstrip("/")
        if not address:
            raise ConfigurationError(
                f"{source} is {shown(text)}: an address is empty. Expected grpc://HOST:PORT, and more of "
                "them after commas if the TPU has several hosts"
            )
        if is_ipv6(address):
            address = f"[{address}]"
        if ":" not in address.rpartition("]")[2]:
            address = f"{address}:{DEFAULT_PORT}"
        host, port = split_address(address, source)
        endpoints.append(NetworkEndpoint(ipAddress=host, port=port))
    if len(endpoints) > _MOST_HOSTS:
        raise ConfigurationError(f"{source} has {len(endpoints)} addresses; no TPU has so many hosts")
    return endpoints


def read_node_config(text: str) -> tuple[str | None, str | None, str | None]:
    """Reads `TPU_CONFIG`, a JSON object.

    Returns:
        The TPU's name, its project and its zone, each None if missing.

    Raises:
        ConfigurationError: It is not such an object.
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
            f"{source} is {shown(text)}; expected the number of this host within its TPU, from 0"
        )
    return int(text)
