"""Rules of barriers: permission to arrive, and the ends of instances.

A barrier has a name, and under it instances counted from 0. The first arrival fixes the participants and the
deadline; the last arrival ends the instance, and so do a departure, the deadline, a disagreement and a
cancellation. The latest finished instance of a name is remembered, so that a participant without the result
gets it when it presents its arrival again, even after a crash of the server.

In a cluster with the restart policy REJOIN, a participant that is lost or fails takes only its own arrival
away: the instance waits for the next holder of its slot. That one has not counted instances, and leaves the
number to the server ("blind") until it was told a result. An instance that ended after it had registered did
so with it, or is a failure that concerns it: so the latest such instance is its own if it asks again. All
others are over without it.

A barrier *of those alive* waits only for the participants that are members, as they come and go: a departure
takes the member out of it, whatever the policy, and a process that registers meanwhile is waited for. Its
result names the processes that came.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dmesh_server.core import messages, validation
from dmesh_server.core.barrier_table import BarrierTable, Instance, check_barrier, slot_order
from dmesh_server.core.effects import BarrierResult
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import CancelBarrier, EnterBarrier
from dmesh_server.core.liveness import Watchdog
from dmesh_server.core.model import Liveness, Member, MemberState, Task
from dmesh_server.core.records import FinishedBarrier
from dmesh_server.core.roster import TaskSlot
from dmesh_server.core.transaction import Transaction

_SLIM_FROM = 64
"""Number of members from which on an error's members come without devices and addresses."""

_RETURN = 5.0
"""Seconds after a restart within which no barrier times out: its participants may be on their way."""


class Barriers:
    """The rules of the barriers of one generation of a cluster."""

    def __init__(self, table: BarrierTable, watchdog: Watchdog, *, rejoin: bool) -> None:
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
            raise CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{messages.name(slot.snapshot())} called barrier {messages.quote(event.name)} for "
                f"{messages.tasks(participants)} without being one of them. Only its participants may call a "
                "barrier.",
            )
        last = self._table.finished.get(event.name)
        if last is not None and (event.instance == last.number or self._had_part(slot, event, last)):
            self._tell_again(slot, event, participants, last, transaction)
        elif current is not None:
            self._join(slot, event, participants, current, transaction)
        else:
            self._begin(slot, event, participants, last, transaction)

    def _had_part(self, slot: TaskSlot, event: EnterBarrier, last: FinishedBarrier) -> bool:
        """Tell whether a member that took another's slot, and do not count, ask for a result again."""
        return event.instance < 0 and bool(slot.former) and last.epoch >= slot.epoch

    def _participants(self, event: EnterBarrier, current: Instance | None) -> frozenset[Task]:
        if not event.participants:
            return self._roster.everyone
        if current is not None and event.participants == current.listed:
            return current.participants
        for task in event.participants:
            if not self._roster.knows(task):
                raise CoreError(
                    ErrorKind.UNKNOWN_TASK,
                    f"barrier {messages.quote(event.name)}: "
                    f"/job:{messages.quote(task.job)[1:-1]}/task:{task.index} is not a task of cluster "
                    f"{messages.quote(self._cluster)}, which consists of "
                    f"{messages.tasks(self._roster.everyone)}",
                )
        participants = frozenset(event.participants)
        if len(participants) != len(event.participants):
            twice = next(task for task in sorted(participants) if event.participants.count(task) > 1)
            raise validation.invalid(
                f"barrier {messages.quote(event.name)}: {twice} is listed twice as a participant"
            )
        return self._roster.everyone if participants == self._roster.everyone else participants

    def _tell_again(
        self,
        slot: TaskSlot,
        event: EnterBarrier,
        participants: frozenset[Task],
        last: FinishedBarrier,
        transaction: Transaction,
    ) -> None:
        expected = self._table.participants(last)
        if participants != expected:
            raise CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{_title(event.name, last.number)} is already over; it was called for "
                f"{messages.tasks(expected)}, but {messages.name(slot.snapshot())} called it for "
                f"{messages.tasks(participants)}. Give barriers of different groups different names.",
            )
        if last.error is None and event.alive != (last.present is not None):
            raise self._other_kind(slot, event, last.number)
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
                raise self._wrong_number(slot, event, number, "is under way")
            number = event.instance
        if slot.task not in current.participants:
            raise CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{_title(event.name, current.number)} is under way for "
                f"{messages.tasks(current.participants)}; {messages.name(slot.snapshot())} is not one of "
                f"them and called it for {messages.tasks(participants)}. Give barriers of different "
                "groups different names.",
            )
        if event.alive != (current.alive is not None):
            current.arrived[slot.task] = None
            self._table.finish(event.name, self._other_kind(slot, event, current.number), transaction)
            return
        if participants is not current.participants and participants != current.participants:
            first = self._roster.describe(next(iter(current.arrived)))
            error = CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{_title(event.name, current.number)} failed: its callers disagree on who takes part. "
                f"{messages.name(first)} called it for {messages.tasks(current.participants)}, "
                f"{messages.name(slot.snapshot())} for {messages.tasks(participants)}. "
                "All participants must give the same list.",
                (first, slot.snapshot()),
            )
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
                raise self._wrong_number(slot, event, last.number + 1, "is next")
            number = number if ahead else last.number + 1
        elif number < 0:
            number = 0
        table = self._table
        if len(table.under_way) >= table.limits.max_barriers:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"barrier {messages.quote(event.name)} cannot begin: {len(table.under_way)} barriers are "
                f"under way in cluster {messages.quote(self._cluster)}, which is the server's limit",
            )
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
            members = tuple(gone.snapshot() for gone in departed)
            fates = "; ".join(
                f"{messages.name(m)} {messages.fate_of(m)}" for m in members[: messages.MAX_DESCRIBED]
            )
            more = messages.tasks(member.task for member in members[messages.MAX_DESCRIBED :])
            self._fail(event.name, fates + (f"; also gone: {more}" if more else ""), members, transaction)
        elif instance.complete:
            table.finish(event.name, None, transaction)
        elif self._watchdog.looks_at == math.inf:
            self._watchdog.arm(transaction)

    def _may_know_better(self, slot: TaskSlot) -> bool:
        """Tell whether a member may know of instances that the server has forgotten in a crash."""
        return self._table.restored_at is not None and slot.epoch <= self._table.restored_epoch

    def _ends_barriers(self, departed: TaskSlot) -> bool:
        """Tell whether a departure fails the barriers because the task slot cannot be taken again."""
        return not self._rejoin or departed.state is MemberState.LEFT

    def member_departed(self, slot: TaskSlot, transaction: Transaction) -> None:
        """Fail every barrier that the departed member takes part in, or take its arrivals away."""
        under_way = self._table.under_way
        ends, member = self._ends_barriers(slot), slot.snapshot()
        for name in [name for name, current in under_way.items() if slot.task in current.participants]:
            current = under_way[name]
            if ends and current.alive is None:
                cause = f"{messages.name(member)} {messages.fate_of(member)}"
                self._fail(name, cause, (member,), transaction)
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
            raise CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{_title(event.name, current.number)} is for {messages.tasks(current.participants)}; "
                f"{messages.name(slot.snapshot())} is not one of them and cannot cancel it",
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
            error = CoreError(
                ErrorKind.BARRIER_CANCELLED,
                f"{_title(name, current.number)} was cancelled by {by} after {current} had arrived",
                members,
            )
            self._table.finish(name, error, transaction)
            return True
        if last is not None and instance in (-1, last.number):
            if last.error is not None and last.error.kind is ErrorKind.BARRIER_CANCELLED:
                return False
            outcome = "succeeded" if last.error is None else f"failed: {last.error.message}"
            raise CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{_title(name, last.number)} cannot be cancelled: it is over and {outcome}",
            )
        which = f" (instance {instance})" if instance >= 0 else ""
        raise CoreError(
            ErrorKind.BARRIER_MISMATCH,
            f"barrier {messages.quote(name)}{which} cannot be cancelled: it is not under way",
        )

    def time_out(self, name: str, transaction: Transaction) -> None:
        """End a barrier whose time is over."""
        current = self._table.under_way[name]
        missing = tuple(self._roster.describe(task) for task in sorted(current.missing(), key=slot_order))
        never = sum(1 for member in missing if member.incarnation == 0)
        advice = []
        if never:
            advice.append(
                "Check that those that never registered were started, with this coordinator's address."
            )
        if never < len(missing):
            advice.append(
                "Those that are alive are late, stuck, or do not call this barrier: see their logs."
            )
        if self._rejoin and any(member.state.departed for member in missing):
            advice.append("Those that are gone can be replaced: start a new process for each of them.")
        error = CoreError(
            ErrorKind.BARRIER_TIMEOUT,
            f"{_title(name, current.number)} timed out after {messages.seconds(current.timeout or 0.0)}: "
            f"{len(missing)} of {len(current.expected)} tasks are missing: "
            f"{messages.listing(missing, transaction.now)}. " + " ".join(advice),
            _slim(missing),
        )
        self._table.finish(name, error, transaction)

    def _fail(self, name: str, cause: str, members: tuple[Member, ...], transaction: Transaction) -> None:
        current = self._table.under_way[name]
        error = CoreError(
            ErrorKind.BARRIER_FAILED,
            f"{_title(name, current.number)} failed: {cause}. {current} had arrived. A cluster does not go "
            "on without a member: find out why it is gone (its log, its exit code) and start the job again.",
            _slim(members),
        )
        self._table.finish(name, error, transaction)

    def _other_kind(self, slot: TaskSlot, event: EnterBarrier, number: int) -> CoreError:
        member, kinds = slot.snapshot(), ("all its participants", "those of its participants that are alive")
        return CoreError(
            ErrorKind.BARRIER_MISMATCH,
            f"{_title(event.name, number)} failed: it was called for {kinds[not event.alive]}, but "
            f"{messages.name(member)} called it for {kinds[event.alive]}. Give different barriers different "
            "names.",
            (member,),
        )

    def _wrong_number(self, slot: TaskSlot, event: EnterBarrier, number: int, what: str) -> CoreError:
        return CoreError(
            ErrorKind.BARRIER_MISMATCH,
            f"{messages.name(slot.snapshot())} called barrier {messages.quote(event.name)} for instance "
            f"{event.instance} (so many it has finished), but instance {number} {what}. "
            "It called the barrier more or less often than the others: all participants of a name must take "
            "part in each of its instances. Give barriers of different groups different names.",
        )


def _title(name: str, number: int) -> str:
    return f"barrier {messages.quote(name)} (instance {number})"


def _slim(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Keep an error about very many members small enough to be sent to each of them."""
    if len(members) < _SLIM_FROM:
        return members
    return tuple(replace(member, devices=(), peer_addresses=()) for member in members)
