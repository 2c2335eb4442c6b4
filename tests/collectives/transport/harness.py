"""Clusters of transports inside one process, and what their tests share."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.faults.secured import Authority

from dmesh.collectives.backends.tcp.channel import Channel, Peer, Receive
from dmesh.collectives.backends.tcp.connecting import TcpOptions
from dmesh.collectives.backends.tcp.local import LocalNetwork, LocalTransport
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport
from dmesh.collectives.backends.tcp.tls import PeerTls
from dmesh.security.certificates import IdentityFiles
from dmesh.security.secure_socket import SecureSocket

LIMIT = 60.0
"""Seconds after which a test fails: far more than anything takes."""
SECRET = b"the cluster's secret"
CLUSTER = b"cluster 1"


class Recorder:
    """Listener that records its events."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.react: Callable[[tuple[object, ...]], None] = lambda event: None
        self._changed = threading.Condition()

    def on_control(self, peer: int, message: bytes) -> None:
        self._add("control", peer, message)

    def on_peer_lost(self, peer: int, reason: str) -> None:
        self._add("lost", peer, reason)

    def on_peer_left(self, peer: int) -> None:
        self._add("left", peer)

    def on_mismatch(self, group: int, sequence: int, peer: int, signature: bytes, generation: int) -> None:
        self._add("mismatch", group, sequence, peer, signature)

    def _add(self, *event: object) -> None:
        self.react(event)
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: str) -> list[tuple[object, ...]]:
        with self._changed:
            return [event for event in self.events if event[0] == kind]

    def wait_for(self, *start: object) -> tuple[object, ...]:
        """Wait for an event that begins like this."""

        def find() -> tuple[object, ...] | None:
            return next((event for event in self.events if event[: len(start)] == start), None)

        with self._changed:
            found = self._changed.wait_for(find, LIMIT)
            assert found is not None, f"{start} did not come, but {self.events}"
            return found


@dataclass
class Cluster:
    """Started transports, one for each rank."""

    transports: list[LocalTransport] | list[TcpTransport]
    listeners: list[Recorder]
    kill: Callable[[int], None]
    peers: tuple[Peer, ...] = ()
    network: LocalNetwork | None = None

    def open(self, rank: int, sequence: int = 1, signature: bytes = b"sum", group: int = 7) -> Channel:
        return self.transports[rank].message_queue.open(group, sequence, signature)

    def fence(self, source: int, destination: int) -> None:
        """Wait until everything that `source` has sent to `destination` is taken, but for large payloads."""
        message = f"fence {len(self.listeners[destination].events)}".encode()
        self.transports[source].control(destination, message)
        self.listeners[destination].wait_for("control", source, message)

    def buffered(self, rank: int, peer: int) -> int:
        return self.transports[rank].message_queue.buffered_bytes(peer)

    def close(self) -> None:
        together(*(lambda transport=transport: transport.close(5.0) for transport in self.transports))


def local_cluster(size: int, unexpected_limit: int | None = None) -> Cluster:
    network = LocalNetwork(size) if unexpected_limit is None else LocalNetwork(size, unexpected_limit)
    listeners = [Recorder() for _ in range(size)]
    for rank, listener in enumerate(listeners):
        network.transport(rank).start(listener, network.peers(rank))
    transports = [network.transport(rank) for rank in range(size)]
    return Cluster(transports, listeners, network.kill, network.peers(-1), network)


def tcp_peers(sockets: Sequence[socket.socket], incarnations: Sequence[int]) -> tuple[Peer, ...]:
    return tuple(
        Peer(rank, (f"127.0.0.1:{sock.getsockname()[1]}",), incarnation, f"/job:worker/task:{rank}")
        for rank, (sock, incarnation) in enumerate(zip(sockets, incarnations, strict=True))
    )


def tcp_listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


def tcp_cluster(
    size: int,
    unexpected_limit: int | None = None,
    options: TcpOptions | None = None,
    secrets: Sequence[bytes] = (),
    tls: Sequence[PeerTls | None] = (),
) -> Cluster:
    options = options or TcpOptions()
    if unexpected_limit is not None:
        options = replace(options, unexpected_limit=unexpected_limit)
    sockets = [tcp_listener() for _ in range(size)]
    incarnations = [100 + rank for rank in range(size)]
    peers = tcp_peers(sockets, incarnations)
    listeners = [Recorder() for _ in range(size)]
    keys = list(secrets) or [SECRET] * size
    transports = [
        TcpTransport(
            rank,
            sockets[rank],
            lambda key=keys[rank]: key,
            CLUSTER,
            incarnations[rank],
            options,
            tls[rank] if tls else None,
        )
        for rank in range(size)
    ]
    for transport, listener in zip(transports, listeners, strict=True):
        transport.start(listener, peers)

    def kill(rank: int) -> None:
        # Ends the thread that owns the sockets without a goodbye, as the end of its process would.
        transports[rank]._loop.stop()

    return Cluster(transports, listeners, kill, peers)


def tls_cluster(size: int, *args: Any, **kwargs: Any) -> Cluster:
    """Make an encrypted `tcp_cluster`; every client has a certificate of its own."""
    certificates = [PeerTls(IdentityFiles(*authority().issue(f"peer-{rank}")), authority().path)
                    for rank in range(size)]  # fmt: skip
    return tcp_cluster(size, *args, tls=certificates, **kwargs)


@functools.cache
def authority() -> Authority:
    """Return the authority of all certificates in this process; its files go when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="dmesh-peers-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Authority(directory)


def secure_pair() -> tuple[SecureSocket, SecureSocket]:
    """Make the two ends of an encrypted connection, both of which have shown a certificate."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    with _CERTIFIED:
        tls = _certificates()
        pair = tls.dial(ends[0], 0), tls.accept(ends[1])
    while not all(end.established for end in pair):
        for end in pair:
            with contextlib.suppress(BlockingIOError):
                end.handshake()
    return pair


_CERTIFIED = threading.Lock()


@functools.cache
def _certificates() -> PeerTls:
    return PeerTls(IdentityFiles(*authority().issue("peer")), authority().path)


MAKERS: dict[str, Callable[..., Cluster]] = {
    "local": local_cluster,
    "tcp": tcp_cluster,
    "tls": tls_cluster,
}


def together(*bodies: Callable[[], object]) -> None:
    """Run bodies at once, each in its own thread; raise their first exception."""
    errors: list[BaseException] = []

    def run(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def pattern(size: int, seed: int = 0) -> bytearray:
    """Return bytes in which no two neighborhoods look alike."""
    block = bytes((index * 31 + index // 251 + seed * 17) % 256 for index in range(4093))
    return bytearray((block * (size // len(block) + 1))[:size])


def finish(channel: Channel, completions: Sequence[Receive] = ()) -> None:
    """Wait for everything, and close."""
    assert channel.wait(completions, LIMIT), f"still waiting for {channel.waiting_for()}"
    assert channel.flush(LIMIT), f"still waiting for {channel.waiting_for()}"
    channel.close()
