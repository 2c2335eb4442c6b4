"""Why a cluster waits: the answer of `dmesh why`, worked out here once for all who look."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh.cli.explanation import Explanation, describe, explain_in_steps
from dmesh.cli.observing import Picture
from dmesh.coordination.activity import Activity
from dmesh.coordination.members import BarrierStatus, Liveness, MemberState
from dmesh.coordination.members import ClusterState as SeenState
from dmesh.coordination.members import Member as SeenMember
from dmesh.coordination.members import Process as SeenProcess
from dmesh.coordination.members import Task as SeenTask
from dmesh.v1 import progress_pb2 as pb
from dmesh_server.core.events import GetClusterState
from dmesh_server.core.model import Caller, ClusterState, Member, Task
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import ClusterName, age, answer, refusals
from dmesh_server.web.api.reports import all_said
from dmesh_server.web.api.sharing import Shared, freshness
from dmesh_server.web.turns import Steps, Turns

_PATIENCE = 1.0
"""Seconds of waiting that are nothing to be explained, as for `dmesh why`."""
_FRESH = 2.0
"""Seconds for which an answer is good enough for who asks next, at least."""
_AT_A_TIME = 16
"""Members that are read at once."""
_MOST_NAMED = 32


class WhyView(BaseModel):
    """Why a cluster waits."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "cluster": "train", "waiting": True, "since": 7.4, "suspects": ["/job:worker/task:2"],
                    "text": "Cluster 'train' has waited for 7.4 s in collective #6 of group world, "
                    "all_reduce(sum, float64, shape (1000,)): ranks 0, 1, 3 are there, rank 2 is missing.",
                    "latest": 6, "age": 0.3,
                }
            ]
        }
    )  # fmt: skip

    cluster: str = Field(description="name of the cluster")
    waiting: bool = Field(description="whether there is anything to be explained")
    text: str = Field(description="what it waits for, who is missing, since when, and where they stand")
    since: float | None = Field(description="seconds for which it has waited; null: it does not")
    suspects: list[str] = Field(description=f"who it waits for, the first {_MOST_NAMED}")
    latest: int = Field(description="the largest number of a collective that any member told of; 0: none")
    age: float = Field(description="seconds since this was worked out")


@dataclass(frozen=True, slots=True)
class _Known:
    at: float
    explanation: Explanation
    text: str
    latest: int


def router(runtime: Runtime, turns: Turns) -> APIRouter:
    """Returns the resource.

    Args:
        runtime: Who knows.
        turns: When what takes long is worked on.
    """
    routes = APIRouter(tags=["clusters"])
    reasons: Shared[str, _Known] = Shared(runtime.now, lambda cluster: _find_out(runtime, turns, cluster))

    @routes.get("/clusters/{cluster}/why", response_model=WhyView, responses=refusals(404))
    async def show_why(cluster: ClusterName) -> Response:
        """Says what a cluster waits for, as `dmesh why` does; some seconds old."""
        runtime.census.version(cluster)  # refuses names of no cluster
        known = await reasons.of(cluster)
        first = next(iter(known.explanation.waits), None)
        return answer(
            WhyView(
                cluster=cluster,
                waiting=first is not None,
                text=known.text,
                latest=known.latest,
                since=None if first is None else round(first.since, 1),
                suspects=[] if first is None else [one.task for one in first.suspects[:_MOST_NAMED]],
                age=age(runtime.now(), known.at),
            )
        )

    return routes


async def _find_out(runtime: Runtime, turns: Turns, cluster: str) -> tuple[_Known, float]:
    """Finds out why a cluster waits, and says for how long that is good."""
    steps, now = Steps(turns), runtime.now()
    picture = await _picture(runtime, cluster, now, steps)
    await steps.pause()
    explanation = await steps.through(explain_in_steps(picture, _PATIENCE))
    await steps.pause()
    text = describe(explanation, picture)
    latest = 0
    for said in picture.reports.values():
        latest = max(latest, max((group.issued for group in said.report.groups), default=0))
        await steps.pause()
    return _Known(now, explanation, text, latest), freshness(len(picture.state.members), _FRESH)


async def _picture(runtime: Runtime, cluster: str, now: float, steps: Steps) -> Picture:
    """Returns what a `dmesh why` would be told, without holding the server up."""
    census = runtime.census
    _, epoch = census.version(cluster)
    members = list[SeenMember]()
    while some := census.holders(cluster, len(members), _AT_A_TIME):
        members += [_member(member, now) for member in some]
        await steps.pause()
    event = GetClusterState(runtime.next_number(), Caller(cluster), epoch)
    state = await runtime.request(event, ClusterState)
    if state.epoch != epoch:  # somebody came or went meanwhile, and everybody is told of once more
        members.clear()
        for member in state.members:
            members.append(_member(member, now))
            await steps.pause()
    holders = {SeenTask(member.job, member.index): member.incarnation for member in members}
    reports = dict[SeenTask, pb.MemberProgress]()
    async for _, said, told in all_said(runtime, cluster, now, steps):
        task = _task(said.task)
        if holders.get(task) == said.incarnation:
            reports[task] = told
    barriers = tuple(
        BarrierStatus(
            barrier.name,
            barrier.instance,
            tuple(map(_task, barrier.arrived)),
            tuple(map(_task, barrier.missing)),
            max(0.0, now - barrier.started_at),
            None if barrier.deadline is None else max(0.0, barrier.deadline - now),
        )
        for barrier in state.barriers
    )
    vacant = tuple(map(_task, state.vacant))
    whole = SeenState(
        runtime.server_incarnation, state.incarnation, state.epoch, tuple(members), vacant, barriers
    )
    return Picture(cluster, "", whole, reports)


def _task(task: Task) -> SeenTask:
    return SeenTask(task.job, task.index)


def _member(member: Member, now: float) -> SeenMember:
    activity = member.activity
    return SeenMember(
        job=member.task.job,
        index=member.task.index,
        incarnation=member.incarnation,
        state=MemberState[member.state.name],
        process=SeenProcess(member.process.host, member.process.pid),
        last_seen_age=age(now, member.last_seen_at),
        registered_age=age(now, member.registered_at),
        reason=member.reason,
        liveness=Liveness[member.liveness.name],
        activity=None if activity is None else Activity(activity.operation, activity.age, activity.stack),
    )


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
