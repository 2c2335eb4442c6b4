"""Task slots of a cluster and their holders: plain bookkeeping, without rules."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from dmesh_server.core.lease import OVER, Lease
from dmesh_server.core.model import (
    Activity,
    DepartureCause,
    Device,
    Job,
    Liveness,
    Member,
    MemberState,
    Process,
    Task,
    vacant_task,
)
from dmesh_server.core.replies import Replies


@dataclass(slots=True, eq=False)
class TaskSlot:
    """A task slot that has been taken, and its holder."""

    task: Task
    incarnation: int
    state: MemberState
    process: Process
    devices: tuple[Device, ...]
    peer_addresses: tuple[str, ...]
    request_id: str
    """Of the registration, so that a retry of it is known."""
    registered_at: float
    last_seen_at: float
    replies: Replies
    epoch: int = 0
    """The cluster's, with which the holder came in."""
    proof: bytes = field(default=b"", repr=False)
    """SHA-256 of the holder's credential; empty if it registered without one."""
    former: tuple[int, ...] = ()
    """Incarnations of earlier holders in this generation, which must never act for the task again."""
    reason: str = ""
    """Reason of the holder's departure."""
    cause: DepartureCause = DepartureCause.NONE
    """Cause of the holder's departure."""
    code: int = 0
    """Code of the error that the holder reported."""
    session: int | None = None
    """The attached session."""
    lease: Lease = OVER
    """Lease of the holder; over once it has departed."""
    restored: bool = False
    """True from the server's restart until the holder attaches again."""
    liveness: Liveness = Liveness.LIVE
    complaint: str = ""
    """Reason for its being BLOCKED or STUCK."""
    activity: Activity | None = None
    """Its activity when it was found STUCK."""
    beat_at: float = float("-inf")
    """Time of the last heartbeat."""
    progress: int | None = 0
    """Progress count of its latest heartbeat; None if the next one sets it."""
    tokens: set[int] = field(default_factory=set)
    """Blocked reads and watches of the holder."""

    def snapshot(self) -> Member:
        """Return the holder as it is now."""
        return Member(
            self.task,
            self.incarnation,
            self.state,
            self.process,
            self.devices,
            self.peer_addresses,
            self.registered_at,
            self.last_seen_at,
            self.reason if self.state.departed else self.complaint,
            self.liveness,
            self.activity,
            self.cause,
            self.code,
        )

    def outline(self) -> Member:
        """Return the holder as it is now, without devices and addresses."""
        return replace(self.snapshot(), devices=(), peer_addresses=())


def _place(slot: TaskSlot) -> tuple[str, str]:
    """Return where the holder's process id means something; empty texts if that is not known."""
    process = slot.process
    return (process.boot_id, process.pid_namespace) if process.boot_id and process.pid_namespace else ("", "")


def _order(slot: TaskSlot) -> tuple[str, int]:
    return slot.task.job, slot.task.index


class Roster:
    """All task slots of one generation of a cluster."""

    def __init__(self, jobs: tuple[Job, ...], epoch: int) -> None:
        self.jobs = jobs
        """The job list of the first client that registered."""
        self.epoch = epoch
        """Grows with every change of membership, through all generations of the cluster."""
        self.slots: dict[Task, TaskSlot] = {}
        """The task slots taken, in order of registration."""
        self.sessions: dict[int, TaskSlot] = {}
        """The attached sessions."""
        self.departed: dict[Task, TaskSlot] = {}
        """Task slots whose holders are gone, in order of departure."""
        self.fallen: dict[Task, TaskSlot] = {}
        """Departed slots whose holders were lost or failed."""
        self._hosts: dict[tuple[str, str], dict[Task, TaskSlot]] = {}
        """The slots of each host's members, where boot id and pid namespace are known."""
        self._held: dict[int, Task] = {}
        """The task slot of each incarnation that has ever held one."""
        self._sizes = {job.name: len(job.addresses) for job in jobs}
        self._ordered: list[TaskSlot] = []
        self.everyone = frozenset(
            Task(name, index) for name, size in self._sizes.items() for index in range(size)
        )
        """Every task."""
        self._vacant = dict.fromkeys(
            Task(name, index) for name, size in sorted(self._sizes.items()) for index in range(size)
        )

    def knows(self, task: Task) -> bool:
        """Return whether the task is one of the cluster's."""
        return 0 <= task.index < self._sizes.get(task.job, 0)

    @property
    def active(self) -> int:
        """Number of members that have not departed."""
        return len(self.slots) - len(self.departed)

    def add(self, slot: TaskSlot) -> None:
        """Give a task slot to a holder: a vacant one, or one whose holder has departed."""
        before = self.slots.pop(slot.task, None)
        self.slots[slot.task] = slot
        self._held.update(dict.fromkeys((*slot.former, slot.incarnation), slot.task))
        if before is None:
            del self._vacant[slot.task]
            insort(self._ordered, slot, key=_order)
        else:
            del self.departed[slot.task]
            self.fallen.pop(slot.task, None)
            self._ordered[bisect_left(self._ordered, _order(slot), key=_order)] = slot
        if slot.state.departed:
            self.depart(slot)
        elif any(place := _place(slot)):
            self._hosts.setdefault(place, {})[slot.task] = slot

    def depart(self, slot: TaskSlot) -> None:
        """Note that a holder is gone."""
        self.departed[slot.task] = slot
        if slot.state is not MemberState.LEFT:
            self.fallen[slot.task] = slot
        place = _place(slot)
        neighbors = self._hosts.get(place, {})
        neighbors.pop(slot.task, None)
        if not neighbors:
            self._hosts.pop(place, None)

    def neighbors(self, slot: TaskSlot) -> Iterator[TaskSlot]:
        """Yield the other members in the pid namespace of a slot's holder."""
        yield from (other for other in self._hosts.get(_place(slot), {}).values() if other is not slot)

    def bind(self, slot: TaskSlot, session: int) -> None:
        """Attach a session to a task slot that has none."""
        assert slot.session is None
        slot.session = session
        self.sessions[session] = slot

    def unbind(self, slot: TaskSlot) -> int | None:
        """Detach the task slot's session; return it."""
        session = slot.session
        if session is not None:
            del self.sessions[session]
            slot.session = None
        return session

    def describe(self, task: Task) -> Member:
        """Return the task slot's holder, or the vacant task."""
        slot = self.slots.get(task)
        return slot.snapshot() if slot else vacant_task(task)

    def members(self) -> tuple[Member, ...]:
        """Return all holders, sorted by task."""
        return tuple(slot.snapshot() for slot in self._ordered)

    def active_members(self) -> tuple[Member, ...]:
        """Return the holders that have not departed, sorted by task."""
        return tuple(slot.snapshot() for slot in self._ordered if not slot.state.departed)

    def held(self, incarnation: int) -> Task | None:
        """Return the task slot that a process holds or held; None if it never had one."""
        return self._held.get(incarnation)

    def iterate_vacant(self) -> Iterator[Task]:
        """Yield the task slots never taken, sorted."""
        yield from self._vacant

    def in_order(self) -> Sequence[TaskSlot]:
        """Return the task slots taken, sorted by task."""
        return self._ordered

    def vacant(self) -> tuple[Task, ...]:
        """Return the task slots never taken, sorted."""
        return tuple(self._vacant)
