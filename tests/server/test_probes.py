"""Probes of suspected members, with real processes and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dmesh.config import host
from dmesh.coordination.neighbors import NeighborWatch
from dmesh.v1 import coordination_pb2 as pb
from dmesh_server.core.effects import Probe
from dmesh_server.core.events import Evidence
from dmesh_server.core.model import Process, Task
from dmesh_server.probes import Prober

PATIENCE = 30.0
TASK = Task("worker", 1)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def port() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, f"127.0.0.1:{listener.getsockname()[1]}"


def process_of(pid: int, namespace: str = "") -> Process:
    place = namespace or host.pid_namespace()
    return Process("h", pid, host.boot_id(), pid_namespace=place, start_ticks=host.start_ticks(pid))


def probe_of(process: Process, *addresses: str, remote: str = "127.0.0.1") -> Probe:
    return Probe("c", TASK, 7, process, addresses, remote)


class Found:
    """Takes evidence; suspects for as long as the test wants."""

    def __init__(self) -> None:
        self.evidence: asyncio.Queue[Evidence] = asyncio.Queue()
        self.suspected = True
        self.prober = Prober(self.evidence.put_nowait, lambda lease: self.suspected)

    async def next(self) -> Evidence:
        async with asyncio.timeout(PATIENCE):
            return await self.evidence.get()

    async def idle(self) -> None:
        """Waits until nothing is looked for any more."""
        async with asyncio.timeout(PATIENCE):
            while self.prober._tasks:
                await asyncio.sleep(0.01)


async def test_a_process_of_this_host_exists_until_it_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    found = Found()
    found.prober.begin(probe_of(process_of(sleeper.pid)))
    assert await found.next() == Evidence("c", TASK, 7, False)
    sleeper.kill()
    assert (await found.next()).gone
    await found.idle()


async def test_nobody_is_looked_for_who_is_not_suspected_any_more(sleeper: subprocess.Popen[bytes]) -> None:
    found = Found()
    found.suspected = False
    found.prober.begin(probe_of(process_of(sleeper.pid)))
    found.prober.begin(probe_of(process_of(sleeper.pid, "elsewhere"), "127.0.0.1:1"))
    await found.idle()
    assert found.evidence.empty()


async def test_a_port_that_refuses_twice_belongs_to_a_process_that_is_gone(
    port: tuple[socket.socket, str],
) -> None:
    found, (listener, address) = Found(), port
    listener.close()
    found.prober.begin(probe_of(process_of(1, "elsewhere"), address))
    evidence = await found.next()
    assert evidence.gone
    assert f"port {address.rpartition(':')[2]} of 127.0.0.1 refuses connections" in evidence.source
    await found.idle()


async def test_a_port_that_accepts_belongs_to_a_process_that_exists(port: tuple[socket.socket, str]) -> None:
    found = Found()
    found.prober.begin(probe_of(process_of(1, "elsewhere"), port[1]))
    assert not (await found.next()).gone
    found.suspected = False
    await found.idle()


@pytest.mark.parametrize("address", ["127.0.0.2", "192.0.2.1", "no-such-host.invalid", "[::1]"])
async def test_only_the_address_from_which_the_session_came_is_tried(
    address: str, port: tuple[socket.socket, str]
) -> None:
    """A client must not make the server connect to others: not to what it advertises, nor to what that is."""
    found, (listener, own) = Found(), port
    listener.setblocking(False)
    number = own.rpartition(":")[2]
    found.prober.begin(probe_of(process_of(1, "elsewhere"), f"{address}:{number}"))
    await found.idle()
    assert found.evidence.empty()
    with contextlib.suppress(BlockingIOError):
        listener.accept()
        pytest.fail("it was connected to")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1:x", ""])
async def test_what_is_no_address_is_not_tried(address: str) -> None:
    found = Found()
    found.prober.begin(probe_of(process_of(1, "elsewhere"), address))
    await found.idle()
    assert found.evidence.empty()


def test_a_neighbor_says_whether_a_process_is_there(sleeper: subprocess.Popen[bytes]) -> None:
    answers: list[bool] = []
    answered = threading.Semaphore(0)

    def answer(request: pb.SessionRequest) -> None:
        assert request.process_report.lease == 7
        answers.append(request.process_report.gone)
        answered.release()

    watch = NeighborWatch()
    query = pb.ProcessQuery(lease=7, pid=sleeper.pid, start_ticks=host.start_ticks(sleeper.pid))
    for _ in range(20):  # more than are watched at a time
        watch.ask(query, answer)
    for _ in range(20):
        assert answered.acquire(timeout=PATIENCE)
    sleeper.kill()
    sleeper.wait()
    watch.ask(query, answer)
    assert answered.acquire(timeout=PATIENCE)
    assert answers == [False] * 20 + [True]
