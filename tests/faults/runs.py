"""Runs the fault scenarios once or many times: `python -m tests.faults.runs --runs 20 PYTEST-ARGUMENTS`.

Several tests run at a time, because they wait more than they compute. Tests marked `alone` measure how fast
something is noticed, or need all processors; they run afterwards, one by one. At the end it prints for each
scenario in how many runs all of its tests passed, and exits with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time

from tests.faults.figures import FILE, RUN_VARIABLE
from tests.faults.report import passed_runs

NO_TESTS = 5
"""pytest's exit code when nothing was selected."""


def once(arguments: list[str], workers: int, seed: int, run: str) -> bool:
    """Runs all tests with one seed; returns whether they passed."""
    environ = {**os.environ, "DMESH_FAULTS_SEED": str(seed), RUN_VARIABLE: run}
    phases = (
        ("(faults or not faults) and not alone", "-n", str(workers), "--maxschedchunk", "1"),
        ("alone",),
    )
    codes = [
        subprocess.run(
            [sys.executable, "-m", "pytest", "-m", marks, *options, *arguments], env=environ, check=False
        ).returncode
        for marks, *options in phases
    ]
    return codes != [NO_TESTS] * len(phases) and all(code in (0, NO_TESTS) for code in codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=1, help="how many times in a row (1)")
    parser.add_argument("--workers", type=int, default=min(12, 4 * (os.cpu_count() or 1)))
    options, arguments = parser.parse_known_args()
    first = int(os.environ.get("DMESH_FAULTS_SEED") or secrets.randbelow(1 << 32))
    began, passed, runs = time.time(), 0, []
    for number in range(options.runs):
        runs.append(f"{began:.0f}-{number}")
        started = time.monotonic()
        succeeded = once(arguments, options.workers, first + number, runs[-1])
        passed += succeeded
        print(
            f"run {number + 1} of {options.runs}: {'passed' if succeeded else 'FAILED'} in "
            f"{time.monotonic() - started:.0f} s, DMESH_FAULTS_SEED={first + number}",
            flush=True,
        )
    if options.runs > 1:
        lines = [json.loads(line) for line in FILE.read_text().splitlines()]
        found = passed_runs([line for line in lines if line.get("run") in runs])
        for scenario, counted in sorted(found.items()):
            print(f"{scenario}: {counted.passed} of {counted.runs} runs passed, {counted.tests} tests")
    return passed < options.runs


if __name__ == "__main__":
    sys.exit(main())
