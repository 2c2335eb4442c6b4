"""Refusals of the core."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dmesh_server.core.model import Member


class ErrorKind(enum.Enum):
    """Kinds of refusal. The values are the wire's (`dmesh.v1.ErrorKind`)."""

    INVALID_ARGUMENT = 1
    UNKNOWN_TASK = 2
    TASK_TAKEN = 3
    SPEC_MISMATCH = 4
    FENCED = 5
    NOT_REGISTERED = 6
    BARRIER_TIMEOUT = 7
    BARRIER_FAILED = 8
    BARRIER_CANCELLED = 9
    BARRIER_MISMATCH = 10
    KEY_EXISTS = 11
    KEY_NOT_FOUND = 12
    KEY_NOT_INTEGER = 13
    DEADLINE_EXCEEDED = 14
    COMPACTED = 15
    LIMIT_EXCEEDED = 16
    SHUTTING_DOWN = 17
    CLUSTER_ENDING = 18
    INTERNAL = 19
    UNAUTHENTICATED = 20
    PERMISSION_DENIED = 21
    VERSION_MISMATCH = 22
    STORE_UNAVAILABLE = 23
    JOB_LIST_UNKNOWN = 24
    STORE_LOST = 25
    LEASE_NOT_FOUND = 26


@dataclass(unsafe_hash=True)
class CoreError(Exception):
    """A refusal: raised inside the core, carried out of it as a value.

    Not frozen only because Python sets `__traceback__` on a raised exception; nobody else may change it.
    """

    kind: ErrorKind
    """Kind of refusal."""
    message: str
    """One paragraph: the failure, the tasks involved, the values expected."""
    members: tuple[Member, ...] = ()
    """Members that the error is about: missing, lost, or in the way."""
    epoch: int = 0
    """The cluster's epoch at the time."""
    fields: tuple[str, ...] = ()
    """Refused fields of the request, as the protocol names them (`settings.lease_ms`); empty if none is to
    blame. The client adds the settings of its own that these fields come from."""

    oldest_revision: int = 0
    """First revision whose changes are kept, if a watch cannot start where it should."""
    revision: int = 0
    """Revision of the key-value store then."""

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.message}"


def stopping() -> CoreError:
    """Return the refusal of a server that stops."""
    return CoreError(
        ErrorKind.SHUTTING_DOWN,
        "the coordination server is shutting down; connect again to its successor, if there will be one",
    )


def not_attached() -> CoreError:
    """Return the refusal of a session that no member has."""
    return CoreError(
        ErrorKind.NOT_REGISTERED, "this session is not attached to a member (any more): attach again"
    )
