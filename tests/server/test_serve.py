"""`dmesh serve` as its own process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.clients import Process
from tests.server.raw_client import PATIENCE, RawClient, default_token

from dmesh._version import __version__
from dmesh.v1 import common_pb2, coordination_pb2
from dmesh.v1 import key_value_pb2 as kv

COMMAND = [sys.executable, "-m", "dmesh", "serve"]
READY = re.compile(r"dmesh-server ready grpc=(127\.0\.0\.1:\d+) http=(http://127\.0\.0\.1:\d+)")


class Serving:
    """A started server."""

    def __init__(self, *arguments: str) -> None:
        self.process = Process([*COMMAND, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *arguments], {})
        ready = READY.fullmatch(self.process.wait_for("ready"))
        assert ready is not None, self.process.out
        self.address, self.http = ready.groups()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Sends a signal; returns the exit code and what else it wrote."""
        self.process.signal(number)
        return self.ended()

    def ended(self) -> tuple[int, str, str]:
        """Waits for its end; returns the exit code, its output after the first line, and its errors."""
        return self.process.wait(), self.process.out.partition("\n")[2], self.process.err


def get(server: Serving, path: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {default_token()}"}
    response = httpx.get(f"{server.http}{path}", headers=headers, trust_env=False, timeout=PATIENCE)
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


def run(*arguments: str) -> tuple[int, str, str]:
    """Runs `dmesh serve` until it ends by itself; returns the exit code, its output and its errors."""
    process = Process([*COMMAND, *arguments], {})
    return process.wait(), process.out, process.err


@pytest.fixture
def serve() -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*arguments: str) -> Serving:
        started.append(Serving(*arguments))
        return started[-1]

    yield start
    for serving in started:
        serving.process.end()


async def test_serves_until_sigterm(serve: Callable[..., Serving]) -> None:
    server = serve("--memory", "--log-format", "json", "--lease", "9")
    client = RawClient(server.address)
    registered = await client.register()
    times = (registered.lease_ms, registered.heartbeat_interval_ms, registered.suspicion_ms)
    assert times == (9000, 1800, 5000)
    stream = await client.attach()
    assert get(server, "/readyz") == {"status": "ok"}
    assert get(server, "/api/v1/clusters/c/members")["members"][0]["state"] == "CONNECTED"
    server.process.signal(signal.SIGTERM)
    end = (await stream.read_kind("session_end")).session_end
    assert end.error.kind == common_pb2.ERROR_KIND_SHUTTING_DOWN
    await client.channel.close()
    code, out, err = server.ended()
    assert (code, out) == (0, "")
    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert {"server_ready", "registered", "signal_received", "server_stopped"} <= set(events)
    assert registered.peer_secret.hex() not in err
    assert str(registered.peer_secret) not in err


def test_ctrl_c_ends_it_with_0(serve: Callable[..., Serving]) -> None:
    code, out, err = serve().end(signal.SIGINT)
    assert (code, out) == (0, "")
    assert "Traceback" not in err


async def test_second_signal_ends_it_at_once(serve: Callable[..., Serving]) -> None:
    server = serve("--shutdown-grace", "600")
    client = RawClient(server.address)
    # A session that does not say who it is would have the whole grace to do so.
    await client.register()
    stream = client.coordination.Session()
    async with asyncio.timeout(PATIENCE):
        await client.register()  # sent after it on the same connection, so the stream has arrived
        server.process.signal(signal.SIGTERM)
        await asyncio.to_thread(server.process.wait_for, "signal_received", "err")
    code, _, _ = server.end(signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    stream.cancel()
    await client.channel.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_data_dir_keeps_keys_and_members(
    serve: Callable[..., Serving], tmp_path: Path, how: signal.Signals
) -> None:
    directory = str(tmp_path / "data")
    first = serve("--data-dir", directory)
    client = RawClient(first.address, incarnation=77)
    before = await client.register()
    request = kv.SetRequest(caller=client.caller, request_id="s", key="k", value=b"kept")
    await client.key_value.Set(request, timeout=PATIENCE)
    await client.channel.close()
    first.end(how)

    second = serve("--data-dir", directory)
    client = RawClient(second.address, incarnation=77)
    stream = await client.attach()
    found = await client.key_value.Get(kv.GetRequest(caller=client.caller, key="k"), timeout=PATIENCE)
    assert found.kv.value == b"kept"
    assert (await client.key_value.Set(request, timeout=PATIENCE)).revision == 1, (
        "the retry had no second effect"
    )
    after = await client.register()
    assert after.server_incarnation != before.server_incarnation
    assert (after.cluster_incarnation, after.peer_secret) == (before.cluster_incarnation, before.peer_secret)
    state = await client.coordination.GetClusterState(
        coordination_pb2.GetClusterStateRequest(caller=client.caller), timeout=PATIENCE
    )
    assert [member.incarnation for member in state.members] == [77]
    stream.hang_up()
    await client.channel.close()
    assert second.end()[0] == 0
    assert (os.stat(directory).st_mode & 0o777) == 0o700


def test_it_prints_a_link_that_logs_a_browser_in_once(serve: Callable[..., Serving]) -> None:
    server = serve("--memory")
    link = server.process.wait_for("/login?code=", "err").split()[-1]
    assert link.startswith(f"{server.http}/login?code=")
    assert default_token() not in link
    with httpx.Client(trust_env=False, timeout=PATIENCE) as browser:
        assert browser.get(link).status_code == 200
        assert browser.get(f"{server.http}/").status_code == 200
        assert browser.get(f"{server.http}/api/v1/clusters").status_code == 200
    assert httpx.get(link, trust_env=False, timeout=PATIENCE).status_code == 401
    _, _, err = server.end()
    assert "login_link_used" in err
    assert err.count(link) == 1
    assert default_token() not in err


@pytest.mark.parametrize("arguments", [("--log-format", "json"), ("--insecure",)])
def test_no_link_stands_in_logs_for_programs_or_where_nobody_logs_in(
    serve: Callable[..., Serving], arguments: tuple[str, ...]
) -> None:
    assert "/login" not in serve("--memory", *arguments).end()[2]


def test_memory_forgets(serve: Callable[..., Serving]) -> None:
    server = serve("--memory")
    assert get(server, "/api/v1/clusters")["clusters"] == []


@pytest.mark.parametrize("flag", ["--listen", "--http"])
def test_port_in_use(flag: str) -> None:
    other = "--http" if flag == "--listen" else "--listen"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, out, err = run(flag, address, other, "127.0.0.1:0")
    assert (code, out) == (2, "")
    [error] = [line for line in err.splitlines() if line.startswith("dmesh")]
    assert error.startswith(f"dmesh serve: error: cannot listen on {address}: ")
    assert f"(pid {os.getpid()}) uses this port. End it, or choose another port" in error


def test_data_dir_in_use(serve: Callable[..., Serving], tmp_path: Path) -> None:
    serve("--data-dir", str(tmp_path / "d"))
    code, _, err = run("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", str(tmp_path / "d"))
    assert code == 2
    assert "in use by another dmesh server" in err
    assert "Traceback" not in err


def test_unusable_data_dir(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    taken = str(tmp_path / "file" / "d")
    code, _, err = run("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", taken)
    assert code == 2
    [error] = [line for line in err.splitlines() if line.startswith("dmesh")]
    assert "--data-dir" in error
    assert str(tmp_path / "file") in error
    assert "Traceback" not in err


def test_version() -> None:
    command = [sys.executable, "-m", "dmesh", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"dmesh {__version__}\n"
