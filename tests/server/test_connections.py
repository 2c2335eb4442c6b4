"""Connections of peers that do not authenticate are closed, the others stay."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import grpc
import pytest

from dmesh_server.rpc.connections import ConnectionGuard, Peer
from dmesh_server.security.limits import PeerLimits
from dmesh_server.security.refusals import RefusalLog

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Connections to one port: (client's end, server's end), the oldest first."""
    made = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(20):
            client = socket.create_connection(listener.getsockname())
            made.append((client, listener.accept()[0]))
        yield made
        for client, server in made:
            client.close()
            server.close()


def name(client: socket.socket) -> str:
    host, port = client.getsockname()
    return f"ipv4:{host}:{port}"


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:10.0.0.1:5000", Peer("10.0.0.1", 5000)),
        ("ipv6:%5B::1%5D:80", Peer("::1", 80)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:80", Peer("10.0.0.1", 80)),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", Peer("fe80::1", 80)),
        ("unix:/tmp/x", None),
        ("", None),
    ],
)
def test_peers_as_grpc_writes_them(text: str, peer: Peer | None) -> None:
    assert Peer.parse(text) == peer


async def sweep(guard: ConnectionGuard, pairs: list[tuple[socket.socket, socket.socket]], times: int) -> None:
    for _ in range(times):
        await guard.sweep(pairs[0][1].getsockname()[1])


async def test_a_host_without_a_token_keeps_few_connections_when_they_are_scarce(pairs) -> None:
    guard = ConnectionGuard(connections=20, per_host=5, refusals=RefusalLog())
    for client, _ in pairs[:4]:
        guard.authenticated(name(client))
    await sweep(guard, pairs, 3)
    assert all(is_open(client) for client, _ in pairs), "a handshake takes its time"
    await sweep(guard, pairs, 1)
    assert [is_open(client) for client, _ in pairs] == [True] * 4 + [False] * 11 + [True] * 5
    assert guard.closed == 11


async def test_clients_of_one_host_that_wait_for_a_busy_server_stay(pairs) -> None:
    guard = ConnectionGuard(connections=20, per_host=2, refusals=RefusalLog())
    for client, _ in pairs[:15]:  # one after the other, as the server comes to them
        await sweep(guard, pairs, 1)
        guard.authenticated(name(client))
    await sweep(guard, pairs, 1)
    assert all(is_open(client) for client, _ in pairs)
    await sweep(guard, pairs, 30)
    assert [is_open(client) for client, _ in pairs] == [True] * 15 + [False] * 3 + [True] * 2


async def test_nothing_is_closed_while_there_is_room(pairs) -> None:
    guard = ConnectionGuard(connections=100_000, per_host=1, refusals=RefusalLog())
    await guard.sweep(pairs[0][1].getsockname()[1])
    assert all(is_open(client) for client, _ in pairs)


async def test_a_refused_peer_is_closed_unless_it_has_shown_a_token(pairs) -> None:
    guard = ConnectionGuard(connections=100_000, per_host=1, refusals=RefusalLog())
    (stranger, _), (client, _), (former, _), (other, _) = pairs[:4]
    guard.refused(name(stranger))
    guard.authenticated(name(client))
    guard.refused(name(client))  # as with a proxy, whose connection others share
    guard.authenticated(name(former))
    for _ in range(200):
        guard.refused(name(former))
    await guard.sweep(pairs[0][1].getsockname()[1])
    assert [is_open(one) for one in (stranger, client, former, other)] == [False, True, False, True]
    guard.refused(name(client))
    guard.authenticated(name(client))
    await guard.sweep(pairs[0][1].getsockname()[1])
    assert is_open(client)


def test_a_server_takes_more_clients_than_it_has_descriptors_for_two_connections_each(monkeypatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (20_000, 20_000))
    limits = PeerLimits()
    assert limits.grpc_connections > 14_000, "their sessions go over gRPC's streams then"
    assert limits.grpc_connections + limits.session_connections <= 20_000 - 500


async def test_other_ports_are_left_alone(pairs) -> None:
    guard = ConnectionGuard(connections=2, per_host=0, refusals=RefusalLog())
    await guard.sweep(1)
    assert all(is_open(client) for client, _ in pairs)


def call(path: bytes) -> bytes:
    """A HEADERS frame that begins a call."""
    fields = {
        b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"test",
        b"te": b"trailers", b"content-type": b"application/grpc",
    }  # fmt: skip
    block = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields.items()
    )
    return len(block).to_bytes(3, "big") + b"\x01\x04" + (1).to_bytes(4, "big") + block


async def test_a_silent_connection_is_closed_soon_and_one_with_a_call_is_not_however_slow_its_host() -> None:
    silent_ones_gone = asyncio.Event()

    class Handlers(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            async def answer(_requests: object, context: grpc.aio.ServicerContext) -> None:
                await silent_ones_gone.wait()
                await context.abort(grpc.StatusCode.DATA_LOSS, "answered")

            return grpc.stream_stream_rpc_method_handler(answer)

    server = grpc.aio.server(options=PeerLimits(handshake_seconds=1.0, idle_seconds=1.5).options())
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def hear(said: bytes) -> bytes:
        """Says something, never acknowledges the server's settings, and reads to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        try:
            heard = b""
            while b"answered" not in heard and (more := await reader.read(4096)):
                heard += more
            return heard
        finally:
            writer.close()

    try:
        async with asyncio.timeout(30):
            slow = asyncio.create_task(hear(PREFACE + SETTINGS + call(b"/test/Call")))
            ends = await asyncio.gather(hear(b""), hear(PREFACE), hear(PREFACE + SETTINGS))
            assert [b"timeout" in end or b"idle" in end for end in ends] == [True] * 3
            silent_ones_gone.set()
            assert b"answered" in await slow
    finally:
        await server.stop(0)
