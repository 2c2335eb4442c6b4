"""Connections that carry the calls of one group, and nothing else: who asked for them reads and writes them.

They are made and proven as all others are. The side that accepts has expected each of them, under a random
number that it has told the other one; the HELLO names it. Not within TLS, whose state lives in this process.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dmesh.collectives.transport.base import Peer
from dmesh.collectives.transport.dialing import Dial
from dmesh.collectives.transport.engine import Engine
from dmesh.collectives.transport.handshake import Credentials, Refused
from dmesh.collectives.transport.nearness import bound_flight
from dmesh.collectives.transport.secure import Stream
from dmesh.collectives.transport.silence import tune

OnDialed = Callable[[socket.socket | None, str], None]
"""Gets the connection, or None and what the problem is."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """How long a client tries."""

    patience: float
    """Seconds for which a refused connection is tried again."""
    connect_timeout: float
    """Seconds in which an address must answer at all."""
    silence: float
    """Seconds without an answer of its host after which a connection counts as cut."""


class Wires(Protocol):
    """Makes connections for one group alone. May be used by any thread."""

    def expect(self, peer: int) -> int:
        """Lets a peer dial once; returns the number that it has to say, which is not 0. Ends with `claim`."""

    def claim(self, number: int) -> socket.socket | None:
        """Hands out the connection that has come under a number; None if none has. It is forgotten then."""

    def dial(self, peer: int, number: int, on_dialed: OnDialed) -> None:
        """Connects to a peer that expects it under a number.

        Args:
            peer: Its rank.
            number: What it has told.
            on_dialed: Called once, on any thread.
        """


class TcpWires:
    """The wires of one client over TCP; see `Wires`.

    Args:
        engine: Waits for connections that are being made.
        credentials: Who this client is.
        peer_of: Returns what is known of a peer.
        limits: How long to try.
    """

    def __init__(
        self, engine: Engine, credentials: Credentials, peer_of: Callable[[int], Peer], limits: WireLimits
    ) -> None:
        self._engine = engine
        self._credentials = credentials
        self._peer_of = peer_of
        self._limits = limits
        self._lock = threading.Lock()
        self._expected: dict[int, int] = {}
        self._come: dict[int, socket.socket] = {}
        self._dials: dict[Dial, OnDialed] = {}
        self._closed = False

    def expect(self, peer: int) -> int:
        """Lets a peer dial once; see `Wires.expect`."""
        with self._lock:
            while (number := secrets.randbits(32)) == 0 or number in self._expected:
                continue
            self._expected[number] = peer
            return number

    def claim(self, number: int) -> socket.socket | None:
        """Hands out what has come under a number; see `Wires.claim`."""
        with self._lock:
            self._expected.pop(number, None)
            return self._come.pop(number, None)

    def dial(self, peer: int, number: int, on_dialed: OnDialed) -> None:
        """Connects to a peer, and calls `on_dialed` on the engine's thread; see `Wires.dial`."""
        known = self._peer_of(peer)
        self._engine.call(lambda: self._dial(known, number, on_dialed))

    # -- the engine's thread -----------------------------------------------------------------------

    def is_expected(self, peer: int, number: int) -> bool:
        """Whether a peer may come in under a number."""
        with self._lock:
            return self._expected.get(number) == peer and number not in self._come and not self._closed

    def admitted(self, number: int, sock: Stream) -> None:
        """A connection has come, and is proven."""
        assert isinstance(sock, socket.socket)  # never within TLS
        tune(sock, self._limits.silence)
        bound_flight(sock)
        with self._lock:
            if number in self._expected and not self._closed:
                self._come[number] = sock
                return
        sock.close()  # nobody waits for it any more

    def close(self) -> None:
        """Closes what nobody has claimed, and ends all attempts."""
        with self._lock:
            self._closed = True
            left = list(self._come.values())
            self._come.clear()
            self._expected.clear()
        for sock in left:
            sock.close()
        dials, self._dials = self._dials, {}
        for dial, on_dialed in dials.items():
            dial.cancel()
            on_dialed(None, "this client is shutting down")

    def _dial(self, peer: Peer, number: int, on_dialed: OnDialed) -> None:
        if self._closed:
            on_dialed(None, "this client is shutting down")
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
            self._engine,
            self._credentials,
            peer,
            patience=self._limits.patience,
            connect_timeout=self._limits.connect_timeout,
            silence=self._limits.silence,
            on_connected=connected,
            on_failed=failed,
            wire=number,
        )
        self._dials[dial] = on_dialed
        dial.begin()
