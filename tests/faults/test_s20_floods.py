"""Scenario 20: connections that say nothing, handshakes and headers that never end, calls without measure.

Whoever is in stays in: a member's calls are answered within its heartbeat interval all the while. How many
connections are tried is bounded here by the file descriptors of the test, DMESH_FLOOD asks for more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from tests.faults.secured import DEADLINE, HOST, Authority, ask, serving
from tests.waiting import eventually

from dmesh.coordination.agent import Agent, Identity
from dmesh.coordination.credentials import ClientTls, Credentials
from dmesh.security import tokens
from dmesh.security.tokens import TokenSource

pytestmark = pytest.mark.faults

TOKEN = tokens.generate()
FLOOD = int(os.environ.get("DMESH_FLOOD", "2000"))
HEARTBEAT = 3.0
"""Seconds: the heartbeat interval of the servers, in which every answer must come."""


class Member:
    """A client that is in, and notes how long its calls take."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        self.agent = Agent(
            address,
            Identity.of_this_process("worker", 0, {"worker": ("h:1",)}),
            connect_timeout=DEADLINE,
            credentials=Credentials(TokenSource("test", value=TOKEN), tls),
        )
        self.agent.start()
        self.generation = self.agent._session.generation
        self.waits: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            self.agent.key_value_set("k", "v", allow_overwrite=True)
            self.waits.append(time.monotonic() - started)
            time.sleep(0.01)

    def close(self) -> None:
        """Ends it; every call was answered in time, and the session never broke."""
        eventually(lambda: len(self.waits) >= 20 or not self._thread.is_alive(), "enough calls to judge by")
        self._stop.set()
        self._thread.join(DEADLINE)
        assert self.agent._session.generation == self.generation
        self.agent.leave()
        assert sorted(self.waits)[int(len(self.waits) * 0.99)] < HEARTBEAT


def open_connections(port: int, count: int, said: bytes = b"") -> list[socket.socket]:
    """Opens connections until the server takes no more, and leaves them open."""
    opened = []
    for _ in range(count):
        try:
            connection = socket.create_connection((HOST, port), 2)
            if said:
                connection.send(said)
        except OSError:
            break
        opened.append(connection)
    return opened


@contextlib.contextmanager
def flood(port: int, count: int = FLOOD, said: bytes = b"") -> Iterator[list[socket.socket]]:
    connections = open_connections(port, count, said)
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n"], ids=["silent", "half a preface"])
def test_half_open_connections_are_ended_and_harm_nobody(said: bytes) -> None:
    with serving("--memory", environ={"DMESH_TOKEN": TOKEN}) as server:
        process = psutil.Process(server.process.pid)
        member = Member(server.grpc)
        before = process.num_fds()
        with flood(port_of(server.grpc), said=said) as connections:
            assert len(connections) >= min(FLOOD, 1000)
            assert ask(server.grpc, TOKEN, cluster="default") is grpc.StatusCode.OK
            eventually(lambda: process.num_fds() < before + 50, "the end of those that say nothing (10 s)")
        member.close()


def test_more_connections_than_are_allowed(tmp_path: Path) -> None:
    with serving("--memory", "--max-connections", "50", environ={"DMESH_TOKEN": TOKEN}) as server:
        process = psutil.Process(server.process.pid)
        member = Member(server.grpc)
        with flood(port_of(server.grpc), 500):
            eventually(lambda: process.num_fds() < 150, "the refusal of those beyond the limit")
        eventually(lambda: ask(server.grpc, TOKEN, cluster="default") is grpc.StatusCode.OK, "room again")
        member.close()


def test_no_file_descriptors_left() -> None:
    limited = {"DMESH_TOKEN": TOKEN}
    with serving("--memory", "--max-connections", "100000", environ=limited) as server:
        process = psutil.Process(server.process.pid)
        member = Member(server.grpc)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 60, process.num_fds() + 60))
        with flood(port_of(server.grpc), 200), flood(port_of(server.http), 60):
            used = sum(process.cpu_times()[:2])
            started = time.monotonic()
            time.sleep(2)  # what is measured is that nothing turns in circles meanwhile
            busy = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - started)
            assert busy < 0.6, f"the server used {busy:.2f} of a core while it could accept nothing"
        eventually(lambda: ask(server.grpc, TOKEN, cluster="default") is grpc.StatusCode.OK, "room again")
        member.close()


def test_abandoned_tls_handshakes(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    cert, key = authority.issue("server")
    flags = ("--tls-cert", str(cert), "--tls-key", str(key))
    with serving("--memory", *flags, environ={"DMESH_TOKEN": TOKEN}) as server:
        process = psutil.Process(server.process.pid)
        member = Member(server.grpc, ClientTls(authority.path))
        before = process.num_fds()
        hello = bytes.fromhex("16030100f8010000f40303")  # the beginning of a handshake
        with (
            flood(port_of(server.grpc), 500, hello),
            flood(port_of(server.http), 200, hello) as to_http,
        ):
            assert len(to_http) > 64
            eventually(lambda: process.num_fds() < before + 20, "the end of the handshakes (10 s)")
        member.close()


def test_headers_that_never_end() -> None:
    with serving("--memory", environ={"DMESH_TOKEN": TOKEN}) as server:
        port = port_of(server.http)
        with flood(port, 200, b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-A: ") as connections:
            process = psutil.Process(server.process.pid)

            def held() -> int:
                return sum(
                    one.laddr and one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED
                    for one in process.net_connections("tcp")
                )

            eventually(lambda: held() <= 64, "no more than 64 connections from one host")
            for _ in range(100):
                with contextlib.suppress(OSError):
                    connections[0].send(b"a")  # a byte now and then keeps no connection open
                if held() == 0:
                    break
                time.sleep(0.3)
            assert held() == 0
        assert httpx.get(f"{server.http}/livez", trust_env=False).status_code == 200
        assert "http_connection_too_slow" in server.log
        assert len([line for line in server.log.splitlines() if "http_connection" in line]) < 10


def test_calls_without_measure_from_one_client() -> None:
    with serving("--memory", environ={"DMESH_TOKEN": TOKEN}) as server:
        member = Member(server.grpc)
        channel = grpc.insecure_channel(server.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
        call = channel.unary_unary("/dmesh.v1.CoordinationService/GetClusterState")
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        until = time.monotonic() + 4
        flying: list[grpc.Future] = []
        sent = 0
        while time.monotonic() < until:
            flying = [one for one in flying if not one.done()]
            flying += [call.future(b"", metadata=metadata) for _ in range(1000 - len(flying))]
            sent += 1000
            time.sleep(0.01)
        channel.close()
        assert sent >= 2000
        member.close()
