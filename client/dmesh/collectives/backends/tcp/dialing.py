"""Dialing of one peer: tries its addresses in turn, again for a while, until a handshake succeeds."""

from __future__ import annotations

import errno
import math
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from dmesh.collectives.backends.tcp.event_loop import EventLoop, Timer
from dmesh.collectives.backends.tcp.handshake import Credentials, Dialer, Refused, Status
from dmesh.collectives.backends.tcp.peer_tls import PeerTls, explain
from dmesh.collectives.backends.tcp.secure_socket import SecureSocket, Stream, Unencrypted
from dmesh.collectives.backends.tcp.socket_options import is_silent, tune
from dmesh.collectives.backends.tcp.transport import Peer

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.25
_BUSY_RETRY_FOR = 10.0
_IN_PROGRESS = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EINTR)
_CLOSED = "the connection was closed during the handshake"

Resolved = tuple[socket.AddressFamily, Any]


class Dial:
    """The attempts to connect to a peer. Everything happens on the loop's thread.

    A peer's listener exists before anybody learns its address, so an address that refuses a connection is
    tried again for a short while only; for longer if it closes connections in the middle of a handshake: it
    may be busy with unproven ones. There is no limit for a peer that does not know this client's process yet,
    because it has not reached the same generation (it will, or its process will end), nor for one that has
    accepted and says nothing yet.

    Args:
        loop: Waits for the sockets.
        credentials: This client's.
        peer: The peer.
        retry_for: Seconds for which refused connections are tried again.
        connect_timeout: Seconds in which an address must answer at all.
        silence: Seconds without an answer of its host after which a connection counts as cut.
        on_connected: Called with the proven connection.
        on_failed: Called with the last problem, and with the refusal if that was one.
        tls: Encrypts the connection; None for a plain one.
        number: Number of a dedicated connection that the peer expects; 0 for frames.
    """

    def __init__(
        self,
        loop: EventLoop,
        credentials: Credentials,
        peer: Peer,
        *,
        retry_for: float,
        connect_timeout: float,
        silence: float,
        on_connected: Callable[[Stream], None],
        on_failed: Callable[[str, Refused | None], None],
        tls: PeerTls | None = None,
        number: int = 0,
    ) -> None:
        self.problem = "no connection has been tried yet"
        self._loop = loop
        self._credentials = credentials
        self._peer = peer
        self._retry_for = retry_for
        self._connect_timeout = connect_timeout
        self._silence = silence
        self._on_connected = on_connected
        self._on_failed = on_failed
        self._tls = tls
        self._number = number
        self._began = 0.0
        self._pause = _FIRST_PAUSE
        self._addresses: list[str] = []
        self._where = ""
        self._socket: Stream | None = None
        self._handshake: Dialer | None = None
        self._timer: Timer | None = None
        self._refused: Refused | None = None
        self._interrupted = False
        self._over = False

    def begin(self) -> None:
        """Make the first attempt."""
        self._began = time.monotonic()
        self._round()

    def extend(self, seconds: float) -> None:
        """Try for `seconds` from now on, if that is longer."""
        self._retry_for = max(self._retry_for, time.monotonic() - self._began + seconds)

    def hurry(self) -> None:
        """Make the next attempt now, if there is a pause before it."""
        if self._socket is None and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._round()

    def check(self) -> None:
        """Give up an attempt if the address has accepted, but does not answer any more."""
        sock = self._socket
        if sock is not None and self._handshake is not None and is_silent(sock, self._silence):
            self._failed(f"its host has not answered for {self._silence:g} s")

    def cancel(self) -> None:
        """Give up without a callback."""
        self._over = True
        self._reset()

    def _round(self) -> None:
        self._timer = None
        self._addresses = list(self._peer.addresses)
        self._interrupted = False
        self._refused = None
        if self._addresses:
            self._attempt()
        else:
            self._give_up(f"{self._peer.description} has no address", None)

    def _attempt(self) -> None:
        self._where = self._addresses.pop(0)
        try:
            host, port = _split(self._where)
            found = _resolve(host, port, numeric=True)
        except ValueError as error:
            self._failed(str(error))
            return
        if found is not None:
            self._connect(found)
            return
        # The look-up of a name may take long, and would hold up all other peers.
        threading.Thread(
            target=self._resolve_aside, args=(host, port), name="dmesh-resolve", daemon=True
        ).start()

    def _resolve_aside(self, host: str, port: int) -> None:
        try:
            found = _resolve(host, port, numeric=False)
        except OSError as error:
            problem = str(error)
            self._loop.call(lambda: None if self._over else self._failed(f"no address of {host}: {problem}"))
            return
        assert found is not None
        self._loop.call(lambda: None if self._over else self._connect(found))

    def _connect(self, to: Resolved) -> None:
        family, address = to
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._failed(error.strerror or str(error))
            return
        self._socket = sock
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code not in _IN_PROGRESS:
            self._failed(os.strerror(code))
            return
        self._timer = self._loop.after(
            self._connect_timeout, lambda: self._failed(f"no answer within {self._connect_timeout:g} s")
        )
        self._loop.watch(sock, selectors.EVENT_WRITE, self._on_writable)

    def _on_writable(self, _: int) -> None:
        sock = self._socket
        assert isinstance(sock, socket.socket)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and sock.getsockname() == sock.getpeername():
            # An ephemeral port where nobody listens: TCP has connected the socket to itself.
            code = errno.ECONNREFUSED
        if code:
            self._failed(os.strerror(code))
            return
        assert self._timer is not None
        self._timer.cancel()
        tune(sock, self._silence)
        peer = self._peer
        self._handshake = Dialer(
            self._credentials, peer.rank, peer.incarnation, peer.description, number=self._number
        )
        self.problem = f"{self._where} accepted the connection but has not answered yet"
        if self._tls is None:
            self._begin_handshake(sock, self._handshake)
            return
        secure = self._socket = self._tls.dial(sock, self._credentials.rank)
        self._loop.watch(secure, selectors.EVENT_READ, self._on_tls)
        self._on_tls(0)

    def _on_tls(self, _: int) -> None:
        secure, handshake = self._socket, self._handshake
        assert isinstance(secure, SecureSocket)
        assert handshake is not None
        try:
            secure.handshake()
        except (BlockingIOError, InterruptedError):
            return
        except Unencrypted:
            self._refuse(handshake.refuse_plain())
        except ssl.SSLError as error:
            self._refuse(handshake.refuse_tls(explain(error)))
        except OSError as error:
            self._broken(error.strerror or str(error))
        else:
            handshake.bind(secure.binding)
            self._begin_handshake(secure, handshake)

    def _begin_handshake(self, sock: Stream, handshake: Dialer) -> None:
        self._loop.watch(sock, selectors.EVENT_READ, self._on_readable)
        self._say(handshake.begin())

    def _on_readable(self, _: int) -> None:
        sock, handshake = self._socket, self._handshake
        assert sock is not None
        assert handshake is not None
        try:
            data = sock.recv(handshake.wanted)
            if not data:
                self._broken(_CLOSED)
                return
            answer = handshake.feed(data)
        except (BlockingIOError, InterruptedError):
            return
        except Refused as error:
            self._refuse(error)
        except ssl.SSLError as error:  # with TLS 1.3 an acceptor checks our certificate when we are done
            self._refuse(handshake.refuse_tls(explain(error)))
        except OSError as error:
            self._broken(error.strerror or str(error))
        else:
            if handshake.done:
                self._loop.watch(sock, 0, self._on_readable)
                self._socket = None
                self._over = True
                self._on_connected(sock)
            elif answer:
                self._say(answer)

    def _say(self, message: bytes) -> None:
        assert self._socket is not None
        try:
            # The first few hundred bytes of a connection always find room.
            complete = self._socket.send(message) == len(message)
        except OSError:
            complete = False
        if not complete:
            self._broken(_CLOSED)

    def _broken(self, problem: str) -> None:
        self._interrupted = True
        self._failed(problem)

    def _refuse(self, error: Refused) -> None:
        self._refused = error
        self._failed(str(error))

    def _failed(self, problem: str) -> None:
        self._reset()
        self.problem = f"{self._where}: {problem}"
        if self._addresses:
            self._attempt()
            return
        retry_for = max(self._retry_for, _BUSY_RETRY_FOR) if self._interrupted else self._retry_for
        if self._refused is not None:
            retry_for = math.inf if self._refused.status is Status.NOT_YET else 0.0
        if time.monotonic() - self._began >= retry_for:
            self._give_up(f"cannot connect to {self.problem}", self._refused)
            return
        self._timer = self._loop.after(self._pause, self._round)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _give_up(self, problem: str, refused: Refused | None) -> None:
        self._over = True
        self._on_failed(problem, refused)

    def _reset(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._handshake = None
        sock, self._socket = self._socket, None
        if sock is not None:
            self._loop.watch(sock, 0, self._on_readable)
            sock.close()


def _split(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address of the form HOST:PORT")
    return host, int(port)


def _resolve(host: str, port: int, *, numeric: bool) -> Resolved | None:
    flags = socket.AI_NUMERICHOST if numeric else 0
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        if numeric:
            return None
        raise
    family, _, _, _, address = found[0]
    return family, address
