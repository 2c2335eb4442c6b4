"""Dedicated connections: the proofs and numbers that they need."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
from typing import Any

import pytest
from tests.collectives.transport.harness import CLUSTER, LIMIT, SECRET, Cluster
from tests.faults.secured import Authority
from tests.waiting import eventually

from dmesh.collectives.backends.tcp.handshake import (
    CHALLENGE_SIZE,
    WELCOME_SIZE,
    Credentials,
    Dialer,
    Refused,
    Status,
)
from dmesh.collectives.backends.tcp.tls import PeerTls, Stream
from dmesh.security.certificates import IdentityFiles


def dial(cluster: Cluster, rank: int, peer: int, number: int) -> tuple[Stream | None, str]:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    connector = cluster.transports[rank].connector
    assert connector is not None
    connector.dial(peer, number, lambda sock, problem: found.put((sock, problem)))
    return found.get(timeout=LIMIT)


def claim(connector: Any, number: int) -> Stream:
    """Return the accepted connection, which may arrive a moment after the dialer's WELCOME."""
    eventually(lambda: number in connector._arrived, "the connection")
    found = connector.claim(number)
    assert found is not None
    return found


def receive(sock: Stream, size: int = 100) -> bytes:
    """Wait for bytes, or the end; either may be in OpenSSL's buffers already."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return sock.recv(size)
        assert any(select.select([sock], [], [], LIMIT)), "nothing comes"


def test_a_dialer_with_the_expected_number_is_connected(make_dedicated):
    cluster = make_dedicated(2)
    connector = cluster.transports[1].connector
    number = connector.expect(0)
    near, problem = dial(cluster, 0, 1, number)
    assert near is not None, problem
    with contextlib.closing(near), contextlib.closing(claim(connector, number)) as far:
        for one, other in ((near, far), (far, near)):
            one.send(b"hello")
            assert receive(other) == b"hello"
    assert connector.claim(number) is None, "a connection is claimed once"


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the kernel tells nothing of its connections")
@pytest.mark.parametrize("way", ["dedicated", "tls"])
def test_links_are_what_the_kernel_has_measured(request, way):
    cluster = request.getfixturevalue(f"make_{'tcp' if way == 'dedicated' else way}")(2)
    near_end, far_end = (transport.connector for transport in cluster.transports)
    assert near_end.links() == {}
    number = far_end.expect(0)
    near, problem = dial(cluster, 0, 1, number)
    assert near is not None, problem
    with contextlib.closing(near), contextlib.closing(claim(far_end, number)) as far:
        near.send(b"x" * 50_000)
        receive(far)
        [[rank, (round_trip, rate)]] = near_end.links().items()
        assert rank == 1
        assert 0 < round_trip < 60e6
        assert rate > 0
        assert list(far_end.links()) == [0]
    assert near_end.links() == far_end.links() == {}


def test_a_dialer_with_a_certificate_of_another_authority_is_refused(make_tls, tmp_path):
    cluster = make_tls(2)
    stranger = Authority(tmp_path)
    cluster.transports[0].connector._tls = PeerTls(IdentityFiles(*stranger.issue("peer")), stranger.path)
    connector = cluster.transports[1].connector
    number = connector.expect(0)
    sock, problem = dial(cluster, 0, 1, number)
    assert sock is None
    assert "its certificate cannot be accepted: it is signed by itself" in problem
    assert connector.claim(number) is None


@pytest.mark.parametrize("number", ["of nobody", "of another rank", "used already"])
def test_an_unexpected_dialer_is_refused_and_frames_go_on(make_dedicated, number):
    cluster = make_dedicated(3)
    connector = cluster.transports[1].connector
    expected = connector.expect(2)
    if number == "used already":
        first, _ = dial(cluster, 2, 1, expected)
        assert first is not None
        first.close()
        claim(connector, expected).close()
    said = {"of nobody": expected ^ 1, "of another rank": expected, "used already": expected}[number]
    sock, problem = dial(cluster, 2 if number == "used already" else 0, 1, said)
    assert sock is None
    assert "it does not expect such a connection, or not any more" in problem
    cluster.fence(0, 1)  # nobody is distrusted for that
    assert not cluster.listeners[0].of("lost")


def test_the_number_does_not_replace_the_proof(make_tcp):
    cluster = make_tcp(2)
    connector = cluster.transports[1].connector
    number = connector.expect(0)
    outsider = Dialer(Credentials(0, 100, CLUSTER, lambda: b"guess"), 1, 101, "rank 1", number=number)
    host, port = cluster.peers[1].addresses[0].rsplit(":", 1)
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(outsider.begin())
        sock.sendall(outsider.feed(_read(sock, CHALLENGE_SIZE)))
        with pytest.raises(Refused) as caught:
            outsider.feed(_read(sock, WELCOME_SIZE))
    assert caught.value.status is Status.WRONG_PROOF
    assert connector.claim(number) is None


def test_the_number_is_part_of_the_proof(make_tcp):
    """An attacker who changes it on the way has no proof for it."""
    cluster = make_tcp(2)
    connector = cluster.transports[1].connector
    number = connector.expect(0)
    me = Dialer(Credentials(0, 100, CLUSTER, lambda: SECRET), 1, 101, "rank 1")
    hello = bytearray(me.begin())
    hello[20:24] = number.to_bytes(4, "big")
    host, port = cluster.peers[1].addresses[0].rsplit(":", 1)
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(hello)
        sock.sendall(me.feed(_read(sock, CHALLENGE_SIZE)))
        with pytest.raises(Refused):
            me.feed(_read(sock, WELCOME_SIZE))
    assert connector.claim(number) is None


def test_unclaimed_connections_are_closed_in_the_end(make_dedicated):
    cluster = make_dedicated(2)
    connector = cluster.transports[1].connector
    near, _ = dial(cluster, 0, 1, connector.expect(0))
    assert near is not None
    eventually(lambda: bool(connector._arrived), "the connection")
    cluster.transports[1].close(1.0)
    with contextlib.closing(near):
        assert receive(near) == b""


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "it was closed"
        data += piece
    return data
