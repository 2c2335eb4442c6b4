"""Progress of members' programs: the loops that they report, grouped by name.

All of it comes from the members' own reports, a few seconds old: for display, never for decisions.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh_server.core.model import Task
from dmesh_server.progress import LoopReport, loops_of
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import ClusterName, age, encode, encoded, refusals
from dmesh_server.web.api.reports import all_said
from dmesh_server.web.api.sharing import Shared, freshness
from dmesh_server.web.pacer import Pacer, Steps

_MOST_LOOPS = 20


class LoopRank(BaseModel):
    """Progress of one member in a loop."""

    task: str = Field(description="the member")
    done: int = Field(description="steps that it has done")
    rate: float = Field(description="its steps per second in the last half minute; 0: unknown")
    elapsed: float = Field(description="seconds since it began the loop, or that it took")
    report_age: float = Field(description="age of its report in seconds")


class LoopView(BaseModel):
    """A loop of the program, on all members that are in it."""

    name: str = Field(description="name of the loop, as the program calls it")
    unit: str = Field(description="what steps are called, in the plural")
    total: int = Field(description="steps in all; 0: unknown")
    ranks: int = Field(description="number of members that are in it, or were in it last")
    least: int = Field(description="steps that the slowest of them has done")
    most: int = Field(description="steps that the fastest of them has done")
    rate: float = Field(description="steps per second of the slowest of them; 0: unknown")
    left: float | None = Field(description="seconds until the last of them is through; null: unknown")
    over: bool = Field(description="whether it is over on all of them")
    members: list[LoopRank] = Field(description="furthest behind first; as many as asked for")


class ProgressPage(BaseModel):
    """Loops of a cluster's program."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "cluster": "train", "reported": 2,
                    "loops": [
                        {
                            "name": "train", "unit": "steps", "total": 5000, "ranks": 2, "least": 1190,
                            "most": 1203, "rate": 12.3, "left": 309.3, "over": False,
                            "members": [
                                {
                                    "task": "/job:worker/task:1", "done": 1190, "rate": 12.3,
                                    "elapsed": 97.0, "report_age": 0.7,
                                }
                            ],
                        }
                    ],
                }
            ]
        }
    )  # fmt: skip

    cluster: str = Field(description="name of the cluster")
    reported: int = Field(description="number of members that report a loop")
    loops: list[LoopView] = Field(description=f"loops under way first; at most {_MOST_LOOPS}")


class _Said(NamedTuple):
    """One member's report of a loop."""

    task: Task
    loop: LoopReport
    at: float
    """When, by the server's monotonic clock."""


class _Asked(NamedTuple):
    """Parameters of a page."""

    cluster: str
    members: int


def router(runtime: Runtime, pacer: Pacer) -> APIRouter:
    """Return the routes of the resource.

    Args:
        runtime: The server's state.
        pacer: Schedules long work in steps.
    """
    routes = APIRouter(tags=["progress"])
    pages: Shared[_Asked, bytes] = Shared(runtime.now, lambda asked: _page(runtime, pacer, asked))

    @routes.get("/clusters/{cluster}/progress", response_model=ProgressPage, responses=refusals(404))
    async def show_progress(
        cluster: ClusterName,
        members: Annotated[
            int, Query(ge=0, le=1000, description="most members of each loop, furthest behind first")
        ] = 0,
    ) -> Response:
        """Show how far the program's loops are (`dmesh.progress`); some seconds old."""
        runtime.views.version(cluster)  # refuses names of no cluster
        return encoded(await pages.of(_Asked(cluster, members)))

    return routes


async def _page(runtime: Runtime, pacer: Pacer, asked: _Asked) -> tuple[bytes, float]:
    """Return a page as JSON, and for how long it is good."""
    steps, reported, read = Steps(pacer), 0, 0
    found: dict[tuple[str, int], list[_Said]] = defaultdict(list)
    async for holder, said in all_said(runtime, asked.cluster, steps):
        message = said.message()
        read += 1
        if message is None or not message.loops:
            continue
        loops = loops_of(message)
        if not holder.present:
            loops = tuple(loop for loop in loops if loop.over)
        reported += bool(loops)
        for loop in loops:
            found[loop.name, loop.total].append(_Said(said.task, loop, said.received_at))
    now = runtime.now()
    ordered = sorted(
        found.values(), key=lambda entries: (all(one.loop.over for one in entries), -len(entries))
    )
    views = list[LoopView]()
    for entries in ordered[:_MOST_LOOPS]:
        views.append(_view(entries, now, asked.members))
        await steps.pause()
    page = ProgressPage(cluster=asked.cluster, reported=reported, loops=views)
    return encode(page), freshness(read)


def _view(entries: list[_Said], now: float, members: int) -> LoopView:
    behind = sorted(entries, key=lambda one: one.loop.done)
    first, running = entries[0].loop, [one for one in entries if not one.loop.over]
    rates = [one.loop.rate for one in running if one.loop.rate > 0]
    left = [
        max(0.0, (first.total - one.loop.done) / one.loop.rate - (now - one.at))
        for one in running
        if first.total and one.loop.rate > 0
    ]
    return LoopView(
        name=first.name,
        unit=first.unit,
        total=first.total,
        ranks=len(entries),
        least=behind[0].loop.done,
        most=behind[-1].loop.done,
        rate=round(min(rates, default=0.0), 3),
        left=round(max(left), 1) if left and len(left) == len(running) else None,
        over=not running,
        members=[
            LoopRank(
                task=str(one.task),
                done=one.loop.done,
                rate=round(one.loop.rate, 3),
                elapsed=round(one.loop.elapsed, 3),
                report_age=age(now, one.at),
            )
            for one in behind[:members]
        ],
    )
