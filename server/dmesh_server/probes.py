"""Probes of suspected members: is the process still there?

A closed connection alone proves nothing. The end of a process is proven if the server's own host has none of
that id and start, or if the port at which its peers reached it refuses connections, twice. Everything else (a
time-out, a firewall's silence, an address that cannot be resolved) is left to the lease.

A client must not make the server scan addresses: only ports that it advertised are tried, only at the address
from which its session came, `_MOST_CONNECTS` at a time in all, `_CONNECTS` times each.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Coroutine, Iterator

from dmesh.config import host
from dmesh_server.core.effects import Probe
from dmesh_server.core.events import Evidence
from dmesh_server.telemetry import logs

_LOOKS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Seconds after the close at which the process table is looked at; then every `_LOOK_EVERY`. A killed process
closes its connections a moment before it is gone."""
_LOOK_EVERY = 0.5
_CONNECTS = (0.05, 0.2, 0.35, 1.0, 1.15, 3.0, 3.15)
"""Seconds after the close at which its port is tried."""
_REFUSALS = 2
"""Refusals one after another that prove the end of a process: one may fall into a moment of its beginning."""
_CONNECT_WITHIN = 0.5
_MOST_CONNECTS = 64
"""Connections that are tried at a time; further attempts are left out."""


class Prober:
    """Looks for the processes of suspected members until they are found, gone, or not suspected any more.

    Args:
        report: Takes what was found out.
        wanted: Function that returns whether the owner of a lease is still suspected.
    """

    def __init__(self, report: Callable[[Evidence], None], wanted: Callable[[int], bool]) -> None:
        self._report = report
        self._wanted = wanted
        self._boot_id = host.boot_id()
        self._namespace = host.pid_namespace()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connects = 0

    def begin(self, probe: Probe) -> None:
        """Begin to look for a process."""
        process = probe.process
        place = (process.boot_id, process.pid_namespace)
        if process.pid > 0 and all(place) and place == (self._boot_id, self._namespace):
            self._start(self._watch_process, probe)
        elif probe.remote and probe.peer_addresses:
            self._start(self._try_port, probe)

    def close(self) -> None:
        """End all probes."""
        for task in self._tasks:
            task.cancel()

    def _start(self, look: Callable[[Probe], Coroutine[None, None, None]], probe: Probe) -> None:
        task = asyncio.get_running_loop().create_task(self._run(look, probe), name="dmesh-probe")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, look: Callable[[Probe], Coroutine[None, None, None]], probe: Probe) -> None:
        try:
            await look(
                probe
            )  # made here: a probe that is cancelled before it begins leaves no coroutine behind
        except Exception:  # noqa: BLE001 -- a bug: then the lease alone decides
            logs.error("probe_failed", exc_info=True)

    def _found(self, probe: Probe, gone: bool, source: str = "") -> None:
        self._report(Evidence(probe.cluster, probe.task, probe.lease, gone, source))

    async def _watch_process(self, probe: Probe) -> None:
        process, seen = probe.process, False
        for pause in _pauses(_LOOKS, _LOOK_EVERY):
            await asyncio.sleep(pause)
            if not self._wanted(probe.lease):
                return
            if host.is_gone(process.pid, process.start_ticks):
                self._found(probe, True, "its process is gone, says the server's host")
                return
            if not seen and process.start_ticks and host.start_ticks(process.pid) == process.start_ticks:
                seen = True
                self._found(probe, False)

    async def _try_port(self, probe: Probe) -> None:
        refused, address = 0, None
        for pause in _pauses(_CONNECTS):
            await asyncio.sleep(pause)
            if not self._wanted(probe.lease):
                return
            if self._connects >= _MOST_CONNECTS:
                continue
            self._connects += 1
            try:
                address = address or await _address_at(probe.peer_addresses, probe.remote)
                if address is None:
                    return
                answer = await _connect(*address)
            finally:
                self._connects -= 1
            refused = refused + 1 if answer is False else 0
            if refused >= _REFUSALS and self._wanted(probe.lease):
                where = f"port {address[1]} of {address[0]}"
                self._found(probe, True, f"its process is gone: {where} refuses connections")
                return
            if answer:
                self._found(probe, False)


def _pauses(times: tuple[float, ...], every: float | None = None) -> Iterator[float]:
    """Yield the pauses between given times, then `every` for ever."""
    before = 0.0
    for time in times:
        yield time - before
        before = time
    while every is not None:
        yield every


async def _address_at(addresses: tuple[str, ...], remote: str) -> tuple[str, int] | None:
    """Return the first of a client's own addresses that is one of the host from which its session came."""
    for text in addresses:
        name, _, port = text.rpartition(":")
        name = name.strip("[]")
        if port.isdigit() and 0 < int(port) < 1 << 16 and remote in await _resolve(name):
            return remote, int(port)
    return None


async def _resolve(name: str) -> set[str]:
    """Return the addresses of a host; none if they are not known soon."""
    with contextlib.suppress(ValueError):
        return {str(ipaddress.ip_address(name))}
    try:
        async with asyncio.timeout(_CONNECT_WITHIN):
            found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return set()
    return {str(sockaddr[0]) for *_, sockaddr in found}


async def _connect(address: str, port: int) -> bool | None:
    """Connect once. True: accepted; False: refused; None: neither within the time."""
    try:
        async with asyncio.timeout(_CONNECT_WITHIN):
            _, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return None
    writer.close()
    return True
