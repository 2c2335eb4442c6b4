"""Scenario 32: clients and servers of different versions work together, or say which versions they are."""

from __future__ import annotations

import grpc
import pytest
from tests.faults.processes import LONG_LEASE, ClientProcess, errors
from tests.server.raw_client import PATIENCE, RawClient, default_token, refusal

from dmesh import protocol
from dmesh.v1 import common_pb2, coordination_pb2
from dmesh.v1 import key_value_pb2 as pb

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

NEWER_FIELD = b"\xca\xf4\x01\x05later"
"""A field with the number 3913 that this version does not know."""


async def test_older_client_is_served(make_server):
    """Version 1 sets no version, has no key-values on its session, and asks by calls of their own."""
    server = make_server(*LONG_LEASE).start()
    client = RawClient(server.address, 0, size=1)
    await client.coordination.Register(client.registration(protocol_version=0), timeout=PATIENCE)
    stream = await client.attach()
    await stream.send(heartbeat=coordination_pb2.Heartbeat(sequence=1))
    await stream.enter("b", 0)
    assert not (await stream.result()).HasField("error")
    request = pb.SetRequest(caller=client.caller, request_id="r", key="k", value=b"1")
    assert (await client.key_value.Set(request, timeout=PATIENCE)).revision == 1
    await client.leave()
    await client.channel.close()


@pytest.mark.parametrize("version", [protocol.VERSION + 1, -1])
async def test_client_of_another_version_is_told_both(version, make_server):
    server = make_server().start()
    client = RawClient(server.address, 0)
    request = client.registration(protocol_version=version)
    code, error = await refusal(lambda: client.coordination.Register(request, timeout=PATIENCE))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert error.kind == common_pb2.ERROR_KIND_VERSION_MISMATCH
    assert str(version) in error.message
    assert str(protocol.VERSION) in error.message
    await client.channel.close()


def test_sdk_of_a_newer_version_says_so(make_server, make_client):
    """What a user of a newer SDK reads, at once and not after the time to connect."""
    server = make_server().start()
    client: ClientProcess = make_client(0, 1, server.address)
    client.do("from dmesh import protocol")
    client.do(f"protocol.VERSION = {protocol.VERSION + 1}")
    (refused,) = errors([client.submit("join()")], timeout=60)
    assert refused.kind == "VersionMismatchError"
    assert f"version {protocol.VERSION + 1}" in refused.message


async def test_unknown_fields_are_passed_over(make_server):
    """Every message of a newer client with a field more: the same answer as without."""
    server = make_server(*LONG_LEASE).start()
    client = RawClient(server.address, 0, size=1)
    registration = client.registration()
    registration.MergeFromString(NEWER_FIELD)
    registration.caller.MergeFromString(NEWER_FIELD)
    await client.coordination.Register(registration, timeout=PATIENCE)
    stream = await client.attach()
    heartbeat = coordination_pb2.Heartbeat(sequence=9)
    heartbeat.MergeFromString(NEWER_FIELD)
    await stream.send(heartbeat=heartbeat)
    assert (await stream.read_kind("heartbeat_ack")).heartbeat_ack.sequence == 9
    request = pb.SetRequest(caller=client.caller, request_id="r", key="k", value=b"1")
    request.MergeFromString(NEWER_FIELD)
    assert (await client.key_value.Set(request, timeout=PATIENCE)).revision == 1
    await client.channel.close()


async def test_unknown_session_message_is_named(make_server):
    """A newer client's new kind of message ends the session with words, not with a hang."""
    server = make_server(*LONG_LEASE).start()
    client = RawClient(server.address, 0, size=1)
    stream = await client.join()
    unknown = coordination_pb2.SessionRequest()
    unknown.MergeFromString(NEWER_FIELD)
    await stream.call.write(unknown)
    with pytest.raises(grpc.aio.AioRpcError, match="newer"):
        await stream.read_kind("barrier_result")
    await client.channel.close()


async def test_unknown_method_is_unimplemented(make_server):
    """Not a matter of roles: a newer client must be able to tell that this server is older."""
    server = make_server().start()
    client = RawClient(server.address, 0)
    await client.register()
    method = client.channel.unary_unary("/dmesh.v1.CoordinationService/InventedLater")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await method(b"", timeout=PATIENCE, metadata=(("authorization", f"Bearer {default_token()}"),))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await client.channel.close()
