"""The server inside another process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import grpc
import pytest
from tests.server.raw_client import PATIENCE, RawClient, refusal

from dmesh.errors import AddressInUseError, ConfigurationError
from dmesh.v1 import common_pb2, coordination_pb2
from dmesh_server.core.model import Limits
from dmesh_server.embedded import start


async def test_serves_and_stops() -> None:
    server = start("127.0.0.1:0")
    client = RawClient(server.address)
    stream = await client.join()
    await asyncio.to_thread(server.stop, 5.0)
    end = (await stream.read_kind("session_end")).session_end
    assert end.error.kind == common_pb2.ERROR_KIND_SHUTTING_DOWN
    await client.channel.close()
    server.stop()
    again = start(server.address)
    assert again.address == server.address, "the port is free again"
    again.stop()


async def test_limits_are_the_callers() -> None:
    server = start("127.0.0.1:0", Limits(lease=7.0, max_value_bytes=10))
    client = RawClient(server.address)
    assert (await client.register()).lease_ms == 7000
    await client.channel.close()
    server.stop()


def test_taken_port_is_raised_in_the_caller() -> None:
    server = start("127.0.0.1:0")
    with pytest.raises(AddressInUseError, match=server.address):
        start(server.address)
    server.stop()


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:99999", "192.0.2.1:0", "no-such-host.invalid:0"])
def test_bad_address_is_raised_in_the_caller(listen: str) -> None:
    with pytest.raises(ConfigurationError):
        start(listen)
    assert not [thread for thread in threading.enumerate() if thread.name == "dmesh-server"]


async def test_several_servers_in_one_process_know_nothing_of_each_other() -> None:
    servers = [start("127.0.0.1:0") for _ in range(3)]
    clients = [RawClient(server.address) for server in servers]
    answers = [await client.register() for client in clients]
    assert len({answer.server_incarnation for answer in answers}) == 3
    servers[0].stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await clients[0].register()
    request = coordination_pb2.GetClusterStateRequest(caller=clients[1].caller)
    assert (await clients[1].coordination.GetClusterState(request, timeout=PATIENCE)).members
    for client in clients:
        await client.channel.close()
    for server in servers[1:]:
        server.stop()


async def test_stop_does_not_wait_for_calls_beyond_the_grace() -> None:
    server = start("127.0.0.1:0")
    client = RawClient(server.address)
    await client.register()
    await asyncio.to_thread(server.stop, 0.0)
    with pytest.raises(grpc.aio.AioRpcError):
        await client.register()
    await client.channel.close()


IMPORTS = """
import sys
from dmesh_server.embedded import start
server = start("127.0.0.1:0")
print(sorted({name.partition(".")[0] for name in sys.modules} & {
    "fastapi", "uvicorn", "pydantic", "starlette", "sqlite3"}))
"""


def test_needs_only_the_base_distribution_and_ends_with_its_process() -> None:
    # The program does not stop the server: it must end cleanly all the same.
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        capture_output=True, text=True, timeout=PATIENCE, env={"PYTHONPATH": ":".join(sys.path)}, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


async def test_refusals_pass_the_thread(make_client: object) -> None:
    server = start("127.0.0.1:0")
    client = RawClient(server.address, 5)
    code, _ = await refusal(client.register)
    assert code is grpc.StatusCode.NOT_FOUND
    await client.channel.close()
    server.stop()
