"""Network inside one process, for tests: the ranks are threads, and the test controls every delivery.

It has the semantics of the TCP transport, because the same message queue matches the frames: unexpected
messages, mismatches, bounded memory, goodbyes and deaths. In addition a test can hold the frames between two
ranks and kill a rank, which gives it at will the orders that a real network shows once in a million runs.

```python
network = LocalNetwork(2)
for rank in range(2):
    network.transport(rank).start(listeners[rank], network.peers(rank))
network.hold(0, 1)      # frames of rank 0 do not reach rank 1 ...
network.release(0, 1)   # ... until now
network.kill(0)         # rank 1's listener is called: rank 0 is lost
network.replace(0)      # a new process takes the place of rank 0 ...
network.transport(1).renew(network.peers(1), 1, lambda: None)  # ... and rank 1 goes on with it
```
"""

from __future__ import annotations

import functools
import queue
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dmesh._locks import Lock
from dmesh.collectives.backends.tcp.channel import Peer, Send
from dmesh.collectives.backends.tcp.connection import Connector, OnDialed
from dmesh.collectives.backends.tcp.frames import Frame, Kind
from dmesh.collectives.backends.tcp.message_queue import UNEXPECTED_LIMIT, MessageQueue, TransportListener
from dmesh.collectives.backends.tcp.routes import Route
from dmesh.collectives.backends.tcp.tls import Stream
from dmesh.collectives.backends.tcp.transport import Transport
from dmesh.coordination.waiting import Worker, carry_out
from dmesh.errors import CollectiveError


class _Delivery(NamedTuple):
    """A frame on its way from one rank to another."""

    incarnation: int  # of the sender
    frame: Frame
    payload: bytes = b""
    lost: str | None = None  # reason of a GOODBYE that stands for the sender's death


class LocalNetwork:
    """Connects the ranks of one process.

    Args:
        size: Number of ranks.
        unexpected_limit: Bytes that a rank buffers for each peer before a receive is posted.
        dedicated: Whether groups can have dedicated connections.
        make_pair: Makes the two ends of one of them.
    """

    def __init__(
        self,
        size: int,
        unexpected_limit: int = UNEXPECTED_LIMIT,
        *,
        dedicated: bool = False,
        make_pair: Callable[[], tuple[Stream, Stream]] = socket.socketpair,
    ) -> None:
        self.size = size
        self.holding: set[tuple[int, int]] = set()  # (source, destination)
        self.unexpected_limit = unexpected_limit
        self.dedicated = dedicated
        self.make_pair = make_pair
        self._transports = [LocalTransport(self, rank, 1) for rank in range(size)]

    def transport(self, rank: int) -> LocalTransport:
        """Return the transport of a rank."""
        return self._transports[rank]

    def peers(self, rank: int) -> tuple[Peer, ...]:
        """Return the peers to give to `start` of that rank's transport."""
        return tuple(
            Peer(
                other,
                (f"local:{other + 1}",),
                self._transports[other].incarnation,
                f"/job:worker/task:{other} (thread of this process)",
            )
            for other in range(self.size)
            if other != rank
        )

    def hold(self, source: int, destination: int) -> None:
        """Hold all frames of `source` to `destination` until `release`."""
        self.holding.add((source, destination))

    def release(self, source: int, destination: int) -> None:
        """Deliver the held frames, in order, and those that follow."""
        self.holding.discard((source, destination))
        self._transports[destination].resume(source)

    def held(self, source: int, destination: int) -> int:
        """Return the number of frames on their way from one rank to another."""
        return len(self._transports[destination].incoming[source])

    def kill(self, rank: int, reason: str = "its connection was closed without a goodbye") -> None:
        """End a rank as kill -9 would: the others lose it, and everything it does from now on fails."""
        victim = self._transports[rank]
        victim.die(CollectiveError(f"rank {rank} was killed by LocalNetwork.kill"))
        for other in self._transports:
            if other is not victim:
                was_held = (rank, other.rank) in self.holding
                self.holding.discard((rank, other.rank))
                delivery = _Delivery(victim.incarnation, Frame(Kind.GOODBYE), lost=reason)
                other.put(rank, delivery, forget=was_held)

    def replace(self, rank: int) -> LocalTransport:
        """Put another process in the place of a killed rank; return its transport, to be started.

        The others accept it by `renew`. Until then neither side gets the other's frames.
        """
        self._transports[rank] = LocalTransport(self, rank, self._transports[rank].incarnation + 1)
        return self._transports[rank]


class LocalConnector(Connector):
    """Dedicated connections of one rank: pairs of sockets; see `Connector`."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        super().__init__(call=lambda action: action())
        self._network = network
        self._rank = rank

    def _dial(self, peer: int, number: int, on_dialed: OnDialed, route: Route | None) -> None:
        theirs = self._network.transport(peer).connector
        if theirs is None or not theirs.is_expected(self._rank, number):
            on_dialed(None, "it does not expect that")
            return
        near, far = self._network.make_pair()
        theirs.admit(number, far)
        on_dialed(near, "")


class LocalTransport(Transport):
    """One rank's end of a `LocalNetwork`, which makes it. Its thread delivers what the others send."""

    def __init__(self, network: LocalNetwork, rank: int, incarnation: int) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.message_queue = MessageQueue(rank, self, network.unexpected_limit)
        self.connector: LocalConnector | None = LocalConnector(network, rank) if network.dedicated else None
        self.incoming: list[deque[_Delivery]] = [deque() for _ in range(network.size)]  # by source
        self._network = network
        self._known: dict[int, int] = {}
        self._lock = Lock()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._ended = False
        self._worker: Worker | None = None

    def start(self, listener: TransportListener, peers: Sequence[Peer], generation: int = 0) -> None:
        """Begin to deliver; see `Transport.start`."""
        if self._worker is not None:
            raise CollectiveError(f"the transport of rank {self.rank} is started already")
        self.message_queue.attach(listener, peers, generation)
        self._known = {peer.rank: peer.incarnation for peer in peers}
        self._worker = Worker(self._run, f"dmesh-local-{self.rank}")
        self._worker.start()

    def renew(self, peers: Sequence[Peer], generation: int, switch: Callable[[], None]) -> None:
        """Begin a new generation; see `Transport.renew`."""

        def job() -> None:
            former, self._known = self._known, {peer.rank: peer.incarnation for peer in peers}
            replaced = {rank for rank, incarnation in self._known.items() if incarnation != former[rank]}
            self.message_queue.renew(peers, replaced, generation)
            switch()
            for rank in self._known:
                self.resume(rank)

        carry_out(job, self._jobs.put, self._check_open)

    def close(self, linger: float) -> None:
        """Say goodbye and stop; see `Transport.close`. There is nothing to linger for."""
        for peer in range(self._network.size):
            if peer != self.rank:
                self._put(peer, Frame(Kind.GOODBYE))
        self.die(CollectiveError(f"the transport of rank {self.rank} is closed"))
        if self._worker is not None:
            self._worker.join(30.0)

    # -- the message queue's sender ------------------------------------------------------------------

    def transmit(self, peer: int, frame: Frame, send: Send | None, payload: bytes | None = None) -> None:
        """Put a frame on its way; see `FrameSender.transmit`."""
        if send is None:
            self._put(peer, frame, payload or b"")
            return
        with self._lock:
            if send.withdrawn:
                return
            payload = bytes(send.data)
        self._put(peer, frame, payload)
        send.channel.sent(send)

    def withdraw(self, send: Send) -> bool:
        """Stop using a send's memory; see `FrameSender.withdraw`."""
        with self._lock:
            send.withdrawn = True
        return send.done

    def resume(self, peer: int) -> None:
        """Deliver a peer's frames again; see `FrameSender.resume`."""
        self._jobs.put(functools.partial(self._deliver, peer))

    # -- the network's side --------------------------------------------------------------------------

    def put(self, source: int, delivery: _Delivery, *, forget: bool = False) -> None:
        """Take a frame that is on its way here; with `forget`, drop the earlier ones of its sender."""
        with self._lock:
            if self._ended:
                return
            if forget:
                self.incoming[source].clear()
            self.incoming[source].append(delivery)
        self.resume(source)

    def die(self, error: CollectiveError) -> None:
        """Stop at once, without a goodbye."""
        self._ended = True
        self._jobs.put(lambda: None)
        self.message_queue.shut(error)

    def _check_open(self) -> None:
        if self._ended:
            raise CollectiveError(f"the transport of rank {self.rank} is closed")

    def _put(self, peer: int, frame: Frame, payload: bytes = b"") -> None:
        if self._ended:
            return
        transport = self._network.transport(peer)
        if transport.incarnation == self._known.get(peer):  # or it is for a process that is no more
            transport.put(self.rank, _Delivery(self.incarnation, frame, payload))

    def _run(self) -> None:
        while not self._ended:
            self._jobs.get()()

    def _deliver(self, source: int) -> None:
        """Deliver the frames of a rank, in order, up to one that must wait."""
        incoming = self.incoming[source]
        for _ in range(len(incoming)):  # those that come meanwhile have a job of their own
            if self._ended or not incoming or (source, self.rank) in self._network.holding:
                return
            delivery = incoming[0]
            if not self._take(source, delivery):
                return
            with self._lock:
                if incoming and incoming[0] is delivery:
                    incoming.popleft()

    def _take(self, source: int, delivery: _Delivery) -> bool:
        """Pass a frame to the message queue; return False if there is no room yet, or for a later `renew`."""
        frame, message_queue = delivery.frame, self.message_queue
        if delivery.incarnation > self._known[source]:
            return False
        if message_queue.gone(source) or delivery.incarnation < self._known[source]:
            return True
        if frame.kind is Kind.GOODBYE:
            message_queue.depart(source, delivery.lost)
            return True
        destination = message_queue.accept(source, frame)
        if destination is None:
            return False
        with destination.guard:
            if (view := destination.view) is not None:
                view[:] = delivery.payload
        destination.complete()
        return True
