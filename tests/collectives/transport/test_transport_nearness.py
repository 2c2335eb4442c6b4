"""Bound on the bytes in flight to a near peer."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest
from tests.waiting import eventually

from dmesh.collectives.backends.tcp.sockets import bound_flight

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="the system tells no times")

BOUND = 512 * 1024
"""Bytes, as Linux counts them."""


class Stub:
    """Connection for which the kernel reports `info`."""

    def __init__(self, info: bytes | OSError) -> None:
        self.info = info
        self.set: list[tuple[int, int, int]] = []

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        if isinstance(self.info, OSError):
            raise self.info
        return self.info[:size]

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.set.append((level, option, value))


def told(microseconds: int) -> bytes:
    return bytes(148) + struct.pack("=I", microseconds) + bytes(100)


def test_a_loopback_connection_is_bounded_and_loses_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:

        def exchanged_and_bounded() -> bool:
            """A machine that is busy takes its time now and then; the shortest time counts."""
            near.sendall(b"?")
            assert far.recv(1) == b"?"
            return bound_flight(near)

        eventually(exchanged_and_bounded, "an answer within 50 us")
        allowed = 2 * int(Path("/proc/sys/net/core/wmem_max").read_text())
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == min(BOUND, allowed)
        near.setblocking(False)
        sent = near.send(bytes(8 << 20))
        assert 0 < sent < 8 << 20
        received = 0
        while received < sent:
            received += len(far.recv(1 << 20))
        assert received == sent


@pytest.mark.parametrize("microseconds", [1, 50])
def test_a_peer_that_answers_within_50_microseconds_is_near(microseconds):
    sock = Stub(told(microseconds))
    assert bound_flight(sock)
    assert sock.set == [(socket.SOL_SOCKET, socket.SO_SNDBUF, BOUND // 2)]


@pytest.mark.parametrize(
    "info",
    [told(51), told(2_000), told(0), told(2**32 - 1), told(10)[:100], OSError(107, "not connected")],
    ids=["just not near", "far", "nothing was acknowledged", "never measured", "an old kernel", "ended"],
)
def test_for_other_peers_the_kernel_decides(info):
    sock = Stub(info)
    assert not bound_flight(sock)
    assert sock.set == []
