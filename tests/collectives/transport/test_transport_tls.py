"""Encrypted transport: admission, explanations of refusals, and an eavesdropper's view."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.collectives.transport.harness import (
    CLUSTER,
    LIMIT,
    SECRET,
    Cluster,
    Recorder,
    authority,
    finish,
    pattern,
    tcp_cluster,
    tcp_listener,
    together,
)
from tests.collectives.transport.test_transport_tcp import check_alive, connect, is_closed, read_exactly
from tests.faults.secured import Authority
from tests.waiting import eventually

from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.connecting import TcpOptions
from dmesh.collectives.backends.tcp.handshake import (
    CHALLENGE_SIZE,
    WELCOME_SIZE,
    Credentials,
    Dialer,
    Refused,
    Status,
)
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport
from dmesh.collectives.backends.tcp.tls import PeerTls
from dmesh.collectives.communicator import Communicator
from dmesh.errors import PeerAuthenticationError, PeerLostError
from dmesh.security.certificates import IdentityFiles

SOON = 10.0
"""Seconds within which everybody must know of a disagreement: it takes milliseconds on a machine at rest."""


def certificates(issuer: Authority | None = None, name: str = "a-peer") -> PeerTls:
    issuer = issuer or authority()
    return PeerTls(IdentityFiles(*issuer.issue(name)), issuer.path)


def visitor(issuer: Authority | None) -> ssl.SSLContext:
    """Make the TLS context of an outsider who trusts everybody; no issuer means no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if issuer is not None:
        context.load_cert_chain(*issuer.issue("visitor"))
    return context


@pytest.fixture
def make_mixed() -> Iterator[Callable[..., Cluster]]:
    """Make a cluster of which some ranks encrypt."""
    made: list[Cluster] = []

    def make(*encrypts: bool) -> Cluster:
        tls = [certificates(name=f"peer-{rank}") if yes else None for rank, yes in enumerate(encrypts)]
        made.append(tcp_cluster(len(encrypts), tls=tls))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


# -- who belongs together ----------------------------------------------------------------------------------


def test_three_ranks_compute_on_large_arrays_in_all_directions_at_once():
    sockets = [tcp_listener() for _ in range(3)]
    peers = [Peer(rank, (f"127.0.0.1:{s.getsockname()[1]}",), 0, str(rank)) for rank, s in enumerate(sockets)]
    communicators = [
        Communicator(
            rank,
            peers,
            TcpTransport(rank, sockets[rank], lambda: SECRET, CLUSTER, tls=certificates(name=f"peer-{rank}")),
            timeout=LIMIT,
        )
        for rank in range(3)
    ]
    size = 700_001  # not a multiple of anything, and hundreds of records

    def work(rank: int) -> None:
        world = communicators[rank].world
        own = np.arange(size, dtype=np.float64) * (rank + 1)
        for _ in range(3):
            assert world.all_reduce(own).tobytes() == (np.arange(size) * 6.0).tobytes()
            gathered = world.all_gather(own)
            for other in range(3):
                part = gathered[other * size : (other + 1) * size] if gathered.ndim == 1 else gathered[other]
                assert part.tobytes() == (np.arange(size, dtype=np.float64) * (other + 1)).tobytes()
            small = world.broadcast(own[:10] if rank == 1 else np.empty(10), root=1)
            assert small.tobytes() == (np.arange(10) * 2.0).tobytes()

    together(*(lambda rank=rank: work(rank) for rank in range(3)))
    together(*(lambda c=communicator: c.close(5.0) for communicator in communicators))


def test_two_threads_of_each_rank_send_at_once(make_tls):
    cluster = make_tls(2)
    size = 5 * 2**20 + 3

    def work(rank: int, sequence: int) -> None:
        channel = cluster.open(rank, sequence)
        into = bytearray(size)
        channel.send(1 - rank, 0, memoryview(pattern(size, 10 * rank + sequence)))
        finish(channel, [channel.receive(1 - rank, 0, memoryview(into))])
        assert into == pattern(size, 10 * (1 - rank) + sequence)

    together(*(lambda r=rank, s=sequence: work(r, s) for rank in range(2) for sequence in range(1, 4)))
    check_alive(cluster)


def test_nothing_is_left_of_a_cluster_that_was_closed():
    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("dmesh-tcp")}

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def turn() -> None:
        cluster = tcp_cluster(3, tls=[certificates(name=f"peer-{rank}") for rank in range(3)])
        together(*(lambda t=transport: t.connect_all(LIMIT) for transport in cluster.transports))
        check_alive(cluster)
        knock(cluster, 0, visitor(None))
        with connect(cluster, 0):  # says nothing, and is there when the cluster closes
            cluster.close()

    turn()
    before = descriptors()
    for _ in range(3):
        turn()
    eventually(lambda: not threads(), "the end of all threads")
    eventually(lambda: descriptors() <= before, "the end of all descriptors")


# -- outsiders ---------------------------------------------------------------------------------------------


def knock(cluster: Cluster, rank: int, context: ssl.SSLContext) -> str:
    """Connect with TLS and wait for the end; return the words of the refusal."""
    with connect(cluster, rank) as sock:
        try:
            with context.wrap_socket(sock, do_handshake_on_connect=False) as secure:
                secure.do_handshake()
                assert secure.recv(1) == b""
        except (ssl.SSLError, ConnectionError) as error:
            return str(error)
    return "closed"


def test_outsiders_without_a_certificate_of_the_authority_are_refused_with_one_line_per_host(
    make_tls, tmp_path, caplog
):
    cluster = make_tls(2)
    other = Authority(tmp_path, "other")
    for _ in range(5):
        assert "CERTIFICATE_REQUIRED" in knock(cluster, 0, visitor(None)).upper().replace(" ", "_")
        assert "UNKNOWN_CA" in knock(cluster, 0, visitor(other)).upper().replace(" ", "_")
    check_alive(cluster)
    eventually(lambda: not cluster.transports[0]._admission.unproven, "no unproven connection")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["rank 0: refused a connection: it showed no certificate (from 127.0.0.1)"]


def test_a_certificate_alone_is_not_enough(make_tls):
    cluster = make_tls(3)
    with connect(cluster, 0) as sock, visitor(authority()).wrap_socket(sock) as secure:
        me = Credentials(2, 102, CLUSTER, lambda: b"guess")
        dialer = Dialer(me, 0, 100, "rank 0")
        dialer.binding = secure.get_channel_binding("tls-unique")
        secure.sendall(dialer.begin())
        secure.sendall(dialer.feed(read_exactly(secure, CHALLENGE_SIZE)))
        with pytest.raises(Refused) as caught:
            dialer.feed(read_exactly(secure, WELCOME_SIZE))
        assert caught.value.status is Status.WRONG_PROOF
    check_alive(cluster)
    cluster.fence(2, 0)  # the true rank 2 is let in


def test_an_attacker_in_the_middle_with_a_valid_certificate_cannot_pass_proofs_on():
    """The keyed handshake is good for one TLS connection only."""
    sockets = [tcp_listener() for _ in range(2)]
    middle = tcp_listener()
    ports = [sockets[0].getsockname()[1], middle.getsockname()[1]]
    peers = [Peer(rank, (f"127.0.0.1:{port}",), 0, f"task {rank}") for rank, port in enumerate(ports)]
    transports = [
        TcpTransport(rank, sockets[rank], lambda: SECRET, CLUSTER, tls=certificates(name=f"peer-{rank}"))
        for rank in range(2)
    ]
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*authority().issue("middle"))

    def relay() -> None:
        accepted = middle.accept()[0]
        onward = socket.create_connection(sockets[1].getsockname())
        with (
            contextlib.suppress(OSError),
            server.wrap_socket(accepted, server_side=True) as one,
            visitor(authority()).wrap_socket(onward) as other,
        ):
            routes = {one: other, other: one}
            while True:
                for source in select.select(list(routes), [], [], LIMIT)[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    routes[source].sendall(data)

    relaying = threading.Thread(target=relay)
    relaying.start()
    recorders = [Recorder(), Recorder()]
    for transport, recorder in zip(transports, recorders, strict=True):
        transport.start(recorder, peers)
    try:
        with pytest.raises(PeerAuthenticationError, match="the secrets differ"):
            transports[0].connect_all(LIMIT)
        assert recorders[1].of("control") == []
    finally:
        together(*(lambda t=transport: t.close(1.0) for transport in transports))
        relaying.join(LIMIT)
        middle.close()


@pytest.mark.parametrize("start", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["no", "one", "some"])
def test_a_stalled_handshake_ends_after_its_time(make_tcp, start):
    tls = [certificates(name=f"peer-{rank}") for rank in range(2)]
    cluster = make_tcp(2, tls=tls, options=TcpOptions(handshake_timeout=0.5))
    with connect(cluster, 0) as sock:
        sock.sendall(start)
        assert is_closed(sock)
    check_alive(cluster)


def test_a_handshake_that_is_too_long_is_ended(make_tls):
    cluster = make_tls(2)
    with connect(cluster, 0) as sock:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(16 * 1024 - 4))
            for _ in range(50):
                sock.sendall(b"\x16\x03\x01\x40\x00" + bytes(16 * 1024))
        assert is_closed(sock)
        assert time.monotonic() - began < 4.0, "it was its length, not its time"
    check_alive(cluster)


# -- some encrypt, some do not -----------------------------------------------------------------------------


def test_encrypting_and_plain_clients_cannot_join_and_both_learn_why_at_once(make_mixed):
    cluster = make_mixed(True, False)
    said = {}

    def join(rank: int) -> None:
        with pytest.raises(PeerAuthenticationError) as caught:
            cluster.transports[rank].connect_all(LIMIT)
        said[rank] = str(caught.value)

    began = time.monotonic()
    together(lambda: join(0), lambda: join(1))
    assert time.monotonic() - began < SOON
    for rank in range(2):
        assert "DMESH_PEER_TLS must be the same for all clients" in said[rank]
        assert f"rank {1 - rank} = /job:worker/task:{1 - rank}" in said[rank]
    assert "it does not encrypt its connections, and this client does" in said[0]
    assert "it encrypts its connections, and this client does not" in said[1]


@pytest.mark.parametrize("encrypts", [(True, False), (False, True)], ids=["to plain", "to encrypted"])
def test_a_client_that_only_waits_for_the_other_kind_learns_why_too(make_mixed, encrypts, caplog):
    """Only rank 0 has something to send; rank 1 has no reason of its own to connect."""
    cluster = make_mixed(*encrypts)
    channel = cluster.open(0)
    began = time.monotonic()
    channel.send(1, 0, memoryview(b"0123456789"))
    for rank in range(2):
        _, _, reason = cluster.listeners[rank].wait_for("lost", 1 - rank)
        assert "DMESH_PEER_TLS must be the same for all clients" in reason
        assert f"rank {1 - rank} = /job:worker/task:{1 - rank}" in reason
    channel.close()
    later = cluster.open(0, 2)
    later.send(1, 0, memoryview(b"0123456789"))
    with pytest.raises(PeerLostError, match="DMESH_PEER_TLS must be the same for all clients"):
        later.flush(LIMIT)
    assert time.monotonic() - began < SOON
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        "rank 1: refused a connection that claims to be of rank 0" in line and "DMESH_PEER_TLS" in line
        for line in lines
    ), lines
    assert len(lines) <= 2  # one of each rank


def test_noise_without_tls_is_refused(make_tls):
    cluster = make_tls(2)
    with connect(cluster, 0) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert read_exactly(sock, CHALLENGE_SIZE)[0] == Status.MALFORMED
        assert is_closed(sock)
    check_alive(cluster)


# -- on the way --------------------------------------------------------------------------------------------


def overhear(encrypted: bool) -> bytes:
    """Send payloads between two ranks; return all bytes that went over the network."""
    sockets = [tcp_listener() for _ in range(2)]
    relays = [tcp_listener() for _ in range(2)]
    peers = [
        Peer(rank, (f"127.0.0.1:{relay.getsockname()[1]}",), 0, str(rank))
        for rank, relay in enumerate(relays)
    ]
    heard: list[bytes] = []
    stop = threading.Event()

    def relay() -> None:
        routes: dict[socket.socket, socket.socket] = {}
        opened: list[socket.socket] = []
        while not stop.is_set():
            for source in select.select([*relays, *routes], [], [], 0.01)[0]:
                if source in relays:
                    accepted = source.accept()[0]
                    onward = socket.create_connection(sockets[relays.index(source)].getsockname())
                    routes.update({accepted: onward, onward: accepted})
                    opened.extend((accepted, onward))
                    continue
                try:
                    data = source.recv(65536)
                    heard.append(data)
                    if data:
                        routes[source].sendall(data)
                except OSError:  # both have said goodbye, and one was faster to go
                    data = b""
                if not data:
                    with contextlib.suppress(OSError):
                        routes.pop(source).shutdown(socket.SHUT_WR)
        for sock in opened:
            sock.close()

    relaying = threading.Thread(target=relay)
    relaying.start()
    transports = [
        TcpTransport(
            rank, sockets[rank], lambda: SECRET, CLUSTER, tls=certificates(name="p") if encrypted else None
        )
        for rank in range(2)
    ]
    for transport in transports:
        transport.start(Recorder(), peers)
    try:
        sender, receiver = (
            transport.message_queue.open(1, 1, b"a signature of this call") for transport in transports
        )
        into = [bytearray(20_000), bytearray(3_000_000)]
        sender.send(1, 0, memoryview(pattern(20_000, 1)))
        sender.send(1, 1, memoryview(pattern(3_000_000, 2)))
        transports[0].control(1, b"a word in confidence")
        finish(receiver, [receiver.receive(0, step, memoryview(data)) for step, data in enumerate(into)])
        finish(sender)
        assert into == [pattern(20_000, 1), pattern(3_000_000, 2)]
    finally:
        together(*(lambda t=transport: t.close(5.0) for transport in transports))
        stop.set()
        relaying.join(LIMIT)
        for sock in relays:
            sock.close()
    return b"".join(heard)


def secrets_in(heard: bytes) -> list[bytes]:
    digest = Credentials(0, 0, CLUSTER, lambda: SECRET).cluster_digest
    pieces = [
        b"a signature of this call",
        b"a word in confidence",
        b"dmeshpee",
        digest,
        bytes(pattern(20_000, 1)[5000:5016]),
        bytes(pattern(3_000_000, 2)[1_000_000:1_000_016]),
    ]
    return [piece for piece in pieces if piece in heard]


def test_an_eavesdropper_sees_nothing_of_the_data():
    heard = overhear(encrypted=True)
    assert len(heard) > 3_000_000
    assert secrets_in(heard) == []
    assert len(secrets_in(overhear(encrypted=False))) == 6  # this is how one would find it
