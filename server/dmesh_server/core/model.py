"""Plain values that the whole server shares: tasks, devices, members, jobs, keys, limits."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One task slot of a cluster."""

    job: str
    """Name of the job."""
    index: int
    """Index within the job, from 0."""

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.index}"


class MemberState(enum.Enum):
    """State of a task slot's holder. The values are the wire's."""

    REGISTERED = 1
    CONNECTED = 2
    LEFT = 3
    LOST = 4
    FAILED = 5

    @property
    def departed(self) -> bool:
        """True if the holder is gone for good."""
        return self in (MemberState.LEFT, MemberState.LOST, MemberState.FAILED)


class DepartureCause(enum.Enum):
    """Cause of a departure. The values are the wire's."""

    NONE = 0
    """The member has not departed."""
    LEFT = 1
    """The member left."""
    EXITED = 2
    """The member ended without a proper shutdown, and reported that."""
    REPORTED_ERROR = 3
    """The member reported an error."""
    PROCESS_GONE = 4
    """Its process is known to be gone, or ended its session without a goodbye."""
    DISCONNECTED = 5
    """Its connection closed and was not built up again in time."""
    SILENT = 6
    """Its lease ran out: it was stopped, or its network is cut."""
    NOT_BACK = 7
    """The member did not reconnect after a restart of the server."""
    EVICTED = 8
    """An operator evicted it."""


class Liveness(enum.Enum):
    """Progress of a connected member. The values are the wire's."""

    LIVE = 1
    BLOCKED = 2
    STUCK = 3


class RestartPolicy(enum.Enum):
    """Consequence of a member's loss or failure. The values are the wire's."""

    FAIL_FAST = 1
    REJOIN = 2


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of one cluster, as a client wishes them or as the cluster has them.

    In a wish, None or 0 accepts the cluster's value, or the server's default for a new cluster. A cluster's
    own settings are complete.
    """

    restart_policy: RestartPolicy | None = None
    """Consequence of a member's loss or failure."""
    heartbeat_interval: float = 0.0
    """Interval between a client's heartbeats, seconds."""
    lease: float = 0.0
    """Silence after which a member is blocked, or, without a session, lost; seconds."""
    stuck_after: float = 0.0
    """Time for which others wait for a member before it is asked about it, seconds; negative: never."""


NO_WISHES = ClusterSettings()
"""Wish that accepts the cluster's settings."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of a member's main thread, as the member reported it."""

    operation: str
    """In words; empty if it is in no operation of the SDK."""
    age: float
    """Time since the main thread's last progress, seconds, when it was reported."""
    stack: tuple[str, ...]
    """The main thread's stack, innermost frame last."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a client."""

    type: str
    """CPU, GPU or TPU."""
    index: int
    """Index among the client's devices of that type."""
    description: str = ""
    """Name that the hardware reports."""


@dataclass(frozen=True, slots=True)
class Process:
    """Facts about a client process, for display."""

    host: str = ""
    """Host name, as the process sees it."""
    pid: int = 0
    """Process id on that host."""
    boot_id: str = ""
    """Identity of the running kernel."""
    program: str = ""
    """Program that runs."""
    dmesh_version: str = ""
    """Version of the client's distribution."""
    python_version: str = ""
    """Version of its interpreter."""
    started_at_unix_ms: int = 0
    """Wall-clock start, for display only."""
    pid_namespace: str = ""
    """Identity of the pid namespace, in which alone the process id means something; empty if not known."""
    start_ticks: int = 0
    """Start in the kernel's clock ticks, which tells it from others of its process id; 0 if not known."""


@dataclass(frozen=True, slots=True)
class Job:
    """The tasks of one job."""

    name: str
    """Its name."""
    addresses: tuple[str, ...]
    """The configured address of each task, by index."""


@dataclass(frozen=True, slots=True)
class Member:
    """The holder of a task slot at one moment."""

    task: Task
    """The task slot."""
    incarnation: int
    """Random number of the process; 0 for a vacant task."""
    state: MemberState
    """State of the holder."""
    process: Process
    """Process that holds the slot."""
    devices: tuple[Device, ...]
    """Its devices."""
    peer_addresses: tuple[str, ...]
    """Addresses at which peers reach it."""
    registered_at: float
    """Time of its registration, seconds of the server's monotonic clock."""
    last_seen_at: float
    """Time of the last sign of life, seconds of the server's monotonic clock."""
    reason: str = ""
    """Reason for its being LOST, FAILED, BLOCKED or STUCK; empty otherwise."""
    liveness: Liveness = Liveness.LIVE
    """Progress of the member; meaningless once it has departed."""
    activity: Activity | None = None
    """Its activity when it was last asked; only if it is STUCK."""
    cause: DepartureCause = DepartureCause.NONE
    """Cause of its departure."""
    code: int = 0
    """Code with which it reported an error of its own; 0 for none."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of an event. An observer has no task: it may read, and change keys."""

    cluster: str
    """Name of the cluster."""
    task: Task | None = None
    """The caller's task slot."""
    incarnation: int = 0
    """The caller's incarnation."""
    proof: bytes = field(default=b"", repr=False)
    """SHA-256 of the credential that the caller showed; empty if it showed none."""


@dataclass(frozen=True, slots=True)
class SeenState:
    """Latest state that a client has seen, of any run of the server."""

    store: int
    """Identity of the server's store."""
    cluster_incarnation: int
    """Incarnation of the client's cluster."""
    server_incarnation: int
    """Incarnation of the server."""
    epoch: int
    """The highest epoch."""
    revision: int
    """The highest revision of the key-value store."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key, its value and its revisions."""

    key: str
    """The key."""
    value: bytes
    """The value."""
    create_revision: int
    """Revision at which the key came into being."""
    mod_revision: int
    """Revision of its last change."""
    lease: int = 0
    """The lease that it is attached to, with which it ends; 0 for none."""


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """One change of the key-value store."""

    kv: KeyValue
    """The key after the change; without a value if it was deleted."""
    deleted: bool = False
    """True if the key was deleted."""

    @property
    def size(self) -> int:
        """Bytes of its key and value."""
        return len(self.kv.key) + len(self.kv.value)


class ConditionTarget(enum.Enum):
    """Property of a key that a condition compares."""

    VALUE = 1
    CREATE_REVISION = 2
    MOD_REVISION = 3


class ConditionOperator(enum.Enum):
    """Comparison, with the key's property on the left. The values are the wire's."""

    EQUAL = 1
    NOT_EQUAL = 2
    LESS = 3
    GREATER = 4


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparison of a key with an operand. The revisions of a missing key are 0; its value equals nothing."""

    key: str
    """The key."""
    target: ConditionTarget
    """Property that is compared."""
    operator: ConditionOperator
    """Comparison."""
    operand: bytes | int
    """Value to compare with: bytes for the value, an integer for a revision."""


@dataclass(frozen=True, slots=True)
class PassedBarrier:
    """A barrier that succeeded, as a participant presents it."""

    name: str
    """Its name."""
    instance: int
    """The last instance that the participant knows to have succeeded."""
    participants: tuple[Task, ...]
    """Empty for every task of the cluster."""
    epoch: int = 0
    """The cluster's epoch at the barrier's end, as the participant knows it; 0 if unknown."""


@dataclass(frozen=True, slots=True, order=True)
class Participant:
    """A process that has come to a barrier."""

    task: Task
    """Its task."""
    incarnation: int
    """Its random number."""


@dataclass(frozen=True, slots=True)
class BarrierStatus:
    """A barrier under way."""

    name: str
    """Its name."""
    instance: int
    """Number of this use of the name, from 0."""
    arrived: tuple[Task, ...]
    """Tasks that have arrived, in order of arrival."""
    missing: tuple[Task, ...]
    """Tasks that have not arrived, sorted."""
    started_at: float
    """Time of the first arrival, seconds of the server's monotonic clock."""
    deadline: float | None
    """Time at which the barrier fails; None for never."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster at one moment."""

    name: str
    """Its name."""
    incarnation: int
    """Random number of this generation of the cluster."""
    epoch: int
    """Grows with every change of membership."""
    jobs: tuple[Job, ...]
    """All its jobs."""
    members: tuple[Member, ...]
    """Its members, sorted by task."""
    vacant: tuple[Task, ...]
    """Task slots never taken so far, sorted."""
    barriers: tuple[BarrierStatus, ...]
    """Barriers under way, oldest first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the memory that clients can make the server use, and the server's times."""

    heartbeat_interval: float = 3.0
    """Interval between a client's heartbeats, seconds."""
    lease: float = 15.0
    """Silence after which a member is blocked, or, without a session, lost; seconds."""
    heartbeats_per_second: float = 1_000.0
    """Heartbeats of one cluster's clients together; in clusters that have more, intervals and leases grow."""
    stuck_after: float = 60.0
    """Time for which others wait for a member before it is asked about it, seconds; 0 or less: never."""
    min_heartbeat_interval: float = 0.01
    """The shortest heartbeat interval that a client may set for its cluster, seconds."""
    min_lease: float = 0.1
    """The shortest lease that a client may set for its cluster, seconds."""
    max_lease: float = 3_600.0
    """The longest, seconds."""
    suspicion: float = 5.0
    """Time within which a broken session may be attached again although nothing else is heard of its member,
    seconds: a flap of a second, the client's longest wait between attempts, and as much again."""
    suspicion_per_client: float = 0.005
    """The same, for every member whose session is broken at the same time: they are attached one by one,
    which takes 1 ms each, or several if server and clients share a busy machine."""
    departure_batch: float = 0.05
    """Changes of members within this time of the last notice are announced together, seconds."""
    departure_quiet_per_session: float = 0.0003
    """The same time per session to be notified, seconds: the larger of both counts."""
    leave_quiet_per_session: float = 0.003
    """The same time for orderly leaves, counted from the first of them, seconds: nobody waits for those
    members, and when a job ends for all at once, members that have left by then need no notice."""
    max_clusters: int = 1_000
    """Clusters on one server."""
    max_tasks: int = 100_000
    """Tasks in one cluster."""
    max_key_bytes: int = 1_024
    """Length of a key in UTF-8."""
    max_value_bytes: int = 1 << 20
    """Length of a value."""
    max_store_bytes: int = 256 << 20
    """Keys and values of one cluster together."""
    max_key_leases: int = 100_000
    """Leases granted for keys in one cluster."""
    max_keys_per_read: int = 10_000
    """Keys in one GetMany."""
    max_transaction_operations: int = 128
    """Conditions, and operations of each branch, in one transaction."""
    max_remembered_read_bytes: int = 16 << 10
    """Keys and values that a transaction may read beside its changes: a retry is answered with them again."""
    max_barriers: int = 10_000
    """Barrier names remembered by one cluster."""
    max_passed: int = 1_024
    """Passed barriers that a client may present at once."""
    max_rejoins: int = 1_000
    """Processes that one after another may take the same task slot in one generation of a cluster."""
    max_waiters: int = 100_000
    """Blocked reads and watches of one cluster."""
    watch_history: int = 10_000
    """Revisions kept for watches that start in the past."""
    watch_history_bytes: int = 64 << 20
    """Keys and values in the kept revisions together, bytes."""
    max_read_bytes: int = 32 << 20
    """Keys and values in one answer."""
    replies_per_member: int = 64
    """Answers kept per member so that a retried request has one effect."""
    replies_to_observers: int = 256
    """The same for all callers of a cluster without a task, together."""

    def quiet(self, sessions: int) -> float:
        """Return for how long changes are held back after a notice to so many sessions, seconds."""
        return max(self.departure_batch, self.departure_quiet_per_session * sessions)

    def leave_quiet(self, sessions: int) -> float:
        """Return how long leaves are held back from so many sessions, seconds."""
        return max(self.departure_batch, self.leave_quiet_per_session * sessions)

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval < self.lease:
            raise ValueError(
                f"the heartbeat interval ({self.heartbeat_interval} s) must be positive and shorter than the "
                f"lease ({self.lease} s)"
            )


EMPTY_PROCESS = Process()
"""Stands for the holder of a vacant task."""


def vacant_task(task: Task) -> Member:
    """Describe a vacant task slot, so that errors can name it like any member."""
    return Member(task, 0, MemberState.REGISTERED, EMPTY_PROCESS, (), (), 0.0, 0.0, "never registered")
