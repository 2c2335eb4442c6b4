"""Scenario 21: who does not read is dropped, with what it needs to go on; nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import grpc
import pytest
from tests.faults.processes import LONG_LEASE
from tests.server.raw_client import PATIENCE, RawClient, error_of

from dmesh.v1 import common_pb2, coordination_pb2
from dmesh.v1 import key_value_pb2 as pb

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

VALUE = 64 << 10
CHANGES = 2500
"""More than a watch may fall behind, and far more bytes than the network's buffers hold."""
GROWTH = 160 << 20


async def change(client: RawClient, count: int) -> int:
    revision = 0
    for _ in range(count):
        request = pb.SetRequest(
            caller=client.caller,
            request_id=secrets.token_hex(8),
            key="k",
            value=secrets.token_bytes(VALUE),
            allow_overwrite=True,
        )
        revision = (await client.key_value.Set(request, timeout=PATIENCE)).revision
    return revision


async def test_slow_watch_is_dropped_and_can_resume(make_server, figures):
    server = make_server(*LONG_LEASE, data_dir=None).start()
    writer, lazy, keen = (RawClient(server.address, index, size=3) for index in range(3))
    await writer.register()
    slow = lazy.key_value.Watch(pb.WatchRequest(prefix="k", caller=common_pb2.Caller(cluster="c")))
    assert not (await slow.read()).events  # it is in place; and never read again
    # A connection without any call is closed after 10 s: this one has another call, as a session's has.
    other = lazy.key_value.Watch(pb.WatchRequest(prefix="other", caller=common_pb2.Caller(cluster="c")))
    assert not (await other.read()).events
    quick = keen.key_value.Watch(pb.WatchRequest(prefix="k", caller=common_pb2.Caller(cluster="c")))
    await quick.read()
    idle = server.size["rss"]
    seen: list[int] = []

    async def follow() -> None:
        while len(seen) < CHANGES:
            seen.append((await quick.read()).revision)

    async with asyncio.timeout(500), asyncio.TaskGroup() as group:
        group.create_task(follow())
        last = await change(writer, CHANGES)
    assert seen == list(range(1, last + 1))
    figures.add("growth by a slow watch", (server.size["rss"] - idle) / 2**20, "MiB")
    assert server.size["rss"] - idle < GROWTH
    # What was on its way still arrives, in order; then it is told that it was dropped, and goes on.
    got = 0
    with pytest.raises(grpc.aio.AioRpcError) as dropped:
        while (response := await slow.read()) is not grpc.aio.EOF:
            assert response.revision == got + 1
            got = response.revision
    error = error_of(dropped.value)
    assert error.kind in (common_pb2.ERROR_KIND_COMPACTED, common_pb2.ERROR_KIND_LIMIT_EXCEEDED)
    assert got < last
    again = lazy.key_value.Watch(
        pb.WatchRequest(prefix="k", caller=common_pb2.Caller(cluster="c"), from_revision=last)
    )
    while not (response := await again.read()).events:
        pass
    assert response.revision == last
    for client in (writer, lazy, keen):
        await client.channel.close()


async def test_slow_session_takes_little_and_can_come_back(make_server, figures):
    """A member that asks and asks and never reads an answer: after some, it is not listened to either."""
    server = make_server(*LONG_LEASE, data_dir=None).start()
    greedy, other = RawClient(server.address, 0), RawClient(server.address, 1)
    await greedy.register()
    stream, calm = await greedy.attach(), await other.join()
    await change(greedy, 1)
    idle = server.size["rss"]
    # What it is sent would be 1.3 GB.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        for number in range(1, 20_001):
            call = coordination_pb2.KeyValueCall(id=number, get=pb.GetRequest(key="k"))
            async with asyncio.timeout(20):
                await stream.send(key_value_call=call)
    figures.add("growth by a slow session", (server.size["rss"] - idle) / 2**20, "MiB")
    assert server.size["rss"] - idle < GROWTH
    await calm.send(heartbeat=coordination_pb2.Heartbeat(sequence=1))
    assert (await calm.read_kind("heartbeat_ack")).heartbeat_ack.sequence == 1
    stream.hang_up()
    again = await greedy.attach()
    await again.send(key_value_call=coordination_pb2.KeyValueCall(id=1, get=pb.GetRequest(key="k")))
    assert (await again.read_kind("key_value_reply")).key_value_reply.get.kv.key == "k"
    for client in (greedy, other):
        await client.channel.close()
