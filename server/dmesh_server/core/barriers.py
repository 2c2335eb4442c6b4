"""The barriers of one life of a cluster.

A barrier has a name, and under it instances counted from 0. The first arrival fixes the participants and the
deadline; the last one ends the instance, and so do a departure, the deadline, a disagreement and a
cancellation. The latest finished instance of a name is remembered, durably and before anybody is told, so
that a participant which was not reached gets the same result when it presents its arrival again, even after
a crash of the server. Instances under way are not durable: their participants present themselves again.
"""

from __future__ import annotations

from dataclasses import dataclass

from dmesh_server.core import records, validation, wording
from dmesh_server.core.deadlines import BarrierDue
from dmesh_server.core.effects import BarrierResult
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import CancelBarrier, EnterBarrier
from dmesh_server.core.model import BarrierStatus, Member, Task
from dmesh_server.core.records import FinishedBarrier
from dmesh_server.core.roster import Roster, Seat
from dmesh_server.core.shared import Shared
from dmesh_server.core.turn import Turn

_SLIM_FROM = 64
"""From this many members on, an error's members come without their devices and addresses."""


@dataclass(slots=True)
class Instance:
    """A barrier under way."""

    number: int
    participants: frozenset[Task]
    listed: tuple[Task, ...]
    """The participants as the first arrival gave them, to recognize an equal list quickly."""
    arrived: dict[Task, None]
    """Who is there, in order of arrival."""
    started_at: float
    timeout: float | None

    def __str__(self) -> str:
        return f"{len(self.arrived)} of {len(self.participants)} tasks"


class Barriers:
    """All barriers of one life of a cluster."""

    def __init__(self, cluster: str, roster: Roster, shared: Shared) -> None:
        self._cluster = cluster
        self._roster = roster
        self._limits = shared.limits
        self._deadlines = shared.deadlines
        self.under_way: dict[str, Instance] = {}
        """The unfinished instances by name, oldest first."""
        self.finished: dict[str, FinishedBarrier] = {}
        """The latest finished instance of each name, oldest first."""

    def enter(self, seat: Seat, event: EnterBarrier, turn: Turn) -> None:
        """Lets a member arrive. A refusal concerns only the caller and is pushed to its session."""
        try:
            self._enter(seat, event, turn)
        except CoreError as error:
            number = self._next(event.name) if event.instance < 0 else event.instance
            refusal = CoreError(error.kind, error.message, error.members, self._roster.epoch)
            turn.push((event.session,), BarrierResult(event.name, number, refusal))

    def _enter(self, seat: Seat, event: EnterBarrier, turn: Turn) -> None:
        validation.barrier(event.name, event.instance, event.timeout)
        current = self.under_way.get(event.name)
        participants = self._participants(event, current)
        if seat.task not in participants:
            raise CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{wording.name(seat.snapshot())} called barrier {wording.quote(event.name)} for "
                f"{wording.tasks(participants)} without being one of them. Only its participants may call a "
                "barrier.",
            )
        last = self.finished.get(event.name)
        if last is not None and event.instance == last.number:
            self._tell_again(seat, event, participants, last, turn)
        elif current is not None:
            self._join(seat, event, participants, current, turn)
        else:
            self._begin(seat, event, participants, last, turn)

    def _participants(self, event: EnterBarrier, current: Instance | None) -> frozenset[Task]:
        if not event.participants:
            return self._roster.everyone
        if current is not None and event.participants == current.listed:
            return current.participants
        for task in event.participants:
            if not self._roster.knows(task):
                raise CoreError(
                    ErrorKind.UNKNOWN_TASK,
                    f"barrier {wording.quote(event.name)}: "
                    f"/job:{wording.quote(task.job)[1:-1]}/task:{task.index} is not a task of cluster "
                    f"{wording.quote(self._cluster)}, which consists of "
                    f"{wording.tasks(self._roster.everyone)}",
                )
        participants = frozenset(event.participants)
        if len(participants) != len(event.participants):
            twice = next(task for task in sorted(participants) if event.participants.count(task) > 1)
            raise validation.invalid(
                f"barrier {wording.quote(event.name)}: {twice} is listed twice as a participant"
            )
        return self._roster.everyone if participants == self._roster.everyone else participants

    def _tell_again(
        self,
        seat: Seat,
        event: EnterBarrier,
        participants: frozenset[Task],
        last: FinishedBarrier,
        turn: Turn,
    ) -> None:
        expected = self._resolve(last)
        if participants != expected:
            raise CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{_title(event.name, last.number)} is already over; it was called for "
                f"{wording.tasks(expected)}, but {wording.name(seat.snapshot())} called it for "
                f"{wording.tasks(participants)}. Give barriers of different groups different names.",
            )
        turn.push((event.session,), BarrierResult(event.name, last.number, last.error))

    def _join(
        self, seat: Seat, event: EnterBarrier, participants: frozenset[Task], current: Instance, turn: Turn
    ) -> None:
        if event.instance not in (-1, current.number):
            raise self._wrong_number(seat, event, current.number, "is under way")
        if seat.task not in current.participants:
            raise CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{_title(event.name, current.number)} is under way for "
                f"{wording.tasks(current.participants)}; {wording.name(seat.snapshot())} is not one of them "
                f"and called it for {wording.tasks(participants)}. Give barriers of different groups "
                "different names.",
            )
        if participants is not current.participants and participants != current.participants:
            first = self._roster.describe(next(iter(current.arrived)))
            error = CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{_title(event.name, current.number)} failed: its callers disagree on who takes part. "
                f"{wording.name(first)} called it for {wording.tasks(current.participants)}, "
                f"{wording.name(seat.snapshot())} for {wording.tasks(participants)}. "
                "All participants must give the same list.",
                (first, seat.snapshot()),
            )
            current.arrived[seat.task] = None
            self._finish(event.name, error, turn)
            return
        current.arrived[seat.task] = None
        if len(current.arrived) == len(current.participants):
            self._finish(event.name, None, turn)

    def _begin(
        self,
        seat: Seat,
        event: EnterBarrier,
        participants: frozenset[Task],
        last: FinishedBarrier | None,
        turn: Turn,
    ) -> None:
        number = event.instance
        if last is not None:
            if number not in (-1, last.number + 1):
                raise self._wrong_number(seat, event, last.number + 1, "is next")
            number = last.number + 1
        elif number < 0:
            number = 0
        if len(self.under_way) >= self._limits.max_barriers:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"barrier {wording.quote(event.name)} cannot begin: {len(self.under_way)} barriers are under "
                f"way in cluster {wording.quote(self._cluster)}, which is the server's limit",
            )
        self.under_way[event.name] = Instance(
            number, participants, event.participants, {seat.task: None}, turn.now, event.timeout
        )
        departed = [gone for task, gone in self._roster.departed.items() if task in participants]
        if departed:
            members = tuple(gone.snapshot() for gone in departed)
            fates = "; ".join(
                f"{wording.name(m)} {wording.fate_of(m)}" for m in members[: wording.MAX_DESCRIBED]
            )
            more = wording.tasks(member.task for member in members[wording.MAX_DESCRIBED :])
            self._fail(event.name, fates + (f"; also gone: {more}" if more else ""), members, turn)
        elif len(participants) == 1:
            self._finish(event.name, None, turn)
        elif event.timeout is not None:
            self._deadlines.set(BarrierDue(self._cluster, event.name), turn.now + event.timeout)

    def member_departed(self, seat: Seat, turn: Turn) -> None:
        """Fails every barrier that the departed member takes part in."""
        member = seat.snapshot()
        for name in [name for name, current in self.under_way.items() if seat.task in current.participants]:
            self._fail(name, f"{wording.name(member)} {wording.fate_of(member)}", (member,), turn)

    def cancel(self, seat: Seat, event: CancelBarrier, turn: Turn) -> None:
        """Ends a barrier for all its participants.

        Raises:
            CoreError: The caller is not one of them, or the instance is not under way.
        """
        validation.barrier(event.name, event.instance, None)
        current = self.under_way.get(event.name)
        last = self.finished.get(event.name)
        if current is not None and event.instance in (-1, current.number):
            if seat.task not in current.participants:
                raise CoreError(
                    ErrorKind.BARRIER_MISMATCH,
                    f"{_title(event.name, current.number)} is for {wording.tasks(current.participants)}; "
                    f"{wording.name(seat.snapshot())} is not one of them and cannot cancel it",
                )
            member = seat.snapshot()
            error = CoreError(
                ErrorKind.BARRIER_CANCELLED,
                f"{_title(event.name, current.number)} was cancelled by {wording.name(member)} after "
                f"{current} had arrived",
                (member,),
            )
            self._finish(event.name, error, turn)
            return
        if last is not None and event.instance in (-1, last.number):
            if last.error is not None and last.error.kind is ErrorKind.BARRIER_CANCELLED:
                return
            outcome = "succeeded" if last.error is None else f"failed: {last.error.message}"
            raise CoreError(
                ErrorKind.BARRIER_MISMATCH,
                f"{_title(event.name, last.number)} cannot be cancelled: it is over and {outcome}",
            )
        which = f" (instance {event.instance})" if event.instance >= 0 else ""
        raise CoreError(
            ErrorKind.BARRIER_MISMATCH,
            f"barrier {wording.quote(event.name)}{which} cannot be cancelled: it is not under way",
        )

    def time_out(self, name: str, turn: Turn) -> None:
        """Ends a barrier whose time is over."""
        current = self.under_way[name]
        missing = tuple(
            self._roster.describe(task)
            for task in sorted(
                current.participants - current.arrived.keys(), key=lambda task: (task.job, task.index)
            )
        )
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
        error = CoreError(
            ErrorKind.BARRIER_TIMEOUT,
            f"{_title(name, current.number)} timed out after {wording.seconds(current.timeout or 0.0)}: "
            f"{len(missing)} of {len(current.participants)} tasks are missing: "
            f"{wording.listing(missing, turn.now)}. " + " ".join(advice),
            _slim(missing),
        )
        self._finish(name, error, turn)

    def end(self, turn: Turn) -> None:
        """Forgets everything: the cluster's life is over."""
        for name in self.under_way:
            self._deadlines.cancel(BarrierDue(self._cluster, name))
        for name in self.finished:
            turn.persist(self._cluster, records.BARRIER, name, None)
        self.under_way.clear()
        self.finished.clear()

    def status(self) -> tuple[BarrierStatus, ...]:
        """Returns the barriers under way, oldest first."""
        return tuple(
            BarrierStatus(
                name,
                current.number,
                tuple(current.arrived),
                tuple(
                    sorted(
                        current.participants - current.arrived.keys(), key=lambda task: (task.job, task.index)
                    )
                ),
                current.started_at,
                None if current.timeout is None else current.started_at + current.timeout,
            )
            for name, current in self.under_way.items()
        )

    def _fail(self, name: str, cause: str, members: tuple[Member, ...], turn: Turn) -> None:
        current = self.under_way[name]
        error = CoreError(
            ErrorKind.BARRIER_FAILED,
            f"{_title(name, current.number)} failed: {cause}. {current} had arrived. A cluster does not go "
            "on without a member: find out why it is gone (its log, its exit code) and start the job again.",
            _slim(members),
        )
        self._finish(name, error, turn)

    def _finish(self, name: str, error: CoreError | None, turn: Turn) -> None:
        current = self.under_way.pop(name)
        if error is not None:
            error.epoch = self._roster.epoch
        self._deadlines.cancel(BarrierDue(self._cluster, name))
        everyone = current.participants is self._roster.everyone
        finished = FinishedBarrier(current.number, None if everyone else current.participants, error)
        self._remember(name, finished, turn)
        sessions = (self._roster.seats[task].session for task in current.arrived)
        turn.push((id_ for id_ in sessions if id_ is not None), BarrierResult(name, current.number, error))

    def _remember(self, name: str, finished: FinishedBarrier, turn: Turn) -> None:
        """Keeps a result in place of the name's last one; forgets the oldest beyond the limit."""
        self.finished.pop(name, None)
        self.finished[name] = finished
        turn.persist(self._cluster, records.BARRIER, name, records.encode_barrier(finished))
        if len(self.finished) > self._limits.max_barriers:
            oldest = next(iter(self.finished))
            del self.finished[oldest]
            turn.persist(self._cluster, records.BARRIER, oldest, None)

    def _resolve(self, finished: FinishedBarrier) -> frozenset[Task]:
        return self._roster.everyone if finished.participants is None else finished.participants

    def _next(self, name: str) -> int:
        current = self.under_way.get(name)
        if current is not None:
            return current.number
        last = self.finished.get(name)
        return 0 if last is None else last.number + 1

    def _wrong_number(self, seat: Seat, event: EnterBarrier, number: int, what: str) -> CoreError:
        return CoreError(
            ErrorKind.BARRIER_MISMATCH,
            f"{wording.name(seat.snapshot())} called barrier {wording.quote(event.name)} for instance "
            f"{event.instance} (so many it has finished), but instance {number} {what}. "
            "It called the barrier more or less often than the others: all participants of a name must take "
            "part in each of its instances. Give barriers of different groups different names.",
        )


def _title(name: str, number: int) -> str:
    return f"barrier {wording.quote(name)} (instance {number})"


def _slim(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Keeps an error about very many members small enough to be sent to each of them."""
    if len(members) < _SLIM_FROM:
        return members
    return tuple(
        Member(
            member.task,
            member.incarnation,
            member.state,
            member.process,
            (),
            (),
            member.registered_at,
            member.last_seen_at,
            member.reason,
        )
        for member in members
    )
