"""Members of a cluster as plain values: tasks, members, their processes and devices."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dmesh.coordination.activity import Activity
from dmesh.errors import ConfigurationError
from dmesh.v1 import common_pb2, coordination_pb2

_TASK_NAME = re.compile(r"/job:([A-Za-z0-9_.-]{1,128})(?:/replica:0)?/task:([0-9]{1,9})")


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """Task of a cluster: a client's slot, whether or not a process has taken it."""

    job: str
    """Name of the job."""
    index: int
    """Index within the job, from 0."""

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read `/job:NAME/task:N`; a `/replica:0` between the two is allowed.

        Raises:
            ConfigurationError: The text is not the name of a task.
        """
        match = _TASK_NAME.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"{text!r} does not name a task: write it as '/job:NAME/task:N'")
        return cls(match[1], int(match[2]))

    @classmethod
    def from_proto(cls, message: common_pb2.Task) -> Task:
        """Convert from the wire."""
        return cls(message.job, message.index)

    def to_proto(self) -> common_pb2.Task:
        """Convert for the wire."""
        return common_pb2.Task(job=self.job, index=self.index)


class MemberState(enum.Enum):
    """State of a task's member. The values are the wire's."""

    UNKNOWN = 0
    REGISTERED = 1
    CONNECTED = 2
    LEFT = 3
    LOST = 4
    FAILED = 5

    @property
    def departed(self) -> bool:
        """True if the member is gone for good."""
        return self in (MemberState.LEFT, MemberState.LOST, MemberState.FAILED)


class DepartureCause(enum.Enum):
    """Cause of a member's departure. The values are the wire's."""

    NONE = 0
    """The member has not departed."""
    LEFT = 1
    """The member left."""
    EXITED = 2
    """The member ended without a proper shutdown, and reported that."""
    REPORTED_ERROR = 3
    """The member reported an error; see `Member.code`."""
    PROCESS_GONE = 4
    """Its process is known to be gone."""
    DISCONNECTED = 5
    """Its connection closed and was not built up again in time."""
    SILENT = 6
    """Its lease ran out: it was stopped, or its network is cut."""
    NOT_BACK = 7
    """The member did not reconnect after a restart of the coordinator."""
    EVICTED = 8
    """An operator evicted it."""
    UNKNOWN = -1
    """Cause that this version does not know."""


class Liveness(enum.Enum):
    """Progress of a member that is connected. The values are the wire's."""

    UNKNOWN = 0
    LIVE = 1
    """Its heartbeats arrive, and no client waits for it for long."""
    BLOCKED = 2
    """No heartbeat for a lease although its connection answers: its interpreter does not run."""
    STUCK = 3
    """Others have waited for it for long, and it made no progress."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a client."""

    type: str
    """CPU, GPU or TPU."""
    index: int
    """Index among the client's devices of that type, from 0."""
    description: str = ""
    """The hardware's own name; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Process:
    """Facts about a client process, for people who look for it."""

    host: str = ""
    """Host name, as the process sees it."""
    pid: int = 0
    """Process id on that host."""
    boot_id: str = ""
    """Random identity of the running kernel; equal on one machine only."""
    program: str = ""
    """Program that runs, e.g. `train.py`."""
    dmesh_version: str = ""
    """Version of the dmesh distribution."""
    python_version: str = ""
    """Version of the Python interpreter."""
    started_at_unix_ms: int = 0
    """Wall-clock start, milliseconds since the Unix epoch. For display only."""
    pid_namespace: str = ""
    """Identity of the pid namespace, in which alone the process id means something; empty if unknown."""
    start_ticks: int = 0
    """Start in the kernel's clock ticks, which tells it from others of its process id; 0 if unknown."""

    def to_proto(self) -> common_pb2.Process:
        """Convert for the wire."""
        return common_pb2.Process(
            host=self.host,
            pid=self.pid,
            boot_id=self.boot_id,
            program=self.program,
            dmesh_version=self.dmesh_version,
            python_version=self.python_version,
            started_at_unix_ms=self.started_at_unix_ms,
            pid_namespace=self.pid_namespace,
            start_ticks=self.start_ticks,
        )

    @classmethod
    def from_proto(cls, message: common_pb2.Process) -> Process:
        """Convert from the wire."""
        return cls(
            message.host,
            message.pid,
            message.boot_id,
            message.program,
            message.dmesh_version,
            message.python_version,
            message.started_at_unix_ms,
            message.pid_namespace,
            message.start_ticks,
        )


@dataclass(frozen=True, slots=True)
class Member:
    """Member of a cluster, as the server saw it at one moment."""

    job: str
    """Name of the job."""
    index: int
    """Index within the job: the client id."""
    incarnation: int
    """Random number of the process; 0 if no process has taken the task."""
    state: MemberState
    """Its state."""
    process: Process
    """Its process."""
    devices: tuple[Device, ...] = ()
    """Its devices, in order of type and index."""
    peer_addresses: tuple[str, ...] = ()
    """HOST:PORT at which its peers reach it, most preferred first."""
    last_seen_age: float = 0.0
    """Seconds since the server last heard of it."""
    registered_age: float = 0.0
    """Seconds since it registered."""
    reason: str = ""
    """Cause of its being LOST, FAILED, BLOCKED or STUCK, in words."""
    liveness: Liveness = Liveness.UNKNOWN
    """Its progress; UNKNOWN for members that have departed."""
    activity: Activity | None = None
    """Its activity when it was last asked; only if it is STUCK."""
    cause: DepartureCause = DepartureCause.NONE
    """Cause of its departure; NONE if it has not departed."""
    code: int = 0
    """Code with which it reported an error of its own; 0 for none."""

    @property
    def rank(self) -> int:
        """The client id, by which collectives know it."""
        return self.index

    @property
    def task(self) -> str:
        """Name of the task: `/job:worker/task:2`."""
        return f"/job:{self.job}/task:{self.index}"

    def describe(self) -> str:
        """Return its name for people: `/job:worker/task:2 (host h, pid 9)`."""
        if not self.incarnation:
            return f"{self.task} (never registered)"
        return f"{self.task} (host {self.process.host or '?'}, pid {self.process.pid})"

    @property
    def trouble(self) -> str:
        """Say how it is blocked or stuck, in what and where; empty if it is neither."""
        if self.liveness not in (Liveness.BLOCKED, Liveness.STUCK):
            return ""
        doing = self.activity.describe() if self.activity is not None else ""
        return f"{self.liveness.name.lower()}{doing}" + (f": {self.reason}" if self.reason else "")

    @classmethod
    def from_proto(cls, message: common_pb2.Member) -> Member:
        """Convert from the wire. A state that this version does not know becomes UNKNOWN."""
        state = MemberState(message.state) if message.state in _STATES else MemberState.UNKNOWN
        return cls(
            job=message.task.job,
            index=message.task.index,
            incarnation=message.incarnation,
            state=state,
            process=Process.from_proto(message.process),
            devices=tuple(Device(d.type, d.index, d.description) for d in message.devices),
            peer_addresses=tuple(message.peer_addresses),
            last_seen_age=message.last_seen_age_ms / 1000,
            registered_age=message.registered_age_ms / 1000,
            reason=message.reason,
            liveness=Liveness(message.liveness) if message.liveness in _LIVENESS else Liveness.UNKNOWN,
            activity=Activity.from_proto(message.activity) if message.HasField("activity") else None,
            cause=DepartureCause(message.cause) if message.cause in _CAUSES else DepartureCause.UNKNOWN,
            code=message.code,
        )


_CAUSES = frozenset(cause.value for cause in DepartureCause)
_STATES = frozenset(state.value for state in MemberState)
_LIVENESS = frozenset(liveness.value for liveness in Liveness)


class Members(tuple[Member, ...]):
    """All clients of the cluster with their devices, by rank."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Participant:
    """Process that arrived at an `alive_barrier`."""

    task: Task
    """Its task."""
    incarnation: int
    """Its random number: another process of the same task has another one."""

    @property
    def rank(self) -> int:
        """The client id, by which collectives know it."""
        return self.task.index

    @classmethod
    def from_proto(cls, message: coordination_pb2.Participant) -> Participant:
        """Convert from the wire."""
        return cls(Task.from_proto(message.task), message.incarnation)


@dataclass(frozen=True, slots=True)
class BarrierStatus:
    """A barrier under way."""

    name: str
    """Its name."""
    instance: int
    """Number of the use of the name, from 0."""
    arrived: tuple[Task, ...]
    """Tasks that have arrived, in order of arrival."""
    missing: tuple[Task, ...]
    """Tasks that have not arrived, sorted."""
    age: float
    """Seconds since the first arrival."""
    remaining: float | None
    """Seconds until it fails; None for no limit."""

    @classmethod
    def from_proto(cls, message: coordination_pb2.Barrier) -> BarrierStatus:
        """Convert from the wire."""
        return cls(
            name=message.name,
            instance=message.instance,
            arrived=tuple(Task.from_proto(task) for task in message.arrived),
            missing=tuple(Task.from_proto(task) for task in message.missing),
            age=message.age_ms / 1000,
            remaining=None if message.remaining_ms < 0 else message.remaining_ms / 1000,
        )


@dataclass(frozen=True, slots=True)
class BarrierProgress:
    """Progress of a barrier."""

    finished: int
    """Number of finished instances of its name, as far as the coordinator remembers."""
    current: BarrierStatus | None
    """The unfinished instance, with its arrived and missing participants."""

    @property
    def arrived(self) -> int:
        """Number of tasks that have arrived at the instance under way."""
        return 0 if self.current is None else len(self.current.arrived)

    @classmethod
    def from_proto(cls, message: coordination_pb2.GetBarrierResponse) -> BarrierProgress:
        """Convert from the wire."""
        current = BarrierStatus.from_proto(message.current) if message.HasField("current") else None
        return cls(message.finished, current)


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster, as the server saw it at one moment."""

    server_incarnation: int
    """Random number that the server drew when it started."""
    cluster_incarnation: int
    """Random number of this generation of the cluster."""
    epoch: int
    """Grows with every change of membership."""
    members: tuple[Member, ...]
    """All members, the departed ones included, sorted by task."""
    vacant: tuple[Task, ...]
    """Tasks that no process has taken yet, sorted."""
    barriers: tuple[BarrierStatus, ...]
    """Barriers under way, oldest first."""

    def describe(self, tasks: Iterable[Task]) -> str:
        """Return the tasks' names for display, each with host, pid and state of its member if known."""
        parts = []
        for member in self.holders(tasks):
            if not member.incarnation:
                parts.append(member.describe())
                continue
            process = member.process
            trouble = f", {member.trouble}" if member.trouble else ""
            parts.append(
                f"{member.task} (host {process.host or '?'}, pid {process.pid}, {member.state.name.lower()}, "
                f"last seen {member.last_seen_age:.1f} s ago{trouble})"
            )
        return ", ".join(parts)

    def holders(self, tasks: Iterable[Task]) -> tuple[Member, ...]:
        """Return the members of these tasks; for a vacant task, one that never registered."""
        by_task = {Task(member.job, member.index): member for member in self.members}
        return tuple(
            by_task.get(task) or Member(task.job, task.index, 0, MemberState.REGISTERED, Process())
            for task in tasks
        )

    @classmethod
    def from_proto(cls, message: coordination_pb2.GetClusterStateResponse) -> ClusterState:
        """Convert from the wire."""
        return cls(
            server_incarnation=message.server_incarnation,
            cluster_incarnation=message.cluster_incarnation,
            epoch=message.epoch,
            members=tuple(Member.from_proto(member) for member in message.members),
            vacant=tuple(Task.from_proto(task) for task in message.vacant),
            barriers=tuple(BarrierStatus.from_proto(barrier) for barrier in message.barriers),
        )
