"""Resolver that queries dmesh's coordination server."""

from __future__ import annotations

import contextlib
import math
import time

from dmesh.config.addresses import is_unknown, split_address
from dmesh.coordination import faults
from dmesh.coordination.faults import Fault
from dmesh.coordination.link import Link
from dmesh.coordination.members import Member
from dmesh.coordination.retry import DEFAULT_PATIENCE
from dmesh.distribute.cluster_resolver.base import ClusterResolver, format_master_url
from dmesh.distribute.cluster_resolver.variables import text
from dmesh.errors import ConfigurationError
from dmesh.train import ClusterSpec
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb


class CoordinationServiceResolver(ClusterResolver):
    """Queries a coordination server at every call, without joining the cluster.

    Any process with the server's token (and certificates) can use it: a monitor, an evaluator, or a client
    that replaces a lost one. Token and certificates are configured as for a client.

    Args:
        address: HOST:PORT of the server; `DMESH_COORDINATOR` if None.
        cluster: Name of the cluster; None for `DMESH_CLUSTER`, by default `default`.
        task_type: Job of this process; None if it has none.
        task_id: Index of this process in the job.
        rpc_layer: Protocol to put before the masters' addresses.
        timeout: Time limit of a request, seconds.

    Raises:
        ConfigurationError: There is no address, or it is malformed, or `timeout` is not a positive number.
    """

    def __init__(
        self,
        address: str | None = None,
        cluster: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        timeout: float = 10.0,
    ) -> None:
        where = address or text("DMESH_COORDINATOR")
        if where is None:
            raise ConfigurationError(
                "CoordinationServiceResolver has no address; pass HOST:PORT of a coordination server, or set "
                "DMESH_COORDINATOR"
            )
        split_address(where, "DMESH_COORDINATOR" if address is None else "address")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ConfigurationError(f"timeout is {timeout!r:.200}; expected a positive number of seconds")
        self._address = where
        self._cluster = cluster or text("DMESH_CLUSTER") or "default"
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._timeout = float(timeout)

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of the cluster; none if no client has registered yet.

        If the launcher did not know all addresses, a task has an address once its client has registered.

        Raises:
            CoordinatorUnavailableError: The server does not answer in time.
            AuthenticationError: The server does not accept the token.
            CoordinationError: The server refuses the request for another reason.
        """
        state = self._ask()
        met = {
            (member.task.job, member.task.index): member.peer_addresses[0]
            for member in state.members
            if member.peer_addresses
        }
        spec: dict[str, dict[int, str]] = {}
        for job in state.jobs:
            spec[job.name] = {}
            for index, listed in enumerate(job.addresses):
                address = met.get((job.name, index)) if is_unknown(listed) else listed
                if address is not None:
                    spec[job.name][index] = address
        return ClusterSpec(spec)

    def members(self) -> tuple[Member, ...]:
        """Return all clients that have registered, including departed ones.

        Raises:
            CoordinationError: See `cluster_spec`.
        """
        return tuple(Member.from_proto(member) for member in self._ask().members)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the given task, by default of the first one.

        Args:
            task_type: Job of the task; used only with `task_id`.
            task_id: Its index.
            rpc_layer: Protocol before `://` in the address; the resolver's own if None.

        Returns:
            The address; empty if no client has registered yet.

        Raises:
            ClusterSpecError: There is no such task, or its address is not known yet.
            CoordinationError: See `cluster_spec`.
        """
        spec = self.cluster_spec()
        if task_type is not None and task_id is not None:
            address = spec.task_address(task_type, task_id)
        elif spec:
            address = spec.task_address(spec.jobs[0], 0)
        else:
            return ""
        return format_master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the number of accelerators of all present members, by type.

        Args:
            task_type: With `task_id`: count the devices of this task only.
            task_id: The task's index.
            config_proto: Ignored.

        Raises:
            CoordinationError: See `cluster_spec`.
        """
        del config_proto
        wanted = (task_type, task_id) if task_type is not None and task_id is not None else None
        counts: dict[str, int] = {}
        for member in self.members():
            if member.state.departed or wanted not in (None, (member.job, member.index)):
                continue
            for device in member.devices:
                if device.type != "CPU":
                    counts[device.type] = counts.get(device.type, 0) + 1
        return counts

    def _ask(self) -> pb.GetClusterStateResponse:
        request = pb.GetClusterStateRequest(caller=common_pb2.Caller(cluster=self._cluster))
        started, delays = time.monotonic(), DEFAULT_PATIENCE.retry.delays()
        with contextlib.closing(Link(self._address)) as link:
            while True:
                left = self._timeout - (time.monotonic() - started)
                answer = link.attempt(link.coordination.GetClusterState, request, max(left, 0.05))
                if not isinstance(answer, Fault):
                    return answer
                if answer.kind == common_pb2.ERROR_KIND_NOT_REGISTERED:
                    return pb.GetClusterStateResponse()  # the server does not know the cluster
                pause, waited = next(delays), time.monotonic() - started
                if not answer.transient:
                    raise answer.exception()
                if waited + pause >= self._timeout:
                    raise faults.unavailable(
                        self._address,
                        answer.message,
                        waited,
                        doing=f"asking for the cluster {self._cluster!r}",
                        ever_connected=False,
                    )
                time.sleep(pause)
