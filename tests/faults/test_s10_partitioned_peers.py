"""Scenario 10: two clients do not hear each other, both or one of them, and all hear the server."""

from __future__ import annotations

import time

import pytest
from tests.e2e.clients import free_ports
from tests.faults.processes import PATIENCE, errors, eventually, results

from dmesh import native

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

LIMIT = 4.0
"""Seconds that the collective may take."""
MARGIN = 6.0
"""Seconds for the last questions, and for a machine that is busy."""
SILENCE = 2.0
"""Instead of 60 s, seconds: all limits of these tests are multiples of it."""
DIRECTIONS = ["both", "one way", "the other way"]
CALLS = {
    "barrier": "dmesh.collectives.barrier(group=group, timeout={limit})",
    "small": "dmesh.collectives.all_reduce(np.ones(10), group=group, timeout={limit}).sum()",
    "large": "dmesh.collectives.all_reduce(np.ones(2_000_000), group=group, timeout={limit}).sum()",
    "gather": "dmesh.collectives.all_gather(np.ones(100_000), group=group, timeout={limit}).sum()",
}


def cut(network, one, other, direction):
    if direction == "both":
        network.cut(one, other)
    elif direction == "one way":
        network.cut_one_way(one, other)
    else:
        network.cut_one_way(other, one)


WAYS = {"messages": {"DMESH_NATIVE": "0"}, **({"dedicated": {}} if native.core() is not None else {})}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def job(make_network, make_server, make_client, request):
    """A server and three clients, each on a host of its own: they share no memory, as hosts do not."""
    network = make_network(4)
    home, *places = network.hosts
    server = make_server("--insecure", host=home.address, prefix=home.prefix).start()
    hosts, ports = [place.address for place in places], free_ports(3)
    clients = [
        make_client(
            rank,
            3,
            server.address,
            sdk=True,
            hosts=hosts,
            ports=ports,
            prefix=place.prefix,
            environ={"DMESH_SHARED_MEMORY": "0", **request.param},
        )
        for rank, place in enumerate(places)
    ]
    results([client.submit("join()") for client in clients])
    return network, places, clients


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not connected yet"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_collective_fails_on_all_ranks_in_time_and_names_the_pair(direction, connected, job, figures):
    network, places, clients = job
    for turn, call in enumerate(CALLS.values()):
        for client in clients:
            client.do(f"group = dmesh.collectives.new_group([0, 1, 2], 'turn {turn}')")
        if connected:
            results([client.submit(call.format(limit=60)) for client in clients])
        cut(network, places[1], places[2], direction)
        began = time.monotonic()
        # Twice, because a rank that is not of the pair may have its result of the first one in spite of the
        # cut. Then it hears of the failure at its next call, instead of waiting for those who have given up.
        twice = f"[{call.format(limit=LIMIT)} for _ in range(2)]"
        raised = errors([client.submit(twice) for client in clients])
        for error in raised:
            assert error.kind in ("CollectiveTimeoutError", "PeerLostError"), error
            assert "rank 1" in error.message, error
            assert "rank 2" in error.message, error
            assert error.at - began <= LIMIT + MARGIN
        known = max(error.at for error in raised) - began
        figures.add(f"all ranks know of a cut {direction} (time-out {LIMIT:g} s)", known)
        # The server still hears everybody, so nobody was declared lost, and all go on once it is healed.
        results(
            [client.submit(f"dmesh.coordination.barrier('turn {turn}', timeout=60)") for client in clients]
        )
        network.heal()
        for client in clients:
            client.do(f"group = dmesh.collectives.new_group([0, 1, 2], 'healed {turn}')")
        results([client.submit(call.format(limit=60)) for client in clients])
        connected = True


PAIR = """
import socket
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.connecting import TcpOptions
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport

hosts, rank = {hosts}, {rank}
peers = [Peer(at, (host + ":7777",), 5 + at, "task " + str(at)) for at, host in enumerate(hosts)]
listener = socket.create_server((hosts[rank], 7777))
options = TcpOptions(silence={silence})
transport = TcpTransport(rank, listener, lambda: b"secret", b"cluster", 5 + rank, options)
tell = lambda rank, why: say("gone", rank=rank, why=why)
communicator = Communicator(rank, peers, transport, 120.0, on_gone=tell)
communicator.connect_all(60)
"""


@pytest.fixture
def pair(make_network, make_client):
    """Two clients without a server, which are soon worried by silence."""
    network = make_network(2)
    hosts = [host.address for host in network.hosts]
    clients = [
        make_client(rank, 2, "127.0.0.1:1", prefix=host.prefix) for rank, host in enumerate(network.hosts)
    ]
    results(
        [
            client.submit(PAIR.format(hosts=hosts, rank=rank, silence=SILENCE))
            for rank, client in enumerate(clients)
        ]
    )
    return network, clients


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in the middle"])
def test_silence_is_noticed_long_before_the_time_out_also_when_idle(direction, busy, pair, figures):
    network, clients = pair
    cut(network, *network.hosts, direction)
    began = time.monotonic()
    if busy:
        pending = [client.submit("communicator.world.all_reduce(np.ones(3_000_000))") for client in clients]
        for rank, error in enumerate(errors(pending)):
            assert error.kind == "PeerLostError", error
            assert error.fields["rank"] == 1 - rank
    told = [client.wait_event("gone") for client in clients]
    for rank, event in enumerate(told):
        assert event["rank"] == 1 - rank
        assert event["at"] - began < 3 * SILENCE + MARGIN
    state = "in the middle" if busy else "idle"
    figures.add(f"silence of {SILENCE:g} s is noticed {state}", max(event["at"] for event in told) - began)


def test_a_client_that_does_not_read_for_long_is_not_taken_for_gone(pair):
    """Its kernel answers, so its host is there: a stopped process, or one that has more than it can keep."""
    _, clients = pair
    sender, stopped = clients
    results([client.submit("communicator.world.barrier()") for client in clients])
    stopped.freeze()
    sending = sender.submit(
        "[communicator.world.send(np.ones(8000), 1, async_op=True) for _ in range(2000)] and 1"
    )
    waiting = sender.submit("communicator.world.send(np.ones(8000), 1)")
    sending.result(PATIENCE)
    time.sleep(4 * SILENCE)  # the silence is what is injected
    assert not sender.told("gone")
    stopped.thaw()
    received = stopped.submit("sum(communicator.world.recv(np.ones(8000), 0).sum() for _ in range(2001))")
    waiting.result(PATIENCE)
    assert received.result(PATIENCE).value == 2001 * 8000
    assert not sender.told("gone")
    eventually(lambda: not stopped.told("gone"), "nobody to be gone")
