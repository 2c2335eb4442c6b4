"""What members report of themselves: kept as they came, bounded, and served to those who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from tests.server.raw_client import PATIENCE, RawClient

from dmesh.testing import ManualClock
from dmesh.v1 import coordination_pb2, progress_pb2
from dmesh_server import progress
from dmesh_server.core.model import Caller, Task
from dmesh_server.progress import CallState, ProgressBook

Make = Callable[..., RawClient]


def report(where: str = "train.py:31 in step") -> progress_pb2.ProgressReport:
    call = progress_pb2.CallRecord(
        group=7, sequence=12, call="all_reduce(sum) of float64 (1000,)", nbytes=8000, age_us=2_000_000,
        state=progress_pb2.CALL_STATE_WAITING, elapsed_us=2_000_000, waited_us=-1, waits_for=[2],
    )  # fmt: skip
    return progress_pb2.ProgressReport(
        where=where,
        operation="all_reduce",
        idle_ms=2500,
        barriers=[progress_pb2.BarrierWait(name="b", instance=3, age_ms=500)],
        groups=[
            progress_pb2.GroupProgress(
                id=7, name="world", ranks=[0, 2], size=2, issued=12, finished=11, last=call, counted=11,
                elapsed_us=11_000, waited_us=1_000,
            )
        ],
        recent=[call],
        meshes=[
            progress_pb2.AnnouncedMesh(
                name="m", axes=[progress_pb2.MeshAxis(name="batch", size=2)], device_type="CPU"
            )
        ],
    )  # fmt: skip


def caller(index: int = 0, cluster: str = "c", incarnation: int = 5) -> Caller:
    return Caller(cluster, Task("worker", index), incarnation)


def test_a_report_is_read_into_plain_values() -> None:
    clock = ManualClock(100.0)
    book = ProgressBook(clock)
    book.note(caller(), report().SerializeToString())
    clock.advance(1.0)
    [member] = book.members("c")
    assert (member.task, member.incarnation, member.received_at) == (Task("worker", 0), 5, 100.0)
    read = member.read()
    assert read is not None
    assert (read.where, read.progressed_at) == ("train.py:31 in step", 97.5)
    [group] = read.groups
    assert (group.id, group.ranks, group.issued, group.finished) == (7, (0, 2), 12, 11)
    assert group.last == read.recent[0]
    last = read.recent[0]
    assert (last.state, last.called_at, last.waited, last.waits_for) == (CallState.WAITING, 98.0, None, (2,))
    assert read.barriers[0].since == 99.5
    assert read.meshes[0].axes == (("batch", 2),)


def test_the_last_report_counts_and_departed_members_keep_theirs() -> None:
    book = ProgressBook(ManualClock())
    for index, where in ((1, "old"), (0, "zero"), (1, "new")):
        book.note(caller(index), report(where).SerializeToString())
    assert [member.read().where for member in book.members("c")] == ["zero", "new"]  # type: ignore[union-attr]
    assert book.members("another") == ()


def test_what_is_no_report_is_none_and_what_is_too_large_or_nobodys_is_dropped() -> None:
    book = ProgressBook(ManualClock())
    book.note(caller(0), b"\xff\xff")
    book.note(caller(1), b"x" * (progress.MOST_BYTES + 1))
    book.note(Caller("c"), report().SerializeToString())
    [member] = book.members("c")
    assert member.read() is None


def test_texts_and_lists_are_cut_to_what_is_agreed() -> None:
    message = progress_pb2.ProgressReport(
        where="w" * 5000, groups=[progress_pb2.GroupProgress(id=n, name="n" * 300) for n in range(40)]
    )
    message.groups[0].ranks.extend(range(1000))
    message.recent.add(state=progress_pb2.CallState.ValueType(99), age_us=-5)
    book = ProgressBook(ManualClock(10.0))
    encoded = message.SerializeToString()
    assert len(encoded) > progress.MOST_BYTES
    del message.groups[20:]
    book.note(caller(), message.SerializeToString())
    read = book.members("c")[0].read()
    assert read is not None
    assert (len(read.where), len(read.groups[0].name), len(read.groups[0].ranks)) == (300, 256, 256)
    assert (read.recent[0].state, read.recent[0].called_at) == (CallState.UNKNOWN, 10.0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = report().SerializeToString()
    monkeypatch.setattr(progress, "MOST_BYTES_IN_ALL", 3 * len(encoded))
    book = ProgressBook(ManualClock())
    for index in range(5):
        book.note(caller(index), encoded)
    assert len(book.members("c")) == 3
    book.note(caller(0), encoded)  # who is there already may go on
    assert [member.task.index for member in book.members("c")] == [0, 1, 2]


def test_clusters_that_say_nothing_any_more_are_forgotten() -> None:
    clock = ManualClock()
    book = ProgressBook(clock)
    book.note(caller(cluster="old"), b"")
    clock.advance(progress.RETENTION / 2)
    book.note(caller(cluster="new"), b"")
    clock.advance(progress.RETENTION / 2 + 1)
    assert (book.members("old"), len(book.members("new"))) == ((), 1)


async def test_reports_come_with_heartbeats_and_go_to_observers(make_client: Make) -> None:
    client, observer = make_client(0), make_client(None)
    session = await client.join()
    request = progress_pb2.GetProgressRequest(caller=observer.caller)
    assert not (await observer.coordination.GetProgress(request, timeout=PATIENCE)).members
    beat = coordination_pb2.Heartbeat(sequence=1, progress=1, report=report())
    await session.send(heartbeat=beat)
    async with asyncio.timeout(PATIENCE):
        while not (answer := await observer.coordination.GetProgress(request, timeout=PATIENCE)).members:
            await asyncio.sleep(0.01)
    [member] = answer.members
    assert (member.task.index, member.incarnation) == (0, client.caller.incarnation)
    assert member.report == report()


async def test_who_asks_must_say_who(make_client: Make) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await make_client(None).coordination.GetProgress(progress_pb2.GetProgressRequest(), timeout=PATIENCE)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_clusters_are_listed(make_client: Make) -> None:
    for index in (0, 1):
        client = make_client(index, cluster="b", size=3)
        await client.join()
    await client.leave()
    await make_client(0, cluster="a", size=1).join()
    answer = await make_client(None).coordination.ListClusters(
        progress_pb2.ListClustersRequest(), timeout=PATIENCE
    )
    assert [(c.name, c.present, c.tasks) for c in answer.clusters] == [("a", 1, 1), ("b", 1, 3)]
