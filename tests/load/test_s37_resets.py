"""Scenario 37: the connections of very many clients are reset at once, by `benchmarks/clients.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.figures import Figures

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = int(os.environ.get("DMESH_LOAD_RESETS") or 1_000)
"""10,000 in the long form, `make load-10k`."""
ROUNDS = 3

pytestmark = [pytest.mark.faults, pytest.mark.alone, pytest.mark.timeout(900)]


def test_nobody_is_taken_for_dead(figures: Figures) -> None:
    """Every session is attached again, nobody departs, and all pass the next barrier."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "clients.py"),
         "--clients", str(CLIENTS), "--resets", str(ROUNDS)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["clients"] == CLIENTS
    figures.add(f"{CLIENTS} resets at once to the last session attached again", report["resets_s"])
