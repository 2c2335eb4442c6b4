"""TLS connections over real sockets: partial writes, bytes that the selector cannot see, certificates."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading

import pytest
from tests.collectives.transport.harness import LIMIT, authority, pattern
from tests.faults.secured import Authority

from dmesh.collectives.backends.tcp.tls import PeerTls, claimed_rank, explain
from dmesh.errors import ConfigurationError
from dmesh.security.certificates import IdentityFiles
from dmesh.security.secure_socket import SecureSocket, Unencrypted, speaks_tls

MIB = 2**20


def certificates(issuer: Authority | None = None, trusted: Authority | None = None, **options) -> PeerTls:
    issuer = issuer or authority()
    return PeerTls(IdentityFiles(*issuer.issue("someone", **options)), (trusted or issuer).path)


def wait(sock: SecureSocket, *, write: bool = False) -> None:
    ready = select.select([] if write else [sock], [sock] if write else [], [], LIMIT)
    assert any(ready), "the other side does nothing"


def until_done(attempt, sock: SecureSocket, *, write: bool = False):
    while True:
        try:
            return attempt()
        except BlockingIOError:
            wait(sock, write=write)


def shake_hands(*sides: SecureSocket) -> None:
    threads = [threading.Thread(target=until_done, args=(side.handshake, side)) for side in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert all(side.established for side in sides)


def sockets(buffer: int | None = None) -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    return pair


@contextlib.contextmanager
def connected(buffer: int | None = None, tls: PeerTls | None = None):
    tls = tls or certificates()
    one, other = sockets(buffer)
    dialer, acceptor = tls.dial(one, 3), tls.accept(other)
    try:
        shake_hands(dialer, acceptor)
        yield dialer, acceptor
    finally:
        dialer.close()
        acceptor.close()


def write_all(sock: SecureSocket, *pieces: bytes | memoryview) -> int:
    """Write as the send queue does; return how often it had to wait."""
    rest, waits = [memoryview(piece) for piece in pieces], 0
    while rest:
        try:
            written = sock.sendmsg(rest)
        except BlockingIOError:
            waits += 1
            wait(sock, write=True)
            continue
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
    return waits


def read_exactly(sock: SecureSocket, size: int) -> bytearray:
    into = bytearray(size)
    done = 0
    while done < size:
        rest = memoryview(into)[done:]
        count = until_done(lambda rest=rest: sock.recv_into(rest), sock)
        assert count, "the connection ended"
        done += count
    return into


def test_both_ends_know_the_same_binding_and_each_connection_has_its_own():
    with connected() as (dialer, acceptor), connected() as (other, _):
        assert dialer.binding == acceptor.binding
        assert len(dialer.binding) >= 12
        assert dialer.binding != other.binding
        assert dialer._tls.version() == "TLSv1.3"


def test_tls_1_2_is_the_oldest_accepted_version():
    tls = certificates()
    tls._client.maximum_version = ssl.TLSVersion.TLSv1_2
    with connected(tls=tls) as (dialer, acceptor):
        assert dialer._tls.version() == "TLSv1.2"
        assert dialer.binding == acceptor.binding
        assert len(dialer.binding) >= 12
    assert tls._client.minimum_version == tls._server.minimum_version == ssl.TLSVersion.TLSv1_2


def test_large_writes_through_a_small_buffer_arrive_unchanged_in_both_directions_at_once():
    with connected(buffer=4096) as (dialer, acceptor):
        data = {dialer: pattern(8 * MIB + 5, 1), acceptor: pattern(8 * MIB + 7, 2)}
        waits, got = {}, {}

        def write(sock):
            view = memoryview(data[sock])
            waits[sock] = write_all(
                sock, bytes(view[:40]), view[40:MIB], view[MIB : MIB + 3], view[MIB + 3 :]
            )

        def read(sock, size):
            got[sock] = read_exactly(sock, size)

        threads = [
            threading.Thread(target=target, args=args)
            for sock, other in ((dialer, acceptor), (acceptor, dialer))
            for target, args in ((write, (sock,)), (read, (sock, len(data[other]))))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert got == {dialer: data[acceptor], acceptor: data[dialer]}
        assert min(waits.values()) > 0


def test_a_blocked_write_is_not_repeated_when_its_memory_is_replaced_by_a_copy():
    """The send queue passes a copy of the same bytes."""
    with connected(buffer=4096) as (dialer, acceptor):
        data = pattern(MIB)
        written = 0
        while True:
            try:
                written += dialer.sendmsg([memoryview(data)[written:]])
            except BlockingIOError:
                break
        got = read_exactly(acceptor, written)
        again = bytes(data[written:])
        data[:] = bytes(len(data))
        reader = threading.Thread(target=lambda: got.extend(read_exactly(acceptor, len(again))))
        reader.start()
        write_all(dialer, again)
        reader.join(LIMIT)
        assert got == pattern(MIB)


def test_decrypted_bytes_are_reported_as_hidden_until_they_are_read():
    with connected() as (dialer, acceptor):
        write_all(dialer, b"a" * 10, bytes(100))
        wait(acceptor)
        assert acceptor.recv(10) == b"a" * 10
        assert select.select([acceptor], [], [], 0) == ([], [], [])
        assert acceptor.hidden
        assert acceptor.recv(1000) == bytes(100)
        assert not acceptor.hidden
        with pytest.raises(BlockingIOError):
            acceptor.recv(1)
        assert not acceptor.hidden


def test_the_end_comes_after_all_written_bytes_and_stays():
    with connected() as (dialer, acceptor):
        write_all(dialer, bytes(1000))
        dialer.shutdown(socket.SHUT_WR)
        views = [memoryview(bytearray(999)), memoryview(bytearray(500))]
        assert until_done(lambda: acceptor.recvmsg_into(views), acceptor) == (1000,)
        assert acceptor.recv(10) == b""
        assert acceptor.recv(10) == b""
        write_all(acceptor, b"still here")  # the other direction is open
        assert read_exactly(dialer, 10) == b"still here"


def test_a_changed_bit_is_detected_and_the_bytes_before_it_count():
    tls = certificates()
    one, other = sockets()
    middle_one, middle_other = sockets()
    dialer, acceptor = tls.dial(one, 0), tls.accept(middle_other)
    stop, spoil = threading.Event(), threading.Event()

    def relay():
        routes = {other: middle_one, middle_one: other}
        while not stop.is_set():
            for source in select.select(list(routes), [], [], 0.01)[0]:
                data = bytearray(source.recv(65536))
                if spoil.is_set():
                    data[-1] ^= 1
                routes[source].sendall(data)

    relaying = threading.Thread(target=relay)
    relaying.start()
    try:
        shake_hands(dialer, acceptor)
        spoil.set()
        dialer._encrypt([b"good"])
        dialer._encrypt([bytes(20_000)])  # a record of its own, of which the last bit will be changed
        write_all(dialer, b"")
        dialer._flush()
        buffer = bytearray(50_000)
        assert until_done(lambda: acceptor.recv_into(memoryview(buffer)), acceptor) >= 4
        assert buffer[:4] == b"good"
        with pytest.raises(ssl.SSLError, match=r"(?i)bad record mac|decryption failed|record layer failure"):
            until_done(lambda: acceptor.recv(100_000), acceptor)
        with pytest.raises(OSError):
            until_done(lambda: dialer.recv(10), dialer)  # it gets the alert
    finally:
        stop.set()
        relaying.join(LIMIT)
        for sock in (dialer, acceptor, other, middle_one):
            sock.close()


def test_too_many_bytes_before_the_end_of_the_handshake_end_the_connection():
    tls = certificates()
    one, other = sockets()
    acceptor = tls.accept(other)
    with one:
        # A message of 16 MiB in the handshake, of which the records are well-formed.
        one.send(b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes(16 * 1024 - 4))
        with pytest.raises(OSError):
            for _ in range(100):
                with contextlib.suppress(BlockingIOError):
                    acceptor.handshake()
                with contextlib.suppress(BlockingIOError):
                    one.send(b"\x16\x03\x01\x40\x00" + bytes(16 * 1024))
        assert acceptor._received <= 64 * 1024 + 4096
    acceptor.close()


def test_an_answer_without_tls_is_detected():
    one, other = sockets()
    dialer = certificates().dial(one, 0)
    with other:
        other.send(b"\x0b" + bytes(47))
        with pytest.raises(Unencrypted):
            until_done(dialer.handshake, dialer)
    dialer.close()


def test_the_claimed_rank_is_found_in_whole_partial_and_foreign_first_messages():
    one, other = sockets()
    dialer = certificates().dial(one, 41)
    with other:
        with pytest.raises(BlockingIOError):
            dialer.handshake()
        greeting = other.recv(4096)
    dialer.close()
    assert speaks_tls(greeting)
    assert claimed_rank(greeting) == 41
    for part in (greeting[:1], greeting[:100], b"\x16\x03\x01\x00\x05hello", b"\x15" + bytes(300)):
        assert claimed_rank(part) is None


# -- certificates ------------------------------------------------------------------------------------------


def fail(dialer: SecureSocket, acceptor: SecureSocket) -> dict[str, str]:
    """Run both sides until they fail; return their explanations."""
    said: dict[str, str] = {}
    for _ in range(10):
        for name, side in (("dialer", dialer), ("acceptor", acceptor)):
            try:
                if name not in said:
                    side.handshake()
                    side.recv(1)
            except BlockingIOError:
                continue
            except ssl.SSLError as error:
                said[name] = explain(error)
    dialer.close()
    acceptor.close()
    return said


def test_a_certificate_of_another_authority_is_refused_by_either_side_and_both_can_say_why(tmp_path):
    other = Authority(tmp_path, "other")
    foreign = certificates(other)
    one, two = sockets()
    said = fail(foreign.dial(one, 0), certificates().accept(two))
    assert "wrong CA" in said["dialer"]
    assert "wrong CA" in said["acceptor"]
    half = PeerTls.__new__(PeerTls)  # trusts the cluster's authority, but has a certificate of another
    half._identity, half._ca = IdentityFiles(*other.issue("half")), authority().path
    with pytest.raises(ConfigurationError, match="wrong CA"):
        half._load()


def test_a_missing_certificate_is_refused_and_both_can_say_so():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority().path)
    one, two = sockets()
    said = fail(SecureSocket(one, context, server_side=False), certificates().accept(two))
    assert said["acceptor"] == "it showed no certificate"
    assert said["dialer"] == "it does not accept this client's certificate: none was shown"


@pytest.mark.parametrize(
    ("days", "problem"),
    [((-9, -1), "it has expired"), ((2, 9), "it is not yet valid")],
    ids=["late", "early"],
)
def test_a_certificate_that_peers_would_refuse_is_reported_at_the_start(days, problem):
    with pytest.raises(ConfigurationError, match=f"DMESH_TLS_CERT/DMESH_TLS_KEY: .*{problem}"):
        certificates(days=days)


def test_files_that_cannot_be_used_are_named(tmp_path):
    cert, key = authority().issue("files")
    _, other_key = authority().issue("other")
    text = tmp_path / "text.pem"
    text.write_text("nothing")
    for identity, ca, problem in (
        ((tmp_path / "none.pem", key), authority().path, "none.pem"),
        ((cert, tmp_path / "none.key"), authority().path, "none.key"),
        ((cert, key), tmp_path / "none.pem", "DMESH_TLS_CA .*none.pem cannot be read"),
        ((cert, key), text, "text.pem is not a PEM file"),
        ((text, key), authority().path, "text.pem"),
        ((cert, other_key), authority().path, "does not belong to the certificate"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            PeerTls(IdentityFiles(*identity), ca)


def test_replaced_certificates_are_used_for_the_next_connection(tmp_path, caplog):
    own = Authority(tmp_path)
    tls = certificates(own)
    tls._files._interval = 0.0

    def serial() -> str:
        with connected(tls=tls) as (dialer, _):
            return dialer._tls.getpeercert()["serialNumber"]

    first = serial()
    assert serial() == first
    cert, _ = own.issue("someone")
    second = serial()
    assert second != first
    cert.write_text("nothing that can be used")
    assert serial() == second
    assert "keeping the certificates read before" in caplog.text


@pytest.mark.parametrize("size", [1, 100, 20_000, MIB])
def test_a_look_takes_nothing(size):
    """The same bytes come again, however they are read, and what follows them comes in order."""
    data = bytes(pattern(size))
    with connected() as (one, other):
        writer = threading.Thread(target=write_all, args=(one, data, b"end"))
        writer.start()

        def look(*views: bytearray) -> int:
            pieces = [memoryview(view) for view in views]
            return until_done(lambda: other.recvmsg_into(pieces, 0, socket.MSG_PEEK), other)[0]

        seen, again, more = bytearray(min(size, 1000)), bytearray(min(size, 1000)), bytearray(3)
        while look(seen) < len(seen):
            pass
        assert look(again, more) >= len(seen)
        assert seen == again == data[: len(seen)]
        found = b""
        while len(found) < size + 3:
            found += until_done(lambda: other.recv(777), other)
        assert found == data + b"end"
        writer.join(LIMIT)
