"""The door: accepts connections, and lets those in who prove that they are a peer."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

from dmesh._log import logger
from dmesh.collectives.transport.engine import Engine, Timer
from dmesh.collectives.transport.handshake import Acceptor, Credentials, Refused, Status

STRANGERS: Final = 128
"""How many connections may be in the middle of the handshake; more are closed at once."""
HANDSHAKE_TIMEOUT: Final = 5.0
"""Seconds for a handshake."""
_ACCEPTS_AT_ONCE: Final = 32
_PAUSE: Final = 0.2
_YOUNG: Final = 0.25
_WARNINGS: Final = 20
_LEFTOVERS: Final = 64 * 1024


class Admission:
    """Accepts connections for one client. Everything happens on the engine's thread.

    A stranger costs a socket and a few hundred bytes for a few seconds, and can do nothing to the cluster:
    who has not proven to be a peer is only ever refused. When there are too many, whoever has been there for
    longest has to go: a peer's handshake takes milliseconds, so a crowd that says nothing does not keep peers
    out.

    Args:
        engine: Waits for the sockets.
        listener: Bound and listening; closed by `close`.
        credentials: Who this client is.
        incarnations: Random number of each peer's process, 0 if unknown; may change.
        may_enter: Says whether a peer (rank, incarnation) that has proven itself is still expected.
        on_admitted: Called with the peer's rank and the proven connection.
        strangers: How many unproven connections there may be.
        timeout: Seconds that each of them has.
    """

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket,
        credentials: Credentials,
        incarnations: Mapping[int, int],
        *,
        may_enter: Callable[[int, int], bool],
        on_admitted: Callable[[int, socket.socket], None],
        strangers: int = STRANGERS,
        timeout: float = HANDSHAKE_TIMEOUT,
    ) -> None:
        self.refusals: dict[int, str] = {}
        self._engine = engine
        self._listener = listener
        self._credentials = credentials
        self._incarnations = dict(incarnations)
        self._may_enter = may_enter
        self._on_admitted = on_admitted
        self._limit = strangers
        self._timeout = timeout
        self._strangers: dict[_Stranger, None] = {}  # in the order of their coming
        self._warned = 0
        self._closed = False

    def begin(self) -> None:
        """Begins to accept."""
        if not self._closed:
            self._listener.setblocking(False)
            self._engine.watch(self._listener, selectors.EVENT_READ, self._on_connections)

    def expect(self, incarnations: Mapping[int, int]) -> None:
        """Says which processes the peers are from now on."""
        self._incarnations.clear()
        self._incarnations.update(incarnations)  # in place: handshakes under way look at it, too
        self.refusals.clear()
        self._warned = 0

    def close(self) -> None:
        """Closes the listener and all connections that have not been let in."""
        if self._closed:
            return
        self._closed = True
        self._engine.watch(self._listener, 0, self._on_connections)
        self._listener.close()
        for stranger in tuple(self._strangers):
            stranger.close()

    def _on_connections(self, _: int) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of files or memory: to try again at once would only burn time.
                self.warn(f"cannot accept a connection: {error.strerror or error}")
                self._engine.watch(self._listener, 0, self._on_connections)
                self._engine.after(_PAUSE, self.begin)
                return
            if len(self._strangers) >= self._limit:
                oldest = next(iter(self._strangers))
                if time.monotonic() - oldest.began < _YOUNG:
                    sock.close()  # all have just come: a whole cluster may be connecting at once
                    continue
                oldest.close()
            sock.setblocking(False)
            acceptor = Acceptor(self._credentials, self._incarnations)
            self._strangers[_Stranger(self, self._engine, sock, acceptor, self._timeout)] = None

    def forget(self, stranger: _Stranger) -> None:
        """A connection is not in its handshake any more."""
        self._strangers.pop(stranger, None)

    def may_enter(self, peer: int, incarnation: int) -> bool:
        """Says whether a peer is expected."""
        return self._may_enter(peer, incarnation)

    def admit(self, peer: int, sock: socket.socket) -> None:
        """A peer has proven itself."""
        self._on_admitted(peer, sock)

    def refused(self, error: Refused, claimed: int | None) -> None:
        """Takes note of a refusal."""
        if error.status is Status.NOT_YET:
            return  # nothing is wrong, it will try again
        # Only ranks that exist: what strangers claim must not fill memory.
        if claimed is not None and claimed in self._incarnations:
            self.refusals[claimed] = str(error)
        self.warn(str(error))

    def warn(self, message: str) -> None:
        """Logs what strangers cause, but does not let them fill the log."""
        self._warned += 1
        if self._warned <= _WARNINGS:
            last = "; more of this kind is not reported" if self._warned == _WARNINGS else ""
            logger.warning("rank %d: %s%s", self._credentials.rank, message, last)


class _Stranger:
    """A connection in its handshake."""

    def __init__(
        self, admission: Admission, engine: Engine, sock: socket.socket, handshake: Acceptor, timeout: float
    ) -> None:
        self.began = time.monotonic()
        self._admission = admission
        self._engine = engine
        self._socket = sock
        self._handshake = handshake
        self._leftovers = _LEFTOVERS
        self._timer: Timer = engine.after(timeout, self.close)
        engine.watch(sock, selectors.EVENT_READ, self._on_readable)

    def close(self) -> None:
        """Closes the connection."""
        self._release()
        self._socket.close()

    def _release(self) -> None:
        self._timer.cancel()
        self._admission.forget(self)
        self._engine.watch(self._socket, 0, self._on_readable)

    def _on_readable(self, _: int) -> None:
        handshake = self._handshake
        try:
            data = self._socket.recv(handshake.wanted)
            if not data:
                self.close()
                return
            answer = handshake.feed(data)
            peer = handshake.peer
            if (
                handshake.done
                and peer is not None
                and not self._admission.may_enter(peer, handshake.incarnation)
            ):
                raise handshake.refuse_connected()
            if answer and self._socket.send(answer) != len(answer):
                self.close()
            elif handshake.done:
                assert peer is not None
                self._release()
                self._admission.admit(peer, self._socket)
        except (BlockingIOError, InterruptedError):
            return
        except Refused as error:
            self._admission.refused(error, handshake.peer)
            self._answer_and_close(error.answer)
        except OSError:
            self.close()

    def _answer_and_close(self, answer: bytes) -> None:
        try:
            self._socket.send(answer)
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        # With unread bytes a close would be a reset, which could overtake the answer: read them first.
        self._engine.watch(self._socket, selectors.EVENT_READ, self._on_leftovers)

    def _on_leftovers(self, _: int) -> None:
        try:
            count = len(self._socket.recv(4096))
            self._leftovers -= count
            if count and self._leftovers > 0:
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self.close()
