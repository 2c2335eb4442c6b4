"""Clusters: a list of all, in numbers, and each by itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import ClusterSettings
from dmesh_server.core.views import BarrierView, Summary
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import (
    HEX,
    NAME,
    TEXT,
    ClusterName,
    Limit,
    Operation,
    age,
    answer,
    hexadecimal,
    refusals,
)
from dmesh_server.web.api.operations import end
from dmesh_server.web.gate import covers

_MOST_VACANT = 100


class WaitingView(BaseModel):
    """The barrier that a cluster has waited in for the longest time."""

    name: str = Field(description="its name")
    instance: int = Field(description="number of this use of the name, from 0")
    arrived: int = Field(description="number of tasks that have arrived")
    participants: int = Field(description="number of participants")
    age: float = Field(description="seconds since the first arrival")


class ClusterSummary(BaseModel):
    """A cluster in numbers."""

    name: str = Field(description="its name")
    incarnation: str = Field(description="random number of this generation of it, 16 hexadecimal digits")
    epoch: int = Field(description="grows with every change of membership")
    ended: bool = Field(description="all its members have departed")
    tasks: int = Field(description="number of its tasks")
    members: dict[str, int] = Field(
        description="number of members that are FAILED, LOST, STUCK, BLOCKED, REGISTERED, CONNECTED, LEFT; "
        "zeros are left out"
    )
    vacant: int = Field(description="task slots never taken so far")
    barriers: int = Field(description="barriers under way")
    waits_in: WaitingView | None = Field(description="the oldest of them; null if there are none")
    keys: int = Field(description="keys in its key-value store")
    key_bytes: int = Field(description="bytes of keys and values")
    revision: int = Field(description="revision of the latest change of a key")
    waiters: int = Field(description="blocked reads and watches of keys")


class ClusterPage(BaseModel):
    """Some clusters."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "server_incarnation": "9f3c0a51d2e47b86",
                    "clusters": [
                        {
                            "name": "train", "incarnation": "00c2b1f8a9d3e675", "epoch": 9, "ended": False,
                            "tasks": 8, "members": {"LOST": 1, "CONNECTED": 7}, "vacant": 0, "barriers": 1,
                            "waits_in": {
                                "name": "step", "instance": 41, "arrived": 6, "participants": 8, "age": 3.25,
                            },
                            "keys": 12, "key_bytes": 4096, "revision": 57, "waiters": 2,
                        }
                    ],
                    "next": None,
                    "total": 1,
                }
            ]
        }
    )  # fmt: skip

    server_incarnation: str = Field(
        description="random number of this start of the server, 16 hexadecimal digits"
    )
    clusters: list[ClusterSummary] = Field(description="sorted by name")
    next: str | None = Field(description="`after` of the next page; null: this is the last one")
    total: int = Field(description="number on all pages")


class JobView(BaseModel):
    """A job of a cluster."""

    name: str = Field(description="its name")
    tasks: int = Field(description="number of its tasks")


class SettingsView(BaseModel):
    """Settings of a cluster."""

    restart_policy: str = Field(description="FAIL_FAST or REJOIN")
    heartbeat_interval: float = Field(description="interval between a client's heartbeats, seconds")
    lease: float = Field(description="silence after which a member is blocked or lost, seconds")
    stuck_after: float | None = Field(
        description="seconds for which others wait for a member before it is asked about it; null: never"
    )


class ClusterDetail(ClusterSummary):
    """A cluster by itself."""

    jobs: list[JobView] = Field(description="its jobs")
    settings: SettingsView = Field(description="its settings")
    vacant_tasks: list[str] = Field(
        description=f"the first {_MOST_VACANT} task slots that no process has taken yet"
    )


def router(runtime: Runtime) -> APIRouter:
    """Return the resource."""
    routes = APIRouter(tags=["clusters"])

    @routes.get("/clusters", response_model=ClusterPage, responses=refusals())
    async def list_clusters(
        request: Request,
        limit: Limit = 100,
        after: Annotated[
            str | None, Query(pattern=NAME, description="`next` of the page before; absent for the first")
        ] = None,
    ) -> Response:
        """List the clusters of this server, in numbers."""
        views, now = runtime.views, runtime.now()
        names = [name for name in views.names() if covers(request.scope, name)]
        found = [name for name in names if after is None or name > after]
        return answer(
            ClusterPage(
                server_incarnation=hexadecimal(runtime.server_incarnation),
                clusters=[view_summary(views.summary(name), now) for name in found[:limit]],
                next=found[limit - 1] if len(found) > limit else None,
                total=len(names),
            )
        )

    @routes.get("/clusters/{cluster}", response_model=ClusterDetail, responses=refusals(404))
    async def show_cluster(cluster: ClusterName) -> Response:
        """Show one cluster: numbers, jobs, settings, and vacant task slots."""
        views = runtime.views
        summary = views.summary(cluster)
        return answer(
            ClusterDetail(
                **view_summary(summary, runtime.now()).model_dump(),
                jobs=[JobView(name=job.name, tasks=len(job.addresses)) for job in summary.jobs],
                settings=_view_settings(summary.settings),
                vacant_tasks=[str(task) for task in views.vacant(cluster, _MOST_VACANT)],
            )
        )

    @routes.delete("/clusters/{cluster}", response_model=Operation, responses=refusals(404, 409))
    async def end_cluster(
        request: Request,
        cluster: ClusterName,
        incarnation: Annotated[str, Query(pattern=HEX, description="generation of the cluster to end")],
        reason: Annotated[
            str, Query(max_length=1000, pattern=TEXT, description="reason, for all to read")
        ] = "",
    ) -> Response:
        """End a cluster: evict all its members. Needs the role `admin`.

        The request names the generation, so that a repeated one never hits its successor.
        """
        current = hexadecimal(runtime.views.summary(cluster).incarnation)
        if current != incarnation:
            raise CoreError(
                ErrorKind.CLUSTER_ENDING,
                f"cluster {cluster!r} is not of generation {incarnation} any more: it is of {current}. Look "
                "at it again before you end it.",
            )
        return answer(await end(runtime, request, cluster, f"{cluster} (generation {incarnation})", reason))

    return routes


def view_summary(summary: Summary, now: float) -> ClusterSummary:
    """Show a cluster in numbers, as of `now`."""
    return ClusterSummary(
        name=summary.name,
        incarnation=hexadecimal(summary.incarnation),
        epoch=summary.epoch,
        ended=summary.ended,
        tasks=sum(len(job.addresses) for job in summary.jobs),
        members=dict(summary.members),
        vacant=summary.vacant,
        barriers=summary.barriers,
        waits_in=None if summary.oldest is None else _view_waiting(summary.oldest, now),
        keys=summary.keys,
        key_bytes=summary.key_bytes,
        revision=summary.revision,
        waiters=summary.waiters,
    )


def _view_waiting(barrier: BarrierView, now: float) -> WaitingView:
    return WaitingView(
        name=barrier.name,
        instance=barrier.instance,
        arrived=barrier.arrived,
        participants=barrier.participants,
        age=age(now, barrier.started_at),
    )


def _view_settings(settings: ClusterSettings) -> SettingsView:
    return SettingsView(
        restart_policy=settings.restart_policy.name if settings.restart_policy else "FAIL_FAST",
        heartbeat_interval=settings.heartbeat_interval,
        lease=settings.lease,
        stuck_after=settings.stuck_after if settings.stuck_after > 0 else None,
    )
