"""The page without scripts: bounded and made in steps, however large the clusters are."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from tests.server.web_server import join_all, serving_web

from dmesh_server.core.roster import TaskSlot
from dmesh_server.web import pacer, pages


async def test_a_large_cluster_is_shown_in_part(
    served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await join_all(served.runtime, 1000, "large")
    looked_at = 0
    snapshot = TaskSlot.snapshot

    def counted(slot: TaskSlot) -> object:
        nonlocal looked_at
        looked_at += 1
        return snapshot(slot)

    async with serving_web(served.runtime, tmp_path) as web, web.client() as http:
        monkeypatch.setattr(TaskSlot, "snapshot", counted)
        page = (await http.get("/")).text
    assert page.count("/task:") == pages.MOST_MEMBERS
    assert f"and {1000 - pages.MOST_MEMBERS} more members" in page
    assert "● 1000 CONNECTED" in page
    assert looked_at <= 2 * pages.MOST_MEMBERS


async def test_the_loop_goes_on_between_the_steps(
    served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await join_all(served.runtime, 100, f"cluster-{number}")
    monkeypatch.setattr(pacer, "_STEP", 0.0)
    monkeypatch.setattr(pacer, "BETWEEN", 0.0)
    passes = 0

    async def count() -> None:
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    counting = asyncio.create_task(count())
    steps = pacer.Steps(pacer.Pacer())
    await pages.status_page(served.runtime.views, steps, incarnation=1, now=0.0, can_log_out=False)
    counting.cancel()
    assert passes > 100


async def test_clusters_are_on_pages(served, tmp_path: Path) -> None:
    names = [f"c{number:02}" for number in range(pages.MOST_CLUSTERS + 3)]
    for name in names:
        await join_all(served.runtime, 1, name)
    async with serving_web(served.runtime, tmp_path) as web, web.client() as http:
        first = (await http.get("/")).text
        [link] = re.findall(r'href="(/\?after=[^"]+)"', first)
        assert "3 more clusters" in first
        second = (await http.get(link)).text
    shown = re.findall(r"<h2><bdi>(.*?)</bdi>", first) + re.findall(r"<h2><bdi>(.*?)</bdi>", second)
    assert shown == names
