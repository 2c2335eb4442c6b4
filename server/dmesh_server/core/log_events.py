"""Log events of clusters, for people to read later: plain values, each released once, when durable."""

from __future__ import annotations

from dataclasses import dataclass

from dmesh_server.core.model import Member, Task

MOST_NAMED = 32
"""Missing tasks that the end of a barrier names."""


@dataclass(frozen=True, slots=True)
class ClusterFormed:
    """Beginning of a cluster's generation, with its first registration."""

    cluster: str
    incarnation: int
    tasks: int
    """Task slots that it has."""


@dataclass(frozen=True, slots=True)
class ClusterEnded:
    """The last member of a cluster departed."""

    cluster: str
    epoch: int


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """Registration of a process in a task slot."""

    cluster: str
    member: Member
    """Without devices and addresses."""
    epoch: int
    rejoined: bool
    """The task slot had an earlier holder in this generation of the cluster."""


@dataclass(frozen=True, slots=True)
class MemberDeparted:
    """A member left, was lost or failed; its state says which."""

    cluster: str
    member: Member
    """Without devices and addresses."""
    epoch: int


@dataclass(frozen=True, slots=True)
class LivenessReported:
    """A member became blocked or stuck, or is live again."""

    cluster: str
    member: Member
    """Without devices and addresses."""


@dataclass(frozen=True, slots=True)
class BarrierEnded:
    """A barrier passed or failed."""

    cluster: str
    name: str
    instance: int
    participants: int
    """Number of participants."""
    missing: tuple[Task, ...]
    """The first tasks that had not arrived."""
    missing_count: int
    waited: float
    """Seconds since the first arrival."""
    error: str
    """Kind of its error; empty if it passed."""
    reason: str
    """The error's message, cut to a bounded length."""


LogEvent = ClusterFormed | ClusterEnded | MemberJoined | MemberDeparted | LivenessReported | BarrierEnded
"""Events for the log."""
