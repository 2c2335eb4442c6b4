"""Models of the probes' answers and of the page without scripts.

The resources of the REST interface have their models beside them, in `api/`.
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from dmesh_server.core.model import BarrierStatus, ClusterState, Member


class Status(BaseModel):
    """Answers a probe."""

    status: str = Field(description="`ok`, or the problem")


class DeviceView(BaseModel):
    """A device of a member."""

    type: str = Field(description="CPU, GPU or TPU")
    index: int = Field(description="index among the member's devices of that type")
    description: str = Field(description="name that the hardware reports")


class MemberView(BaseModel):
    """The holder of a task slot."""

    task: str = Field(description="the task slot, e.g. `/job:worker/task:2`")
    job: str = Field(description="name of the job")
    index: int = Field(description="index within the job")
    incarnation: str = Field(description="random number of the process, 16 hexadecimal digits")
    state: str = Field(description="REGISTERED, CONNECTED, LEFT, LOST or FAILED")
    liveness: str = Field(description="of a present member: LIVE, BLOCKED (silent) or STUCK (no progress)")
    reason: str = Field(description="reason for its being LOST, FAILED, BLOCKED or STUCK")
    host: str = Field(description="host name, as the process sees it")
    pid: int = Field(description="process id on that host")
    program: str = Field(description="program that runs")
    dmesh_version: str = Field(description="version of the client's distribution")
    devices: list[DeviceView] = Field(description="its devices")
    peer_addresses: list[str] = Field(description="addresses for its peers")
    last_seen_age: float = Field(description="seconds since the server last heard of it")
    registered_age: float = Field(description="seconds since it registered")


class BarrierView(BaseModel):
    """A barrier under way."""

    name: str = Field(description="its name")
    instance: int = Field(description="number of this use of the name, from 0")
    arrived: list[str] = Field(description="tasks that have arrived, in order of arrival")
    missing: list[str] = Field(description="tasks that are missing")
    age: float = Field(description="seconds since the first arrival")
    remaining: float | None = Field(description="seconds until it fails; null for never")


class ClusterView(BaseModel):
    """A cluster."""

    name: str = Field(description="its name")
    incarnation: str = Field(description="random number of this generation of it, 16 hexadecimal digits")
    epoch: int = Field(description="grows with every change of membership")
    jobs: dict[str, int] = Field(description="number of tasks of each job")
    members: list[MemberView] = Field(description="holders of task slots, sorted by task")
    vacant: list[str] = Field(description="task slots never taken so far")
    barriers: list[BarrierView] = Field(description="barriers under way, oldest first")


class ClusterList(BaseModel):
    """All clusters of the server."""

    server_incarnation: str = Field(
        description="random number of this start of the server, 16 hexadecimal digits"
    )
    clusters: list[ClusterView] = Field(description="sorted by name")


def view_cluster(state: ClusterState, now: float) -> ClusterView:
    """Shows a cluster as of `now`."""
    return ClusterView(
        name=state.name,
        incarnation=f"{state.incarnation:016x}",
        epoch=state.epoch,
        jobs={job.name: len(job.addresses) for job in state.jobs},
        members=[_view_member(member, now) for member in state.members],
        vacant=[str(task) for task in state.vacant],
        barriers=[_view_barrier(barrier, now) for barrier in state.barriers],
    )


def _view_member(member: Member, now: float) -> MemberView:
    return MemberView(
        task=str(member.task),
        job=member.task.job,
        index=member.task.index,
        incarnation=f"{member.incarnation:016x}",
        state=member.state.name,
        liveness=member.liveness.name,
        reason=member.reason,
        host=member.process.host,
        pid=member.process.pid,
        program=member.process.program,
        dmesh_version=member.process.dmesh_version,
        devices=[DeviceView(type=d.type, index=d.index, description=d.description) for d in member.devices],
        peer_addresses=list(member.peer_addresses),
        last_seen_age=_age(now, member.last_seen_at),
        registered_age=_age(now, member.registered_at),
    )


def _view_barrier(barrier: BarrierStatus, now: float) -> BarrierView:
    return BarrierView(
        name=barrier.name,
        instance=barrier.instance,
        arrived=[str(task) for task in barrier.arrived],
        missing=[str(task) for task in barrier.missing],
        age=_age(now, barrier.started_at),
        remaining=None if barrier.deadline is None else max(0.0, round(barrier.deadline - now, 3)),
    )


def _age(now: float, then: float) -> float:
    return max(0.0, round(now - then, 3))
