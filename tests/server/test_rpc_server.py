"""What all RPCs have in common: statuses, metadata, health, reflection, ports."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.server.raw_client import PATIENCE, RawClient, refusal

from dmesh.coordination.channel import channel_options
from dmesh.errors import AddressInUseError
from dmesh.v1 import common_pb2, coordination_pb2
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Device, Member, MemberState, Process, Task
from dmesh_server.listening import Address
from dmesh_server.rpc.errors import STATUS_CODES, encode_for_metadata, status_message
from dmesh_server.rpc.server import OPTIONS, RpcServer
from dmesh_server.runtime import Runtime
from dmesh_server.store.memory import MemoryStore

Make = Callable[..., RawClient]

HOLDER = Member(
    Task("worker", 3),
    7,
    MemberState.LOST,
    Process(host="h", pid=9),
    (Device("CPU", 0),),
    ("127.0.0.1:1",),
    0.0,
    0.0,
    "gone",
)


def test_every_kind_has_a_status_and_is_the_wires() -> None:
    assert set(STATUS_CODES) == set(ErrorKind)
    wire = {value.name: value.number for value in common_pb2.ErrorKind.DESCRIPTOR.values if value.number}
    assert wire == {f"ERROR_KIND_{kind.name}": kind.value for kind in ErrorKind}


@pytest.mark.parametrize("kind", ErrorKind)
async def test_every_kind_of_refusal_reaches_the_client(
    make_client: Make, served, monkeypatch: pytest.MonkeyPatch, kind: ErrorKind
) -> None:
    async def refuse(*_: object) -> None:
        raise CoreError(kind, f"no: {kind.name} ü\n", (HOLDER,), 12)

    monkeypatch.setattr(served.runtime, "request", refuse)
    code, error = await refusal(make_client(0).register)
    assert code is STATUS_CODES[kind]
    assert (error.kind, error.message, error.epoch) == (kind.value, f"no: {kind.name} ü\n", 12)
    [member] = error.members
    assert (member.task.index, member.process.host, member.reason) == (3, "h", "gone")


async def test_fault_of_the_server_does_not_leave_it(
    make_client: Make, served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError("the secret reason")

    monkeypatch.setattr(served.runtime, "request", fail)
    code, error = await refusal(make_client(0).register)
    assert (code, error.kind) == (grpc.StatusCode.INTERNAL, common_pb2.ERROR_KIND_INTERNAL)
    assert "secret" not in error.message
    assert "the secret reason" in caplog.text, "the operator finds it in the log"


async def test_error_about_very_many_members_fits_into_metadata(
    make_client: Make, served, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tuple(replace(HOLDER, task=Task("worker", index), reason="x" * 100) for index in range(5000))

    async def refuse(*_: object) -> None:
        raise CoreError(ErrorKind.CLUSTER_ENDING, "ü" * 100_000, many)

    monkeypatch.setattr(served.runtime, "request", refuse)
    code, error = await refusal(make_client(0).register)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert error.message.endswith(" ...")
    assert len(error.members) >= 10


@pytest.mark.parametrize("character", ["m", "%", "\n", "ü", "\N{PILE OF POO}"])
def test_refusal_fits_into_the_headers_that_every_client_accepts(character: str) -> None:
    """8 KiB in all. Beyond it gRPC's client drops answers by chance, and says RESOURCE_EXHAUSTED instead."""
    many = tuple(replace(HOLDER, task=Task("worker", index), reason="x" * 100) for index in range(5000))
    error = CoreError(ErrorKind.CLUSTER_ENDING, character * 100_000, many)
    text = status_message(error.message).encode()
    escaped = sum(1 if 0x20 <= byte <= 0x7E and byte != ord("%") else 3 for byte in text)
    assert 1000 < escaped <= 1500
    assert escaped + len(base64.b64encode(encode_for_metadata(error, 1.0))) < 7500


def test_error_metadata_is_bounded() -> None:
    huge = replace(HOLDER, reason="r" * 4096)
    assert len(encode_for_metadata(CoreError(ErrorKind.FENCED, "m" * 9999, (huge,) * 99), 1.0)) < 4200


async def test_bytes_that_are_no_message(make_client: Make, served) -> None:
    channel = make_client(0).channel
    call = channel.unary_unary("/dmesh.v1.CoordinationService/Register")
    code, error = await refusal(lambda: call(b"\xff\xff\xff"))
    assert (code, error.kind) == (grpc.StatusCode.INVALID_ARGUMENT, common_pb2.ERROR_KIND_INVALID_ARGUMENT)
    assert "dmesh.v1.RegisterRequest" in error.message
    stream = channel.stream_stream("/dmesh.v1.CoordinationService/Session")()
    await stream.write(b"\xff\xff\xff")
    code, _ = await refusal(stream.read)
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", ["/dmesh.v1.CoordinationService/Nothing", "/no.such.Service/Get"])
async def test_unknown_method(make_client: Make, method: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await make_client(0).channel.unary_unary(method)(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_follows_readiness(make_client: Make, served) -> None:
    stub = health_pb2_grpc.HealthStub(make_client(0).channel)
    request = health_pb2.HealthCheckRequest(service="dmesh.v1.CoordinationService")
    watch = stub.Watch(request)
    async with asyncio.timeout(PATIENCE):
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1
        served.runtime.begin_shutdown()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()


async def test_reflection_lists_the_services(make_client: Make) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(make_client(0).channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    async with asyncio.timeout(PATIENCE):
        names = {service.name for service in (await call.read()).list_services_response.service}
    await call.done_writing()
    assert {"dmesh.v1.CoordinationService", "dmesh.v1.KeyValueService", "grpc.health.v1.Health"} <= names


async def test_two_servers_do_not_share_a_port(served) -> None:
    runtime = Runtime(MemoryStore())
    second = RpcServer(runtime)
    with pytest.raises(AddressInUseError, match=served.address):
        await second.start(Address.parse(served.address, "test"))
    await second.stop(0.0)


async def test_many_calls_at_once_are_all_answered(make_client: Make) -> None:
    # By default gRPC begins to drop calls when a thousand wait.
    client = make_client(0)
    await client.register()
    request = coordination_pb2.GetClusterStateRequest(caller=client.caller)
    calls = [client.coordination.GetClusterState(request, timeout=PATIENCE) for _ in range(2500)]
    answers = await asyncio.gather(*calls)
    assert all(answer.members for answer in answers)


async def test_frequent_pings_of_clients_are_tolerated(served) -> None:
    # Both sides ping; the server must not take the clients' pings for abuse.
    settings, clients = dict(OPTIONS), dict(channel_options())
    assert settings["grpc.http2.min_recv_ping_interval_without_data_ms"] <= clients["grpc.keepalive_time_ms"]
    assert settings["grpc.keepalive_permit_without_calls"] == 1
