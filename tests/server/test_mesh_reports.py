"""Meshes as members announce them: what is believed of it, and how it is put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from tests.server.web_server import join_all, serving_web

from dmesh.v1 import common_pb2, coordination_pb2
from dmesh.v1 import progress_pb2 as pb
from dmesh_server.core.model import Caller, Task
from dmesh_server.mesh_reports import MOST_DEVICES, MeshReport, OwnerRun, PlaceRun, read_mesh
from dmesh_server.web.api import meshes
from dmesh_server.web.api.meshes import UNKNOWN, Announced, Announcement, Run, place

TASKS = {"worker": 4}
BLOCKS = (OwnerRun(0, 4, 1, 2),)


def message(
    *sizes: int, owners: Sequence[Sequence[int]] = (), own: Sequence[Sequence[int]] = ()
) -> pb.AnnouncedMesh:
    return pb.AnnouncedMesh(
        name="grid",
        axes=[pb.MeshAxis(name=f"a{number}", size=size) for number, size in enumerate(sizes)],
        device_type="CPU",
        owners=[pb.OwnerRun(task=t, tasks=n, step=s, each=e) for t, n, s, e in owners],
        own=[pb.PlaceRun(place=p, stride=s, device=d, count=n) for p, s, d, n in own],
    )  # fmt: skip


def announced(
    task: int, *own: PlaceRun, owners: tuple[OwnerRun, ...] = BLOCKS, present: bool = True, name: str = "grid"
) -> Announcement:
    mesh = MeshReport(name, (("x", 2), ("y", 4)), "CPU", owners, own)
    return Announcement(Task("worker", task), present, mesh)


def gather(effect_logging: Iterable[Announcement]) -> list[Announced]:
    work = meshes.gather(effect_logging)
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def spread(runs: list[Run] | None) -> list[tuple[int, int]]:
    return [
        (run.task, UNKNOWN if run.device == UNKNOWN else run.device + n)
        for run in runs or []
        for n in range(run.count)
    ]


def test_a_mesh_is_read() -> None:
    read = read_mesh(message(2, 4, owners=[(3, 4, -1, 2)], own=[(1, 4, 0, 2)]))
    assert read == MeshReport(
        "grid", (("a0", 2), ("a1", 4)), "CPU", (OwnerRun(3, 4, -1, 2),), (PlaceRun(1, 4, 0, 2),)
    )
    assert read is not None
    assert read.size == 8


def test_who_announces_no_devices_is_an_older_client() -> None:
    old = message(2, 4)
    read = read_mesh(pb.AnnouncedMesh.FromString(old.SerializeToString()))
    assert read is not None
    assert (read.owners, read.own) == ((), ())


def test_an_older_server_reads_the_axes_of_a_newer_client() -> None:
    new = message(2, 4, owners=[(0, 4, 1, 2)], own=[(0, 1, 0, 2)]).SerializeToString()
    # What a server without these fields sees of it: the message up to them, and fields that it does not know.
    assert new.startswith(message(2, 4).SerializeToString())


@pytest.mark.parametrize(
    "sizes", [(), (0,), (-1,), (2, -4), (MOST_DEVICES + 1,), (1 << 16, 1 << 16), (2,) * 21, (1,) * 65]
)
def test_sizes_that_cannot_be_are_no_mesh(sizes: tuple[int, ...]) -> None:
    assert read_mesh(message(*sizes)) is None


@pytest.mark.parametrize(
    "owners",
    [
        [(0, 4, 1, 1)],
        [(0, 1 << 30, 1, 1 << 30)],
        [(0, 0, 1, 2), (0, 4, 1, 2)],
        [(0, 4, 1, -2)],
        [(-1, 4, 1, 2)],
        [(1, 4, -1, 2)],
        [((1 << 31) - 1, 4, 1, 2)],
        [(0, 8, (1 << 31) - 1, 1)],
        [(0, 1, 0, 1)] * 65,
    ],
)
def test_owners_that_cannot_be_are_left_out(owners: list[tuple[int, ...]]) -> None:
    read = read_mesh(message(2, 4, owners=owners))
    assert read is not None
    assert read.owners == ()


@pytest.mark.parametrize(
    "own",
    [
        [(0, 1, 0, 9)],
        [(7, 1, 0, 2)],
        [(0, 4, 0, 3)],
        [(-1, 1, 0, 1)],
        [(0, 0, 0, 8)],
        [(0, -1, 0, 1)],
        [(0, 1, -1, 1)],
        [(0, 1, 0, 0)],
        [(0, 1 << 62, 0, (1 << 31) - 1)],
        [(1 << 62, 1, 0, 1)],
        [(0, 1, (1 << 31) - 1, 2)],
        [(0, 1, 0, 8), (0, 1, 0, 1)],
        [(0, 1, 0, 1)] * 65,
    ],
)
def test_places_that_cannot_be_are_left_out(own: list[tuple[int, ...]]) -> None:
    read = read_mesh(message(2, 4, own=own))
    assert read is not None
    assert read.own == ()


def test_members_tell_of_their_own_devices() -> None:
    [found] = gather(
        [
            announced(0, PlaceRun(0, 1, 0, 2)),
            announced(1, PlaceRun(3, 1, 0, 1), PlaceRun(2, 1, 5, 1)),
            announced(2, present=False),
        ]
    )
    assert found.present == 2
    assert place(found, TASKS) == [
        Run(0, 0, 2), Run(1, 5, 1), Run(1, 0, 1), Run(2, UNKNOWN, 2), Run(3, UNKNOWN, 2)
    ]  # fmt: skip


def test_devices_at_even_distances() -> None:
    found = gather([announced(t, PlaceRun(t, 4, 0, 2), owners=()) for t in range(4)])
    assert spread(place(found[0], TASKS)) == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]


def test_nobody_is_believed_about_places_of_others() -> None:
    lies = [announced(1, PlaceRun(0, 1, 0, 2)), announced(2, PlaceRun(3, 1, 0, 2)), announced(0)]
    [found] = gather(lies)
    assert [run.device for run in place(found, TASKS) or []] == [UNKNOWN] * 4
    first, second = (announced(t, PlaceRun(0, 1, t, 2), owners=()) for t in (1, 2))
    [found] = gather([first, second])
    assert place(found, TASKS) == [Run(1, 1, 2), Run(UNKNOWN, UNKNOWN, 6)]
    everything = [announced(t, PlaceRun(0, 1, 0, 8), owners=()) for t in (3, 2, 1, 0)]
    [found] = gather(everything)
    assert place(found, TASKS) == [Run(3, 0, 8)]


def test_owners_who_have_no_task_slot_are_not_believed() -> None:
    [found] = gather([announced(0, PlaceRun(0, 1, 0, 2))])
    assert place(found, {"worker": 3}) == [Run(0, 0, 2), Run(UNKNOWN, UNKNOWN, 6)]
    [found] = gather([announced(0)])
    assert place(found, {"worker": 3}) is None


def test_orders_of_devices_are_meshes_of_their_own_and_who_says_nothing_means_the_usual_one() -> None:
    turned = (OwnerRun(3, 4, -1, 2),)
    found = gather(
        [announced(0), announced(1), announced(2, owners=turned), announced(3, owners=()),
         announced(1, name="gone", present=False)]
    )  # fmt: skip
    assert [(one.mesh.owners, one.present) for one in found] == [(BLOCKS, 3), (turned, 1)]
    assert [run.task for run in place(found[1], TASKS) or []] == [3, 2, 1, 0]


def test_what_members_announce_is_put_together_in_as_many_steps_as_there_are_announcements() -> None:
    compared = 0

    class Owners(tuple[OwnerRun, ...]):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return tuple.__eq__(self, other)

        __hash__ = tuple.__hash__

    count = 500
    told = [announced(t, owners=Owners([OwnerRun(t, 1, 0, 8)])) for t in range(count)]
    assert sum(1 for _ in meshes.gather(told)) >= count  # others go on between them
    assert len(gather(told)) == count  # a mesh of each, which are not compared with all others
    assert compared < 10 * count


def test_a_mesh_that_is_too_large_is_not_spread_out() -> None:
    size = 2 * meshes.MOST_PLACED
    large = MeshReport("l", (("x", size),), "CPU", (OwnerRun(0, 1, 0, size),))
    assert place(gather([Announcement(Task("worker", 0), True, large)])[0], TASKS) is None


def test_runs_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "MOST_RUNS", 3)
    [found] = gather([announced(0)])
    assert [run.task for run in place(found, TASKS) or []] == [0, 1, 2]


async def test_the_topology_shows_which_device_is_where(served, tmp_path) -> None:
    await join_all(served.runtime, 4, "c")
    owners = [(0, 4, 1, 2)]
    for task, own in enumerate([[(0, 1, 0, 2)], [(2, 1, 2, 2)], [(0, 1, 0, 8)]]):
        report = pb.ProgressReport(meshes=[message(2, 4, owners=owners, own=own), message(-2, 1 << 30)])
        caller = Caller("c", Task("worker", task), 1000 + task)
        served.runtime.progress.note(caller, report.SerializeToString())
    async with serving_web(served.runtime, tmp_path) as web, web.client() as http:
        answer = (await http.get("/api/v1/clusters/c/topology")).json()
    [mesh] = answer["meshes"]
    assert mesh["announced_by"] == 3
    assert mesh["placement"] == {
        "job": "worker", "tasks": [0, 1, 2, 3], "devices": [0, 2, -1, -1], "counts": [2, 2, 2, 2],
        "left_out": 0,
    }  # fmt: skip
    assert answer["meshes_unknown"] == 1


async def test_links_between_hosts_are_what_their_members_measured(make_client, served, tmp_path) -> None:
    def links(*told: tuple[int, int, int]) -> pb.ProgressReport:
        return pb.ProgressReport(
            links=[
                pb.Link(rank=rank, round_trip_us=trip, bytes_per_second=rate) for rank, trip, rate in told
            ],
            numa_nodes=[0, 1, 1],
        )

    reports = [
        links((1, 50, 1 << 30), (2, 90, 0), (7, 1, 1), (-1, 1, 1), (0, 1, 1)),
        links((0, 40, 1 << 20)),
        pb.ProgressReport(),
    ]
    for index, report in enumerate(reports):
        stream = await make_client(index, cluster="c", size=3).join()
        await stream.send(heartbeat=coordination_pb2.Heartbeat(sequence=1, report=report))
        await stream.read_kind("heartbeat_ack")
    async with serving_web(served.runtime, tmp_path) as web, web.client() as http:
        answer = (await http.get("/api/v1/clusters/c/topology")).json()
    assert answer["links"] == [
        {
            "hosts": ["host0", other], "machines": ["host0", other], "boot_ids": ["", ""],
            "round_trip_us": trip, "bytes_per_second": rate, "members": members,
        }
        for other, trip, rate, members in (("host1", 40, 1 << 30, 2), ("host2", 90, 0, 1))
    ]  # fmt: skip
    assert [host["numa_nodes"] for host in answer["hosts"]] == [{"0": 1, "1": 1}, {"0": 1, "1": 1}, {}]


async def test_a_host_has_no_more_numa_nodes_than_one_report_may_name(served, tmp_path) -> None:
    """However many members of it name different ones."""
    await join_all(served.runtime, 4, "c")
    tasks = [Task("worker", index) for index in range(4)]
    for at, task in enumerate(tasks):
        report = pb.ProgressReport(numa_nodes=[-1, *range(64 * at, 64 * at + 70)])
        served.runtime.progress.note(Caller("c", task, 1000 + at), report.SerializeToString())
    async with serving_web(served.runtime, tmp_path) as web, web.client() as http:
        answer = (await http.get("/api/v1/clusters/c/topology")).json()
    [host] = answer["hosts"]
    assert host["members"] == 4
    assert len(host["numa_nodes"]) == 64
    assert "-1" not in host["numa_nodes"]


async def test_machines_of_one_name_are_told_apart_in_links_and_hosts(make_client, served, tmp_path) -> None:
    kernels = ("3f2a9c1e-0001", "3f2a9c1e-0002", "3f2a9c1e-0001", "b81d2f00-0003")
    for index, boot_id in enumerate(kernels):
        client = make_client(index, cluster="c", size=4)
        process = common_pb2.Process(host="pi", boot_id=boot_id, pid=index)
        await client.coordination.Register(client.registration(process=process))
        stream = await client.attach()
        report = pb.ProgressReport(
            links=[pb.Link(rank=1, round_trip_us=50 + index)] if index != 1 else [],
            numa_nodes=range(100 * index, 100 * index + 64),
        )
        await stream.send(heartbeat=coordination_pb2.Heartbeat(sequence=1, report=report))
        await stream.read_kind("heartbeat_ack")
    async with serving_web(served.runtime, tmp_path) as web, web.client() as http:
        answer = (await http.get("/api/v1/clusters/c/topology")).json()
        [first, *_] = (await http.get("/api/v1/clusters/c/members")).json()["members"]
    labels = [f"pi (boot {boot_id[:13]})" for boot_id in sorted(set(kernels))]
    assert [host["machine"] for host in answer["hosts"]] == labels
    assert [(link["machines"], link["round_trip_us"], link["members"]) for link in answer["links"]] == [
        ([labels[0], labels[1]], 50, 2),
        ([labels[1], labels[2]], 53, 1),
    ]
    assert [link["boot_ids"] for link in answer["links"]] == [
        ["3f2a9c1e-0001", "3f2a9c1e-0002"],
        ["3f2a9c1e-0002", "b81d2f00-0003"],
    ]
    # The first machine's two members named 128 nodes.
    counted = [(len(host["numa_nodes"]), host["numa_nodes_total"]) for host in answer["hosts"]]
    assert counted == [(64, 128), (64, 64), (64, 64)]
    assert first["boot_id"] == "3f2a9c1e-0001"
