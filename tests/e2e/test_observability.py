"""A server on its own, looked at from outside: REST, events, metrics, an eviction."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.faults.secured import DEADLINE, serving, write_tokens
from tests.server.raw_client import RawClient

from dmesh.security import tokens


async def test_a_server_can_be_looked_at_and_operated(tmp_path: Path) -> None:
    viewer, worker, admin = (tokens.generate() for _ in range(3))
    path = write_tokens(
        tmp_path / "t", f"{worker} role=worker", f"{viewer} role=viewer", f"{admin} role=admin name=ops"
    )
    arguments = ("--data-dir", str(tmp_path / "data"), "--token-file", str(path), "--lease", "6")
    with serving(*arguments) as server:
        looker = httpx.AsyncClient(
            base_url=server.http, timeout=DEADLINE, trust_env=False,
            headers={"Authorization": f"Bearer {viewer}"},
        )  # fmt: skip
        clients = [RawClient(server.grpc, index, cluster="train", size=3, token=worker) for index in range(3)]
        streams = [await client.join() for client in clients]
        async with looker.stream("GET", "/api/v1/events/stream") as response:
            lines = response.aiter_lines()
            async for line in lines:
                if line == "event: hello":
                    break
            streams[2].hang_up()
            async for line in lines:
                if line.startswith("data: ") and "member_lost" in line:
                    break
        event = json.loads(line.removeprefix("data: "))
        assert (event["task"], event["details"]["host"]) == ("/job:worker/task:2", "host2")

        evicted = await looker.delete(
            "/api/v1/clusters/train/members/worker/1",
            params={"incarnation": f"{clients[1].caller.incarnation:016x}", "reason": "in the way"},
            headers={"Authorization": f"Bearer {admin}"},
        )
        assert evicted.status_code == 200
        page = (await looker.get("/api/v1/clusters/train/members")).json()
        assert [one["condition"] for one in page["members"]] == ["CONNECTED", "FAILED", "LOST"]
        assert f'by="token {tokens.fingerprint(admin)} (ops)"' in server.log
        assert admin not in server.log

        facts = (await looker.get("/api/v1/server")).json()
        assert (facts["store"]["kind"], facts["grpc"]) == ("sqlite", server.grpc)
        assert facts["store"]["commit"]["count"] > 0
        assert facts["loop_lag"]["count"] > 0
        origins = {one["name"]: one["origin"] for one in facts["settings"]}
        assert origins["limits.lease"] == "--lease"
        assert origins["limits.heartbeat_interval"] == "default"
        metrics = {
            one.name: one for one in text_string_to_metric_families((await looker.get("/metrics")).text)
        }
        assert metrics["dmesh_store_records"].samples[0].value > 0
        printed = subprocess.run(
            [sys.executable, "-m", "dmesh", "events", "--http", server.http, "--cluster", "train"],
            env={"DMESH_TOKEN": viewer, "PATH": ""}, capture_output=True, text=True, timeout=DEADLINE,
        )  # fmt: skip
        assert printed.returncode == 0, printed.stderr
        assert "/job:worker/task:1 (host host1, pid 101) failed: evicted by an operator" in printed.stdout
        await looker.aclose()
        for client in clients:
            await client.channel.close()
