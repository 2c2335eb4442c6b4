"""Task slots: all members of a cluster in a few bytes each, for pictures of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh_server.core.views import ClusterViews
from dmesh_server.runtime import Runtime
from dmesh_server.web.api.answers import ClusterName, answer, refusals
from dmesh_server.web.api.clusters import JobView
from dmesh_server.web.machines import Machine, label_machines
from dmesh_server.web.pacer import Pacer

MOST_SLOTS = 5_000
"""Task slots of one answer."""

LETTERS = {
    "FAILED": "F", "LOST": "X", "STUCK": "S", "BLOCKED": "B", "REGISTERED": "R", "CONNECTED": "C",
    "LEFT": "L", "VACANT": "V",
}  # fmt: skip
"""Letter of each condition in a `TaskPage`."""

_MOST_KEPT = 16
"""Pages whose chart is kept."""


class TaskPage(BaseModel):
    """Some task slots of a cluster, in columns: the n-th entry of each is about the n-th task slot."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "cluster": "train", "epoch": 9, "lease": 15.0, "heartbeat_interval": 3.0,
                    "jobs": [{"name": "worker", "tasks": 4}], "first": 0, "conditions": "CCXV",
                    "silence": [0.4, 1.2, 4.0, 0.0], "pids": [4711, 4712, 4713, 0], "host": [0, 0, 1, -1],
                    "hosts": ["node7", "node8"], "boot_ids": ["3f2a9c1e", "b81d2f00"],
                    "machines": ["node7", "node8"], "devices": {"CPU": [8, 8, 8, 0]},
                    "next": None, "total": 4,
                }
            ]
        }
    )  # fmt: skip

    cluster: str = Field(description="name of the cluster")
    epoch: int = Field(description="grows with every change of membership")
    lease: float = Field(description="silence after which a member is blocked or lost, seconds")
    heartbeat_interval: float = Field(description="interval between a member's heartbeats, seconds")
    jobs: list[JobView] = Field(
        description="the cluster's jobs, sorted: task slots are numbered through all of them"
    )
    first: int = Field(description="number of the first task slot of this page")
    conditions: str = Field(
        description="a letter for each task slot: "
        + ", ".join(f"{letter} {condition}" for condition, letter in LETTERS.items())
    )
    silence: list[float] = Field(description="seconds since the server last heard of the holder")
    pids: list[int] = Field(description="process ids")
    host: list[int] = Field(description="index of its machine in `hosts`; -1 for a vacant task slot")
    hosts: list[str] = Field(description="host name of each machine; several may have the same")
    boot_ids: list[str] = Field(description="identity of each machine's running kernel; empty if unknown")
    machines: list[str] = Field(
        description="label of each machine: its host name, and the beginning of its boot id where machines "
        "of the cluster share a name"
    )
    devices: dict[str, list[int]] = Field(description="number of devices by type")
    next: int | None = Field(description="`after` of the next page; null: this is the last one")
    total: int = Field(description="number on all pages")


def router(runtime: Runtime, pacer: Pacer) -> APIRouter:
    """Return the routes of the resource.

    Args:
        runtime: The server's state.
        pacer: Schedules long work in steps.
    """
    routes = APIRouter(tags=["members"])

    @lru_cache(_MOST_KEPT)
    def chart(version: tuple[int, int], cluster: str, begin: int, limit: int) -> _Chart:
        return _draw(runtime.views, cluster, begin, limit)

    @routes.get("/clusters/{cluster}/tasks", response_model=TaskPage, responses=refusals(404))
    async def list_tasks(
        cluster: ClusterName,
        limit: Annotated[
            int, Query(ge=1, le=MOST_SLOTS, description="most task slots of the answer")
        ] = MOST_SLOTS,
        after: Annotated[
            int, Query(ge=0, lt=1 << 31, description="`next` of the page before; 0 for the first")
        ] = 0,
    ) -> Response:
        """Show the holders of all task slots in columns: a tenth of the size of the list of members."""
        await pacer.wait()  # so much takes as long as all that a request takes beside it
        views = runtime.views
        known = chart(views.version(cluster), cluster, after, limit)
        return answer(_view(views, known, runtime.now()))

    return routes


@dataclass(frozen=True, slots=True)
class _Chart:
    """Part of a page of task slots that stays the same until a member joins or departs."""

    page: TaskPage
    """The page with all held slots CONNECTED and just heard of."""
    places: tuple[tuple[int, int], ...]
    """Of task slots that have been taken: the place among these, and on the page."""


def _draw(views: ClusterViews, cluster: str, begin: int, limit: int) -> _Chart:
    summary = views.summary(cluster)
    jobs = sorted((job.name, len(job.addresses)) for job in summary.jobs)
    total = sum(tasks for _, tasks in jobs)
    size = max(0, min(limit, total - begin))
    starts, start = dict[str, int](), 0
    for name, tasks in jobs:
        starts[name], start = start, start + tasks
    letters, pids, host = [LETTERS["VACANT"]] * size, [0] * size, [-1] * size
    hosts, devices, places = dict[Machine, int](), dict[str, list[int]](), list[tuple[int, int]]()
    labels = label_machines((slot.host, slot.boot_id) for slot in views.slots(cluster))
    for number, slot in enumerate(views.slots(cluster)):
        place = starts[slot.task.job] + slot.task.index - begin
        if not 0 <= place < size:
            continue
        places.append((number, place))
        letters[place] = LETTERS["CONNECTED"]
        pids[place] = slot.pid
        host[place] = hosts.setdefault((slot.host, slot.boot_id), len(hosts))
        for device in slot.devices:
            counts = devices.get(device.type)
            if counts is None:
                counts = devices[device.type] = [0] * size
            counts[place] += 1
    page = TaskPage(
        cluster=cluster,
        epoch=summary.epoch,
        lease=summary.settings.lease,
        heartbeat_interval=summary.settings.heartbeat_interval,
        jobs=[JobView(name=name, tasks=tasks) for name, tasks in jobs],
        first=begin,
        conditions="".join(letters),
        silence=[0.0] * size,
        pids=pids,
        host=host,
        hosts=[name for name, _ in hosts],
        boot_ids=[boot_id for _, boot_id in hosts],
        machines=[labels[machine] for machine in hosts],
        devices=devices,
        next=begin + size if begin + size < total else None,
        total=total,
    )
    return _Chart(page, tuple(places))


def _view(views: ClusterViews, chart: _Chart, now: float) -> TaskPage:
    """Return a page as it is now."""
    page, standing = chart.page, views.standing(chart.page.cluster)
    silence, last_seen_at = list(page.silence), standing.last_seen_at
    for number, place in chart.places:
        silence[place] = max(0, int((now - last_seen_at[number]) * 100)) / 100  # `round` takes longer
    conditions = page.conditions
    if standing.conditions:
        letters = list(conditions)
        for number, place in chart.places:
            if number in standing.conditions:
                letters[place] = LETTERS[standing.conditions[number]]
        conditions = "".join(letters)
    return page.model_copy(update={"silence": silence, "conditions": conditions})
