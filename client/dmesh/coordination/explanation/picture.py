"""Input of an explanation: the wire's messages, or other objects with the same fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from dmesh.coordination.members import ClusterState, Task


class Call(Protocol):
    """A call, as in `dmesh.v1.CallRecord`."""

    @property
    def sequence(self) -> int:
        """Number of the call in its group; 0 for no call."""

    @property
    def call(self) -> str:
        """Operation, dtype, shape and arguments."""

    @property
    def age_us(self) -> int:
        """Microseconds since the call was made."""

    @property
    def waits_for(self) -> Iterable[int]:
        """Ranks that it waits for."""


class PastCall(Protocol):
    """A call that may have ended long ago, as in `dmesh.v1.CallRecord`."""

    @property
    def group(self) -> int:
        """Id of its group; 0 for barriers."""

    @property
    def sequence(self) -> int:
        """Number of the call in its group."""

    @property
    def call(self) -> str:
        """Operation, dtype, shape and arguments."""


class Group(Protocol):
    """Progress of a member in a group, as in `dmesh.v1.GroupProgress`."""

    @property
    def id(self) -> int:
        """Id of the group, the same on all its members."""

    @property
    def generation(self) -> int:
        """Generation of the group; each numbers its calls anew."""

    @property
    def name(self) -> str:
        """Name for people."""

    @property
    def size(self) -> int:
        """Number of ranks that take part."""

    @property
    def ranks(self) -> Iterable[int]:
        """Ranks that take part; empty for all."""

    @property
    def issued(self) -> int:
        """Number of the last call that was made."""

    @property
    def finished(self) -> int:
        """Number of the last call that is over."""

    @property
    def counted(self) -> int:
        """Number of recent calls that the next two sum up."""

    @property
    def elapsed_us(self) -> int:
        """Microseconds that they took."""

    @property
    def waited_us(self) -> int:
        """Microseconds of these that they spent waiting for others."""

    @property
    def failure(self) -> str:
        """Reason for which no call can be made any more; empty otherwise."""

    @property
    def last(self) -> Call:
        """The call under way, or the last one that is over."""


class Report(Protocol):
    """Report of a member, as in `dmesh.v1.ProgressReport`."""

    @property
    def groups(self) -> Iterable[Group]:
        """Groups in which it has called something."""

    @property
    def recent(self) -> Sequence[PastCall]:
        """Its last calls, oldest first."""

    @property
    def idle_ms(self) -> int:
        """Milliseconds since its program's last progress."""

    @property
    def where(self) -> str:
        """Position of its main thread; empty if unknown."""

    @property
    def operation(self) -> str:
        """Dmesh operation that its main thread is in; empty for none."""


class MemberReport(Protocol):
    """Report of a member and its age, as in `dmesh.v1.MemberProgress`."""

    @property
    def age_ms(self) -> int:
        """Milliseconds since the report was received."""

    @property
    def report(self) -> Report:
        """The report."""


class Picture(Protocol):
    """A cluster at one moment."""

    @property
    def cluster(self) -> str:
        """Name of the cluster."""

    @property
    def state(self) -> ClusterState:
        """Its members, vacant tasks and barriers under way."""

    @property
    def reports(self) -> Mapping[Task, MemberReport]:
        """Latest reports of its members."""
