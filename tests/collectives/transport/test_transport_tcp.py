"""TCP transport against outsiders, wrong secrets, absent peers and peers that break the rules."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from tests.collectives.transport.harness import (
    CLUSTER,
    LIMIT,
    SECRET,
    Cluster,
    Recorder,
    finish,
    pattern,
    tcp_listener,
    together,
)
from tests.waiting import eventually, free_ports

from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.connecting import TcpOptions
from dmesh.collectives.backends.tcp.connection import encode
from dmesh.collectives.backends.tcp.frames import EAGER_LIMIT, VERSION, Frame, Kind
from dmesh.collectives.backends.tcp.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    WELCOME_SIZE,
    Credentials,
    Dialer,
    Refused,
    Status,
)
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport
from dmesh.errors import (
    CollectiveError,
    InitializationTimeoutError,
    PeerAuthenticationError,
    PeerLostError,
)


def connect(cluster: Cluster, rank: int) -> socket.socket:
    host, _, port = cluster.peers[rank].addresses[0].rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=LIMIT)
    sock.settimeout(LIMIT)
    return sock


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "the connection was closed"
        data += piece
    return data


def is_closed(sock: socket.socket) -> bool:
    """Wait for the end of a connection, which may be a reset."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def shake_hands(cluster: Cluster, rank: int, as_rank: int, secret: bytes = SECRET) -> socket.socket:
    """Connect as a peer that is not among the cluster's transports, or is slower than this."""
    sock = connect(cluster, rank)
    me = Credentials(as_rank, cluster.peers[as_rank].incarnation, CLUSTER, lambda: secret)
    dialer = Dialer(me, rank, cluster.peers[rank].incarnation, "a peer")
    try:
        sock.sendall(dialer.begin())
        sock.sendall(dialer.feed(read_exactly(sock, CHALLENGE_SIZE)))
        dialer.feed(read_exactly(sock, WELCOME_SIZE))
    except BaseException:
        sock.close()
        raise
    return sock


def check_alive(cluster: Cluster, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Assert that the cluster works as if nothing had happened."""
    one, other = ranks
    sender, receiver = cluster.open(one, 10**6), cluster.open(other, 10**6)
    into = bytearray(300_000)
    sender.send(other, 0, memoryview(pattern(300_000)))
    finish(receiver, [receiver.receive(one, 0, memoryview(into))])
    finish(sender)
    assert into == pattern(300_000)
    for rank in ranks:
        assert [event for event in cluster.listeners[rank].events if event[0] != "control"] == []


def unproven(cluster: Cluster, rank: int) -> int:
    return len(cluster.transports[rank]._admission.unproven)


# -- outsiders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0", bytes(HELLO_SIZE), b"\xff" * 100_000, b"dmeshpee" + b"\xff" * 300],
    ids=["http", "zero", "zeros", "a lot", "right start"],
)
def test_garbage_is_refused_with_one_byte_and_disturbs_nobody(make_tcp, garbage):
    cluster = make_tcp(2)
    sock = connect(cluster, 0)
    with sock, contextlib.suppress(ConnectionError):
        sock.sendall(garbage)
        answer = read_exactly(sock, CHALLENGE_SIZE)
        assert answer[0] in (Status.MALFORMED, Status.WRONG_VERSION)
        assert not any(answer[1:])
        with contextlib.suppress(OSError):  # it may be closed already
            sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    check_alive(cluster)
    eventually(lambda: unproven(cluster, 0) == 0, "no unproven connection")


def test_half_a_handshake_ends_after_its_time(make_tcp):
    cluster = make_tcp(2, options=TcpOptions(handshake_timeout=0.3))
    me = Credentials(1, 101, CLUSTER, lambda: SECRET)
    hello = Dialer(me, 0, 100, "rank 0").begin()
    for start in (b"", hello[:1], hello[:-1], hello):
        with connect(cluster, 0) as sock:
            sock.sendall(start)
            assert is_closed(sock)
    check_alive(cluster)


def test_outsiders_that_hang_up_are_forgotten(make_tcp):
    cluster = make_tcp(2)
    for _ in range(20):
        connect(cluster, 0).close()
    eventually(lambda: unproven(cluster, 0) == 0, "no unproven connection")
    check_alive(cluster)


def test_a_crowd_of_outsiders_is_closed_beyond_the_limit_and_peers_still_get_in(make_tcp):
    cluster = make_tcp(2, options=TcpOptions(most_unproven=4, handshake_timeout=1.5))
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connect(cluster, 0)) for _ in range(12)]
        eventually(lambda: unproven(cluster, 0) == 4, "as many unproven connections as allowed")
        check_alive(cluster)
        assert all(is_closed(sock) for sock in crowd)


def test_a_wrong_secret_is_refused_and_disturbs_nobody(make_tcp):
    cluster = make_tcp(3)
    with pytest.raises(Refused, match="the secrets differ") as caught:
        shake_hands(cluster, 0, as_rank=2, secret=b"guess")
    assert caught.value.status is Status.WRONG_PROOF
    check_alive(cluster)
    cluster.fence(2, 0)  # the true rank 2 is let in


def test_a_recorded_handshake_cannot_be_replayed(make_tcp):
    cluster = make_tcp(3)
    me = Credentials(2, 102, CLUSTER, lambda: SECRET)
    with connect(cluster, 0) as sock:
        dialer = Dialer(me, 0, 100, "rank 0")
        hello = dialer.begin()
        sock.sendall(hello)
        proof = dialer.feed(read_exactly(sock, CHALLENGE_SIZE))
    with connect(cluster, 0) as sock:
        sock.sendall(hello + proof)
        assert read_exactly(sock, CHALLENGE_SIZE)[0] == Status.OK
        assert read_exactly(sock, WELCOME_SIZE) == bytes([Status.WRONG_PROOF]) + bytes(PROOF_SIZE)
        assert is_closed(sock)
    check_alive(cluster)


def test_a_second_connection_for_the_same_rank_is_refused(make_tcp):
    cluster = make_tcp(2)
    cluster.fence(1, 0)
    with pytest.raises(Refused, match="it has had a connection with this rank before") as caught:
        shake_hands(cluster, 0, as_rank=1)
    assert caught.value.status is Status.CONNECTED
    check_alive(cluster)


# -- peers that break the rules --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (
            bytes([VERSION, 1]) + bytes(30) + (2**40).to_bytes(8, "big"),
            f"length {2**40}, which must be 0 to {EAGER_LIMIT}",
        ),
        (
            bytes([VERSION, 6]) + bytes(30) + (2**40).to_bytes(8, "big"),
            f"CONTROL frame came with length {2**40}",
        ),
        (bytes([VERSION, 4]) + bytes(37) + b"\1", "nobody asked for"),
        (bytes([1, 1]) + bytes(38), "version 1"),
        (bytes([VERSION, 1, 255, 255]) + bytes(36), "a signature of 65535 bytes"),
        (b"\xff" * 1000, "version 255"),
    ],
    ids=["huge data", "huge control", "piece", "version", "signature", "noise"],
)
def test_a_peer_that_breaks_the_protocol_is_lost_and_nobody_else(make_tcp, sent, problem):
    cluster = make_tcp(3)
    with shake_hands(cluster, 0, as_rank=2) as sock:
        sock.sendall(encode(Frame(Kind.CONTROL, length=2)) + b"hi" + sent)
        _, _, reason = cluster.listeners[0].wait_for("lost", 2)
        assert "it broke the protocol" in reason
        assert problem in reason
        assert is_closed(sock)
    cluster.listeners[0].events.clear()
    check_alive(cluster)


def test_a_connection_that_ends_within_a_frame_is_a_loss(make_tcp):
    cluster = make_tcp(3)
    with shake_hands(cluster, 0, as_rank=2) as sock:
        sock.sendall(encode(Frame(Kind.DATA, 1, 1, 0, 100, b"s")) + bytes(50))
    _, _, reason = cluster.listeners[0].wait_for("lost", 2)
    assert reason == "its connection was closed without a goodbye"


# -- finding each other ----------------------------------------------------------------------------


def test_after_connect_all_a_silent_death_is_noticed(make_tcp):
    cluster = make_tcp(4)
    together(*(lambda t=transport: t.connect_all(LIMIT) for transport in cluster.transports))
    cluster.kill(3)
    for rank in range(3):
        cluster.listeners[rank].wait_for("lost", 3)
    with pytest.raises(PeerLostError, match=r"rank 3 = /job:worker/task:3 is gone: its connection") as caught:
        cluster.transports[0].connect_all(LIMIT)
    assert caught.value.rank == 3


def lonely(peers, options=None, secret=SECRET, incarnation=0):
    """Make a transport whose peers are only addresses; return it with its listener."""
    transport = TcpTransport(0, tcp_listener(), lambda: secret, CLUSTER, incarnation, options)
    recorder = Recorder()
    transport.start(recorder, peers)
    return transport, recorder


def test_a_missing_peer_is_named_with_its_address_while_waiting_and_in_the_error():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # nobody listens here
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        transport, recorder = lonely([Peer(1, (address,), 0, "task 1")])
        reports = []
        with pytest.raises(InitializationTimeoutError) as caught:
            transport.connect_all(0.5, report=reports.append, report_every=0.1)
        message = str(caught.value)
        assert message.startswith("1 of 2 clients did not connect within 0.5 s: rank 1 = task 1")
        assert f"{address}: Connection refused" in message
        assert reports
        assert reports[0].startswith("rank 0 has waited 0 s (of 0.5 s) for 1 of 2 clients: rank 1 = task 1 [")
        assert recorder.events == []
        transport.close(1.0)


def test_a_client_that_starts_late_is_waited_for():
    port = free_ports(1)[0]  # a port of the range for connections could be handed out meanwhile
    address = f"127.0.0.1:{port}"
    first, _ = lonely([Peer(1, (address,), 0, "task 1")])
    reported = threading.Event()
    done = threading.Thread(
        target=first.connect_all, args=(LIMIT, lambda message: reported.set()), kwargs={"report_every": 0.01}
    )
    done.start()
    assert reported.wait(LIMIT)
    listener = socket.create_server(("127.0.0.1", port))
    second = TcpTransport(1, listener, lambda: SECRET, CLUSTER)
    first_address = f"127.0.0.1:{first._listeners[0].getsockname()[1]}"
    second.start(Recorder(), [Peer(0, (first_address,), 0, "task 0")])
    second.connect_all(LIMIT)
    done.join(LIMIT)
    assert not done.is_alive()
    together(lambda: first.close(5.0), lambda: second.close(5.0))


def test_different_secrets_are_an_error_on_both_sides_at_once(make_tcp):
    cluster = make_tcp(2, secrets=[b"one", b"two"])
    errors = []

    def join(rank):
        with pytest.raises(PeerAuthenticationError, match="DMESH_TOKEN must be the same") as caught:
            cluster.transports[rank].connect_all(LIMIT)
        errors.append(str(caught.value))

    together(lambda: join(0), lambda: join(1))
    assert len(errors) == 2
    assert not any(word == "one" or word == "two" for error in errors for word in error.split())


def test_an_unreachable_peer_is_lost_soon():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        transport, recorder = lonely([Peer(1, (address,), 0, "task 1")], TcpOptions(retry_for=0.05))
        transport.control(1, b"hello?")
        _, _, reason = recorder.wait_for("lost", 1)
        assert reason == f"cannot connect to {address}: Connection refused"
        channel = transport.message_queue.open(1, 1, b"s")
        channel.send(1, 0, memoryview(b"x"))
        with pytest.raises(PeerLostError, match="Connection refused"):
            channel.flush(LIMIT)
        transport.close(1.0)


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        ((), "has no address"),
        (("nonsense",), "HOST:PORT"),
        (("no-such-host.invalid:1",), "no-such-host.invalid"),
    ],
)
def test_addresses_that_lead_nowhere_are_named(addresses, problem):
    transport, recorder = lonely([Peer(1, addresses, 0, "task 1")], TcpOptions(retry_for=0.0))
    transport.control(1, b"hello?")
    _, _, reason = recorder.wait_for("lost", 1)
    assert problem in reason
    transport.close(1.0)


def test_the_next_address_is_tried_and_names_are_resolved(make_tcp):
    listeners = [tcp_listener(), tcp_listener()]
    ports = [sock.getsockname()[1] for sock in listeners]
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        wrong = f"127.0.0.1:{reserved.getsockname()[1]}"
        transports, recorders = [], []
        for rank in range(2):
            recorders.append(Recorder())
            transports.append(TcpTransport(rank, listeners[rank], lambda: SECRET, CLUSTER))
            other = Peer(1 - rank, (wrong, f"localhost:{ports[1 - rank]}"), 0, "other")
            transports[rank].start(recorders[rank], [other])
        transports[0].control(1, b"hello")
        recorders[1].wait_for("control", 0, b"hello")
        together(*(lambda t=transport: t.close(5.0) for transport in transports))


def test_names_are_resolved_where_no_thread_can_be_started(monkeypatch):
    """As at the end of a program, or at a limit of the system."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    listeners, recorders = [tcp_listener(), tcp_listener()], [Recorder(), Recorder()]
    transports = [TcpTransport(rank, listeners[rank], lambda: SECRET, CLUSTER) for rank in range(2)]
    for rank, transport in enumerate(transports):
        port = listeners[1 - rank].getsockname()[1]
        transport.start(recorders[rank], [Peer(1 - rank, (f"localhost:{port}",), 0, "other")])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        transports[0].control(1, b"hello")
        recorders[1].wait_for("control", 0, b"hello")
    together(*(lambda t=transport: t.close(5.0) for transport in transports))


# -- the end ---------------------------------------------------------------------------------------


def test_closing_without_a_start_closes_the_listener():
    listener = tcp_listener()
    transport = TcpTransport(0, listener, lambda: SECRET, CLUSTER)
    transport.close(1.0)
    assert listener.fileno() == -1
    with pytest.raises(CollectiveError, match="rank 0 has been started or closed already"):
        transport.start(Recorder(), [])


def test_closing_leaves_no_thread_and_no_socket(make_tcp):
    before = set(threading.enumerate())
    cluster = make_tcp(3)
    for source, destination in ((0, 1), (1, 2), (2, 0), (1, 0)):
        cluster.fence(source, destination)
    cluster.close()
    assert set(threading.enumerate()) <= before
    for rank in range(3):
        with pytest.raises(ConnectionError):
            connect(cluster, rank)
    assert not any(recorder.of("lost") for recorder in cluster.listeners)


def test_closing_sends_queued_frames_even_to_a_peer_that_is_not_connected_yet(make_tcp):
    cluster = make_tcp(2)
    for index in range(100):
        cluster.transports[0].control(1, b"%d" % index + bytes(30_000))
    cluster.transports[0].close(LIMIT)
    cluster.listeners[1].wait_for("left", 0)
    assert [event[2].rstrip(b"\0") for event in cluster.listeners[1].of("control")] == [
        b"%d" % index for index in range(100)
    ]


def test_closing_does_not_wait_for_a_peer_that_has_closed_its_own_listener():
    """Clients that end at the same time have farewells for each other, and none of them listens any more."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        transport, _ = lonely([Peer(1, (address,), 0, "task 1")], TcpOptions(retry_for=LIMIT))
        transport.control(1, b"farewell")
        began = time.monotonic()
        transport.close(LIMIT)
        assert time.monotonic() - began < LIMIT / 2


def test_linger_is_a_limit_when_a_peer_does_not_read(make_tcp):
    cluster = make_tcp(3)
    with shake_hands(cluster, 0, as_rank=2):
        # An impostor of rank 2 never closes: rank 0 does not wait for it beyond its limit.
        eventually(lambda: unproven(cluster, 0) == 0, "no unproven connection")
        cluster.transports[0].close(0.05)


def test_a_bug_in_the_transports_thread_ends_it_loudly(make_tcp, caplog):
    cluster = make_tcp(2)
    cluster.fence(0, 1)
    channel = cluster.open(0)
    completion = channel.receive(1, 0, memoryview(bytearray(1)))

    def bug():
        raise RuntimeError("a bug")

    cluster.transports[0]._loop.call(bug)
    with pytest.raises(CollectiveError, match=r"the transport of rank 0 failed, please report this: .*a bug"):
        channel.wait([completion], LIMIT)
    cluster.listeners[1].wait_for("lost", 0)
    assert "the transport's thread failed" in caplog.text
