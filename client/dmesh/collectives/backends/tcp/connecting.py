"""Dedicated connections over TCP: each carries the calls of one group, which reads and writes it itself.

They are made and proven like all others. The accepting side expects each of them under a random number that
it has advertised to the dialer; the HELLO names it. They are not available within TLS, whose state lives in
this process.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dmesh.collectives.backends.tcp.admission import HANDSHAKE_TIMEOUT, MOST_UNPROVEN
from dmesh.collectives.backends.tcp.dialing import Dial
from dmesh.collectives.backends.tcp.event_loop import EventLoop
from dmesh.collectives.backends.tcp.handshake import Credentials, Refused
from dmesh.collectives.backends.tcp.message_queue import UNEXPECTED_LIMIT
from dmesh.collectives.backends.tcp.secure_socket import Stream
from dmesh.collectives.backends.tcp.socket_options import bound_flight, tune
from dmesh.collectives.backends.tcp.transport import OnDialed, Peer

_SHUTTING_DOWN = "this client is shutting down"


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """Limits of the TCP transport; the defaults suit everything but tests."""

    unexpected_limit: int = UNEXPECTED_LIMIT
    """Bytes buffered for each peer before a receive is posted; beyond it the peer is not read for a while."""
    retry_for: float = 1.0
    """Seconds for which a refused connection is tried again before the peer counts as lost."""
    connect_timeout: float = 60.0
    """Seconds in which an address must answer at all."""
    dedicated_timeout: float = 5.0
    """The same for dedicated connections, without which a group can do."""
    most_unproven: int = MOST_UNPROVEN
    """Most connections at a time that have not proven to come from a peer."""
    handshake_timeout: float = HANDSHAKE_TIMEOUT
    """Seconds that such a connection has for its proof."""
    grace: float = 0.5
    """Seconds that a peer's other connection has to bring its last frames after one has ended."""
    silence: float = 60.0
    """Seconds for which a peer's host may answer nothing, also while the connection is idle, before the peer
    counts as lost: about the longest time that a partition of the network stays unnoticed."""


class TcpConnector:
    """Dedicated connections of one client; see `Connector`.

    Args:
        loop: Waits for connections that are being made.
        credentials: This client's.
        peer_of: Returns the peer of a rank.
        options: Its time limits.
    """

    def __init__(
        self,
        loop: EventLoop,
        credentials: Credentials,
        peer_of: Callable[[int], Peer],
        options: TcpOptions,
    ) -> None:
        self._loop = loop
        self._credentials = credentials
        self._peer_of = peer_of
        self._options = options
        self._lock = threading.Lock()
        self._expected: dict[int, int] = {}
        self._arrived: dict[int, socket.socket] = {}
        self._dials: dict[Dial, OnDialed] = {}
        self._closed = False

    def expect(self, peer: int) -> int:
        """Let a peer dial once; see `Connector.expect`."""
        with self._lock:
            while (number := secrets.randbits(32)) == 0 or number in self._expected:
                continue
            self._expected[number] = peer
            return number

    def claim(self, number: int) -> socket.socket | None:
        """Return the connection that has come under a number; see `Connector.claim`."""
        with self._lock:
            self._expected.pop(number, None)
            return self._arrived.pop(number, None)

    def dial(self, peer: int, number: int, on_dialed: OnDialed) -> None:
        """Connect to a peer, and call `on_dialed` on the loop's thread; see `Connector.dial`."""
        known = self._peer_of(peer)
        self._loop.call(lambda: self._dial(known, number, on_dialed))

    # -- the loop's thread -----------------------------------------------------------------------

    def is_expected(self, peer: int, number: int) -> bool:
        """Return whether a peer may come in under a number."""
        with self._lock:
            return self._expected.get(number) == peer and number not in self._arrived and not self._closed

    def admitted(self, number: int, sock: Stream) -> None:
        """Take a proven connection that has come under a number."""
        assert isinstance(sock, socket.socket)  # never within TLS
        tune(sock, self._options.silence)
        bound_flight(sock)
        with self._lock:
            if number in self._expected and not self._closed:
                self._arrived[number] = sock
                return
        sock.close()  # nobody waits for it any more

    def close(self) -> None:
        """Close all unclaimed connections, and end all attempts."""
        with self._lock:
            self._closed = True
            unclaimed = list(self._arrived.values())
            self._arrived.clear()
            self._expected.clear()
        for sock in unclaimed:
            sock.close()
        dials, self._dials = self._dials, {}
        for dial, on_dialed in dials.items():
            dial.cancel()
            on_dialed(None, _SHUTTING_DOWN)

    def _dial(self, peer: Peer, number: int, on_dialed: OnDialed) -> None:
        if self._closed:
            on_dialed(None, _SHUTTING_DOWN)
            return

        def connected(sock: Stream) -> None:
            del self._dials[dial]
            assert isinstance(sock, socket.socket)
            bound_flight(sock)
            on_dialed(sock, "")

        def failed(problem: str, _: Refused | None) -> None:
            del self._dials[dial]
            on_dialed(None, problem)

        dial = Dial(
            self._loop,
            self._credentials,
            peer,
            retry_for=self._options.retry_for,
            connect_timeout=self._options.dedicated_timeout,
            silence=self._options.silence,
            on_connected=connected,
            on_failed=failed,
            number=number,
        )
        self._dials[dial] = on_dialed
        dial.begin()
