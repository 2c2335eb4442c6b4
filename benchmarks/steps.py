"""Cost of a strategy's step, beside its collectives and beside torch's DDP.

    python benchmarks/steps.py                   # beside DDP if torch's environment is there
    python benchmarks/steps.py --prepare         # makes torch's environment (CPU), once
    python benchmarks/steps.py --quick --tcp     # fewer rounds; without shared memory, as between hosts
    python benchmarks/steps.py --best            # on a busy machine: minima in place of medians

Two clients with one replica each, and two ranks of DDP over gloo, are four processes that stay for the whole
run; two of them work at a time. NumPy and torch compute in one thread each. In each round all cases have
their turn. The figures are the medians of the rounds, and the median of the rounds' ratios.

- *run*: `strategy.run` of a function that does nothing, and of one that calls `all_reduce` on arrays; large
  arrays are compared with the group's own `all_reduce_many` or `all_reduce` of the same arrays.
- *gradients*: a step of a multilayer perceptron, forward and backward, whose gradients are averaged over the
  ranks while the rest of the backward pass runs: `begin_all_reduce` beside DDP. The time of communication is
  the time of the step with it minus that of the step without.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = Path(os.environ.get("DMESH_BENCH_PEERS", "~/.cache/dmesh-peers")).expanduser()
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
BATCH = 32
MODELS = {"1 MB": (256, 4), "50 MB": (1024, 12)}
"""Width and number of the layers of each perceptron."""
RUNS = {
    # name: its limit, the call that it is compared with (None: microseconds), repetitions in a round
    "run(noop)": (5.0, None, 2000),
    "run + all_reduce, 4 B": (10.0, None, 2000),
    "run + all_reduce, 50 arrays of 4 KB": (1.3, "all_reduce_many, 50 arrays of 4 KB", 200),
    "run + all_reduce, 16 MB": (1.1, "all_reduce, 16 MB", 10),
}
BARE = "all_reduce, 4 B"
"""A collective alone: several microseconds say that the ranks do not run at the same time."""
LIMIT = 0.5
"""Of DDP's time of communication."""

Timed = Callable[[int, "Statistic"], float | list[float]]
Statistic = Callable[[list[float]], float]
STATISTICS: dict[bool, Statistic] = {False: statistics.median, True: min}
"""By whether the machine is busy."""


def dmesh_cases() -> dict[str, Timed]:
    """Returns what a client measures: functions that repeat a case and return seconds for one repetition."""
    import numpy as np

    import dmesh
    from dmesh import collectives, distribute

    dmesh.initialize_accelerator_system("CPU")
    strategy = distribute.MultiWorkerMirroredStrategy()
    group = strategy.extended.replicas.group
    assert group is not None

    def reducing(value: Any) -> Callable[[], Any]:
        def replica() -> Any:
            context = distribute.get_replica_context()
            assert context is not None
            return context.all_reduce("SUM", value)

        return lambda: strategy.run(replica)

    scalar, many, large = (
        np.ones(1, np.float32),
        [np.ones(1000, np.float32) for _ in range(50)],
        np.ones(4 << 20, np.float32),
    )
    calls: dict[str, Callable[[], Any]] = {
        "run(noop)": lambda: strategy.run(_nothing),
        "run + all_reduce, 4 B": reducing(scalar),
        BARE: lambda: group.all_reduce(scalar),
        "run + all_reduce, 50 arrays of 4 KB": reducing(many),
        "all_reduce_many, 50 arrays of 4 KB": lambda: collectives.all_reduce_many(many, group=group),
        "run + all_reduce, 16 MB": reducing(large),
        "all_reduce, 16 MB": lambda: group.all_reduce(large),
    }

    def perceptron(width: int, layers: int, together: bool) -> Callable[[], Any]:
        weights = [np.full((width, width), 1 / width, np.float32) for _ in range(layers)]
        rows = np.ones((BATCH, width), np.float32)

        def replica() -> Any:
            context = distribute.get_replica_context()
            assert context is not None
            pending = context.begin_all_reduce("MEAN", like=weights) if together else None
            inputs = [rows]
            for weight in weights:
                inputs.append(np.maximum(inputs[-1] @ weight, 0))
            delta = inputs[-1]
            gradients = []
            for layer in reversed(range(layers)):
                delta = delta * (inputs[layer + 1] > 0)
                gradient = inputs[layer].T @ delta
                delta = delta @ weights[layer].T
                if pending is None:
                    gradients.append(gradient)
                else:
                    pending.put(layer, gradient)
            return gradients if pending is None else pending.result()

        return lambda: strategy.run(replica)

    found: dict[str, Timed] = {name: _timed(call, group.barrier) for name, call in calls.items()}
    for size, (width, layers) in MODELS.items():
        both = (perceptron(width, layers, together=together) for together in (False, True))
        found[size] = _paired(*both, group.barrier)
    return found


def torch_cases() -> dict[str, Timed]:
    """Returns what a rank of DDP measures."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Timed] = {}
    for size, (width, layers) in MODELS.items():
        modules: list[Any] = []
        for _ in range(layers):
            modules += [torch.nn.Linear(width, width, bias=False), torch.nn.ReLU()]
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*modules), gradient_as_bucket_view=True
        )
        rows = torch.ones(BATCH, width)

        def step(model: Any = model, rows: Any = rows) -> None:
            model.zero_grad(set_to_none=True)
            out = model(rows)
            out.backward(out.detach())

        def apart(model: Any = model, step: Callable[[], None] = step) -> None:
            with model.no_sync():
                step()

        found[size] = _paired(apart, step, dist.barrier)
    return found


def _nothing() -> None:
    """Do nothing."""


def _paired(apart: Callable[[], Any], together: Callable[[], Any], barrier: Callable[[], Any]) -> Timed:
    """Returns what measures two cases in turns: a step without communication, and the same with it."""

    def seconds(count: int, statistic: Statistic) -> list[float]:
        pairs = [[_once(call, barrier, 1) for call in (apart, together)] for _ in range(count + 1)]
        return [statistic(list(column)) for column in zip(*pairs[1:], strict=True)]

    return seconds


def _timed(call: Callable[[], Any], barrier: Callable[[], Any]) -> Timed:
    def seconds(count: int, statistic: Statistic) -> float:
        calls = 20 if count > 100 else 1  # short ones cannot be measured one by one
        return statistic([_once(call, barrier, calls) for _ in range(1 + count // calls)][1:])

    return seconds


def _once(call: Callable[[], Any], barrier: Callable[[], Any], calls: int) -> float:
    barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def serve(system: str) -> None:
    """Measures what it reads from standard input, until that ends."""
    cases = dmesh_cases() if system == "dmesh" else torch_cases()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(cases[request["case"]](request["count"], STATISTICS[request["best"]])), flush=True)


class System:
    """Two processes that measure together."""

    def __init__(self, name: str, python: str, *, tcp: bool, best: bool) -> None:
        self._best = best
        ports = _free_ports(2)
        environment = {
            **os.environ,
            **dict.fromkeys(THREADS, "1"),
            "DTENSOR_JOBS": ",".join(f"127.0.0.1:{port}" for port in ports),
            "DTENSOR_JOB_NAME": "worker",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
            "WORLD_SIZE": "2",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if name == "dmesh":
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(ROOT / "client"), str(ROOT / "server"), os.environ.get("PYTHONPATH", "")]
            )
        if tcp:
            environment["DMESH_SHARED_MEMORY"] = "0"
        self._processes = [
            subprocess.Popen(
                [python, __file__, "--serve", name],
                env={**environment, "DTENSOR_CLIENT_ID": str(rank), "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                sys.exit(f"{name}: a process has not started")

    def measure(self, case: str, count: int) -> Any:
        """Returns the seconds of a case on the slower rank; of a step without communication, and with it."""
        for process in self._processes:
            assert process.stdin is not None
            print(
                json.dumps({"case": case, "count": count, "best": self._best}), file=process.stdin, flush=True
            )
        texts = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(texts):
            sys.exit(f"{case}: a process has ended")
        found = [json.loads(text) for text in texts]
        return [max(column) for column in zip(*found, strict=True)] if case in MODELS else max(found)

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def prepare(python: Path) -> None:
    """Makes torch's environment, unless it is there."""
    if not python.exists():
        folder = python.parent.parent
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        index = "https://download.pytorch.org/whl/cpu"
        pins = str(ROOT / "constraints.txt")
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", pins, "numpy", "torch"]
        if subprocess.run([*install, "--index-url", index], check=False).returncode:
            subprocess.run(install, check=True)


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="run three rounds only")
    parser.add_argument("--best", action="store_true", help="print minima, not medians")
    parser.add_argument("--tcp", action="store_true", help="use TCP instead of shared memory")
    parser.add_argument("--prepare", action="store_true", help="only make torch's environment")
    parser.add_argument(
        "--torch", type=Path, default=PEERS / "torch/bin/python", help="Python interpreter that has torch"
    )
    parser.add_argument("--json", action="store_true", help="also print all figures as JSON")
    parser.add_argument("--serve", choices=["dmesh", "torch"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.prepare:
        prepare(options.torch)
        return
    dmesh = System("dmesh", sys.executable, tcp=options.tcp, best=options.best)
    torch = None
    if options.torch.exists():
        torch = System("torch", str(options.torch), tcp=options.tcp, best=options.best)
    systems = {"dmesh": dmesh, **({} if torch is None else {"torch": torch})}
    seconds: dict[str, list[float]] = {}
    try:
        for _ in range(3 if options.quick else options.rounds):
            seconds.setdefault(BARE, []).append(dmesh.measure(BARE, 2000))
            for name, (_, other, count) in RUNS.items():
                for case in (name, other) if other else (name,):
                    seconds.setdefault(case, []).append(dmesh.measure(case, count))
            for size in MODELS:
                for system, ranks in systems.items():
                    apart, together = ranks.measure(size, 20 if size == "1 MB" else 8)
                    seconds.setdefault(f"{system}, {size} apart", []).append(apart)
                    seconds.setdefault(f"{system}, {size} together", []).append(together)
    finally:
        for ranks in systems.values():
            ranks.end()
    report(seconds, beside_torch=torch is not None, best=options.best)
    if options.json:
        print(json.dumps(seconds))


def report(seconds: dict[str, list[float]], *, beside_torch: bool, best: bool) -> None:
    """Prints the figures, and the ratios with their limits."""
    statistic = STATISTICS[best]

    def verdict(found: float, limit: float) -> str:
        return f"(at most {limit:g})" + ("" if found <= limit else "  MISSED")

    def ratio_of(ours: list[float], theirs: list[float]) -> float:
        if best:
            return min(ours) / min(theirs)
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))

    print(f"{BARE:40} {1e6 * statistic(seconds[BARE]):10.1f} us")
    for name, (limit, other, _) in RUNS.items():
        took = 1e6 * statistic(seconds[name])
        if other is None:
            print(f"{name:40} {took:10.1f} us   {verdict(took, limit)}")
            continue
        ratio = ratio_of(seconds[name], seconds[other])
        beside = f"{1e6 * statistic(seconds[other]):.1f} us of {other.split(',')[0]}"
        print(f"{name:40} {took:10.1f} us   {ratio:.2f} of {beside} {verdict(ratio, limit)}")
    for size in MODELS:
        texts, found = [], []
        for system in ("dmesh", "torch") if beside_torch else ("dmesh",):
            apart, together = (seconds[f"{system}, {size} {how}"] for how in ("apart", "together"))
            if best:
                apart, together = [min(apart)], [min(together)]
            found.append([b - a for a, b in zip(apart, together, strict=True)])
            of, step = (1e3 * statistic(values) for values in (found[-1], together))
            texts.append(f"{of:.2f} ms of communication in a step of {step:.2f} ms")
        line = f"gradients of {size:27} {texts[0]}"
        if beside_torch:
            ratio = ratio_of(*found)
            line += f"; DDP {texts[1]}: {ratio:.2f} {verdict(ratio, LIMIT)}"
        print(line)


if __name__ == "__main__":
    main()
