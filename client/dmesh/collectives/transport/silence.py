"""Notices that a peer's host is gone without a word: powered off, or cut off by the network.

The kernel's own limit for that, TCP_USER_TIMEOUT, does not tell a host that is gone from one whose process is
alive and does not read for a while (it is stopped, or computes while more has come early than it keeps), and
would end both. What the host acknowledges tells them apart:

* An idle connection: keep-alive probes that are not answered (`tune`; the kernel ends the connection).
* Data, or probes of a closed window, that nobody acknowledges (`is_silent`, to be asked from time to time).
"""

from __future__ import annotations

import socket

from dmesh.collectives.transport import tcp_info
from dmesh.collectives.transport.secure import Stream

_PROBES = 6


def tune(sock: Stream, silence: float) -> None:
    """Has small frames go at once, and an idle connection end after `silence` seconds without a peer."""
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
    """True if the peer's host has acknowledged nothing for `silence` seconds, though it was asked to.

    Always False where the system does not tell (other systems than Linux).
    """
    info = tcp_info.read(sock)
    if info is None:
        return False
    # One probe may just be on its way: they are up to two minutes apart.
    asked = (info.unacknowledged > 0 and info.retransmits > 0) or info.probes > 1
    return asked and info.last_answer >= silence * 1000
