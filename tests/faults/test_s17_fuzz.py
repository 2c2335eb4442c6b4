"""Scenario 17: whatever is sent, the server answers with a refusal, stays alive, and does not grow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
from collections import Counter

import grpc
import pytest
from grpc._cython import cygrpc
from tests.faults.fuzz import Fuzzer, methods
from tests.faults.processes import ServerProcess
from tests.server.raw_client import PATIENCE, RawClient, default_token

from dmesh.v1 import common_pb2, coordination_pb2, key_value_pb2
from dmesh_server.rpc.errors import ERROR_METADATA

pytestmark = [pytest.mark.faults, pytest.mark.timeout(7200)]

INPUTS = int(os.environ.get("DMESH_FAULTS_INPUTS") or 10_000)
"""Inputs of each test; 100,000 in the long form."""
GROWTH = 10 << 20
"""Bytes that the server may have grown by in between."""
AT_ONCE = 32
BUGS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
"""What a refusal must not look like: they stand for errors of the server's own."""
BLOCKING = 0.25
"""Seconds to wait for what has no answer, such as a read of a key that nobody sets."""


def authorization() -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {default_token()}"),)


class Target:
    """The server, and a member of a cluster of it whose name the fuzzer may use."""

    def __init__(self, server: ServerProcess, chance: random.Random) -> None:
        self.server = server
        self.client = RawClient(server.address, 0, cluster="c")
        self.fuzzer = Fuzzer(chance, self.client.caller)
        self._renewing = asyncio.Lock()
        self.codes: Counter[str] = Counter()

    async def unary(self, method, data: bytes) -> None:
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.server_streaming:
            call = self.client.channel.unary_stream(path)(data, timeout=BLOCKING, metadata=authorization())
            await self.outcome(self.drain(call))
        else:
            call = self.client.channel.unary_unary(path)(data, timeout=BLOCKING, metadata=authorization())
            await self.outcome(call)

    async def drain(self, call) -> None:
        async for _ in call:
            pass

    async def session(self, chance: random.Random) -> None:
        """A stream that begins well, or not, and goes on badly."""
        path = "/dmesh.v1.CoordinationService/Session"
        call = self.client.channel.stream_stream(path)(timeout=BLOCKING * 2, metadata=authorization())
        described = coordination_pb2.SessionRequest.DESCRIPTOR

        async def talk() -> None:
            if chance.random() < 0.8:
                attach = coordination_pb2.Attach(caller=self.client.caller)
                await call.write(coordination_pb2.SessionRequest(attach=attach).SerializeToString())
            for _ in range(chance.randint(1, 10)):
                await call.write(self.fuzzer.encoded(described))
            await call.done_writing()
            async for _ in call:
                pass

        # It has ended, which gRPC may find out before or after it begins to write; the status says how.
        with contextlib.suppress(asyncio.InvalidStateError, cygrpc.ExecuteBatchError):
            await self.outcome(talk())
        await self.outcome(call.code())

    async def outcome(self, call) -> None:
        details, metadata = "", {}
        try:
            code = await call
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
            metadata = dict(error.trailing_metadata() or ())
        assert "Traceback" not in details
        if code is grpc.StatusCode.INTERNAL and details in ("", "Internal error from Core"):
            return  # of our own gRPC: it was writing when the server ended the stream
        assert code not in BUGS, f"{code}: {details}"
        if ERROR_METADATA in metadata:
            told = common_pb2.Error.FromString(metadata[ERROR_METADATA])
            assert told.kind != common_pb2.ERROR_KIND_INTERNAL, told.message
        self.codes[code.name if isinstance(code, grpc.StatusCode) else "OK"] += 1

    async def renew(self) -> None:
        """Joins anew: a call may have declared the member failed, or made it leave."""
        async with self._renewing:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self.client.leave()
            self.client.caller.incarnation = secrets.randbits(63) + 1
            with contextlib.suppress(grpc.aio.AioRpcError):  # others of the cluster are there
                await self.client.register()

    async def still_works(self) -> None:
        """A well-behaved client is served, and nothing went wrong behind the scenes."""
        assert self.server.process.running, self.server.err[-3000:]
        other = RawClient(self.server.address, 0, cluster="sane", size=1)
        await other.register()
        request = key_value_pb2.SetRequest(
            caller=other.caller, request_id="one", key="sane", value=b"1", allow_overwrite=True
        )
        await other.key_value.Set(request, timeout=PATIENCE)
        await other.leave()
        await other.channel.close()
        _, found, after = self.server.err.partition("Traceback")
        assert not found, after[:6000]


async def repeat(target: Target, one, total: int) -> list[int]:
    """Sends some inputs to warm up, and then all; returns the server's memory in between and at the end."""
    sizes = []
    for share in (max(total // 5, 2000), total):
        left = iter(range(share))

        async def some(left=left) -> None:
            for _ in left:
                await one()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(some())
        await target.still_works()
        sizes.append(target.server.size["rss"])
    return sizes


def verdict(figures, sizes: list[int], target: Target, what: str) -> None:
    figures.add(f"growth after {INPUTS} inputs ({what})", (sizes[1] - sizes[0]) / 2**20, "MiB")
    print(dict(target.codes))
    assert sizes[1] - sizes[0] < GROWTH


async def test_every_call(make_server, chance, figures):
    target = Target(make_server(data_dir=None).start(), chance)
    await target.client.register()
    choices = [method for method in methods() if not method.client_streaming]

    async def one() -> None:
        if chance.random() < 0.1:
            await target.renew()
        method = chance.choice(choices)
        await target.unary(method, target.fuzzer.encoded(method.input_type))

    verdict(figures, await repeat(target, one, INPUTS), target, "calls")
    assert target.codes["INVALID_ARGUMENT"] > INPUTS / 10
    assert target.codes["OK"] > INPUTS / 100  # it gets past the first check, too
    await target.client.channel.close()


async def test_session_stream(make_server, chance, figures):
    # The member is not to be lost whenever a stream of its ends: then it would be refused at the door.
    target = Target(make_server(data_dir=None).start(), chance)
    await target.client.register()

    async def one() -> None:
        if chance.random() < 0.05:
            await target.renew()
        await target.session(chance)

    verdict(figures, await repeat(target, one, INPUTS // 10), target, "streams of some messages each")
    await target.client.channel.close()


async def test_wrong_service_and_method(make_server):
    target = Target(make_server(data_dir=None).start(), random.Random(0))
    for path in ("/dmesh.v1.CoordinationService/Nope", "/nobody.Service/Register", "/", "/x/y/z"):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await target.client.channel.unary_unary(path)(b"x", timeout=PATIENCE, metadata=authorization())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED, path
    await target.still_works()
    await target.client.channel.close()


async def test_raw_connections(make_server, chance, figures):
    target = Target(make_server(data_dir=None).start(), chance)
    host, port = target.server.address.split(":")

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(OSError, TimeoutError):  # it hung up first
            writer.write(target.fuzzer.frames())
            await writer.drain()
            if chance.random() < 0.5:
                writer.write_eof()
            async with asyncio.timeout(BLOCKING):
                while await reader.read(65536):
                    pass
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    verdict(figures, await repeat(target, one, INPUTS // 5), target, "connections")
    await target.client.channel.close()
