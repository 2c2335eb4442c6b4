"""Speed of dmesh's coordinator beside JAX's coordination service. Prints tables, writes JSON.

    python benchmarks/coordination.py                      # everything, 5 rounds
    python benchmarks/coordination.py --quick              # less of everything, in less than 2 minutes
    python benchmarks/coordination.py --only set,get --clients 32 --systems memory,jax
    python benchmarks/coordination.py --baseline ../other  # another checkout of dmesh, too, as memory@other

Systems: `memory` and `sqlite` are `dmesh serve` with either store and the SDK's own agent. `jax` is jaxlib's
C++ service and client, in an environment of its own, which is made at the first use in the user's cache
directory. Every client is a process. In each round each system has its turn, in rotating order, so other
activity of the machine hits all of them. The tables have the median of the rounds, their range, and the
median of the ratios to JAX within a round. The last table shows how much of the machine's cores other
programs used meanwhile: if that is much, only the ratios mean something.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordination_report import Results, print_tables, summarize

HERE = Path(__file__).resolve().parent
WORKER = HERE / "coordination_worker.py"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmesh"
JAXLIB = "jaxlib==0.10.2"
METRICS = ("join", "barrier", "spread", "set", "get", "memory", "detect")
TICK = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
SPREAD = 0.02
"""Seconds over which clients arrive at a barrier in the `spread` case."""
DETECT_CLIENTS = 4


@dataclass(frozen=True)
class System:
    """One of the things compared."""

    name: str
    kind: str
    """Which client: "dmesh" or "jax"."""
    python: str
    tree: Path | None = None
    """The checkout of dmesh."""
    durable: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its processes."""
        environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0", "DMESH_TOKEN": TOKEN}
        if self.tree is not None:
            environment["PYTHONPATH"] = f"{self.tree / 'client'}:{self.tree / 'server'}"
        return environment


TOKEN = secrets.token_hex(32)


class Server:
    """A running service, and what it costs."""

    def __init__(self, system: System, count: int, heartbeat_timeout: int, log: Any) -> None:
        self._directory = contextlib.ExitStack()
        if system.kind == "jax":
            command = [system.python, str(WORKER), "serve-jax", str(count), str(heartbeat_timeout)]
        else:
            store = ["--memory"]
            if system.durable:
                CACHE.mkdir(parents=True, exist_ok=True)
                where = tempfile.TemporaryDirectory(dir=CACHE, prefix="bench-", ignore_cleanup_errors=True)
                store = ["--data-dir", self._directory.enter_context(where)]
            command = [system.python, "-m", "dmesh", "serve", "--listen", "127.0.0.1:0", "--no-http", *store]
        self._process = subprocess.Popen(
            command, env=system.environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "grpc=" not in line:
            self.stop()
            raise SystemExit(f"the server of {system.name} did not start: see {log.name}")
        self.address = line.split("grpc=")[1].split()[0]

    def cpu(self) -> float:
        """Seconds of CPU that it has used."""
        return sum(_times(self._process.pid)[:2])

    def rss(self) -> int:
        """Bytes of memory that it has."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._directory.close()


class Zygote:
    """The process that forks the clients of one system."""

    def __init__(self, system: System, log: Any) -> None:
        self._log = log
        self._process = subprocess.Popen(
            [system.python, str(WORKER), "clients", system.kind],
            env=system.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def do(self, what: str, /, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the clients' process ended: see {self._log.name}")
        return json.loads(line)

    def cpu(self) -> float:
        """Seconds of CPU that it has used, and the clients that have ended."""
        return sum(_times(self._process.pid))

    def phase(self, what: str, /, **arguments: Any) -> list[dict[str, Any]]:
        """Has all clients do something; raises if one of them failed."""
        return _checked(self.do("phase", phase=what, **arguments), what)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _checked(answers: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    failures = [answer["failure"] for answer in answers if "failure" in answer]
    if failures:
        raise RuntimeError(
            f"{phase}: {len(failures)} of {len(answers)} clients failed; the first:\n{failures[0]}"
        )
    return answers


def quantile(values: list[float], share: float) -> float:
    """Returns the value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Case:
    """One system with one number of clients, in one round."""

    def __init__(
        self, system: System, zygote: Zygote, count: int, options: argparse.Namespace, log: Any
    ) -> None:
        self._zygote, self._count, self._options = zygote, count, options
        self._server = Server(system, count, options.heartbeat_timeout, log)
        self.figures: dict[str, float] = {}

    def run(self) -> dict[str, float]:
        """Runs all phases and returns the figures."""
        only, count, figures = self._options.only, self._count, self.figures
        case = {"address": self._server.address, "count": count}
        began, busy = time.monotonic(), _busy()
        own = self._zygote.cpu() + self._server.cpu()
        idle = self._server.rss()
        self._zygote.do("fork", **case, heartbeat_timeout=100)
        try:
            joined = self._zygote.phase("join")
            figures["join/all_ms"] = max(one["joined"] for one in joined) * 1000
            figures["join/registered_p50_ms"] = quantile([one["registered"] for one in joined], 0.5) * 1000
            self._barrier("warm up", 3)
            if "barrier" in only:
                self._measured("barrier", self._barrier("tight", self._options.barriers[count]), count)
            if "spread" in only and count > 1:
                times = max(5, self._options.barriers[count] // 4)
                self._measured("spread", self._barrier("spread", times, SPREAD), count)
            if "memory" in only and count >= 8:
                figures["memory/per_client_kib"] = (self._server.rss() - idle) / 1024 / count
                figures["memory/server_mib"] = self._server.rss() / 2**20
            for what in ("set", "get"):
                if what in only:
                    self._calls(what)
            self._zygote.phase("leave")
            self._zygote.do("end")
            foreign = _busy() - busy - (self._zygote.cpu() + self._server.cpu() - own)
            figures["machine/foreign_cores"] = max(0.0, foreign) / (time.monotonic() - began)
        except BaseException:
            self._zygote.do("end")
            raise
        finally:
            self._server.stop()
        return figures

    def _barrier(self, name: str, times: int, spread: float = 0.0) -> dict[str, Any]:
        used, began = self._server.cpu(), time.monotonic()
        answers = self._zygote.phase("barrier", name=name, times=times, spread=spread)
        wall = time.monotonic() - began
        rounds = range(times)
        releases = [
            max(one["left"][turn] for one in answers) - max(one["entered"][turn] for one in answers)
            for turn in rounds
        ]
        calls = [one["left"][turn] - one["entered"][turn] for one in answers for turn in rounds]
        return {"releases": releases, "calls": calls, "cpu": self._server.cpu() - used, "wall": wall}

    def _measured(self, name: str, got: dict[str, Any], count: int) -> None:
        self.figures[f"{name}/p50_ms"] = quantile(got["releases"], 0.5) * 1000
        self.figures[f"{name}/p99_ms"] = quantile(got["releases"], 0.99) * 1000
        self.figures[f"{name}/call_p50_ms"] = quantile(got["calls"], 0.5) * 1000
        self.figures[f"{name}/call_p99_ms"] = quantile(got["calls"], 0.99) * 1000
        self.figures[f"{name}/server_cpu_us_per_call"] = got["cpu"] / len(got["calls"]) * 1e6

    def _calls(self, what: str) -> None:
        used = self._server.cpu()
        answers = self._zygote.phase(what, seconds=self._options.seconds)
        used = self._server.cpu() - used
        calls = sum(one["calls"] for one in answers)
        took = [one for answer in answers for one in answer["took"]]
        self.figures[f"{what}/per_s"] = sum(one["calls"] / one["elapsed"] for one in answers)
        self.figures[f"{what}/p50_ms"] = quantile(took, 0.5) * 1000
        self.figures[f"{what}/p99_ms"] = quantile(took, 0.99) * 1000
        self.figures[f"{what}/server_cpu_us_per_call"] = used / calls * 1e6
        self.figures[f"{what}/client_cpu_us_per_call"] = sum(one["cpu"] for one in answers) / calls * 1e6


def detect(
    system: System, zygote: Zygote, options: argparse.Namespace, delay: float, log: Any
) -> dict[str, float]:
    """Kills one of a few clients; returns how long it took until all the others were told."""
    server = Server(system, DETECT_CLIENTS, options.heartbeat_timeout, log)
    try:
        case = {"address": server.address, "count": DETECT_CLIENTS}
        zygote.do("fork", **case, heartbeat_timeout=options.heartbeat_timeout)
        try:
            zygote.phase("join")
            told = [one["told"] for one in _checked(zygote.do("detect", delay=delay), "detect")]
        finally:
            zygote.do("end")
    finally:
        server.stop()
    return {"detect/first_s": min(told), "detect/all_s": max(told)}


def _times(pid: int) -> list[float]:
    """Returns a process's CPU seconds: user, system, and the same of children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return [int(field) * TICK for field in fields[11:15]]


def _busy() -> float:
    """Returns the CPU seconds that the machine has spent on all processes."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = (
        Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return sum(map(int, (user, nice, system, irq, softirq))) * TICK


def fdatasync_ms(directory: Path) -> float:
    """Returns how long the disk under a directory takes to make a small write durable, in milliseconds."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        took = []
        for _ in range(50):
            os.write(file.fileno(), b"x" * 256)
            before = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - before)
    return statistics.median(took) * 1000


def peers_python() -> str:
    """Returns an interpreter that has jaxlib; makes its environment if there is none."""
    where = CACHE / "bench-peers"
    python, ready = where / "bin" / "python", where / f".{JAXLIB}"
    if not ready.exists():
        print(f"installing {JAXLIB} into {where} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", JAXLIB]
        subprocess.run(command, check=True, stdout=sys.stderr)
        ready.touch()
    return str(python)


def turns(systems: list[System], rounds: int) -> Iterator[tuple[int, list[System]]]:
    """Yields the rounds, each with the systems in another order."""
    for turn in range(rounds):
        shift = turn % len(systems)
        yield turn, systems[shift:] + systems[:shift]


def measure(systems: list[System], options: argparse.Namespace, log: Any) -> tuple[Results, list[str]]:
    """Runs all rounds; returns the figures and what failed."""
    results: Results = {}
    failures: list[str] = []

    def record(turn: int, system: System, count: int, run: Callable[[], dict[str, float]]) -> None:
        began = time.monotonic()
        try:
            figures = run()
        except RuntimeError as error:
            failures.append(f"round {turn + 1}, {system.name}, {count} clients: {error}")
            print(failures[-1], file=sys.stderr)
            return
        for figure, value in figures.items():
            results.setdefault((system.name, count, figure), []).append((turn, value))
        if options.verbose:
            print(
                f"round {turn + 1} {system.name} {count}: {time.monotonic() - began:.1f} s", file=sys.stderr
            )

    with contextlib.ExitStack() as stack:
        zygotes: dict[str, Zygote] = {}
        for system in systems:
            zygotes[system.name] = Zygote(system, log)
            stack.callback(zygotes[system.name].close)
        for turn, order in turns(systems, options.rounds):
            for count in options.clients:
                for system in order:
                    zygote = zygotes[system.name]
                    record(turn, system, count, lambda: Case(system, zygote, count, options, log).run())  # noqa: B023
            if "detect" in options.only and turn < options.detections:
                delay = options.heartbeat_timeout / 2 * (turn + 0.5) / options.detections
                for system in order:
                    zygote = zygotes[system.name]
                    record(
                        turn,
                        system,
                        DETECT_CLIENTS,
                        lambda: detect(system, zygote, options, delay, log),  # noqa: B023
                    )
    return results, failures


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", default="memory,sqlite,jax", help="some of memory,sqlite,jax")
    parser.add_argument("--clients", help="numbers of clients; default 1,2,8,32,128")
    parser.add_argument("--only", default=",".join(METRICS), help=f"some of {','.join(METRICS)}")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--seconds", type=float, help="length of a key-value phase; default 2")
    parser.add_argument("--quick", action="store_true", help="2 rounds with fewer cases; less than 2 minutes")
    parser.add_argument(
        "--baseline", type=Path, help="another checkout of dmesh to measure as well, shown as NAME@CHECKOUT"
    )
    parser.add_argument(
        "--heartbeat-timeout", type=int, default=10, help="seconds, of JAX in detect; its default is 100"
    )
    parser.add_argument("--detections", type=int, help="number of rounds with a killed client; default 5")
    parser.add_argument("--json", type=Path, help="file for all figures; default in the cache directory")
    parser.add_argument("--peers-python", help="an interpreter with jaxlib; default: one is made")
    parser.add_argument("--prepare", action="store_true", help="only make JAX's environment")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    quick = options.quick
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(METRICS):
        parser.error(f"there is no metric {', '.join(sorted(unknown))}; there are {', '.join(METRICS)}")
    default = "2,32,128" if quick else "1,2,8,32,128"
    options.clients = [int(count) for count in (options.clients or default).split(",")]
    options.rounds = options.rounds or (2 if quick else 5)
    options.seconds = options.seconds or (0.5 if quick else 2.0)
    options.detections = options.detections or (1 if quick else 5)
    effort = 1000 if quick else 8000
    options.barriers = {count: min(500, max(12, effort // count)) for count in options.clients}
    options.json = options.json or CACHE / "bench-coordination.json"
    return options


def chosen(options: argparse.Namespace) -> list[System]:
    """Returns the systems to run."""
    systems = []
    for name in options.systems.split(","):
        if name == "jax":
            systems.append(System("jax", "jax", options.peers_python or peers_python()))
        elif name in ("memory", "sqlite"):
            systems.append(System(name, "dmesh", sys.executable, HERE.parent, name == "sqlite"))
            if options.baseline:
                tree = options.baseline.resolve()
                label = f"{name}@{tree.name}"
                systems.append(System(label, "dmesh", sys.executable, tree, name == "sqlite"))
        else:
            raise SystemExit(f"there is no system {name!r}; there are memory, sqlite and jax")
    return systems


def main() -> int:
    """Measures, prints, writes; returns 1 if a case failed."""
    options = parse()
    if options.prepare:
        print(peers_python())
        return 0
    systems = chosen(options)
    environment = {
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "jaxlib": JAXLIB,
        "fdatasync_ms": fdatasync_ms(CACHE),
        "jax_heartbeat_timeout_s": options.heartbeat_timeout,
        "rounds": options.rounds,
    }
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "bench-coordination.log").open("w") as log:
        results, failures = measure(systems, options, log)
    rows = summarize(results)
    print(
        f"{environment['cpus']} cores, load {environment['load'][0]:.1f} at the start, fdatasync "
        f"{environment['fdatasync_ms']:.2g} ms; medians (ranges) of {options.rounds} rounds; JAX's heartbeat "
        f"timeout in the last but one table: {options.heartbeat_timeout} s, its default is 100 s"
    )
    print_tables(rows, [system.name for system in systems])
    raw = [
        {"system": system, "clients": count, "figure": figure, "values": [value for _, value in values]}
        for (system, count, figure), values in results.items()
    ]
    report = {"environment": environment, "summary": rows, "raw": raw, "failures": failures}
    options.json.write_text(json.dumps(report, indent=1))
    print(f"\nall figures: {options.json}")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
