"""What members last said of their own progress: kept in memory, bounded, and never decided by.

Reports come with heartbeats, many thousands in a second on a large server, and are looked at seldom: they are
kept as they came, and read when somebody asks. Used on the server's event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from google.protobuf.message import DecodeError

from dmesh.v1 import progress_pb2 as pb
from dmesh_server.core.model import Caller, Task
from dmesh_server.mesh_reports import MeshReport, read_mesh
from dmesh_server.telemetry import logs

MOST_BYTES = 16 << 10
"""Size of one report; larger ones are dropped."""
MOST_BYTES_IN_ALL = 48 << 20
"""Size of all reports together: what fits into one response, and gives each of 20,000 members 2 KiB."""
LOOKED_AT = 90.0
"""Seconds after a look at a cluster for which reports are read in brief as they come."""
RETENTION = 600.0
"""Seconds for which the reports of a cluster are kept in which nobody reports any more."""

_GROUPS = 32
_RECENT = 16
_BARRIERS = 16
_MESHES = 16
_RANKS = 256
_WAITED_FOR = 64
_NAME = 256
_TEXT = 300


class CallState(Enum):
    """How far a call has come. The values are the wire's."""

    UNKNOWN = 0
    QUEUED = 1
    RUNNING = 2
    WAITING = 3
    DONE = 4
    FAILED = 5

    @property
    def over(self) -> bool:
        """Whether it is over, well or badly."""
        return self in (CallState.DONE, CallState.FAILED)


class CallReport(NamedTuple):
    """One call of a collective, a transfer, or a barrier of the coordination service."""

    group: int
    """Id of its group; 0 for barriers of the coordination service."""
    sequence: int
    """Its number in the group; of a barrier, the instance."""
    call: str
    """Operation, dtype, shape and arguments."""
    nbytes: int
    """Bytes of the larger of input and output."""
    state: CallState
    """How far it has come."""
    called_at: float
    """When it was called, by the server's monotonic clock; late by the time that the report took to come."""
    elapsed: float
    """Seconds that it has taken, or took until the report."""
    waited: float | None
    """Seconds of these in which it waited for others; None if unknown."""
    waits_for: tuple[int, ...]
    """Ranks that it waits for."""
    error: str
    """What it failed with; empty otherwise."""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """How far a member has come in one group: with its collectives, or with the transfers of one pair."""

    id: int
    """The same on all members of the group."""
    name: str
    """As people call it."""
    ranks: tuple[int, ...]
    """Who takes part, in the group's order; empty if these are all, or too many to be told of."""
    size: int
    """How many take part."""
    generation: int
    """Sequence numbers of one generation are not those of another."""
    issued: int
    """Number of the last call that was made; 0 for none."""
    finished: int
    """Number of the last call that is over."""
    last: CallReport | None
    """The call under way, or the last one that is over."""
    counted: int
    """How many recent calls the next two are the sums of."""
    elapsed: float
    """Seconds that they have taken."""
    waited: float
    """Seconds of these in which they waited for others, as far as that is known."""
    failure: str
    """Why no call can be made any more; empty otherwise."""


class CallBrief(NamedTuple):
    """A call in short; all zeros and empty for none."""

    sequence: int = 0
    call: str = ""
    age_us: int = 0
    """Microseconds since it was called, when the report was made."""
    pending: bool = False
    """Whether it is under way."""
    waits_for: tuple[int, ...] = ()
    """Ranks that it waits for."""


class GroupBrief(NamedTuple):
    """How far a member has come in one group, in short: what it takes to compare it with all others."""

    id: int
    generation: int
    name: str
    size: int
    ranks: tuple[int, ...]
    issued: int
    finished: int
    failure: str
    last: CallBrief
    """The call under way, or the last one that is over."""


@dataclass(frozen=True, slots=True)
class BarrierWaitReport:
    """A barrier at which a member waits."""

    name: str
    """Its name."""
    instance: int
    """Which use of the name; -1 if the member does not know."""
    since: float
    """Since when, by the server's monotonic clock."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a member said. All texts are its own words: to be shown as text, and never trusted."""

    where: str
    """Where its main thread stands in the user's program, `FILE:LINE in FUNCTION`; empty if unknown."""
    operation: str
    """In what operation of dmesh its main thread is; empty for none."""
    progressed_at: float
    """When it got on last, by the server's monotonic clock."""
    barriers: tuple[BarrierWaitReport, ...]
    """Barriers at which it waits."""
    groups: tuple[GroupReport, ...]
    """Groups in which it has called something."""
    recent: tuple[CallReport, ...]
    """Its last calls and barriers in any group, oldest first."""
    meshes: tuple[MeshReport, ...]
    """Meshes that its program has made."""


@dataclass(slots=True, eq=False)
class MemberProgress:
    """The last report of a member. It is as it came; the rest is read when it is asked for."""

    task: Task
    """Its task slot."""
    incarnation: int
    """Of the process that reported: another one may hold the task slot by now."""
    received_at: float
    """When the report came, by the server's monotonic clock."""
    encoded: bytes
    """The report as it came, a `dmesh.v1.ProgressReport`."""
    _brief: tuple[GroupBrief, ...] | None = None

    def message(self) -> pb.ProgressReport | None:
        """Returns the report as on the wire, not cut to what may be shown; None if what came is none."""
        try:
            return pb.ProgressReport.FromString(self.encoded)
        except DecodeError:  # a member may send what it likes
            return None

    def read(self, *, recent: bool = True) -> Report | None:
        """Returns the report; None if what came is none.

        Args:
            recent: Whether its last calls are wanted, too: they are most of it.
        """
        message = self.message()
        return None if message is None else _report(message, self.received_at, recent)

    def brief(self) -> tuple[GroupBrief, ...] | None:
        """Returns how far it is in its groups, in short; None if what came is no report. It is read once."""
        if self._brief is None:
            message = self.message()
            if message is None:
                return None
            self._brief = tuple(_brief(group) for group in message.groups[:_GROUPS])
        return self._brief


class ProgressBook:
    """Keeps the last report of each member."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begins empty.

        Args:
            clock: The server's monotonic seconds.
        """
        self._clock = clock
        self._clusters: OrderedDict[str, _Kept] = OrderedDict()  # the one that was told of last comes last
        self._size = 0
        self._dropping = False

    def note(self, caller: Caller, encoded: bytes) -> None:
        """Keeps a report in place of the member's last one, if there is room for it."""
        if caller.task is None or len(encoded) > MOST_BYTES:
            return
        now = self._clock()
        self._forget(now)
        kept = self._clusters.get(caller.cluster)
        if kept is None:
            kept = self._clusters[caller.cluster] = _Kept({})
        self._clusters.move_to_end(caller.cluster)
        kept.told_at = now
        former = kept.members.pop(caller.task, None)
        self._size -= 0 if former is None else len(former.encoded)
        full = self._size + len(encoded) > MOST_BYTES_IN_ALL
        if full != self._dropping:
            self._dropping = full
            if full:
                logs.warning("progress_not_kept", reason="the reports of all members take too much memory")
        if not full:
            said = kept.members[caller.task] = MemberProgress(caller.task, caller.incarnation, now, encoded)
            self._size += len(encoded)
            if now < kept.looked_at + LOOKED_AT:
                said.brief()

    def members(self, cluster: str) -> tuple[MemberProgress, ...]:
        """Returns the last report of each member of a cluster, sorted by task; departed ones included."""
        self._forget(self._clock())
        kept = self._clusters.get(cluster)
        return () if kept is None else tuple(sorted(kept.members.values(), key=_slot_order))

    def look(self, cluster: str) -> tuple[MemberProgress, ...]:
        """Returns the same to who reads the briefs, and will do so again.

        For a while reports are read in brief as they come: one by one, for a thousand are much at once.
        """
        found = self.members(cluster)
        if found:
            self._clusters[cluster].looked_at = self._clock()
        return found

    def _forget(self, now: float) -> None:
        while self._clusters:
            name, kept = next(iter(self._clusters.items()))
            if now - kept.told_at <= RETENTION:
                return
            del self._clusters[name]
            self._size -= sum(len(member.encoded) for member in kept.members.values())


@dataclass(slots=True)
class _Kept:
    members: dict[Task, MemberProgress]
    told_at: float = 0.0
    looked_at: float = float("-inf")


def _slot_order(member: MemberProgress) -> tuple[str, int]:
    return member.task.job, member.task.index


def _report(message: pb.ProgressReport, at: float, recent: bool) -> Report:
    return Report(
        where=message.where[:_TEXT],
        operation=message.operation[:_TEXT],
        progressed_at=at - _milliseconds(message.idle_ms),
        barriers=tuple(
            BarrierWaitReport(barrier.name[:_NAME], barrier.instance, at - _milliseconds(barrier.age_ms))
            for barrier in message.barriers[:_BARRIERS]
        ),
        groups=tuple(_group(group, at) for group in message.groups[:_GROUPS]),
        recent=tuple(_call(call, at) for call in message.recent[:_RECENT]) if recent else (),
        meshes=meshes_of(message),
    )


def meshes_of(message: pb.ProgressReport) -> tuple[MeshReport, ...]:
    """Returns the meshes of a report, without reading the rest of it."""
    return tuple(mesh for mesh in map(read_mesh, message.meshes[:_MESHES]) if mesh is not None)


def _brief(message: pb.GroupProgress) -> GroupBrief:
    call = _NO_CALL
    if message.HasField("last"):
        last = message.last
        pending = not _STATES.get(last.state, CallState.UNKNOWN).over
        call = CallBrief(
            last.sequence, last.call[:_TEXT], last.age_us, pending, _ranks(last.waits_for, _WAITED_FOR)
        )
    return GroupBrief(
        message.id, message.generation, message.name[:_NAME], message.size, _ranks(message.ranks, _RANKS),
        message.issued, message.finished, message.failure[:_TEXT], call,
    )  # fmt: skip


def _group(message: pb.GroupProgress, at: float) -> GroupReport:
    return GroupReport(
        id=message.id,
        name=message.name[:_NAME],
        ranks=_ranks(message.ranks, _RANKS),
        size=message.size,
        generation=message.generation,
        issued=message.issued,
        finished=message.finished,
        last=_call(message.last, at) if message.HasField("last") else None,
        counted=message.counted,
        elapsed=_microseconds(message.elapsed_us),
        waited=_microseconds(message.waited_us),
        failure=message.failure[:_TEXT],
    )


def _call(message: pb.CallRecord, at: float) -> CallReport:
    return CallReport(
        group=message.group,
        sequence=message.sequence,
        call=message.call[:_TEXT],
        nbytes=message.nbytes,
        state=_STATES.get(message.state, CallState.UNKNOWN),
        called_at=at - _microseconds(message.age_us),
        elapsed=_microseconds(message.elapsed_us),
        waited=None if message.waited_us < 0 else _microseconds(message.waited_us),
        waits_for=_ranks(message.waits_for, _WAITED_FOR),
        error=message.error[:_TEXT],
    )


def _ranks(ranks: Iterable[int], most: int) -> tuple[int, ...]:
    found = tuple(ranks)
    return found if len(found) <= most else found[:most]


def _milliseconds(age: int) -> float:
    return max(age, 0) / 1e3


def _microseconds(age: int) -> float:
    return max(age, 0) / 1e6


_STATES = {state.value: state for state in CallState}
_NO_CALL = CallBrief()
