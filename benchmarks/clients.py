"""Load of many clients on one server: registration, barriers, heartbeats, losses. Prints a line of JSON.

The server is a real `dmesh serve`, with its state in memory or, with --data-dir, on disk. The clients are
simulated (`simulated_clients.py`); each has a connection and a session of its own.

    python benchmarks/clients.py --clients 1000 --processes 4
    python benchmarks/clients.py --clients 10000 --heartbeat 300 --ending vanish --check
    python benchmarks/clients.py --failures 2,100,10000   # the table of docs/failures.md

Every error counts: a call that fails, a session that ends, a member that is reported as departed while all
are there, a member that is not live after the heartbeats. With --check, the project's limits count as well:
a minute for registration and the first barrier, the spread of a release, memory per client. With --failures,
real processes are killed, and connections are reset and refused for a second, in clusters of the given
sizes. The table says how soon the others are told, and `failure_table.py` how that is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import psutil
from failure_table import print_table
from simulated_clients import Server, SimulatedClients, check_ports, raise_file_limit, serving

WITNESSES = 16
"""Clients that stay when all others vanish, and must be told of each of them."""
JOIN_LIMIT = 60.0
"""Seconds for registering and the first barrier together (--check)."""
SPREAD_LIMIT = 10.0
"""Seconds between the first and the last to be released from a barrier (--check)."""
KIB_LIMIT = 100.0
"""Server memory per client (--check)."""


class Load:
    """All phases, and what is measured in them."""

    def __init__(self, options: argparse.Namespace, server: Server) -> None:
        self._options, self._server = options, server
        self.report: dict[str, Any] = {"clients": options.clients, "processes": options.processes}
        self.clients = SimulatedClients(server.address, options.clients, options.processes)

    def phase(
        self, name: str, first: int = 0, last: int | None = None, *, title: str = "", **arguments: Any
    ) -> list[dict[str, Any]]:
        """Have clients do something, and note how long it took."""
        used, started = self._server.cpu(), time.monotonic()
        answers = self.clients.phase(name, first, last, **arguments)
        if title:
            self.report[f"{title}_s"] = round(time.monotonic() - started, 2)
            self.report[f"{title}_server_cpu_s"] = round(self._server.cpu() - used, 2)
            print(f"{title}: {self.report[f'{title}_s']} s", file=sys.stderr, flush=True)
        return answers

    def run(self) -> None:
        """Run all phases."""
        options, report = self._options, self.report
        idle = self._server.process.memory_info().rss
        self.phase("exist")
        self.phase("register", title="register")
        for title in ("barrier", "again"):
            released = [one for answer in self.phase("barrier", title=title) for one in answer["released"]]
            report[f"{title}_release_spread_s"] = round(max(released) - min(released), 2)
        connections = self._server.process.net_connections(kind="tcp")
        report["connections"] = sum(one.status == psutil.CONN_ESTABLISHED for one in connections)
        if options.heartbeat:
            self._heartbeats(options.heartbeat)
        if options.resets:
            self._resets(options.resets)
        used = self._server.process.memory_info().rss
        report["server_rss_mib"] = round(used / 2**20, 1)
        report["server_kib_per_client"] = round((used - idle) / 1024 / options.clients, 1)
        self.phase("state", 0, 1)
        self.phase("expect_departures")
        if options.ending == "vanish" and options.clients > WITNESSES:
            gone = options.clients - WITNESSES
            started = time.monotonic()
            self.phase("vanish", WITNESSES, title="vanish")
            self.phase("witness", 0, WITNESSES, title="witness", gone=gone)
            report["all_departures_told_s"] = round(time.monotonic() - started, 2)
            self.phase("leave", 0, WITNESSES, title="leave")
        else:
            self.phase("leave", title="leave")

    def _resets(self, times: int) -> None:
        took, retries = [], 0
        for _ in range(times):
            started = time.monotonic()
            retries = sum(answer["retries"] for answer in self.phase("reset", title="reset"))
            took.append(round(time.monotonic() - started, 2))
            self.phase("barrier")
            self.phase("state", 0, 1)
        print(f"resets: {took} s", file=sys.stderr, flush=True)
        self.report |= {"resets_s": took, "resets_retries": retries}

    def _heartbeats(self, seconds: float) -> None:
        used = self._server.cpu()
        self.phase("heartbeats")
        time.sleep(seconds)
        answers = self.phase("heartbeats_over")
        took = sorted(one for answer in answers for one in answer["acknowledged"])
        self.report |= {
            "heartbeats": len(took),
            "heartbeats_server_cores": round((self._server.cpu() - used) / seconds, 2),
            "heartbeat_p50_ms": round(took[len(took) // 2] * 1000, 1) if took else None,
            "heartbeat_p99_ms": round(took[int(len(took) * 0.99)] * 1000, 1) if took else None,
            "heartbeat_max_ms": round(took[-1] * 1000, 1) if took else None,
        }


def broken_limits(report: dict[str, Any]) -> list[str]:
    """Return which of the promised limits a report breaks."""
    broken = []
    if (joined := report["register_s"] + report["barrier_s"]) > JOIN_LIMIT:
        broken.append(f"registering and meeting took {joined:.1f} s, limit {JOIN_LIMIT:g}")
    if (spread := report["barrier_release_spread_s"]) > SPREAD_LIMIT:
        broken.append(f"a barrier's release was spread over {spread} s, limit {SPREAD_LIMIT:g}")
    if (memory := report["server_kib_per_client"]) > KIB_LIMIT:
        broken.append(f"the server needs {memory} KiB per client, limit {KIB_LIMIT:g}")
    if report["connections"] < report["clients"]:
        broken.append(f"the server has {report['connections']} connections")
    return broken


def main() -> int:
    """Run the phases and report; return 1 if there was any error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--heartbeat", type=float, default=0.0, help="seconds of heartbeats alone")
    parser.add_argument("--resets", type=int, default=0, help="how often all connections are reset")
    parser.add_argument("--ending", choices=("leave", "vanish"), default="leave")
    parser.add_argument("--check", action="store_true", help="fail if a limit of the project is exceeded")
    parser.add_argument("--data-dir", help="directory for the server's state; default: in memory")
    parser.add_argument("--serve", default="", help="additional options of `dmesh serve`, as one argument")
    parser.add_argument("--profile", help="run the server under cProfile, and write the profile to this file")
    parser.add_argument("--failures", metavar="SIZES", help="print the table of kills and flaps")
    options = parser.parse_args()
    sizes = [int(size) for size in (options.failures or str(options.clients)).split(",")]
    raise_file_limit(max(sizes) + 500)
    check_ports(max(sizes))
    if options.failures:
        return print_table(sizes, options.processes)
    with serving(options.serve, options.data_dir, options.profile) as server:
        load = Load(options, server)
        try:
            load.run()
        finally:
            load.clients.close()
    errors = [*load.clients.errors, *(f"server: {line}" for line in server.complaints)]
    if options.check:
        errors += broken_limits(load.report)
    print(json.dumps(load.report | {"errors": len(errors)}))
    for error in errors[:10]:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
