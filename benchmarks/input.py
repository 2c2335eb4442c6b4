"""Speed of dmesh's input beside NumPy's own gather, tf.data and torch's DataLoader. Prints a table.

    python benchmarks/input.py                 # 5 rounds; makes the peers' environments at the first use
    python benchmarks/input.py --rows 6000     # arrays that fit into the processor's cache
    python benchmarks/input.py --systems numpy,dmesh --cpu

Every system is a process that stays for the whole run. In each round each system has its turn at a case, in
random order. The table has the medians of the rounds, and the medians of the ratios within a round. A case
is one epoch over float32 rows of 784 numbers and their labels, in batches of 128. The last cases compare one
process with two at once, which read their shares of every global batch of 256 as two workers under DATA do.
Plain NumPy does the same as a control: more than it gains by the second process, the machine does not give.
`--cpu` counts processor time instead of elapsed time, for machines that have other work to do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmesh-peers"
PEERS = {"tf.data": ("tensorflow", "tensorflow-cpu==2.21.*"), "torch": ("torch", "torch==2.13.0")}
WIDTH, BATCH = 784, 128
GOALS = {
    ("shuffle + batch", "numpy"): 0.5,
    ("shuffle + batch", "tf.data"): 1.0,
    ("rows one by one", "numpy"): 0.2,
    ("DATA, 2 workers", "dmesh, 1 worker"): 2.0,
    ("DATA, 2 workers, map of rows", "dmesh, 1 worker"): 2.0,
}
"""Least ratios of dmesh's rate to that of another system."""
DIVIDED = {
    ("dmesh", ""): "DATA, 2 workers",
    ("numpy", ""): "DATA, 2 workers",
    ("dmesh", ", map of rows"): "DATA, 2 workers, map of rows",
}
"""Cases of two processes, by system and what it does with the rows."""


def consume(elements: Iterable[Any]) -> None:
    """Reads an epoch."""
    for _ in elements:
        pass


def cases_of(system: str, rows: int) -> dict[str, Callable[[], None]]:
    """Returns what a system can do, by case."""
    np = importlib.import_module("numpy")
    images = np.random.default_rng(0).random((rows, WIDTH), dtype=np.float32)
    labels = np.arange(rows)
    spans = [slice(start, start + BATCH) for start in range(0, rows, BATCH)]
    if system == "numpy":

        def gathered(parts: Iterable[slice]) -> None:
            order = np.random.default_rng(1).permutation(rows)
            for span in parts:
                picked = order[span]
                images[picked], labels[picked]

        def share(workers: int, worker: int) -> None:
            size = 2 * BATCH // workers
            gathered(slice(start, start + size) for start in range(worker * size, rows, 2 * BATCH))

        return {
            "shuffle + batch": lambda: gathered(spans),
            "batch": lambda: consume((images[span].copy(), labels[span].copy()) for span in spans),
            "rows one by one": lambda: consume(images[row] for row in range(rows)),
            "map of batches": lambda: consume((images[span] * 2 - 1, labels[span].copy()) for span in spans),
            "1 worker": lambda: share(1, 0),
            "worker 0 of 2": lambda: share(2, 0),
            "worker 1 of 2": lambda: share(2, 1),
        }
    if system == "dmesh":
        from dmesh.data import Dataset
        from dmesh.data.experimental import AutoShardPolicy
        from dmesh.data.iterator import DatasetIterator
        from dmesh.distribute.input_sharding import divide

        both = Dataset.from_tensor_slices((images, labels))
        shuffled = both.shuffle(rows, seed=1).batch(BATCH)

        def share(workers: int, worker: int, dataset: Any = both) -> None:
            batches = dataset.shuffle(rows, seed=1).batch(2 * BATCH)
            consume(DatasetIterator(divide(batches.node, AutoShardPolicy.DATA, workers, 1, worker)))

        mapped = both.map(lambda x, y: (x * 2 - 1, y))
        return {
            "shuffle + batch": lambda: consume(shuffled),
            "batch": lambda: consume(both.batch(BATCH)),
            "rows one by one": lambda: consume(Dataset.from_tensor_slices(images)),
            "map of batches": lambda: consume(both.batch(BATCH).map(lambda x, y: (x * 2 - 1, y))),
            "map of rows": lambda: consume(mapped.batch(BATCH)),
            "1 worker": lambda: share(1, 0),
            "worker 0 of 2": lambda: share(2, 0),
            "worker 1 of 2": lambda: share(2, 1),
            "1 worker, map of rows": lambda: share(1, 0, mapped),
            "worker 0 of 2, map of rows": lambda: share(2, 0, mapped),
            "worker 1 of 2, map of rows": lambda: share(2, 1, mapped),
        }
    if system == "tf.data":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        data = importlib.import_module("tensorflow").data
        sliced = data.Dataset.from_tensor_slices((images, labels))
        return {
            "shuffle + batch": lambda: consume(sliced.shuffle(rows).batch(BATCH).as_numpy_iterator()),
            "batch": lambda: consume(sliced.batch(BATCH).as_numpy_iterator()),
            "rows one by one": lambda: consume(sliced.as_numpy_iterator()),
            "map of batches": lambda: consume(
                sliced.batch(BATCH).map(lambda x, y: (x * 2 - 1, y)).as_numpy_iterator()
            ),
            "map of rows": lambda: consume(
                sliced.map(lambda x, y: (x * 2 - 1, y)).batch(BATCH).as_numpy_iterator()
            ),
        }
    torch = importlib.import_module("torch")
    utils = importlib.import_module("torch.utils.data")
    torch.set_num_threads(1)
    tensors = utils.TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
    return {
        "shuffle + batch": lambda: consume(utils.DataLoader(tensors, BATCH, shuffle=True)),
        "batch": lambda: consume(utils.DataLoader(tensors, BATCH)),
        "rows one by one": lambda: consume(tensors[row] for row in range(rows)),
    }


def work(system: str, rows: int, clock: Callable[[], float]) -> None:
    """Runs the cases that standard input names, one a line; answers with the seconds of each."""
    cases = cases_of(system, rows)
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        started = clock()
        cases[line.strip()]()
        print(clock() - started, flush=True)


class Worker:
    """A process of one system."""

    def __init__(self, system: str, python: str, rows: int, cpu: bool) -> None:
        command = [python, __file__, "--worker", system, "--rows", str(rows), *["--cpu"] * cpu]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.cases: list[str] = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def begin(self, case: str) -> None:
        """Starts a case."""
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()

    def wait(self) -> float:
        """Returns the seconds that it took."""
        return float(self._line())

    def end(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def python_of(system: str) -> str | None:
    """Returns a system's interpreter, after making its environment if need be; None if that fails."""
    if system not in PEERS:
        return sys.executable
    folder, package = PEERS[system]
    python = CACHE / folder / "bin" / "python"
    if not python.exists():
        print(f"installing {package} into {python.parent.parent} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        pins = Path(__file__).resolve().parent.parent / "constraints.txt"
        install = [python, "-m", "pip", "install", "--quiet", "-c", pins, "numpy", package]
        subprocess.run(install, check=False)
    module = folder
    found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False)
    if found.returncode:
        print(f"SKIPPED: {system}, which cannot be imported by {python}")
        return None
    return str(python)


def measure(workers: dict[str, list[Worker]], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Returns the seconds of each case, by round and system."""
    results: dict[str, list[dict[str, float]]] = {}
    cases = dict.fromkeys(case for pair in workers.values() for case in pair[0].cases)
    for number in range(rounds + 1):  # the first one warms up
        for case in [case for case in cases if "worker" not in case]:
            having = [system for system, pair in workers.items() if case in pair[0].cases]
            taken = {}
            for system in random.sample(having, len(having)):
                workers[system][0].begin(case)
                taken[system] = workers[system][0].wait()
            if number:
                results.setdefault(case, []).append(taken)
        divided: dict[str, dict[str, float]] = {}
        for (system, more), case in random.sample([*DIVIDED.items()], len(DIVIDED)):
            if system in workers:
                first, second = workers[system]
                first.begin(f"1 worker{more}")
                alone = first.wait()
                first.begin(f"worker 0 of 2{more}")
                second.begin(f"worker 1 of 2{more}")
                together = max(first.wait(), second.wait())
                divided.setdefault(case, {}).update({system: together, f"{system}, 1 worker": alone})
        for case, taken in divided.items() if number else ():
            results.setdefault(case, []).append(taken)
    return results


def print_table(results: dict[str, list[dict[str, float]]], rows: int) -> None:
    """Prints rows per second, and ratios of dmesh's rate to the others'; for the control, of NumPy's."""
    print("| | million rows/s | ratio of dmesh's rate | goal |\n|---|---|---|---|")
    for case, rounds in results.items():
        for system in sorted(rounds[0]):
            own = "numpy" if system == "numpy, 1 worker" else "dmesh"
            rate = rows / statistics.median(taken[system] for taken in rounds) / 1e6
            ratio = statistics.median(taken[system] / taken[own] for taken in rounds)
            goal = GOALS.get((case, system))
            shown = f"{ratio:.2f}" if goal is None or ratio >= goal else f"**{ratio:.2f}**"
            shown += " (NumPy's)" * (own != "dmesh")
            print(f"| {case}: {system} | {rate:.3g} | {shown} | {'' if goal is None else f'≥ {goal}'} |")


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", default="numpy,dmesh,tf.data,torch")
    parser.add_argument("--cpu", action="store_true", help="count processor time instead of elapsed time")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.rows, time.process_time if options.cpu else time.perf_counter)
        return
    workers: dict[str, list[Worker]] = {}
    try:
        for system in dict.fromkeys(["dmesh", *options.systems.split(",")]):
            python = python_of(system)
            if python is not None:
                workers[system] = [
                    Worker(system, python, options.rows, options.cpu)
                    for _ in range(2 if any(system == divided for divided, _ in DIVIDED) else 1)
                ]
        print_table(measure(workers, options.rounds), options.rows)
    finally:
        for pair in workers.values():
            for worker in pair:
                worker.end()


if __name__ == "__main__":
    main()
