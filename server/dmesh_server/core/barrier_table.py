"""Barriers of one generation of a cluster, under way and finished: plain bookkeeping, without rules.

Instances under way are not durable: their participants present themselves again. The latest finished instance
of a name is remembered. A failure is durable before it is released. A success is made durable lazily, so that
a barrier waits for no disk: if a crash undoes it, participants that have the result present it again (see
`barrier_reconciliation`).
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, field

from dmesh_server.core import messages, records, validation
from dmesh_server.core.deadlines import BarrierDue
from dmesh_server.core.effects import BarrierResult
from dmesh_server.core.errors import CoreError
from dmesh_server.core.log_events import MOST_NAMED, BarrierEnded
from dmesh_server.core.model import BarrierStatus, Participant, Task
from dmesh_server.core.records import FinishedBarrier
from dmesh_server.core.roster import Roster, TaskSlot
from dmesh_server.core.shared import Shared
from dmesh_server.core.transaction import Transaction

_LONGEST_REASON = 4_096
"""Characters of an error that the log of a barrier's end keeps."""


@dataclass(slots=True)
class Instance:
    """A barrier under way."""

    number: int
    """Number of this use of the name; provisional until one participant names it explicitly."""
    participants: frozenset[Task]
    listed: tuple[Task, ...]
    """The participants as the first arrival gave them, to recognize an equal list quickly."""
    arrived: dict[Task, None]
    """Tasks that have arrived, in order of arrival."""
    started_at: float
    latest: float
    """Time of the latest arrival."""
    timeout: float | None
    deadline: float | None = None
    blind: set[Task] = field(default_factory=set)
    """Arrived tasks that left the number to the server."""
    alive: set[Task] | None = None
    """Of a barrier of those alive: the participants that are members now."""

    def __str__(self) -> str:
        return f"{len(self.arrived)} of {len(self.expected)} tasks"

    @property
    def expected(self) -> Set[Task]:
        """Tasks that the instance waits for."""
        return self.participants if self.alive is None else self.alive

    @property
    def complete(self) -> bool:
        """True if all expected tasks have arrived."""
        return len(self.arrived) == len(self.expected)

    def missing(self) -> Set[Task]:
        """Return who is not there."""
        return self.expected - self.arrived.keys()


class BarrierTable:
    """All barriers of one generation of a cluster."""

    def __init__(self, cluster: str, roster: Roster, shared: Shared) -> None:
        self.cluster = cluster
        """Name of the cluster."""
        self.roster = roster
        """Its members."""
        self.limits = shared.limits
        """Bounds and times."""
        self._deadlines = shared.deadlines
        self.watched = False
        """True while the watchdog has questions open, which the end of a barrier may answer."""
        self.under_way: dict[str, Instance] = {}
        """The unfinished instances by name, oldest first."""
        self.finished: dict[str, FinishedBarrier] = {}
        """The latest finished instance of each name, oldest first."""
        self.restored_at: float | None = None
        """Time at which the server restored this generation after a restart; None if it began in this run."""
        self.restored_epoch = 0
        """The cluster's epoch at that time."""

    def begin(self, name: str, instance: Instance) -> None:
        """Put an instance under way."""
        self.under_way[name] = instance
        if instance.deadline is not None:
            self._deadlines.set(BarrierDue(self.cluster, name), instance.deadline)

    def drop(self, name: str) -> Instance:
        """Remove an instance under way without a result."""
        instance = self.under_way.pop(name)
        if instance.deadline is not None:
            self._deadlines.cancel(BarrierDue(self.cluster, name))
        return instance

    def finish(
        self,
        name: str,
        error: CoreError | None,
        transaction: Transaction,
        *,
        epoch: int | None = None,
        without: Collection[Task] = (),
    ) -> None:
        """End an instance and send the result to all arrived tasks.

        Args:
            name: The barrier's name.
            error: The reason of its failure; None for a success.
            transaction: The present event.
            epoch: The cluster's epoch at its end; None for the current one.
            without: Arrived tasks that do not belong to this instance.
        """
        instance = self.drop(name)
        epoch = self.roster.epoch if epoch is None else epoch
        if error is not None:
            error.epoch = epoch
        slots, present = self.roster.slots, None
        if instance.alive is not None and error is None:
            present = tuple(Participant(task, slots[task].incarnation) for task in sorted(instance.arrived))
        self.remember(name, instance.number, instance.participants, error, epoch, transaction, present)
        sessions = [slots[task].session for task in instance.arrived if task not in without]
        transaction.push(
            (session for session in sessions if session is not None),
            BarrierResult(name, instance.number, error, epoch, present),
        )
        waited = transaction.now - instance.started_at
        transaction.note(_ended(self.cluster, name, instance, waited, error))
        if self.watched:
            transaction.unsettled.add(self.cluster)

    def remember(
        self,
        name: str,
        number: int,
        participants: frozenset[Task],
        error: CoreError | None,
        epoch: int,
        transaction: Transaction,
        present: tuple[Participant, ...] | None = None,
    ) -> None:
        """Keep a result in place of the name's last one; forget the oldest beyond the limit."""
        everyone = participants is self.roster.everyone
        finished = FinishedBarrier(number, None if everyone else participants, error, epoch, present)
        # Only who came to it can tell the successor of a server that was killed: it must know itself.
        lazy = error is None and present is None
        self.finished.pop(name, None)
        self.finished[name] = finished
        transaction.persist(self.cluster, records.BARRIER, name, records.encode_barrier(finished), lazy=lazy)
        if len(self.finished) > self.limits.max_barriers:
            oldest = next(iter(self.finished))
            del self.finished[oldest]
            transaction.persist(self.cluster, records.BARRIER, oldest, None, lazy=lazy)

    def participants(self, finished: FinishedBarrier) -> frozenset[Task]:
        """Return the participants of a finished instance."""
        return self.roster.everyone if finished.participants is None else finished.participants

    def next_number(self, name: str) -> int:
        """Return the number of the instance under way, or of the next one."""
        current = self.under_way.get(name)
        if current is not None:
            return current.number
        last = self.finished.get(name)
        return 0 if last is None else last.number + 1

    def end(self, transaction: Transaction) -> None:
        """Forget everything: the cluster's generation is over."""
        for name in list(self.under_way):
            self.drop(name)
        for name in self.finished:
            transaction.persist(self.cluster, records.BARRIER, name, None)
        self.finished.clear()

    def status(self) -> tuple[BarrierStatus, ...]:
        """Return the barriers under way, oldest first."""
        return tuple(map(self.status_of, self.under_way))

    def status_of(self, name: str) -> BarrierStatus:
        """Return a barrier under way."""
        current = self.under_way[name]
        return BarrierStatus(
            name,
            current.number,
            tuple(current.arrived),
            tuple(sorted(current.missing(), key=slot_order)),
            current.started_at,
            current.deadline,
        )

    def slots(self, instance: Instance) -> list[TaskSlot]:
        """Return the task slots of the arrived tasks, in order of arrival."""
        return [self.roster.slots[task] for task in instance.arrived]


def check_barrier(name: str, instance: int, timeout: float | None) -> None:
    """Refuse a malformed name, instance or time limit of a barrier."""
    if not 1 <= len(name) <= 256 or not name.isprintable():
        raise validation.invalid(
            f"the barrier name {messages.quote(name)} must be 1-256 printable characters"
        )
    if instance < -1 or instance not in validation.INT64:
        raise validation.invalid(
            f"barrier {messages.quote(name)}: the instance {instance} must be the number of instances "
            "finished so far, or -1"
        )
    if timeout is not None:
        validation.duration(timeout, f"the timeout of barrier {messages.quote(name)}", positive=True)


def _ended(
    cluster: str, name: str, instance: Instance, waited: float, error: CoreError | None
) -> BarrierEnded:
    """Return the log event of a barrier's end, with a bounded part of its error."""
    number, participants = instance.number, len(instance.participants)
    if error is None:
        return BarrierEnded(cluster, name, number, participants, (), 0, waited, "", "")
    missing = sorted(instance.missing(), key=slot_order)
    return BarrierEnded(
        cluster, name, number, participants, tuple(missing[:MOST_NAMED]), len(missing), waited,
        error.kind.name, error.message[:_LONGEST_REASON],
    )  # fmt: skip


def slot_order(task: Task) -> tuple[str, int]:
    """Sort tasks; faster than comparing them."""
    return task.job, task.index
