"""A client made of nothing but the generated stubs, so that tests see what is on the wire."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import secrets
from collections.abc import Callable

import grpc

from dmesh.security import tokens
from dmesh.v1 import common_pb2, coordination_pb2, coordination_pb2_grpc, key_value_pb2_grpc
from dmesh_server.core.model import Limits
from dmesh_server.rpc.errors import ERROR_METADATA

PATIENCE = 60.0
"""Seconds after which a test gives up; the machine may be very busy."""


PATIENT = Limits(suspicion=0.1, lease=600.0)
"""Notices closed connections soon, but silent clients never: raw clients send no heartbeats of their own."""


def default_token() -> str:
    """Returns the token of this run's standalone servers; empty if none was started yet."""
    source = tokens.find(None, None)
    return source.read()[0].value if source else ""


class Authorized:
    """A channel, asyncio's or the other, whose calls carry a token."""

    def __init__(self, channel: object, token: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),) if token else None

    def __getattr__(self, kind: str) -> Callable[..., object]:
        make = getattr(self._channel, kind)
        return lambda *args, **more: functools.partial(make(*args, **more), metadata=self._metadata)


class RawClient:
    """One process of a cluster, or an observer of it."""

    def __init__(
        self,
        address: str,
        index: int | None = 0,
        *,
        cluster: str = "c",
        size: int = 2,
        incarnation: int = 0,
        options: tuple[tuple[str, int], ...] = (),
        token: str | None = None,
    ) -> None:
        # Each client has its own connection: gRPC would share one between channels to the same address.
        own = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20))
        self.channel = grpc.aio.insecure_channel(address, options=own + options)
        calls = Authorized(self.channel, default_token() if token is None else token)
        self.coordination = coordination_pb2_grpc.CoordinationServiceStub(calls)
        self.key_value = key_value_pb2_grpc.KeyValueServiceStub(calls)
        self.caller = common_pb2.Caller(cluster=cluster)
        if index is not None:
            self.caller.task.CopyFrom(common_pb2.Task(job="worker", index=index))
            self.caller.incarnation = incarnation or secrets.randbits(63) + 1
            # The same process may have several of these clients.
            self.caller.credential = hashlib.sha256(b"%d" % self.caller.incarnation).digest()
        self.jobs = [common_pb2.Job(name="worker", addresses=[f"host{i}:1" for i in range(size)])]
        self._ids = itertools.count()
        self.kept: list[object] = []  # calls end when they are dropped, with gRPC up to 1.84 at least

    def request_id(self) -> str:
        return f"r{next(self._ids)}"

    def registration(self, **fields: object) -> coordination_pb2.RegisterRequest:
        request = coordination_pb2.RegisterRequest(
            caller=self.caller,
            request_id=self.request_id(),
            jobs=self.jobs,
            process=common_pb2.Process(
                host=f"host{self.caller.task.index}", pid=100 + self.caller.task.index
            ),
            devices=[common_pb2.Device(type="CPU", index=0)],
            peer_addresses=["127.0.0.1:9"],
        )
        request.MergeFrom(coordination_pb2.RegisterRequest(**fields))  # type: ignore[arg-type]
        return request

    async def register(self) -> coordination_pb2.RegisterResponse:
        return await self.coordination.Register(self.registration(), timeout=PATIENCE)

    async def attach(self) -> Stream:
        """Opens a session and waits until it is attached."""
        stream = Stream(self)
        self.kept.append(stream)
        await stream.send(attach=coordination_pb2.Attach(caller=self.caller))
        assert (await stream.read()).WhichOneof("kind") == "attached"
        return stream

    async def join(self) -> Stream:
        """Registers and attaches."""
        await self.register()
        return await self.attach()

    async def leave(self, reason: str = "") -> None:
        request = coordination_pb2.LeaveRequest(
            caller=self.caller, request_id=self.request_id(), reason=reason
        )
        await self.coordination.Leave(request, timeout=PATIENCE)


class Stream:
    """A session's stream."""

    def __init__(self, client: RawClient) -> None:
        self.call = client.coordination.Session()

    async def send(self, **kind: object) -> None:
        await self.call.write(coordination_pb2.SessionRequest(**kind))  # type: ignore[arg-type]

    async def read(self) -> coordination_pb2.SessionResponse:
        async with asyncio.timeout(PATIENCE):
            response = await self.call.read()
        assert response is not grpc.aio.EOF, "the stream has ended"
        return response

    async def read_kind(self, kind: str) -> coordination_pb2.SessionResponse:
        """Returns the next message of a kind and skips others."""
        while (response := await self.read()).WhichOneof("kind") != kind:
            pass
        return response

    async def ended(self) -> None:
        """Waits for a clean end of the stream."""
        async with asyncio.timeout(PATIENCE):
            assert await self.call.read() is grpc.aio.EOF

    async def enter(
        self, name: str, instance: int = -1, timeout_ms: int = 0, participants: tuple[int, ...] = ()
    ) -> None:
        tasks = [common_pb2.Task(job="worker", index=index) for index in participants]
        barrier = coordination_pb2.EnterBarrier(
            name=name, instance=instance, timeout_ms=timeout_ms, participants=tasks
        )
        await self.send(enter_barrier=barrier)

    async def result(self) -> coordination_pb2.BarrierResult:
        return (await self.read_kind("barrier_result")).barrier_result

    def hang_up(self) -> None:
        """Ends the stream without a goodbye."""
        self.call.cancel()


def error_of(error: grpc.RpcError) -> common_pb2.Error:
    """Returns the dmesh error beside a status."""
    # As pairs: older `Metadata` of gRPC looks like a mapping, which `dict` would take by its keys.
    metadata = dict(list(error.trailing_metadata() or ()))  # type: ignore[attr-defined]
    return common_pb2.Error.FromString(metadata[ERROR_METADATA])


async def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, common_pb2.Error]:
    """Makes a call that must be refused; returns its status code and its error."""
    try:
        async with asyncio.timeout(PATIENCE):
            await call()  # type: ignore[misc]
    except grpc.aio.AioRpcError as error:
        return error.code(), error_of(error)
    raise AssertionError("the call was not refused")
