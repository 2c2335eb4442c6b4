"""Passed barriers as members present them: a success survives a crash without costing a disk write.

A success is released at once and becomes durable soon after. If the server is killed in between, some
participants may have the result and others not. After the restart, participants with the result present it
when they attach; the others present their arrival again. Whatever the order, the instance has succeeded for
all in the end: it is remembered, and its waiting participants pass. Failures need none of this: they are
durable before they are released. A remembered result is never contradicted: for an instance that is known to
be over, a presentation changes nothing.
"""

from __future__ import annotations

from dmesh_server.core import messages, validation
from dmesh_server.core.barriers import BarrierTable, Instance, check_barrier
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import PassedBarrier, Task
from dmesh_server.core.roster import TaskSlot
from dmesh_server.core.transaction import Transaction


class BarrierReconciliation:
    """Takes the passed barriers that the members of one generation of a cluster present."""

    def __init__(self, table: BarrierTable) -> None:
        self._table = table
        self._roster = table.roster

    def take(self, slot: TaskSlot, passed: tuple[PassedBarrier, ...], transaction: Transaction) -> None:
        """Take a member's passed barriers.

        Raises:
            CoreError: They are malformed or impossible; nothing was taken.
        """
        if not passed:
            return
        validation.passed(passed, slot.task, self._table.limits)
        for one in passed:
            check_barrier(one.name, one.instance, None)
        news = []
        for one in passed:
            last = self._table.finished.get(one.name)
            if last is None or one.instance > last.number:
                news.append((one, self._participants(one)))
        for one, participants in news:
            self._take(one, participants, transaction)

    def _participants(self, one: PassedBarrier) -> frozenset[Task]:
        everyone = self._roster.everyone
        if not one.participants:
            return everyone
        participants = frozenset(one.participants)
        if not participants <= everyone:
            stranger = min(participants - everyone, key=lambda task: (task.job, task.index))
            raise CoreError(
                ErrorKind.UNKNOWN_TASK,
                f"barrier {messages.quote(one.name)}, reported as passed: {messages.label(stranger)} is "
                f"not a task of cluster {messages.quote(self._table.cluster)}",
            )
        return everyone if participants == everyone else participants

    def _take(self, one: PassedBarrier, participants: frozenset[Task], transaction: Transaction) -> None:
        table, name, number = self._table, one.name, one.instance
        # An epoch that the caller does not know is that of the restart: had it changed later, the change's
        # record would have carried the result into the store.
        epoch = min(one.epoch, self._roster.epoch) if one.epoch > 0 else table.restored_epoch
        current = table.under_way.get(name)
        if current is None or current.number == number + 1:
            # Second case: a participant that has the result already arrived at the next instance.
            table.remember(name, number, participants, None, epoch, transaction)
            return
        if current.number > number or current.participants != participants:
            # First case: far behind. Second case: a barrier of others. Neither says anything about the other.
            return
        newcomers = self._newcomers(current, epoch)
        if len(newcomers) < len(current.arrived):
            if len(current.blind) == len(current.arrived):
                current.number = number
            self._pass(name, current, newcomers, epoch, transaction)
        last = table.finished.get(name)
        if last is None or last.number < number:
            table.remember(name, number, participants, None, epoch, transaction)
        if newcomers:
            current.number = number + 1

    def _newcomers(self, current: Instance, epoch: int) -> list[Task]:
        """Return the arrived tasks that cannot have taken part in an instance that ended at `epoch`.

        They took their task slots later and left the number to the server: they wait for the next instance.
        """
        slots = self._roster.slots
        return [task for task in current.arrived if task in current.blind and slots[task].epoch > epoch]

    def _pass(
        self, name: str, current: Instance, newcomers: list[Task], epoch: int, transaction: Transaction
    ) -> None:
        """Let an instance under way succeed for all arrived tasks but the newcomers, which wait on."""
        self._table.finish(name, None, transaction, epoch=epoch, without=newcomers)
        if newcomers:
            current.arrived = dict.fromkeys(newcomers)
            current.blind = set(newcomers)
            self._table.begin(name, current)
