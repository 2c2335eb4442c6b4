"""Cost of dashboards: how long clients take to meet at a barrier while dashboards watch a large cluster.

    python benchmarks/dashboards.py --members 1000 --dashboards 3 --browser

A real `dmesh serve` has a cluster of many simulated members, which send heartbeats with full progress
reports. Eight clients of another cluster meet at barriers, in turns without and with dashboards. A dashboard
does what the page does for a cluster of more than 500 members: it follows the stream of events, and every
four seconds reads the tasks, the reason why the cluster waits, and the data of its view, all at once; every
third time also facts of the server. Each dashboard shows another view, and at other times. The turns are
short, so data that the server caches for some seconds has to be computed in each of them.

The server has a processor for itself. Members, clients and dashboards share the others, in both kinds of
turns (with --together, all processes may run anywhere). Members and dashboards have a lower priority than
the clients that meet, because in reality they are on other machines. Dashboards read answers as bytes: the
server is measured, not its readers.

Prints a line of JSON:

- percentiles of all turns of each kind;
- by how much the 99th percentile moves, and the interval that contains this in 95 % of the cases if pairs of
  turns are drawn anew from those that were measured;
- the same interval for turns without dashboards, halved: the effect of chance alone;
- the change of the median turn's 99th percentile, which other activity of the machine does not affect;
- how much of a processor the server uses while no clients meet, by the number of dashboards.

More --turns make it more exact; a run takes about three minutes. With --browser, chromium opens the page for
the same cluster and goes through its views. An update lasts from the arrival of an answer until it is on the
screen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from simulated_clients import JOB, Client

from dmesh.protocol import jobs_digest
from dmesh.v1 import common_pb2 as common
from dmesh.v1 import coordination_pb2
from dmesh.v1 import progress_pb2 as pb

T = TypeVar("T")

MEETING = 8
"""Clients that meet."""
PAUSE = 0.002
"""Seconds between two meetings."""
PATIENCE = 120.0
_ALL = ("tasks", "why")
READ = (
    (*_ALL, "progress", "series?after=1"),
    (*_ALL, "members?condition=FAILED&condition=LOST&condition=STUCK&condition=BLOCKED&limit=200"),
    (*_ALL, "collectives?members=32&recent=16&limit=4"),
)
"""What dashboards read again and again: one shows the overview, one members, one collectives."""
PERIOD = 4.0
"""Seconds between two times: the page reads large clusters half as often as small ones."""
SERVER_EVERY = 3
"""Times after which a page reads facts of the server."""
VIEWS = ("overview", "time", "mesh", "members", "barriers", "collectives", "events", "keys")
TOLD = 8.0
"""Seconds after which all members have told of their progress."""
SHOWN = 6.0
"""Seconds for which a browser shows each view."""
DRAWN = 500
"""How often turns are drawn anew to see what chance does."""
SETTLED = 0.5
"""Seconds after which dashboards that were opened begin to look, and clients to meet."""
YIELDING = 10
"""By how much members and dashboards are nicer than the clients that meet."""


def made(address: str, count: int, cluster: str) -> list[Client]:
    """Makes the clients of a cluster."""
    addresses = [f"h{index}:1" for index in range(count)]
    digest = jobs_digest([(JOB, addresses)])
    clients = [
        Client(address, index, [common.Job(name=JOB, addresses=addresses)], digest) for index in range(count)
    ]
    for client in clients:
        client._caller.cluster = cluster
    return clients


def report(index: int, size: int) -> pb.ProgressReport:
    """Returns what a member tells of its progress: sixteen calls in one group, the last of which waits."""
    calls = [
        pb.CallRecord(
            group=1, sequence=number, call="all_reduce(sum, float64, shape (1000,))", nbytes=8_000,
            age_us=(20 - number) * 100_000, elapsed_us=50_000, waited_us=40_000,
            state=pb.CALL_STATE_DONE if number < 16 else pb.CALL_STATE_WAITING,
        )
        for number in range(1, 17)
    ]  # fmt: skip
    return pb.ProgressReport(
        where=f"train.py:{index % 90} in step", operation="all_reduce", idle_ms=400, recent=calls,
        groups=[
            pb.GroupProgress(
                id=1, name="world", size=size, issued=16, finished=15, last=calls[-1], counted=15,
                elapsed_us=750_000, waited_us=600_000,
            )
        ],
        meshes=[
            pb.AnnouncedMesh(
                name="grid", device_type="CPU",
                axes=[pb.MeshAxis(name="batch", size=size // 8), pb.MeshAxis(name="model", size=8)],
            )
        ],
    )  # fmt: skip


def let_tell(client: Client, told: pb.ProgressReport) -> None:
    """Lets a client tell of its progress with each heartbeat."""
    attach = client._attach

    async def attach_and_tell() -> None:
        await attach()
        send = client._outgoing.put_nowait

        def send_with_report(request: coordination_pb2.SessionRequest | None) -> None:
            if request is not None and request.WhichOneof("kind") == "heartbeat":
                request.heartbeat.report.CopyFrom(told)
            send(request)

        client._outgoing.put_nowait = send_with_report  # type: ignore[method-assign]

    client._attach = attach_and_tell  # type: ignore[method-assign]


def simulate(address: str, count: int, end: Connection) -> None:
    """Runs the members of the large cluster until it is told to end."""
    os.nice(YIELDING)

    async def run() -> None:
        clients = made(address, count, "load")
        for index, client in enumerate(clients):
            let_tell(client, report(index, count))
        for begin in range(0, count, 50):
            await asyncio.gather(*(client.register() for client in clients[begin : begin + 50]))
        await asyncio.gather(*(client.barrier() for client in clients))
        await asyncio.sleep(TOLD)
        end.send("ready")
        await asyncio.to_thread(end.recv)
        await asyncio.gather(*(client.leave() for client in clients))

    asyncio.run(run())


class Dashboard:
    """Reads what a page reads, as bytes."""

    def __init__(self, host: str, port: int, token: str, number: int) -> None:
        self.took: list[float] = []
        self._at = host, port
        self._token = token
        self._number = number
        self._open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def follow(self) -> None:
        """Follows the stream of events."""
        reader, writer = await self._ask("/api/v1/events/stream")
        try:
            while await reader.read(1 << 16):
                pass
            raise ConnectionError("the stream of events has ended")
        finally:
            writer.close()

    async def look(self) -> None:
        """Reads again and again."""
        await asyncio.sleep(SETTLED + PERIOD * self._number / 3 % PERIOD)
        resources = [f"/api/v1/clusters/load/{one}" for one in READ[self._number % len(READ)]]
        due, turn = time.perf_counter(), 0
        try:
            while True:
                every = ["/api/v1/server"] if turn % SERVER_EVERY == 0 else []
                begin = time.perf_counter()
                await asyncio.gather(*(self._read(path) for path in resources + every))
                self.took.append(time.perf_counter() - begin)
                due, turn = due + PERIOD, turn + 1
                await asyncio.sleep(due - time.perf_counter())
        finally:
            for _, writer in self._open:
                writer.close()

    async def _read(self, path: str) -> None:
        """Reads an answer, on a connection that is free and that the server has not closed."""
        self._open = [one for one in self._open if not one[0].at_eof()]
        connection = await self._ask(path, self._open.pop(0) if self._open else None)
        reader, _ = connection
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        assert length is not None, head
        await reader.readexactly(int(length[1]))
        self._open.append(connection)

    async def _ask(
        self, path: str, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._at
        reader, writer = connection or await asyncio.open_connection(host, port)
        # What chromium sends, more or less: heads have to be read, too.
        writer.write(
            (
                f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: keep-alive\r\n"
                f"Authorization: Bearer {self._token}\r\nAccept: */*\r\nSec-Fetch-Site: same-origin\r\n"
                "Sec-Fetch-Mode: cors\r\nSec-Fetch-Dest: empty\r\nAccept-Encoding: gzip\r\n"
                "User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko)\r\n"
                f"Referer: http://{host}:{port}/\r\nAccept-Language: en-GB,en;q=0.9\r\n\r\n"
            ).encode()
        )
        return reader, writer


def look(url: str, token: str, end: Connection) -> None:
    """Opens as many dashboards as it is told to; sends how long their looks took, when told to close them."""
    os.nice(YIELDING)
    host, _, port = url.removeprefix("http://").partition(":")

    async def run() -> None:
        while (count := await asyncio.to_thread(end.recv)) is not None:
            dashboards = [Dashboard(host, int(port), token, number) for number in range(count)]
            tasks = [asyncio.create_task(work) for one in dashboards for work in (one.follow(), one.look())]
            await asyncio.to_thread(end.recv)
            failed = [task.exception() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert not failed, failed
            end.send([one for dashboard in dashboards for one in dashboard.took])

    asyncio.run(run())


async def meet(clients: Sequence[Client], seconds: float) -> list[float]:
    """Meets again and again; returns how long each time took."""
    took, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        await asyncio.gather(*(client.barrier() for client in clients))
        took.append(time.perf_counter() - begin)
        await asyncio.sleep(PAUSE)
    return took


def percentile(values: Sequence[float], part: float) -> float:
    """Returns a percentile in milliseconds."""
    return round(sorted(values)[min(len(values) - 1, int(len(values) * part))] * 1000, 3)


def moved(pairs: Sequence[tuple[list[float], list[float]]], part: float) -> float:
    """Returns by how much a percentile of the second ones is larger than of the first ones, as a ratio."""
    first, second = ([value for pair in pairs for value in pair[which]] for which in (0, 1))
    return percentile(second, part) / percentile(first, part) - 1


def moved_usually(pairs: Sequence[tuple[list[float], list[float]]], part: float) -> float:
    """Returns the same of the medians of the turns: what disturbs some of them does not count."""
    first, second = (statistics.median(percentile(pair[which], part) for pair in pairs) for which in (0, 1))
    return second / first - 1


def spread(
    measure: Callable[[Sequence[tuple[list[float], list[float]]], float], float],
    pairs: Sequence[tuple[list[float], list[float]]],
    part: float,
) -> list[float]:
    """Returns between which values a measure lies in 95 % of the cases if pairs are drawn anew."""
    chance = random.Random(0)
    drawn = sorted(measure(chance.choices(pairs, k=len(pairs)), part) for _ in range(DRAWN))
    return [round(drawn[int(DRAWN * 0.025)], 3), round(drawn[int(DRAWN * 0.975)], 3)]


class Lookers:
    """The process with the dashboards, as the measuring one sees it."""

    def __init__(self, end: Connection) -> None:
        self._end = end

    async def during(self, count: int, work: Awaitable[T]) -> tuple[T, list[float]]:
        """Does some work with so many dashboards open; returns how long their looks took as well."""
        self._end.send(count)
        await asyncio.sleep(SETTLED)
        done = await work
        self._end.send("close")
        return done, await asyncio.to_thread(self._end.recv)


async def measure(
    options: argparse.Namespace, grpc: str, lookers: Lookers, server: psutil.Process
) -> dict[str, object]:
    """Meets in turns without and with dashboards."""
    clients = made(grpc, MEETING, "measure")
    await asyncio.gather(*(client.register() for client in clients))
    await meet(clients, 2.0)
    pairs: list[tuple[list[float], list[float]]] = []
    looks: list[float] = []
    for _ in range(options.turns):
        quiet, _none = await lookers.during(0, meet(clients, options.seconds))
        busy, took = await lookers.during(options.dashboards, meet(clients, options.seconds))
        pairs.append((quiet, busy))
        looks += took
    await asyncio.gather(*(client.leave() for client in clients))
    used: dict[str, float] = {}
    for count in sorted({0, 1, options.dashboards}):
        before = sum(server.cpu_times()[:2])
        await lookers.during(count, asyncio.sleep(options.idle))
        used[str(count)] = round((sum(server.cpu_times()[:2]) - before) / options.idle * 100, 2)
    quiet, busy = ([value for pair in pairs for value in pair[which]] for which in (0, 1))
    halves = [(one[0][::2], one[0][1::2]) for one in pairs]
    return {
        "members": options.members,
        "dashboards": options.dashboards,
        "meetings": [len(quiet), len(busy)],
        "p50_ms": [percentile(quiet, 0.5), percentile(busy, 0.5)],
        "p99_ms": [percentile(quiet, 0.99), percentile(busy, 0.99)],
        "p999_ms": [percentile(quiet, 0.999), percentile(busy, 0.999)],
        "p99_change": round(moved(pairs, 0.99), 3),
        "p99_change_95": spread(moved, pairs, 0.99),
        "p99_chance_95": spread(moved, halves, 0.99),
        "p99_change_usual": round(moved_usually(pairs, 0.99), 3),
        "p99_change_usual_95": spread(moved_usually, pairs, 0.99),
        "looks": len(looks),
        "look_p50_ms": percentile(looks, 0.5),
        "look_p99_ms": percentile(looks, 0.99),
        "server_cpu_percent": used,
    }


async def browse(url: str, token: str) -> dict[str, object]:
    """Goes through the views with a browser; returns how long its updates took and how large it is."""
    from playwright.async_api import async_playwright

    updates: dict[str, list[float]] = {}
    elements = 0
    async with async_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.goto(url)
        await page.fill("#token", token)
        await page.click("button")
        await page.locator("#cluster").select_option("load")
        for view in VIEWS:
            await page.evaluate("view => { location.hash = `#/${view}`; performance.clearMeasures(); }", view)
            await asyncio.sleep(SHOWN)
            took = "performance.getEntriesByName('dmesh-update').map((one) => one.duration)"
            updates[view] = await page.evaluate(took)
            elements = max(elements, await page.evaluate("document.getElementsByTagName('*').length"))
        await browser.close()
    everything = [one / 1000 for found in updates.values() for one in found]
    return {
        "page_updates": len(everything),
        "page_update_p50_ms": percentile(everything, 0.5),
        "page_update_p99_ms": percentile(everything, 0.99),
        "page_update_worst_ms": {view: round(max(found), 1) for view, found in updates.items() if found},
        "page_elements": elements,
    }


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--dashboards", type=int, default=3)
    parser.add_argument("--turns", type=int, default=20, help="number of turns of each kind")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a turn")
    parser.add_argument("--idle", type=float, default=12.0, help="seconds to measure processor time")
    parser.add_argument("--together", action="store_true", help="let all processes run on all processors")
    parser.add_argument("--browser", action="store_true", help="measure the page in chromium, too")
    options = parser.parse_args()
    token = secrets.token_urlsafe(32)
    os.environ["DMESH_TOKEN"] = token
    own, *others = sorted(os.sched_getaffinity(0))
    pinned = bool(others) and not options.together
    with tempfile.TemporaryFile() as log:
        if pinned:
            os.sched_setaffinity(0, {own})  # what it starts inherits that
        server = subprocess.Popen(
            [sys.executable, "-m", "dmesh", "serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        if pinned:
            os.sched_setaffinity(0, others)
        assert server.stdout is not None
        words = dict(word.split("=", 1) for word in server.stdout.readline().split()[2:])
        context = multiprocessing.get_context("spawn")
        members, members_end = context.Pipe()
        looking, looking_end = context.Pipe()
        processes = [
            context.Process(target=simulate, args=(words["grpc"], options.members, members_end), daemon=True),
            context.Process(target=look, args=(words["http"], token, looking_end), daemon=True),
        ]
        for process in processes:
            process.start()
        members_end.close()
        looking_end.close()
        try:
            assert members.recv() == "ready"
            looked_at = psutil.Process(server.pid)
            found = asyncio.run(measure(options, words["grpc"], Lookers(looking), looked_at))
            found["pinned"] = pinned
            if options.browser:
                found |= asyncio.run(browse(words["http"], token))
            print(json.dumps(found))
            looking.send(None)
            members.send("end")
            for process in processes:
                process.join(PATIENCE)
        finally:
            for process in processes:
                process.kill()
            server.terminate()
            server.wait(PATIENCE)


if __name__ == "__main__":
    main()
