"""Addresses to listen on, with errors that say what to correct, and the accepting of connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dmesh.config.host import listener_on
from dmesh.errors import AddressInUseError, ConfigurationError
from dmesh_server.telemetry import logs

_ATTEMPTS = 10
"""Number of free ports to try: a port that is free on the first of several IP addresses may be taken on
the next."""
_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before the event loop goes on with something else."""
_ACCEPT_AGAIN = 1.0
"""Seconds until connections are accepted again after that has failed."""


@dataclass(frozen=True, slots=True)
class Address:
    """A HOST:PORT to listen on."""

    host: str
    """Host name or IP address, without brackets."""
    port: int
    """Port; 0 for any free one."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def reachable(self) -> Address:
        """Return an address at which this machine reaches it: loopback for one that stands for all."""
        if not ipaddress.ip_address(self.resolve()[0].partition("%")[0]).is_unspecified:
            return self
        return Address("::1" if ":" in self.host else "127.0.0.1", self.port)

    @classmethod
    def parse(cls, text: str, what: str) -> Address:
        """Read `HOST:PORT` or `[IPV6]:PORT`.

        Args:
            text: The address.
            what: Name of the setting for errors, e.g. "--listen".

        Raises:
            ConfigurationError: It is not an address.
        """
        host, separator, port_text = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if bracketed:
            host = host[1:-1]
        bad_host = (
            not host or host != host.strip() or any(c in host for c in " /@[]") or (":" in host) != bracketed
        )
        if not separator or bad_host or not (port_text.isascii() and port_text.isdigit()):
            raise ConfigurationError(
                f"{what} is {text!r}; expected HOST:PORT, e.g. 127.0.0.1:8470, or [::1]:8470"
            )
        port = int(port_text) if len(port_text) <= 5 else 65536
        if port > 65535:
            raise ConfigurationError(f"{what} is {text!r}; the port must be 0 (any free one) to 65535")
        return cls(host, port)

    def resolve(self) -> list[str]:
        """Return the IP addresses of the host, in the order of the system's preference.

        Raises:
            ConfigurationError: The name is unknown.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (socket.gaierror, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a host name"
            raise ConfigurationError(
                f"cannot listen on {self}: the host cannot be resolved ({reason})"
            ) from error
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def is_loopback(self) -> bool:
        """Return whether only this machine can reach the address."""
        return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in self.resolve())


def bind(address: Address) -> list[socket.socket]:
    """Open listening sockets on every IP address of the host that this machine has, all with the same port.

    A name such as `localhost` stands for several addresses. Listening on some of them while another program
    has the port on the rest would send clients to the wrong server.

    Raises:
        AddressInUseError: The port is taken on one of them.
        ConfigurationError: None of them is this machine's, or this process may not use the port.
    """
    attempts = 1 if address.port else _ATTEMPTS
    for attempt in range(attempts):
        try:
            return _bind_all(address)
        except AddressInUseError:
            if attempt == attempts - 1:
                raise
    raise AssertionError("unreachable")


def _bind_all(address: Address) -> list[socket.socket]:
    with contextlib.ExitStack() as undo:
        sockets: list[socket.socket] = []
        port = address.port
        problem: OSError | None = None
        for ip in address.resolve():
            try:
                listener = _bind_one(ip, port)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _explain(address, error) from error
                problem = error  # e.g. `localhost` where IPv6 is switched off
                continue
            undo.callback(listener.close)
            sockets.append(listener)
            port = listener.getsockname()[1]
        if not sockets:
            assert problem is not None
            raise _explain(address, problem) from problem
        undo.pop_all()
        return sockets


def _bind_one(ip: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A restarted server must not wait until the kernel has forgotten the old one's connections.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ":" in ip:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if ip == "::" else 1)
        listener.bind((ip, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _explain(address: Address, error: OSError) -> AddressInUseError | ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        other = listener_on(address.port)
        if other is not None and other.pid == os.getpid():
            return AddressInUseError(
                f"cannot listen on {address}: this process uses the port already; choose another one"
            )
        return AddressInUseError(
            f"cannot listen on {address}: {other.describe() if other else 'another process'} uses this port. "
            "End it, or choose another port; 0 takes any free one"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigurationError(f"cannot listen on {address}: it is not an address of this machine")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return ConfigurationError(f"cannot listen on {address}: {reason}")


class Acceptor:
    """Accepts connections in an event loop; pauses while the process has no free file descriptor.

    uvloop's own servers use a whole processor then: libuv keeps a spare descriptor for that case, which
    another thread of the process can take.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], accepted: Callable[[socket.socket, Any], None]
    ) -> None:
        """Begin to accept, in the running event loop.

        Args:
            sockets: Listening sockets.
            accepted: Takes each connection, and the address from which it comes.
        """
        self._loop = asyncio.get_running_loop()
        self._accepted = accepted
        self._sockets = set(sockets)
        for listener in sockets:
            listener.setblocking(False)
            self._listen(listener)

    def close(self) -> None:
        """Accept no more; the sockets stay open."""
        for listener in self._sockets:
            self._loop.remove_reader(listener)
        self._sockets.clear()

    def _listen(self, listener: socket.socket) -> None:
        if listener in self._sockets:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, no memory
                logs.warning("accept_failed", port=listener.getsockname()[1], reason=str(error))
                self._loop.remove_reader(listener)
                self._loop.call_later(_ACCEPT_AGAIN, self._listen, listener)
                return
            self._accepted(connection, address)
