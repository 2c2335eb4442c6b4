"""Admission of connections: accepts them, and lets those in that prove to come from a peer."""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from dmesh._log import logger
from dmesh.collectives.backends.tcp.connecting import Opening, TcpOptions
from dmesh.collectives.backends.tcp.event_loop import EventLoop
from dmesh.collectives.backends.tcp.handshake import ABOUT_TLS, Acceptor, Credentials, Refused, Status
from dmesh.collectives.backends.tcp.sockets import tune
from dmesh.collectives.backends.tcp.tls import PeerTls, Stream, claimed_rank, explain
from dmesh.security.secure_socket import speaks_tls

_ACCEPTS_AT_ONCE: Final = 32
_ACCEPT_PAUSE: Final = 0.2
_YOUNG: Final = 0.25
_FIRST_BYTES: Final = 4 * 1024
_MOST_LEFTOVERS: Final = 64 * 1024
_LOG_INTERVAL: Final = 10.0
_MOST_HOSTS: Final = 256
_MANY: Final = "many hosts"


class RefusalLog:
    """Log of refused connections: at most one line per host and interval, with the number of lines left out.

    The coordination server follows the same rule. Used by one thread at a time; lines begin with the rank.
    """

    def __init__(
        self, rank: int, interval: float = _LOG_INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank, self._interval, self._clock = rank, interval, clock
        self._logged: dict[str, float] = {}  # host -> time of its last line, oldest first
        self._left_out: dict[str, int] = {}

    def note(self, host: str, message: str) -> None:
        """Log the problem of a connection from a host; the message should name the host."""
        now = self._clock()
        for former, when in tuple(self._logged.items()):
            if now - when < self._interval:
                break
            del self._logged[former]
            if count := self._left_out.pop(former, 0):
                logger.warning("rank %d: refused %d more connections from %s", self._rank, count, former)
        if host not in self._logged and len(self._logged) >= _MOST_HOSTS:
            host = _MANY  # they share a line: outsiders must fill neither the log nor memory
        if host in self._logged:
            self._left_out[host] = self._left_out.get(host, 0) + 1
            return
        self._logged[host] = now
        logger.warning("rank %d: %s", self._rank, message)


class Admission:
    """Accepts connections for one client, and lets those in that prove to come from a peer.

    An unproven connection costs a socket and a few hundred bytes (some ten kilobytes and about a millisecond
    of this thread's time with TLS) for a few seconds, and can do nothing to the cluster: it is only ever
    refused. When there are too many, the oldest is closed: a peer's handshake takes milliseconds, so a crowd
    of silent connections does not keep peers out.

    `may_enter` tells if a proven peer (rank, incarnation, number) is still expected; `on_admitted` takes its
    rank, the number of a dedicated connection (0 for frames) and the connection. `on_tls_mismatch` takes a
    peer's rank if a dialer that claims it disagrees with this client about TLS. That proves nothing; but
    asking the true peer will, on both sides.
    """

    def __init__(
        self,
        loop: EventLoop,
        listeners: Sequence[socket.socket],
        credentials: Credentials,
        incarnations: Mapping[int, int],
        options: TcpOptions,
        tls: PeerTls | None,
        *,
        may_enter: Callable[[int, int, int], bool],
        on_admitted: Callable[[int, int, Stream], None],
        on_tls_mismatch: Callable[[int], None],
    ) -> None:
        self.refusals: dict[int, str] = {}
        self.loop = loop
        self.options = options
        self.tls = tls
        self.admit = on_admitted
        self.unproven: dict[_Unproven, None] = {}  # in the order of their coming
        self._listeners = listeners
        self._credentials = credentials
        self._incarnations = dict(incarnations)
        self._may_enter = may_enter
        self._on_tls_mismatch = on_tls_mismatch
        self._log = RefusalLog(credentials.rank)
        self._closed = False

    def begin(self) -> None:
        """Begin to accept."""
        for listener in () if self._closed else self._listeners:
            listener.setblocking(False)
            self.loop.watch(listener, selectors.EVENT_READ, partial(self._on_connections, listener))

    def expect(self, incarnations: Mapping[int, int]) -> None:
        """Set the peers' processes of a new generation."""
        self._incarnations.clear()
        self._incarnations.update(incarnations)  # in place: handshakes under way use it, too
        self.refusals.clear()

    def close(self) -> None:
        """Close the listeners and all connections that have not been let in."""
        if self._closed:
            return
        self._closed = True
        for listener in self._listeners:
            self.loop.watch(listener, 0, partial(self._on_connections, listener))
            listener.close()
        for unproven in tuple(self.unproven):
            unproven.close()

    def _on_connections(self, listener: socket.socket, _: int) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of files or memory: to try again at once would only burn time.
                self._log.note("", f"cannot accept a connection: {error.strerror or error}")
                self.loop.watch(listener, 0, partial(self._on_connections, listener))
                self.loop.after(_ACCEPT_PAUSE, self.begin)
                return
            if len(self.unproven) >= self.options.most_unproven:
                oldest = next(iter(self.unproven))
                if time.monotonic() - oldest.began < _YOUNG:
                    sock.close()  # all have just come: a whole cluster may be connecting at once
                    continue
                oldest.close()
            sock.setblocking(False)
            self.unproven[_Unproven(self, sock, str(address[0]))] = None

    def acceptor(self, *, tls_only: bool) -> Acceptor:
        """Return a new handshake."""
        return Acceptor(self._credentials, self._incarnations, tls_only=tls_only, may_enter=self._may_enter)

    def refused(self, error: Refused, claimed: int | None, host: str) -> None:
        """Log a refusal, and remember it for the peer that it claims to be."""
        if error.status is Status.NOT_YET:
            return  # nothing is wrong, it will try again
        self._log.note(host, f"{error} (from {host})")
        # Only ranks that exist: an outsider's claims must not fill memory.
        if claimed is not None and claimed in self._incarnations:
            self.refusals[claimed] = str(error)
            if error.status in ABOUT_TLS:
                self._on_tls_mismatch(claimed)


class _Unproven(Opening[Acceptor]):
    """An accepted connection that has not proven to come from a peer."""

    def __init__(self, admission: Admission, sock: socket.socket, host: str) -> None:
        super().__init__(admission.loop)
        self.began = time.monotonic()
        self._admission = admission
        self._socket = self._stream = sock
        self._host = host
        self._claimed: int | None = None
        self._most_leftovers = _MOST_LEFTOVERS
        self._timer = self._loop.after(admission.options.handshake_timeout, self.close)
        self._loop.watch(sock, selectors.EVENT_READ, self._on_first_bytes)

    def close(self) -> None:
        """Close the connection."""
        self._admission.unproven.pop(self, None)
        self._discard()

    def _on_first_bytes(self, _: int) -> None:
        """Peek at the first bytes: are they TLS, and should they be?"""
        try:
            start = self._socket.recv(_FIRST_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            start = b""
        if not start:
            self.close()
            return
        tls, encrypted = self._admission.tls, speaks_tls(start)
        handshake = self._admission.acceptor(tls_only=tls is not None and not encrypted)
        if not encrypted:
            self._begin(self._socket, handshake)
        elif tls is None:
            self._on_failed(handshake, handshake.refuse_tls(claimed_rank(start)))
        else:
            self._claimed = claimed_rank(start)
            self._begin(tls.accept(self._socket), handshake)

    def _on_proven(self, handshake: Acceptor, stream: Stream) -> None:
        self._admission.unproven.pop(self, None)
        tune(stream, self._admission.options.silence)
        assert handshake.peer is not None
        self._admission.admit(handshake.peer, handshake.number, stream)

    def _on_failed(self, handshake: Acceptor, error: OSError) -> None:
        if isinstance(error, ssl.SSLError):  # bad certificates, or the stream was tampered with
            if handshake.peer is None:
                handshake.peer = self._claimed
            error = handshake.refuse(Status.TLS_FAILED, explain(error))
        if not isinstance(error, Refused):
            self.close()
            return
        self._admission.refused(error, handshake.peer, self._host)
        try:
            if error.answer and self._stream is not None:
                self._stream.send(error.answer)
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        # With unread bytes a close would be a reset, which could overtake the answer: read them first.
        self._loop.watch(self._socket, selectors.EVENT_READ, self._on_leftovers)

    def _on_leftovers(self, _: int) -> None:
        try:
            count = len(self._socket.recv(4096))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        self._most_leftovers -= count
        if not count or self._most_leftovers <= 0:
            self.close()
