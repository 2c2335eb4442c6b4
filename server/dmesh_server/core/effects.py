"""Effects that `Core.apply` returns, in the order in which to carry them out.

`Persist` effects of one `apply` come before the others: the runtime makes them durable before it releases the
rest, so that no one learns of a change that a crash could undo.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dmesh_server.core.errors import CoreError
from dmesh_server.core.log_events import LogEvent
from dmesh_server.core.model import (
    NO_WISHES,
    BarrierStatus,
    ClusterSettings,
    ClusterState,
    KeyEvent,
    KeyValue,
    Member,
    Participant,
    Process,
    Task,
)


class Encodable(Protocol):
    """Value of a record that is encoded when it is stored, after effects that need not wait for it."""

    def encode(self) -> bytes:
        """Return the value in the encoding of `core.records`."""


@dataclass(frozen=True, slots=True)
class Record:
    """One durable fact, addressed by (cluster, kind, key)."""

    cluster: str
    kind: str
    """One of the kinds in `core.records`."""
    key: str
    value: bytes | None = field(repr=False)
    """Content in the encoding of `core.records`; None to forget the record."""

    def encoded(self) -> Record:
        """Return the record itself."""
        return self


@dataclass(frozen=True, slots=True)
class LazyRecord:
    """A record that is encoded when it is stored."""

    cluster: str
    kind: str
    key: str
    value: Encodable = field(repr=False)

    def encoded(self) -> Record:
        """Return the record as a store keeps it."""
        return Record(self.cluster, self.kind, self.key, self.value.encode())


@dataclass(frozen=True, slots=True)
class Persist:
    """Make these records durable, all or none."""

    records: tuple[Record | LazyRecord, ...]
    lazy: bool = False
    """Nothing else need wait for these records, which must be durable soon, and before any later ones."""


@dataclass(frozen=True, slots=True)
class Registered:
    """Answers `Register`."""

    task: Task
    """The task slot."""
    cluster_incarnation: int
    epoch: int
    peer_secret: bytes = field(repr=False)
    settings: ClusterSettings = NO_WISHES
    """The cluster's, with nothing left open."""
    rejoined: bool = False
    """The task slot had an earlier holder in this generation of the cluster."""
    store: int = 0
    """Identity of the server's store."""


@dataclass(frozen=True, slots=True)
class Attached:
    """Answers `Attach`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class BarrierProgress:
    """Answers `GetBarrier`."""

    finished: int
    """Number of finished instances of the name, as far as known."""
    current: BarrierStatus | None
    """The instance under way."""


@dataclass(frozen=True, slots=True)
class Done:
    """Answers a mutation that has no result."""


@dataclass(frozen=True, slots=True)
class KvRevision:
    """Answers `KvSet` and `KvWatch`."""

    revision: int


@dataclass(frozen=True, slots=True)
class KvRead:
    """Answers `KvGetMany` and `KvList`."""

    kvs: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class KvDeleted:
    """Answers `KvDelete`."""

    deleted: int
    revision: int


@dataclass(frozen=True, slots=True)
class KvIncremented:
    """Answers `KvIncrement`."""

    value: int
    revision: int


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Answers `GrantLease` and `RenewLease`."""

    ttl: float
    """Seconds for which it lives unless it is renewed."""


KvResult = KvRevision | KvDeleted | KvIncremented | KvRead
"""Result of one operation of a transaction."""


@dataclass(frozen=True, slots=True)
class KvTransacted:
    """Answers `KvTransaction`."""

    succeeded: bool
    """True if its conditions held."""
    results: tuple[KvResult, ...]
    """The results of the operations that were carried out, in order."""
    revision: int
    """Revision of the changes; the current one if there are none."""


@dataclass(frozen=True, slots=True)
class Operated:
    """Answers an `Operation`."""

    changed: bool
    """False: it was so already."""


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """Answers `SnapshotKeys`."""

    cluster_incarnation: int
    kvs: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class KeysRestored:
    """Answers `RestoreKeys`."""

    set: int
    """Keys that were set; the others had their values already."""
    deleted: int
    revision: int


Answer = (
    Registered
    | Attached
    | BarrierProgress
    | Member
    | Done
    | ClusterState
    | KeyValue
    | KvRevision
    | KvRead
    | KvDeleted
    | KvIncremented
    | KvTransacted
    | LeaseGranted
    | Operated
    | KeySnapshot
    | KeysRestored
    | CoreError
)
"""Answers to requests."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the request that carries `token`."""

    token: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """Sign of life of the server, for a session."""

    sequence: int
    epoch: int


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """Notifies a session of departed members, and of new holders of their task slots."""

    epoch: int
    departed: tuple[Member, ...]
    rejoined: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class LivenessChange:
    """Notifies a session of members that have become blocked or stuck, or live again."""

    members: tuple[Member, ...]
    """The members as they are now, without devices and addresses."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Asks a session for the activity of the member's main thread. Answered by `ReportStatus`."""

    id: int


@dataclass(frozen=True, slots=True)
class ProcessQuery:
    """Asks a session whether another process of its host is there. Answered by `ReportProcess`."""

    task: Task
    """Task of the process, and number of its lease: to be sent back."""
    lease: int
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class BarrierResult:
    """Result of a barrier, for a session."""

    name: str
    instance: int
    error: CoreError | None
    epoch: int = 0
    """The cluster's epoch when it was over, the same for all."""
    present: tuple[Participant, ...] | None = None
    """Participants that came, sorted; only for a barrier of those alive that succeeded."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """Final message of a session. The runtime closes the stream after it."""

    error: CoreError


Message = (
    HeartbeatAck
    | MembershipChange
    | LivenessChange
    | StatusRequest
    | ProcessQuery
    | BarrierResult
    | SessionEnd
)
"""Messages to a session."""


@dataclass(frozen=True, slots=True)
class Push:
    """Tell these sessions, all the same."""

    sessions: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class WatchPush:
    """Changes of one revision for the watch `token`; an error ends it."""

    token: int
    revision: int
    events: tuple[KeyEvent, ...]
    error: CoreError | None = None

    @property
    def size(self) -> int:
        """Bytes of the keys and values in it."""
        return sum(event.size for event in self.events)


@dataclass(frozen=True, slots=True)
class Noted:
    """Something happened that people may want to read of later."""

    log_event: LogEvent


@dataclass(frozen=True, slots=True)
class Probe:
    """Look for the process of a suspected member, as long as `Core.is_suspected`. Answered by `Evidence`."""

    cluster: str
    task: Task
    lease: int
    """Number of its lease."""
    process: Process
    peer_addresses: tuple[str, ...]
    remote: str
    """Address from which its session came; empty if it is not known."""


Effect = Persist | Reply | Push | WatchPush | Noted | Probe
"""Everything that can be asked of the runtime."""
