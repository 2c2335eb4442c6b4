"""Loopback ports for clients that are about to start.

A port that was found free can be gone when the client binds it. Two things keep it: it is chosen at random
from *outside* the kernel's ephemeral range, so no outgoing connection and no `bind(port 0)` of another
program gets it; and the launcher holds the UDP port of the same number for the whole run, which tells other
launchers that it is taken without being in the way of the client's TCP listener. The lock ends with the
process, however that ends.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - a port that is free at every address of this machine
_LOWEST = 10_000
_HIGHEST = 65_535
_EPHEMERAL_DEFAULT = (49_152, 65_535)  # IANA's, used by macOS and the BSDs
_ENOUGH = 4_096


class PortReservation:
    """Ports chosen for the clients of one run, kept from other launchers until `close`."""

    def __init__(self, ports: Sequence[int], locks: Sequence[socket.socket]) -> None:
        self.ports = tuple(ports)
        """One TCP port a client, free when it was chosen."""
        self._locks = tuple(locks)

    def close(self) -> None:
        """Let other launchers choose these ports again."""
        for lock in self._locks:
            lock.close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def reserve_ports(count: int, source: random.Random | None = None, host: str = LOOPBACK) -> PortReservation:
    """Choose `count` different ports.

    Args:
        count: How many.
        source: Where the random choice comes from; the system's if None.
        host: Where they must be free: at the loopback address, or `EVERYWHERE`.

    Raises:
        OSError: There are not that many free ports.
    """
    ports: list[int] = []
    locks: list[socket.socket] = []
    for port in _shuffled(candidate_ports(ephemeral_range()), source or random.SystemRandom()):
        if len(ports) == count:
            break
        lock = _lock(port)
        if lock is None:
            continue
        if not _tcp_is_free(port, host):
            lock.close()
            continue
        ports.append(port)
        locks.append(lock)
    reservation = PortReservation(ports, locks)
    if len(ports) < count:
        reservation.close()
        raise OSError(errno.EADDRNOTAVAIL, f"only {len(ports)} of {count} free ports could be found")
    return reservation


def ephemeral_range() -> tuple[int, int]:
    """Return the first and last port that the kernel gives to outgoing connections."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return _EPHEMERAL_DEFAULT


def candidate_ports(ephemeral: tuple[int, int]) -> list[int]:
    """Return the ports to choose from: high, outside `ephemeral` unless that leaves too few."""
    everything = range(_LOWEST, _HIGHEST + 1)
    outside = [port for port in everything if not ephemeral[0] <= port <= ephemeral[1]]
    return outside if len(outside) >= _ENOUGH else list(everything)


def _shuffled(ports: list[int], source: random.Random) -> Iterator[int]:
    while ports:
        index = source.randrange(len(ports))
        ports[index], ports[-1] = ports[-1], ports[index]
        yield ports.pop()


def _lock(port: int) -> socket.socket | None:
    lock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        lock.bind((LOOPBACK, port))
    except OSError as error:
        lock.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise
    return lock


def _tcp_is_free(port: int, host: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a connection in TIME_WAIT is no obstacle, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True
