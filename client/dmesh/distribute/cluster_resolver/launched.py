"""Base of resolvers whose launcher tells a process its rank, but not the addresses of the others."""

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
    """Works addresses out from ranks; where that cannot be done, says which tasks are known.

    Args:
        port_base: Port of the first process on each host; None for `DMESH_PORT_BASE`, or one that
            follows from the launch.
        hosts: Processes of each host, in order of ranks; None if not known.
        coordinator: HOST, or HOST:PORT, of rank 0; None for what the launcher says.
        job_name: Job of all processes.
        rpc_layer: Protocol to put before the masters' addresses.

    Raises:
        ResolverError: The launcher has not started this process.
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
        self.cluster_spec()  # says now what would be wrong later

    @abc.abstractmethod
    def _rank(self) -> int:
        """Returns this process's rank, as the launcher says now."""

    @abc.abstractmethod
    def _size(self) -> int:
        """Returns how many processes there are."""

    @abc.abstractmethod
    def _local(self) -> tuple[int, int]:
        """Returns this process's rank on its host, and how many processes that host has."""

    @abc.abstractmethod
    def _identity(self) -> str:
        """Returns what all processes of a launch have in common, and most often no other launch."""

    @abc.abstractmethod
    def _leader(self) -> str | None:
        """Returns the host on which the launcher has, or most likely has, started rank 0."""

    def cluster_spec(self) -> ClusterSpec:
        """Returns the processes' addresses, of those that are known.

        That is all of them if they are on one host, or if the resolver knows all hosts.
        Otherwise it is this process, and rank 0; `num_processes` says how many there are, and
        `initialize_accelerator_system` introduces them to each other at rank 0's.

        Raises:
            ResolverError: The launcher has not started this process, or it is not known where rank 0 is.
            ConfigurationError: A variable is malformed, or does not fit `hosts`.
        """
        rank, size, (local_rank, local_size) = self._rank(), self._size(), self._local()
        if not 0 <= rank < size or not 0 <= local_rank < local_size <= size:
            raise ConfigurationError(
                f"this process is called rank {rank} of {size}, and {local_rank} of {local_size} on its "
                "host, which cannot be. Leave the variables as the launcher sets them"
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
                "the processes are on several hosts, and it is not known where rank 0 is. Pass "
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
        """Returns the address of a process.

        Args:
            task_type: The job; the only one if None.
            task_id: The rank; 0 if None, or this process's if it is not known where rank 0 is.
            rpc_layer: What stands before `://` in the answer; the resolver's own if None.

        Raises:
            ClusterSpecError: There is no such process, or it is not known where it is.
            ResolverError: See `cluster_spec`.
            ConfigurationError: Likewise.
        """
        job = self._job_name if task_type is None else task_type
        spec = self.cluster_spec()
        address = spec.task_address(job, spec.task_indices(job)[0] if task_id is None else task_id)
        return format_master_url(address, rpc_layer or self.rpc_layer)

    @property
    def num_processes(self) -> int | None:
        """Number of processes, if their addresses are not all known; otherwise None."""
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
    """Returns the address of this machine in the network in which `rendezvous`, HOST:PORT, is.

    Raises:
        ResolverError: There is no way there.
        ConfigurationError: It is not HOST:PORT.
    """
    chosen = variables.text("DMESH_BIND_HOST")
    if chosen is not None and chosen.strip("[]") not in WILDCARD_HOSTS:
        return chosen.strip("[]")
    host, port = split_address(rendezvous, "the address at which all meet")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: looks the route up and sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise ResolverError(
            f"all are to meet at {rendezvous}, to which this host finds no way: {error.strerror or error}. "
            "Correct the address, or set DMESH_BIND_HOST to this host's own"
        ) from error
    # All meet on this very host then, and the others know it by that name, not by its loopback's address.
    return host if ipaddress.ip_address(own.partition("%")[0]).is_loopback else own
