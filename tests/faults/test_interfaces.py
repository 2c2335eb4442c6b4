"""Several network interfaces: connections are spread over them, and fall back where one is down."""

from __future__ import annotations

import pytest
from tests.e2e.clients import free_ports
from tests.faults.network import Network
from tests.faults.processes import results

from dmesh import native
from dmesh.collectives.tuning import Tuning, write

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}"),
]

ELEMENTS = 4_000_000
BYTES = 8 * ELEMENTS
"""Sent by each of two ranks in an all-reduce, in the two streams of a connection."""
CALL = f"dmesh.collectives.all_reduce(np.arange({ELEMENTS})).tolist()[-1]"
SENT = "[int(open(f'/sys/class/net/eth{at}/statistics/tx_bytes').read()) for at in range(2)]"


@pytest.fixture
def start(make_server, make_client):
    """Starts a server, and a client on each of the other hosts, which have two interfaces each."""

    def start(network: Network, *, interfaces="eth0,eth1", **environ):
        home, *places = network.hosts
        server = make_server("--insecure", host=home.address, prefix=home.prefix).start()
        hosts, ports = [place.address for place in places], free_ports(len(places))
        clients = [
            make_client(
                rank,
                len(places),
                server.address,
                sdk=True,
                hosts=hosts,
                ports=ports,
                prefix=place.prefix,
                environ={"DMESH_SHARED_MEMORY": "0", "DMESH_INTERFACES": interfaces, **environ},
            )
            for rank, place in enumerate(places)
        ]
        for client in clients:
            client.do("import logging; logging.basicConfig(level='INFO')")
        results([client.submit("join()") for client in clients])
        return clients

    return start


def sent_by_interface(clients, call=CALL, expected=2 * (ELEMENTS - 1)) -> list[list[float]]:
    """Returns the share of the array's bytes that each client sends by eth0 and by eth1 in a call."""
    results([client.submit("dmesh.collectives.barrier()") for client in clients])
    before = [client.do(SENT) for client in clients]
    for answer in results([client.submit(call) for client in clients]):
        assert answer.value == expected
    after = [client.do(SENT) for client in clients]
    return [
        [(now - then) / BYTES for then, now in zip(*pair, strict=True)]
        for pair in zip(before, after, strict=True)
    ]


def test_streams_are_spread_over_both_interfaces(make_network, start):
    clients = start(make_network(3, 2))
    for shares in sent_by_interface(clients):
        assert shares == pytest.approx([0.5, 0.5], abs=0.1)
    assert "rank 0 dials rank 1 from 10.77.0.2 to 10.77.0.3:" in clients[0].process.err


@pytest.mark.parametrize("call", ["reduce", "broadcast"])
def test_calls_of_a_root_are_spread_as_well(make_network, start, call):
    """What a rank sends in each of the two steps of such a call is not alike."""
    clients = start(make_network(4, 2))
    text = f"[dmesh.collectives.{call}(np.arange({ELEMENTS}), root=0)] and 0"
    for first, second in sent_by_interface(clients, text, 0):
        assert first == pytest.approx(second, abs=0.1)


def test_one_named_interface_carries_all(make_network, start):
    """The coordination goes over one network, the arrays over the other one."""
    clients = start(make_network(3, 2), interfaces="eth1")
    for shares in sent_by_interface(clients):
        assert shares == pytest.approx([0.0, 1.0], abs=0.1)


def test_nothing_is_opened_or_used_that_was_not_named(make_network, start):
    network = make_network(3, 2)
    clients = start(network, interfaces="")
    for shares in sent_by_interface(clients):
        assert shares == pytest.approx([1.0, 0.0], abs=0.1)
    for (
        client
    ) in clients:  # local addresses of all sockets, in hexadecimal digits of the machine's byte order
        assert not client.do("[line for line in open('/proc/net/tcp') if '004E0A:' in line.split()[1]]")


def test_who_listens_everywhere_uses_all_that_are_as_fast(make_network, start, tmp_path):
    tuning = tmp_path / "tuning.json"
    write(tuning, Tuning(streams=2))
    clients = start(make_network(3, 2), interfaces="", DMESH_BIND_HOST="0.0.0.0", DMESH_TUNING=str(tuning))
    for shares in sent_by_interface(clients):
        assert shares == pytest.approx([0.5, 0.5], abs=0.1)


@pytest.mark.parametrize("fault", ["down here", "down there", "cut off"])
def test_an_interface_that_is_down_is_done_without(make_network, start, fault):
    network = make_network(3, 2)
    _, *places = network.hosts
    if fault == "cut off":
        network.cut_network(1)
    else:
        network.take_down(places[0 if fault == "down here" else 1], "eth1")
    clients = start(network)
    for shares in sent_by_interface(clients):
        assert shares == pytest.approx([1.0, 0.0], abs=0.1)
    said = {
        "down here": (0, "client 0 does not use eth1: it is down"),
        "down there": (1, "client 1 does not use eth1: it is down"),
        "cut off": (0, "no answer within 2 s): using the address that all peers know"),
    }
    rank, words = said[fault]
    assert words in clients[rank].process.err
