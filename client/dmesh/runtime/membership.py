"""One client's membership of its cluster: its running parts, and how they hear of each other."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dmesh._locks import Lock
from dmesh._log import announce
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.communicator import LEFT, Communicator
from dmesh.collectives.events import CallRecord
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.services import NAMED, Barriers, BarrierWait
from dmesh.collectives.trace import Trace
from dmesh.config.settings import Settings
from dmesh.coordination.members import ClusterState, Member, Members, MemberState
from dmesh.coordination.server import HostedServer
from dmesh.coordination.waiting import Bell
from dmesh.errors import CoordinationError, CoordinatorUnavailableError, DMeshError, FencedError
from dmesh.protocol import RESERVED_PREFIX
from dmesh.runtime import context

if TYPE_CHECKING:
    from dmesh.coordination.agent import Agent
    from dmesh.coordination.barriers import Arrival
    from dmesh.telemetry.client import ClientTracing

SHUTDOWN_BARRIER = f"{RESERVED_PREFIX}shutdown"
SURVIVORS_BARRIER = f"{SHUTDOWN_BARRIER}/survivors"
"""Barrier of the shutdown after survivors went on without lost clients."""
LAST_WORDS = 1.0
"""Limit for the delivery of a leaving client's last messages, seconds."""
ENDED = "its program ended normally, without calling dmesh.shutdown_accelerator_system()"
"""The reason of a leave at the normal end of a program."""
_GOODBYE = 10.0
"""Limit for the acknowledgement of a clean leave by a server that many clients leave at once, seconds."""
_LOOK = 0.1
"""Seconds between looks at the session of a client that waits for the server's report of a loss."""
_FIRST_REPORT, _NEXT_REPORTS = 2.0, 10.0
"""Seconds until a client that waits for the others to leave says so for the first time, and then again."""


@dataclass
class Client:
    """The running parts of one client."""

    settings: Settings
    """Settings that it was started with."""
    agent: Agent | None = None
    """The session with the coordination server, if there is one."""
    server: HostedServer | None = None
    """The coordination server, if this client hosts it."""
    members: tuple[Member, ...] = ()
    """All clients with their devices, by rank."""
    communicator: Communicator = field(init=False)
    """The data plane."""
    fenced: bool = False
    """True if this client was declared lost or failed, and may not act for its client id any more."""
    leaving: bool = False
    """True if it is about to leave, and makes no more collective calls."""
    trace: Trace | None = None
    """Trace of this client's calls, if wanted."""
    tracing: ClientTracing | None = None
    """OpenTelemetry spans of this client's calls, if wanted."""
    barrier_epoch: int = 0
    """The cluster's epoch at the latest barrier of all clients; 0 before there was one."""
    _departed: set[int] = field(default_factory=set)
    """Ranks that are gone: they need nothing more of this client."""
    _reported: set[int] = field(default_factory=set)
    """Ranks whose departure the coordination service has reported."""
    _bell: Bell = field(default_factory=Bell)
    _world_barrier_lock: threading.Lock = field(default_factory=Lock)

    def finish(self) -> None:
        """Leave at the normal end of the program, which is no failure.

        Asynchronous calls are completed first. If this client hosts the coordination server, it stays for at
        most the shutdown's limit until the others have left.
        """
        hosts = self.server is not None
        patience = self.settings.shutdown_timeout
        self.leaving = True
        try:
            self.communicator.finish(ENDED, patience, dial=hosts)
            if self.agent is not None:
                leave_quietly(self.agent, ENDED, _GOODBYE, clean=True)
            if hosts:
                self._let_others_go(patience)
        finally:
            self._stop("")

    def leave(self, reason: str = "", *, patience: float = 0.0) -> None:
        """Stop everything.

        Args:
            reason: Empty for a clean leave; otherwise why this client ends without a shutdown.
            patience: Seconds for which this client, if it hosts the coordination server, lets the others
                leave first.
        """
        try:
            if self.server is not None and patience > 0:
                self._let_others_go(patience)
            if reason:
                # What made this client end may be on its way to the others: news of the end, which they hear
                # of by the coordination service, must not overtake it.
                cause = self.communicator.world.failure
                self.communicator.close(LAST_WORDS, reason)
                self._let_others_hear_of(cause)
            if self.agent is not None:
                leave_quietly(self.agent, reason, LAST_WORDS if reason else _GOODBYE)
        finally:
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        self.communicator.close(LAST_WORDS, reason)
        if self.trace is not None:
            self.trace.close()
        if self.server is not None:
            self.server.stop(grace=LAST_WORDS)
        if self.tracing is not None:  # at the end: the server's last spans go the same way
            self.tracing.close()

    def _let_others_hear_of(self, failure: Failure | None) -> None:
        """Wait until the coordination service has reported a loss: all hear its reports in one order."""
        if self.agent is None or failure is None or failure.cause is not Cause.LOST:
            return
        lost = set(failure.ranks) - {self.settings.client_id}
        if not any(hosts_server(self.settings, rank) for rank in lost):
            deadline = time.monotonic() + self.agent.suspicion + LAST_WORDS
            # The embedded server ended with its client, and reports nothing any more.
            while self.agent.attached and not self._bell.wait_for(lambda: lost <= self._reported, _LOOK):
                if time.monotonic() >= deadline:
                    return

    # What is heard of the others ----------------------------------------------------------------------------

    def on_departure(self, member: Member) -> None:
        """Take note that the coordination service reports a client as gone."""
        self._reported.add(member.rank)
        if member.state is MemberState.LEFT:
            self.communicator.left(member.rank, member.reason or LEFT, member.incarnation)
            if not self.communicator.transport.hears_from(member.rank):
                self._departed.add(member.rank)  # there is no connection on which it could say goodbye
        else:
            self.communicator.lose(member.rank, member.reason or LEFT, member.incarnation, hearsay=True)
        self._bell.ring()

    def on_gone(self, rank: int, reason: str) -> None:
        """Take note that the data plane reports a client as gone."""
        self._departed.add(rank)
        self._bell.ring()
        if rank == 0 and self.agent is not None and hosts_server(self.settings, rank):
            self.agent.abandon(
                CoordinatorUnavailableError(
                    f"client 0, which hosted the coordination server, is gone: {reason}. To keep the server "
                    "apart from the clients, run `dmesh serve` and set DMESH_COORDINATOR."
                )
            )

    def on_session_failure(self, error: CoordinationError) -> None:
        """Take note that the session has failed: for good, unless the server is only unreachable."""
        if not isinstance(error, CoordinatorUnavailableError):
            # The others have given this client up; whatever it computed with them now would be wrong.
            self.fenced = isinstance(error, FencedError)
            self.communicator.shut_off(str(error))
            if self.fenced:  # the program may not ask for anything for a long time
                announce(str(error))
        elif 0 not in self._departed or self.settings.coordinator is not None:
            announce(str(error))

    def _let_others_go(self, patience: float) -> None:
        """Wait until the other clients have left the coordination server that ends with this process."""
        began = time.monotonic()
        report_after = _FIRST_REPORT
        while True:
            waited = time.monotonic() - began
            seconds = min(report_after, patience) - waited
            if self._bell.wait_for(lambda: not self._staying(), max(0.0, seconds)):
                return
            staying = self._staying()
            who = "; ".join(self.communicator.describe(rank) for rank in staying[:NAMED])
            who += f"; and {len(staying) - NAMED} more" if len(staying) > NAMED else ""
            own = f"client {self.settings.client_id}"
            if report_after >= patience:
                announce(
                    f"{own} ends after {patience:g} s (DMESH_SHUTDOWN_TIMEOUT), and the coordination server "
                    f"with it, although clients are left: {who}"
                )
                return
            announce(
                f"{own} has ended, but hosts the coordination server: it waits up to {patience:g} s "
                f"(DMESH_SHUTDOWN_TIMEOUT) for {who}"
            )
            report_after += _NEXT_REPORTS

    def _staying(self) -> list[int]:
        """Return the other clients that have not left, as far as the data plane knows."""
        own = self.settings.client_id
        return [
            rank for rank in range(self.settings.num_clients) if rank not in self._departed and rank != own
        ]

    # Admission of replacements of lost clients ------------------------------------------------------------

    def on_world_barrier(self, epoch: int) -> None:
        """Handle a barrier of all clients that ended at this epoch, on the thread that waited at it.

        Under the restart policy `rejoin`, a new epoch means that a process has replaced a client: otherwise
        the barrier of all clients could not have succeeded. All clients see the same epochs, so all of them
        start the same generation of collectives here, or none does.

        Raises:
            CoordinationError: The coordinator did not return the members.
            CollectiveError: The collectives are shut down.
        """
        if self.agent is None or self.leaving or not epoch or not self.agent.cluster_settings.rejoin:
            return
        with self._world_barrier_lock:
            if epoch <= self.barrier_epoch:
                return
            if self.barrier_epoch or self.agent.rejoined:
                self._take_in(self.agent.cluster_state(), epoch)
            self.barrier_epoch = epoch

    def _take_in(self, state: ClusterState, epoch: int) -> None:
        former = {member.rank: member for member in self.members}
        changed = [m for m in state.members if m.incarnation != former[m.rank].incarnation]
        for known in (self._departed, self._reported):
            known.difference_update(member.rank for member in changed)
        self.communicator.renew(peers_of(state.members), generation=epoch)
        self.members = state.members
        installed = context.current_or_none()
        if installed is not None and installed.find(Client) is self:
            installed.put(Members(state.members))
        for member in state.members:
            if member.state.departed:
                self.on_departure(member)
        if state.epoch != epoch:
            # The membership changed again since the barrier, so this table may already have members that
            # were not there. Who is new to this process is better lost than waited for in vain: all have
            # to meet again in any case, because somebody who was there is gone.
            for member in changed:
                self.communicator.lose(
                    member.rank,
                    "the membership changed again since the barrier: all clients must pass another one",
                    member.incarnation,
                    hearsay=True,
                )
        for member in changed:
            if member.devices != former[member.rank].devices:
                announce(
                    f"rank {member.rank}, {member.describe()}, does not have the devices of its predecessor: "
                    "existing meshes still describe the old ones"
                )


def barrier_record(arrival: Arrival) -> CallRecord:
    """Return the record of a barrier for the event ring."""
    return CallRecord(
        group="",
        sequence=arrival.instance,
        call=f"barrier {arrival.name!r}",
        nbytes=0,
        called=arrival.called,
        began=arrival.called,
        waited=0.0 if arrival.ended is None else arrival.ended - arrival.called,
        ended=arrival.ended,
        error=_error_of(arrival),
    )


def _error_of(arrival: Arrival) -> str | None:
    if arrival.error is not None:
        return f"{type(arrival.error).__name__}: {arrival.error}"[:1000]
    return None if arrival.fault is None else arrival.fault.message[:1000]


class ClientBarriers(Barriers):
    """The barriers of this client, for the detection of skipped calls."""

    def __init__(self, agent: Agent) -> None:
        self._barriers, self._job = agent.barriers, agent.identity.job

    def waits(self) -> list[BarrierWait]:
        """Return the barriers in which threads of this process wait."""
        return [self._wait(arrival) for arrival in self._barriers.waiting()]

    def threads(self) -> set[int]:
        """Return the threads that have called barriers."""
        return self._barriers.callers()

    def fail(self, name: str, error: DMeshError) -> None:
        """Make the wait in a barrier raise an error."""
        self._barriers.fail(name, error)

    def _wait(self, arrival: Arrival) -> BarrierWait:
        request = arrival.request
        tasks = request.participants
        return BarrierWait(
            arrival.name,
            frozenset(task.index for task in tasks if task.job == self._job) if tasks else None,
            arrival.thread,
            arrival.called + limit / 1000 - time.monotonic() if (limit := request.timeout_ms) else math.inf,
            arrival.name in (SHUTDOWN_BARRIER, SURVIVORS_BARRIER),
        )


def peers_of(members: Sequence[Member]) -> list[Peer]:
    """Return the members as peers of the data plane."""
    return [Peer(m.rank, m.peer_addresses, m.incarnation, m.describe()) for m in members]


def hosts_server(settings: Settings, rank: int) -> bool:
    """Return whether the client of this rank hosts the coordination server."""
    return settings.coordinator is None and rank == 0


def leave_quietly(agent: Agent, reason: str, timeout: float, *, clean: bool = False) -> None:
    """Leave, whether or not the server can be reached."""
    with contextlib.suppress(CoordinationError):  # the server may be gone already; we leave all the same
        agent.leave(reason, timeout, clean=clean)
