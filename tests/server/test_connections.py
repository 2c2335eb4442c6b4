"""Connections of peers that do not authenticate are closed, the others stay."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from dmesh_server.rpc.connections import ConnectionGuard, Peer
from dmesh_server.security.refusals import RefusalLog


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


async def test_a_host_without_a_token_keeps_few_connections_when_they_are_scarce(pairs) -> None:
    guard = ConnectionGuard(connections=20, per_host=5, refusals=RefusalLog())
    port = pairs[0][1].getsockname()[1]
    for client, _ in pairs[:4]:
        guard.authenticated(name(client))
    await guard.sweep(port)
    assert [is_open(client) for client, _ in pairs] == [True] * 4 + [False] * 11 + [True] * 5
    assert guard.closed == 11


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


async def test_other_ports_are_left_alone(pairs) -> None:
    guard = ConnectionGuard(connections=2, per_host=0, refusals=RefusalLog())
    await guard.sweep(1)
    assert all(is_open(client) for client, _ in pairs)
