"""Loops of members' programs over REST: put together by name, bounded, and of members that are there."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from tests.server.raw_client import RawClient
from tests.server.web_server import Web, serving_web

from dmesh.v1 import coordination_pb2
from dmesh.v1 import progress_pb2 as pb
from dmesh_server.progress import loops_of

Make = Callable[..., RawClient]


@pytest.fixture
async def web(served, tmp_path: Path) -> AsyncIterator[Web]:
    async with serving_web(served.runtime, tmp_path) as running:
        yield running


@pytest.fixture
async def viewer(web: Web) -> AsyncIterator[httpx.AsyncClient]:
    async with web.client() as client:
        yield client


def said(
    done: int, rate: float = 2.0, name: str = "train", total: int = 100, over: bool = False
) -> pb.LoopProgress:
    return pb.LoopProgress(
        name=name, unit="batches", done=done, total=total, rate=rate, elapsed_ms=5000, over=over
    )


async def tell(make_client: Make, *loops: list[pb.LoopProgress]) -> None:
    for index, told in enumerate(loops):
        stream = await make_client(index, cluster="c", size=len(loops)).join()
        report = pb.ProgressReport(loops=told)
        await stream.send(heartbeat=coordination_pb2.Heartbeat(sequence=1, report=report))
        await stream.read_kind("heartbeat_ack")


async def page(viewer: httpx.AsyncClient, **query: int) -> dict:
    answer = await viewer.get("/api/v1/clusters/c/progress", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_loop_is_as_far_and_as_fast_as_its_slowest_rank(viewer, make_client: Make) -> None:
    await tell(make_client, [said(50)], [said(40, rate=1.0)], [])
    found = await page(viewer, members=1)
    assert (found["cluster"], found["reported"]) == ("c", 2)
    [loop] = found["loops"]
    names = ("name", "unit", "total", "ranks", "least", "most", "rate", "over")
    assert {name: loop[name] for name in names} == {
        "name": "train", "unit": "batches", "total": 100, "ranks": 2, "least": 40, "most": 50, "rate": 1.0,
        "over": False,
    }  # fmt: skip
    assert 0 < loop["left"] <= 60.0
    [slowest] = loop["members"]
    assert (slowest["task"], slowest["done"], slowest["elapsed"]) == ("/job:worker/task:1", 40, 5.0)
    assert (await page(viewer))["loops"][0]["members"] == []


async def test_nested_loops_are_two_and_what_is_over_comes_last(viewer, make_client: Make) -> None:
    epochs = said(1, name="epochs", total=3)
    await tell(make_client, [said(9, name="old", over=True)], [epochs, said(7, total=0)])
    loops = (await page(viewer))["loops"]
    assert [(loop["name"], loop["over"], loop["left"] is None) for loop in loops] == [
        ("epochs", False, False), ("train", False, True), ("old", True, True),
    ]  # fmt: skip


async def test_a_cluster_without_loops_has_an_empty_list(viewer, make_client: Make) -> None:
    await tell(make_client, [])
    assert await page(viewer) == {"cluster": "c", "reported": 0, "loops": []}
    assert (await viewer.get("/api/v1/clusters/none/progress")).status_code == 404
    assert (await viewer.get("/api/v1/clusters/c/progress?members=1001")).status_code == 422


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_numbers_of_strangers_are_made_fit_to_show(rate: float) -> None:
    message = pb.ProgressReport(
        loops=[pb.LoopProgress(name="x" * 1000, done=-5, total=-1, rate=rate, elapsed_ms=-3)] * 9
    )
    found = loops_of(message)
    assert len(found) == 4
    assert found[0] == ("x" * 256, "steps", 0, 0, 0.0, 0.0, False)
