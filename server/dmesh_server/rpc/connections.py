"""Closes gRPC connections of peers that do not authenticate, by host, before they crowd clients out.

gRPC bounds connections in all, and closes one without calls after a while; it does not count by host, nor by
whether a peer has ever shown an accepted token. So the open connections are looked up among the process's
file descriptors (Linux; elsewhere gRPC's own bounds are all there is) and shut down from outside: gRPC then
closes them itself.

Thousands of clients of one host, or behind one NAT, that start at once are no strangers: their calls wait
for the server, or for their host. So nothing is closed while there is room; and if there is not, a
connection counts only once it has gone without a token for longer than a handshake takes, and twice as long
as those that did show one had to wait lately.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import Counter, defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

from dmesh_server.security.refusals import RefusalLog

_DESCRIPTORS = "/proc/self/fd"
_INTERVAL = 0.5
"""Seconds between two sweeps."""
_RESERVE = 16
"""The part of all connections, one in so many, that is kept free for clients."""
_LEAST_RESERVE = 8
_GRACE = 3
"""Sweeps that a connection may go without a token although the server has nothing to catch up on. Sweeps, not
seconds: a server that stalls has not read what waits for it."""
_REMEMBERED = 20
"""Sweeps for which the time that clients had to wait is remembered."""
_SLICE = 128
"""File descriptors that are looked at before the event loop goes on with other work."""
_MOST_REFUSALS = 100
"""Refused calls in a row after which a connection that was authenticated before is closed, too."""
_FORGOTTEN = 1024
"""Number of disconnected peers that may stay remembered as authenticated until the next sweep."""


class Peer(NamedTuple):
    """The remote end of a connection."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Peer | None:
        """Read gRPC's notation, `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`; None for anything else."""
        family, _, address = text.partition(":")
        host, _, port = unquote(address).rpartition(":")
        if family not in ("ipv4", "ipv6") or not port.isdecimal():
            return None
        return cls(_plain(host.strip("[]")), int(port))


@dataclass(slots=True)
class _Connection:
    """A socket among the process's file descriptors."""

    peer: Peer | None
    """The remote end; None if the socket is no connection to the server's port."""
    sweeps: int = 0
    """Sweeps that have found it without a token."""
    authenticated: bool = False


class ConnectionGuard:
    """Knows which peers have authenticated, and closes the connections of others."""

    def __init__(self, connections: int, per_host: int, refusals: RefusalLog) -> None:
        """Make a guard without connections.

        Args:
            connections: Connections that the server accepts in all. When few of them are free, those of peers
                that have not authenticated are limited for each host.
            per_host: How many a host then keeps of those that have had time to; its oldest are closed.
            refusals: Log of the hosts whose connections are closed.
        """
        self._crowded = connections - max(connections // _RESERVE, _LEAST_RESERVE)
        self._per_host = per_host
        self._refusals = refusals
        self._authenticated: set[Peer] = set()
        self._refused: Counter[Peer] = Counter()
        self._known: dict[int, _Connection] = {}
        self._waits: deque[int] = deque(maxlen=_REMEMBERED)
        self.closed = 0
        """Connections closed so far."""

    def authenticated(self, peer: str) -> None:
        """Note that a peer has shown an accepted token."""
        if (found := Peer.parse(peer)) is not None:
            self._authenticated.add(found)
            self._refused.pop(found, None)

    def refused(self, peer: str) -> None:
        """Note that a peer's call was refused for want of an accepted token."""
        if (found := Peer.parse(peer)) is not None:
            self._refused[found] += 1

    async def run(self, port: int) -> None:
        """Sweep the connections to a port until cancelled."""
        if not os.path.isdir(_DESCRIPTORS):
            return
        while True:
            await asyncio.sleep(_INTERVAL)
            await self.sweep(port)

    async def sweep(self, port: int) -> None:
        """Close the connections above the limits, if there are any."""
        descriptors = [int(name) for name in os.listdir(_DESCRIPTORS)]
        forgotten = len(self._authenticated) > len(descriptors) + _FORGOTTEN
        refused, self._refused = self._refused, Counter()
        if not (len(descriptors) >= self._crowded or forgotten or refused):
            return
        before = frozenset(self._authenticated)
        found = await self._connections_to(port, descriptors)
        current = {peer for _, peer in found.values()}
        # A peer that authenticated during the look-up may have connected after it began.
        self._authenticated -= before - current
        strangers = self._strangers(found)
        doomed = {inode for inode, (_, peer) in found.items() if self._is_doomed(peer, refused[peer])}
        if len(found) >= self._crowded:
            for inodes in strangers.values():
                doomed.update(inodes[: max(0, len(inodes) - self._per_host)])
        for inode in doomed:
            descriptor, peer = found[inode]
            self._close(descriptor, inode, peer)

    def _strangers(self, found: Collection[int]) -> dict[str, list[int]]:
        """Return the connections that could have shown a token by now, by host, the oldest first."""
        waiting, longest = [], 0
        for inode in found:
            connection = self._known[inode]
            if connection.peer not in self._authenticated:
                connection.sweeps += 1
                waiting.append((inode, connection))
            elif not connection.authenticated:
                connection.authenticated, longest = True, max(longest, connection.sweeps)
        self._waits.append(longest)
        patience = _GRACE + 2 * max(self._waits)
        strangers: defaultdict[str, list[int]] = defaultdict(list)
        for inode, connection in waiting:
            if connection.sweeps > patience and connection.peer is not None:
                strangers[connection.peer.host].append(inode)
        return strangers

    def _is_doomed(self, peer: Peer, refusals: int) -> bool:
        return refusals > (_MOST_REFUSALS if peer in self._authenticated else 0)

    async def _connections_to(self, port: int, descriptors: Collection[int]) -> dict[int, tuple[int, Peer]]:
        """Return descriptor and peer of each connection to a port, by the socket's inode."""
        inodes: dict[int, int] = {}
        for count, descriptor in enumerate(descriptors, 1):
            if count % _SLICE == 0:
                await asyncio.sleep(0)
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode):
                    inodes[status.st_ino] = descriptor
                    if status.st_ino not in self._known:
                        self._known[status.st_ino] = _Connection(_peer_at(descriptor, port))
        self._known = {inode: connection for inode, connection in self._known.items() if inode in inodes}
        return {
            inode: (inodes[inode], connection.peer)
            for inode, connection in self._known.items()
            if connection.peer is not None
        }

    def _close(self, descriptor: int, inode: int, peer: Peer) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if os.fstat(connection.fileno()).st_ino != inode:
                return  # closed meanwhile, and the number belongs to another one
            connection.shutdown(socket.SHUT_RDWR)
            self.closed += 1
            self._refusals.note("connection_closed", peer.host, reason="not authenticated")


def _peer_at(descriptor: int, port: int) -> Peer | None:
    """Return the remote end of a TCP connection to a port; None for any other socket."""
    # A duplicate is this function's own: the number itself may be closed and given to another file meanwhile.
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            if connection.getsockname()[1] != port:
                return None
            host, number, *_ = connection.getpeername()
        except OSError:  # it listens, or is not connected any more
            return None
        return Peer(_plain(host), number)


def _plain(host: str) -> str:
    """Return an address without the scope, and an IPv4 address as such."""
    return host.partition("%")[0].removeprefix("::ffff:")
