"""Taking a task slot: finding the coordinator, waiting for a slot that is about to be free, attaching."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable

import grpc

from dmesh.config.addresses import is_loopback, split_address
from dmesh.coordination import faults
from dmesh.coordination.calls import Announcer
from dmesh.coordination.faults import Fault
from dmesh.coordination.identity import Identity
from dmesh.coordination.retry import Patience
from dmesh.coordination.session import Session
from dmesh.errors import AuthenticationError
from dmesh.v1 import common_pb2

_LISTENER_INTERVAL = 0.01
"""Seconds between two looks whether a server of this host listens already."""
_FIRST_WORD_AFTER = 4.0
"""Seconds after which a client says that it waits for the coordinator."""
_LISTENER_WAIT = 2.0
"""Seconds to look, or half of the time-out; then calls find out, with ever longer waits between them."""
_ENDING_PATIENCE = 20.0
"""Seconds to wait for former members to be declared lost: longer than a lease."""


def register(
    session: Session,
    identity: Identity,
    patience: Patience,
    announce: Callable[[str], None],
    timeout: float,
) -> None:
    """Take the task slot, waiting for the coordinator to be there, and for former members to be gone.

    Args:
        session: Not started yet.
        identity: Who registers.
        patience: Limits and intervals.
        announce: Function that prints a line for the user.
        timeout: Seconds within which the coordinator must be found.

    Raises:
        DMeshError: The coordinator does not answer, or refuses.
    """
    started = time.monotonic()
    deadline = started + timeout
    request_id = secrets.token_hex(16)
    interval = patience.announce_interval
    announcer = Announcer(announce, interval, since=started + min(_FIRST_WORD_AFTER - interval, 0.0))
    delays = patience.retry.delays()
    announced = False
    _wait_for_listener(session, started + min(_LISTENER_WAIT, timeout / 2))
    while True:
        session.check()
        left = deadline - time.monotonic()
        fault = session.register(request_id, min(patience.attempt, max(left, 0.1)))
        if fault is None:
            return
        waited, left = time.monotonic() - started, deadline - time.monotonic()
        awaited = _awaited(fault, identity)
        if awaited:
            if min(left, _ENDING_PATIENCE - waited) <= 0:
                raise fault.exception()
            if not announced:
                announce(f"waiting until {awaited} left: {fault.message}")
            announced = True
        elif fault.code is grpc.StatusCode.UNIMPLEMENTED and not fault.from_server:
            raise faults.not_a_coordinator(session.address, fault.message)
        elif not fault.transient:
            raise fault.exception()
        elif fault.may_be_tls and (problem := session.tls_problem()) is not None:
            raise AuthenticationError(
                f"no encrypted connection to the coordinator at {session.address}: {problem}"
            )
        elif left <= 0:
            raise session.unavailable(f"joining cluster {identity.cluster!r}")
        if announcer.due:
            announcer.say(
                f"still waiting for the coordinator at {session.address}, for {waited:.0f} of "
                f"{timeout:g} s: {faults.cause_of(fault.message)}"
            )
        session.pause(min(next(delays), max(left, 0.0)), 0)


def _wait_for_listener(session: Session, deadline: float) -> None:
    """Wait a moment for a coordinator of this host that is about to listen, as client 0's does.

    Connecting a socket costs microseconds: it can be tried more often than a call, which takes a new channel
    after each connection that was refused.
    """
    host, port = split_address(session.address, "the coordinator's address")
    if not is_loopback(host):
        return
    while time.monotonic() < deadline:
        session.check()
        if not _is_refused(host, port):
            return  # a coordinator listens, or a call says what is wrong
        session.pause(_LISTENER_INTERVAL, 0)


def _is_refused(host: str, port: int) -> bool:
    """Return whether nobody listens at any address of a host."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    refused = False
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            # The kernel may give it the port that it looks for, and so connect it with itself. What is left
            # of that must not keep the coordinator from listening there.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.settimeout(_LISTENER_WAIT)
            try:
                probe.connect(where)
            except OSError as error:
                refused = refused or isinstance(error, ConnectionRefusedError)
                continue
            if probe.getsockname() != probe.getpeername():
                return False
            refused = True
    return refused


def _awaited(fault: Fault, identity: Identity) -> str:
    """Return the members whose departure may lift a refusal, as text; empty if none would."""
    if fault.kind == common_pb2.ERROR_KIND_CLUSTER_ENDING:
        return "the clients of an earlier run have"
    if fault.kind == common_pb2.ERROR_KIND_TASK_TAKEN and identity.settings.rejoin:
        # Most likely this is its successor, started before the coordinator has noticed its end.
        return "the process that had this client id before has"
    return ""


def attach(session: Session, patience: Patience, announce: Callable[[str], None], deadline: float) -> None:
    """Wait for the session, which the server grants at once unless something happened to it since.

    Args:
        session: Registered and started.
        patience: Limits and intervals.
        announce: Function that prints a line for the user.
        deadline: Until when, by the monotonic clock; at least one attempt is waited for.

    Raises:
        CoordinationError: The coordinator refuses, or does not answer any more.
    """
    deadline = max(deadline, time.monotonic() + patience.attempt)
    while not session.wait_attached(min(deadline - time.monotonic(), patience.announce_interval)):
        if time.monotonic() >= deadline:
            raise session.unavailable("attaching the session")
        announce(
            f"registered, but still waiting for a session with the coordinator at {session.address}: "
            f"{faults.cause_of(session.last_words)}"
        )
