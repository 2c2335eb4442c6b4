"""TCP transport when another process takes a peer's place: admission before and after the renewal."""

from __future__ import annotations

import socket
import threading

import pytest
from tests.collectives.transport.harness import (
    CLUSTER,
    LIMIT,
    SECRET,
    Cluster,
    Recorder,
    finish,
    tcp_listener,
)
from tests.waiting import eventually

from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.handshake import (
    CHALLENGE_SIZE,
    WELCOME_SIZE,
    Credentials,
    Dialer,
    Refused,
    Status,
)
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport
from dmesh.errors import CollectiveError


def nothing() -> None:
    """Switch nothing: these tests look at the transport alone."""


class Successor:
    """A new process of rank 1, which came at epoch 2."""

    def __init__(self, cluster: Cluster) -> None:
        self.listener = Recorder()
        sock = tcp_listener()
        self.peer = Peer(1, (f"127.0.0.1:{sock.getsockname()[1]}",), 777, "the successor")
        self.peers = (cluster.peers[0], self.peer, *cluster.peers[2:])
        self.transport = TcpTransport(1, sock, lambda: SECRET, CLUSTER, self.peer.incarnation)
        self.transport.start(self.listener, self.peers, 2)


@pytest.fixture
def succeeded(make_tcp):
    """Rank 0 of two, which has lost rank 1, and the process that replaces rank 1."""
    cluster = make_tcp(2)
    cluster.fence(0, 1)
    cluster.fence(1, 0)
    former = cluster.transports[0]._connections.dialed[1]
    cluster.kill(1)
    cluster.listeners[0].wait_for("lost", 1)
    successor = Successor(cluster)
    yield cluster, successor, former
    successor.transport.close(1.0)


def test_frames_go_both_ways_after_both_have_renewed(succeeded):
    cluster, successor, _ = succeeded
    for transport in (cluster.transports[0], successor.transport):
        transport.renew(successor.peers, 3, nothing)
    here = cluster.transports[0].message_queue.open(7, 1, b"x", 3)
    there = successor.transport.message_queue.open(7, 1, b"x", 3)
    into = bytearray(3), bytearray(3)
    here.send(1, 0, memoryview(b"abc"))
    there.send(0, 0, memoryview(b"def"))
    finish(here, [here.receive(1, 0, memoryview(into[0]))])
    finish(there, [there.receive(0, 0, memoryview(into[1]))])
    assert into == (b"def", b"abc")


def test_a_successor_that_is_early_is_let_in_as_soon_as_it_is_known(succeeded):
    cluster, successor, _ = succeeded
    successor.transport.renew(successor.peers, 3, nothing)
    there = successor.transport.message_queue.open(7, 1, b"x", 3)
    there.send(0, 0, memoryview(b"abc"))
    successor.transport.control(0, b"hello")
    dials = successor.transport._dials
    eventually(lambda: 0 in dials and dials[0].problem.endswith("takes part"), "a first refusal")
    assert ("control", 1, b"hello") not in cluster.listeners[0].events
    cluster.transports[0].renew(successor.peers, 3, nothing)
    cluster.listeners[0].wait_for("control", 1, b"hello")
    here = cluster.transports[0].message_queue.open(7, 1, b"x", 3)
    into = bytearray(3)
    finish(here, [here.receive(1, 0, memoryview(into))])
    assert into == b"abc"
    assert successor.listener.of("lost") == []
    there.close()


def test_an_unknown_process_with_no_newer_generation_is_refused_for_good(succeeded):
    cluster, successor, _ = succeeded
    cluster.transports[0].renew(successor.peers, 3, nothing)
    sock = tcp_listener()
    zombie = TcpTransport(1, sock, lambda: SECRET, CLUSTER, cluster.peers[1].incarnation)
    told = Recorder()
    zombie.start(told, cluster.peers)
    zombie.control(0, b"I am still here")
    assert "one of the two processes was restarted" in told.wait_for("lost", 0)[2]
    zombie.close(0.0)
    assert cluster.listeners[0].of("lost")[1:] == []


def test_the_late_end_of_a_former_connection_is_no_loss_of_the_successor(succeeded):
    cluster, successor, former = succeeded
    transport = cluster.transports[0]
    transport.renew(successor.peers, 3, nothing)
    before = list(cluster.listeners[0].events)
    done = threading.Event()
    for act in (
        lambda: transport._depart(former, "its connection was closed without a goodbye"),
        lambda: transport._depart_unless_accepted(former),
        lambda: transport._on_dialed(former, None, "refused", None),
        done.set,
    ):
        transport._loop.call(act)
    assert done.wait(LIMIT)
    assert cluster.listeners[0].events == before
    assert not transport.message_queue.gone(1)


def test_a_former_process_in_the_middle_of_its_handshake_is_not_let_in(make_tcp):
    """Its claim was still right when it was made, and is not any more when it is proven."""
    cluster = make_tcp(2)
    host, _, port = cluster.peers[0].addresses[0].rpartition(":")
    me = Credentials(1, cluster.peers[1].incarnation, CLUSTER, lambda: SECRET)
    dialer = Dialer(me, 0, cluster.peers[0].incarnation, "rank 0")
    with socket.create_connection((host, int(port)), timeout=LIMIT) as sock:
        sock.sendall(dialer.begin())
        proof = dialer.feed(sock.recv(CHALLENGE_SIZE, socket.MSG_WAITALL))
        successor = Successor(cluster)
        cluster.transports[0].renew(successor.peers, 3, nothing)
        sock.sendall(proof)
        with pytest.raises(Refused) as caught:
            dialer.feed(sock.recv(WELCOME_SIZE, socket.MSG_WAITALL))
    assert caught.value.status is Status.CONNECTED
    successor.transport.renew(successor.peers, 3, nothing)
    successor.transport.control(0, b"hello")
    cluster.listeners[0].wait_for("control", 1, b"hello")
    successor.transport.close(1.0)


def test_events_before_the_switch_concern_the_former_process(succeeded):
    cluster, successor, _ = succeeded
    transport = cluster.transports[0]
    seen: list[object] = []

    def switch() -> None:
        assert threading.get_ident() == transport._loop._inbox.reader
        seen.append(transport.message_queue.generation)
        seen.append(transport.message_queue.gone(1))

    assert transport.message_queue.gone(1)
    transport.renew(successor.peers, 3, switch)
    assert seen == [3, None]


def test_a_closed_transport_does_not_renew(make_tcp):
    cluster = make_tcp(2)
    cluster.transports[0].close(0.0)
    with pytest.raises(CollectiveError, match="closed"):
        cluster.transports[0].renew(cluster.peers, 1, nothing)
