"""Members' latest progress reports: kept in memory, bounded, and for display only.

Reports come with heartbeats, many thousands in a second on a large server, and are rarely read: they are kept
encoded, and decoded on request. Used on the server's event loop only.
"""

from __future__ import annotations

import math
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
"""Size of all reports together: it fits into one response, and gives each of 20,000 members 2 KiB."""
LOOKED_AT = 90.0
"""Seconds after a read of a cluster in which new reports are decoded in brief on arrival."""
RETENTION = 600.0
"""Seconds that a cluster's reports are kept after the last of its members reported."""

MOST_LINKS = 64
"""Links of one report that are read."""
_GROUPS = 32
_RECENT = 16
_BARRIERS = 16
_MESHES = 16
_RANKS = 256
_WAITED_FOR = 64
_LOOPS = 4
_NAME = 256
_TEXT = 300


class CallState(Enum):
    """State of a call. The values are the wire's."""

    UNKNOWN = 0
    QUEUED = 1
    RUNNING = 2
    WAITING = 3
    DONE = 4
    FAILED = 5

    @property
    def over(self) -> bool:
        """True if the call has ended, with success or failure."""
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
    """State of the call."""
    called_at: float
    """Time of the call, by the server's monotonic clock; late by the report's time on the way."""
    elapsed: float
    """Seconds that it has taken, or took until the report."""
    waited: float | None
    """Seconds of these in which it waited for others; None if unknown."""
    waits_for: tuple[int, ...]
    """Ranks that it waits for."""
    error: str
    """Error it failed with; empty otherwise."""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Progress of a member in one group: with its collectives, or with the transfers of one pair."""

    id: int
    """The same on all members of the group."""
    name: str
    """Name for people."""
    ranks: tuple[int, ...]
    """Ranks that take part, in the group's order; empty for all ranks, or for too many to list."""
    size: int
    """Number of ranks that take part."""
    generation: int
    """Generation of the group; each numbers its calls from the start."""
    issued: int
    """Number of the last call that was made; 0 for none."""
    finished: int
    """Number of the last call that is over."""
    last: CallReport | None
    """The call under way, or the last one that is over."""
    counted: int
    """Number of recent calls that `elapsed` and `waited` sum up."""
    elapsed: float
    """Seconds that they have taken."""
    waited: float
    """Seconds of these in which they waited for others, as far as that is known."""
    failure: str
    """Reason for which the group is unusable; empty otherwise."""


class CallBrief(NamedTuple):
    """A call in short; all zeros and empty for none."""

    sequence: int = 0
    call: str = ""
    age_us: int = 0
    """Microseconds since it was called, when the report was made."""
    pending: bool = False
    """True while the call is under way."""
    waits_for: tuple[int, ...] = ()
    """Ranks that it waits for."""


class GroupBrief(NamedTuple):
    """Progress of a member in one group, reduced to the fields that all members are compared by."""

    id: int
    generation: int
    name: str
    size: int
    ranks: tuple[int, ...]
    issued: int
    finished: int
    counted: int
    """Number of recent calls that the next two sum up."""
    elapsed_us: int
    waited_us: int
    failure: str
    last: CallBrief
    """The call under way, or the last one that is over."""


@dataclass(frozen=True, slots=True)
class BarrierWaitReport:
    """A barrier at which a member waits."""

    name: str
    """Its name."""
    instance: int
    """Number of this use of the name; -1 if the member does not know it."""
    since: float
    """Since when, by the server's monotonic clock."""


class LoopReport(NamedTuple):
    """Loop of a member's program, as the program reports it."""

    name: str
    """Its name; may be empty."""
    unit: str
    """Unit of the steps, in the plural."""
    done: int
    """Steps that are done."""
    total: int
    """Steps in all; 0 if unknown."""
    rate: float
    """Steps per second of late; 0.0 if unknown."""
    elapsed: float
    """Seconds since it began, or that it took."""
    over: bool
    """True after its end."""


@dataclass(frozen=True, slots=True)
class Report:
    """Content of a progress report. All texts are the member's own: shown as text, never trusted."""

    where: str
    """Position of its main thread in the user's program, `FILE:LINE in FUNCTION`; empty if unknown."""
    operation: str
    """dmesh operation that its main thread is in; empty for none."""
    progressed_at: float
    """Time of its last progress, by the server's monotonic clock."""
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
    """Time of the report's arrival, by the server's monotonic clock."""
    encoded: bytes
    """The report as it came, a `dmesh.v1.ProgressReport`."""
    _brief: tuple[GroupBrief, ...] | None = None

    def message(self) -> pb.ProgressReport | None:
        """Decode the report without cutting it to the bounds for display; None if it is malformed."""
        try:
            return pb.ProgressReport.FromString(self.encoded)
        except DecodeError:  # a member may send any bytes
            return None

    def read(self, *, recent: bool = True) -> Report | None:
        """Return the report; None if it is malformed.

        Args:
            recent: True to include its latest calls, which are most of it.
        """
        message = self.message()
        return None if message is None else _report(message, self.received_at, recent)

    def brief(self) -> tuple[GroupBrief, ...] | None:
        """Return its groups in brief; None if the report is malformed. Decodes once and keeps the result."""
        if self._brief is None:
            message = self.message()
            if message is None:
                return None
            self._brief = tuple(_brief(group) for group in message.groups[:_GROUPS])
        return self._brief


class ProgressBook:
    """Keeps the last report of each member."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin empty.

        Args:
            clock: The server's monotonic seconds.
        """
        self._clock = clock
        self._clusters: OrderedDict[str, _Kept] = OrderedDict()  # in order of their latest report
        self._size = 0
        self._dropping = False

    def note(self, caller: Caller, encoded: bytes) -> None:
        """Keep a report in place of the member's last one, if there is room for it."""
        if caller.task is None or len(encoded) > MOST_BYTES:
            return
        now = self._clock()
        self._forget(now)
        kept = self._clusters.get(caller.cluster)
        if kept is None:
            kept = self._clusters[caller.cluster] = _Kept({})
        self._clusters.move_to_end(caller.cluster)
        kept.reported_at = now
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
        """Return the last report of each member of a cluster, sorted by task; departed ones included."""
        self._forget(self._clock())
        kept = self._clusters.get(cluster)
        return () if kept is None else tuple(sorted(kept.members.values(), key=_slot_order))

    def look(self, cluster: str) -> tuple[MemberProgress, ...]:
        """Return the same for readers of the briefs that will come back.

        For a while, new reports are decoded in brief on arrival: decoding a thousand at once would hold the
        loop up.
        """
        found = self.members(cluster)
        if found:
            self._clusters[cluster].looked_at = self._clock()
        return found

    def _forget(self, now: float) -> None:
        while self._clusters:
            name, kept = next(iter(self._clusters.items()))
            if now - kept.reported_at <= RETENTION:
                return
            del self._clusters[name]
            self._size -= sum(len(member.encoded) for member in kept.members.values())


@dataclass(slots=True)
class _Kept:
    members: dict[Task, MemberProgress]
    reported_at: float = 0.0
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
    """Return the meshes of a report, without reading the rest of it."""
    return tuple(mesh for mesh in map(read_mesh, message.meshes[:_MESHES]) if mesh is not None)


def loops_of(message: pb.ProgressReport) -> tuple[LoopReport, ...]:
    """Return the loops of a report, without reading the rest of it."""
    return tuple(
        LoopReport(
            loop.name[:_NAME],
            loop.unit[:_NAME] or "steps",
            max(loop.done, 0),
            max(loop.total, 0),
            loop.rate if 0.0 <= loop.rate < math.inf else 0.0,
            _milliseconds(loop.elapsed_ms),
            loop.over,
        )
        for loop in message.loops[:_LOOPS]
    )


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
        message.issued, message.finished, message.counted, message.elapsed_us, message.waited_us,
        message.failure[:_TEXT], call,
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
