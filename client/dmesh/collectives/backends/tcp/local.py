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

import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dmesh.collectives.backends.tcp.channel import Send
from dmesh.collectives.backends.tcp.frames import Frame, Kind
from dmesh.collectives.backends.tcp.message_queue import UNEXPECTED_LIMIT, MessageQueue
from dmesh.collectives.backends.tcp.transport import Channel, OnDialed, Peer, Transport, TransportListener
from dmesh.errors import CollectiveError


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A frame on its way from one rank to another."""

    source: int
    """Incarnation of the sender."""
    frame: Frame
    payload: bytes = b""
    lost: str | None = None


class LocalNetwork:
    """Connects the ranks of one process.

    Args:
        size: Number of ranks.
        unexpected_limit: Bytes that a rank buffers for each peer before a receive is posted.
        wired: Whether groups can have dedicated connections.
    """

    def __init__(self, size: int, unexpected_limit: int = UNEXPECTED_LIMIT, *, wired: bool = False) -> None:
        self.size = size
        self.wired = wired
        self._unexpected_limit = unexpected_limit
        self._transports = [LocalTransport(self, rank, 1, unexpected_limit) for rank in range(size)]
        self._held: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

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
        with self._lock:
            self._held.add((source, destination))

    def release(self, source: int, destination: int) -> None:
        """Deliver the held frames, in order, and those that follow."""
        with self._lock:
            self._held.discard((source, destination))
        self._transports[destination].wake()

    def held(self, source: int, destination: int) -> int:
        """Return the number of frames on their way from one rank to another."""
        return self._transports[destination].waiting_from(source)

    def kill(self, rank: int, reason: str = "its connection was closed without a goodbye") -> None:
        """End a rank as kill -9 would: the others lose it, and everything it does from now on fails."""
        victim = self._transports[rank]
        victim.die(CollectiveError(f"rank {rank} was killed by LocalNetwork.kill"))
        for other in self._transports:
            if other is not victim:
                with self._lock:
                    was_held = (rank, other.rank) in self._held
                    self._held.discard((rank, other.rank))
                delivery = _Delivery(victim.incarnation, Frame(Kind.GOODBYE), lost=reason)
                other.put(rank, delivery, forget=was_held)

    def replace(self, rank: int) -> LocalTransport:
        """Put another process in the place of a killed rank; return its transport, to be started.

        The others accept it by `renew`. Until then neither side gets the other's frames.
        """
        former = self._transports[rank]
        self._transports[rank] = LocalTransport(self, rank, former.incarnation + 1, self._unexpected_limit)
        return self._transports[rank]

    def is_held(self, source: int, destination: int) -> bool:
        """Return True between `hold` and `release`."""
        with self._lock:
            return (source, destination) in self._held


class LocalConnector:
    """Dedicated connections of one rank: pairs of sockets; see `Connector`."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank
        self._numbers = itertools.count(1)
        self._expected: dict[int, int] = {}
        self._arrived: dict[int, socket.socket] = {}

    def expect(self, peer: int) -> int:
        """Let a peer dial once."""
        number = next(self._numbers)
        self._expected[number] = peer
        return number

    def claim(self, number: int) -> socket.socket | None:
        """Return the connection that has come under a number."""
        self._expected.pop(number, None)
        return self._arrived.pop(number, None)

    def dial(self, peer: int, number: int, on_dialed: OnDialed) -> None:
        """Connect to a peer."""
        theirs = self._network.transport(peer).connector
        if theirs is None or theirs._expected.get(number) != self._rank:
            on_dialed(None, "it does not expect that")
            return
        near, far = socket.socketpair()
        theirs._arrived[number] = far
        on_dialed(near, "")


class LocalTransport(Transport):
    """One rank's end of a `LocalNetwork`, which makes it."""

    def __init__(self, network: LocalNetwork, rank: int, incarnation: int, unexpected_limit: int) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.message_queue = MessageQueue(rank, self, unexpected_limit)
        self.connector: LocalConnector | None = LocalConnector(network, rank) if network.wired else None
        self._network = network
        self._incoming: dict[int, deque[_Delivery]] = {}
        self._stalled: set[int] = set()
        self._known: dict[int, int] = {}
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self, listener: TransportListener, peers: Sequence[Peer], generation: int = 0) -> None:
        """Begin to deliver; see `Transport.start`."""
        if self._thread is not None:
            raise CollectiveError(f"the transport of rank {self.rank} is started already")
        self.message_queue.attach(listener, peers, generation)
        self._known = {peer.rank: peer.incarnation for peer in peers}
        self._thread = threading.Thread(
            target=self._deliver_all, name=f"dmesh-local-{self.rank}", daemon=True
        )
        self._thread.start()

    def open(self, group: int, sequence: int, signature: bytes, generation: int = 0) -> Channel:
        """Open a channel; see `Transport.open`."""
        return self.message_queue.open(group, sequence, signature, generation)

    def renew(self, peers: Sequence[Peer], generation: int, switch: Callable[[], None]) -> None:
        """Begin a new generation; see `Transport.renew`."""
        done = threading.Event()

        def job() -> None:
            known = {peer.rank: peer.incarnation for peer in peers}
            replaced = {rank for rank, incarnation in known.items() if incarnation != self._known[rank]}
            with self._changed:
                self._known = known
                self._stalled -= replaced
                for rank in replaced:
                    incoming = self._incoming.get(rank, deque())
                    self._incoming[rank] = deque(item for item in incoming if item.source >= known[rank])
            self.message_queue.renew(peers, replaced, generation)
            switch()
            done.set()

        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        while not done.wait(0.1):
            if self._ended:
                raise CollectiveError(f"the transport of rank {self.rank} is closed")

    def control(self, peer: int, message: bytes) -> None:
        """Send a control message; see `Transport.control`."""
        self.message_queue.check_control(peer, message)
        self._put(peer, Frame(Kind.CONTROL, length=len(message)), bytes(message))

    def close(self, linger: float) -> None:
        """Say goodbye and stop; see `Transport.close`. There is nothing to linger for."""
        if not self._ended:
            for peer in range(self._network.size):
                if peer != self.rank:
                    self._put(peer, Frame(Kind.GOODBYE))
        self.die(CollectiveError(f"the transport of rank {self.rank} is closed"))
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # -- the message queue's sender ------------------------------------------------------------------

    def transmit(self, peer: int, frame: Frame, send: Send | None) -> None:
        """Put a frame on its way; see `FrameSender.transmit`."""
        if send is None:
            self._put(peer, frame)
            return
        with self._changed:
            if send.withdrawn:
                return
            payload = bytes(send.data)
        self._put(peer, frame, payload)
        self.message_queue.sent(send)

    def withdraw(self, send: Send) -> bool:
        """Stop using a send's memory; see `FrameSender.withdraw`."""
        with self._changed:
            send.withdrawn = True
        return send.done

    def resume(self, peer: int) -> None:
        """Deliver a peer's frames again; see `FrameSender.resume`."""
        with self._changed:
            self._stalled.discard(peer)
            self._changed.notify_all()

    # -- the network's side --------------------------------------------------------------------------

    def put(self, source: int, delivery: _Delivery, forget: bool = False) -> None:
        """Take a frame that is on its way here; with `forget`, drop the earlier ones of its sender."""
        with self._changed:
            if self._ended:
                return
            incoming = self._incoming.setdefault(source, deque())
            if forget:
                incoming.clear()
            incoming.append(delivery)
            self._changed.notify_all()

    def wake(self) -> None:
        """Look again for frames that can be delivered."""
        with self._changed:
            self._changed.notify_all()

    def waiting_from(self, source: int) -> int:
        """Return the number of a rank's frames that wait to be delivered here."""
        with self._changed:
            return len(self._incoming.get(source, ()))

    def die(self, error: CollectiveError) -> None:
        """Stop at once, without a goodbye."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self.message_queue.shut(error)

    def _put(self, peer: int, frame: Frame, payload: bytes = b"") -> None:
        if self._ended:
            return
        transport = self._network.transport(peer)
        if transport.incarnation == self._known.get(peer):  # or it is for a process that is no more
            transport.put(self.rank, _Delivery(self.incarnation, frame, payload))

    def _next(self) -> tuple[int, _Delivery] | Callable[[], None] | None:
        """Wait for a deliverable frame, and leave it where it is, or for a job; return None at the end."""
        with self._changed:
            while not self._ended:
                if self._jobs:
                    return self._jobs.popleft()
                for source, incoming in self._incoming.items():
                    if (
                        incoming
                        and source not in self._stalled
                        and not self._network.is_held(source, self.rank)
                        and incoming[0].source <= self._known[source]
                    ):
                        # To the end of the order, so that no sender starves the others.
                        self._incoming[source] = self._incoming.pop(source)
                        return source, incoming[0]
                self._changed.wait()
        return None

    def _deliver_all(self) -> None:
        while (found := self._next()) is not None:
            if callable(found):
                found()
                continue
            source, delivery = found
            if self._deliver(source, delivery):
                with self._changed:
                    incoming = self._incoming[source]
                    if incoming and incoming[0] is delivery:
                        incoming.popleft()

    def _deliver(self, source: int, delivery: _Delivery) -> bool:
        """Pass a frame to the message queue; return False if it has no room and the sender must wait."""
        frame, message_queue = delivery.frame, self.message_queue
        if message_queue.gone(source) or delivery.source != self._known[source]:
            return True
        if frame.kind is Kind.GOODBYE:
            message_queue.depart(source, delivery.lost)
            return True
        if frame.kind is Kind.CONTROL:
            message_queue.accept_control(source, delivery.payload)
            return True
        # Stalled before the queue is asked: its `resume` may come before its refusal has been seen here.
        with self._changed:
            self._stalled.add(source)
        if frame.kind in (Kind.OFFER, Kind.READY, Kind.CANCEL):
            taken = message_queue.accept_header(source, frame)
        else:
            destination = message_queue.accept_payload(source, frame)
            taken = destination is not None
            if destination is not None:
                with destination.guard:
                    view = destination.view
                    if view is not None:
                        view[:] = delivery.payload
                message_queue.payload_received(destination)
        if taken:
            self.resume(source)
        return taken
