"""Barriers under way, with their arrived and missing tasks. Operators may cancel one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import StopBarrier
from dmesh_server.core.messages import quote
from dmesh_server.core.model import Caller, Member
from dmesh_server.core.views import BarrierView, condition_of
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import (
    TEXT,
    ClusterName,
    Operation,
    age,
    answer,
    asker,
    refusals,
)
from dmesh_server.web.api.operations import operate


class MissingView(BaseModel):
    """Missing participant of a barrier."""

    task: str = Field(description="the task slot")
    condition: str = Field(description="condition of its holder; VACANT for a vacant slot")
    host: str = Field(description="host of its holder")
    boot_id: str = Field(description="identity of the host's running kernel; empty if unknown")
    pid: int = Field(description="process id there")
    last_seen_age: float | None = Field(
        description="seconds since its last sign of life; null if there was none"
    )
    reason: str = Field(description="reason for its condition, if it has a problem")


class BarrierRow(BaseModel):
    """A barrier under way."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "step", "instance": 41, "participants": 8, "arrived": 7, "missing_count": 1,
                    "missing": [
                        {
                            "task": "/job:worker/task:2", "condition": "STUCK", "host": "node7",
                            "boot_id": "3f2a9c1e", "pid": 4711, "last_seen_age": 0.4,
                            "reason": "7 members have waited for it for 61.2 s",
                        }
                    ],
                    "age": 61.4, "latest_arrival_age": 61.2, "remaining": None,
                }
            ]
        }
    )  # fmt: skip

    name: str = Field(description="its name")
    instance: int = Field(description="number of this use of the name, from 0")
    participants: int = Field(description="number of participants")
    arrived: int = Field(description="number of tasks that have arrived")
    missing_count: int = Field(description="number of tasks that are missing")
    missing: list[MissingView] = Field(description="the first missing tasks, sorted")
    age: float = Field(description="seconds since the first arrival")
    latest_arrival_age: float = Field(description="seconds since the latest arrival")
    remaining: float | None = Field(description="seconds until it fails; null for never")


class BarrierPage(BaseModel):
    """Some barriers of a cluster."""

    cluster: str = Field(description="name of the cluster")
    barriers: list[BarrierRow] = Field(description="the oldest first")
    next: int | None = Field(description="`after` of the next page; null: this is the last one")
    total: int = Field(description="number on all pages")


def router(runtime: Runtime) -> APIRouter:
    """Return the resource."""
    routes = APIRouter(tags=["barriers"])

    @routes.get("/clusters/{cluster}/barriers", response_model=BarrierPage, responses=refusals(404))
    async def list_barriers(
        cluster: ClusterName,
        limit: Annotated[int, Query(ge=1, le=100, description="most items of the answer")] = 20,
        after: Annotated[
            int, Query(ge=0, lt=1 << 31, description="`next` of the page before; 0 for the first")
        ] = 0,
        missing: Annotated[int, Query(ge=0, le=100, description="most missing tasks of each one")] = 20,
    ) -> Response:
        """List the barriers under way in a cluster, with their missing tasks."""
        found, total = runtime.views.barriers(cluster, after, limit, missing)
        now, end = runtime.now(), after + len(found)
        return answer(
            BarrierPage(
                cluster=cluster,
                barriers=[_view(barrier, now) for barrier in found],
                next=end if found and end < total else None,
                total=total,
            )
        )

    @routes.delete("/clusters/{cluster}/barriers", response_model=Operation, responses=refusals(404, 409))
    async def cancel_barrier(
        request: Request,
        cluster: ClusterName,
        name: Annotated[str, Query(min_length=1, max_length=256, pattern=TEXT, description="its name")],
        instance: Annotated[int, Query(ge=0, lt=1 << 63, description="number of the use of the name")],
    ) -> Response:
        """Fail a barrier for all its participants. Needs the role `admin`.

        Names the instance, so that a repeated request never hits the next one.
        """
        if not name.isprintable():
            message = f"no barrier is called {quote(name)}: their names are printable"
            raise CoreError(ErrorKind.BARRIER_MISMATCH, message)
        event = StopBarrier(runtime.next_number(), Caller(cluster), asker(request), name, instance)
        return answer(
            await operate(runtime, request, event, "cancel_barrier", f"{name} (instance {instance})")
        )

    return routes


def _view(barrier: BarrierView, now: float) -> BarrierRow:
    return BarrierRow(
        name=barrier.name,
        instance=barrier.instance,
        participants=barrier.participants,
        arrived=barrier.arrived,
        missing_count=barrier.missing_count,
        missing=[_view_missing(member, now) for member in barrier.missing],
        age=age(now, barrier.started_at),
        latest_arrival_age=age(now, barrier.latest_at),
        remaining=None if barrier.deadline is None else age(barrier.deadline, now),
    )


def _view_missing(member: Member, now: float) -> MissingView:
    vacant = member.incarnation == 0
    return MissingView(
        task=str(member.task),
        condition="VACANT" if vacant else condition_of(member),
        host=member.process.host,
        boot_id=member.process.boot_id,
        pid=member.process.pid,
        last_seen_age=None if vacant else age(now, member.last_seen_at),
        reason=member.reason,
    )
