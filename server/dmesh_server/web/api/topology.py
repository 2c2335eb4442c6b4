"""Topology: machines, devices, and the meshes that programs announced. Nothing is guessed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from dmesh.v1 import progress_pb2 as pb
from dmesh_server.core.model import Task
from dmesh_server.progress import MOST_LINKS, meshes_of
from dmesh_server.runtime import Runtime
from dmesh_server.web.api import meshes
from dmesh_server.web.api.answers import ClusterName, Limit, encode, encoded, refusals
from dmesh_server.web.api.reports import all_said
from dmesh_server.web.api.sharing import Shared, freshness
from dmesh_server.web.machines import Machine, label_machines
from dmesh_server.web.pacer import Pacer, Steps

_MOST_TASKS = 256
_MOST_MESHES = 64
_MOST_LINKS = 256
_MOST_NODES = 64
_NUMBERED_NODES = 1024
"""Linux numbers at most so many NUMA nodes."""
_MOST_PLACED = 2 * meshes.MOST_PLACED
"""Most devices that an answer places one by one, over all its meshes: bounds the work that members can
cause."""


class HostView(BaseModel):
    """A machine."""

    host: str = Field(description="its name, as the processes see it")
    boot_id: str = Field(description="identity of its running kernel; empty if unknown")
    machine: str = Field(
        description="its label: the host name, and the beginning of the boot id where machines share a name"
    )
    tasks: list[str] = Field(description=f"the members there, at most {_MOST_TASKS} of them")
    members: int = Field(description="number of members")
    devices: dict[str, int] = Field(description="number of devices by type")
    numa_nodes: dict[str, int] = Field(
        description="number of its members that may run on each NUMA node, as far as they reported; at most "
        f"{_MOST_NODES} nodes, the first ones"
    )
    numa_nodes_total: int = Field(description="number of NUMA nodes on which its members may run")


class LinkView(BaseModel):
    """Connections between two machines, as their kernels measured them."""

    hosts: tuple[str, str] = Field(description="host names of the machines, sorted")
    boot_ids: tuple[str, str] = Field(description="their boot ids, in the same order")
    machines: tuple[str, str] = Field(description="their labels, in the same order")
    round_trip_us: int = Field(description="shortest smoothed round trip, microseconds")
    bytes_per_second: int = Field(
        description="highest rate at which a member's data was last delivered; 0: nothing was sent"
    )
    members: int = Field(description="number of members that measured")


class AxisView(BaseModel):
    """A dimension of a mesh."""

    name: str = Field(description="its name")
    size: int = Field(description="its size in devices")


class Placement(BaseModel):
    """Owners of a mesh's devices, in columns: run n covers the next `counts[n]` devices.

    The order is that of the axes, the last one fastest. Unknown values are -1.
    """

    job: str = Field(description="the job of the tasks")
    tasks: list[int] = Field(description="index of the task that has the run's devices; -1: unknown")
    devices: list[int] = Field(
        description="index of the run's first device among the task's devices of that type; the others count "
        "up from it; -1: unknown"
    )
    counts: list[int] = Field(description="number of devices")
    left_out: int = Field(
        description=f"devices after the last run; there are at most {meshes.MOST_RUNS} runs"
    )


class MeshView(BaseModel):
    """A mesh that programs announced."""

    name: str = Field(description="its name; may be empty")
    axes: list[AxisView] = Field(description="its dimensions, in order")
    device_type: str = Field(description="CPU, GPU or TPU")
    announced_by: int = Field(description="number of announcing members that have not departed")
    placement: Placement | None = Field(
        description="positions of the devices in it; null if not announced, or for more than "
        f"{meshes.MOST_PLACED} devices"
    )


class Topology(BaseModel):
    """Machines, devices and meshes of a cluster, as far as known."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "cluster": "train",
                    "hosts": [
                        {
                            "host": "node7", "boot_id": "", "machine": "node7", "members": 1,
                            "devices": {"CPU": 8}, "tasks": ["/job:worker/task:2"],
                            "numa_nodes": {"0": 1}, "numa_nodes_total": 1,
                        }
                    ],
                    "links": [
                        {
                            "hosts": ["node6", "node7"], "boot_ids": ["", ""],
                            "machines": ["node6", "node7"], "round_trip_us": 42,
                            "bytes_per_second": 1_150_000_000, "members": 2,
                        }
                    ],
                    "next": None, "total": 1,
                    "meshes": [
                        {
                            "name": "grid", "device_type": "CPU", "announced_by": 2,
                            "axes": [{"name": "batch", "size": 2}, {"name": "model", "size": 4}],
                            "placement": {
                                "job": "worker", "tasks": [2, 3], "devices": [0, 4], "counts": [4, 4],
                                "left_out": 0,
                            },
                        }
                    ],
                    "meshes_unknown": 0,
                }
            ]
        }
    )  # fmt: skip

    cluster: str = Field(description="name of the cluster")
    hosts: list[HostView] = Field(description="machines with members that have not departed, sorted by name")
    next: int | None = Field(description="`after` of the next page of hosts; null: this is the last one")
    total: int = Field(description="hosts on all pages")
    links: list[LinkView] = Field(
        description=f"connections between machines, of those with most bytes per second at most {_MOST_LINKS}"
    )
    meshes: list[MeshView] = Field(description=f"meshes that members announced, at most {_MOST_MESHES}")
    meshes_unknown: int = Field(
        description="members that have not departed and have announced no mesh; they may have some"
    )


def router(runtime: Runtime, pacer: Pacer) -> APIRouter:
    """Return the routes of the resource.

    Args:
        runtime: The server's state.
        pacer: Schedules long work in steps.
    """
    routes = APIRouter(tags=["topology"])
    announced: Shared[str, _Announced] = Shared(
        runtime.now, lambda cluster: _announced(runtime, pacer, cluster)
    )
    pages: Shared[_Asked, bytes] = Shared(runtime.now, lambda asked: _page(runtime, announced, asked))

    @routes.get("/clusters/{cluster}/topology", response_model=Topology, responses=refusals(404))
    async def show_topology(
        cluster: ClusterName,
        limit: Limit = 100,
        after: Annotated[int, Query(ge=0, lt=1 << 31, description="`next` of the page before")] = 0,
    ) -> Response:
        """Show machines, devices, and the meshes that members announced; some seconds old."""
        # A change of membership is another question.
        return encoded(await pages.of(_Asked(cluster, runtime.views.version(cluster), limit, after)))

    return routes


class _Asked(NamedTuple):
    """Parameters of a page."""

    cluster: str
    version: tuple[int, int]
    limit: int
    after: int


@dataclass(frozen=True, slots=True)
class _Announced:
    """Meshes announced by members that have not departed."""

    reported: int
    meshes: list[MeshView]
    members: int
    """Number of members that announced any."""
    links: list[LinkView]
    nodes: dict[Machine, Counter[int]]
    """Number of members by NUMA node."""


async def _announced(runtime: Runtime, pacer: Pacer, cluster: str) -> tuple[_Announced, float]:
    """Put the meshes together, and say for how long that is good."""
    steps, reported, members = Steps(pacer), 0, 0
    announcements = list[meshes.Announcement]()
    jobs = runtime.views.summary(cluster).jobs
    machines = {
        task: (host.name, host.boot_id) for host in runtime.views.hosts(cluster) for task in host.tasks
    }
    ranks = [machines.get(Task(job.name, index)) for job in jobs for index in range(len(job.addresses))]
    measured = dict[tuple[Machine, Machine], list[pb.Link]]()
    nodes = dict[Machine, Counter[int]]()
    async for holder, said in all_said(runtime, cluster, steps):
        message = said.message()
        if message is None:
            continue
        reported += 1
        found = dict.fromkeys(meshes_of(message))
        announcements.extend(meshes.Announcement(said.task, holder.present, mesh) for mesh in found)
        members += holder.present and bool(found)
        here = machines.get(said.task)
        if here is not None:
            counted = nodes.setdefault(here, Counter())
            for node in set(message.numa_nodes[:_MOST_NODES]):
                if 0 <= node < _NUMBERED_NODES:
                    counted[node] += 1
            for link in message.links[:MOST_LINKS]:
                there = ranks[link.rank] if 0 <= link.rank < len(ranks) else None
                if there is not None and there != here:
                    measured.setdefault((min(here, there), max(here, there)), []).append(link)
    slots = {job.name: len(job.addresses) for job in jobs}
    views, room = list[MeshView](), _MOST_PLACED
    for one in (await steps.through(meshes.gather(announcements)))[:_MOST_MESHES]:
        await steps.pause()
        shown = one.mesh.size <= room
        room -= one.mesh.size if shown else 0
        views.append(_view(one, _placement(one, slots) if shown else None))
    labels = _labels(runtime, cluster)
    return _Announced(reported, views, members, _links(measured, labels), nodes), freshness(reported)


def _labels(runtime: Runtime, cluster: str) -> dict[Machine, str]:
    """Return the labels of all machines, those of departed members too: `GET tasks` shows these as well."""
    return label_machines((slot.host, slot.boot_id) for slot in runtime.views.slots(cluster))


def _links(
    measured: Mapping[tuple[Machine, Machine], Sequence[pb.Link]], labels: Mapping[Machine, str]
) -> list[LinkView]:
    links = [
        LinkView(
            hosts=(one[0], other[0]),
            boot_ids=(one[1], other[1]),
            machines=(labels.get(one, one[0]), labels.get(other, other[0])),
            round_trip_us=min(link.round_trip_us for link in found),
            bytes_per_second=max(link.bytes_per_second for link in found),
            members=len(found),
        )
        for (one, other), found in measured.items()
    ]
    return sorted(links, key=lambda link: (-link.bytes_per_second, link.hosts, link.boot_ids))[:_MOST_LINKS]


async def _page(runtime: Runtime, announced: Shared[str, _Announced], asked: _Asked) -> tuple[bytes, float]:
    """Return a page as JSON, and for how long it is good."""
    known = await announced.of(asked.cluster)
    hosts, labels = runtime.views.hosts(asked.cluster), _labels(runtime, asked.cluster)
    end = asked.after + asked.limit
    page = Topology(
        cluster=asked.cluster,
        hosts=[
            HostView(
                host=host.name,
                boot_id=host.boot_id,
                machine=labels[host.name, host.boot_id],
                tasks=[str(task) for task in host.tasks[:_MOST_TASKS]],
                members=len(host.tasks),
                devices=dict(host.devices),
                numa_nodes={str(node): count for node, count in sorted(nodes.items())[:_MOST_NODES]},
                numa_nodes_total=len(nodes),
            )
            for host in hosts[asked.after : end]
            for nodes in (known.nodes.get((host.name, host.boot_id), Counter()),)
        ],
        next=end if end < len(hosts) else None,
        total=len(hosts),
        links=known.links,
        meshes=known.meshes,
        meshes_unknown=max(0, sum(len(host.tasks) for host in hosts) - known.members),
    )
    return encode(page), freshness(known.reported)


def _view(announced: meshes.Announced, placement: Placement | None) -> MeshView:
    return MeshView(
        name=announced.mesh.name,
        axes=[AxisView(name=name, size=size) for name, size in announced.mesh.axes],
        device_type=announced.mesh.device_type,
        announced_by=announced.present,
        placement=placement,
    )


def _placement(announced: meshes.Announced, slots: Mapping[str, int]) -> Placement | None:
    runs = meshes.place(announced, slots)
    if runs is None:
        return None
    return Placement(
        job=announced.job,
        tasks=[run.task for run in runs],
        devices=[run.device for run in runs],
        counts=[run.count for run in runs],
        left_out=announced.mesh.size - sum(run.count for run in runs),
    )
