"""What was measured, kept for the table in docs/robustness.md.

Every figure is one line of JSON in `.faults/figures.jsonl` (or where DMESH_FAULTS_FIGURES says):
scenario, name, unit, values, seed, run. `python -m tests.faults.report` fills the table from it.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

DEFAULT_FILE = Path(__file__).resolve().parents[2] / ".faults" / "figures.jsonl"
FILE = Path(os.environ.get("DMESH_FAULTS_FIGURES", DEFAULT_FILE))
RUN_VARIABLE = "DMESH_FAULTS_RUN"
# Read before the fixture that hides DMESH_* from the tests does its work.
RUN = os.environ.get(RUN_VARIABLE, "")
"""Which run of all tests this is; set by `tests.faults.runs`."""


def scenario_of(path: Path) -> str:
    """Which scenario a file of tests is about: `test_s04_client_killed.py` is s04."""
    match = re.match(r"test_(s\d+|kill|[a-z]+)", path.name)
    return match[1] if match else path.stem


def keep(line: dict[str, object]) -> None:
    """Adds one line to the file."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered: one write for each line, because several tests run at a time.
    with FILE.open("ab", buffering=0) as file:
        file.write(json.dumps({**line, "run": RUN}).encode() + b"\n")


class Figures:
    """Takes the figures of one test.

    Args:
        scenario: Of the table, e.g. "s04".
        seed: With which the test ran.
    """

    def __init__(self, scenario: str, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed

    def add(self, name: str, values: float | Sequence[float], unit: str = "s") -> None:
        """Keeps one figure, or many of one kind."""
        many = [float(value) for value in values] if isinstance(values, Sequence) else [float(values)]
        assert many, f"no values for {name}"
        line = {
            "scenario": self._scenario,
            "name": name,
            "unit": unit,
            "values": [round(value, 6) for value in many],
            "seed": self._seed,
            "at": round(time.time()),
        }
        keep(line)
        print(f"{self._scenario} {name}: {summary(many, unit)}")


def summary(values: Sequence[float], unit: str) -> str:
    """One line for people: the value, or median and maximum of many."""
    if len(values) == 1:
        return shown(values[0], unit)
    return (
        f"median {shown(statistics.median(values), unit)}, max {shown(max(values), unit)} (n={len(values)})"
    )


def shown(value: float, unit: str) -> str:
    """A number with its unit, in as many digits as mean something."""
    if unit == "s":
        return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"
    return f"{value:,.0f} {unit}".strip()
