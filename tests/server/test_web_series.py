"""Time series: what members report becomes columns, of fixed size, that readers get once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.server.web_server import Web, join_all, serving_web

from dmesh.testing import ManualClock
from dmesh.v1 import progress_pb2 as pb
from dmesh_server.core.effects import Done
from dmesh_server.core.events import Leave
from dmesh_server.core.model import Caller, Task
from dmesh_server.runtime import Runtime
from dmesh_server.store.memory import MemoryStore
from dmesh_server.web import series
from dmesh_server.web.pacer import Pacer
from dmesh_server.web.series import KEPT, MOST_ROWS, STEP, Recorder


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def runtime(clock: ManualClock) -> AsyncIterator[Runtime]:
    made = Runtime(MemoryStore(), clock=clock)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def web(runtime: Runtime, tmp_path: Path) -> AsyncIterator[Web]:
    async with serving_web(runtime, tmp_path) as running:
        yield running


def tell(
    runtime: Runtime,
    rank: int,
    finished: int,
    *,
    waited: float = 0.0,
    waiting: bool = False,
    rate: float = 0.0,
) -> None:
    """Let a rank report: so many calls of 1,000 bytes, each of which waited so long, and one under way."""
    last = pb.CallRecord(
        group=7, sequence=finished, nbytes=1_000, elapsed_us=60_000_000 if waiting else 1,
        state=pb.CALL_STATE_WAITING if waiting else pb.CALL_STATE_DONE,
    )  # fmt: skip
    group = pb.GroupProgress(
        id=7, size=4, issued=finished + waiting, finished=finished, last=last, counted=10,
        waited_us=round(waited * 1e7), elapsed_us=round(waited * 1e7) + 1,
    )  # fmt: skip
    loops = [pb.LoopProgress(name="train", done=finished, total=500, rate=rate)] if rate else []
    report = pb.ProgressReport(groups=[group], loops=loops).SerializeToString()
    runtime.progress.note(Caller("big", Task("worker", rank), 1000 + rank), report)


async def column(recorder: Recorder) -> dict[str, object]:
    await recorder.record()
    return series.ClusterColumn.model_validate_json(recorder.clusters["big"].columns[-1][1]).model_dump()


async def test_two_reports_of_a_rank_make_rates_and_shares(runtime: Runtime, clock: ManualClock) -> None:
    await join_all(runtime, 4)
    recorder = Recorder(runtime, Pacer())
    for rank in range(4):
        tell(runtime, rank, 100)
    first = await column(recorder)
    assert (first["calls"], first["bytes"], first["wait"]) == (None, None, "ff" * 4)
    clock.advance(STEP)
    tell(runtime, 0, 150, waited=0.05, rate=10.0)
    tell(runtime, 1, 150, waited=0.0, rate=8.0)
    tell(runtime, 2, 100, waiting=True)
    then = await column(recorder)
    assert then["calls"] == pytest.approx((10 + 10 + 0) / 3, abs=1e-3)
    assert then["bytes"] == 20_000
    # Fifty calls of 50 ms are half of five seconds; rank 2 waited all the time; rank 3 said nothing new.
    assert then["wait"] == "7f00feff"
    assert (then["pace"], then["done"], then["silence"]) == (0.125, 150, STEP)
    clock.advance(10 * STEP)
    assert (await column(recorder))["wait"] == "ff" * 4, "old reports tell nothing of now"


async def test_a_new_process_begins_anew_and_a_departed_one_is_left_out(
    runtime: Runtime, clock: ManualClock
) -> None:
    await join_all(runtime, 2)
    recorder = Recorder(runtime, Pacer())
    for finished in (10, 20):
        for rank in range(2):
            tell(runtime, rank, finished, waited=0.1)
        last = await column(recorder)
        clock.advance(STEP)
    assert last["wait"] == "3333"
    caller = Caller("big", Task("worker", 1), 1001)
    await runtime.request(Leave(runtime.next_number(), caller, "leave", ""), Done)
    tell(runtime, 0, 30, waited=0.1)
    assert (await column(recorder))["wait"] == "33ff"


async def test_memory_is_fixed_however_long_it_runs_and_however_many_ranks(
    runtime: Runtime, clock: ManualClock
) -> None:
    await join_all(runtime, 200)
    recorder = Recorder(runtime, Pacer())
    for number in range(KEPT + 20):
        for rank in (0, 1, 2, 3):
            tell(runtime, rank, 10 * number, waited=0.1 * rank)
        await recorder.record()
        clock.advance(STEP)
    kept = recorder.clusters["big"]
    assert (len(kept.columns), len(recorder.server), kept.band) == (KEPT, KEPT, 4)
    wait = series.ClusterColumn.model_validate_json(kept.columns[-1][1]).wait
    assert len(wait) // 2 == 50 <= MOST_ROWS
    assert wait.startswith("00ff"), "a row shows the rank that waits least"
    assert max(len(encoded) for _, encoded in kept.columns) < 400


async def test_readers_ask_for_later_columns_only(web: Web, clock: ManualClock) -> None:
    await join_all(web.runtime, 2)
    recorder = web.server._app.recorder  # type: ignore[union-attr]
    async with web.client() as http:
        empty = (await http.get("/api/v1/clusters/big/series")).json()
        assert (empty["columns"], empty["step"]) == ([], STEP)
        for _ in range(3):
            clock.advance(STEP)
            await recorder.record()
        page = (await http.get("/api/v1/clusters/big/series")).json()
        numbers = [one["n"] for one in page["columns"]]
        assert numbers == [1, 2, 3]
        later = (await http.get("/api/v1/clusters/big/series", params={"after": 2})).json()
        assert later["columns"] == page["columns"][2:]
        server = (await http.get("/api/v1/series", params={"after": 1})).json()["columns"]
        assert [one["n"] for one in server] == [2, 3]
        assert server[0]["sessions"] == 2
        assert (await http.get("/api/v1/clusters/none/series")).status_code == 404


async def test_an_operator_ends_a_cluster(web: Web) -> None:
    await join_all(web.runtime, 3)
    async with web.client("viewer") as viewer, web.client("admin") as admin:
        where = "/api/v1/clusters/big"
        incarnation = (await viewer.get(where)).json()["incarnation"]
        asked = {"incarnation": incarnation, "reason": "maintenance"}
        assert (await viewer.delete(where, params=asked)).status_code == 403
        assert (await admin.delete(where, params={"incarnation": "0" * 16})).status_code == 409
        assert (await viewer.get(where)).json()["members"] == {"CONNECTED": 3}
        answer = (await admin.delete(where, params=asked)).json()
        assert (answer["done"], answer["action"]) == (True, "end_cluster")
        assert (await viewer.get(where)).json()["ended"]
        assert (await admin.delete(where, params=asked)).status_code == 200, "it may be repeated"
        events = (await viewer.get("/api/v1/events", params={"kind": "admin_action"})).json()["events"]
        assert [one["details"]["action"] for one in events] == ["end_cluster"]
        entries = (await admin.get("/api/v1/audit")).json()["entries"]
        assert [(one["action"], one["outcome"], one["detail"]) for one in reversed(entries)] == [
            ("end_cluster", "done", "maintenance"), ("end_cluster", "unchanged", "maintenance"),
        ]  # fmt: skip
        members = (await viewer.get(f"{where}/members")).json()["members"]
        assert {one["cause"] for one in members} == {"EVICTED"}
