"""Message transport over TCP, between processes and hosts.

One thread (`EventLoop`) owns all sockets. A connection carries frames one way: a client that has something to
send dials the peer, at the first need, and both keep the connection. When a process dies, its kernel closes
all its connections, and the first that ends tells its peers within milliseconds; a process that leaves says
goodbye on each first.

```
caller's thread: Channel -> PeerConnections -> Connection -> socket   (writes at once what the socket takes)
loop's thread:   socket -> FrameReader -> MessageQueue -> posted memory   (and the rest of the writing)
                 listener -> Admission -> Connection;   Dial -> Connection
```

With TLS, a `SecureSocket` takes the place of each socket (`tls`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from dmesh._log import announce
from dmesh.collectives.backends.tcp.admission import Admission
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.connecting import Dial, TcpConnector, TcpOptions
from dmesh.collectives.backends.tcp.connection import Connection, PeerConnections
from dmesh.collectives.backends.tcp.event_loop import EventLoop
from dmesh.collectives.backends.tcp.frames import Frame
from dmesh.collectives.backends.tcp.handshake import ABOUT_TLS, Credentials, Refused
from dmesh.collectives.backends.tcp.message_queue import TransportListener
from dmesh.collectives.backends.tcp.routes import LocalAddress
from dmesh.collectives.backends.tcp.sockets import bound_flight
from dmesh.collectives.backends.tcp.tls import PeerTls, Stream
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.coordination.waiting import Bell, carry_out
from dmesh.errors import CollectiveError, InitializationTimeoutError, PeerAuthenticationError, PeerLostError

_SILENCE_CHECKS = 8
_TLS_MISMATCH_DELAY = 1.0
"""Seconds that a client goes on listening after a peer disagreed with it about TLS, before it fails: the peer
dials it in that time and gets the same explanation, instead of a refused connection."""


class TcpTransport(Transport):
    """Moves bytes between processes over TCP.

    The `listener` is bound and listening at one of the addresses that the peers know; `close` closes it. All
    clients share the `secret` and the `cluster_id`, which names this run of the cluster, and all or none have
    `tls`. The `incarnation` is the random number of this process, as the peers know it; 0 if there is none.
    `addresses` are those of this host's interfaces at which it listens for dedicated connections.
    """

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        secret: Callable[[], bytes],
        cluster_id: bytes,
        incarnation: int = 0,
        options: TcpOptions | None = None,
        tls: PeerTls | None = None,
        addresses: Sequence[LocalAddress] = (),
    ) -> None:
        self.rank = rank
        self.options = options = options or TcpOptions()
        self._loop = loop = EventLoop(f"dmesh-tcp-{rank}", self._on_crash, self._on_end)
        self._connections = connections = PeerConnections(
            rank, options.unexpected_limit, loop, self._dial, self._on_goodbye, self._on_ended
        )
        self.message_queue = connections.message_queue
        generation = lambda: self.message_queue.generation  # noqa: E731
        self._credentials = Credentials(rank, incarnation, cluster_id, secret, generation)
        self._tls = tls
        others = [address.listener for address in addresses if address.listener is not None]
        self._listeners = (listener, *others)
        self._admission: Admission | None = None
        self._dials: dict[int, Dial] = {}
        self._refused: dict[int, Refused] = {}
        self._changed = Bell()  # rings when a connection comes or goes
        peer_of = self.message_queue.peer
        self.connector: TcpConnector = TcpConnector(loop, self._credentials, peer_of, options, tls, addresses)

    # -- the transport's users; any thread -----------------------------------------------------------

    def start(self, listener: TransportListener, peers: Sequence[Peer], generation: int = 0) -> None:
        """Begin to accept and deliver; see `Transport.start`. This client itself may be among the peers."""
        if self._admission is not None or self._connections.closing:
            raise CollectiveError(f"the transport of rank {self.rank} has been started or closed already")
        others = [peer for peer in peers if peer.rank != self.rank]
        self.message_queue.attach(listener, others, generation)
        self._admission = Admission(
            self._loop,
            self._listeners,
            self._credentials,
            {peer.rank: peer.incarnation for peer in others},
            self.options,
            self._tls,
            may_enter=self._may_enter,
            on_admitted=self._on_admitted,
            on_tls_mismatch=self._on_tls_mismatch,
        )
        self._loop.call(self._admission.begin)
        self._loop.call(self._check_silence)
        self._loop.start()

    def connect_all(
        self, timeout: float, report: Callable[[str], None] = announce, report_every: float = 10.0
    ) -> None:
        """Connect to every peer, and wait until that is done; see `Transport.connect_all`.

        Every so many seconds `report` is called with a line that names the missing ranks.
        """
        connections = {rank: self._connections.to(rank) for rank in self.message_queue.peers}
        self._loop.call(lambda: self._extend_dials(timeout))
        clients = len(connections) + 1
        began = reported = time.monotonic()

        def missing() -> list[int]:
            self._check_peers()
            return sorted(rank for rank, found in connections.items() if found is None or not found.is_open)

        while absent := missing():
            who = ", ".join(f"{self.message_queue.describe(rank)} [{self._problem(rank)}]" for rank in absent)
            now = time.monotonic()
            if now >= began + timeout:
                raise InitializationTimeoutError(
                    f"{len(absent)} of {clients} clients did not connect within {timeout:g} s: {who}. "
                    "Start them, or check that all clients have the same DTENSOR_JOBS and that this host "
                    "can reach their addresses."
                )
            if now >= reported + report_every:
                reported = now
                report(
                    f"rank {self.rank} has waited {now - began:.0f} s (of {timeout:g} s) for "
                    f"{len(absent)} of {clients} clients: {who}"
                )
            pause = max(0.0, min(began + timeout, reported + report_every) - now)
            self._changed.wait_for(lambda: not missing(), pause)

    def _check_peers(self) -> None:
        for rank in self.message_queue.peers:
            if (reason := self.message_queue.gone(rank)) is None:
                continue
            if (refused := self._refused.get(rank)) is not None:
                raise PeerAuthenticationError(f"rank {self.rank} cannot join: {refused}") from refused
            raise PeerLostError(f"{self.message_queue.describe(rank)} is gone: {reason}", rank)
        self._check_open()

    def watch(self, peer: int) -> None:
        """Dial a peer, if nothing has been sent to it yet; see `Transport.watch`."""
        self.message_queue.peer(peer)
        self._connections.to(peer)

    def renew(self, peers: Sequence[Peer], generation: int, switch: Callable[[], None]) -> None:
        """Begin a new generation; see `Transport.renew`.

        Once begun it completes, on the loop's thread; Ctrl-C only ends the wait for it.
        """
        if self._admission is None:
            raise CollectiveError(f"the transport of rank {self.rank} has not been started")
        others = [peer for peer in peers if peer.rank != self.rank]
        carry_out(lambda: self._renew(others, generation, switch), self._loop.call, self._check_open)

    def _check_open(self) -> None:
        if self._connections.closing:
            raise CollectiveError(f"the transport of rank {self.rank} is closed")

    def sends_to(self, peer: int) -> bool:
        """Return whether this client has a connection to `peer`; see `Transport.sends_to`."""
        connection = self._connections.dialed.get(peer)
        return connection is not None and connection.is_open

    def hears_from(self, peer: int) -> bool:
        """Return whether there is a connection with `peer`; see `Transport.hears_from`."""
        accepted = self._connections.accepted.get(peer)
        return self.sends_to(peer) or (accepted is not None and accepted.is_open)

    def close(self, linger: float) -> None:
        """Say goodbye and stop; see `Transport.close`."""
        first = self._connections.close()
        self.message_queue.shut(CollectiveError(f"the transport of rank {self.rank} is closed"))
        self._changed.ring()
        if self._admission is None:
            for listener in self._listeners:
                listener.close()
        elif first:
            self._loop.call(lambda: self._leave(linger))
        # A margin for a busy machine; the loop itself keeps to the limit.
        self._loop.join(linger + 30.0)

    # -- connections; the loop's thread --------------------------------------------------------------

    def _renew(self, peers: Sequence[Peer], generation: int, switch: Callable[[], None]) -> None:
        former = self.message_queue.peers
        replaced = {peer.rank for peer in peers if peer.incarnation != former[peer.rank].incarnation}
        self._connections.drop(replaced)
        for rank in replaced:
            self._cancel_dial(rank)
            self._refused.pop(rank, None)
        if self._admission is not None:
            self._admission.expect({peer.rank: peer.incarnation for peer in peers})
        # From here on peers of the new generation are let in, and its channels can be opened.
        self.message_queue.renew(peers, replaced, generation)
        switch()

    def _is_current(self, connection: Connection) -> bool:
        """Return False for a connection with a former process of the peer."""
        return connection in (
            self._connections.dialed.get(connection.peer),
            self._connections.accepted.get(connection.peer),
        )

    def _dial(self, connection: Connection) -> None:
        peer = connection.peer
        if connection.ended or not self._is_current(connection) or self.message_queue.gone(peer):
            return
        dial = self._dials[peer] = Dial(
            self._loop,
            self._credentials,
            self.message_queue.peer(peer),
            self.options,
            lambda sock, problem, refused: self._on_dialed(connection, sock, problem, refused),
            tls=self._tls,
        )
        dial.begin()

    def _cancel_dial(self, peer: int) -> None:
        if (dial := self._dials.pop(peer, None)) is not None:
            dial.cancel()

    def _extend_dials(self, seconds: float) -> None:
        for dial in self._dials.values():
            dial.extend(seconds)

    def _check_silence(self) -> None:
        """Look for hosts that do not answer any more, a few times within the limit."""
        silence = self.options.silence
        for dial in tuple(self._dials.values()):
            dial.check()
        for connection in self._connections:
            connection.check(silence)
        self._loop.after(silence / _SILENCE_CHECKS, self._check_silence)

    def _on_dialed(
        self, connection: Connection, sock: Stream | None, problem: str, refused: Refused | None
    ) -> None:
        self._dials.pop(connection.peer, None)
        if sock is not None:
            connection.adopt(sock)
            self._changed.ring()
            return
        connection.drop()
        if refused is not None:
            self._refused[connection.peer] = refused
        if refused is not None and refused.status in ABOUT_TLS:
            self._loop.after(_TLS_MISMATCH_DELAY, lambda: self._depart(connection, problem))
        else:
            self._depart(connection, problem)

    def _may_enter(self, peer: int, incarnation: int, number: int) -> bool:
        # The peer may have been replaced since it said who it is.
        known = self.message_queue.peers[peer].incarnation
        if self._connections.closing or (known and incarnation != known) or self.message_queue.gone(peer):
            return False
        if number:
            return self.connector.is_expected(peer, number)
        return peer not in self._connections.accepted

    def _on_admitted(self, peer: int, number: int, sock: Stream) -> None:
        if number:
            bound_flight(sock)
            self.connector.admit(number, sock)
            return
        self._connections.accept(peer, sock)

    def _on_tls_mismatch(self, peer: int) -> None:
        # A thread that waits for that peer would wait in vain. If it is true, our own connection shows it.
        if (dial := self._dials.get(peer)) is not None:
            dial.hurry()
        else:
            self._connections.to(peer)

    def _on_goodbye(self, connection: Connection, frame: Frame) -> None:
        accepted = self._connections.accepted.get(connection.peer)
        if not connection.dialed or (accepted is not None and accepted.ended):
            self._depart(connection, None)
        elif accepted is None:
            # Its own connection to us, with its last frames, may still be on its way.
            grace = self.options.grace if frame.sequence else 0.0
            self._loop.after(grace, lambda: self._depart_unless_accepted(connection))

    def _on_ended(self, connection: Connection, reason: str) -> None:
        """Deal with the end of a connection, with or without a goodbye before."""
        if self._connections.closing:
            self._stop_if_alone()
            return
        if not connection.dialed:
            self._depart(connection, reason)
        elif not connection.goodbye:
            # A dying process loses all its connections at once, but its last frames may be in the other one.
            accepted = self._connections.accepted.get(connection.peer)
            delay = 0.0 if accepted is None or accepted.ended else self.options.grace
            self._loop.after(delay, lambda: self._depart(connection, reason))

    def _depart_unless_accepted(self, connection: Connection) -> None:
        if connection.peer not in self._connections.accepted:
            self._depart(connection, None)

    def _depart(self, connection: Connection, reason: str | None) -> None:
        """Drop and report a peer that is lost for a reason, or has left (None), as a connection shows."""
        peer = connection.peer
        if self._connections.closing:
            self._stop_if_alone()
            return
        if not self._is_current(connection) or self.message_queue.gone(peer):
            return
        self._cancel_dial(peer)
        for connections in (self._connections.dialed, self._connections.accepted):
            if (other := connections.get(peer)) is not None:
                other.drop()
        self.message_queue.depart(peer, reason)
        self._changed.ring()

    # -- the end; the loop's thread ------------------------------------------------------------------

    def _leave(self, linger: float) -> None:
        self._close_doors()
        for peer, dial in tuple(self._dials.items()):
            if self._connections.dialed[peer].idle:
                dial.cancel()
                self._connections.dialed[peer].drop()
            else:  # a peer that cannot be reached now may be leaving, too: nothing will be heard of that
                dial.conclude()
        for connection in self._connections:
            if not connection.ended:
                dialed = None if connection.dialed else self._connections.dialed.get(connection.peer)
                connection.leave(other_follows=dialed is not None and not dialed.ended)
        self._loop.after(max(0.0, linger), self._loop.stop)
        self._stop_if_alone()

    def _close_doors(self) -> None:
        if self._admission is not None:
            self._admission.close()
        self.connector.close()

    def _stop_if_alone(self) -> None:
        if all(connection.ended for connection in self._connections):
            self._loop.stop()

    def _on_crash(self, error: Exception) -> None:
        self._connections.close()
        self.message_queue.shut(
            CollectiveError(f"the transport of rank {self.rank} failed, please report this: {error!r}")
        )

    def _on_end(self) -> None:
        self._connections.close()
        self._close_doors()
        for dial in self._dials.values():
            dial.cancel()
        for connection in self._connections:
            connection.drop()
        self._changed.ring()

    def _problem(self, rank: int) -> str:
        """Return why there is no connection with a peer yet."""
        refusals = {} if self._admission is None else self._admission.refusals
        dial = self._dials.get(rank)
        return refusals.get(rank) or (dial.problem if dial is not None else "not tried yet")
