"""Verdict on a cluster: the answer of `dmesh why`, worked out once for all viewers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh.coordination.activity import Activity
from dmesh.coordination.explanation import Suspect, Verdict, explain_in_steps, judge_in_steps
from dmesh.coordination.members import BarrierStatus, DepartureCause, Liveness, MemberState
from dmesh.coordination.members import ClusterState as SeenState
from dmesh.coordination.members import Member as SeenMember
from dmesh.coordination.members import Process as SeenProcess
from dmesh.coordination.members import Task as SeenTask
from dmesh.v1 import progress_pb2 as pb
from dmesh_server.core.events import GetClusterState
from dmesh_server.core.model import Caller, ClusterState, Member, Task
from dmesh_server.progress import GroupBrief, MemberProgress
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import ClusterName, age, answer, refusals
from dmesh_server.web.api.reports import all_said
from dmesh_server.web.api.sharing import Shared, freshness
from dmesh_server.web.pacer import Pacer, Steps

_PATIENCE = 1.0
"""Seconds of waiting that need no explanation, as for `dmesh why`."""
_FRESH = 2.0
"""Minimum lifetime of an answer in seconds."""
_AT_A_TIME = 16
"""Members read in one step."""
_MOST_NAMED = 32
_MOST_VICTIMS = 5_000
_MOST_KEPT = 16


class CulpritView(BaseModel):
    """A member with which the trouble began."""

    task: str = Field(description="its task slot")
    rank: int = Field(description="its client id")
    host: str = Field(description="its host; empty for a vacant task slot")
    pid: int = Field(description="process id on that host")
    state: str = Field(description="`connected`, `lost`, `failed`, `blocked`, `stuck`, `vacant` ...")
    where: str = Field(description="position of its main thread, `FILE:LINE in FUNCTION`; empty if unknown")


class EvidenceView(BaseModel):
    """One fact behind a verdict."""

    label: str = Field(description="kind of fact, such as `line`, `waits in`, `reason` or `others`")
    text: str = Field(description="the fact")
    brief: str = Field(description="the same in a few words; empty for a detail")


class WhyView(BaseModel):
    """Verdict on a cluster: what is wrong, with whom it began, who stops because of it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "cluster": "train", "kind": "waiting", "severity": "bad", "waiting": True, "since": 7.4,
                    "headline": "Rank 2 is holding up 3 ranks · 7.4 s", "consequence": "",
                    "culprits": [
                        {
                            "task": "/job:worker/task:2", "rank": 2, "host": "node7", "pid": 4711,
                            "state": "connected", "where": "/home/me/train.py:31 in step",
                        }
                    ],
                    "culprits_total": 1,
                    "victims": {"worker": [0, 1, 3]},
                    "evidence": [
                        {
                            "label": "line", "text": "/home/me/train.py:31 in step",
                            "brief": "train.py:31 step",
                        }
                    ],
                    "latest": 6, "age": 0.3,
                }
            ]
        }
    )  # fmt: skip

    cluster: str = Field(description="name of the cluster")
    kind: str = Field(description="`failed`, `waiting`, `deadlock`, `slow`, `forming`, `ended` or `healthy`")
    severity: str = Field(description="`bad`, `warn`, `ok` or `idle`")
    headline: str = Field(description="who does what, since when")
    consequence: str = Field(description="effect on the others; may be empty")
    waiting: bool = Field(description="true if it waits long enough to need an explanation")
    since: float | None = Field(description="seconds it has waited; null if it does not wait")
    culprits: list[CulpritView] = Field(description=f"members with which it began, the first {_MOST_NAMED}")
    culprits_total: int = Field(description="number of these")
    victims: dict[str, list[int]] = Field(
        description="by job, the indices of the tasks that stopped or wait because of them; "
        f"at most {_MOST_VICTIMS}"
    )
    evidence: list[EvidenceView] = Field(description="the most telling first")
    latest: int = Field(description="largest number of a collective that any member reported; 0 for none")
    age: float = Field(description="seconds since this was worked out")


@dataclass(frozen=True, slots=True)
class _Known:
    at: float
    verdict: Verdict
    victims: dict[str, list[int]]
    """Indices of the verdict's victims by job."""
    waiting: bool
    latest: int


class _Asked(NamedTuple):
    """A cluster, and what of it changes the answer at once."""

    cluster: str
    incarnation: int
    unwell: tuple[int, ...]


def router(runtime: Runtime, pacer: Pacer) -> APIRouter:
    """Return the routes of the resource.

    Args:
        runtime: The server's state.
        pacer: Schedules long work in steps.
    """
    routes = APIRouter(tags=["clusters"])
    reasons: Shared[_Asked, _Known] = Shared(runtime.now, _Reasons(runtime, pacer).find_out)

    @routes.get("/clusters/{cluster}/why", response_model=WhyView, responses=refusals(404))
    async def show_why(cluster: ClusterName) -> Response:
        """Explains what is wrong with a cluster, as `dmesh why` does; the answer may be some seconds old."""
        summary = runtime.views.summary(cluster)  # refuses unknown clusters
        unwell = tuple(
            summary.members.get(condition, 0) for condition in ("FAILED", "LOST", "STUCK", "BLOCKED")
        )
        known = await reasons.of(_Asked(cluster, summary.incarnation, unwell))
        return answer(_view(cluster, known, runtime.now()))

    return routes


def _view(cluster: str, known: _Known, now: float) -> WhyView:
    verdict = known.verdict
    return WhyView(
        cluster=cluster,
        kind=verdict.kind,
        severity=verdict.severity,
        headline=verdict.headline,
        consequence=verdict.consequence,
        waiting=known.waiting,
        since=None if verdict.since is None else round(verdict.since, 1),
        culprits=[_view_culprit(one) for one in verdict.culprits[:_MOST_NAMED]],
        culprits_total=len(verdict.culprits),
        victims=known.victims,
        evidence=[
            EvidenceView(label=fact.label, text=fact.text, brief=fact.brief) for fact in verdict.evidence
        ],
        latest=known.latest,
        age=age(now, known.at),
    )


def _view_culprit(one: Suspect) -> CulpritView:
    return CulpritView(
        task=one.task, rank=one.rank, host=one.host, pid=one.pid, state=one.state, where=one.where
    )


@dataclass(frozen=True, slots=True)
class _Picture:
    cluster: str
    state: SeenState
    reports: Mapping[SeenTask, _MemberReport]


class _MemberReport(NamedTuple):
    age_ms: int
    report: _Report


class _Report:
    """A progress report that is decoded in full only for suspects."""

    __slots__ = ("_said", "groups")

    def __init__(self, said: MemberProgress, groups: tuple[GroupBrief, ...]) -> None:
        self._said = said
        self.groups = groups

    @property
    def _message(self) -> pb.ProgressReport:
        return self._said.message() or pb.ProgressReport()

    @property
    def recent(self) -> Sequence[pb.CallRecord]:
        return self._message.recent

    @property
    def idle_ms(self) -> int:
        return self._message.idle_ms

    @property
    def where(self) -> str:
        return self._message.where

    @property
    def operation(self) -> str:
        return self._message.operation


class _Reasons:
    """Works out explanations and keeps the clusters' converted members between them."""

    def __init__(self, runtime: Runtime, pacer: Pacer) -> None:
        self._runtime = runtime
        self._pacer = pacer
        self._kept: OrderedDict[str, _Members] = OrderedDict()

    async def find_out(self, asked: _Asked) -> tuple[_Known, float]:
        """Return a verdict and its lifetime in seconds."""
        steps, now, cluster = Steps(self._pacer), self._runtime.now(), asked.cluster
        picture = await self._picture(cluster, now, steps)
        explanation = await steps.through(explain_in_steps(picture, _PATIENCE))
        verdict = await steps.through(judge_in_steps(explanation, picture))
        victims = dict[str, list[int]]()
        for task in verdict.victims[:_MOST_VICTIMS]:
            victims.setdefault(task.job, []).append(task.index)
        await steps.pause()
        latest = max(
            (group.issued for one in picture.reports.values() for group in one.report.groups), default=0
        )
        known = _Known(now, verdict, victims, bool(explanation.waits), latest)
        return known, freshness(len(picture.state.members), _FRESH)

    async def _picture(self, cluster: str, now: float, steps: Steps) -> _Picture:
        """Return the input of an explanation, collected in steps that keep the event loop free."""
        runtime = self._runtime
        members = await self._members(cluster, now, steps)
        _, epoch = runtime.views.version(cluster)
        event = GetClusterState(runtime.next_number(), Caller(cluster), epoch)  # leaves the members out
        state = await runtime.request(event, ClusterState)
        holders = {SeenTask(member.job, member.index): member.incarnation for member in members}
        await steps.pause()
        reports = dict[SeenTask, _MemberReport]()
        async for _, said in all_said(runtime, cluster, steps):
            task, groups = _task(said.task), said.brief()
            if groups is not None and holders.get(task) == said.incarnation:
                reports[task] = _MemberReport(_ms(now - said.received_at), _Report(said, groups))
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
        return _Picture(cluster, whole, reports)

    async def _members(self, cluster: str, now: float, steps: Steps) -> list[SeenMember]:
        """Return the members, converted in steps; the ages of healthy ones may be out of date.

        A member that joins or leaves meanwhile may appear in the next answer only.
        """
        views = self._runtime.views
        kept = self._kept.pop(cluster, None)
        # With vacant task slots, the explanation needs the current ages of registration.
        if kept is None or kept.version != views.version(cluster) or views.summary(cluster).vacant:
            kept = _Members(views.version(cluster))
            while some := views.holders(cluster, len(kept.members), _AT_A_TIME):
                kept.members += [_member(member, now) for member in some]
                await steps.pause()
        unwell = set(views.standing(cluster).conditions)
        for place in unwell | kept.unwell:
            if place < len(kept.members) and kept.version == views.version(cluster):
                [member] = views.holders(cluster, place, 1)
                kept.members[place] = _member(member, now)
            await steps.pause()
        kept.unwell = unwell
        self._kept[cluster] = kept
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return kept.members


@dataclass(slots=True)
class _Members:
    """Members of a cluster as the client's types, kept while the membership stays the same."""

    version: tuple[int, int]
    members: list[SeenMember] = field(default_factory=list)
    unwell: set[int] = field(default_factory=set)
    """Positions of the members that were unhealthy."""


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
        cause=DepartureCause[member.cause.name],
        code=member.code,
    )


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
