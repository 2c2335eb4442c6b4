"""Scenario 33: outsiders, liars and noise at the door of the data plane, while collectives go on inside.

Ranks 0 and 1 are processes that add up numbers all the time. The test plays everybody else: outsiders who
know nothing, and rank 2, which has the secret but breaks the rules.
"""

from __future__ import annotations

import contextlib
import errno
import json
import pickle
import random
import socket
import struct
import threading
import time
from typing import Any

import pytest
from tests.faults.processes import ClientProcess, errors, eventually, results

from dmesh.collectives.backends.tcp.connection import encode
from dmesh.collectives.backends.tcp.frames import (
    CHUNK_LIMIT,
    CONTROL_LIMIT,
    EAGER_LIMIT,
    VERSION,
    Frame,
    Kind,
)
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
from dmesh.collectives.control_messages import MAX_BYTES

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

INPUTS = 10_000
"""Of each repetition."""
SECRET, CLUSTER = b"the secret of the test", b"cluster 1"
MIB = 2**20
GROWTH = 10 * MIB
UNEXPECTED_LIMIT = MIB
PATIENCE = 60.0

BEGIN = """
import gc, socket
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.services import WaitPolicy
from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.backends.tcp.connecting import TcpOptions
from dmesh.collectives.backends.tcp.tcp_transport import TcpTransport
from dmesh.errors import CollectiveError

secret, cluster = b"the secret of the test", b"cluster 1"
rank = {rank}
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
result = listener.getsockname()[1]
"""
CONNECT = """
def peers_of(ports, incarnations):
    return [
        Peer(at, ("127.0.0.1:" + str(port),), incarnation, "task " + str(at))
        for at, (port, incarnation) in enumerate(zip(ports, incarnations))
    ]

gone = []
tell = lambda at, why: gone.append([at, why])
options = TcpOptions(
    unexpected_limit={unexpected_limit}, handshake_timeout={handshake_timeout}, most_unproven={most_unproven}
)
transport = TcpTransport(rank, listener, lambda: secret, cluster, 100 + rank, options)
communicator = Communicator(rank, peers_of({ports}, {incarnations}), transport, 60.0, on_gone=tell)
pair = communicator.new_group([0, 1], "pair")
done, trouble, stop = [0], [], threading.Event()

def work():
    x = np.arange(20_000.0)
    while True:
        try:
            if pair.all_reduce(int(stop.is_set()), "max"):  # both stop at the same time
                return
            total = pair.all_reduce(x + rank)
            assert total.tobytes() == (2 * x + 1).tobytes()
            done[0] += 1
        except BaseException as error:
            trouble.append(repr(error))
            return

worker = threading.Thread(target=work, daemon=True)
worker.start()
"""


class Victims:
    """Ranks 0 and 1."""

    def __init__(self, clients: list[ClientProcess], **options: Any) -> None:
        self.clients = clients
        self.generation = 0
        self.incarnations = [100, 101, 1002]
        self.ports = [client.do(BEGIN.format(rank=rank)) for rank, client in enumerate(clients)] + [1]
        settings = {
            "unexpected_limit": UNEXPECTED_LIMIT,
            "handshake_timeout": 0.5,
            "most_unproven": 128,
            **options,
        }
        begin = CONNECT.format(ports=self.ports, incarnations=self.incarnations, **settings)
        results([client.submit(begin) for client in clients])
        self.check_progress()

    def check_progress(self) -> None:
        """The healthy collectives go on."""
        for client in self.clients:
            before, trouble = client.do("[done[0], trouble]")
            assert trouble == []
            eventually(lambda client=client, before=before: client.do("done[0]") > before, "progress")

    def check_unharmed(self, before: list[dict[str, int]]) -> None:
        self.check_progress()
        for client, then in zip(self.clients, before, strict=True):
            eventually(
                lambda client=client, then=then: client.size["fds"] <= then["fds"], "sockets to be closed"
            )
            now = client.do("gc.collect()") is not None and client.size
            assert now["threads"] <= then["threads"]
            assert now["rss"] - then["rss"] < GROWTH, (then, now)
            lines = client.process.err.count("\n")
            assert lines < 100, client.process.err[-2000:]

    def sizes(self) -> list[dict[str, int]]:
        self.check_progress()
        return [client.size for client in self.clients]

    def connect(self, rank: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.ports[rank]), timeout=PATIENCE)
        sock.settimeout(PATIENCE)
        return sock

    def shake_hands(self, rank: int, /, **claims: Any) -> socket.socket:
        """Enters as rank 2, or as what `claims` says."""
        sock = self.connect(rank)
        dialer = Dialer(*self.claim(rank, **claims))
        try:
            sock.sendall(dialer.begin())
            sock.sendall(dialer.feed(read_exactly(sock, CHALLENGE_SIZE)))
            dialer.feed(read_exactly(sock, WELCOME_SIZE))
        except BaseException:
            sock.close()
            raise
        return sock

    def claim(self, rank: int, /, **claims: Any) -> tuple[Credentials, int, int, str]:
        claims = {"rank": 2, "incarnation": self.incarnations[2], "cluster": CLUSTER, "secret": SECRET,
                  "generation": self.generation, "expects": self.incarnations[rank], "wants": rank,
                  **claims}  # fmt: skip
        me = Credentials(
            claims["rank"],
            claims["incarnation"],
            claims["cluster"],
            lambda: claims["secret"],
            lambda: claims["generation"],
        )
        return me, claims["wants"], claims["expects"], "a victim"

    def renew(self) -> None:
        """Rank 2 is another process now; the pair begins anew, too."""
        results([client.submit("stop.set(); worker.join(60)") for client in self.clients])
        assert [client.do("trouble") for client in self.clients] == [[], []]
        self.generation += 2
        self.incarnations[2] += 1
        order = f"communicator.renew(peers_of({self.ports}, {self.incarnations}), {self.generation})"
        results([client.submit(order) for client in self.clients])
        again = (
            "gone.clear(); stop.clear(); worker = threading.Thread(target=work, daemon=True); worker.start()"
        )
        results([client.submit(again) for client in self.clients])


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "the connection was closed"
        data += piece
    return data


def is_closed(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


@pytest.fixture
def make_victims(make_client):
    def make(**options: Any) -> Victims:
        return Victims([make_client(rank, 2, "127.0.0.1:1") for rank in range(2)], **options)

    return make


# -- outsiders ---------------------------------------------------------------------------------------------


class Boom:
    """Would leave a trace if somebody unpickled it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def noise(chance: random.Random, victims: Victims, trace: str) -> bytes:
    """What an outsider may say: nonsense, other protocols, and greetings that are nearly right."""
    hello = Dialer(*victims.claim(0, secret=b"guess", incarnation=chance.getrandbits(64))).begin()
    true = Dialer(*victims.claim(0)).begin()
    kind = chance.randrange(11)
    if kind == 0:
        return chance.randbytes(chance.randrange(400))
    if kind == 1:
        return b"GET /" + chance.randbytes(8).hex().encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    if kind == 2:
        return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200)  # TLS
    if kind == 3:
        return pickle.dumps(Boom(trace))
    if kind == 4:  # a frame in the place of a greeting, of 2^40 bytes
        return struct.pack("!BBHIQQQQ", VERSION, chance.choice([1, 4, 6]), 0, 0, 0, 1, 1, 2**40)
    if kind == 5:
        return hello[: chance.randrange(HELLO_SIZE)]
    if kind == 6:
        spoiled = bytearray(true)
        spoiled[chance.randrange(HELLO_SIZE - 32)] ^= 1 << chance.randrange(8)
        return bytes(spoiled)
    if kind == 7:
        return hello + chance.randbytes(PROOF_SIZE)
    if kind == 8:
        return true + chance.randbytes(PROOF_SIZE)
    if kind == 9:
        return true + chance.randbytes(chance.randrange(PROOF_SIZE))
    return chance.randbytes(chance.choice([1, 7, 8, 9, 100_000]))


@pytest.mark.timeout(900)
def test_ten_thousand_outsiders_cost_nothing_and_disturb_nobody(make_victims, chance, tmp_path, figures):
    victims = make_victims()
    trace = str(tmp_path / "unpickled")
    warm_up = [noise(random.Random(seed), victims, trace) for seed in range(200)]
    for data in warm_up:
        visit(victims, data, chance)
    before = victims.sizes()
    began = time.monotonic()
    inputs = [(noise(chance, victims, trace), chance.getrandbits(32)) for _ in range(INPUTS)]
    failures: list[BaseException] = []

    def attack(part: int) -> None:
        try:
            for data, seed in inputs[part::8]:
                visit(victims, data, random.Random(seed))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    attackers = [threading.Thread(target=attack, args=(part,)) for part in range(8)]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join()
    assert not failures, failures[0]
    figures.add("outsiders a second", INPUTS / (time.monotonic() - began), "/s")
    victims.check_unharmed(before)
    assert not (tmp_path / "unpickled").exists()
    grown = max(now["rss"] - then["rss"] for now, then in zip(victims.sizes(), before, strict=True))
    figures.add(f"resident memory after {INPUTS} outsiders", grown / MIB, "MiB")
    with victims.shake_hands(0):  # who has the secret gets in as ever
        pass


def visit(victims: Victims, data: bytes, chance: random.Random) -> None:
    """Says something, and hangs up in one of the ways in which one can."""
    with victims.connect(chance.randrange(2)) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(data)
        ending = chance.randrange(3)
        if ending == 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif ending == 1:
            try:
                sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                if error.errno != errno.ENOTCONN:
                    raise
                return  # the victim has hung up first
            is_closed(sock)


@pytest.mark.parametrize(
    ("claims", "status"),
    [
        ({"secret": b"guess"}, Status.WRONG_PROOF),
        ({"cluster": b"cluster 2"}, Status.WRONG_CLUSTER),
        ({"incarnation": 77}, Status.WRONG_INCARNATION),
        ({"incarnation": 77, "generation": 5}, Status.NOT_YET),
        ({"expects": 77}, Status.WRONG_INCARNATION),
        ({"rank": 3}, Status.UNKNOWN_RANK),
        ({"wants": 1}, Status.WRONG_RANK),
        ({"rank": 1, "incarnation": 101}, Status.CONNECTED),
    ],
    ids=[
        "secret",
        "cluster",
        "process",
        "process not known yet",
        "former victim",
        "rank",
        "address",
        "twice",
    ],
)
def test_who_is_not_exactly_a_peer_is_refused_and_told_why(claims, status, make_victims):
    victims = make_victims()
    before = victims.sizes()
    for _ in range(50):
        with pytest.raises(Refused) as caught:
            victims.shake_hands(0, **claims)
        assert caught.value.status is status
    victims.check_unharmed(before)
    assert all(client.do("gone") == [] for client in victims.clients)


def test_a_crowd_that_says_nothing_or_very_slowly_keeps_nobody_out(make_victims, chance, figures):
    victims = make_victims(handshake_timeout=30.0, most_unproven=32)
    before = victims.sizes()
    hello = Dialer(*victims.claim(0, secret=b"guess")).begin()
    stop = threading.Event()

    def loiter() -> None:
        """Keeps 50 connections open; each says a byte now and then, and is replaced when it is closed."""
        with contextlib.ExitStack() as stack:
            crowd = [[stack.enter_context(victims.connect(0)), 0] for _ in range(50)]
            while not stop.wait(0.02):
                for member in crowd:
                    sock, said = member
                    try:
                        sock.send(hello[said : said + 1])
                        member[1] = min(said + 1, HELLO_SIZE - 1)
                    except OSError:
                        sock.close()
                        member[:] = [stack.enter_context(victims.connect(0)), 0]

    crowds = [threading.Thread(target=loiter) for _ in range(4)]
    for crowd in crowds:
        crowd.start()
    try:
        for _ in range(5):
            began = time.monotonic()
            victims.renew()  # rank 2 is new, and has never been connected

            def enter() -> bool:
                try:
                    victims.shake_hands(0).close()
                except (AssertionError, ConnectionError):
                    return False  # closed in the crowd: peers try again, too
                return True

            eventually(enter, "a peer to get in")
            figures.add("a peer gets in through a crowd of 200", time.monotonic() - began)
            assert victims.clients[0].size["fds"] <= before[0]["fds"] + 32 + 4
            victims.check_progress()
    finally:
        stop.set()
        for crowd in crowds:
            crowd.join()
    victims.check_unharmed(before)


# -- a peer that breaks the rules ----------------------------------------------------------------------------


def frame(
    kind: int, *, length: int = 0, signature: int = 0, version: int = VERSION, generation: int = 0
) -> bytes:
    return struct.pack("!BBHIQQQQ", version, kind, signature, 0, generation, 1, 1, length)


BROKEN = {
    "2^40 bytes of data": (frame(1, length=2**40), f"length {2**40}, which must be 0 to {EAGER_LIMIT}"),
    "2^40 bytes of a piece": (frame(4, length=2**40), f"must be 1 to {CHUNK_LIMIT}"),
    "2^63 bytes offered": (frame(2, length=2**63), "OFFER frame came with length"),
    "a huge message": (
        struct.pack("!BBHIQQQQ", VERSION, 6, 0, 0, 0, 0, 0, CONTROL_LIMIT + 1),
        f"must be 0 to {CONTROL_LIMIT}",
    ),
    "a piece that nobody asked for": (frame(4, length=CHUNK_LIMIT, generation=99), "nobody asked for"),
    "a long signature": (frame(1, signature=65535), "a signature of 65535 bytes"),
    "another version": (frame(1, version=1), "received a frame of version 1"),
    "an unknown kind": (frame(99), "unknown kind 99"),
    "noise": (b"\xff" * 5000, "version 255"),
    "a pickle": (pickle.dumps(Boom("/nonexistent/never")), "version 128"),
    "half a header": (frame(1)[:17], "closed without a goodbye"),
    "half a payload": (frame(1, length=1000) + bytes(10), "closed without a goodbye"),
    "more after goodbye": (bytes(encode(Frame(Kind.GOODBYE))) + frame(1), "it has left the cluster"),
}


def test_a_peer_that_breaks_the_rules_is_lost_at_once_and_costs_nothing(make_victims):
    victims = make_victims()
    before = victims.sizes()
    for sent, problem in BROKEN.values():
        with victims.shake_hands(0) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
        gone = eventually(lambda: victims.clients[0].do("gone"), "the liar to be lost")
        assert len(gone) == 1
        assert gone[0][0] == 2
        assert problem in gone[0][1], (problem, gone)
        with pytest.raises(Refused):
            victims.shake_hands(0)  # not a second time
        victims.check_progress()
        victims.renew()
    victims.check_unharmed(before)


def test_messages_that_mean_nothing_are_ignored_and_fill_no_log(make_victims, chance, tmp_path):
    victims = make_victims()
    before = victims.sizes()
    trace = tmp_path / "unpickled"
    with victims.shake_hands(0) as sock:
        for turn in range(2000):
            message = chance.choice(
                [
                    chance.randbytes(chance.randrange(200)),
                    pickle.dumps(Boom(str(trace))),
                    b"[" * 5000,
                    json.dumps({"kind": "abort", "generation": 0, "group": turn, "cause": "eval"}).encode(),
                    json.dumps({"kind": "where", "group": -1}).encode(),
                    json.dumps({"kind": "here", "group": 2**70}).encode(),
                    json.dumps({"kind": chance.randbytes(20).hex()}).encode(),
                    b"x" * (MAX_BYTES + 1),
                ]
            )
            sock.sendall(encode(Frame(Kind.CONTROL, length=len(message))) + message)
        last = Frame(Kind.DATA, 77, 1, 0, 0, b"x", victims.generation)
        sock.sendall(encode(last))
        eventually(
            lambda: victims.clients[0].do("transport.message_queue.buffered_bytes(2)"), "all of it to be read"
        )
        assert victims.clients[0].do("gone") == []
    victims.check_unharmed(before)
    assert not trace.exists()


@pytest.mark.parametrize("generation", [0, 7], ids=["this generation", "one to come"])
def test_a_flood_that_nobody_wants_is_kept_within_its_budget(generation, make_victims):
    """It stops being read; the pair does not notice."""
    victims = make_victims()
    before = victims.sizes()
    payload = bytes(EAGER_LIMIT)
    flood = Frame(Kind.DATA, 77, 1, 0, len(payload), b"x", generation)
    with victims.shake_hands(0) as sock:
        sock.settimeout(1.0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            for step in range(4096):  # 256 MiB, far more than the kernel takes
                sock.sendall(encode(flood._replace(step=step)) + payload)
                sent += len(payload)
        assert sent < 4096 * EAGER_LIMIT
        kept = victims.clients[0].do("transport.message_queue.buffered_bytes(2)")
        assert kept <= UNEXPECTED_LIMIT + 2 * EAGER_LIMIT
        victims.check_progress()

    victims.renew()
    victims.check_unharmed(before)
    assert victims.clients[0].do("transport.message_queue.buffered_bytes(2)") == 0


def test_frames_of_a_former_generation_are_dropped_and_not_kept(make_victims):
    victims = make_victims()
    victims.renew()
    before = victims.sizes()
    payload = bytes(EAGER_LIMIT)
    old = Frame(Kind.DATA, 77, 1, 0, len(payload), b"x", victims.generation - 1)
    with victims.shake_hands(0) as sock:
        for step in range(1024):
            sock.sendall(encode(old._replace(step=step)) + payload)
        sock.sendall(encode(Frame(Kind.GOODBYE)))
        eventually(lambda: victims.clients[0].do("gone"), "all of it to be read")
        assert victims.clients[0].do("transport.message_queue.buffered_bytes(2)") == 0
    victims.check_unharmed(before)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ("np.ones(3)", "np.ones(3, 'f4')"),
        ("np.ones((3, 4))", "np.ones((4, 3))"),
        ("np.ones(9)", "np.ones(90_000)"),
    ],
    ids=["dtype", "shape", "size"],
)
def test_another_dtype_or_shape_is_an_error_on_both_sides(mine, other, make_victims):
    victims = make_victims()
    for client in victims.clients:
        client.do("odd = communicator.new_group([0, 1], 'odd')")
    calls = [
        client.submit(f"odd.all_reduce({x})")
        for client, x in zip(victims.clients, (mine, other), strict=True)
    ]
    for error in errors(calls):
        assert error.kind == "CollectiveMismatchError"
        assert "rank 0 called all_reduce(" in error.message
        assert "rank 1 called all_reduce(" in error.message
    victims.check_progress()
