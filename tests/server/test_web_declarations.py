"""Declared clusters over REST and by `dmesh cluster`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.server.web_server import Web, serving_web

from dmesh.cli import main


@pytest.fixture
async def web(served, tmp_path: Path) -> AsyncIterator[Web]:
    async with serving_web(served.runtime, tmp_path) as web:
        yield web


async def test_clusters_are_declared_shown_and_withdrawn(web: Web) -> None:
    path = "/api/v1/clusters/train/declaration"
    wanted = {"jobs": {"worker": 8}, "restart_policy": "REJOIN", "lease": 30.0}
    async with web.client("admin") as admin, web.client() as viewer:
        assert (await viewer.get(path)).status_code == 404
        assert (await viewer.put(path, json=wanted)).status_code == 403
        for _ in range(2):
            done = await admin.put(path, json=wanted)
            assert (done.status_code, done.json()["target"]) == (200, "worker=8")
        shown = (await viewer.get(path)).json()
        assert shown == {"cluster": "train", "heartbeat_interval": None, "stuck_after": None, **wanted}
        assert (await viewer.get("/api/v1/declarations")).json() == {"declarations": [shown]}
        for bad in (
            {}, {"jobs": {}}, {"jobs": {"worker": 0}}, {"jobs": {"worker": 1}, "leese": 3},
            {"jobs": {"worker": "1"}}, {"jobs": {"worker": 1.5}}, {"jobs": {"worker": 1}, "lease": 1e9},
        ):  # fmt: skip
            assert (await admin.put(path, json=bad)).status_code == 422, bad
        for large in ({"jobs": {"worker": (1 << 31) - 1}}, {"jobs": {"worker": 2.0}, "lease": 0.1,
                      "heartbeat_interval": 0.1}):  # fmt: skip
            assert (await admin.put(path, json=large)).status_code == 409, large
        assert (await admin.delete(path)).status_code == 200
        assert (await viewer.get("/api/v1/declarations")).json() == {"declarations": []}


async def test_the_command_line(web: Web, monkeypatch, capsys) -> None:
    async with web.client("admin") as admin:
        monkeypatch.setenv("DMESH_TOKEN", admin.headers["authorization"].removeprefix("Bearer "))
        url = str(admin.base_url).rstrip("/")

    async def run(*words: str) -> tuple[int, str]:
        code = await asyncio.to_thread(main, ["cluster", *words, "--http", url])
        return code, capsys.readouterr().out

    code, out = await run(
        "create", "train", "--jobs", "worker=8,ps=2", "--restart-policy", "rejoin", "--lease", "30"
    )
    assert (code, out) == (0, "Declared cluster train: ps=2, worker=8.\n")
    code, out = await run("list")
    assert out.splitlines()[1].split() == ["train", "ps=2,worker=8", "REJOIN", "-", "30.0", "-"]
    found = json.loads((await run("list", "--json"))[1])
    assert found[0]["jobs"] == {"ps": 2, "worker": 8}
    assert (await run("delete", "train"))[0] == 0
    assert (await run("delete", "train"))[0] == 3
    with pytest.raises(SystemExit):
        main(["cluster", "create", "train", "--jobs", "worker"])
