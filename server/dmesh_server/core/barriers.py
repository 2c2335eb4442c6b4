"""Barriers of one generation of a cluster.

A barrier has a name, and under it instances counted from 0. The first arrival fixes the participants and the
deadline; the last arrival ends the instance, and so do a departure, the deadline, a disagreement and a
cancellation. The latest finished instance of a name is remembered, so that a participant without the result
gets it when it presents its arrival again, even after a crash of the server.

In a cluster with the restart policy REJOIN, a participant that is lost or fails takes only its own arrival
away: the instance waits for the next holder of its slot. That one has not counted instances, and leaves the
number to the server ("blind") until it gets a result. An instance that ended after it had registered did
so with it, or is a failure that concerns it: so the latest such instance is its own if it asks again. All
others are over without it.

A barrier *of those alive* waits only for the participants that are members, as they come and go: a departure
takes the member out of it, whatever the policy, and a process that registers meanwhile is waited for. Its
result names the processes that came.

Instances under way are not durable: their participants present themselves again. A failure is durable before
it is released. A success is made durable lazily, so that a barrier waits for no disk: if a crash undoes it,
participants that have the result present it again (see `barrier_reconciliation`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from dmesh_server.core import barrier_errors, messages, records, validation
from dmesh_server.core.deadlines import BarrierDue
from dmesh_server.core.effects import BarrierResult
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import CancelBarrier, EnterBarrier
from dmesh_server.core.log_events import MOST_NAMED, BarrierEnded
from dmesh_server.core.model import BarrierStatus, Liveness, Member, MemberState, Participant, Task
from dmesh_server.core.records import FinishedBarrier
from dmesh_server.core.roster import Roster, TaskSlot
from dmesh_server.core.shared import Shared
from dmesh_server.core.transaction import Transaction

_RETURN = 5.0
"""Seconds after a restart within which no barrier times out: its participants may be on their way."""
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
        """Return the missing participants."""
        return self.expected - self.arrived.keys()


class BarrierTable:
    """The instances of one generation of a cluster, under way and finished: bookkeeping without rules."""

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
        # After a crash, only participants could report it to the next server, so the result is stored.
        lazy = error is None and present is None
        self.finished.pop(name, None)
        self.finished[name] = finished
        transaction.persist(self.cluster, records.BARRIER, name, finished, lazy=lazy)
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


class Watcher(Protocol):
    """Looks for members that keep others waiting; see `liveness.Watchdog`."""

    looks_at: float
    """Time of its next look; infinite if none is due."""

    def arm(self, transaction: Transaction) -> None:
        """Record that participants wait from now on."""


class Barriers:
    """The rules of the barriers of one generation of a cluster."""

    def __init__(self, table: BarrierTable, watchdog: Watcher, *, rejoin: bool) -> None:
        self._table = table
        self._watchdog = watchdog
        self._rejoin = rejoin
        self._cluster = table.cluster
        self._roster = table.roster

    def enter(self, slot: TaskSlot, event: EnterBarrier, transaction: Transaction) -> None:
        """Let a member arrive. A refusal concerns only the caller and is pushed to its session."""
        try:
            self._enter(slot, event, transaction)
        except CoreError as error:
            number = self._table.next_number(event.name) if event.instance < 0 else event.instance
            epoch = self._roster.epoch
            refusal = replace(error, epoch=epoch)
            transaction.push((event.session,), BarrierResult(event.name, number, refusal, epoch))

    def _enter(self, slot: TaskSlot, event: EnterBarrier, transaction: Transaction) -> None:
        check_barrier(event.name, event.instance, event.timeout)
        current = self._table.under_way.get(event.name)
        participants = self._participants(event, current)
        if slot.task not in participants:
            raise barrier_errors.not_a_participant(event.name, slot.snapshot(), participants)
        last = self._table.finished.get(event.name)
        if last is not None and (event.instance == last.number or self._had_part(slot, event, last)):
            self._resend_result(slot, event, participants, last, transaction)
        elif current is not None:
            self._join(slot, event, participants, current, transaction)
        else:
            self._begin(slot, event, participants, last, transaction)

    def _had_part(self, slot: TaskSlot, event: EnterBarrier, last: FinishedBarrier) -> bool:
        """Return whether a rejoined member, which does not count instances, asks for a result again."""
        return event.instance < 0 and bool(slot.former) and last.epoch >= slot.epoch

    def _participants(self, event: EnterBarrier, current: Instance | None) -> frozenset[Task]:
        if not event.participants:
            return self._roster.everyone
        if current is not None and event.participants == current.listed:
            return current.participants
        for task in event.participants:
            if not self._roster.knows(task):
                raise barrier_errors.unknown_task(event.name, task, self._cluster, self._roster.everyone)
        participants = frozenset(event.participants)
        if len(participants) != len(event.participants):
            raise barrier_errors.listed_twice(event.name, event.participants)
        return self._roster.everyone if participants == self._roster.everyone else participants

    def _resend_result(
        self,
        slot: TaskSlot,
        event: EnterBarrier,
        participants: frozenset[Task],
        last: FinishedBarrier,
        transaction: Transaction,
    ) -> None:
        expected = self._table.participants(last)
        if participants != expected:
            raise barrier_errors.over_for_others(
                event.name, last.number, slot.snapshot(), expected, participants
            )
        if last.error is None and event.alive != (last.present is not None):
            raise barrier_errors.other_kind(event.name, last.number, slot.snapshot(), alive=event.alive)
        result = BarrierResult(event.name, last.number, last.error, last.epoch, last.present)
        transaction.push((event.session,), result)

    def _join(
        self,
        slot: TaskSlot,
        event: EnterBarrier,
        participants: frozenset[Task],
        current: Instance,
        transaction: Transaction,
    ) -> None:
        number = current.number
        if event.instance not in (-1, number):
            guessed = len(current.blind) == len(current.arrived) and self._may_know_better(slot)
            if not guessed or event.instance < number:
                raise barrier_errors.wrong_number(
                    event.name, event.instance, slot.snapshot(), number, "is under way"
                )
            number = event.instance
        if slot.task not in current.participants:
            raise barrier_errors.under_way_for_others(
                event.name, current.number, slot.snapshot(), current.participants, participants
            )
        error = None
        if event.alive != (current.alive is not None):
            error = barrier_errors.other_kind(event.name, current.number, slot.snapshot(), alive=event.alive)
        elif participants is not current.participants and participants != current.participants:
            first = self._roster.describe(next(iter(current.arrived)))
            error = barrier_errors.disagreement(
                event.name, current.number, first, current.participants, slot.snapshot(), participants
            )
        if error is not None:
            current.arrived[slot.task] = None
            self._table.finish(event.name, error, transaction)
            return
        current.number = number
        if slot.task not in current.arrived:
            current.arrived[slot.task] = None
            current.latest = transaction.now
        if event.instance < 0:
            current.blind.add(slot.task)
        if slot.liveness is Liveness.STUCK:
            transaction.unsettled.add(self._cluster)
        if current.complete:
            self._table.finish(event.name, None, transaction)

    def _begin(
        self,
        slot: TaskSlot,
        event: EnterBarrier,
        participants: frozenset[Task],
        last: FinishedBarrier | None,
        transaction: Transaction,
    ) -> None:
        number = event.instance
        if last is not None:
            ahead = number > last.number + 1 and self._may_know_better(slot)
            if number not in (-1, last.number + 1) and not ahead:
                raise barrier_errors.wrong_number(
                    event.name, event.instance, slot.snapshot(), last.number + 1, "is next"
                )
            number = number if ahead else last.number + 1
        elif number < 0:
            number = 0
        table = self._table
        if len(table.under_way) >= table.limits.max_barriers:
            raise barrier_errors.too_many(event.name, len(table.under_way), self._cluster)
        instance = Instance(
            number,
            participants,
            event.participants,
            {slot.task: None},
            transaction.now,
            transaction.now,
            event.timeout,
        )
        if event.instance < 0:
            instance.blind.add(slot.task)
        departed = [gone for task, gone in self._roster.departed.items() if task in participants]
        if event.alive:
            gone_or_vacant = self._roster.departed.keys() | set(self._roster.iterate_vacant())
            instance.alive, departed = set(participants - gone_or_vacant), []
        departed = [gone for gone in departed if self._ends_barriers(gone)]
        if not departed and event.timeout is not None and not instance.complete:
            instance.deadline = transaction.now + event.timeout
            if table.restored_at is not None:
                instance.deadline = max(instance.deadline, table.restored_at + _RETURN)
        table.begin(event.name, instance)
        if slot.liveness is Liveness.STUCK:
            transaction.unsettled.add(self._cluster)
        if departed:
            self._fail(event.name, tuple(gone.snapshot() for gone in departed), transaction)
        elif instance.complete:
            table.finish(event.name, None, transaction)
        elif self._watchdog.looks_at == math.inf:
            self._watchdog.arm(transaction)

    def _may_know_better(self, slot: TaskSlot) -> bool:
        """Return whether a member may know of instances that the server lost in a crash."""
        return self._table.restored_at is not None and slot.epoch <= self._table.restored_epoch

    def _ends_barriers(self, departed: TaskSlot) -> bool:
        """Return whether a departure fails the barriers because the task slot cannot be taken again."""
        return not self._rejoin or departed.state is MemberState.LEFT

    def member_departed(self, slot: TaskSlot, transaction: Transaction) -> None:
        """Fail every barrier that the departed member takes part in, or take its arrivals away."""
        under_way = self._table.under_way
        ends, member = self._ends_barriers(slot), slot.snapshot()
        for name in [name for name, current in under_way.items() if slot.task in current.participants]:
            current = under_way[name]
            if ends and current.alive is None:
                self._fail(name, (member,), transaction)
                continue
            current.arrived.pop(slot.task, None)
            current.blind.discard(slot.task)
            if current.alive is not None:
                current.alive.discard(slot.task)
            if not current.arrived:
                self._table.drop(name)
            elif current.complete:
                self._table.finish(name, None, transaction)

    def member_joined(self, slot: TaskSlot) -> None:
        """Let the barriers of those alive wait for a new member, too."""
        for current in self._table.under_way.values():
            if current.alive is not None and slot.task in current.participants:
                current.alive.add(slot.task)

    def cancel(self, slot: TaskSlot, event: CancelBarrier, transaction: Transaction) -> None:
        """End a barrier for all its participants.

        Raises:
            CoreError: The caller is not one of them, or the instance is not under way.
        """
        check_barrier(event.name, event.instance, None)
        current = self._table.under_way.get(event.name)
        concerned = current is not None and event.instance in (-1, current.number)
        if current is not None and concerned and slot.task not in current.participants:
            raise barrier_errors.not_yours_to_cancel(
                event.name, current.number, slot.snapshot(), current.participants
            )
        member = slot.snapshot()
        self._cancel(event.name, event.instance, messages.name(member), (member,), transaction)

    def stop(self, name: str, instance: int, by: str, transaction: Transaction) -> bool:
        """End a barrier for all its participants for an operator; False if it was cancelled already.

        Raises:
            CoreError: The instance is not under way.
        """
        return self._cancel(name, instance, by, (), transaction)

    def _cancel(
        self, name: str, instance: int, by: str, members: tuple[Member, ...], transaction: Transaction
    ) -> bool:
        current = self._table.under_way.get(name)
        last = self._table.finished.get(name)
        if current is not None and instance in (-1, current.number):
            error = barrier_errors.cancelled(name, current.number, by, str(current), members)
            self._table.finish(name, error, transaction)
            return True
        if last is not None and instance in (-1, last.number):
            if last.error is not None and last.error.kind is ErrorKind.BARRIER_CANCELLED:
                return False
            raise barrier_errors.too_late_to_cancel(name, last.number, last.error)
        raise barrier_errors.nothing_to_cancel(name, instance)

    def time_out(self, name: str, transaction: Transaction) -> None:
        """End a barrier whose time is over."""
        current = self._table.under_way[name]
        missing = tuple(self._roster.describe(task) for task in sorted(current.missing(), key=slot_order))
        error = barrier_errors.timed_out(
            name,
            current.number,
            current.timeout or 0.0,
            missing,
            len(current.expected),
            transaction.now,
            rejoin=self._rejoin,
        )
        self._table.finish(name, error, transaction)

    def _fail(self, name: str, members: tuple[Member, ...], transaction: Transaction) -> None:
        """End a barrier because participants have departed."""
        current = self._table.under_way[name]
        error = barrier_errors.gone(name, current.number, members, str(current))
        self._table.finish(name, error, transaction)


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
