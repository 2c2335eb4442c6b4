"""Dedicated connections of several streams: a group gets all or none, and all are closed in the end."""

from __future__ import annotations

import gc
import os
import socket
import ssl
import struct
import sys
import threading
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from tests.collectives.ranks import cluster
from tests.native.test_tcp import finish

from dmesh import native
from dmesh.collectives.backends import registered
from dmesh.collectives.backends.base import Agreement
from dmesh.collectives.backends.endpoints import EndpointBackend, TcpBackend
from dmesh.collectives.backends.tcp import dedicated
from dmesh.collectives.backends.tcp.local import LocalConnector
from dmesh.collectives.backends.tcp.messages import MessageBackend
from dmesh.collectives.connect import Exchange
from dmesh.collectives.tuning import Tuning
from dmesh.errors import CollectiveError

pytestmark = [
    pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}"),
    pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc"),
]

SIZE, STREAMS = 3, 4
EACH = 2 * STREAMS + 1
"""Connections of a pair: for collectives, for transfers, and for the receipts of large ones."""


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def works(communicator) -> bool:
    total = communicator.world.all_reduce(np.full(100_000, communicator.rank, "f4"))
    return bool((total == sum(range(SIZE))).all())


@pytest.mark.parametrize("shm", ["dedicated", "encrypted"])
def test_each_pair_has_as_many_connections_as_it_needs_and_closes_them(shm):
    before = open_files()
    with cluster(SIZE, shm=(shm,), tuning=(Tuning(streams=STREAMS, piece=64),)) as ranks:
        ranks.all(lambda c: c.world.barrier())
        assert ranks.all(works) == [True] * SIZE
        pairs = SIZE * (SIZE - 1) // 2
        assert open_files() - before == pairs * EACH * 2  # both ends are here
        assert not any(
            c._expected or c._arrived for c in (t.transport.connector for t in ranks.communicators)
        )
    del ranks
    assert open_files() == before


@pytest.mark.parametrize("failing", [0, STREAMS + 1, EACH - 1, 2 * EACH - 1])
@pytest.mark.parametrize("silent", [False, True])
def test_if_one_connection_fails_there_are_none(monkeypatch, caplog, failing, silent):
    """One of those of rank 0, the last of which are with rank 2; whether it is refused or never there."""
    caplog.set_level("INFO", "dmesh")
    monkeypatch.setattr(dedicated, "_CONNECT_WITHIN", 0.1)
    monkeypatch.setattr(dedicated, "_CHECK_EVERY", 0.05)
    dial, dialed = LocalConnector.dial, []

    def fail(self, peer, number, on_dialed, route):
        if self._rank == 0:
            dialed.append(number)
            if len(dialed) == failing + 1:
                return None if silent else on_dialed(None, "the test refuses it")
        return dial(self, peer, number, on_dialed, route)

    monkeypatch.setattr(LocalConnector, "dial", fail)
    before = open_files()
    with cluster(SIZE, shm=("dedicated",), tuning=(Tuning(streams=STREAMS),)) as ranks:
        ranks.all(lambda c: c.world.barrier())
        assert ranks.all(works) == [True] * SIZE  # by messages
        assert [c.world._generation.endpoint for c in ranks.communicators] == [None] * SIZE
        assert open_files() == before
    said = "after 0.1 s" if silent else "the test refuses it"
    assert f"there is no connection with rank {1 + failing // EACH}" in caplog.text
    assert said in caplog.text
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("rank 0: ")
    assert warning.endswith("does without its dedicated connections, which is slower, until it begins anew")


@pytest.mark.parametrize(
    ("shm", "rounds"),
    [
        ("native", 3),  # what each can do, its region, and whether it has mapped all others
        ("dedicated", 3),  # what each can do, the numbers of its connections, and whether it has them all
        ("without", 1),
    ],
)
def test_a_group_chooses_its_backends_in_few_rounds(monkeypatch, shm, rounds):
    swap, swaps = Exchange.swap, []

    def count(self, messages):
        swaps.append(self.position)
        return swap(self, messages)

    monkeypatch.setattr(Exchange, "swap", count)
    with cluster(SIZE, shm=(shm,)) as ranks:
        ranks.all(lambda c: c.world.barrier())
        ranks.all(lambda c: c.world.barrier())
    assert sorted(swaps) == sorted([*range(SIZE)] * rounds)


@pytest.mark.parametrize(
    ("shm", "call", "names"),
    [
        ("native", "barrier", ["shm"]),
        ("dedicated", "barrier", ["tcp"]),
        ("dedicated", "permute", ["tcp"]),
        ("encrypted", "barrier", ["tcp"]),
        ("encrypted", "permute", ["tcp"]),
        ("dedicated", "all_reduce", ["messages"]),  # of booleans, whose sums have another dtype
        ("without", "barrier", ["messages"]),
    ],
)
def test_the_chosen_backend_carries_out_the_first_call(monkeypatch, shm, call, names):
    started = []
    for kind in (EndpointBackend, MessageBackend):

        def note(self, request, buffers, work, start=kind.start):
            started.append((self.name, request.kind, work.sequence))
            return start(self, request, buffers, work)

        monkeypatch.setattr(kind, "start", note)
    with cluster(SIZE, shm=(shm,)) as ranks:
        if call == "barrier":
            ranks.all(lambda c: c.world.barrier())
        elif call == "all_reduce":
            assert ranks.all(lambda c: int(c.world.all_reduce(np.array(True)))) == [SIZE] * SIZE
        else:
            turned = ranks.all(lambda c: c.world.permute(np.array(c.rank), [(0, 1), (1, 2), (2, 0)]))
            assert turned[:3] == [2, 0, 1]
    assert started == [(name, call, 1) for name in names] * SIZE


@pytest.mark.parametrize("change", ["memory", "registered"])
def test_what_another_thread_changes_during_the_exchange_comes_too_late(monkeypatch, change):
    """The others have this member's message already, and decide by it."""
    swap, changed = Exchange.swap, []

    def change_after(self, messages):
        found = yield from swap(self, messages)
        if self.position == 0 and not changed:
            changed.append(True)
            if change == "memory":
                ranks.communicators[0].shared_memory.refusal = "another group has got none"
            else:
                monkeypatch.setitem(registered.factories, "late", None)
        return found

    monkeypatch.setattr(Exchange, "swap", change_after)
    with cluster(SIZE, shm=("native",)) as ranks:
        ranks.all(lambda c: c.world.barrier(timeout=20))
        backends = ranks.all(lambda c: [backend.name for backend in c.world.current.backends])
    assert changed
    always = ["messages", "loopback", "nccl"]
    assert backends == [always if change == "memory" else ["shm", *always]] * SIZE


@pytest.mark.parametrize("shm", ["dedicated", "encrypted"])
def test_connections_are_closed_if_there_is_no_endpoint(monkeypatch, shm):
    """As when there is no memory for one."""

    class Failing:
        class Endpoint:
            @staticmethod
            def over_sockets(*arguments):
                raise MemoryError

    def fail(core, position, found):
        return opened(Failing, position, found)

    opened = dedicated.TcpEndpoints
    monkeypatch.setattr("dmesh.collectives.connect.TcpEndpoints", fail)
    before = open_files()
    with cluster(SIZE, shm=(shm,), tuning=(Tuning(streams=STREAMS),)) as ranks:
        errors = ranks.run(lambda c: c.world.barrier())
        assert MemoryError in map(type, errors)
        # Who hears first of the other's failure fails with that.
        assert all(isinstance(error, MemoryError | CollectiveError) for error in errors)
        del errors
        ranks.close()
        ranks.communicators.clear()
        assert open_files() == before


def segments(sock: socket.socket) -> int:
    """Return how many packets a TCP connection has sent (`tcpi_segs_out`)."""
    return struct.unpack_from("I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 140), 136)[0]


@contextmanager
def tcp_pairs(count):
    """Yield the two ends of some connections over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        pairs = []
        for _ in range(count):
            near = stack.enter_context(socket.create_connection(server.getsockname()))
            pairs.append((near, stack.enter_context(server.accept()[0])))
            for sock in pairs[-1]:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield zip(*pairs, strict=True)


def test_an_answer_acknowledges_what_it_answers():
    """Each packet that only acknowledges costs as much as a send."""
    rounds = 500
    with tcp_pairs(3) as sides:
        sockets = [list(side) for side in sides]
        used = [sock for side in sockets for sock in side[1:]]
        agreed = Agreement(1, 0, (), ())
        groups = [
            dedicated.TcpEndpoints(
                native.core(), me, dedicated.Connections({1 - me: sockets[me]}, Tuning(), agreed)
            )
            for me in range(2)
        ]
        ends = [[group.open_transfers(*way) for way in ((0, 1), (1, 0))] for group in groups]

        def answer():
            x = np.zeros(1)
            for _ in range(2 * rounds):
                finish(ends[1][0], ends[1][0].recv(x, None))
                finish(ends[1][1], ends[1][1].send(x))

        def ask():
            x = np.zeros(1)
            for _ in range(rounds):
                finish(ends[0][0], ends[0][0].send(x))
                finish(ends[0][1], ends[0][1].recv(x, None))

        thread = threading.Thread(target=answer)
        thread.start()
        ask()  # a new connection acknowledges the first packets at once
        before = sum(map(segments, used))
        ask()
        thread.join()
        assert sum(map(segments, used)) - before < 1.2 * 2 * rounds


@pytest.mark.parametrize("closed", [False, True], ids=["dropped", "at exit"])
def test_arrays_that_nobody_received_reset_no_connection(closed):
    """A reset would drop what this rank has sent itself and what is still under way."""
    with tcp_pairs(3) as sides:
        near, far = (list(side) for side in sides)
        found = dedicated.Connections({1: near}, Tuning(), Agreement(1, 0, (), ()))
        endpoints = dedicated.TcpEndpoints(native.core(), 0, found)
        for sock in far[1:]:
            sock.sendall(bytes(100_000))
        backend = TcpBackend((0, 1), 0, endpoints)
        near[2].send(b"sent")
        if closed:  # the process ends without finalizers
            backend.close(orderly=True)
            for sock in near[1:]:
                sock.close()
        del endpoints, backend, found
        gc.collect()
        assert far[2].recv(10) == b"sent"
        assert [sock.recv(10) for sock in far[1:]] == [b"", b""]  # no ConnectionResetError


def test_what_tls_found_is_the_cause_of_the_error(monkeypatch):
    monkeypatch.setattr("dmesh.collectives.backends.endpoints._EXPLAINED_WITHIN", 0.05)
    with cluster(2, shm=("encrypted",)) as ranks:
        ranks.all(lambda c: c.world.barrier())
        first = ranks.communicators[0].world._generation.endpoint
        (sock,) = first.keep_alive.sockets[1]
        os.write(sock.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))  # a record under no key of theirs
        (error,) = ranks.run(lambda c: c.world.all_reduce(np.ones(3)), (1,))
        assert type(error) is CollectiveError
        assert "the connection with rank 0 for this group has ended" in str(error)
        assert isinstance(error.__cause__, ssl.SSLError)
