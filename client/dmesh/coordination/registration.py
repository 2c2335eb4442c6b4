"""Registration: request for a task slot, and the answer to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmesh import protocol
from dmesh.coordination.cluster_settings import NO_WISHES, ClusterSettings
from dmesh.coordination.faults import Fault
from dmesh.coordination.link import Link
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb

STANDARD_REQUEST_BYTES = 3 << 19
"""Size of the largest message that a server reads which does not say."""

_LONG_LIST = 256
"""Addresses in a job list from which on it costs less to ask whether the server has it than to send it."""

_WANTS_LIST = (common_pb2.ERROR_KIND_JOB_LIST_UNKNOWN, common_pb2.ERROR_KIND_INVALID_ARGUMENT)
"""Refusals of a digest; the second is that of servers that know no digests, and find the list missing."""


@dataclass(frozen=True, slots=True)
class Registration:
    """The server's answer to the registration."""

    server_incarnation: int
    """Random number that the server drew when it started."""
    cluster_incarnation: int
    """Random number of this generation of the cluster."""
    peer_secret: bytes = field(repr=False)
    """With which peers prove to one another that they belong to the cluster. Never logged."""
    heartbeat_interval: float
    """Seconds between heartbeats."""
    lease: float
    """Seconds of silence after which a client is blocked, or lost."""
    suspicion: float = 0.0
    """Seconds for which a client whose session broke may come back although nothing else is heard of it."""
    epoch: int = 0
    """The cluster's epoch at the registration."""
    settings: ClusterSettings = NO_WISHES
    """The cluster's settings."""
    rejoined: bool = False
    """True if the task had an earlier member in this generation: the others have started already."""
    max_request_bytes: int = STANDARD_REQUEST_BYTES
    """Size of the largest message that the server reads; a larger one would break the session."""
    store_id: int = 0
    """Random number of the server's store; 0 if the server is of a release that does not say."""
    index: int | None = None
    """Index of the task slot within its job; None if the server is of a release that hands no slots out."""

    @classmethod
    def from_proto(cls, response: pb.RegisterResponse) -> Registration:
        """Read the server's answer."""
        return cls(
            server_incarnation=response.server_incarnation,
            cluster_incarnation=response.cluster_incarnation,
            peer_secret=response.peer_secret,
            heartbeat_interval=max(response.heartbeat_interval_ms, 1) / 1000,
            lease=max(response.lease_ms, 1) / 1000,
            suspicion=response.suspicion_ms / 1000,
            epoch=response.epoch,
            settings=ClusterSettings.from_proto(response.settings),
            rejoined=response.rejoined,
            # A server of an earlier release does not say; its limit was this one.
            max_request_bytes=response.max_request_bytes or STANDARD_REQUEST_BYTES,
            store_id=response.store_id,
            index=response.task.index if response.HasField("task") else None,
        )


def too_old(address: str) -> Fault:
    """Make the refusal of a server that does not know what this client relies on."""
    return Fault(
        common_pb2.ERROR_KIND_VERSION_MISMATCH,
        f"the coordinator at {address} speaks version 1 of the protocol, this client version "
        f"{protocol.VERSION}. Use the same version of dmesh on both sides; upgrade the server first.",
    )


def request_task(link: Link, request: pb.RegisterRequest, timeout: float) -> pb.RegisterResponse | Fault:
    """Ask for a task slot once; a long job list is sent only to a server that does not know it.

    Args:
        link: To the coordinator.
        request: The whole registration.
        timeout: Seconds for each call.
    """
    register = link.coordination.Register
    if sum(len(job.addresses) for job in request.jobs) >= _LONG_LIST:
        brief = pb.RegisterRequest()
        brief.CopyFrom(request)
        brief.ClearField("jobs")
        brief.jobs_digest = protocol.jobs_digest((job.name, job.addresses) for job in request.jobs)
        response = link.attempt(register, brief, timeout)
        if not isinstance(response, Fault) or response.kind not in _WANTS_LIST:
            return response
    return link.attempt(register, request, timeout)
