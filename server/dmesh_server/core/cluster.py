"""One cluster, with the beginning and the end of its generations."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmesh_server.core import messages, records
from dmesh_server.core.barrier_reconciliation import BarrierReconciliation
from dmesh_server.core.barriers import Barriers, BarrierTable
from dmesh_server.core.deadlines import NoticeDue
from dmesh_server.core.epoch_waits import EpochWaits
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import Mutation
from dmesh_server.core.key_value import KeyValueStore
from dmesh_server.core.liveness import Watchdog
from dmesh_server.core.log_events import ClusterEnded, ClusterFormed
from dmesh_server.core.model import ClusterState, Member, RestartPolicy, Task
from dmesh_server.core.records import Generation
from dmesh_server.core.replies import RememberedAnswer, Replies, had_effect
from dmesh_server.core.roster import Roster, TaskSlot
from dmesh_server.core.shared import Shared
from dmesh_server.core.transaction import Transaction


@dataclass(slots=True)
class ServerState(Shared):
    """State that all clusters of one server share, with the clusters of the attached sessions."""

    sessions: dict[int, Cluster] = field(default_factory=dict)
    """The cluster of each attached session."""


class Cluster:
    """A cluster by name, through all its generations.

    A generation lasts from its first registration until its last member has departed. Its keys, changes and
    barriers end with it; its members and their fates are kept for display until the next generation begins.
    """

    def __init__(self, name: str, generation: Generation, epoch: int, shared: ServerState) -> None:
        self.name = name
        self.limits = shared.limits
        self.deadlines = shared.deadlines
        self.leases = shared.leases
        self._shared = shared
        self.restored = False
        """True if the current generation began before this start of the server."""
        self.restored_epoch = epoch
        """Epoch at this start of the server."""
        self.restored_revision = 0
        """Revision of the key-value store at this start of the server, if `restored`."""
        self._start(generation, epoch)

    def _start(self, generation: Generation, epoch: int) -> None:
        self.generation = generation
        """Facts fixed for the current, or last, generation."""
        self.settings = generation.settings
        """Settings of the current, or last, generation."""
        self.rejoin = generation.settings.restart_policy is RestartPolicy.REJOIN
        """True if the task slots of lost and failed members may be taken again."""
        self.roster = Roster(generation.jobs, epoch)
        """Its members."""
        self.table = BarrierTable(self.name, self.roster, self._shared)
        """Its barriers."""
        self.watchdog = Watchdog(self.table, generation.settings.stuck_after, self._shared)
        """Detects members that are blocked or stuck."""
        self.barriers = Barriers(self.table, self.watchdog, rejoin=self.rejoin)
        """The rules of its barriers."""
        self.reconciliation = BarrierReconciliation(self.table)
        """Barriers that its members present as passed."""
        self.store = KeyValueStore(self.name, self._shared, self.roster, self.owner)
        """Its keys."""
        self.epoch_waits = EpochWaits(self.name, self._shared, self.state)
        """Calls that wait for the next epoch."""
        self.replies = Replies(self.limits.replies_to_observers)
        """Answers to callers without a task."""
        self.unreported: list[TaskSlot] = []
        """Departures that the sessions have not been notified of."""
        self.unreported_rejoined: dict[Task, TaskSlot] = {}
        """New holders of departed members' slots that the sessions have not been notified of."""
        self.leave_due = float("-inf")
        """Until when they are held back if all of them left in good order."""
        self.unreported_loss = False
        """True if any of these departures was a loss or failure."""
        self.quiet_until = float("-inf")
        """Time until which departures are held back to be reported together."""

    @property
    def owner(self) -> str:
        """Tenant that formed the generation; empty for none."""
        return self.generation.owner

    @property
    def size(self) -> tuple[int, int, int]:
        """Number of tasks, number of keys, bytes of keys and values."""
        return len(self.roster.everyone), len(self.store.keys), self.store.keys.size

    @property
    def epoch(self) -> int:
        """Grow with every change of membership, through all generations."""
        return self.roster.epoch

    @property
    def ended(self) -> bool:
        """True if all members have departed: the next registration begins a new generation."""
        return self.roster.active == 0

    def check_task(self, task: Task) -> None:
        """Refuse a task that is none of the cluster's.

        Raises:
            CoreError: UNKNOWN_TASK.
        """
        if not self.roster.knows(task):
            raise CoreError(
                ErrorKind.UNKNOWN_TASK,
                f"{messages.label(task)} is not a task of cluster {messages.quote(self.name)}, which has "
                f"{messages.tasks(self.roster.everyone)}",
            )

    def begin(self, generation: Generation, transaction: Transaction) -> None:
        """Begin a new generation in place of one that has ended."""
        self.forget_members(transaction)
        self.restored = False
        self._start(generation, self.epoch)
        transaction.persist(self.name, records.CLUSTER, "", records.encode_generation(generation))
        transaction.note(ClusterFormed(self.name, generation.incarnation, len(self.roster.everyone)))

    def end(self, transaction: Transaction) -> None:
        """End the life: its last member has departed."""
        self.dismiss_waiters(
            CoreError(
                ErrorKind.CLUSTER_ENDING,
                f"cluster {messages.quote(self.name)} has ended: all its members have departed, and its keys "
                "are gone",
            ),
            transaction,
        )
        transaction.note(ClusterEnded(self.name, self.epoch))
        self.deadlines.cancel(NoticeDue(self.name))
        self.unreported.clear()
        self.unreported_loss = False
        self.unreported_rejoined.clear()
        self.watchdog.end()
        self.table.end(transaction)
        self.store.end(transaction)
        self.store = KeyValueStore(self.name, self._shared, self.roster, self.owner)
        for place in self.replies.places():
            transaction.persist(self.name, records.REPLY, records.reply_key(None, place), None)
        self.replies = Replies(self.limits.replies_to_observers)

    def remember(
        self, slot: TaskSlot | None, event: Mutation, answer: RememberedAnswer, transaction: Transaction
    ) -> None:
        """Keep the answer to a call that changed something, for its retries.

        Args:
            slot: The caller's task; None for an observer.
            event: The call.
            answer: Its answer.
            transaction: The present event.
        """
        if not had_effect(answer):
            return
        replies = self.replies if slot is None else slot.replies
        kept = replies.add(event.request_id, type(event).__name__, event.reply_slot, answer)
        key = records.reply_key(slot.task if slot else None, replies.place(kept))
        value = records.encode_reply(slot.incarnation if slot else 0, kept)
        transaction.persist(self.name, records.REPLY, key, value)

    def forget(self, transaction: Transaction) -> None:
        """Remove every durable trace of a cluster that has ended."""
        self.forget_members(transaction)
        transaction.persist(self.name, records.CLUSTER, "", None)
        transaction.persist(self.name, records.CLUSTER, "epoch", None)

    def forget_members(self, transaction: Transaction) -> None:
        """Remove the members of an ended generation, with the answers kept for them, from the store."""
        for slot in self.roster.slots.values():
            transaction.persist(self.name, records.MEMBER, records.slot_key(slot.task), None)
            self.forget_replies(slot, transaction)

    def forget_replies(self, slot: TaskSlot, transaction: Transaction) -> None:
        """Remove the answers kept for the holder of a task slot from the durable state."""
        for place in slot.replies.places():
            transaction.persist(self.name, records.REPLY, records.reply_key(slot.task, place), None)

    def waits(self, token: int) -> bool:
        """Return whether a call with this token waits already, in whichever cluster."""
        return token in self._shared.waiting

    def dismiss_waiters(self, error: CoreError, transaction: Transaction) -> None:
        """Answer every blocked read and end every watch with an error."""
        for token in (*self.store.waiters.tokens(), *self.epoch_waits.tokens()):
            self._shared.waiting[token].dismiss(token, error, transaction)

    def dismiss_waiters_of(self, slot: TaskSlot, error: CoreError, transaction: Transaction) -> None:
        """Do the same for one member's."""
        for token in sorted(slot.tokens):
            self._shared.waiting[token].dismiss(token, error, transaction)

    def bind(self, slot: TaskSlot, session: int) -> int | None:
        """Attach a session to a task slot; return the session that it replaces."""
        replaced = self.unbind(slot)
        self.roster.bind(slot, session)
        self._shared.sessions[session] = self
        return replaced

    def unbind(self, slot: TaskSlot) -> int | None:
        """Detach the task slot's session; return it."""
        session = self.roster.unbind(slot)
        if session is not None:
            del self._shared.sessions[session]
        return session

    def advance_epoch(self, transaction: Transaction) -> None:
        """Note a change of membership."""
        self.roster.epoch += 1
        transaction.unsettled.add(self.name)
        transaction.persist(self.name, records.CLUSTER, "epoch", records.encode_number(self.epoch))

    def persist_slot(self, slot: TaskSlot, transaction: Transaction) -> None:
        """Make the holder of a task slot durable."""
        holder = records.MemberRecord(slot.snapshot(), slot.request_id, slot.epoch, slot.former, slot.proof)
        transaction.persist(
            self.name, records.MEMBER, records.slot_key(slot.task), records.encode_member(holder)
        )

    def state(self, known_epoch: int = 0) -> ClusterState:
        """Return the cluster as it is now; without members if the caller knows the current epoch."""
        members: tuple[Member, ...] = () if known_epoch == self.epoch else self.roster.members()
        return ClusterState(
            self.name,
            self.generation.incarnation,
            self.epoch,
            self.roster.jobs,
            members,
            self.roster.vacant(),
            self.table.status(),
        )
