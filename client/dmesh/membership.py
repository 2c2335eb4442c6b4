"""One client's membership of its cluster: the parts that run, and what they have to tell each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dmesh import context
from dmesh._log import announce
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.flight import Record
from dmesh.collectives.trace import Trace
from dmesh.collectives.transport.base import Peer
from dmesh.coordination.activity import TRACKER, Progress
from dmesh.coordination.agent import Agent
from dmesh.coordination.barriers import RESERVED_PREFIX, Arrival
from dmesh.coordination.members import ClusterState, Member
from dmesh.coordination.waiting import Bell
from dmesh.errors import CoordinationError, CoordinatorUnavailableError, FencedError
from dmesh.settings import Settings

if TYPE_CHECKING:
    from dmesh.telemetry.client import ClientTracing
    from dmesh_server.embedded import EmbeddedServer

SHUTDOWN_BARRIER = f"{RESERVED_PREFIX}shutdown"
LAST_WORDS = 1.0
"""Seconds that a leaving client's last messages have to be delivered."""
_GOODBYE = 10.0
"""Seconds that a coordination server, busy with everybody's leave, has to acknowledge a clean one."""


@dataclass
class Client:
    """The running parts of one client."""

    settings: Settings
    """What it was started with."""
    agent: Agent | None = None
    """The session with the coordination server, if there is one."""
    server: EmbeddedServer | None = None
    """The coordination server, if this client hosts it."""
    members: tuple[Member, ...] = ()
    """All clients with their devices, by rank."""
    communicator: Communicator = field(init=False)
    """The data plane."""
    fenced: bool = False
    """Whether this client was declared lost or failed, and may not act for its client id any more."""
    leaving: bool = False
    """Whether it is about to leave, and will use the data plane no more."""
    barrier_records: BarrierRecords | None = None
    """What the flight recorder knows of barriers, which it does not keep alive itself."""
    trace: Trace | None = None
    """Writes down what this client calls, if that is asked for."""
    tracing: ClientTracing | None = None
    """Makes spans of what this client calls, if that is asked for."""
    met: int = 0
    """The cluster's epoch at the latest barrier of all clients; 0 before there was one."""
    _departed: set[int] = field(default_factory=set)
    _told_of: set[int] = field(default_factory=set)
    _bell: Bell = field(default_factory=Bell)
    _meeting: threading.Lock = field(default_factory=threading.Lock)

    def leave(self, reason: str = "", *, patience: float = 0.0) -> None:
        """Stops everything.

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
            self.communicator.close(LAST_WORDS, reason)
            if self.trace is not None:
                self.trace.close()
            if self.server is not None:
                self.server.stop(grace=LAST_WORDS)
            if self.tracing is not None:  # at the end: the server's last spans go the same way
                self.tracing.close()

    def _let_others_hear_of(self, failure: Failure | None) -> None:
        """Waits until the coordination service has told of a loss: all hear what it tells in one order."""
        if self.agent is None or failure is None or failure.cause is not Cause.LOST:
            return
        lost = set(failure.ranks) - {self.settings.client_id}
        if not any(hosts_server(self.settings, rank) for rank in lost):
            patience = self.agent.session_grace + LAST_WORDS
            self._bell.wait_for(lambda: lost <= self._told_of, patience)

    # What is heard of the others ----------------------------------------------------------------------------

    def on_departure(self, member: Member) -> None:
        """The coordination service says that a client is gone."""
        self._told_of.add(member.rank)
        self._bell.ring()
        self.communicator.departed(
            member.rank, member.reason or "it has left the cluster", member.incarnation
        )

    def on_gone(self, rank: int, reason: str) -> None:
        """The data plane has noticed, or was told, that a client is gone."""
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
        """The session with the coordination server has failed: for good, unless the server is only away."""
        if not isinstance(error, CoordinatorUnavailableError):
            # The others have given this client up; whatever it computed with them now would be wrong.
            self.fenced = isinstance(error, FencedError)
            self.communicator.shut_off(str(error))
            if self.fenced:  # the program may not ask for anything for a long time
                announce(str(error))
        elif 0 not in self._departed or self.settings.coordinator is not None:
            announce(str(error))

    def _let_others_go(self, patience: float) -> None:
        others = self.settings.num_clients - 1
        self._bell.wait_for(lambda: len(self._departed) >= others, patience)

    # Taking in those that took the seats of lost ones -------------------------------------------------------

    def on_meeting(self, epoch: int) -> None:
        """All clients have passed a barrier that was over at this epoch, on the thread that waited at it.

        Under the restart policy `rejoin`, an epoch that is not that of the meeting before means that another
        process has taken some client's place, because otherwise not all could have met. All clients see the
        same epochs, so all of them begin the same generation of collectives here, or none does.

        Raises:
            CoordinationError: The members could not be asked for.
            CollectiveError: The collectives are shut down.
        """
        if self.agent is None or self.leaving or not epoch or not self.agent.cluster_settings.rejoin:
            return
        with self._meeting:
            if epoch <= self.met:
                return
            if self.met or self.agent.rejoined:
                self._take_in(self.agent.cluster_state(), epoch)
            self.met = epoch

    def _take_in(self, state: ClusterState, epoch: int) -> None:
        former = {member.rank: member for member in self.members}
        changed = [m for m in state.members if m.incarnation != former[m.rank].incarnation]
        for known in (self._departed, self._told_of):
            known.difference_update(member.rank for member in changed)
        self.communicator.renew(peers_of(state.members), generation=epoch)
        self.members = state.members
        installed = context.current_or_none()
        if installed is not None and installed.client is self:
            installed.members = state.members
        for member in state.members:
            if member.state.departed:
                self.on_departure(member)
        if state.epoch != epoch:
            # The membership changed again since the barrier, so this table may already have members that
            # were not there. Who is new to this process is better lost than waited for in vain: all have
            # to meet again in any case, because somebody who was there is gone.
            for member in changed:
                self.communicator.departed(
                    member.rank,
                    "the membership changed again since the barrier: all clients must pass another one",
                    member.incarnation,
                )
        for member in changed:
            if member.devices != former[member.rank].devices:
                announce(
                    f"rank {member.rank}, {member.describe()}, has other devices than its predecessor: "
                    "meshes made before do not describe them"
                )


class CollectiveObserver:
    """Tells what this client's collectives do, and for whom they wait: see `observer.Observer`."""

    def __init__(self, agent: Agent | None) -> None:
        self._agent = agent

    def watch(self, source: Progress) -> None:
        """What a group's calls do that it does not tell of one by one."""
        TRACKER.watch(source)

    def begin(self, operation: object) -> None:
        """A call begins on this thread."""
        TRACKER.begin(operation)

    def end(self, operation: object) -> None:
        """The call that began last on this thread is over: that is progress."""
        TRACKER.end(None)

    def waiting(self, operation: object, ranks: Sequence[int], age: float) -> None:
        """A call has waited for these ranks for `age` seconds."""
        if self._agent is not None:
            self._agent.report_waiting(str(operation), ranks, age)

    def done(self, operation: object) -> None:
        """A wait of which `waiting` has told is over."""
        if self._agent is not None:
            self._agent.report_waiting("", (), 0.0)


class BarrierRecords:
    """Tells the flight recorder of this client's barriers: see `flight.Source`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def recent(self, most: int) -> list[Record]:
        """Returns records of the last barriers. Any thread."""
        return [barrier_record(arrival) for arrival in self._agent.past_barriers(most)]


def barrier_record(arrival: Arrival) -> Record:
    """Returns what the flight recorder, and a trace, tell of a barrier."""
    return Record(
        group="",
        sequence=arrival.instance,
        call=f"barrier {arrival.name!r}",
        nbytes=0,
        called=arrival.called,
        began=arrival.called,
        waited=0.0 if arrival.ended is None else arrival.ended - arrival.called,
        ended=arrival.ended,
        error=None if arrival.fault is None else arrival.fault.message[:1000],
    )


def peers_of(members: Sequence[Member]) -> list[Peer]:
    """Returns the members as the data plane needs to know them."""
    return [Peer(m.rank, m.peer_addresses, m.incarnation, m.describe()) for m in members]


def hosts_server(settings: Settings, rank: int) -> bool:
    """Returns whether the client of this rank hosts the coordination server."""
    return settings.coordinator is None and rank == 0


def leave_quietly(agent: Agent, reason: str, timeout: float) -> None:
    """Leaves, whether or not the server can be told."""
    with contextlib.suppress(CoordinationError):  # the server may be gone already; we leave all the same
        agent.leave(reason, timeout)
