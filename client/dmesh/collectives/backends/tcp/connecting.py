"""Connections being made by this client, until the other side has proven that it is a peer.

A proven connection carries frames; or, if the HELLO named a number, the calls of one group, which reads and
writes it itself: a *dedicated connection*, kept by the `Connector` until the group claims it.
"""

from __future__ import annotations

import errno
import math
import os
import selectors
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from dmesh._log import announce
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.connection import Connector, OnDialed
from dmesh.collectives.backends.tcp.event_loop import EventLoop, Timer
from dmesh.collectives.backends.tcp.handshake import Acceptor, Credentials, Dialer, Refused, Status
from dmesh.collectives.backends.tcp.message_queue import UNEXPECTED_LIMIT
from dmesh.collectives.backends.tcp.routes import LocalAddress, Route
from dmesh.collectives.backends.tcp.sockets import bound_flight, is_silent, tune
from dmesh.collectives.backends.tcp.tls import PeerTls, Stream, explain
from dmesh.coordination.waiting import do_aside
from dmesh.security.secure_socket import CLOSED, SecureSocket, Unencrypted

_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.25
_BUSY_RETRY_FOR: Final = 10.0
_IN_PROGRESS: Final = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EINTR)
_SHUTTING_DOWN: Final = "this client is shutting down"

Side = TypeVar("Side", Dialer, Acceptor)


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """Limits of the TCP transport, in seconds or bytes; the defaults suit everything but tests."""

    unexpected_limit: int = UNEXPECTED_LIMIT  # buffered for each peer; beyond it the peer is not read
    retry_for: float = 1.0  # for which a refused connection is tried again before the peer counts as lost
    connect_timeout: float = 60.0  # in which an address must answer at all
    dedicated_timeout: float = 5.0  # the same for dedicated connections, without which a group can do
    route_timeout: float = 2.0  # for a dedicated connection by one of several routes, up to its proof
    most_unproven: int = 128  # connections at a time that have not proven to come from a peer
    handshake_timeout: float = 5.0  # for such a connection's proof, with the handshake of TLS before it
    grace: float = 0.5  # for a peer's other connection to bring its last frames after one has ended
    # For which a peer's host may answer nothing, also while the connection is idle, before the peer counts as
    # lost: about the longest time that a partition of the network stays unnoticed.
    silence: float = 60.0


class Opening(ABC, Generic[Side]):
    """A connection before its proof: the handshake of TLS, if peers encrypt, and then the keyed one."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._stream: Stream | None = None
        self._handshake: Side | None = None
        self._greeting = b""
        self._timer: Timer | None = None

    @abstractmethod
    def _on_proven(self, handshake: Side, stream: Stream) -> None:
        """Take the connection: the other side is a peer."""

    @abstractmethod
    def _on_failed(self, handshake: Side, error: OSError) -> None:
        """Deal with a broken connection, a failure of TLS, or a refusal of one side."""

    def _begin(self, stream: Stream, handshake: Side) -> None:
        self._stream, self._handshake = stream, handshake
        self._greeting = handshake.begin()
        self._loop.watch(stream, selectors.EVENT_READ, self._on_readable)
        self._on_readable(selectors.EVENT_READ)

    def _on_readable(self, _: int) -> None:
        stream, handshake = self._stream, self._handshake
        assert stream is not None
        assert handshake is not None
        try:
            if isinstance(stream, SecureSocket) and not stream.established:
                stream.handshake()
                handshake.binding = stream.binding
            greeting, self._greeting = self._greeting, b""
            _say(stream, greeting)
            data = stream.recv(handshake.wanted)
            if not data:
                raise ConnectionAbortedError(CLOSED)
            _say(stream, handshake.feed(data))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._on_failed(handshake, error)
            return
        if handshake.done:
            self._release()
            self._on_proven(handshake, stream)

    def _release(self) -> Stream | None:
        """End all waiting; return the connection."""
        if self._timer is not None:
            self._timer.cancel()
        stream, self._stream, self._handshake, self._timer = self._stream, None, None, None
        if stream is not None:
            self._loop.watch(stream, 0, self._on_readable)
        return stream

    def _discard(self) -> None:
        if (stream := self._release()) is not None:
            stream.close()


def _say(stream: Stream, message: bytes) -> None:
    try:
        # The first few hundred bytes of a connection always find room.
        complete = not message or stream.send(message) == len(message)
    except OSError:
        complete = False
    if not complete:
        raise ConnectionAbortedError(CLOSED)


class Dial(Opening[Dialer]):
    """The attempts to connect to a peer: tries its addresses in turn, again for a while, until one succeeds.

    A peer's listener exists before anybody learns its address, so an address that refuses a connection is
    tried again for a short while only; for longer if it closes connections in the middle of a handshake: it
    may be busy with unproven ones. There is no limit for a peer that does not know this client's process yet,
    because it has not reached the same generation (it will, or its process will end), nor for one that has
    accepted and says nothing yet.

    `on_end` takes the proven connection; or None, the last problem, and the refusal if that was one. A
    `source` is the IP address of this host from which to connect.
    """

    def __init__(
        self,
        loop: EventLoop,
        credentials: Credentials,
        peer: Peer,
        options: TcpOptions,
        on_end: Callable[[Stream | None, str, Refused | None], None],
        *,
        tls: PeerTls | None = None,
        number: int = 0,
        source: str = "",
    ) -> None:
        super().__init__(loop)
        self.problem = "no connection has been tried yet"
        self._credentials = credentials
        self._peer = peer
        self._retry_for = 0.0 if source else options.retry_for  # another way is tried then
        self._connect_timeout = options.dedicated_timeout if number else options.connect_timeout
        self._silence = options.silence
        self._on_end = on_end
        self._tls = tls
        self._number = number
        self._source = source
        self._began = time.monotonic()
        self._pause = _FIRST_PAUSE
        self._addresses: list[str] = []
        self._where = ""
        self._refused: Refused | None = None
        self._interrupted = False
        self._cancelled = False
        self._concluding = False

    def begin(self) -> None:
        """Try all addresses, one after the other."""
        self._timer = None
        self._addresses = list(self._peer.addresses)
        self._interrupted = False
        self._refused = None
        if self._addresses:
            self._attempt()
        else:
            self._on_end(None, f"{self._peer.description} has no address", None)

    def extend(self, seconds: float) -> None:
        """Try for `seconds` from now on, if that is longer."""
        self._retry_for = max(self._retry_for, time.monotonic() - self._began + seconds)

    def hurry(self) -> None:
        """Make the next attempt now, if there is a pause before it."""
        if self._stream is None and self._timer is not None:
            self._timer.cancel()
            self.begin()

    def conclude(self) -> None:
        """Give up if the attempt under way fails, or the one made now, if there is a pause."""
        self._concluding = True
        self.hurry()

    def check(self) -> None:
        """Give up an attempt if the address has accepted, but does not answer any more."""
        if self._stream and self._handshake and is_silent(self._stream, self._silence):
            self._fail(f"its host has not answered for {self._silence:g} s")

    @property
    def may_be_in(self) -> bool:
        """True if the peer may have let the attempt under way in already."""
        return self._handshake is not None and self._handshake.has_proven

    def cancel(self) -> None:
        """Give up without a callback."""
        self._cancelled = True
        self._discard()

    def _attempt(self) -> None:
        self._where = self._addresses.pop(0)
        try:
            host, port = _split(self._where)
            found = _resolve(host, port, socket.AI_NUMERICHOST)
        except ValueError as error:
            self._fail(str(error))
        except socket.gaierror:
            # The look-up of a name may take long, and would hold up all other peers.
            do_aside("dmesh-resolve", partial(self._look_up, host, port))
        else:
            self._connect(*found)

    def _look_up(self, host: str, port: int) -> None:
        try:
            found = _resolve(host, port)
        except OSError as error:
            problem = f"no address of {host}: {error}"
            self._loop.call(lambda: None if self._cancelled else self._fail(problem))
        else:
            self._loop.call(lambda: None if self._cancelled else self._connect(*found))

    def _connect(self, family: socket.AddressFamily, address: Any) -> None:
        try:
            sock = self._stream = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            # If it is connected to itself, the peer's successor can listen there nevertheless.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._source:
                sock.bind((self._source, 0))
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        code = sock.connect_ex(address)
        if code not in _IN_PROGRESS:
            self._fail(os.strerror(code))
            return
        limit = self._connect_timeout
        self._timer = self._loop.after(limit, lambda: self._fail(f"no answer within {limit:g} s"))
        self._loop.watch(sock, selectors.EVENT_WRITE, lambda _: self._on_writable(sock))

    def _on_writable(self, sock: socket.socket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and sock.getsockname() == sock.getpeername():
            # An ephemeral port where nobody listens: TCP has connected the socket to itself.
            code = errno.ECONNREFUSED
        if code:
            self._fail(os.strerror(code))
            return
        assert self._timer is not None
        self._timer.cancel()
        tune(sock, self._silence)
        self.problem = f"{self._where} accepted the connection but has not answered yet"
        credentials, peer = self._credentials, self._peer
        self._begin(
            sock if self._tls is None else self._tls.dial(sock, credentials.rank),
            Dialer(credentials, peer.rank, peer.incarnation, peer.description, number=self._number),
        )

    def _on_proven(self, handshake: Dialer, stream: Stream) -> None:
        self._on_end(stream, "", None)

    def _on_failed(self, handshake: Dialer, error: OSError) -> None:
        if isinstance(error, Unencrypted):
            error = handshake.refuse(Status.PLAIN_ONLY)
        elif isinstance(error, ssl.SSLError):  # in TLS 1.3 our certificate is checked when we are done
            error = handshake.refuse(Status.TLS_FAILED, explain(error))
        if isinstance(error, Refused):
            self._refused = error
        else:
            self._interrupted = True
        self._fail(error.strerror or str(error))

    def _fail(self, problem: str) -> None:
        self._discard()
        self.problem = f"{self._where}: {problem}"
        if self._addresses:
            self._attempt()
            return
        retry_for = max(self._retry_for, _BUSY_RETRY_FOR) if self._interrupted else self._retry_for
        if self._refused is not None:
            retry_for = math.inf if self._refused.status is Status.NOT_YET else 0.0
        if self._concluding or time.monotonic() - self._began >= retry_for:
            self._on_end(None, f"cannot connect to {self.problem}", self._refused)
            return
        self._timer = self._loop.after(self._pause, self.begin)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def _split(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address of the form HOST:PORT")
    return host, int(port)


def _resolve(host: str, port: int, flags: int = 0) -> tuple[socket.AddressFamily, Any]:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    return family, address


class TcpConnector(Connector):
    """Dedicated connections of one client; see `Connector`.

    A route by which no connection can be made is not tried again: later ones would only lose time on it.
    """

    def __init__(
        self,
        loop: EventLoop,
        credentials: Credentials,
        peer_of: Callable[[int], Peer],
        options: TcpOptions,
        tls: PeerTls | None,
        addresses: Sequence[LocalAddress] = (),
    ) -> None:
        super().__init__(loop.call, addresses)
        self._loop = loop
        self._credentials = credentials
        self._peer_of = peer_of
        self._options = options
        self._tls = tls
        self._dials: dict[Dial, OnDialed] = {}
        self._failed: set[Route] = set()

    def close(self) -> None:
        """Close all unclaimed connections, and end all attempts; on the loop's thread."""
        super().close()
        dials, self._dials = self._dials, {}
        for dial, on_dialed in dials.items():
            dial.cancel()
            on_dialed(None, _SHUTTING_DOWN)

    def _dial(self, peer: int, number: int, on_dialed: OnDialed, route: Route | None) -> None:
        if self._closed:
            on_dialed(None, _SHUTTING_DOWN)
            return
        known = self._peer_of(peer)
        if route is None or route in self._failed:
            self._begin(known, number, on_dialed)
            return

        def ended(sock: Stream | None, problem: str) -> None:
            timer.cancel()
            if sock is not None or self._closed:
                on_dialed(sock, problem)
                return
            if route not in self._failed:
                self._failed.add(route)
                announce(
                    f"rank {self._credentials.rank}: no connection with rank {peer} from {route} ({problem}):"
                    " using the address that all peers know"
                )
            self._dial(peer, number, on_dialed, None)

        limit = self._options.route_timeout
        timer = self._loop.after(limit, lambda: self._give_up(dial, f"no answer within {limit:g} s"))
        dial = self._begin(replace(known, addresses=(route.target,)), number, ended, route.source)

    def _begin(self, peer: Peer, number: int, on_dialed: OnDialed, source: str = "") -> Dial:
        def ended(sock: Stream | None, problem: str, _: Refused | None = None) -> None:
            del self._dials[dial]
            if sock is not None:
                bound_flight(sock)
            on_dialed(sock, problem)

        dial = Dial(
            self._loop,
            self._credentials,
            peer,
            self._options,
            ended,
            tls=self._tls,
            number=number,
            source=source,
        )
        self._dials[dial] = on_dialed
        dial.begin()
        return dial

    def _give_up(self, dial: Dial, problem: str) -> None:
        if dial.may_be_in:
            return  # the peer takes no other connection under its number
        if (on_dialed := self._dials.pop(dial, None)) is not None:
            dial.cancel()
            on_dialed(None, problem)
