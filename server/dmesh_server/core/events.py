"""Events that `Core.apply` accepts.

A `Request` is answered by exactly one `Reply` effect with its `token`, at once or later; other events are not
answered. The runtime chooses tokens and session ids; they mean nothing to the core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dmesh_server.core.model import (
    NO_WISHES,
    Activity,
    Caller,
    ClusterSettings,
    Condition,
    Device,
    Job,
    PassedBarrier,
    Process,
    SeenState,
    Task,
)


@dataclass(frozen=True, slots=True)
class Request:
    """Event that is answered."""

    token: int
    """Names the call, unique while it is unanswered."""
    caller: Caller
    """Sender of the request."""


@dataclass(frozen=True, slots=True)
class Mutation(Request):
    """A request that changes something. Idempotent by (caller, request_id)."""

    request_id: str
    """Unique per call, equal in its retries."""
    session: int = field(default=0, kw_only=True)
    """The session within which it is called; 0 for a call of its own."""
    reply_slot: int = field(default=0, kw_only=True)
    """Within a session, where its answer is kept: see `replies`. 0 for a client that names none."""


@dataclass(frozen=True, slots=True)
class Register(Mutation):
    """Takes a task slot. Reply: `Registered`."""

    jobs: tuple[Job, ...]
    process: Process
    devices: tuple[Device, ...]
    peer_addresses: tuple[str, ...]
    fresh_incarnation: int
    """Random number for the cluster, should this registration start a new generation of it."""
    fresh_secret: bytes = field(repr=False)
    """Random secret for the cluster, likewise."""
    settings: ClusterSettings = NO_WISHES
    """Settings that the client wishes for the cluster."""
    seen: SeenState | None = None
    """Latest state that the client has seen, if it was registered before."""
    owner: str = ""
    """Tenant whose quota a new generation counts for; empty for none."""


@dataclass(frozen=True, slots=True)
class Leave(Mutation):
    """Gives a task slot up; an empty reason is a clean leave. Reply: `Done`."""

    reason: str
    clean: bool = False
    """The program ended normally: a clean leave although it has a reason."""


@dataclass(frozen=True, slots=True)
class ReportError(Mutation):
    """Declares the caller failed. Reply: `Done`."""

    message: str
    code: int = 0
    """Code of the error, which means something to the caller's program; 0 for none."""


@dataclass(frozen=True, slots=True)
class GetClusterState(Request):
    """Reads the table of members. Reply: `ClusterState`."""

    known_epoch: int = 0
    """Epoch of the caller's copy; if it is the current one, the reply has no members."""
    timeout: float | None = 0
    """Seconds to wait for another epoch than the known one; 0: not at all; None: until `Abandon`."""


@dataclass(frozen=True, slots=True)
class GetMember(Request):
    """Reads one member. Reply: `Member`; of a vacant task, without an incarnation."""

    task: Task


@dataclass(frozen=True, slots=True)
class GetBarrier(Request):
    """Reads how far a barrier is. Reply: `BarrierProgress`."""

    name: str


@dataclass(frozen=True, slots=True)
class Attach(Request):
    """Binds a session to the caller's task slot. Reply: `Attached`.

    Replaces an older session of the same incarnation.
    """

    session: int
    """Names the session, never used again."""
    seen: SeenState | None = None
    """Latest state that the caller has seen; None if it does not say."""


@dataclass(frozen=True, slots=True)
class PresentBarriers(Request):
    """Presents barriers that have succeeded, to a server that was restarted. Reply: `Done`."""

    passed: tuple[PassedBarrier, ...]
    """The caller's latest passed barriers, each name once."""


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """A session's stream ended. Unknown or replaced sessions are ignored."""

    session: int
    remote: str = ""
    """Address from which it came, for `Probe`; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A suspected member's process was looked for. Ignored if the member is not suspected any more."""

    cluster: str
    task: Task
    lease: int
    """Number of its lease."""
    gone: bool
    """True: the process has certainly ended; False: it certainly exists."""
    source: str = ""
    """Source of that knowledge, for messages."""


@dataclass(frozen=True, slots=True)
class ReportProcess:
    """Answers a `ProcessQuery`, on the session that it was pushed to. Answered by nothing."""

    session: int
    task: Task
    lease: int
    gone: bool
    """True: the process has certainly ended; False: it certainly exists."""


@dataclass(frozen=True, slots=True)
class EndSession:
    """A member ends its session for good, without leaving: it is lost. Answered by a `SessionEnd`."""

    session: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """The server itself did not run for a while: signs of life may be waiting unread."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life on a session. Answered by a `Push` of `HeartbeatAck`."""

    session: int
    sequence: int
    progress: int = 0
    """Progress count of the program."""


@dataclass(frozen=True, slots=True)
class ReportStatus:
    """Answers a `StatusRequest`, on the session that it was pushed to. Answered by nothing."""

    session: int
    id: int
    """Of the request."""
    activity: Activity
    """Activity of the member's main thread."""


@dataclass(frozen=True, slots=True)
class ReportWaiting:
    """A member waits for others outside of the core's sight, in a collective. Answered by nothing."""

    session: int
    operation: str
    """Operation that it waits in, for people."""
    tasks: tuple[Task, ...]
    """Tasks that it waits for; empty if it does not wait any more."""
    age: float
    """For how long already, seconds."""


@dataclass(frozen=True, slots=True)
class EnterBarrier:
    """Arrives at a barrier, on a session. Answered by a `Push` of `BarrierResult`, now or later."""

    session: int
    name: str
    instance: int
    """Number of instances of the name that the caller has finished; -1 for the next instance, whatever its
    number."""
    participants: tuple[Task, ...]
    """Empty for every task of the cluster."""
    timeout: float | None
    """Seconds that the first arrival gives the others; None for no limit."""
    alive: bool = False
    """Wait only for the participants that are members, as they come and go; the result names them."""


@dataclass(frozen=True, slots=True)
class CancelBarrier(Mutation):
    """Ends a barrier for all participants. Reply: `Done`."""

    name: str
    instance: int
    """-1 for the one under way."""


@dataclass(frozen=True, slots=True)
class KvSet(Mutation):
    """Sets one key. Reply: `KvRevision`."""

    key: str
    value: bytes
    allow_overwrite: bool
    lease: int = 0
    """The lease that it is attached to; 0 for none. A member's own is its incarnation."""


@dataclass(frozen=True, slots=True)
class KvGet(Request):
    """Reads one key, waiting for it. Reply: `KeyValue`, when there is one."""

    key: str
    timeout: float | None
    """Seconds to wait; 0: not at all; None: until `Abandon`."""


@dataclass(frozen=True, slots=True)
class KvGetMany(Request):
    """Reads many keys at one revision. Reply: `KvRead`."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KvList(Request):
    """Reads all keys with a prefix. Reply: `KvRead`."""

    prefix: str
    keys_only: bool


@dataclass(frozen=True, slots=True)
class KvDelete(Mutation):
    """Deletes a key or a prefix. Reply: `KvDeleted`."""

    key: str
    is_prefix: bool


@dataclass(frozen=True, slots=True)
class KvIncrement(Mutation):
    """Adds to an integer. Reply: `KvIncremented`."""

    key: str
    amount: int


KvOperation = KvSet | KvDelete | KvIncrement | KvGetMany | KvList
"""Operation of a transaction. Its token, caller and request id mean nothing: the transaction's count."""


@dataclass(frozen=True, slots=True)
class KvTransaction(Mutation):
    """Changes several keys at one revision, or none. Reply: `KvTransacted`."""

    compare: tuple[Condition, ...]
    """Conditions, all of which must hold."""
    then: tuple[KvOperation, ...]
    """Carried out in order if they do."""
    otherwise: tuple[KvOperation, ...] = ()
    """Carried out in order if they do not."""


@dataclass(frozen=True, slots=True)
class GrantLease(Mutation):
    """Grants a lease for keys; idempotent by its number. Reply: `LeaseGranted`."""

    lease: int
    """Random number that names it."""
    ttl: float
    """Seconds for which it lives unless it is renewed."""


@dataclass(frozen=True, slots=True)
class RenewLease(Request):
    """Lets the time of a lease begin anew. Reply: `LeaseGranted`."""

    lease: int


@dataclass(frozen=True, slots=True)
class RevokeLease(Mutation):
    """Ends a lease with all its keys; idempotent. Reply: `KvDeleted`."""

    lease: int


@dataclass(frozen=True, slots=True)
class KvWatch(Request):
    """Watches a prefix. Reply: `KvRevision` (it is in place), then `WatchPush` effects until `Abandon`.

    The changes since `from_revision` follow the reply at once; 0 means from now on.
    """

    prefix: str
    from_revision: int
    seen: SeenState | None = None
    """Latest state that the caller has seen, as in `Attach`."""


@dataclass(frozen=True, slots=True)
class Operation(Request):
    """Change by an operator, who holds no task slot. Idempotent. Reply: `Operated`."""

    by: str
    """Operator, for messages."""


@dataclass(frozen=True, slots=True)
class DeclareCluster(Operation):
    """Fixes jobs and settings of the caller's cluster for all of its generations to come."""

    tasks: tuple[tuple[str, int], ...]
    """Number of tasks of each job, sorted by job."""
    settings: ClusterSettings
    """Declared settings. The first client decides the others."""


@dataclass(frozen=True, slots=True)
class WithdrawCluster(Operation):
    """Takes a declaration back; a cluster that runs goes on."""


@dataclass(frozen=True, slots=True)
class StopBarrier(Operation):
    """Fails a barrier for all its participants."""

    name: str
    instance: int


@dataclass(frozen=True, slots=True)
class Evict(Operation):
    """Declares a member failed."""

    task: Task
    incarnation: int
    """Of the process that is meant."""
    reason: str


@dataclass(frozen=True, slots=True)
class DropKey(Operation):
    """Deletes a key as it was at a revision."""

    key: str
    revision: int
    """Of the key's latest change."""


@dataclass(frozen=True, slots=True)
class SnapshotKeys(Operation):
    """Reads all keys at one revision, but for dmesh's own. Reply: `KeySnapshot`."""


@dataclass(frozen=True, slots=True)
class RestoreKeys(Operation):
    """Gives the cluster the keys of a backup, as one change. Reply: `KeysRestored`."""

    keys: Mapping[str, bytes]
    merge: bool
    """Keep the keys that the backup does not have. dmesh's own are kept always."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """The caller waiting for `token` (a blocked read or a watch) is gone. Unknown tokens are ignored."""

    token: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The runtime sends it when `Core.next_deadline()` has come."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The server will stop: waiters are answered SHUTTING_DOWN, sessions are ended."""


SessionMessage = Heartbeat | EnterBarrier | ReportStatus | ReportWaiting | ReportProcess | EndSession
"""Messages of sessions that get no answer, or none by a reply."""

Event = (
    SessionMessage
    | Register
    | Leave
    | ReportError
    | GetClusterState
    | GetMember
    | GetBarrier
    | Attach
    | PresentBarriers
    | SessionClosed
    | Evidence
    | Stalled
    | CancelBarrier
    | KvSet
    | KvGet
    | KvGetMany
    | KvList
    | KvDelete
    | KvIncrement
    | KvTransaction
    | GrantLease
    | RenewLease
    | RevokeLease
    | KvWatch
    | DeclareCluster
    | WithdrawCluster
    | StopBarrier
    | Evict
    | DropKey
    | SnapshotKeys
    | RestoreKeys
    | Abandon
    | Tick
    | Shutdown
)
"""Everything that can happen."""
