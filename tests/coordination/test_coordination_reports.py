"""The reports that go with heartbeats: what they say, how often, and how large they are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from tests.coordination.conftest import PATIENCE, eventually, identity

from dmesh.coordination.activity import ActivityTracker
from dmesh.coordination.agent import Agent
from dmesh.coordination.barriers import Barriers
from dmesh.coordination.cluster_settings import ClusterSettings
from dmesh.coordination.faults import Fault
from dmesh.coordination.link import Link
from dmesh.coordination.reports import MOST_BYTES, Reports
from dmesh.testing import ManualClock
from dmesh.v1 import common_pb2
from dmesh.v1 import progress_pb2 as pb


class Source:
    def __init__(self, fill: Callable[[pb.ProgressReport], object]) -> None:
        self.fill = fill


def make(clock: Callable[[], float] | None = None) -> tuple[Reports, ActivityTracker, Barriers]:
    tracker, barriers = ActivityTracker(), Barriers()
    return Reports(tracker, barriers, *([clock] if clock else [])), tracker, barriers


def test_a_report_says_where_the_main_thread_is_and_in_what() -> None:
    reports, tracker, barriers = make()
    arrival = barriers.enter("loaded", [], 0)
    with tracker.during("barrier 'loaded'"):
        report = reports.make()
    assert report.operation == "barrier 'loaded'"
    path, _, rest = report.where.partition(":")
    assert path == __file__
    assert rest.endswith(" in test_a_report_says_where_the_main_thread_is_and_in_what")
    assert [(barrier.name, barrier.instance) for barrier in report.barriers] == [("loaded", 0)]
    barriers.give_up(arrival)
    assert not reports.make().barriers
    [past] = barriers.past()
    assert past.ended is not None
    assert past.ended >= past.called


def test_the_users_line_is_named_while_the_main_thread_is_inside_dmesh_or_a_library() -> None:
    reports, _, _ = make()
    told: list[str] = []
    event = threading.Event()

    def look() -> None:
        told.append(reports.make().where)
        event.set()

    timer = threading.Timer(0.05, look)
    timer.start()
    event.wait(60)  # its frames are of the standard library
    timer.join()
    assert told[0].startswith(f"{__file__}:")


def test_reports_are_not_made_more_often_than_is_of_use() -> None:
    clock = ManualClock()
    reports, _, _ = make(clock)
    assert reports.due() is not None
    assert reports.due() is None
    clock.advance(0.5)
    assert reports.due() is not None


def test_a_source_that_fails_costs_the_report_alone(caplog: pytest.LogCaptureFixture) -> None:
    reports, _, _ = make()
    reports.add(Source(lambda report: report.recent.add(call=7)))
    with caplog.at_level(logging.ERROR):
        assert reports.due() is None
    assert "could not be made" in caplog.text


def test_what_is_too_large_is_cut_from_what_matters_least() -> None:
    reports, _, _ = make()

    def fill(report: pb.ProgressReport) -> None:
        for n in range(100):
            report.recent.add(call="c" * 200, sequence=n)
            report.groups.add(name="g" * 100, issued=n)
            report.meshes.add(name="m")

    reports.add(Source(fill))
    report = reports.make()
    assert report.ByteSize() <= MOST_BYTES
    assert 0 < len(report.recent) < 100
    assert report.recent[-1].sequence == 99, "the oldest go first"
    assert len(report.groups) == len(report.meshes) == 100
    reports.add(
        Source(lambda report: report.groups.extend(pb.GroupProgress(name="x" * 100) for _ in range(99)))
    )
    report = reports.make()
    assert report.ByteSize() <= MOST_BYTES
    assert not report.recent
    assert not report.meshes
    assert len(report.groups) > 100
    assert report.groups[-1].issued == 0, "the first matter most"


def mesh(name: str, runs: int = 0) -> pb.AnnouncedMesh:
    return pb.AnnouncedMesh(
        name=name,
        axes=[pb.MeshAxis(name="batch", size=2), pb.MeshAxis(name="model", size=4)],
        device_type="CPU",
        own=[pb.PlaceRun(place=1000 * number, stride=1, count=1) for number in range(runs)],
    )


def test_devices_of_the_latest_meshes_are_told_of_as_far_as_there_is_room() -> None:
    reports, _, _ = make()
    for number in range(16):
        reports.announce_mesh(mesh(f"m{number}", runs=64))
    told = reports.make()
    assert [one.name for one in told.meshes] == [f"m{number}" for number in range(16)]
    placed = [bool(one.own) for one in told.meshes]
    assert 0 < placed.count(True) < 16
    assert placed == sorted(placed), "the latest have theirs"
    assert told.ByteSize() < 8 << 10


def test_meshes_are_told_of_once_and_the_last_ones() -> None:
    reports, _, _ = make()
    for number in (0, 0, *range(20)):
        reports.announce_mesh(mesh(f"m{number}"))
    meshes = reports.make().meshes
    assert [mesh.name for mesh in meshes] == [f"m{number}" for number in range(4, 20)]
    assert [(axis.name, axis.size) for axis in meshes[0].axes] == [("batch", 2), ("model", 4)]


def test_heartbeats_carry_reports_to_the_server(server) -> None:
    wishes = ClusterSettings(heartbeat_interval=0.05, lease=PATIENCE)
    agent = Agent(server.address, identity(0, 1, settings=wishes))
    agent.add_report_source(Source(lambda report: report.groups.add(name="mine")))
    agent.start()
    link = Link(server.address)
    request = pb.GetProgressRequest(caller=common_pb2.Caller(cluster="default"))

    def told() -> bool:
        answer = link.attempt(link.coordination.GetProgress, request, PATIENCE)
        assert not isinstance(answer, Fault)
        return any(group.name == "mine" for member in answer.members for group in member.report.groups)

    try:
        eventually(told)
    finally:
        link.close()
        agent.close()
