"""Causes of a cluster's waiting, worked out from its server's view and its members' progress reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

from dmesh.coordination.explanation.picture import Call, Group, Picture
from dmesh.coordination.members import Liveness, Member, MemberState, Task

STRIDE = 100
"""Members examined in one step."""
_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Work that yields between steps and returns its result at the end."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A member that others wait for."""

    rank: int
    """Client id."""
    task: str
    """Task slot."""
    host: str
    """Host name; empty for a vacant task slot."""
    pid: int
    """Process id on that host."""
    state: str
    """`connected`, `lost`, `blocked`, `stuck`, `vacant` ..."""
    reason: str
    """Reason for its being lost, failed, blocked or stuck; empty otherwise."""
    last: str
    """Its last call in the group that waits for it, else in any group; empty if unknown."""
    last_sequence: int
    """Number of that call; 0 if unknown."""
    idle: float | None
    """Seconds since its program's last progress; None if it never reported."""
    where: str
    """Position of its main thread, `FILE:LINE in FUNCTION`; empty if unknown."""
    operation: str
    """dmesh operation that its main thread is in; empty for none."""
    said: float | None
    """Age of its last report in seconds; None without any report."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A call, barrier or condition that members wait in."""

    kind: str
    """`members`, `barrier`, `collective` or `liveness`."""
    what: str
    """Name, in words: `collective #6 of group world, all_reduce(...)`."""
    group: str
    """Name of the group, or of the barrier."""
    sequence: int
    """Number of the collective, or of the barrier's instance."""
    call: str
    """The call; empty for a wait that is no collective."""
    since: float
    """Seconds it has lasted, if it still lasts."""
    seen: float
    """Seconds it had lasted when its members last reported it. In a healthy program some rank waits briefly
    at any moment, so only a wait that was already long when reported needs an explanation."""
    present: tuple[int, ...]
    """Ranks that have arrived."""
    suspects: tuple[Suspect, ...]
    """Members that block it."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything a cluster waits for, the most likely cause first."""

    waits: tuple[Wait, ...]
    """Empty if nothing waits for long."""
    circle: tuple[int, ...] = ()
    """Ranks that wait for each other in a circle, if any do."""


def explain(picture: Picture, patience: float = 1.0) -> Explanation:
    """Find the causes for which a cluster waits.

    Args:
        picture: The cluster.
        patience: Seconds of waiting that need no explanation.
    """
    return finish(explain_in_steps(picture, patience))


def finish(work: Steps[_T]) -> _T:
    """Do work that yields between its steps, without a pause; return its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: _T = done.value
            return result


def explain_in_steps(picture: Picture, patience: float = 1.0) -> Steps[Explanation]:
    """Do the work of `explain` in steps of some 100 members, so that an event loop can run between them."""
    cluster = yield from _survey(picture)
    waits: list[Wait] = [*(yield from cluster.gone()), *(yield from cluster.vacant())]
    for kind in (cluster.collectives, cluster.barriers):
        waits += [wait for wait in (yield from kind()) if wait.seen >= patience]
    waits += yield from cluster.troubled()
    waiting_for: dict[int, set[int]] = defaultdict(set)
    for wait in waits:
        suspects = {suspect.rank for suspect in wait.suspects}
        for number, rank in enumerate(wait.present):
            waiting_for[rank].update(suspects - {rank} if rank in suspects else suspects)
            if number % STRIDE == 0:
                yield
    # A suspect that does not wait is the cause; a suspect that waits itself is a consequence.
    ordered = sorted(waits, key=lambda wait: (_held_up(wait, waiting_for), -wait.since))
    return Explanation(tuple(ordered), (yield from _circle(waiting_for)))


def _held_up(wait: Wait, waiting_for: dict[int, set[int]]) -> float:
    """Return the share of suspects that wait for others themselves."""
    held_up = sum(bool(waiting_for.get(suspect.rank)) for suspect in wait.suspects)
    return held_up / len(wait.suspects) if wait.suspects else 1.0


def _circle(waiting_for: dict[int, set[int]]) -> Steps[tuple[int, ...]]:
    """Return ranks that wait for each other in a circle; empty if there are none."""
    safe: set[int] = set()
    for number, start in enumerate(sorted(waiting_for)):
        path: list[int] = []
        rank: int | None = start
        if number % STRIDE == 0:
            yield
        while rank is not None and rank not in safe:
            if rank in path:
                return tuple(path[path.index(rank) :])
            path.append(rank)
            # A rank will be freed if it waits for a rank that does not wait itself.
            others = sorted(waiting_for.get(rank, ()))
            rank = others[0] if others and all(waiting_for.get(other) for other in others) else None
        safe.update(path)
    return ()


def _survey(picture: Picture) -> Steps[_Cluster]:
    members: dict[Task, Member] = {}
    for number, member in enumerate(picture.state.members):
        members[Task(member.job, member.index)] = member
        if number % STRIDE == 0:
            yield
    slots = sorted({**members, **dict.fromkeys(picture.state.vacant)}, key=_order)
    yield
    jobs = sorted({task.job for task in picture.reports} or {task.job for task in slots})
    # Ranks are the indices within the job whose members take part in collectives.
    job = jobs[0] if jobs else ""
    return _Cluster(picture, members, job, tuple(task.index for task in slots if task.job == job))


class _Cluster:
    def __init__(
        self, picture: Picture, members: dict[Task, Member], job: str, ranks: tuple[int, ...]
    ) -> None:
        self.picture = picture
        self.members = members
        self.job = job
        self.ranks = ranks

    def gone(self) -> Steps[list[Wait]]:
        """Return the wait for members that are lost or failed."""
        fates = (MemberState.LOST, MemberState.FAILED)
        gone = [member for member in self.members.values() if member.state in fates]
        yield
        if not gone:
            return []
        since = max(member.last_seen_age for member in gone)
        return [(yield from self._wait("members", "members that are gone", since, (), map(_task, gone)))]

    def vacant(self) -> Steps[list[Wait]]:
        """Return the wait for vacant task slots."""
        vacant = self.picture.state.vacant
        if not vacant:
            return []
        present = [member for member in self.members.values() if not member.state.departed]
        since = max((member.registered_age for member in present), default=0.0)
        what = "clients that have not registered yet"
        ranks = [member.index for member in present]
        return [(yield from self._wait("members", what, since, ranks, vacant))]

    def troubled(self) -> Steps[list[Wait]]:
        """Return the waits for members that the server has found blocked or stuck."""
        waits: list[Wait] = []
        for member in self.members.values():
            if member.liveness in (Liveness.BLOCKED, Liveness.STUCK):
                age = member.activity.age if member.activity else member.last_seen_age
                what = f"a member that is {member.liveness.name.lower()}"
                waits.append((yield from self._wait("liveness", what, age, (), [_task(member)])))
        return waits

    def barriers(self) -> Steps[list[Wait]]:
        """Return the waits in barriers under way."""
        waits: list[Wait] = []
        for barrier in self.picture.state.barriers:
            what = f"barrier {barrier.name!r} (instance {barrier.instance})"
            arrived = [task.index for task in barrier.arrived]
            wait = yield from self._wait(
                "barrier", what, barrier.age, arrived, barrier.missing, barrier.name, barrier.instance
            )
            waits.append(wait)
        return waits

    def collectives(self) -> Steps[list[Wait]]:
        """Return the waits in collectives and transfers under way."""
        streams: dict[tuple[int, int], dict[int, tuple[Group, float]]] = defaultdict(dict)
        for number, (task, said) in enumerate(self.picture.reports.items()):
            if task.job == self.job and not self.members[task].state.departed:
                for group in said.report.groups:
                    streams[group.id, group.generation][task.index] = group, said.age_ms / 1000
            if number % STRIDE == 0:
                yield
        waits: list[Wait] = []
        for by_rank in streams.values():
            waits += yield from self._collective(by_rank)
        return waits

    def _collective(self, by_rank: dict[int, tuple[Group, float]]) -> Steps[list[Wait]]:
        waiting: dict[int, tuple[Group, Call, float]] = {}
        for number, (rank, (group, age)) in enumerate(by_rank.items()):
            if group.issued > (finished := group.finished) and not group.failure:
                last = group.last
                if last.sequence > finished:
                    waiting[rank] = group, last, age
            if number % STRIDE == 0:
                yield
        if not waiting:
            return []
        # The ranks that are furthest behind hold up the others: of several calls the first one counts.
        first = min(last.sequence for _, last, _ in waiting.values())
        yield
        at_it = {rank: wait for rank, wait in waiting.items() if wait[1].sequence == first}
        group, call, _ = next(iter(at_it.values()))
        ranks = tuple(group.ranks) or (self.ranks if group.size == len(self.ranks) else tuple(by_rank))
        yield
        absent = [rank for rank in ranks if rank not in by_rank or by_rank[rank][0].issued < first]
        if not absent:  # all have called it: the ranks with data outstanding
            yield
            named = {rank for _, last, _ in at_it.values() for rank in last.waits_for}
            absent = sorted(named - at_it.keys()) or sorted(named)
        yield
        ages = [(last.age_us / 1e6, age) for _, last, age in at_it.values()]
        kind = "transfer" if call.call.startswith(("send(", "recv(")) else "collective"
        what = f"{kind} #{first} of group {group.name}, {call.call}"
        since, seen = max(called + said for called, said in ages), max(called for called, _ in ages)
        tasks = [Task(self.job, rank) for rank in absent]
        wait = yield from self._wait(
            "collective", what, since, at_it, tasks, group.name, first, call.call, group.id, seen
        )
        return [wait]

    def _wait(
        self,
        kind: str,
        what: str,
        since: float,
        present: Iterable[int],
        suspects: Iterable[Task],
        group: str = "",
        sequence: int = 0,
        call: str = "",
        group_id: int = 0,
        seen: float | None = None,
    ) -> Steps[Wait]:
        found: list[Suspect] = []
        for task in suspects:
            found.append(self._suspect(task, group_id))
            if len(found) % (STRIDE // 4) == 0:  # each takes longer
                yield
        said_at = since if seen is None else seen
        return Wait(kind, what, group, sequence, call, since, said_at, tuple(sorted(present)), tuple(found))

    def _suspect(self, task: Task, group_id: int) -> Suspect:
        member = self.members.get(task)
        said = self.picture.reports.get(task)
        number, call = 0, ""
        age = None if said is None else said.age_ms / 1000
        if said is not None:
            own = [group.last for group in said.report.groups if group.id == group_id]
            if own and own[0].sequence:
                number, call = own[0].sequence, own[0].call
            else:
                recent = [one for one in said.report.recent if one.group]
                number, call = (recent[-1].sequence, recent[-1].call) if recent else (0, "")
        return Suspect(
            rank=task.index,
            task=str(task),
            host=member.process.host if member else "",
            pid=member.process.pid if member else 0,
            state=_state(member),
            reason=member.reason if member else "",
            last=call,
            last_sequence=number,
            idle=None if said is None or age is None else said.report.idle_ms / 1000 + age,
            where=said.report.where if said else "",
            operation=said.report.operation if said else "",
            said=age,
        )


def _order(task: Task) -> tuple[str, int]:
    return task.job, task.index  # sorts faster than tasks compare themselves


def _task(member: Member) -> Task:
    return Task(member.job, member.index)


def _state(member: Member | None) -> str:
    if member is None:
        return "vacant"
    if member.liveness in (Liveness.BLOCKED, Liveness.STUCK):
        return member.liveness.name.lower()
    return member.state.name.lower()
