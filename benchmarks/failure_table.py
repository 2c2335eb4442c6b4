"""Table of how soon a killed client is detected, and what a connection flap costs, by cluster size.

`clients.py --failures` prints it, as Markdown. All settings are the defaults. In clusters of up to `REAL`
clients, each client is a process with the SDK's own agent. In larger ones only the clients that are killed
are processes, and the others are simulated.

- *kill -9*: one process after another gets SIGKILL. For each, the table has the time until the server
  declared it lost, according to its log, and until the last of the other clients was told.
- *flap*: all connections are reset, and new ones are refused for a second. Real clients are behind a proxy
  for that; simulated ones close their connections and wait. The time is from the end of the outage until all
  clients have passed a barrier.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import queue
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from simulated_clients import CLUSTER, JOB, LIMIT, Server, SimulatedClients, job_addresses, serving

from dmesh.coordination.agent import Agent, Identity
from dmesh.testing import FaultProxy

REAL = 200
"""The largest cluster whose clients are all processes."""
KILLS = 10
VICTIMS = 5
"""Processes among simulated clients."""
PAUSE = 5.0
"""Seconds between two of these kills: large clusters are told of departures that follow closely together."""
FLAPS = 3
OUTAGE = 1.0
"""Seconds for which connections are refused."""
_PR_SET_PDEATHSIG = 1


@dataclass
class Row:
    """What was measured of one size, in seconds."""

    size: int
    lease: float = 0.0
    noticed: list[float] = field(default_factory=list)
    """From each kill to the server's verdict."""
    last: list[float] = field(default_factory=list)
    """From each kill to the last one."""
    back: list[float] = field(default_factory=list)
    """From the end of each outage to the next barrier of all."""
    lost: int = 0
    """Clients that live and were declared lost."""

    def __str__(self) -> str:
        lost = "nobody" if not self.lost else f"{self.lost} declared"
        kind = "" if self.size <= REAL else ", simulated"
        return (
            f"| {self.size:,}{kind} | {self.lease:g} s | {_shown(self.noticed)} | {_shown(self.last)} "
            f"| {lost} lost | {_shown(self.back)} |"
        )


HEAD = (
    "| clients | lease | `kill -9` to the server's verdict | to the last client told "
    f"| flap of 1 s, {FLAPS} times | all are back after |\n|---|---|---|---|---|---|"
)


def _shown(values: Sequence[float]) -> str:
    def one(value: float) -> str:
        return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"

    return f"{one(statistics.median(values))}, at most {one(max(values))}"


class Processes:
    """Clients that are processes, some of those of one cluster."""

    def __init__(self, indices: range, total: int) -> None:
        """Fork the processes; no thread may run yet."""
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        context = multiprocessing.get_context("fork")
        for index in indices:
            ours, theirs = context.Pipe()
            if not (pid := os.fork()):
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                with contextlib.suppress(BaseException):
                    _live(index, total, theirs)
                os._exit(1)
            theirs.close()
            self._pipes.append(ours)
            self._pids.append(pid)

    def __len__(self) -> int:
        return len(self._pipes)

    def send(self, what: str, argument: str = "") -> None:
        """Have all of them do something."""
        for pipe in self._pipes:
            pipe.send_bytes(json.dumps([what, argument]).encode())

    def answers(self) -> list[float]:
        """Return what each of them answers to what was sent."""
        found = []
        for pipe in self._pipes:
            answer = json.loads(pipe.recv_bytes()) if pipe.poll(LIMIT) else "no answer"
            if not isinstance(answer, float):
                raise SystemExit(f"a client failed: {answer}")
            found.append(answer)
        return found

    def do(self, what: str, argument: str = "") -> list[float]:
        """Have all of them do something, and wait for it."""
        self.send(what, argument)
        return self.answers()

    def kill_last(self) -> float:
        """Kill one of them; return the time."""
        pid = self._pids.pop()
        self._pipes.pop().close()
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return killed_at

    def close(self) -> None:
        """End those that are left."""
        while self._pids:
            self.kill_last()


def _live(index: int, total: int, pipe: Connection) -> None:
    """Be one client: obey commands until the end."""
    departures: queue.SimpleQueue[float] = queue.SimpleQueue()
    identity = Identity.of_this_process(JOB, index, {JOB: job_addresses(total)}, cluster=CLUSTER)
    agent: Agent | None = None
    while True:
        what, argument = json.loads(pipe.recv_bytes())
        try:
            answer = 0.0
            if agent is None:
                agent = Agent(argument, identity, connect_timeout=LIMIT, announce=lambda _: None)
                agent.add_departure_listener(lambda _: departures.put(time.monotonic()))
                agent.start()
                answer = agent._session.registration.lease
            elif what == "barrier":
                agent.barrier("meet", timeout=LIMIT)
                answer = time.monotonic()
            elif what == "departure":
                answer = departures.get(timeout=LIMIT)
            elif what == "departures":
                answer = float(departures.qsize())
            pipe.send_bytes(json.dumps(answer).encode())
        except Exception as error:  # noqa: BLE001 -- the measuring process is told
            pipe.send_bytes(json.dumps(f"client {index}, {what}: {error!r}").encode())


@contextlib.contextmanager
def _joined(row: Row, address: str, processes: Processes, proxy: FaultProxy | None = None) -> Iterator[None]:
    try:
        row.lease = max(processes.do("join", proxy.address if proxy else address))
        processes.do("barrier")
        yield
    finally:
        processes.close()


def _measure_processes(row: Row) -> None:
    while len(row.last) < KILLS:
        processes = Processes(range(row.size), row.size)
        with serving() as server, _joined(row, server.address, processes):
            # Most of a cluster is alive when one of it is killed.
            for _ in range(min(KILLS - len(row.last), max(1, row.size // 10))):
                killed_at = processes.kill_last()
                _note(row, server, killed_at, processes.do("departure"))
    processes = Processes(range(row.size), row.size)
    with serving() as server, FaultProxy(server.address) as proxy, _joined(row, "", processes, proxy):
        for _ in range(FLAPS):
            with proxy.refuse():
                proxy.reset()
                time.sleep(OUTAGE)
            ended_at = time.monotonic()
            row.back.append(max(processes.do("barrier")) - ended_at)
        row.lost += int(max(processes.do("departures")))


def _measure_simulated(row: Row, shares: int) -> None:
    few = row.size - VICTIMS
    processes = Processes(range(few, row.size), row.size)
    with serving() as server:
        simulated = SimulatedClients(server.address, few, shares, row.size)
        try:
            simulated.phase("exist")
            row.lease = max(answer["lease"] for answer in simulated.phase("register"))
            processes.send("join", server.address)
            processes.answers()
            processes.send("barrier")
            simulated.phase("barrier")
            processes.answers()
            for _ in range(FLAPS):
                ended_at = time.monotonic() + OUTAGE
                simulated.phase("reset", outage=OUTAGE)
                processes.send("barrier")
                answers = simulated.phase("barrier")
                passed = [one for answer in answers for one in answer["released"]]
                row.back.append(max(*passed, *processes.answers()) - ended_at)
            row.lost += int(max(processes.do("departures")))
            simulated.phase("expect_departures")
            for gone in range(1, VICTIMS + 1):
                time.sleep(PAUSE)
                killed_at = processes.kill_last()
                answers = simulated.phase("witness", gone=gone)
                told = [one for answer in answers for one in answer["told"]]
                _note(row, server, killed_at, told + (processes.do("departure") if len(processes) else []))
        finally:
            processes.close()
            simulated.close()
    row.lost += len(simulated.errors)
    for error in simulated.errors[:5]:
        print(error, file=sys.stderr)


def _note(row: Row, server: Server, killed_at: float, told: list[float]) -> None:
    row.noticed.append(server.departures()[-1] - killed_at)
    row.last.append(max(told) - killed_at)
    print(f"{row.size}: {row.noticed[-1]:.3f} {row.last[-1]:.3f}", file=sys.stderr, flush=True)


def print_table(sizes: Sequence[int], shares: int) -> int:
    """Measure clusters of these sizes, and print the table; return 1 if anybody was lost who lives."""
    rows = [Row(size) for size in sizes]
    os.environ.setdefault("DMESH_TOKEN", "measured" * 8)
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the start\n", flush=True)
    print(HEAD, flush=True)
    for row in rows:
        if row.size <= REAL:
            _measure_processes(row)
        else:
            _measure_simulated(row, shares)
        print(row, flush=True)
    return 1 if any(row.lost for row in rows) else 0
