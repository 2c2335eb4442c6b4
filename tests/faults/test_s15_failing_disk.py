"""Scenario 15: the disk is full, is read-only, or fails to sync.

No acknowledgement, RESOURCE_EXHAUSTED for writes, `/readyz` 503 with the reason; reads, heartbeats and
barriers go on; recovery by itself when the disk works again, and then nothing is missing, not even after a
power failure right then.
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.faults.disks import SmallDisk
from tests.faults.failing_disk import FailingDisk
from tests.faults.figures import Figures
from tests.faults.ledger import Ledger
from tests.faults.processes import LONG_LEASE, PATIENCE, ServerProcess, eventually
from tests.server.raw_client import RawClient, Stream, error_of

from dmesh.v1 import common_pb2, coordination_pb2
from dmesh.v1 import key_value_pb2 as kv
from dmesh_server import failpoints

pytestmark = pytest.mark.faults


Make = Callable[..., ServerProcess]


def readiness(server: ServerProcess) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.http_address}/readyz", timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)["status"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["status"]


class Client:
    """A member with a session, which sets keys and reads them."""

    def __init__(self, server: ServerProcess) -> None:
        self.raw = RawClient(server.address, 0, size=2, incarnation=7)
        self.acknowledged: dict[str, bytes] = {}
        self.stream: Stream | None = None
        self.number = 0

    async def join(self) -> Client:
        await self.raw.coordination.Register(self.raw.registration(request_id="register"), timeout=PATIENCE)
        self.stream = await self.raw.attach()
        return self

    async def set(self, size: int = 2000) -> None:
        self.number += 1
        key, value = f"k{self.number}", b"%d." % self.number * size
        request = kv.SetRequest(
            caller=self.raw.caller, request_id=f"s{self.number}", key=key, value=value[:size]
        )
        await self.raw.key_value.Set(request, timeout=PATIENCE)
        self.acknowledged[key] = value[:size]

    async def refused(self, size: int = 2000) -> common_pb2.Error:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.set(size)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, caught.value
        error = error_of(caught.value)
        assert error.kind == common_pb2.ERROR_KIND_STORE_UNAVAILABLE
        return error

    async def get(self, key: str) -> bytes:
        request = kv.GetRequest(caller=self.raw.caller, key=key)
        return (await self.raw.key_value.Get(request, timeout=PATIENCE)).kv.value

    async def heartbeat(self) -> None:
        assert self.stream is not None
        await self.stream.send(heartbeat=coordination_pb2.Heartbeat(sequence=self.number))
        await self.stream.read_kind("heartbeat_ack")

    async def barrier(self, name: str) -> None:
        assert self.stream is not None
        await self.stream.enter(name, participants=(0,))
        result = await self.stream.result()
        assert (result.name, result.HasField("error")) == (name, False)

    async def all_there(self) -> None:
        for key, value in self.acknowledged.items():
            assert await self.get(key) == value, f"acknowledged, and lost: {key}"

    async def close(self) -> None:
        if self.stream is not None:
            self.stream.hang_up()
        await self.raw.channel.close()


async def goes_on_without_writing(server: ServerProcess, client: Client, reason: str) -> None:
    """Everything but writing works, and everybody who asks is told why writing does not."""
    error = await client.refused()
    assert reason in error.message
    status, said = readiness(server)
    assert status == 503
    assert reason in said
    await client.all_there()
    await client.heartbeat()
    await client.barrier(f"b{client.number}")
    assert server.process.running


async def recovers(server: ServerProcess, client: Client, figures: Figures, name: str) -> None:
    began = time.monotonic()
    await asyncio.to_thread(eventually, lambda: readiness(server)[0] == 200, "recovery")
    figures.add(name, time.monotonic() - began)
    await client.set()
    await client.all_there()


async def survives_a_kill(server: ServerProcess, client: Client) -> None:
    """What was acknowledged, and nothing but what was asked for, is there after a kill."""
    await client.close()
    server.kill()
    server.start()
    again = await Client(server).join()
    again.acknowledged = client.acknowledged
    await again.all_there()
    await again.close()


@pytest.mark.parametrize(("size", "rounds"), [("256k", 1), ("1m", 2)])
async def test_a_full_disk(
    make_server: Make, small_disk: Callable[[str], SmallDisk], size: str, rounds: int, figures: Figures
) -> None:
    disk = small_disk(size)
    server = make_server(*LONG_LEASE, data_dir=disk.path / "data", http=True).start()
    client = await Client(server).join()
    for _ in range(5):
        await client.set()
    for _ in range(rounds):
        disk.fill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            # What the log has room for is still written.
            while True:
                await client.set()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await goes_on_without_writing(server, client, "the store cannot write")
        assert "No space left" in readiness(server)[1] or "full" in readiness(server)[1]
        disk.free()
        await recovers(server, client, figures, "from space to readiness")
    await survives_a_kill(server, client)


async def test_a_store_that_fills_the_disk_by_itself(
    make_server: Make, small_disk: Callable[[str], SmallDisk], figures: Figures
) -> None:
    disk = small_disk("512k")
    server = make_server(*LONG_LEASE, data_dir=disk.path / "data", http=True).start()
    client = await Client(server).join()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await client.set()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await client.heartbeat()
    disk.resize("2m")
    await recovers(server, client, figures, "from a larger disk to readiness")
    await survives_a_kill(server, client)


async def test_a_read_only_disk_at_the_start(
    make_server: Make, small_disk: Callable[[str], SmallDisk]
) -> None:
    disk = small_disk("1m")
    server = make_server(*LONG_LEASE, data_dir=disk.path / "data", http=True).start()
    client = await Client(server).join()
    await client.set()
    await client.close()
    server.kill()
    disk.read_only()
    server.launch()
    assert server.process.wait() == 2
    assert "Read-only file system" in server.err
    assert "Traceback" not in server.err
    disk.read_only(False)
    server.start()
    again = await Client(server).join()
    again.acknowledged = client.acknowledged
    await again.all_there()
    await again.close()


@pytest.mark.parametrize(
    ("call", "number", "name"),
    [
        ("sync", errno.EIO, "-wal"),
        ("sync", errno.EIO, ""),
        ("write", errno.EIO, "-wal"),
        ("write", errno.EROFS, ""),
        ("write", errno.ENOSPC, "-wal"),
        ("write", errno.EIO, "-marker"),
        ("write", errno.EDQUOT, ""),
    ],
    ids=lambda value: (
        errno.errorcode.get(value, str(value)) if isinstance(value, int) else str(value) or "all"
    ),
)
async def test_a_disk_that_fails(
    make_server: Make,
    tmp_path: Path,
    call: str,
    number: int,
    name: str,
    chance: random.Random,
    figures: Figures,
) -> None:
    disk = FailingDisk(tmp_path / "data", tmp_path)
    server = make_server(*LONG_LEASE, data_dir=disk.directory, environ=disk.environ, http=True).start()
    client = await Client(server).join()
    for _ in range(5):
        await client.set()
    for _ in range(2):
        disk.fail(call, number, name)
        await client.refused()
        await goes_on_without_writing(server, client, "the store cannot write")
        disk.work()
        await recovers(server, client, figures, "from a working disk to readiness")
        await client.set()
    # After a failed sync the kernel takes for written what never was. All that was acknowledged since must
    # have been written anew.
    await client.close()
    server.kill()
    disk.lose_power(chance)
    server.start()
    again = await Client(server).join()
    again.acknowledged = client.acknowledged
    await again.all_there()
    await again.close()


@pytest.mark.parametrize("point", ["store.before_checkpoint", "store.mid_checkpoint"])
async def test_a_power_failure_while_it_recovers(
    make_server: Make, tmp_path: Path, point: str, chance: random.Random
) -> None:
    # The kernel shows a failed write as if it were on the disk. Whoever builds on it is lost now.
    disk = FailingDisk(tmp_path / "data", tmp_path)
    server = make_server(*LONG_LEASE, data_dir=disk.directory, environ=disk.environ)
    server.environ[failpoints.VARIABLE] = f"{point}=kill"
    server.start()
    client = await Client(server).join()
    for _ in range(5):
        await client.set()
    disk.fail("sync", errno.EIO, "-wal")
    await client.refused()
    disk.work()
    assert server.process.wait() == -signal.SIGKILL
    await client.close()
    disk.lose_power(chance)
    del server.environ[failpoints.VARIABLE]
    server.start()
    again = await Client(server).join()
    again.acknowledged = client.acknowledged
    await again.all_there()
    await again.close()


@pytest.mark.parametrize("point", ["store.before_write", "store.before_commit", "store.after_commit"])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
async def test_a_commit_that_fails_once(make_server: Make, point: str, error: str, figures: Figures) -> None:
    server = make_server(*LONG_LEASE, http=True)
    server.environ[failpoints.VARIABLE] = f"{point}=error:{error}:after=5:times=2"
    server.start()
    client = await Client(server).join()
    with pytest.raises(grpc.aio.AioRpcError):
        while True:
            await client.set()
    await recovers(server, client, figures, "from one failure to readiness")
    await survives_a_kill(server, client)


async def test_a_server_whose_disk_fails_can_be_stopped(make_server: Make, tmp_path: Path) -> None:
    disk = FailingDisk(tmp_path / "data", tmp_path)
    server = make_server(*LONG_LEASE, data_dir=disk.directory, environ=disk.environ, http=True).start()
    client = await Client(server).join()
    await client.set()
    disk.fail("sync", errno.EIO, "")
    await client.refused()
    await client.close()
    assert server.terminate(signal.SIGTERM) == 0
    disk.work()
    server.start()
    again = await Client(server).join()
    again.acknowledged = client.acknowledged
    await again.all_there()
    await again.close()


async def test_traffic_over_a_disk_that_fails_now_and_then(
    make_server: Make, tmp_path: Path, chance: random.Random
) -> None:
    disk = FailingDisk(tmp_path / "data", tmp_path)
    options = {"data_dir": disk.directory, "environ": disk.environ, "http": True}
    server, ledger = make_server(*LONG_LEASE, **options), Ledger()
    server.start()
    for _ in range(3):
        target = ledger.calls + chance.randrange(10, 60)
        await ledger.traffic(server.address, lambda target=target: ledger.calls > target)
        disk.fail("sync", errno.EIO, "-wal")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ledger.traffic(server.address, lambda: False)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        disk.work()
        await asyncio.to_thread(eventually, lambda: readiness(server)[0] == 200, "recovery")
        await ledger.check(server.address)
    server.kill()
    disk.lose_power(chance)
    server.start()
    await ledger.check(server.address)
