"""What members say that they have passed: how a success survives a crash without costing a disk write.

A success is told at once and becomes durable soon after. Between the two the server may be killed, when some
participants have been told and others have not. Those who were told say so when they attach to its successor;
those who were not present their arrival again. Whoever comes first, in the end the instance has succeeded for
all: it is remembered, and whoever waits in it passes. Failures need none of this, for they are durable before
anybody is told. So what is remembered is never contradicted: of an instance that is known to be over,
nothing said here changes anything.
"""

from __future__ import annotations

from dmesh_server.core import validation, wording
from dmesh_server.core.barrier_table import BarrierTable, Instance
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import PassedBarrier, Task
from dmesh_server.core.roster import Seat
from dmesh_server.core.turn import Turn


class Passing:
    """Takes what the members of one life of a cluster present as passed."""

    def __init__(self, table: BarrierTable) -> None:
        self._table = table
        self._roster = table.roster

    def take(self, seat: Seat, passed: tuple[PassedBarrier, ...], turn: Turn) -> None:
        """Takes up what a member has passed.

        Raises:
            CoreError: It cannot be; nothing was taken.
        """
        if not passed:
            return
        validation.passed(passed, seat.task, self._table.limits)
        news = []
        for one in passed:
            last = self._table.finished.get(one.name)
            if last is None or one.instance > last.number:
                news.append((one, self._participants(one)))
        for one, participants in news:
            self._take(one, participants, turn)

    def _participants(self, one: PassedBarrier) -> frozenset[Task]:
        everyone = self._roster.everyone
        if not one.participants:
            return everyone
        participants = frozenset(one.participants)
        if not participants <= everyone:
            stranger = min(participants - everyone, key=lambda task: (task.job, task.index))
            raise CoreError(
                ErrorKind.UNKNOWN_TASK,
                f"barrier {wording.quote(one.name)}, presented as passed: {wording.label(stranger)} is not a "
                f"task of cluster {wording.quote(self._table.cluster)}",
            )
        return everyone if participants == everyone else participants

    def _take(self, one: PassedBarrier, participants: frozenset[Task], turn: Turn) -> None:
        table, name, number = self._table, one.name, one.instance
        # An epoch that the caller does not know is that of the restart: had it changed later, the change's
        # record would have carried the result into the store.
        epoch = min(one.epoch, self._roster.epoch) if one.epoch > 0 else table.restored_epoch
        current = table.under_way.get(name)
        if current is None or current.number == number + 1:
            # The second: somebody who was told, too, has gone on to the next.
            table.remember(name, number, participants, None, epoch, turn)
            return
        if current.number > number or current.participants != participants:
            # The first is far behind, the second is a barrier of others; neither tells anything of the other.
            return
        newcomers = self._newcomers(current, epoch)
        if len(newcomers) < len(current.arrived):
            if len(current.blind) == len(current.arrived):
                current.number = number
            self._pass(name, current, newcomers, epoch, turn)
        last = table.finished.get(name)
        if last is None or last.number < number:
            table.remember(name, number, participants, None, epoch, turn)
        if newcomers:
            current.number = number + 1

    def _newcomers(self, current: Instance, epoch: int) -> list[Task]:
        """Returns who cannot have been part of an instance that was over with `epoch`.

        They took their seats later, and left the number to the server: their instance is the next one.
        """
        seats = self._roster.seats
        return [task for task in current.arrived if task in current.blind and seats[task].epoch > epoch]

    def _pass(self, name: str, current: Instance, newcomers: list[Task], epoch: int, turn: Turn) -> None:
        """Lets an instance under way succeed for all who are there but the newcomers, who wait on."""
        self._table.finish(name, None, turn, epoch=epoch, without=newcomers)
        if newcomers:
            current.arrived = dict.fromkeys(newcomers)
            current.blind = set(newcomers)
            self._table.begin(name, current)
