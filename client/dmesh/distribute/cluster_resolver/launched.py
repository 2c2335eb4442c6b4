"""Base of resolvers for launchers that tell a process its rank, but not the other processes' addresses."""

from __future__ import annotations

import abc
import ipaddress
import socket
from collections.abc import Mapping

from dmesh.config.addresses import (
    HOST_PATTERN,
    WILDCARD_HOSTS,
    is_ipv6,
    join_address,
    shown,
    split_address,
)
from dmesh.distribute.cluster_resolver import variables
from dmesh.distribute.cluster_resolver.base import ClusterResolver, format_master_url
from dmesh.errors import ArgumentTypeError, ConfigurationError, ResolverError
from dmesh.train import ClusterSpec

_LOOPBACK = "127.0.0.1"


class LaunchedClusterResolver(ClusterResolver):
    """Derives addresses from ranks if possible; otherwise knows some of the tasks.

    Args:
        port_base: Port of the first process on each host; None for `DMESH_PORT_BASE`, by default a port
            derived from the launch.
        hosts: Number of processes of each host, in order of ranks; None if unknown.
        coordinator: HOST, or HOST:PORT, of rank 0; None for the launcher's value.
        job_name: Job of all processes.
        rpc_layer: Protocol to put before the masters' addresses.

    Raises:
        ResolverError: The launcher did not start this process.
        ConfigurationError: An argument or a variable is malformed.
        ArgumentTypeError: An argument is of another type.
    """

    def __init__(
        self,
        port_base: int | None = None,
        hosts: Mapping[str, int] | None = None,
        coordinator: str | None = None,
        job_name: str = "worker",
        rpc_layer: str | None = None,
    ) -> None:
        self._port_base = port_base
        self._hosts = None if hosts is None else _checked_hosts(hosts)
        self._coordinator = coordinator
        self._job_name = job_name
        self._rpc_layer = rpc_layer
        self.cluster_spec()  # raises errors now instead of later

    @abc.abstractmethod
    def _rank(self) -> int:
        """Return this process's rank."""

    @abc.abstractmethod
    def _size(self) -> int:
        """Return the number of processes."""

    @abc.abstractmethod
    def _local(self) -> tuple[int, int]:
        """Return this process's rank on its host, and the number of processes on that host."""

    @abc.abstractmethod
    def _identity(self) -> str:
        """Return an identity of the launch, equal in all its processes, usually different in others."""

    @abc.abstractmethod
    def _leader(self) -> str | None:
        """Return the host on which the launcher (most likely) started rank 0; None if unknown."""

    def cluster_spec(self) -> ClusterSpec:
        """Return the known addresses of the processes.

        All addresses are known if the processes are on one host, or if the resolver knows all hosts.
        Otherwise only those of this process and of rank 0 are known. `num_processes` is then the number of
        processes, which `initialize_accelerator_system` connects through rank 0.

        Raises:
            ResolverError: The launcher did not start this process, or the address of rank 0 is unknown.
            ConfigurationError: A variable is malformed, or contradicts `hosts`.
        """
        rank, size, (local_rank, local_size) = self._rank(), self._size(), self._local()
        if not 0 <= rank < size or not 0 <= local_rank < local_size <= size:
            raise ConfigurationError(
                f"the launcher's variables contradict each other: rank {rank} of {size}, and local rank "
                f"{local_rank} of {local_size}. Leave them as the launcher sets them"
            )
        busiest = max((local_size, *(self._hosts or {}).values()))
        base = (
            variables.port_base(self._identity(), busiest)
            if self._port_base is None
            else variables.checked_port_base(self._port_base, busiest, "port_base")
        )
        if self._hosts is not None:
            return self._spec_of_hosts(self._hosts, base, size)
        if local_size == size:
            return ClusterSpec({self._job_name: [f"{_LOOPBACK}:{base + index}" for index in range(size)]})
        leader, server = self._leader_address(base), variables.text("DMESH_COORDINATOR")
        if leader is None and server is None:
            raise ResolverError(
                "the processes are on several hosts, and the address of rank 0 is unknown. Pass "
                "coordinator=HOST:PORT of rank 0 or hosts={HOST: PROCESSES, ...} to the resolver, or set "
                "DMESH_COORDINATOR to a coordination server, or DTENSOR_JOBS to HOST:PORT of every process"
            )
        known = {} if leader is None else {0: leader}
        if rank not in known:
            known[rank] = join_address(own_host(server or leader or ""), base + local_rank)
        return ClusterSpec({self._job_name: known})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a process.

        Args:
            task_type: The job; the only one if None.
            task_id: The rank; None for rank 0, or for this process if the address of rank 0 is unknown.
            rpc_layer: Protocol before `://` in the address; the resolver's own if None.

        Raises:
            ClusterSpecError: The process does not exist, or its address is unknown.
            ResolverError: See `cluster_spec`.
            ConfigurationError: Likewise.
        """
        job = self._job_name if task_type is None else task_type
        spec = self.cluster_spec()
        address = spec.task_address(job, spec.task_indices(job)[0] if task_id is None else task_id)
        return format_master_url(address, rpc_layer or self.rpc_layer)

    @property
    def num_processes(self) -> int | None:
        """Number of processes if some addresses are unknown; otherwise None."""
        _, local_size = self._local()
        size = self._size()
        return None if self._hosts is not None or local_size == size else size

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        return self._job_name if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The rank of this process."""
        return self._rank() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _spec_of_hosts(self, hosts: Mapping[str, int], base: int, size: int) -> ClusterSpec:
        if sum(hosts.values()) != size:
            raise ConfigurationError(
                f"hosts={dict(hosts)} has {sum(hosts.values())} processes, but {size} were started"
            )
        return ClusterSpec(
            {
                self._job_name: [
                    join_address(host, base + index)
                    for host, count in hosts.items()
                    for index in range(count)
                ]
            }
        )

    def _leader_address(self, base: int) -> str | None:
        leader = self._coordinator or self._leader()
        if leader is not None and (HOST_PATTERN.fullmatch(leader) or is_ipv6(leader)):
            return join_address(leader, base)
        if leader is not None:
            split_address(leader, "the address of rank 0")
        return leader


def _checked_hosts(hosts: object) -> dict[str, int]:
    if not isinstance(hosts, Mapping):
        raise ArgumentTypeError(f"hosts must be a dict from hosts to numbers, got {hosts!r:.200}")
    for host, count in hosts.items():
        if not isinstance(host, str) or isinstance(count, bool) or not isinstance(count, int):
            raise ArgumentTypeError(
                f"hosts must be a dict from hosts to numbers, got {host!r}: {count!r:.200}"
            )
        if not (HOST_PATTERN.fullmatch(host) or is_ipv6(host)) or count < 1:
            raise ConfigurationError(
                f"hosts has {shown(host)} with {count} processes; expected a host name or an IP address "
                "without a port, and a number from 1"
            )
    return dict(hosts)


def own_host(rendezvous: str) -> str:
    """Return this machine's address in the network of `rendezvous`, HOST:PORT.

    Raises:
        ResolverError: This machine has no route to it.
        ConfigurationError: `rendezvous` is not HOST:PORT.
    """
    chosen = variables.text("DMESH_BIND_HOST")
    if chosen is not None and chosen.strip("[]") not in WILDCARD_HOSTS:
        return chosen.strip("[]")
    host, port = split_address(rendezvous, "the rendezvous address")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # on a datagram socket, this looks up the route without sending
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise ResolverError(
            f"this host has no route to the rendezvous address {rendezvous}: {error.strerror or error}. "
            "Correct the address, or set DMESH_BIND_HOST to this host's own"
        ) from error
    # The rendezvous is on this host. The others know it by its name, not by the loopback address.
    return host if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own
