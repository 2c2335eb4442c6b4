"""Sharded arrays beside NumPy, torch's DTensor (gloo) and Heat (MPI), and what more clients gain.

    python benchmarks/sharded_arrays.py                # dispatch, large arrays, scaling: Markdown tables
    python benchmarks/sharded_arrays.py --prepare      # makes the environments of torch and Heat, once
    python benchmarks/sharded_arrays.py --rounds 5
    python benchmarks/sharded_arrays.py --operations   # many of NumPy's functions, 2 clients beside NumPy

All systems have their turn in each round, with fresh processes, one BLAS thread in each; what is printed are
medians of the rounds. A system whose environment is missing is left out. Heat needs `mpirun`.

- *Dispatch*: what an operation on 8 numbers for each device takes; where the table says "over NumPy", the
  time of NumPy's on the same blocks is subtracted.
- *Large arrays*: 2 clients, an array of 128 MiB and products of 2048 float32, against one NumPy process.
- *Scaling*: the same operations with 1, 2 and 4 clients, the array of the same size (strong) or with as much
  for each client (weak).
- *Operations*: 4 million numbers, in 1 dimension or 4096 rows, cut along the first; 2 clients, and NumPy in
  one process right after them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PEERS = Path(os.environ.get("DMESH_BENCH_PEERS", "~/.cache/dmesh-peers")).expanduser()
INSTALLED = {"torch": ["torch", "numpy"], "heat": ["heat", "mpi4py", "numpy"]}
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
ROWS = 4096
"""Of an array of 4096 columns of float64: 128 MiB."""
PRODUCT = 2048
RUNS = 7
"""Repetitions of a case in a process; their median counts."""
LIMITS = {
    "matmul, rows": 1.8, "matmul, contracted": 1.8, "a + b": 1.7, "sum": 1.4,
    "to replicated": 1 / 1.3, "rows to columns": 1 / 1.5,
}  # fmt: skip
"""How many times as fast as NumPy alone, or as a local copy, two clients have to be."""
BOTH_CORES = 0.95
"""How many times as fast as NumPy with two BLAS threads the products of two clients have to be."""
RELAYOUTS = {"torch": 3.0, "heat": 1.5}
"""How many times as fast as a peer's a relayout has to be; dispatch three times, all else as fast."""

Cases = dict[str, Callable[[], Any]]
Barrier = Callable[[], Any]


def numpy_cases(rows: int) -> tuple[Cases, Barrier, int]:
    """Returns what one process measures with NumPy alone; relayouts are compared with a local copy."""
    small, big, a = np.ones(8), np.ones((rows, 4096)), np.ones((PRODUCT, PRODUCT), np.float32)
    cases: Cases = {
        "a + b, 8 numbers": lambda: small + small,
        "matmul, rows": lambda: a @ a,
        "matmul, contracted": lambda: a @ a,
        "a + b": lambda: big + big,
        "sum": lambda: float(big.sum()),
        "to replicated": big.copy,
        "rows to columns": big.copy,
    }
    return cases, lambda: None, 0


def dmesh_cases(rows: int) -> tuple[Cases, Barrier, int]:
    """Returns what a client measures."""
    import dmesh
    from dmesh import UNSHARDED, Layout

    dmesh.initialize_accelerator_system("CPU", num_logical_cpu_devices=1)
    mesh = dmesh.create_distributed_mesh([("x", dmesh.size())])
    cut, columns = Layout(["x", UNSHARDED], mesh), Layout([UNSHARDED, "x"], mesh)
    whole = Layout.replicated(mesh, 2)
    a = np.ones((PRODUCT, PRODUCT), np.float32)
    x, y = dmesh.copy_to_mesh(a, cut), dmesh.copy_to_mesh(a, whole)
    inner = dmesh.copy_to_mesh(a, columns)
    z = dmesh.copy_to_mesh(np.ones((rows, 4096)), cut)
    small = dmesh.ones(8 * dmesh.size(), layout=Layout(["x"], mesh))
    cases: Cases = {
        "a + b, 8 numbers": lambda: small + small,
        "matmul, rows": lambda: x @ y,
        "matmul, contracted": lambda: dmesh.relayout(inner @ x, cut),
        "a + b": lambda: z + z,
        "sum": lambda: float(z.sum()),
        "to replicated": lambda: dmesh.relayout(z, whole),
        "rows to columns": lambda: dmesh.relayout(z, columns),
    }
    return cases, dmesh.barrier, dmesh.rank()


def torch_cases(rows: int) -> tuple[Cases, Barrier, int]:
    """Returns what a rank of torch measures."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    a = torch.ones(PRODUCT, PRODUCT)
    x, y = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(a, mesh, [Replicate()])
    inner = distribute_tensor(a, mesh, [Shard(1)])
    z = distribute_tensor(torch.ones(rows, 4096, dtype=torch.float64), mesh, [Shard(0)])
    small = distribute_tensor(torch.ones(8 * mesh.size(), dtype=torch.float64), mesh, [Shard(0)])
    cases: Cases = {
        "a + b, 8 numbers": lambda: small + small,
        "matmul, rows": lambda: x @ y,
        "matmul, contracted": lambda: (inner @ x).redistribute(mesh, [Shard(0)]).to_local(),
        "a + b": lambda: z + z,
        "sum": lambda: z.sum().full_tensor().item(),
        "to replicated": lambda: z.redistribute(mesh, [Replicate()]).to_local(),
        "rows to columns": lambda: z.redistribute(mesh, [Shard(1)]).to_local(),
    }
    return cases, dist.barrier, dist.get_rank()


def heat_cases(rows: int) -> tuple[Cases, Barrier, int]:
    """Returns what a rank of Heat measures."""
    import heat
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    x = heat.ones((PRODUCT, PRODUCT), split=0)
    y = heat.ones((PRODUCT, PRODUCT), split=None)
    inner = heat.ones((PRODUCT, PRODUCT), split=1)
    z = heat.ones((rows, 4096), dtype=heat.float64, split=0)
    small = heat.ones(8 * MPI.COMM_WORLD.size, dtype=heat.float64, split=0)
    cases: Cases = {
        "a + b, 8 numbers": lambda: small + small,
        "matmul, rows": lambda: x @ y,
        "matmul, contracted": lambda: inner @ x,
        "a + b": lambda: z + z,
        "sum": lambda: float(z.sum()),
        "to replicated": lambda: heat.resplit(z, None),
        "rows to columns": lambda: heat.resplit(z, 1),
    }
    return cases, MPI.COMM_WORLD.Barrier, MPI.COMM_WORLD.rank


SYSTEMS = {"numpy": numpy_cases, "dmesh": dmesh_cases, "torch": torch_cases, "heat": heat_cases}


def serve(system: str, rows: int) -> None:
    """Measures all cases of a system in this process, one of several, and prints seconds as JSON."""
    cases, barrier, rank = SYSTEMS[system](rows)
    found = {}
    for name, case in cases.items():
        found[name] = timed(case, barrier, 200 if "8 numbers" in name else 1)
    if rank == 0:
        print(json.dumps(found), flush=True)
    if system == "dmesh":
        import dmesh

        dmesh.shutdown_accelerator_system()


def dispatch() -> dict[str, float]:
    """Returns what operations on small arrays take longer than NumPy's, in microseconds."""
    import dmesh
    from dmesh import UNSHARDED, Layout

    dmesh.initialize_accelerator_system("CPU", num_logical_cpu_devices=4)
    found = {}
    for devices in (1, 4):
        mesh = dmesh.create_mesh([("x", devices)], devices=[f"CPU:{i}" for i in range(devices)])
        plain, layout = np.ones(8), Layout(["x"], mesh)
        a, b = dmesh.ones(8 * devices, layout=layout), dmesh.ones(8 * devices, layout=layout)
        row = dmesh.ones(8, layout=Layout([UNSHARDED], mesh))
        matrix = dmesh.ones((8, 8), layout=Layout(["x", UNSHARDED], mesh))
        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "a + b": (lambda a=a, b=b: a + b, lambda plain=plain: plain + plain),
            "a * 2.0": (lambda a=a: a * 2.0, lambda plain=plain: plain * 2.0),
            "np.exp(a)": (lambda a=a: np.exp(a), lambda plain=plain: np.exp(plain)),
            "matrix + row": (lambda m=matrix, row=row: m + row, lambda plain=plain: plain + plain),
            "np.sum(a)": (lambda a=a: np.sum(a), lambda plain=plain: np.sum(plain)),
        }
        for name, (mine, numpys) in pairs.items():
            ours, theirs = _in_turns(41, 200, mine, numpys)
            found[f"{name}, {devices} devices"] = (ours - devices * theirs) * 1e6
    dmesh.shutdown_accelerator_system()
    return found


def calls(a: Any, b: Any, m: Any, whole: Any, square: Any) -> Cases:
    """Returns calls of NumPy's functions on a sequence, another one, rows, integers, and a square matrix."""
    table, few = np.linspace(0, 1, 1000), m[:, :64]
    return {
        "np.exp(a)": lambda: np.exp(a),
        "np.where(a > b, a, b)": lambda: np.where(a > b, a, b),
        "a.std()": lambda: a.std(),
        "m.sum(axis=0)": lambda: m.sum(axis=0),
        "np.linalg.norm(m)": lambda: np.linalg.norm(m),
        "np.cumsum(a)": lambda: np.cumsum(a),
        "np.diff(a)": lambda: np.diff(a),
        "a[a > 0.5]": lambda: a[a > 0.5],
        "m[10:-10:2] + 0": lambda: m[10:-10:2] + 0,
        "m.T + 0": lambda: m.T + 0,
        "np.concatenate([a, b])": lambda: np.concatenate([a, b]),
        "np.roll(a, 1000)": lambda: np.roll(a, 1000),
        "np.repeat(a, 2)": lambda: np.repeat(a, 2),
        "np.convolve(a, table[:9])": lambda: np.convolve(a, table[:9]),
        "np.sort(a)": lambda: np.sort(a),
        "np.argsort(a)": lambda: np.argsort(a),
        "np.unique(integers)": lambda: np.unique(whole),
        "np.median(a)": lambda: np.median(a),
        "np.histogram(a, 50, (0, 1))": lambda: np.histogram(a, 50, (0, 1)),
        "np.interp(a, table, table)": lambda: np.interp(a, table, table),
        "np.fft.fft(m)": lambda: np.fft.fft(m),
        "np.linalg.qr(m[:, :64])": lambda: np.linalg.qr(few),
        "np.linalg.svd(m[:, :64])": lambda: np.linalg.svd(few, full_matrices=False),
        "np.linalg.solve(square, square[0])": lambda: np.linalg.solve(square, square[0]),
        "np.linalg.cholesky(square)": lambda: np.linalg.cholesky(square),
    }


def operations() -> None:
    """Prints the seconds of NumPy's functions as JSON, of NumPy and of 2 clients."""
    import dmesh

    rng = np.random.default_rng(0)
    a, b = rng.random(1 << 22), rng.random(1 << 22)
    noise = rng.random((PRODUCT, PRODUCT))
    arrays = [
        a,
        b,
        a.reshape(4096, -1),
        rng.integers(0, 1000, 1 << 22),
        noise @ noise.T / PRODUCT + np.eye(PRODUCT),
    ]
    with dmesh.session("CPU") as me:
        mesh = dmesh.create_distributed_mesh([("x", me.size)])
        ends = [["x"] if x.ndim == 1 else ["x", dmesh.UNSHARDED] for x in arrays]
        sharded = [
            dmesh.copy_to_mesh(x, dmesh.Layout(end, mesh)) for x, end in zip(arrays, ends, strict=True)
        ]
        found = {}
        for name, mine in calls(*sharded).items():
            found[name] = [timed(mine, dmesh.barrier)]
        if me.rank == 0:
            for name, numpys in calls(*arrays).items():
                found[name].insert(0, timed(numpys, lambda: None))
            print(json.dumps(found), flush=True)
        dmesh.barrier()


def timed(function: Callable[[], Any], barrier: Barrier, repeat: int = 1) -> float:
    """Returns the seconds of a call, the median of some runs after the first one."""
    times = []
    for _ in range(RUNS + 1):
        barrier()
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        times.append((time.perf_counter() - start) / repeat)
    return statistics.median(times[1:])


def _in_turns(runs: int, repeat: int, *functions: Callable[[], Any]) -> list[float]:
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(runs + 1):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            for _ in range(repeat):
                function()
            taken.append((time.perf_counter() - start) / repeat)
    return [statistics.median(taken[1:]) for taken in times]


def run(system: str, clients: int, rows: int) -> dict[str, float]:
    """Returns the seconds of each case of a system, measured by fresh processes.

    NumPy is one process, with as many BLAS threads as others have clients.
    """
    threads = str(clients) if system == "numpy" else "1"
    environment = {**os.environ, **dict.fromkeys(THREADS, threads)}
    python = sys.executable if system in ("numpy", "dmesh") else str(PEERS / system / "bin/python")
    serving = [__file__, "--serve", system, "--rows", str(rows)]
    if system == "torch":
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(clients)}
        ranks = [
            subprocess.Popen(
                [python, *serving], stdout=subprocess.PIPE, text=True,
                env={**environment, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(clients)
        ]  # fmt: skip
        texts = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit("torch: a rank has failed")
        return _last_object(texts[0])
    if system == "dmesh":
        command = [python, "-m", "dmesh", "run", "-n", str(clients), *serving]
    elif system == "heat":
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(clients), python, *serving]
    else:
        command = [python, *serving]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return _last_object(done.stdout)


def _last_object(text: str) -> dict[str, Any]:
    line = next(line for line in reversed(text.splitlines()) if "{" in line)
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    return found


def measure(systems: list[tuple[str, int, int]], rounds: int) -> dict[tuple[str, int, int], dict[str, float]]:
    """Returns the median of the rounds for each case of each system, number of clients and rows."""
    found: dict[tuple[str, int, int], list[dict[str, float]]] = {one: [] for one in systems}
    for _ in range(rounds):
        for one in systems:
            found[one].append(run(*one))
    return {
        one: {case: statistics.median(each[case] for each in taken) for case in taken[0]}
        for one, taken in found.items()
    }


def prepare() -> None:
    """Makes the environments of the peers, unless they are there."""
    for name, packages in INSTALLED.items():
        if not (PEERS / name / "bin/python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(PEERS / name)], check=True)
            pip = [str(PEERS / name / "bin/python"), "-m", "pip", "install", "--quiet", *packages]
            subprocess.run(pip, check=True)


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--prepare", action="store_true", help="make the environments of torch and Heat, and end"
    )
    parser.add_argument("--no-scaling", action="store_true", help="leave out the table of 1, 2 and 4 clients")
    parser.add_argument("--operations", action="store_true", help="measure many of NumPy's functions instead")
    parser.add_argument("--serve", choices=[*SYSTEMS, "dispatch", "operations"], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        prepare()
    elif options.serve == "dispatch":
        print(json.dumps(dispatch()))
    elif options.serve == "operations":
        operations()
    elif options.operations:
        report_operations(options.rounds)
    elif options.serve:
        serve(options.serve, options.rows)
    else:
        report(options.rounds, scaling=not options.no_scaling)


def goal_beside(name: str, case: str) -> float | None:
    """Returns how many times as fast as a peer, or as NumPy with both cores, a case has to be."""
    if name == "numpy":
        return BOTH_CORES if case.startswith("matmul") else None
    if "8 numbers" in case:
        return 3.0
    return RELAYOUTS[name] if case in ("to replicated", "rows to columns") else 1.0


def report_operations(rounds: int) -> None:
    """Measures NumPy's functions, and prints a table."""
    command = [sys.executable, "-m", "dmesh", "run", "-n", "2", __file__, "--serve", "operations"]
    environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
    taken = []
    for _ in range(rounds):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        taken.append(_last_object(done.stdout))
    print("| 4 million numbers, 2 clients | NumPy, ms | dmesh, ms | gain |\n|---|---|---|---|")
    for name in taken[0]:
        numpys, mine = (statistics.median(one[name][at] for one in taken) for at in (0, 1))
        print(f"| `{name}` | {numpys * 1e3:.1f} | {mine * 1e3:.1f} | {numpys / mine:.2f} |")


def report(rounds: int, *, scaling: bool) -> None:
    """Measures, and prints the tables."""
    done = subprocess.run(
        [sys.executable, __file__, "--serve", "dispatch"], stdout=subprocess.PIPE, text=True, check=True
    )
    print("| operation, over NumPy | microseconds |\n|---|---|")
    for name, microseconds in _last_object(done.stdout).items():
        print(f"| `{name.partition(',')[0]}`{name[name.index(',') :]} | {microseconds:.1f} |")
    peers = [name for name in INSTALLED if (PEERS / name / "bin/python").exists()]
    if not shutil.which("mpirun"):
        peers = [name for name in peers if name != "heat"]
    compared = ["dmesh", *peers]
    numpys_own = [("numpy", 1, ROWS), ("numpy", 2, ROWS)]
    found = measure([*numpys_own, *((name, 2, ROWS) for name in compared)], rounds)
    alone = found["numpy", 1, ROWS]
    print(f"\n| 2 clients | NumPy alone | {' | '.join(compared)} | NumPy / dmesh | goal |")
    print("|---" * (len(compared) + 4) + "|")
    for case, numpys in alone.items():
        scale, unit = (1e6, "µs") if "8 numbers" in case else (1e3, "ms")
        row = [f"{found[name, 2, ROWS][case] * scale:.1f} {unit}" for name in compared]
        gain, limit = numpys / found["dmesh", 2, ROWS][case], LIMITS.get(case)
        goal = "" if limit is None else f"≥ {limit:.2f}" + ("" if gain >= limit else ", missed")
        print(f"| {case} | {numpys * scale:.1f} {unit} | {' | '.join(row)} | {gain:.2f} | {goal} |")
    print("\n| beside | case | their time / dmesh's | goal |\n|---|---|---|---|")
    for case, seconds in found["dmesh", 2, ROWS].items():
        for name in ["numpy", *peers]:
            limit = goal_beside(name, case)
            if limit is not None:
                gain = found[name, 2, ROWS][case] / seconds
                goal = f"≥ {limit:.2f}" + ("" if gain >= limit else ", missed")
                beside = "NumPy, both cores" if name == "numpy" else name
                print(f"| {beside} | {case} | {gain:.2f} | {goal} |")
    if scaling:
        sizes = [(clients, ROWS) for clients in (1, 2, 4)] + [
            (clients, clients * ROWS // 4) for clients in (1, 2, 4)
        ]
        scaled = measure([("dmesh", *size) for size in dict.fromkeys(sizes)], rounds)
        print("\n| ms | " + " | ".join(f"{how}, {n}" for how in ("strong", "weak") for n in (1, 2, 4)) + " |")
        print("|---" * 7 + "|")
        for case in [case for case in alone if "8 numbers" not in case]:
            row = [f"{scaled['dmesh', *size][case] * 1e3:.1f}" for size in sizes]
            print(f"| {case} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
