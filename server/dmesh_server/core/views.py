"""Views of clusters in parts, so that a look at a large cluster does not hold the server up.

`GetClusterState` describes every member of a cluster; the methods here return numbers, or a page of members,
barriers or keys. They change nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

from dmesh_server.core import messages
from dmesh_server.core.barriers import Instance, slot_order
from dmesh_server.core.cluster import Cluster
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import ClusterSettings, Device, Job, Liveness, Member, MemberState, Task
from dmesh_server.core.roster import TaskSlot

CONDITIONS = ("FAILED", "LOST", "STUCK", "BLOCKED", "REGISTERED", "CONNECTED", "LEFT")
"""Conditions of a member, problems first: its state, or its liveness if it is connected but blocked or
stuck."""

_WELL = "CONNECTED"
_DEPARTED = frozenset(state.name for state in MemberState if state.departed)

MOST_MISSING = 1_000
"""Missing members of a barrier that are described one by one."""


@dataclass(frozen=True, slots=True)
class BarrierView:
    """A barrier under way, with some of its missing members."""

    name: str
    instance: int
    participants: int
    arrived: int
    missing: tuple[Member, ...]
    """The first missing members, sorted by task; vacant task slots have incarnation 0."""
    missing_count: int
    started_at: float
    """Time of the first arrival, seconds of the server's monotonic clock."""
    latest_at: float
    """Time of the latest arrival."""
    deadline: float | None
    """Time at which it fails; None for never."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A cluster in numbers."""

    name: str
    incarnation: int
    epoch: int
    ended: bool
    """All its members have departed."""
    jobs: tuple[Job, ...]
    settings: ClusterSettings
    members: Mapping[str, int]
    """Number of members in each of `CONDITIONS`; empty conditions are left out."""
    vacant: int
    """Number of task slots never taken so far."""
    barriers: int
    """Barriers under way."""
    oldest: BarrierView | None
    """The one that began first, without its missing members."""
    keys: int
    key_bytes: int
    """Bytes of keys and values."""
    revision: int
    waiters: int
    """Blocked reads and watches."""

    @property
    def present(self) -> int:
        """Number of members that have not departed."""
        return sum(count for condition, count in self.members.items() if condition not in _DEPARTED)


@dataclass(frozen=True, slots=True)
class KeyView:
    """A key without its value."""

    key: str
    size: int
    """Bytes of its value."""
    create_revision: int
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Host:
    """A machine with members that have not departed."""

    name: str
    """Host name, as its processes see it."""
    boot_id: str
    """Identity of its kernel; empty if unknown."""
    tasks: tuple[Task, ...]
    """Sorted."""
    devices: Mapping[str, int]
    """Number of devices by type."""


@dataclass(frozen=True, slots=True)
class TaskView:
    """A task slot that has been taken, with little about its holder."""

    task: Task
    host: str
    boot_id: str
    pid: int
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """Conditions of a cluster's members, by position among the slots taken."""

    conditions: Mapping[int, str]
    """Conditions of the members that are not CONNECTED."""
    last_seen_at: Sequence[float]
    """Of all, seconds of the server's monotonic clock."""


class MemberRecord(NamedTuple):
    """Condition of a task slot's holder."""

    incarnation: int
    condition: str
    present: bool
    """False: it has departed."""


@dataclass(frozen=True, slots=True)
class Members:
    """A page of members, sorted by task."""

    members: tuple[Member, ...]
    matching: int
    """Number of matching members on all pages."""
    more: bool
    """True if more members follow."""


class ClusterViews:
    """Looks at clusters.

    Its methods raise `CoreError` with NOT_REGISTERED if there is no cluster of the name.
    """

    def __init__(self, clusters: Mapping[str, Cluster]) -> None:
        """Look at these.

        Args:
            clusters: By name.
        """
        self._clusters = clusters

    def names(self) -> list[str]:
        """Return the names of all clusters, sorted."""
        return sorted(self._clusters)

    def summary(self, name: str) -> Summary:
        """Return a cluster in numbers."""
        cluster = self._of(name)
        under_way = cluster.table.under_way
        oldest = min(under_way, key=lambda barrier: under_way[barrier].started_at, default=None)
        return Summary(
            name,
            cluster.generation.incarnation,
            cluster.epoch,
            cluster.ended,
            cluster.roster.jobs,
            cluster.settings,
            _counts(cluster),
            len(cluster.roster.everyone) - len(cluster.roster.slots),
            len(under_way),
            None if oldest is None else _view(cluster, oldest, under_way[oldest], 0),
            len(cluster.store.keys),
            cluster.store.keys.size,
            cluster.store.revision,
            len(cluster.store.waiters),
        )

    def heartbeat_interval(self, name: str) -> float:
        """Return how often the members of a cluster send heartbeats, seconds."""
        return self._of(name).settings.heartbeat_interval

    def members(
        self, name: str, after: Task | None, limit: int, conditions: Collection[str] = CONDITIONS
    ) -> Members:
        """Return the next members after a task.

        Args:
            name: The cluster.
            after: Last task of the page before; None for the first page.
            limit: Most members to return.
            conditions: Only members in one of these.
        """
        roster = self._of(name).roster
        slots = roster.in_order()
        if len(conditions) != len(CONDITIONS):
            wanted = frozenset(conditions)
            some = slots if _WELL in wanted else [slot for _, slot in _unwell(slots)]
            slots = [slot for slot in some if condition_of(slot) in wanted]
        begin = 0 if after is None else bisect_right(slots, slot_order(after), key=_order)
        found = slots[begin : begin + limit]
        return Members(tuple(slot.snapshot() for slot in found), len(slots), len(slots) > begin + limit)

    def holders(self, name: str, begin: int, limit: int) -> tuple[Member, ...]:
        """Return a range of the task slots taken, sorted by task, as they are now.

        Positions shift when the cluster's epoch changes: a reader of several ranges then begins anew.

        Args:
            name: The cluster.
            begin: Position of the first.
            limit: Most slots to return.
        """
        return tuple(slot.snapshot() for slot in self._of(name).roster.in_order()[begin : begin + limit])

    def version(self, name: str) -> tuple[int, int]:
        """Return the cluster's incarnation and epoch; they change with every change of a slot's holder."""
        cluster = self._of(name)
        return cluster.generation.incarnation, cluster.epoch

    def slots(self, name: str) -> Iterator[TaskView]:
        """Yield the task slots taken with their holders, sorted by task; to be consumed at once.

        The result stays valid until `version` changes.
        """
        for slot in self._of(name).roster.in_order():
            process = slot.process
            yield TaskView(slot.task, process.host, process.boot_id, process.pid, slot.devices)

    def standing(self, name: str) -> Standing:
        """Return how the holders of these task slots are now, in the same order."""
        slots = self._of(name).roster.in_order()
        return Standing(
            {place: condition_of(slot) for place, slot in _unwell(slots)},
            [slot.last_seen_at for slot in slots],
        )

    def holder(self, name: str, task: Task) -> MemberRecord | None:
        """Return the condition of a task slot's holder; None for a vacant or unknown slot."""
        slot = self._of(name).roster.slots.get(task)
        if slot is None:
            return None
        return MemberRecord(slot.incarnation, condition_of(slot), not slot.state.departed)

    def member(self, name: str, task: Task) -> Member:
        """Return the holder of a task slot, or the vacant task.

        Raises:
            CoreError: UNKNOWN_TASK.
        """
        roster = self._of(name).roster
        if not roster.knows(task):
            raise CoreError(
                ErrorKind.UNKNOWN_TASK,
                f"{messages.label(task)} is not a task of cluster {messages.quote(name)}",
            )
        return roster.describe(task)

    def hosts(self, name: str) -> list[Host]:
        """Return on which machines the members are that have not departed, sorted by name."""
        tasks: dict[tuple[str, str], list[Task]] = {}
        devices: dict[tuple[str, str], Counter[str]] = {}
        for slot in self._of(name).roster.in_order():
            if not slot.state.departed:
                machine = (slot.process.host, slot.process.boot_id)
                tasks.setdefault(machine, []).append(slot.task)
                devices.setdefault(machine, Counter()).update(device.type for device in slot.devices)
        return [Host(*machine, tuple(tasks[machine]), devices[machine]) for machine in sorted(tasks)]

    def vacant(self, name: str, limit: int) -> tuple[Task, ...]:
        """Return the first vacant task slots."""
        return self._of(name).roster.vacant()[:limit]

    def barriers(self, name: str, skip: int, limit: int, missing: int) -> tuple[list[BarrierView], int]:
        """Return barriers under way, the oldest first, and how many there are.

        Args:
            name: The cluster.
            skip: So many before the first.
            limit: How many.
            missing: How many of each one's missing members are described.
        """
        cluster = self._of(name)
        under_way = cluster.table.under_way
        ordered = sorted(under_way.items(), key=lambda item: item[1].started_at)[skip : skip + limit]
        most = min(missing, MOST_MISSING)
        return [_view(cluster, barrier, instance, most) for barrier, instance in ordered], len(under_way)

    def arrived(self, name: str, barrier: str, limit: int) -> tuple[Task, ...]:
        """Return the tasks that have arrived at a barrier under way, in order of arrival."""
        instance = self._of(name).table.under_way.get(barrier)
        return () if instance is None else tuple(instance.arrived)[:limit]

    def keys(self, name: str, prefix: str, after: str, limit: int) -> tuple[list[KeyView], bool]:
        """Return the next keys after `after` that begin with a prefix, and whether there are more."""
        found = self._of(name).store.keys.after(prefix, after, limit + 1)
        views = [KeyView(kv.key, len(kv.value), kv.create_revision, kv.mod_revision) for kv in found[:limit]]
        return views, len(found) > limit

    def _of(self, name: str) -> Cluster:
        cluster = self._clusters.get(name)
        if cluster is None:
            raise CoreError(
                ErrorKind.NOT_REGISTERED,
                f"no client has registered in cluster {messages.quote(name)} on this server",
            )
        return cluster


def condition_of(holder: TaskSlot | Member) -> str:
    """Return the member's condition, one of `CONDITIONS`."""
    if holder.state is MemberState.CONNECTED:
        return _WELL if holder.liveness is Liveness.LIVE else holder.liveness.name
    return holder.state.name


def _unwell(slots: Iterable[TaskSlot]) -> list[tuple[int, TaskSlot]]:
    """Return the slots that are not CONNECTED, with their positions."""
    # Usually few: only these pay for the look-up of a state's name, which is slow.
    connected, live = MemberState.CONNECTED, Liveness.LIVE
    return [
        (place, slot)
        for place, slot in enumerate(slots)
        if slot.state is not connected or slot.liveness is not live
    ]


def _counts(cluster: Cluster) -> dict[str, int]:
    slots = cluster.roster.slots
    found = Counter(condition_of(slot) for _, slot in _unwell(slots.values()))
    found[_WELL] = len(slots) - found.total()
    return {condition: found[condition] for condition in CONDITIONS if found[condition]}


def _order(slot: TaskSlot) -> tuple[str, int]:
    return slot_order(slot.task)


def _view(cluster: Cluster, name: str, instance: Instance, most: int) -> BarrierView:
    missing: tuple[Member, ...] = ()
    if most:
        tasks = nsmallest(most, instance.missing(), key=slot_order)
        missing = tuple(cluster.roster.describe(task) for task in tasks)
    return BarrierView(
        name,
        instance.number,
        len(instance.expected),
        len(instance.arrived),
        missing,
        len(instance.expected) - len(instance.arrived),
        instance.started_at,
        instance.latest,
        instance.deadline,
    )
