"""Runs mpi4py's own tests of buffer and object calls on dmesh: `python -m tests.mpi4py_suite`.

The tests are downloaded from the package index, once, into the user's cache directory. An adapter, `module`,
stands in for `mpi4py.MPI`: it parses buffers and names calls of `dmesh.collectives`. A call that dmesh does
not have is absent, and so is each test that needs it. A test passes if it passes on each rank and with each
number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "4.1.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmesh"
ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "test_cco_buf", "test_cco_nb_buf", "test_cco_pr_buf", "test_cco_vec", "test_cco_nb_vec",
    "test_cco_pr_vec", "test_cco_obj", "test_p2p_buf", "test_p2p_obj", "test_p2p_buf_matched",
    "test_p2p_obj_matched",
)  # fmt: skip
"""Those of buffers and objects, without neighborhoods, intercommunicators and partitioned transfers."""
WORST = ("failed", "absent", "ended", "skipped", "passed")
"""Outcomes of a rank, the first of which is the outcome of all."""


def fetch() -> Path | None:
    """Return the directory of mpi4py's tests; None if it cannot be downloaded."""
    directory = CACHE / f"mpi4py-{VERSION}" / "test"
    if not directory.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as into:
            command = [
                sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
                "--dest", into, "--no-deps", "--no-binary", "mpi4py", "--no-build-isolation",
                f"mpi4py=={VERSION}",
            ]  # fmt: skip
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            found = list(Path(into).glob("mpi4py-*.tar.gz"))
            if done.returncode or not found:
                print(f"SKIPPED: mpi4py {VERSION} cannot be downloaded: {done.stderr.strip()[-300:]}")
                return None
            with tarfile.open(found[0]) as archive:
                archive.extractall(into, filter="data")
            (Path(into) / directory.parent.name).rename(directory.parent)  # complete, or not there
    return directory


def run(tests: Path, modules: list[str], size: int, limit: float) -> list[dict[str, Any]]:
    """Run all tests with a number of ranks, and return their outcomes."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        while True:
            log = f"{directory}/{len(found)}"
            command = [
                sys.executable, "-m", "dmesh", "run", "-n", str(size), "-m", "tests.mpi4py_suite.worker",
                str(tests), ",".join(modules), log, str(len(found)), str(limit),
            ]  # fmt: skip
            environ = {**os.environ, "DMESH_COLLECTIVE_TIMEOUT": str(limit / 2), "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, env=environ, cwd=directory, check=False)
            more = list(merged([_lines(Path(f"{log}.{rank}")) for rank in range(size)]))
            found += more
            if not more:
                raise SystemExit(f"the ranks ended with {done.returncode} before the first test was over")
            if len(found) == found[0]["of"]:
                return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def merged(ranks: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each test, which is its worst one on any rank."""
    by_number: dict[int, list[dict[str, Any]]] = {}
    for line in (line for lines in ranks for line in lines):
        by_number.setdefault(line["number"], []).append(line)
    for _, lines in sorted(by_number.items()):
        yield worst(lines)


def worst(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst outcome of a test, and what all of its ranks do without."""
    first = min(lines, key=lambda line: WORST.index(line["outcome"]))
    if first["outcome"] == "ended":  # which needs a reason
        first = first | {"outcome": "failed"}
    return first | {"without": sorted({call for line in lines for call in line.get("without", ())})}


def report(found: list[dict[str, Any]]) -> bool:
    """Print outcomes by module and what is absent; return whether no test has failed."""
    outcomes = ("passed", "absent", "skipped", "failed")
    print(
        f"{'':24}{'cases':>8}"
        + "".join(f"{name:>9}" for name in outcomes)
        + "   of those passed, without a call"
    )
    counts: Counter[tuple[str, str]] = Counter()
    for line in found:
        name = line["test"].split(".")[0]
        for row in (name, "all"):
            counts[row, line["outcome"]] += 1
            counts[row, "without"] += line["outcome"] == "passed" and bool(line["without"])
    for row in (*dict.fromkeys(line["test"].split(".")[0] for line in found), "all"):
        numbers = [counts[row, name] for name in outcomes]
        print(
            f"{row:24}{sum(numbers):>8}"
            + "".join(f"{n:>9}" for n in numbers)
            + f"{counts[row, 'without']:>9}"
        )
    _list("absent", Counter(line["reason"] for line in found if line["outcome"] == "absent"))
    _list("skipped", Counter(line["reason"] for line in found if line["outcome"] == "skipped"))
    passed = [line for line in found if line["outcome"] == "passed"]
    _list(
        "dmesh does not have, and these pass without",
        Counter(call for line in passed for call in line["without"]),
    )
    failed = [line for line in found if line["outcome"] == "failed"]
    _list("failed", Counter(f"{line['test']}: {line['reason']}" for line in failed))
    return not failed


def _list(title: str, found: Counter[str]) -> None:
    if found:
        print(f"\n{title}:")
        for text, count in found.most_common():
            print(f"{count:5}  {text}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", default="1,2,3", help="numbers of ranks, one after the other (%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a test (%(default)s)")
    parser.add_argument("--traces", action="store_true", help="print the tracebacks of failures")
    parser.add_argument(
        "modules", nargs="*", default=list(MODULES), help="all of those of buffers and objects"
    )
    options = parser.parse_args()
    tests = fetch()
    if tests is None:
        return 0
    every: dict[str, list[dict[str, Any]]] = {}
    for size in map(int, options.ranks.split(",")):
        found = run(tests, options.modules, size, options.limit)
        print(f"\n{size} rank{'s' * (size > 1)}:\n")
        report(found)
        for line in found:
            every.setdefault(line["test"], []).append(line)
            if options.traces and line["outcome"] == "failed":
                print(line.get("trace", ""))
    print("\nwith each number of ranks:\n")
    return 0 if report([worst(lines) for lines in every.values()]) else 1


if __name__ == "__main__":
    sys.exit(main())
