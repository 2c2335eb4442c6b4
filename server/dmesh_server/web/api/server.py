"""The server itself: its identity, settings and their origins, and the latency of its disk and event loop."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh._version import __version__
from dmesh_server.runtime import Runtime
from dmesh_server.settings import Setting
from dmesh_server.telemetry.measures import Histogram
from dmesh_server.web.api.answers import answer, hexadecimal, refusals
from dmesh_server.web.api.event_views import cursor_of


class SettingView(BaseModel):
    """A setting."""

    name: str = Field(description="its name")
    value: str = Field(description="its value; never a secret")
    origin: str = Field(description="origin: a flag, a variable, a file, or `default`")


class DurationsView(BaseModel):
    """Statistics of measured durations."""

    count: int = Field(description="number of measurements")
    mean: float | None = Field(description="mean in seconds; null without measurements")
    p50: float | None = Field(description="median in seconds, rounded up to a bucket's bound")
    p99: float | None = Field(description="99th percentile in seconds, rounded up to a bucket's bound")
    max: float = Field(description="maximum in seconds")


class StoreView(BaseModel):
    """The server's store."""

    kind: str = Field(description="`sqlite`, or `memory` (lost when the server ends)")
    failure: str | None = Field(
        description="reason for which changes are refused for now; null: they are accepted"
    )
    commit: DurationsView = Field(description="commits: the write and the sync to the disk")


class ServerView(BaseModel):
    """Facts about the server."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "version": "0.1.0", "incarnation": "9f3c0a51d2e47b86", "pid": 100, "uptime": 3600.5,
                    "ready": True, "reason": "", "grpc": "127.0.0.1:8470", "http": "127.0.0.1:8471",
                    "store": {
                        "kind": "sqlite", "failure": None,
                        "commit": {"count": 80, "mean": 0.002, "p50": 0.0025, "p99": 0.01, "max": 0.008},
                    },
                    "loop_lag": {"count": 14400, "mean": 0.0004, "p50": 0.0005, "p99": 0.0025, "max": 0.04},
                    "heartbeat_lateness": {
                        "count": 9600, "mean": 0.0, "p50": 0.0001, "p99": 0.01, "max": 0.2,
                    },
                    "sessions": 8, "unanswered": 0, "streams": 1, "last_event": "9f3c0a51d2e47b86-17",
                    "settings": [{"name": "limits.lease", "value": "15.0", "origin": "default"}],
                }
            ]
        }
    )  # fmt: skip

    version: str = Field(description="version of dmesh")
    incarnation: str = Field(description="random number of this start of the server, 16 hexadecimal digits")
    pid: int = Field(description="its process id")
    uptime: float = Field(description="seconds since it began")
    ready: bool = Field(description="true if it can serve requests now")
    reason: str = Field(description="reason for not being ready; empty otherwise")
    grpc: str = Field(description="address for clients; empty if unknown")
    http: str = Field(description="address for operators; empty if unknown")
    store: StoreView = Field(description="the store of its state")
    loop_lag: DurationsView = Field(description="lateness of the event loop")
    heartbeat_lateness: DurationsView = Field(description="lateness of heartbeats")
    sessions: int = Field(description="clients that are connected")
    unanswered: int = Field(description="requests not answered yet, including blocked reads")
    streams: int = Field(description="readers of the stream of events")
    last_event: str = Field(description="cursor of the latest event")
    settings: list[SettingView] = Field(description="settings and their origins")


class Facts(BaseModel):
    """Facts about the server that the runtime does not know."""

    store: str = "memory"
    grpc: str = ""
    http: str = ""
    settings: Sequence[Setting] = ()


def router(runtime: Runtime, facts: Facts) -> APIRouter:
    """Return the resource."""
    routes = APIRouter(tags=["server"])
    began = runtime.now()

    @routes.get("/server", response_model=ServerView, responses=refusals())
    async def show_server() -> Response:
        """Show facts about the server."""
        reason, measures = runtime.readiness(), runtime.measures
        return answer(
            ServerView(
                version=__version__,
                incarnation=hexadecimal(runtime.server_incarnation),
                pid=os.getpid(),
                uptime=round(runtime.now() - began, 3),
                ready=reason is None,
                reason=reason or "",
                grpc=facts.grpc,
                http=facts.http,
                store=StoreView(
                    kind=facts.store, failure=runtime.store_failure, commit=_view(measures.commits)
                ),
                loop_lag=_view(measures.lag),
                heartbeat_lateness=_view(measures.lateness),
                sessions=runtime.open_sessions,
                unanswered=runtime.unanswered,
                streams=runtime.event_log.feeds,
                last_event=cursor_of(runtime.server_incarnation, runtime.event_log.last),
                settings=[
                    SettingView(name=one.name, value=one.value, origin=one.origin) for one in facts.settings
                ],
            )
        )

    return routes


def _view(durations: Histogram) -> DurationsView:
    count = durations.count
    return DurationsView(
        count=count,
        mean=round(durations.total / count, 6) if count else None,
        p50=durations.quantile(0.5),
        p99=durations.quantile(0.99),
        max=round(durations.most, 6),
    )
