"""TCP socket options and counters: detection of dead hosts, and a bound on data in flight to near peers.

Two cases show that a peer's host is gone without a word, powered off or cut off by the network:

* An idle connection: keep-alive probes are not answered (`tune`; the kernel ends the connection).
* Data, or probes of a closed window, are not acknowledged (`is_silent`, to be called from time to time).

TCP_USER_TIMEOUT, the kernel's own limit, is not used: it would also end a connection whose process is alive
but does not read for a while, because it is stopped, or because its buffer for unexpected messages is full.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from dmesh.collectives.backends.tcp.secure_socket import Stream

_PROBES = 6
_NEAR = 50
"""Microseconds of round trip; within it, the bound still lets 10 gigabytes pass each second."""
_FLIGHT_BOUND = 256 * 1024
"""Bytes. Linux doubles it, for its bookkeeping."""

# Of struct tcp_info: state, ca_state, retransmits, probes; ... unacked; ... last_ack_recv.
_FIRST = struct.Struct("=BBBB20xI28xI")
# And, in kernels from 4.6 on: min_rtt.
_SHORTEST = struct.Struct("=148xI")


class TcpInfo(NamedTuple):
    """Some fields of `struct tcp_info`."""

    retransmits: int
    """Times that the oldest unacknowledged data was sent again."""
    probes: int
    """Unanswered probes."""
    unacknowledged: int
    """Unacknowledged packets."""
    last_answer: int
    """Milliseconds since the peer's host has acknowledged anything."""
    shortest_trip: int
    """Shortest round-trip time in microseconds; 0 if unknown."""


def read_tcp_info(sock: Stream) -> TcpInfo | None:
    """Return the kernel's counters; None where there are none: not Linux, or the socket is closed."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SHORTEST.size)
    except OSError:
        return None
    if len(info) < _FIRST.size:
        return None
    _, _, retransmits, probes, unacknowledged, last_answer = _FIRST.unpack_from(info)
    shortest = _SHORTEST.unpack(info)[0] if len(info) == _SHORTEST.size else 0
    return TcpInfo(retransmits, probes, unacknowledged, last_answer, shortest)


def tune(sock: Stream, silence: float) -> None:
    """Send small frames at once; end an idle connection whose host does not answer for `silence` seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = max(1, round(silence / 4))
    for option, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", max(1, round((silence - idle) / _PROBES))),
        ("TCP_KEEPCNT", _PROBES),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def is_silent(sock: Stream, silence: float) -> bool:
    """Return True if the peer's host has acknowledged nothing for `silence` seconds, though it should have.

    Always False where the kernel has no counters (other systems than Linux).
    """
    info = read_tcp_info(sock)
    if info is None:
        return False
    # One probe may just be on its way: they are up to two minutes apart.
    asked = (info.unacknowledged > 0 and info.retransmits > 0) or info.probes > 1
    return asked and info.last_answer >= silence * 1000


def bound_flight(sock: socket.socket) -> bool:
    """Bound the bytes in flight to a peer on the same host or a fast network.

    By itself the kernel lets megabytes wait on such a connection, though a fraction fills the line; they fall
    out of the processor's cache while they wait. The bound makes large all-reduces between two containers of
    one machine take 0.4 to 0.7 of the time. For a distant peer the kernel knows best.

    Args:
        sock: A connection with a measured round trip, as after the handshake.

    Returns:
        Whether the bound was set; always False where the kernel has no counters (other systems than Linux).
    """
    info = read_tcp_info(sock)
    if info is None or not 0 < info.shortest_trip <= _NEAR:
        return False
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _FLIGHT_BOUND)
    return True
