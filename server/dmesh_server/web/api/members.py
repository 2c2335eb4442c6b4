"""Members: the holders of a cluster's task slots, and their states. Operators may evict one."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.config import JsonDict

from dmesh_server.core.events import Evict
from dmesh_server.core.model import Activity, Caller, Member, Task
from dmesh_server.core.views import CONDITIONS, condition_of
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import (
    HEX,
    TASK,
    TEXT,
    ClusterName,
    JobName,
    Limit,
    Operation,
    TaskIndex,
    age,
    answer,
    asker,
    hexadecimal,
    read_task,
    refusals,
)
from dmesh_server.web.api.operations import operate
from dmesh_server.web.schemas import DeviceView

Condition = Annotated[str, StringConstraints(pattern=f"^({'|'.join(CONDITIONS)})$")]

_EXAMPLE: JsonDict = {
    "task": "/job:worker/task:2", "job": "worker", "index": 2, "incarnation": "00000000000000ff",
    "condition": "LOST", "state": "LOST", "liveness": "LIVE",
    "reason": "its connection closed without a goodbye", "cause": "PROCESS_GONE", "code": 0,
    "host": "node7", "boot_id": "3f2a9c1e", "pid": 4711, "program": "train.py",
    "dmesh_version": "0.1.0", "devices": {"CPU": 8}, "last_seen_age": 4.2, "registered_age": 310.5,
}  # fmt: skip


class MemberRow(BaseModel):
    """The holder of a task slot."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    task: str = Field(description="the task slot, e.g. `/job:worker/task:2`")
    job: str = Field(description="name of the job")
    index: int = Field(description="index within the job")
    incarnation: str = Field(
        description="random number of the process, 16 hexadecimal digits; zeros for a vacant slot"
    )
    condition: str = Field(
        description="FAILED, LOST, STUCK, BLOCKED, REGISTERED, CONNECTED or LEFT; VACANT for a free task slot"
    )
    state: str = Field(description="REGISTERED, CONNECTED, LEFT, LOST or FAILED")
    liveness: str = Field(description="of a present member: LIVE, BLOCKED (silent) or STUCK (no progress)")
    reason: str = Field(description="reason for its being LOST, FAILED, BLOCKED or STUCK")
    cause: str = Field(
        description="cause of its departure: NONE, LEFT, EXITED, REPORTED_ERROR, PROCESS_GONE, DISCONNECTED, "
        "SILENT, NOT_BACK or EVICTED"
    )
    code: int = Field(description="code with which it reported an error of its own; 0 for none")
    host: str = Field(description="host name, as the process sees it")
    boot_id: str = Field(
        description="identity of the running kernel, which tells machines of one name apart; empty if unknown"
    )
    pid: int = Field(description="process id on that host")
    program: str = Field(description="program that runs")
    dmesh_version: str = Field(description="version of the client's distribution")
    devices: dict[str, int] = Field(description="number of its devices by type")
    last_seen_age: float = Field(description="seconds since the server last heard of it")
    registered_age: float = Field(description="seconds since it registered")


class MemberPage(BaseModel):
    """Some members of a cluster."""

    cluster: str = Field(description="name of the cluster")
    epoch: int = Field(description="grows with every change of membership")
    lease: float = Field(description="silence after which a member is blocked or lost, seconds")
    heartbeat_interval: float = Field(description="interval between a member's heartbeats, seconds")
    members: list[MemberRow] = Field(description="sorted by task")
    next: str | None = Field(description="`after` of the next page; null: this is the last one")
    total: int = Field(description="members on all pages")


class ActivityView(BaseModel):
    """Activity of a member's main thread when it was asked."""

    operation: str = Field(description="in words; empty if it was in no operation of dmesh")
    age: float = Field(description="seconds since its last progress, when it was asked")
    stack: list[str] = Field(description="its stack, innermost frame last")


class MemberDetail(MemberRow):
    """A member by itself."""

    python_version: str = Field(description="version of its interpreter")
    started_at: float = Field(description="Unix time at which the process began, by its clock; 0: unknown")
    device_list: list[DeviceView] = Field(description="its devices")
    peer_addresses: list[str] = Field(description="addresses for its peers")
    activity: ActivityView | None = Field(description="its activity when it was asked; only if it is STUCK")


def router(runtime: Runtime) -> APIRouter:
    """Return the resource."""
    routes = APIRouter(tags=["members"])

    @routes.get("/clusters/{cluster}/members", response_model=MemberPage, responses=refusals(404))
    async def list_members(
        cluster: ClusterName,
        limit: Limit = 100,
        after: Annotated[
            str | None, Query(pattern=TASK, description="`next` of the page before; absent for the first")
        ] = None,
        condition: Annotated[
            list[Condition] | None,
            Query(max_length=len(CONDITIONS), description="only members in one of these conditions"),
        ] = None,
    ) -> Response:
        """List the members of a cluster; with conditions, only the matching ones."""
        views, now = runtime.views, runtime.now()
        found = views.members(
            cluster, None if after is None else read_task(after), limit, condition or CONDITIONS
        )
        summary = views.summary(cluster)
        return answer(
            MemberPage(
                cluster=cluster,
                epoch=summary.epoch,
                lease=summary.settings.lease,
                heartbeat_interval=summary.settings.heartbeat_interval,
                members=[MemberRow(**row(member, now)) for member in found.members],
                next=str(found.members[-1].task) if found.more else None,
                total=found.matching,
            )
        )

    @routes.get(
        "/clusters/{cluster}/members/{job}/{index}", response_model=MemberDetail, responses=refusals(404)
    )
    async def show_member(cluster: ClusterName, job: JobName, index: TaskIndex) -> Response:
        """Show the holder of a task slot, with its devices and addresses."""
        member, now = runtime.views.member(cluster, Task(job, index)), runtime.now()
        process = member.process
        return answer(
            MemberDetail(
                **row(member, now),
                python_version=process.python_version,
                started_at=process.started_at_unix_ms / 1000,
                device_list=[
                    DeviceView(type=device.type, index=device.index, description=device.description)
                    for device in member.devices
                ],
                peer_addresses=list(member.peer_addresses),
                activity=view_activity(member.activity),
            )
        )

    @routes.delete(
        "/clusters/{cluster}/members/{job}/{index}", response_model=Operation, responses=refusals(404)
    )
    async def evict_member(
        request: Request,
        cluster: ClusterName,
        job: JobName,
        index: TaskIndex,
        incarnation: Annotated[str, Query(pattern=HEX, description="incarnation of the process to evict")],
        reason: Annotated[
            str, Query(max_length=1000, pattern=TEXT, description="reason, for all to read")
        ] = "",
    ) -> Response:
        """Declare a member failed. Needs the role `admin`.

        Its process is asked to exit and cannot use its slot any more; the others learn of it as of any
        failure. The request names the process, so that a repeated one never hits its successor.
        """
        task, number = Task(job, index), int(incarnation, 16)
        event = Evict(runtime.next_number(), Caller(cluster), asker(request), task, number, reason)
        target = f"{task} (incarnation {incarnation})"
        return answer(await operate(runtime, request, event, "evict_member", target, task))

    return routes


def row(member: Member, now: float) -> dict[str, Any]:
    """Return the fields of a `MemberRow`, as of `now`."""
    process, is_vacant = member.process, member.incarnation == 0
    return {
        "task": str(member.task),
        "job": member.task.job,
        "index": member.task.index,
        "incarnation": hexadecimal(member.incarnation),
        "condition": "VACANT" if is_vacant else condition_of(member),
        "state": member.state.name,
        "liveness": member.liveness.name,
        "reason": member.reason,
        "cause": member.cause.name,
        "code": member.code,
        "host": process.host,
        "boot_id": process.boot_id,
        "pid": process.pid,
        "program": process.program,
        "dmesh_version": process.dmesh_version,
        "devices": dict(Counter(device.type for device in member.devices)),
        "last_seen_age": 0.0 if is_vacant else age(now, member.last_seen_at),
        "registered_age": 0.0 if is_vacant else age(now, member.registered_at),
    }


def view_activity(activity: Activity | None) -> ActivityView | None:
    """Show a member's activity, if it was asked for it."""
    if activity is None:
        return None
    return ActivityView(operation=activity.operation, age=round(activity.age, 3), stack=list(activity.stack))
