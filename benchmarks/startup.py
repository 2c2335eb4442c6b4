"""Time of imports and of `dmesh run`, beside the imports of the required libraries: a Markdown table.

    python benchmarks/startup.py --rounds 9

The rows are measured in turn, round after round, so other activity of the machine hits all of them.
Processor time is user and system time of a process and its children. The ratio is to the bare imports of the
same run.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = "`import numpy, ml_dtypes, grpc`"
IMPORTS = {
    "Python": "pass",
    BARE: "import numpy, ml_dtypes, grpc",
    "`dmesh.initialize_accelerator_system`, imported": "import dmesh; dmesh.initialize_accelerator_system",
    "the same, called in one process": "import dmesh; dmesh.initialize_accelerator_system('CPU')",
    "the server, imported": "import dmesh_server.embedded",
    "the launcher, imported": "import dmesh.cli.run",
}
PROGRAM = """
import sys, time, numpy as np, dmesh
with dmesh.session("CPU") as me:
    dmesh.collectives.all_reduce(np.ones(3))
    if me.rank == 0:
        open(sys.argv[1], "w").write(str(time.time()))
"""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dmesh-startup-") as scratch:
        script, mark = Path(scratch, "program.py"), Path(scratch, "mark")
        script.write_text(PROGRAM)
        rows = {name: [sys.executable, "-c", text] for name, text in IMPORTS.items()}
        for count in options.clients:
            command = [sys.executable, "-m", "dmesh", "run", "-n", str(count), str(script), str(mark)]
            rows[f"`dmesh run -n {count}`, to the first collective"] = command
        spent: dict[str, list[float]] = {name: [] for name in rows}
        took: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(options.rounds + 1):
            for name, command in rows.items():
                processor, seconds = measure(command, mark)
                spent[name].append(processor)
                took[name].append(seconds)
    print("| | processor time, ms | ratio | elapsed, ms |\n|---|---|---|---|")
    bare = statistics.median(spent[BARE][1:])
    for name in rows:
        processor = statistics.median(spent[name][1:])  # the first round may have compiled modules
        elapsed = statistics.median(took[name][1:])
        print(f"| {name} | {processor * 1e3:.0f} | {processor / bare:.2f} | {elapsed * 1e3:.0f} |")


def measure(command: list[str], mark: Path) -> tuple[float, float]:
    """Return a process's processor time, and the seconds until it wrote the mark, or else until its end."""
    mark.unlink(missing_ok=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["OMP_NUM_THREADS"] = environ["OPENBLAS_NUM_THREADS"] = "1"  # as `dmesh run` sets it here
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    subprocess.run(command, check=True, env=environ)
    ended = float(mark.read_text()) if mark.exists() else time.time()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended - began


if __name__ == "__main__":
    main()
