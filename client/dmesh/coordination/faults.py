"""Faults of calls: from a gRPC status or an error message to an exception of `dmesh.errors`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import grpc
from google.protobuf.message import DecodeError

from dmesh.coordination.advice import advise
from dmesh.coordination.members import Member
from dmesh.errors import (
    AuthenticationError,
    BarrierCancelledError,
    BarrierError,
    BarrierMismatchError,
    BarrierTimeoutError,
    ClientIdTakenError,
    ConfigurationError,
    CoordinationError,
    CoordinatorUnavailableError,
    DMeshError,
    FencedError,
    JobMismatchError,
    KeyExistsError,
    KeyNotFoundError,
    KeyTypeError,
    KeyWaitTimeoutError,
    LeaseExpiredError,
    LimitExceededError,
    PermissionDeniedError,
    StoreLostError,
    StoreUnavailableError,
    VersionMismatchError,
    WatchCompactedError,
)
from dmesh.v1 import common_pb2 as pb

ERROR_METADATA_KEY = "dmesh-error-bin"
"""Trailing metadata beside a gRPC status, with a serialized `dmesh.v1.Error`."""

_EXCEPTIONS: Mapping[int, type[DMeshError]] = {
    pb.ERROR_KIND_INVALID_ARGUMENT: ConfigurationError,
    pb.ERROR_KIND_UNKNOWN_TASK: ConfigurationError,
    pb.ERROR_KIND_TASK_TAKEN: ClientIdTakenError,
    pb.ERROR_KIND_SPEC_MISMATCH: JobMismatchError,
    pb.ERROR_KIND_FENCED: FencedError,
    pb.ERROR_KIND_NOT_REGISTERED: CoordinationError,
    pb.ERROR_KIND_BARRIER_TIMEOUT: BarrierTimeoutError,
    pb.ERROR_KIND_BARRIER_FAILED: BarrierError,
    pb.ERROR_KIND_BARRIER_CANCELLED: BarrierCancelledError,
    pb.ERROR_KIND_BARRIER_MISMATCH: BarrierMismatchError,
    pb.ERROR_KIND_KEY_EXISTS: KeyExistsError,
    pb.ERROR_KIND_KEY_NOT_FOUND: KeyNotFoundError,
    pb.ERROR_KIND_KEY_NOT_INTEGER: KeyTypeError,
    pb.ERROR_KIND_DEADLINE_EXCEEDED: KeyWaitTimeoutError,
    pb.ERROR_KIND_COMPACTED: WatchCompactedError,
    pb.ERROR_KIND_LIMIT_EXCEEDED: LimitExceededError,
    pb.ERROR_KIND_SHUTTING_DOWN: CoordinatorUnavailableError,
    pb.ERROR_KIND_CLUSTER_ENDING: CoordinationError,
    pb.ERROR_KIND_INTERNAL: CoordinationError,
    pb.ERROR_KIND_UNAUTHENTICATED: AuthenticationError,
    pb.ERROR_KIND_PERMISSION_DENIED: PermissionDeniedError,
    pb.ERROR_KIND_VERSION_MISMATCH: VersionMismatchError,
    pb.ERROR_KIND_STORE_UNAVAILABLE: StoreUnavailableError,
    pb.ERROR_KIND_JOB_LIST_UNKNOWN: CoordinationError,
    pb.ERROR_KIND_STORE_LOST: StoreLostError,
    pb.ERROR_KIND_LEASE_NOT_FOUND: LeaseExpiredError,
}

_STATUS: Mapping[int, grpc.StatusCode] = {
    pb.ERROR_KIND_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_KIND_UNKNOWN_TASK: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_KIND_TASK_TAKEN: grpc.StatusCode.ALREADY_EXISTS,
    pb.ERROR_KIND_BARRIER_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    pb.ERROR_KIND_BARRIER_FAILED: grpc.StatusCode.ABORTED,
    pb.ERROR_KIND_BARRIER_CANCELLED: grpc.StatusCode.ABORTED,
    pb.ERROR_KIND_BARRIER_MISMATCH: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_KIND_KEY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    pb.ERROR_KIND_KEY_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_KIND_LEASE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_KIND_DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    pb.ERROR_KIND_COMPACTED: grpc.StatusCode.OUT_OF_RANGE,
    pb.ERROR_KIND_LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_KIND_SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_KIND_INTERNAL: grpc.StatusCode.INTERNAL,
    pb.ERROR_KIND_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    pb.ERROR_KIND_PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    pb.ERROR_KIND_STORE_UNAVAILABLE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    **dict.fromkeys(
        (
            pb.ERROR_KIND_SPEC_MISMATCH,
            pb.ERROR_KIND_FENCED,
            pb.ERROR_KIND_NOT_REGISTERED,
            pb.ERROR_KIND_KEY_NOT_INTEGER,
            pb.ERROR_KIND_CLUSTER_ENDING,
            pb.ERROR_KIND_VERSION_MISMATCH,
            pb.ERROR_KIND_JOB_LIST_UNKNOWN,
            pb.ERROR_KIND_STORE_LOST,
        ),
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
}
"""The server's status for each kind of error; an answer in a session comes without one."""

_ENDS_BARRIER = frozenset(
    {
        pb.ERROR_KIND_BARRIER_TIMEOUT,
        pb.ERROR_KIND_BARRIER_FAILED,
        pb.ERROR_KIND_BARRIER_CANCELLED,
        pb.ERROR_KIND_BARRIER_MISMATCH,
    }
)

_PASSING = frozenset(
    {
        pb.ERROR_KIND_SHUTTING_DOWN,
        pb.ERROR_KIND_NOT_REGISTERED,
        pb.ERROR_KIND_STORE_UNAVAILABLE,
    }
)

# A status without an error of the server's own: the connection broke, an attempt took too long, or the server
# (or gRPC for it, under load) dropped the call. INTERNAL and UNKNOWN mean a broken stream only if they say
# so.
_TRANSIENT = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
)
_HANDSHAKE_FAILURES = ("andshake failed", "Verification Check", "Socket closed", "reset", "Broken pipe")
_NO_CONNECTION = ("failed to connect", "DNS resolution failed", "Domain name not found", "errors resolving")
_BROKEN_STREAM = ("RST_STREAM", "Stream removed", "stream terminated")


@dataclass(frozen=True, slots=True)
class Fault:
    """Cause of the failure of a call, a stream or a barrier."""

    kind: int
    """The server's `ErrorKind`; 0 if it was not the server that said so."""
    message: str
    """Description, in words."""
    members: tuple[Member, ...] = ()
    """The members that it is about."""
    epoch: int = 0
    """The cluster's epoch at the time; 0 if unknown."""
    code: grpc.StatusCode | None = None
    """The gRPC status, if it came with one."""
    fields: tuple[str, ...] = ()
    """Refused fields of the request, as the protocol names them; empty if none is to blame."""
    revisions: tuple[int, int] = (0, 0)
    """The oldest and the current revision, if a watch cannot start where it should."""

    @property
    def status(self) -> grpc.StatusCode:
        """The gRPC status that it came with, or would have come with."""
        return self.code or _STATUS.get(self.kind, grpc.StatusCode.UNKNOWN)

    @property
    def from_server(self) -> bool:
        """True if the server answered, if only to refuse."""
        return self.kind != 0

    @property
    def transient(self) -> bool:
        """True if the same call may succeed when it is made again."""
        if self.kind:
            return self.kind in _PASSING
        if self.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            return any(words in self.message for words in _BROKEN_STREAM)
        return self.code in _TRANSIENT

    @property
    def needs_registration(self) -> bool:
        """True if the server does not know the caller."""
        return self.kind == pb.ERROR_KIND_NOT_REGISTERED

    @property
    def fences(self) -> bool:
        """True if the caller may not act for its task slot any more."""
        return self.kind == pb.ERROR_KIND_FENCED

    @property
    def keeps_out(self) -> bool:
        """True if the server does not accept who calls, which another token may change."""
        return self.kind in (pb.ERROR_KIND_UNAUTHENTICATED, pb.ERROR_KIND_PERMISSION_DENIED)

    @property
    def may_be_tls(self) -> bool:
        """True if the connection broke in a way in which a failed TLS handshake breaks it."""
        return self.code is grpc.StatusCode.UNAVAILABLE and any(
            words in self.message for words in _HANDSHAKE_FAILURES
        )

    @property
    def ends_barrier(self) -> bool:
        """True if it is a barrier's outcome, so that the next use of its name is the next instance."""
        return self.kind in _ENDS_BARRIER

    def exception(self) -> DMeshError:
        """Make the exception to raise: a new one each time, because each belongs to one thread."""
        if self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not self.kind:
            return LimitExceededError(
                f"the request or its answer is too large for one message: {self.message}"
            )
        cls = _EXCEPTIONS.get(self.kind, CoordinationError)
        if cls is WatchCompactedError:
            return WatchCompactedError(self.message, *self.revisions)
        advice = advise(self.kind, self.fields)
        message = f"{self.message.removesuffix('.')}. {advice}" if advice else self.message
        return cls(message, self.members) if issubclass(cls, CoordinationError) else cls(message)


_NOTEWORTHY = 0.1
"""Seconds from which on an error says for how long something was tried."""
CHANNEL_CLOSED = Fault(0, "the channel is closed", code=grpc.StatusCode.CANCELLED)
"""Fault of a call that comes after the channel was closed."""


def from_error(error: pb.Error) -> Fault:
    """Read an error that came inside a message."""
    return Fault(
        kind=error.kind,
        message=error.message or f"the coordinator reported error {error.kind} without a message",
        members=tuple(Member.from_proto(member) for member in error.members),
        epoch=error.epoch,
        fields=tuple(error.fields),
        revisions=(error.oldest_revision, error.revision),
    )


def from_rpc(error: grpc.RpcError) -> Fault:
    """Read a failed call: the server's own error if there is one beside the status, else the status."""
    # Every error of a call is also its grpc.Call; the type stubs know two unrelated classes.
    call = cast("grpc.Call", error)
    code = call.code()
    for key, value in call.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            try:
                fault = from_error(pb.Error.FromString(value))
            except DecodeError:
                break
            return replace(fault, code=code)
    return Fault(0, call.details() or code.name, code=code)


def no_connection(call: grpc.Call) -> bool:
    """Return whether a call failed because its channel could not connect."""
    details = call.details() or ""
    return call.code() is grpc.StatusCode.UNAVAILABLE and any(words in details for words in _NO_CONNECTION)


_CAUSES: tuple[tuple[str, str], ...] = (
    ("Connection refused", "connection refused: nothing listens there"),
    ("Domain name not found", "its name is not known"),
    ("errors resolving", "its name could not be resolved"),
    ("DNS resolution failed", "its name could not be resolved"),
    ("Failed parsing HTTP/2", "something listens there that does not speak gRPC, perhaps an HTTP port"),
    ("SETTINGS frame as the first", "something listens there that does not speak gRPC, perhaps an HTTP port"),
    ("before receiving SETTINGS", "the connection was accepted but nothing was answered"),
    ("No route to host", "there is no route to its host"),
    ("Network is unreachable", "its network is unreachable"),
    ("imed out", "the connection timed out, as behind a firewall"),
    ("Socket closed", "the connection broke"),
    ("Connection reset", "the connection broke"),
    ("Broken pipe", "the connection broke"),
    ("GOAWAY", "it is shutting down"),
    ("Deadline Exceeded", "it accepted the call but did not answer in time"),
)


def cause_of(details: str) -> str:
    """Say in plain words why a connection failed, from gRPC's own description."""
    for fragment, words in _CAUSES:
        if fragment in details:
            return words
    return details


def unavailable(
    address: str, details: str, tried_for: float, *, doing: str, ever_connected: bool
) -> CoordinatorUnavailableError:
    """Return the error for a coordinator that does not answer, with the attempt, its duration and advice."""
    seconds = f"{tried_for:.1f} s" if tried_for >= _NOTEWORTHY else ""
    if ever_connected:
        happened = f"no contact with the coordinator at {address}" + (seconds and f" for {seconds}")
        advice = (
            "Look whether it still runs and whether its host is reachable; one that is restarted on the same "
            "address and data directory is found again by itself, if it comes back sooner."
        )
    else:
        happened = f"the coordinator at {address} did not answer" + (seconds and f" within {seconds}")
        advice = (
            f"Start it (`dmesh serve --listen {address}`, or client 0 where that hosts it), or correct "
            "DMESH_COORDINATOR or the first entry of DTENSOR_JOBS."
        )
    return CoordinatorUnavailableError(f"{happened} ({cause_of(details)}), while {doing}. {advice}")


def not_a_coordinator(address: str, details: str) -> CoordinatorUnavailableError:
    """Make the error for a server that speaks gRPC but not this protocol."""
    return CoordinatorUnavailableError(
        f"what listens at {address} is not a dmesh coordinator, or a version that is too old or too new "
        f"({details}). Correct DMESH_COORDINATOR, or use the same version of dmesh on both sides."
    )
