"""Bounds on HTTP connections: how many in all, how many from one host, how long they may take.

Uvicorn leaves that to a proxy in front of it. Here there is none, and a server that a stranger can fill with
half-open connections or with headers that arrive a byte a minute is of no use to its operators.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dmesh_server.security.refusals import RefusalLog
from dmesh_server.security.shedding import LoadShedder
from dmesh_server.security.tls import is_allowed, names_in


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds on connections to the HTTP side."""

    connections: int = 512
    """Open connections in all."""
    connections_per_host: int = 64
    """Open connections from one host."""
    handshake_seconds: float = 10.0
    """Time for a TLS handshake."""
    head_seconds: float = 10.0
    """Time for the head of a request, from the connection or from its first byte."""
    unread_seconds: float = 30.0
    """Seconds for which a client may leave sent data unread."""


@dataclass
class Connections:
    """Open connections, and the checks of new ones."""

    limits: HttpLimits
    refusals: RefusalLog
    shedder: LoadShedder
    context: ssl.SSLContext | None = None
    """Encryption of connections; None for plaintext."""
    allowed: tuple[str, ...] = ()
    """Names in client certificates that may come in; empty for all."""
    by_host: Counter[str] = field(default_factory=Counter)
    """Open connections of each host."""
    make_protocol: Callable[[], BoundedProtocol] = field(init=False)
    """Makes the protocol of a connection; to be set before any is accepted."""
    _opening: set[asyncio.Task[None]] = field(default_factory=set)

    def admit(self, host: str) -> bool:
        """Count a new connection from a host; return False if it must be closed."""
        reason = ""
        if not self.shedder.listens(host):
            reason = "it sent too many requests without a token"
        elif self.by_host[host] >= self.limits.connections_per_host:
            reason = f"it has {self.limits.connections_per_host} connections already"
        elif self.by_host.total() >= self.limits.connections:
            reason = f"there are {self.limits.connections} connections already"
        if reason:
            self.refusals.note("http_connection_refused", host, reason=reason)
            return False
        self.by_host[host] += 1
        return True

    def accepted(self, connection: socket.socket, address: Sequence[Any]) -> None:
        """Admit a connection or close it, before anything is read."""
        host = str(address[0])
        if self.admit(host):
            task = asyncio.get_running_loop().create_task(
                self._open(connection, host), name="dmesh-http-open"
            )
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            connection.close()

    async def _open(self, connection: socket.socket, host: str) -> None:
        """Let a connection be read, encrypted if it is to be."""
        seconds = None if self.context is None else self.limits.handshake_seconds
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connection, ssl=self.context, ssl_handshake_timeout=seconds
            )
        except BaseException as error:
            # No connection came about, so no protocol will say that it ended.
            self.closed(host)
            connection.close()
            if not isinstance(error, OSError | TimeoutError):
                raise
            reason = getattr(error, "reason", None) or str(error) or "the handshake took too long"
            self.refusals.note("tls_handshake_failed", host, reason=reason)

    def _make_protocol(self) -> BoundedProtocol:
        protocol = self.make_protocol()
        protocol.open = self
        return protocol

    async def stop(self) -> None:
        """End the handshakes that are not over."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def closed(self, host: str) -> None:
        """Note that a connection from a host is gone."""
        self.by_host[host] -= 1
        if self.by_host[host] <= 0:
            del self.by_host[host]


class BoundedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1, with limits on the times that requests and their readers take."""

    open: Connections
    """Set by the maker of the protocol."""

    _host = ""
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note the connection; one whose certificate is not allowed is closed."""
        super().connection_made(transport)
        self._host = self.client[0] if self.client else "unknown"
        if self.open.allowed:
            names = names_in(transport.get_extra_info("peercert") or {})
            if not is_allowed(names, self.open.allowed):
                self.open.refusals.note("certificate_refused", self._host, names=", ".join(names)[:200])
                transport.abort()
                return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection."""
        self._head_is_there()
        self._is_read()
        self.open.closed(self._host)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note that the client does not read; after a while it is cut off."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.open.limits.unread_seconds, self._not_read)

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        self._is_read()

    def data_received(self, data: bytes) -> None:
        """Read; the first byte of a head starts its clock, the last one stops it."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._head_is_there()

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.open.limits.head_seconds, self._too_slow)

    def _head_is_there(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _not_read(self) -> None:
        self._unread = None
        seconds = self.open.limits.unread_seconds
        self.open.refusals.note("http_connection_not_read", self._host, seconds=seconds)
        self.transport.abort()

    def _too_slow(self) -> None:
        self._deadline = None
        self.open.refusals.note("http_connection_too_slow", self._host, seconds=self.open.limits.head_seconds)
        self.transport.abort()
