"""Watchdog of one generation of a cluster: detects members that make no progress, and notifies the sessions.

A BLOCKED member has an attached session, but has sent no heartbeat for a lease. A STUCK member sends
heartbeats, but others have waited for it longer than `stuck_after` and it made no progress: it is queried,
and all sessions get its answer. Neither is ended for it. Nothing of this is durable: after a restart of the
server every member is LIVE until detected again.

At most `_MOST_ASKED` members are queried at a time, and the size of a notice is bounded by the number of
sessions that it goes to; further members follow in later ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import nsmallest

from dmesh_server.core import messages
from dmesh_server.core.barriers import BarrierTable, slot_order
from dmesh_server.core.deadlines import LivenessDue, StuckDue
from dmesh_server.core.effects import LivenessChange, StatusRequest
from dmesh_server.core.log_events import LivenessReported
from dmesh_server.core.model import Activity, Liveness, Member, Task
from dmesh_server.core.roster import TaskSlot
from dmesh_server.core.shared import Shared
from dmesh_server.core.transaction import Transaction

_MOST_ASKED = 64
"""Most members that are queried, or stuck, at a time."""
_MOST_NAMED = 64
"""Most members that one report of a wait may name."""
_LONGEST_CHAIN = 256
"""Most members that are followed to find the end of a chain of waits."""
_NOTICE = 20_000
"""Most members that a notice names, times its sessions; at least `_LEAST_REPORTED` are named."""
_LEAST_REPORTED = 8
_SLACK = 0.05
"""Part of `stuck_after` by which a query may be late, so that many waits are checked together."""
_OPERATION = 200
_FRAMES = 50
_FRAME = 300


@dataclass(slots=True)
class _Wait:
    """Wait that a member reported."""

    operation: str
    tasks: tuple[Task, ...]
    since: float


@dataclass(slots=True)
class _StatusQuery:
    """Query of a member's activity that is not over."""

    id: int
    asked_at: float
    barrier: tuple[str, int] | None
    """Barrier and instance at which others wait for it; None for a wait that a member reported."""


class Watchdog:
    """Detector of the blocked and stuck members of one generation of a cluster."""

    def __init__(self, table: BarrierTable, stuck_after: float, shared: Shared) -> None:
        self._table = table
        self._cluster = table.cluster
        self._roster = table.roster
        self._limits = shared.limits
        self._deadlines = shared.deadlines
        self._stuck_after = stuck_after if stuck_after > 0 else math.inf
        self.looks_at = math.inf
        """Time of the next check of the members that others wait for, seconds; infinite if none is due."""
        self._waits: dict[Task, _Wait] = {}
        self._waiters: dict[Task, dict[Task, None]] = {}
        self._queries: dict[Task, _StatusQuery] = {}
        self._last_id = 0
        self._changed: dict[Task, None] = {}
        self._reported: dict[Task, None] = {}
        self._quiet_until = -math.inf

    # Waits.

    def arm(self, transaction: Transaction) -> None:
        """Schedule a check, because a member waits from now on."""
        if self._stuck_after != math.inf:
            self._look_at(transaction.now + self._stuck_after)

    def _look_at(self, when: float) -> None:
        if when < self.looks_at:
            self.looks_at = when
            self._deadlines.set(StuckDue(self._cluster), when)

    def look(self, transaction: Transaction) -> None:
        """Query the members for which others have waited longer than `stuck_after`."""
        self.looks_at, ask, later = math.inf, list[tuple[Task, tuple[str, int] | None]](), math.inf
        for name, current in self._table.under_way.items():
            ripe = current.latest + self._stuck_after
            if ripe <= transaction.now:
                missing = nsmallest(_MOST_ASKED, current.missing(), key=slot_order)
                ask += [(task, (name, current.number)) for task in missing]
                ripe = transaction.now + self._stuck_after
            later = min(later, ripe)
            if len(ask) > 4 * _MOST_ASKED:
                break
        for wait in self._waits.values():
            ask += [(task, None) for task in wait.tasks]
            later = min(later, transaction.now + self._stuck_after)
        self._ask(ask, transaction)
        if later != math.inf:
            self._look_at(max(later, transaction.now + _SLACK * self._stuck_after))

    def _ask(self, asked: Iterable[tuple[Task, tuple[str, int] | None]], transaction: Transaction) -> None:
        recent = transaction.now - (1 - _SLACK) * self._stuck_after
        for task, known in list(self._queries.items()):
            if known.asked_at <= recent and self._roster.slots[task].liveness is not Liveness.STUCK:
                del self._queries[task]
        sessions: list[int] = []
        self._last_id += 1
        for task, barrier in asked:
            slot, known_query = self._roster.slots.get(task), self._queries.get(task)
            if slot is None or slot.session is None:
                continue
            if known_query is not None and known_query.asked_at > recent:
                continue
            if known_query is None and len(self._queries) >= _MOST_ASKED:
                break
            self._queries[task] = _StatusQuery(self._last_id, transaction.now, barrier)
            self._table.watched = True
            sessions.append(slot.session)
        transaction.push(sessions, StatusRequest(self._last_id))

    # Reports of members.

    def report_waiting(
        self, slot: TaskSlot, operation: str, tasks: tuple[Task, ...], age: float, transaction: Transaction
    ) -> None:
        """Note that a member waits for others in a collective, or no longer does."""
        named = dict.fromkeys(tasks[:_MOST_NAMED])
        known = tuple(task for task in named if task in self._roster.slots and task != slot.task)
        self._forget_wait(slot.task)
        transaction.unsettled.add(self._cluster)
        if not known:
            return
        age = age if 0 <= age < math.inf else 0.0
        since = max(transaction.now - age, slot.registered_at)
        self._waits[slot.task] = _Wait(_clean(operation, _OPERATION), known, since)
        for task in known:
            self._waiters.setdefault(task, {})[slot.task] = None
        if self._stuck_after != math.inf:
            ripe = since + self._stuck_after
            if ripe <= transaction.now:
                self._ask([(task, None) for task in known], transaction)
                ripe = transaction.now + self._stuck_after
            self._look_at(ripe)

    def report_status(
        self, slot: TaskSlot, number: int, activity: Activity, transaction: Transaction
    ) -> None:
        """Judge a member by its answer to the latest query. Other answers are ignored."""
        query = self._queries.get(slot.task)
        if query is None or query.id != number:
            return
        waited_for = self._is_waited_for(slot.task, query)
        age = activity.age if 0 <= activity.age < math.inf else 0.0
        # Others have waited for it for long, but its last progress is recent.
        gets_on = age < self._stuck_after / 2
        if not waited_for or gets_on or self._waits_itself(slot.task):
            self._settle_live(slot, transaction)
            if waited_for and gets_on:
                query.asked_at = transaction.now - age
                self._look_at(transaction.now + self._stuck_after - age)
            return
        stack = tuple(_clean(frame, _FRAME) for frame in activity.stack[-_FRAMES:])
        activity = Activity(_clean(activity.operation, _OPERATION), age, stack)
        before = slot.activity
        news = (
            slot.liveness is not Liveness.STUCK
            or before is None
            or (before.operation, before.stack[-1:]) != (activity.operation, stack[-1:])
        )
        slot.liveness, slot.activity = Liveness.STUCK, activity
        slot.complaint = self._complaint(slot.task, query, transaction.now)
        if transaction.now - age > slot.beat_at:
            # Its last progress is younger than its last heartbeat: the next one counts it, and is no news.
            slot.progress = None
        if news:
            self._note(slot, transaction)

    def progressed(self, slot: TaskSlot, progress: int, transaction: Transaction) -> None:
        """Note that a member's progress count has changed."""
        known, slot.progress = slot.progress is not None, progress
        if known:
            self._settle_live(slot, transaction)

    # Changes of members.

    def block(self, slot: TaskSlot, complaint: str, transaction: Transaction) -> None:
        """Mark a member as blocked: its session is attached, but no heartbeats come."""
        slot.liveness, slot.complaint, slot.activity = Liveness.BLOCKED, complaint, None
        self._note(slot, transaction)

    def unblock(self, slot: TaskSlot, transaction: Transaction) -> None:
        """Mark a blocked member as live after a sign of life."""
        slot.liveness, slot.complaint = Liveness.LIVE, ""
        self._note(slot, transaction)

    def attached(self, session: int, transaction: Transaction) -> None:
        """Send a new session the members that are not live."""
        count = len(self._roster.sessions)
        listed = list(self._reported)[: self._room(count)]
        if listed:
            transaction.push((session,), LivenessChange(tuple(self._shown(task, count) for task in listed)))

    def detached(self, slot: TaskSlot, transaction: Transaction) -> None:
        """Forget the wait that a member has reported: its session broke."""
        if self._forget_wait(slot.task):
            transaction.unsettled.add(self._cluster)

    def departed(self, slot: TaskSlot) -> None:
        """Forget a departed member; its departure has a notice of its own."""
        self._forget_wait(slot.task)
        self._queries.pop(slot.task, None)
        self._changed.pop(slot.task, None)
        self._reported.pop(slot.task, None)
        slot.liveness, slot.complaint, slot.activity = Liveness.LIVE, "", None

    def end(self) -> None:
        """Forget all members: the generation is over."""
        self._deadlines.cancel(StuckDue(self._cluster))
        self._deadlines.cancel(LivenessDue(self._cluster))
        self.looks_at = math.inf
        for known in (self._waits, self._waiters, self._queries, self._changed, self._reported):
            known.clear()

    def settle(self, transaction: Transaction) -> None:
        """Release stuck members for which no member waits any more, and notify the sessions."""
        for task, query in list(self._queries.items()):
            slot = self._roster.slots[task]
            if slot.liveness is Liveness.STUCK and (
                not self._is_waited_for(task, query) or self._waits_itself(task)
            ):
                self._settle_live(slot, transaction)
        self._table.watched = bool(self._queries)
        self.report(transaction)

    def report(self, transaction: Transaction) -> None:
        """Notify the sessions of changes: the first at once, those soon after it together."""
        if not self._changed:
            return
        if transaction.now < self._quiet_until:
            self._deadlines.set(LivenessDue(self._cluster), self._quiet_until)
            return
        sessions = self._roster.sessions
        self._quiet_until = transaction.now + self._limits.quiet(len(sessions))
        listed = list(self._changed)[: self._room(len(sessions))]
        for task in listed:
            del self._changed[task]
            if self._roster.slots[task].liveness is Liveness.LIVE:
                self._reported.pop(task, None)
            else:
                self._reported[task] = None
        shown = tuple(self._shown(task, len(sessions)) for task in listed)
        transaction.push(sessions, LivenessChange(shown))
        for member in shown:
            transaction.note(LivenessReported(self._cluster, member))
        if self._changed:
            self._deadlines.set(LivenessDue(self._cluster), self._quiet_until)

    # Judgement.

    def _forget_wait(self, waiter: Task) -> bool:
        """Forget the wait that a member has reported; return whether there was one."""
        wait = self._waits.pop(waiter, None)
        for task in wait.tasks if wait is not None else ():
            waiters = self._waiters[task]
            del waiters[waiter]
            if not waiters:
                del self._waiters[task]
        return wait is not None

    def _settle_live(self, slot: TaskSlot, transaction: Transaction) -> None:
        if slot.liveness is Liveness.STUCK:
            slot.liveness, slot.complaint, slot.activity = Liveness.LIVE, "", None
            self._note(slot, transaction)

    def _note(self, slot: TaskSlot, transaction: Transaction) -> None:
        """Queue a change for the next notice, unless the sessions know the member as it is."""
        if slot.liveness is Liveness.LIVE and slot.task not in self._reported:
            self._changed.pop(slot.task, None)
        else:
            self._changed[slot.task] = None
        transaction.unsettled.add(self._cluster)

    def _is_waited_for(self, task: Task, query: _StatusQuery) -> bool:
        """Return whether the wait for which a member was queried goes on."""
        if query.barrier is None:
            return task in self._waiters
        name, number = query.barrier
        current = self._table.under_way.get(name)
        return current is not None and current.number == number and task not in current.arrived

    def _complaint(self, task: Task, query: _StatusQuery, now: float) -> str:
        """Return how many members have waited for a member, for how long, and where."""
        if query.barrier is not None:
            current = self._table.under_way[query.barrier[0]]
            count, since = len(current.arrived), current.latest
            where = f"at barrier {messages.quote(query.barrier[0])}"
        else:
            waits = [self._waits[waiter] for waiter in self._waiters[task]]
            longest = min(waits, key=lambda wait: wait.since)
            count, since = len(waits), longest.since
            where = f"in {longest.operation or 'a collective'}"
        have = "1 member has" if count == 1 else f"{count} members have"
        return f"{have} waited for it for {messages.seconds(now - since)} {where}"

    def _waits_itself(self, task: Task) -> bool:
        """Return whether a member's chain of waits ends at a member that does not wait.

        It is then held up, not stuck. Members that wait for each other in a circle are all stuck.
        """
        looked_at, ahead = {task}, list(self._waits_for(task))
        while ahead and len(looked_at) < _LONGEST_CHAIN:
            other = ahead.pop()
            if other in looked_at:
                continue
            looked_at.add(other)
            further = list(self._waits_for(other))
            if not further:
                return True
            ahead += further
        return bool(ahead)

    def _waits_for(self, task: Task) -> Iterator[Task]:
        wait = self._waits.get(task)
        if wait is not None:
            yield from wait.tasks
        for current in self._table.under_way.values():
            if task in current.arrived:
                yield from nsmallest(_MOST_NAMED, current.missing(), key=slot_order)

    # Notices.

    def _room(self, sessions: int) -> int:
        """Return the most members that a notice to so many sessions may name."""
        return max(_LEAST_REPORTED, _NOTICE // max(sessions, 1))

    def _shown(self, task: Task, sessions: int) -> Member:
        """Return a member as a notice shows it: the more sessions, the fewer frames of its stack."""
        member = self._roster.slots[task].snapshot()
        activity = member.activity
        if activity is not None:
            kept = max(1, min(_FRAMES, 500 // max(sessions, 1)))
            activity = replace(activity, stack=activity.stack[-kept:])
        return replace(member, devices=(), peer_addresses=(), activity=activity)


def _clean(text: str, most: int) -> str:
    """Return a text as one printable line of at most `most` characters, for messages and logs."""
    text = text[:most]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
