"""Scenario 19: very many clients on one server. The program that does it is `benchmarks/clients.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.figures import Figures

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = int(os.environ.get("DMESH_LOAD_CLIENTS") or 10_000)
HEARTBEATS = float(os.environ.get("DMESH_LOAD_SECONDS") or 30)
"""Seconds of nothing but heartbeats; 300 and more in the long form, `make load-10k`."""

pytestmark = [pytest.mark.faults, pytest.mark.alone, pytest.mark.timeout(900 + 2 * HEARTBEATS)]


@pytest.mark.parametrize("ending", ["leave", "vanish"])
def test_all_register_meet_live_and_go(ending: str, figures: Figures) -> None:
    """No call fails, nobody is taken for dead, and the promised limits of time and memory hold."""
    options = ["--clients", str(CLIENTS), "--heartbeat", str(HEARTBEATS), "--ending", ending, "--check"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "clients.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["clients"] == CLIENTS
    assert report["heartbeats"] >= CLIENTS * int(HEARTBEATS / (1 + max(3, CLIENTS / 1000)))
    assert done.returncode == 0, done.stderr
    figures.add("register", report["register_s"])
    figures.add("barrier", report["barrier_s"])
    figures.add("server memory per client", report["server_kib_per_client"] * 1024, "B")
    figures.add("processor time for heartbeats, each second", report["heartbeats_server_cores"])
    if ending == "leave":
        figures.add("all have left", report["leave_s"])
    else:
        figures.add("all departures are told", report["all_departures_told_s"])
