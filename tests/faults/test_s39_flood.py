"""Scenario 39: floods without a token, on both ports: operators and clients are served all the while."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import grpc
import httpx
import pytest
from tests.faults.figures import Figures
from tests.faults.secured import DEADLINE, ask, serving
from tests.faults.test_s20_floods import HEARTBEAT, TOKEN, Member
from tests.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.alone]

ROOT = Path(__file__).resolve().parents[2]

SECONDS = 8.0
PAGES = ("/api/v1/clusters", "/", "/metrics")
ENVIRON = {"DMESH_TOKEN": TOKEN}
STRANGERS = {"another host": "127.0.0.2", "the operator's host": "127.0.0.1"}


class Flood:
    """A flood from a process of its own."""

    def __init__(self, kind: str, address: str, rate: int, source: str, seconds: float = SECONDS) -> None:
        script = str(Path(__file__).with_name("flooder.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, kind, address, str(rate), str(seconds), source],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> dict[str, int]:
        out, _ = self._process.communicate(timeout=DEADLINE)
        said: dict[str, int] = json.loads(out)
        return said


def look(url: str, flood: Flood) -> tuple[Counter[int], list[float]]:
    """Reads all pages again and again as long as the flood lasts; returns statuses and seconds."""
    statuses, waits = Counter[int](), []
    with httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=DEADLINE
    ) as operator:
        while flood.running:
            for page in PAGES:
                began = time.monotonic()
                statuses[operator.get(page).status_code] += 1
                waits.append(time.monotonic() - began)
            time.sleep(0.02)
    return statuses, waits


@pytest.mark.parametrize("source", STRANGERS.values(), ids=STRANGERS)
def test_requests_that_need_no_token(source: str, figures: Figures) -> None:
    with serving("--memory", environ=ENVIRON) as server:
        member = Member(server.grpc)
        flood = Flood("http", server.http.removeprefix("http://"), 1500, source)
        statuses, waits = look(server.http, flood)
        said = flood.end()
        member.close()
    assert set(statuses) == {200}
    assert said["sent"] + said["refused"] > 100 * SECONDS, "that was no flood"
    waits.sort()
    assert waits[int(len(waits) * 0.99)] < 1.0
    where = next(name for name, host in STRANGERS.items() if host == source)
    figures.add(f"strangers' requests a second, from {where}", said["sent"] / SECONDS, "/s")
    figures.add(f"an operator's request meanwhile, {where}", waits)
    figures.add(f"a client's call meanwhile, {where}", member.waits)


def test_a_browser_without_a_token_loads_the_login_page_in_the_flood() -> None:
    with serving("--memory", environ=ENVIRON) as server:
        flood = Flood("http", server.http.removeprefix("http://"), 1500, "127.0.0.2")
        while flood.running:  # it is another host, whose own budget is full
            assert httpx.get(f"{server.http}/login", trust_env=False).status_code in (200, 429)
            assert httpx.get(f"{server.http}/livez", trust_env=False).status_code == 200
            time.sleep(0.2)
        flood.end()
        assert httpx.get(f"{server.http}/login", trust_env=False).status_code == 200


def test_calls_without_a_token(figures: Figures) -> None:
    with serving("--memory", environ=ENVIRON) as server:
        member = Member(server.grpc)
        flood = Flood("calls", server.grpc, 64, "127.0.0.1")
        statuses, waits = look(server.http, flood)
        said = flood.end()
        member.close()
        assert "connection_closed" in server.log
    assert set(statuses) == {200}
    assert sorted(waits)[int(len(waits) * 0.99)] < 1.0
    figures.add("strangers' calls a second", said["sent"] / SECONDS, "/s")
    figures.add("a client's call meanwhile, gRPC", member.waits)


def test_connections_without_a_token_are_closed(figures: Figures) -> None:
    with serving("--memory", environ=ENVIRON) as server:
        member = Member(server.grpc)
        flood = Flood("hold", server.grpc, 500, "127.0.0.2", 16.0)
        assert flood.end() == {"sent": 500, "refused": 0, "open": 0}
        member.close()


def test_a_thousand_clients_of_one_host_that_start_at_once_are_no_strangers() -> None:
    limits = "--max-connections 1200 --max-unauthenticated-per-host 8"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "clients.py"), "--clients", "1000", "--serve", limits],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["connections"] == 1000


def test_strangers_of_one_host_leave_room_for_clients(figures: Figures) -> None:
    limits = ("--max-connections", "200", "--max-unauthenticated-per-host", "20")
    with serving("--memory", *limits, environ=ENVIRON) as server:
        member = Member(server.grpc)
        floods = [Flood("hold", server.grpc, 300, "127.0.0.2", 4.0) for _ in range(2)]
        waits = []
        while any(flood.running for flood in floods):
            began = time.monotonic()
            eventually(
                lambda: ask(server.grpc, TOKEN, cluster="default") is grpc.StatusCode.OK, "a new client"
            )
            waits.append(time.monotonic() - began)
        for flood in floods:
            assert flood.end()["open"] <= 40
        member.close()
    assert max(waits) < 2 * HEARTBEAT
    figures.add("a new client's way in, all connections taken by strangers", waits)
