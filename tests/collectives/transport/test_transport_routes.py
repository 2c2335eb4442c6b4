"""Routes: which addresses of two hosts are paired, and connections that take them, or fall back."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.transport.harness import CLUSTER, LIMIT, SECRET, Recorder, tcp_listener, tcp_peers
from tests.collectives.transport.test_transport_tcp import read_exactly
from tests.waiting import eventually

from dmesh.collectives.backends.tcp.connecting import TcpConnector, TcpOptions
from dmesh.collectives.backends.tcp.handshake import CHALLENGE_SIZE, HELLO_SIZE, PROOF_SIZE, WELCOME_SIZE
from dmesh.collectives.backends.tcp.routes import (
    MOST_INTERFACES,
    OFFER_SIZE,
    LocalAddress,
    Route,
    find_routes,
    pack,
    unpack,
)
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport


def at(*addresses: str, port: int = 7) -> list[LocalAddress]:
    return [LocalAddress(ip_interface(address), port) for address in addresses]


@pytest.mark.parametrize(
    ("own", "theirs", "routes"),
    [
        ([], ["10.1.0.2/16"], []),
        (["10.1.0.1/16"], [], []),
        (["10.1.0.1/16"], ["10.2.0.2/16"], []),
        (["10.1.0.1/16"], ["10.1.0.2/24"], []),  # they disagree about the network
        (
            ["10.2.0.1/16", "10.1.0.1/16"],
            ["10.1.0.2/16", "10.2.0.2/16", "10.3.0.2/16"],
            [("10.2.0.1", "10.2.0.2:7"), ("10.1.0.1", "10.1.0.2:7")],
        ),
        (["fd00::1/64"], ["fd00::2/64", "10.1.0.2/16"], [("fd00::1", "[fd00::2]:7")]),
        # Several interfaces in one network.
        (
            ["10.1.0.1/16", "10.1.0.2/16", "10.1.0.3/16"],
            ["10.1.0.8/16", "10.1.0.9/16"],
            [("10.1.0.1", "10.1.0.8:7"), ("10.1.0.2", "10.1.0.9:7"), ("10.1.0.3", "10.1.0.8:7")],
        ),
        (["10.1.0.1/16", "10.2.0.1/16"], ["10.1.0.1/16", "10.2.0.2/16"], []),  # one host
    ],
)
def test_addresses_in_one_network_are_paired(own, theirs, routes) -> None:
    assert find_routes(at(*own), at(*theirs)) == tuple(Route(*route) for route in routes)


interfaces = st.one_of(
    st.builds(
        lambda number, prefix: IPv4Interface((number, prefix)), st.integers(0, 2**32 - 1), st.integers(0, 32)
    ),
    st.builds(
        lambda number, prefix: IPv6Interface((number, prefix)),
        st.integers(0, 2**128 - 1),
        st.integers(0, 128),
    ),
)
addresses = st.builds(LocalAddress, interfaces, st.integers(1, 65535))


@given(st.lists(addresses, max_size=MOST_INTERFACES))
def test_a_peer_reads_the_addresses_that_are_packed(mine) -> None:
    offer = pack(mine)
    assert len(offer) == OFFER_SIZE
    assert unpack(offer) == tuple(mine)


@given(st.binary(min_size=OFFER_SIZE, max_size=OFFER_SIZE))
def test_whatever_a_peer_offers_can_be_read(offer) -> None:
    assert len(unpack(offer)) <= MOST_INTERFACES


class Pair:
    """Two clients on loopback; the second one listens at 127.0.7.2, too."""

    def __init__(self, options: TcpOptions) -> None:
        sockets = [tcp_listener(), tcp_listener()]
        self.extra = socket.create_server(("127.0.7.2", 0))
        self.port = self.extra.getsockname()[1]
        offered = [LocalAddress(ip_interface("127.0.7.2/24"), self.port, self.extra)]
        self.own, self.main = (sock.getsockname() for sock in sockets)
        peers = tcp_peers(sockets, [100, 101])
        self.transports = [
            TcpTransport(rank, sockets[rank], lambda: SECRET, CLUSTER, 100 + rank, options, addresses=mine)
            for rank, mine in enumerate([(), offered])
        ]
        for transport in self.transports:
            transport.start(Recorder(), peers)

    def dial(self, route: Route | None) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a dedicated connection."""
        (dialer, acceptor), found = (
            (transport.connector for transport in self.transports),
            queue.SimpleQueue(),
        )
        assert dialer is not None
        assert acceptor is not None
        number = acceptor.expect(0)
        dialer.dial(1, number, lambda sock, problem: found.put((sock, problem)), route)
        sock, problem = found.get(timeout=LIMIT)
        assert sock is not None, problem
        eventually(lambda: number in acceptor._arrived, "the connection")
        far = acceptor.claim(number)
        assert far is not None
        return sock, far


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    with ExitStack() as undo:

        def make(**options: Any) -> Pair:
            pair = Pair(TcpOptions(**options))
            for transport in pair.transports:
                undo.callback(transport.close, 0.0)
            return pair

        yield make


def test_a_connection_takes_its_route(make_pair) -> None:
    pair = make_pair()
    near, far = pair.dial(Route("127.0.7.1", f"127.0.7.2:{pair.port}"))
    with near, far:
        assert near.getsockname()[0] == far.getpeername()[0] == "127.0.7.1"
        assert near.getpeername() == far.getsockname() == ("127.0.7.2", pair.port)


def test_without_a_route_it_takes_the_address_that_all_know(make_pair) -> None:
    pair = make_pair()
    near, far = pair.dial(None)
    with near, far:
        assert near.getpeername() == pair.main


@pytest.mark.parametrize("route", ["refused", "silent", "from no address of this host", "to another rank"])
def test_a_route_that_leads_nowhere_falls_back_with_one_line(make_pair, caplog, route) -> None:
    pair = make_pair(route_timeout=0.2)
    with socket.socket() as other:
        other.bind(("127.0.7.3", 0))
        target = "{}:{}".format(*(pair.own if route == "to another rank" else other.getsockname()))
        if route == "silent":
            other.listen()  # accepted by the kernel, and never answered
        answered = Route("192.0.2.1" if "no address" in route else "127.0.7.1", target)
        for _ in range(2):  # the second time it is not tried again
            near, far = pair.dial(answered)
            with near, far:
                assert near.getpeername() == pair.main
    lines = [record.getMessage() for record in caplog.records if "using the address" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(f"rank 0: no connection with rank 1 from {answered.source} to {target} (")


def test_a_route_whose_last_answer_comes_late_is_taken(make_pair, monkeypatch, caplog) -> None:
    """The peer has let the connection in by then, and takes no other one in its place."""
    pair, is_over = make_pair(route_timeout=0.1), threading.Event()
    give_up = TcpConnector._give_up

    def expire(self, dial, problem):
        give_up(self, dial, problem)
        is_over.set()

    def relay(listener):
        with listener.accept()[0] as dialer, socket.create_connection(("127.0.7.2", pair.port)) as acceptor:
            acceptor.sendall(read_exactly(dialer, HELLO_SIZE))
            dialer.sendall(read_exactly(acceptor, CHALLENGE_SIZE))
            acceptor.sendall(read_exactly(dialer, PROOF_SIZE))
            welcome = read_exactly(acceptor, WELCOME_SIZE)
            assert is_over.wait(LIMIT)
            dialer.sendall(welcome)
            dialer.recv(1)

    monkeypatch.setattr(TcpConnector, "_give_up", expire)
    with socket.create_server(("127.0.7.3", 0)) as listener:
        between = threading.Thread(target=relay, args=(listener,))
        between.start()
        near, far = pair.dial(Route("127.0.7.1", f"127.0.7.3:{listener.getsockname()[1]}"))
        with near, far:
            assert near.getpeername() == listener.getsockname()
        between.join(LIMIT)
    assert not caplog.records


def test_the_listeners_of_interfaces_close_with_the_transport(make_pair) -> None:
    pair = make_pair()
    pair.transports[1].close(0.0)
    assert pair.extra.fileno() == -1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.7.2", pair.port))
