"""What the kernel tells of a TCP connection, on Linux."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from dmesh.collectives.transport.secure import Stream

# Of struct tcp_info: state, ca_state, retransmits, probes; ... unacked; ... last_ack_recv.
_FIRST = struct.Struct("=BBBB20xI28xI")
# And, in kernels from 4.6 on: min_rtt.
_SHORTEST = struct.Struct("=148xI")


class TcpInfo(NamedTuple):
    """Some fields of `struct tcp_info`."""

    retransmits: int
    """How often the oldest data that nobody has acknowledged was sent again."""
    probes: int
    """Probes that nobody has answered."""
    unacknowledged: int
    """Packets that nobody has acknowledged."""
    last_answer: int
    """Milliseconds since the peer's host has acknowledged anything."""
    shortest_trip: int
    """The shortest time from sending to the acknowledgement, in microseconds; 0 if it is not known."""


def read(sock: Stream) -> TcpInfo | None:
    """Returns what the kernel tells; None where it does not: not Linux, or the socket is closed."""
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
