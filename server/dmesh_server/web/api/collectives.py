"""Collectives: each member's progress in each group, and the stragglers.

All of it comes from the members' own reports, a few seconds old: for display, never for decisions.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh_server.core.model import Task
from dmesh_server.progress import CallReport
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import ClusterName, age, encode, encoded, hexadecimal, refusals
from dmesh_server.web.api.comparison import MOST_STRAGGLERS, Comparison, Comparisons, Row, compare_all
from dmesh_server.web.api.sharing import Shared
from dmesh_server.web.pacer import Pacer, Steps

_MOST_NAMED = 16
_MOST_ROWS = 4_000
_GOOD = 1.0
"""Minimum lifetime of a page in seconds."""


class PastCallView(BaseModel):
    """One of a member's last calls, for a picture of when it worked and when it waited."""

    sequence: int = Field(description="its number in the group, from 1")
    call: str = Field(description="operation, dtype, shape and arguments")
    bytes: int = Field(description="bytes of the larger of input and output")
    state: str = Field(description="QUEUED, RUNNING, WAITING, DONE, FAILED or UNKNOWN")
    age: float = Field(description="seconds since it was called")
    elapsed: float = Field(description="seconds it took, or has taken up to the report")
    waited: float | None = Field(description="of these, seconds spent waiting for others; null if unknown")


class CallView(PastCallView):
    """A call of a collective, under way or over."""

    waits_for: list[str] = Field(description=f"members that it waits for, at most {_MOST_NAMED}")
    error: str = Field(description="error it failed with; empty otherwise")


class RankView(BaseModel):
    """Progress of one member in a group."""

    task: str = Field(description="the member")
    condition: str = Field(description="its condition, as among the members")
    issued: int = Field(description="number of the last call that it made; 0: none")
    finished: int = Field(description="number of its last finished call")
    last: CallView | None = Field(description="its call under way, or its last finished one")
    counted: int = Field(description="number of recent calls that the next two sum up")
    waited: float = Field(description="seconds that these spent waiting for others, as far as known")
    transferred: float = Field(description="the other seconds that they took")
    recent: list[PastCallView] = Field(description="its last calls, oldest first; as many as asked for")
    failure: str = Field(description="reason for which it can make no further call; empty otherwise")
    where: str = Field(description="position of its main thread, `FILE:LINE in FUNCTION`; empty if unknown")
    idle: float = Field(description="seconds since its program's last progress")
    report_age: float = Field(description="age of its report in seconds")


class GroupView(BaseModel):
    """A group of members that call collectives together."""

    id: str = Field(description="16 hexadecimal digits, the same for all members")
    name: str = Field(description="name for people")
    generation: int = Field(description="generation of the group; each numbers its calls from the start")
    size: int = Field(description="number of ranks")
    reported: int = Field(description="number of ranks that have reported")
    latest: int = Field(description="largest number of a call made by any rank")
    stragglers: list[str] = Field(
        description="members that block others, the worst first: they have not made a call that others have, "
        f"or others wait for them; at most {MOST_STRAGGLERS}"
    )
    members: list[RankView] = Field(description="furthest behind first")


class CollectivesPage(BaseModel):
    """Members' reports of their collectives."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "cluster": "train", "reported": 1, "unknown": 0, "next": None, "total": 1,
                    "groups": [
                        {
                            "id": "5d1f00ab9e3c7724", "name": "world", "generation": 0, "size": 8,
                            "reported": 1, "latest": 41, "stragglers": ["/job:worker/task:2"],
                            "members": [
                                {
                                    "task": "/job:worker/task:0", "condition": "CONNECTED", "issued": 41,
                                    "finished": 40, "counted": 40, "waited": 1.2, "transferred": 0.8,
                                    "recent": [], "failure": "", "where": "train.py:31 in step", "idle": 12.5,
                                    "report_age": 0.7,
                                    "last": {
                                        "sequence": 41, "call": "all_reduce(sum) of float64 (1000,)",
                                        "bytes": 8000, "state": "WAITING", "age": 12.5, "elapsed": 12.4,
                                        "waited": 12.4,
                                        "waits_for": ["/job:worker/task:2"], "error": "",
                                    },
                                }
                            ],
                        }
                    ],
                }
            ]
        }
    )  # fmt: skip

    cluster: str = Field(description="name of the cluster")
    reported: int = Field(description="number of members that have reported")
    unknown: int = Field(description="members that have not departed and have not reported")
    groups: list[GroupView] = Field(description="the largest first")
    next: int | None = Field(description="`after` of the next page of groups; null: this is the last one")
    total: int = Field(description="groups on all pages")


def router(runtime: Runtime, pacer: Pacer) -> APIRouter:
    """Return the routes of the resource.

    Args:
        runtime: The server's state.
        pacer: Schedules long work in steps.
    """
    routes = APIRouter(tags=["collectives"])
    comparisons: Shared[str, Comparisons] = Shared(
        runtime.now, lambda cluster: compare_all(runtime, pacer, cluster)
    )
    pages: Shared[_Asked, bytes] = Shared(
        runtime.now, lambda asked: _page(runtime, pacer, comparisons, asked)
    )

    @routes.get("/clusters/{cluster}/collectives", response_model=CollectivesPage, responses=refusals(404))
    async def list_collectives(
        cluster: ClusterName,
        limit: Annotated[int, Query(ge=1, le=100, description="most groups")] = 20,
        after: Annotated[int, Query(ge=0, lt=1 << 31, description="`next` of the page before")] = 0,
        members: Annotated[
            int, Query(ge=0, le=1000, description="most members of each group, furthest behind first")
        ] = 50,
        recent: Annotated[
            int, Query(ge=0, le=16, description="most past calls of each member; members report at most 16")
        ] = 0,
    ) -> Response:
        """Show members' progress in the groups in which they call collectives; some seconds old."""
        runtime.views.version(cluster)  # refuses names of no cluster
        return encoded(await pages.of(_Asked(cluster, limit, after, members, recent)))

    return routes


class _Asked(NamedTuple):
    """Parameters of a page."""

    cluster: str
    limit: int
    after: int
    members: int
    recent: int


async def _page(
    runtime: Runtime, pacer: Pacer, comparisons: Shared[str, Comparisons], asked: _Asked
) -> tuple[bytes, float]:
    """Return a page as JSON, and for how long it is good."""
    known = await comparisons.of(asked.cluster)
    steps, now, end = Steps(pacer), runtime.now(), asked.after + asked.limit
    present = runtime.views.summary(asked.cluster).present
    shown, room = list[GroupView](), _MOST_ROWS
    for group in known.groups[asked.after : end]:
        rows = group.behind[: min(asked.members, room)]
        room -= len(rows)
        shown.append(await _view(group, rows, now, asked.recent, steps))
    page = CollectivesPage(
        cluster=asked.cluster,
        reported=known.reported,
        unknown=max(0, present - known.present),
        groups=shown,
        next=end if end < len(known.groups) else None,
        total=len(known.groups),
    )
    await steps.pause()
    return encode(page), max(_GOOD, known.reported / 1000)


async def _view(group: Comparison, rows: list[Row], now: float, recent: int, steps: Steps) -> GroupView:
    members = list[RankView]()
    for row in rows:
        members.append(_view_rank(row, now, recent))
        await steps.pause()
    # Not validated again: all values come from validated models.
    return GroupView.model_construct(
        id=hexadecimal(group.first.id),
        name=group.first.name,
        generation=group.first.generation,
        size=group.first.size,
        reported=len(group.behind),
        latest=group.latest,
        stragglers=[str(task) for task in group.stragglers],
        members=members,
    )


def _view_rank(row: Row, now: float, recent: int) -> RankView:
    report = row.said.read(recent=recent > 0)
    assert report is not None, "what was compared can be read"
    key = row.at.id, row.at.generation
    group = next(one for one in report.groups if (one.id, one.generation) == key)
    last, task = group.last, row.said.task
    past = [call for call in report.recent if call.group == group.id][-recent:] if recent else []
    return RankView(
        task=str(task),
        condition=row.holder.condition,
        issued=group.issued,
        finished=group.finished,
        last=None
        if last is None
        else CallView(
            **_call(last, now),
            waits_for=[str(Task(task.job, rank)) for rank in last.waits_for[:_MOST_NAMED]],
            error=last.error,
        ),
        counted=group.counted,
        waited=round(group.waited, 6),
        transferred=round(max(0.0, group.elapsed - group.waited), 6),
        recent=[PastCallView(**_call(call, now)) for call in past],
        failure=group.failure,
        where=report.where,
        idle=age(now, report.progressed_at),
        report_age=age(now, row.said.received_at),
    )


def _call(call: CallReport, now: float) -> dict[str, Any]:
    """Return the fields of a `PastCallView`."""
    return {
        "sequence": call.sequence,
        "call": call.call,
        "bytes": call.nbytes,
        "state": call.state.name,
        "age": age(now, call.called_at),
        "elapsed": round(call.elapsed, 6),
        "waited": None if call.waited is None else round(call.waited, 6),
    }
