"""Taking whatever task slot is free: the coordinator says which client this process is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from dmesh import _log
from dmesh.coordination import joining
from dmesh.coordination.carrier import Carrier
from dmesh.coordination.credentials import Credentials
from dmesh.coordination.identity import Identity
from dmesh.coordination.link import Link
from dmesh.coordination.members import Member
from dmesh.coordination.retry import DEFAULT_PATIENCE, Patience
from dmesh.coordination.session import Session
from dmesh.coordination.tracing import NO_TRACING, Tracing
from dmesh.errors import CoordinationError
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb

ANY_TASK = -1
"""Index that stands, in a registration, for any task slot of the job."""


def take_any(
    address: str,
    identity: Identity,
    *,
    connect_timeout: float,
    credentials: Credentials | None = None,
    announce: Callable[[str], None] = _log.announce,
    patience: Patience = DEFAULT_PATIENCE,
    tracing: Tracing = NO_TRACING,
) -> Identity:
    """Take a free task slot of the job: the first one never taken, or else that of a lost client.

    The slot is this process's from then on, for a lease; an `Agent` with the identity that is returned keeps
    it. Asking again, after a lost answer, gives the same task slot.

    Args:
        address: HOST:PORT of the coordinator.
        identity: Who asks; its index does not count.
        connect_timeout: Seconds within which the coordinator must be found.
        credentials: What to show it; those of the environment if None.
        announce: Function that prints a line for the user.
        patience: Limits and intervals.
        tracing: Makes spans of the calls.

    Returns:
        The identity with the index of the task slot.

    Raises:
        CoordinatorUnavailableError: The coordinator did not answer in time.
        ClientIdTakenError: All task slots are held.
        JobMismatchError: The job list is not the one that the cluster was formed with.
        CoordinationError: The coordinator refused for another reason, or hands no task slots out.
    """
    caller = identity.caller()
    caller.task.index = ANY_TASK

    def describe() -> pb.RegisterRequest:
        request = identity.registration()
        request.caller.CopyFrom(caller)
        return request

    with contextlib.closing(
        Link(address, credentials=credentials, patience=patience, tracing=tracing)
    ) as link:
        session = Session(link, caller, describe, _NullListener(), patience)
        joining.register(session, identity, patience, announce, connect_timeout)
        index = session.registration.index
    if index is None:
        raise CoordinationError(
            f"the coordinator at {address} is an earlier release, which does not assign task slots. "
            "Upgrade it, or give each client its own DTENSOR_CLIENT_ID"
        )
    return replace(identity, index=index)


class _NullListener:
    """Listens to a session that is never started: nothing comes, and nothing is asked."""

    def on_store_lost(self) -> None: ...

    def on_registered(self, cluster_incarnation: int) -> None: ...

    def reconcile(self, server_incarnation: int) -> None: ...

    def progress(self) -> int:
        return 0

    def report(self) -> None: ...

    def on_attached(self, carrier: Carrier, *, again: bool) -> None: ...

    def on_detached(self) -> None: ...

    def on_departed(self, epoch: int, members: Sequence[Member]) -> None: ...

    def on_rejoined(self, epoch: int, members: Sequence[Member]) -> None: ...

    def on_liveness(self, members: Sequence[Member]) -> None: ...

    def on_status_request(self) -> common_pb2.Activity:
        return common_pb2.Activity()

    def on_barrier(self, result: pb.BarrierResult) -> None: ...

    def on_reply(self, reply: pb.KeyValueReply) -> None: ...

    def on_failure(self, error: CoordinationError, *, final: bool) -> None: ...
