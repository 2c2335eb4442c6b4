"""One cluster: what it consists of, and how a life of it begins and ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmesh_server.core import records, wording
from dmesh_server.core.barrier_table import BarrierTable
from dmesh_server.core.barriers import Barriers
from dmesh_server.core.deadlines import NoticeDue
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.happenings import ClusterEnded, ClusterFormed
from dmesh_server.core.key_value import KeyValueStore
from dmesh_server.core.liveness import Watchdog
from dmesh_server.core.model import ClusterState, Member, RestartPolicy, Task
from dmesh_server.core.passing import Passing
from dmesh_server.core.records import Life
from dmesh_server.core.roster import Roster, Seat
from dmesh_server.core.shared import Shared
from dmesh_server.core.turn import Turn


@dataclass(slots=True)
class ServerState(Shared):
    """State that all clusters of one server share, with the clusters of the attached sessions."""

    sessions: dict[int, Cluster] = field(default_factory=dict)
    """The cluster of each attached session."""


class Cluster:
    """A cluster by name, through all its lives.

    A life lasts from its first registration until its last member has departed. Its keys, changes and
    barriers end with it; who was in it, and what became of them, is kept for people until the next life
    begins.
    """

    def __init__(self, name: str, life: Life, epoch: int, shared: ServerState) -> None:
        self.name = name
        self.limits = shared.limits
        self.deadlines = shared.deadlines
        self._shared = shared
        self._start(life, epoch)

    def _start(self, life: Life, epoch: int) -> None:
        self.life = life
        """What is fixed for the current, or last, life."""
        self.settings = life.settings
        """What can be set for each cluster."""
        self.rejoin = life.settings.restart_policy is RestartPolicy.REJOIN
        """Whether the seats of lost and failed members may be taken again."""
        self.roster = Roster(life.jobs, epoch)
        """Its members."""
        self.table = BarrierTable(self.name, self.roster, self._shared)
        """Its barriers."""
        self.watchdog = Watchdog(self.table, life.settings.stuck_after, self._shared)
        """Who of its members gets nowhere."""
        self.barriers = Barriers(self.table, self.watchdog, rejoin=self.rejoin)
        """The rules of its barriers."""
        self.passing = Passing(self.table)
        """What its members say that they have passed."""
        self.store = KeyValueStore(self.name, self._shared)
        """Its keys."""
        self.untold: list[Seat] = []
        """Departures that the sessions have not been told of."""
        self.untold_rejoined: dict[Task, Seat] = {}
        """New holders of seats of departed members that the sessions have not been told of."""
        self.leave_due = float("-inf")
        """Until when they are held back if all of them left in good order."""
        self.untold_loss = False
        """Whether any of them did not leave in good order."""
        self.quiet_until = float("-inf")
        """Until when departures are held back to be told together."""
        self.floor = float("-inf")
        """When leases and graces began at the earliest, after a stall of the server."""

    @property
    def epoch(self) -> int:
        """Grows with every change of membership, through all lives."""
        return self.roster.epoch

    @property
    def ended(self) -> bool:
        """True if all members have departed: the next registration begins a new life."""
        return self.roster.active == 0

    def begin(self, life: Life, turn: Turn) -> None:
        """Begins a new life in place of one that has ended."""
        self.forget_members(turn)
        self._start(life, self.epoch)
        turn.persist(self.name, records.CLUSTER, "", records.encode_life(life))
        turn.note(ClusterFormed(self.name, life.incarnation, len(self.roster.everyone)))

    def end(self, turn: Turn) -> None:
        """Ends the life: its last member has departed."""
        self.dismiss_waiters(
            CoreError(
                ErrorKind.CLUSTER_ENDING,
                f"cluster {wording.quote(self.name)} has ended: all its members have departed, and its keys "
                "are gone",
            ),
            turn,
        )
        turn.note(ClusterEnded(self.name, self.epoch))
        self.deadlines.cancel(NoticeDue(self.name))
        self.untold.clear()
        self.untold_loss = False
        self.untold_rejoined.clear()
        self.watchdog.end()
        self.table.end(turn)
        self.store.end(turn)
        self.store = KeyValueStore(self.name, self._shared)

    def forget(self, turn: Turn) -> None:
        """Removes every durable trace of a cluster that has ended."""
        self.forget_members(turn)
        turn.persist(self.name, records.CLUSTER, "", None)
        turn.persist(self.name, records.CLUSTER, "epoch", None)

    def forget_members(self, turn: Turn) -> None:
        """Removes the members of an ended life, with the answers kept for them, from what is durable."""
        for seat in self.roster.seats.values():
            turn.persist(self.name, records.MEMBER, records.seat_key(seat.task), None)
            self.forget_replies(seat, turn)

    def forget_replies(self, seat: Seat, turn: Turn) -> None:
        """Removes the answers kept for the holder of a seat from what is durable."""
        for slot in seat.replies.slots():
            turn.persist(self.name, records.REPLY, records.reply_key(seat.task, slot), None)

    def dismiss_waiters(self, error: CoreError, turn: Turn) -> None:
        """Answers every blocked read and ends every watch with an error."""
        for token in self.store.waiters.tokens():
            self.store.dismiss(token, error, turn)

    def bind(self, seat: Seat, session: int) -> int | None:
        """Attaches a session to a seat; returns the one that it replaces."""
        replaced = self.unbind(seat)
        self.roster.bind(seat, session)
        self._shared.sessions[session] = self
        return replaced

    def unbind(self, seat: Seat) -> int | None:
        """Detaches the seat's session; returns it."""
        session = self.roster.unbind(seat)
        if session is not None:
            del self._shared.sessions[session]
        return session

    def advance_epoch(self, turn: Turn) -> None:
        """Notes a change of membership."""
        self.roster.epoch += 1
        turn.persist(self.name, records.CLUSTER, "epoch", records.encode_number(self.epoch))

    def persist_seat(self, seat: Seat, turn: Turn) -> None:
        """Makes the holder of a seat durable."""
        holder = records.Holder(seat.snapshot(), seat.request_id, seat.epoch, seat.former)
        turn.persist(self.name, records.MEMBER, records.seat_key(seat.task), records.encode_holder(holder))

    def state(self, known_epoch: int = 0) -> ClusterState:
        """Returns the cluster as it is now; without members if the caller knows the current epoch."""
        members: tuple[Member, ...] = () if known_epoch == self.epoch else self.roster.members()
        return ClusterState(
            self.name,
            self.life.incarnation,
            self.epoch,
            self.roster.jobs,
            members,
            self.roster.vacant(),
            self.table.status(),
        )
