"""Sessions with connections of their own, and over gRPC: the same calls, whatever becomes of either."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import free_ports

from dmesh.coordination import framed_connection, session
from dmesh.coordination.carrier import Heartbeats, NoCarrier
from dmesh.coordination.credentials import ClientTls, Credentials
from dmesh.coordination.framed_connection import FramedConnection
from dmesh.coordination.stream import GrpcStream
from dmesh.errors import CoordinatorUnavailableError
from dmesh.security import authority
from dmesh.security.certificates import IdentityFiles
from dmesh.testing import FaultProxy
from dmesh.v1 import coordination_pb2 as pb
from dmesh_server.core.model import Limits
from dmesh_server.embedded import EmbeddedServer
from dmesh_server.embedded import start as start_server

PATIENCE = 60.0
_SO_ATTACH_FILTER = 26


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an authority, and certificates of a server and a worker."""
    directory = tmp_path_factory.mktemp("certificates")
    authority.create(directory, 1)
    for name in ("server", "worker"):
        authority.issue(directory, name, ["127.0.0.1", "localhost"], 1)
    return directory


def files(directory: Path, name: str) -> IdentityFiles:
    return IdentityFiles(directory / f"{name}.pem", directory / f"{name}.key")


@pytest.fixture
def secured(certificates: Path, limits: Limits) -> Iterator[EmbeddedServer]:
    """A server with TLS that asks its clients for certificates."""
    server = start_server(
        "127.0.0.1:0",
        limits,
        certificates=(files(certificates, "server"), certificates / "ca.pem"),
        insecure=True,
    )
    yield server
    server.stop(0.1)


def worker(certificates: Path, server_name: str | None = None) -> Credentials:
    return Credentials(None, ClientTls(certificates / "ca.pem", files(certificates, "worker"), server_name))


@pytest.fixture(params=["framed", "encrypted", "gRPC"])
def carried(request, join, monkeypatch) -> tuple[str, Callable[..., object]]:
    """The address of a server, and what makes agents of it with sessions of one kind."""
    if request.param == "encrypted":
        address = request.getfixturevalue("secured").address
        credentials = worker(request.getfixturevalue("certificates"))
    else:
        address, credentials = request.getfixturevalue("server").address, None
    if request.param == "gRPC":
        monkeypatch.setattr(framed_connection, "AVAILABLE", False)
    kind = GrpcStream if request.param == "gRPC" else FramedConnection

    def make(index: int, size: int, **options: object) -> object:
        agent = join(address, index, size, credentials=credentials, **options)
        assert isinstance(agent._session._carrier, kind)
        return agent

    return address, make


def framed(agent) -> FramedConnection:
    carrier = agent._session._carrier
    assert isinstance(carrier, FramedConnection)
    return carrier


def reset(agent) -> None:
    """Breaks a session's connection in the middle of whatever it is doing."""
    carrier = agent._session._carrier
    if isinstance(carrier, FramedConnection):
        carrier._hang_up()
    elif carrier is not None and carrier._call is not None:
        carrier._call.cancel()


def test_calls_barriers_and_waiting_reads(carried, background):
    _, make = carried
    first, second = (make(index, 2) for index in range(2))
    waits = background(first.key_value_get, "late", 60)
    second.key_value_set("late", b"\x00" * (1 << 20))
    assert waits.result(PATIENCE) == b"\x00" * (1 << 20)
    for _ in range(50):
        meets = background(first.barrier, "b")
        second.barrier("b")
        meets.result(PATIENCE)
    assert first._session.generation == 1


def test_messages_of_many_threads_arrive_and_are_answered(carried, background):
    _, make = carried
    agents = [make(index, 2) for index in range(2)]
    calls = [
        background(lambda agent=agent: [agent.key_value_increment("n") for _ in range(25)])
        for agent in agents
        for _ in range(4)
    ]
    numbers = [number for call in calls for number in call.result(PATIENCE)]
    assert sorted(numbers) == list(range(1, 201)), "each exactly once"


# How long a client may be away is not what this is about.
@pytest.mark.parametrize("limits", [Limits(lease=120.0, suspicion=PATIENCE)])
def test_a_connection_that_breaks_costs_no_call_and_repeats_none(limits, carried, background, eventually):
    """Every increment counts once, every barrier passes once, however often it breaks."""
    _, make = carried
    agents = [make(index, 2) for index in range(2)]

    def work(agent) -> None:
        for _ in range(60):
            agent.key_value_increment("n", 1)
            agent.barrier("b")

    done = [background(work, agent) for agent in agents]

    def is_over() -> bool:
        return all(future.done() for future in done)

    breaks = 0
    while not is_over():
        for agent in agents:
            generation = agent._session.generation
            reset(agent)
            eventually(lambda a=agent, g=generation: a._session.generation > g or is_over())
            breaks += 1
    for future in done:
        future.result(PATIENCE)
    assert breaks >= 4
    assert agents[0].key_value_get("n", encoding="utf-8") == "120"


def test_a_session_that_ends_says_why(carried, background, quick, request):
    _, make = carried
    agent = make(0, 1, patience=quick)
    waiting = background(agent.key_value_get, "never")
    server = request.getfixturevalue("secured" if agent._link.tls else "server")
    server.stop(0.1)
    with pytest.raises(CoordinatorUnavailableError, match="no contact with the coordinator"):
        waiting.result(PATIENCE)


def test_what_the_server_said_before_it_stopped_is_heard(carried, background, monkeypatch, request):
    _, make = carried
    late, early = (make(index, 2) for index in range(2))
    stopped = threading.Event()
    original = session.Session._receive

    def handle(self: session.Session, response: pb.SessionResponse, carrier: object) -> object:
        if self is late._session and response.HasField("barrier_result"):
            stopped.wait(PATIENCE)
        return original(self, response, carrier)

    monkeypatch.setattr(session.Session, "_receive", handle)
    waits = background(late.barrier, "b")
    early.barrier("b")
    request.getfixturevalue("secured" if early._link.tls else "server").stop(0.1)
    stopped.set()
    waits.result(PATIENCE)


def test_threads_end_with_the_session(carried, eventually):
    _, make = carried
    before = set(threading.enumerate())
    agent = make(0, 1)
    agent.key_value_set("k", "v")
    names = sorted(thread.name for thread in set(threading.enumerate()) - before)
    own = [name for name in names if name.startswith("dmesh-session")]
    assert own == ["dmesh-session"], names
    agent.leave()
    eventually(lambda: not {t for t in threading.enumerate() if t.name == "dmesh-session"} - before)


def test_what_the_server_does_not_take_at_once_is_sent_later(join, standalone, background, eventually):
    """The server is stopped while more is said than the network holds; nobody who speaks is kept waiting."""
    coordinator = standalone()
    agent = join(coordinator.address, 0, 1)
    carrier = framed(agent)
    os.kill(coordinator.child.pid, signal.SIGSTOP)
    try:
        calls = [background(agent.key_value_set, f"k{number}", bytes(1 << 20)) for number in range(20)]
        eventually(lambda: carrier._unsent)
        with agent._pending_calls._lock:  # free, whatever the network does
            pass
    finally:
        os.kill(coordinator.child.pid, signal.SIGCONT)
    for call in calls:
        call.result(PATIENCE)
    for number in range(20):
        assert len(agent.key_value_get(f"k{number}")) == 1 << 20
    assert framed(agent) is carrier


def test_large_messages_are_encrypted_and_sent_later(join, secured, certificates, background):
    agents = [join(secured.address, index, 2, credentials=worker(certificates)) for index in range(2)]
    calls = [background(agents[0].key_value_set, f"k{n}", os.urandom(1 << 20)) for n in range(12)]
    for call in calls:
        call.result(PATIENCE)
    gets = [background(agents[1].key_value_get, f"k{n}") for n in range(12)]
    assert [len(call.result(PATIENCE)) for call in gets] == [1 << 20] * 12
    framed(agents[0])


def test_the_name_in_the_certificate_is_checked_as_grpc_does(certificates, limits, join, tmp_path):
    """A server of another name: neither is accepted; with the name that it has, both are."""
    authority.issue(certificates, "other", ["other.example"], 1)
    pair = (files(certificates, "other"), certificates / "ca.pem")
    server = start_server("127.0.0.1:0", limits, certificates=pair, insecure=True)
    try:
        agent = join(server.address, 0, 1, credentials=worker(certificates, "other.example"))
        framed(agent)
    finally:
        server.stop(0.1)


class Told(logging.Handler):
    """Collects what is logged for people."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the SDK logs."""
    handler, logger = Told(), session.logger
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(before)


def works(agent) -> None:
    agent.key_value_set("k", "v", True)
    assert agent.key_value_get("k") == b"v"
    agent.barrier("b")


def why(told: list[str]) -> str:
    """Returns the one line that says why a session is slower."""
    [line] = [line for line in told if "goes over gRPC, which is slower" in line]
    return line


def test_behind_something_that_forwards_one_port_it_is_grpc(join, server, told):
    with FaultProxy(server.address) as proxy:
        agent = join(proxy.address, 0, 1)
        works(agent)
        assert isinstance(agent._session._carrier, GrpcStream)
    assert "a port mapping, or a proxy" in why(told)
    assert proxy.address in why(told)


def test_with_a_proxy_it_is_grpc(join, server, told):
    agent = join(server.address, 0, 1, use_proxy=True)
    works(agent)
    assert isinstance(agent._session._carrier, GrpcStream)
    assert "proxy" in why(told)


def test_a_server_may_do_without(join, standalone, told):
    agent = join(standalone("--session-port", "off").address, 0, 1)
    works(agent)
    assert isinstance(agent._session._carrier, GrpcStream)
    assert "--session-port off" in why(told)


def test_a_server_may_be_told_the_port(join, standalone, told):
    port = free_ports(1)[0]
    agent = join(standalone("--session-port", str(port)).address, 0, 1)
    works(agent)
    assert framed(agent)._socket.getpeername() == ("127.0.0.1", port)
    assert not told


@pytest.mark.parametrize("what", ["nobody", "garbage", "silence"])
def test_a_port_that_is_not_the_coordinators_is_no_harm(join, server, told, monkeypatch, what):
    """Something else answers there, or nobody does: the session goes over gRPC, and says why."""
    original = FramedConnection._ask
    with contextlib.ExitStack() as undo:
        if what == "nobody":
            port = free_ports(1)[0]
        else:
            listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = listener.getsockname()[1]

            def answer() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        with connection:
                            connection.sendall(
                                b"HTTP/1.0 400 Bad Request\r\n\r\n" if what == "garbage" else b""
                            )
                            connection.shutdown(socket.SHUT_WR)
                            connection.recv(100)

            threading.Thread(target=answer, daemon=True).start()

        def ask(self: FramedConnection) -> object:
            offer = original(self)
            if isinstance(offer, pb.KeepSessionResponse):
                offer.session_port = port
            return offer

        monkeypatch.setattr(FramedConnection, "_ask", ask)
        agent = join(server.address, 0, 1)
        works(agent)
        assert isinstance(agent._session._carrier, GrpcStream)
        assert str(port) in why(told) or "before the coordinator said anything" in why(told)


def test_after_a_restart_the_new_port_is_found(join, standalone, tmp_path):
    coordinator = standalone("--data-dir", str(tmp_path))
    agent = join(coordinator.address, 0, 1)
    before = framed(agent)._socket.getpeername()
    coordinator.kill()
    coordinator.start()
    works(agent)
    assert framed(agent)._socket.getpeername() != before


class NoCall:
    """The call beside the connection, of a server that is not there."""

    def cancel(self) -> None:
        pass


class Lonely:
    """A connection that is served to a listener of the test's own, and the other end of it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, receive: Callable[..., object] = lambda _: None
    ) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.ended: list[object] = []

        class Link:
            address, host, tls = "127.0.0.1:1", "127.0.0.1", None

            def cancel(self, call: object) -> None:
                pass

        self.carrier = FramedConnection(Link(), pb.Attach().caller, Heartbeats(3600.0, lambda: 0))
        offer = pb.KeepSessionResponse(session_port=listener.getsockname()[1], ticket=b"t" * 32)
        monkeypatch.setattr(self.carrier, "_ask", lambda: offer)

        def serve() -> None:
            try:
                self.ended.append(self.carrier.serve(b"attach", receive))
            except NoCarrier as reason:
                self.ended.append(reason)

        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()
        self.other, _ = listener.accept()
        listener.close()
        assert self.other.recv(42, socket.MSG_WAITALL) == b"t" * 32 + b"\x00\x00\x00\x06attach"

    def say(self, response: pb.SessionResponse) -> None:
        message = response.SerializeToString()
        self.other.sendall(len(message).to_bytes(4, "big") + message)

    def end(self) -> object:
        self.thread.join(PATIENCE)
        [end] = self.ended
        self.other.close()
        return end


ATTACHED = pb.SessionResponse(attached=pb.Attached())


@pytest.mark.parametrize("nonsense", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xff\xff"])
@pytest.mark.parametrize("attached", [True, False])
def test_frames_that_no_server_sends_break_it(monkeypatch, nonsense, attached):
    received = threading.Event()
    lonely = Lonely(monkeypatch, lambda _: received.set())
    if attached:
        lonely.say(ATTACHED)
        assert received.wait(PATIENCE)
    lonely.other.sendall(nonsense)
    end = lonely.end()
    assert (end is framed_connection._BROKE) == attached
    assert isinstance(end, NoCarrier) != attached


def test_what_arrived_before_the_end_is_handled(monkeypatch):
    got: list[int] = []
    lonely = Lonely(monkeypatch, lambda response: got.append(response.heartbeat_ack.sequence))
    for number in range(100):
        lonely.say(pb.SessionResponse(heartbeat_ack=pb.HeartbeatAck(sequence=number)))
    lonely.other.close()
    lonely.thread.join(PATIENCE)
    assert got == list(range(100))


def test_a_forked_child_does_not_speak_for_its_parent(monkeypatch):
    lonely = Lonely(monkeypatch)
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    lonely.carrier.send(b"child")
    monkeypatch.setattr(os, "getpid", lambda: own)
    lonely.carrier.send(b"parent")
    assert lonely.other.recv(100) == b"\x00\x00\x00\x06parent"
    lonely.carrier.close()
    lonely.end()


def test_a_child_forked_in_the_middle_of_a_send_does_not_wait_for_it(monkeypatch):
    """The thread that holds the lock is not in the child."""
    lonely = Lonely(monkeypatch)
    own = os.getpid()
    with lonely.carrier._lock:
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        child = threading.Thread(target=lonely.carrier.send, args=(b"child",), daemon=True)
        child.start()
        child.join(PATIENCE)
        monkeypatch.setattr(os, "getpid", lambda: own)
        assert not child.is_alive()
    lonely.carrier.close()
    lonely.end()


def test_a_session_that_is_closed_in_its_tls_handshake_ends_at_once(monkeypatch):
    class Tls:
        server_name = "server"

        def context(self) -> ssl.SSLContext:
            return ssl.create_default_context()

    class Link:
        address, host, tls = "127.0.0.1:1", "127.0.0.1", Tls()

        def cancel(self, call: object) -> None:
            pass

    monkeypatch.setattr(framed_connection, "_HANDSHAKE", 3600.0)
    carrier = FramedConnection(Link(), pb.Attach().caller, Heartbeats(3600.0, lambda: 0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(carrier, "_ask", lambda: pb.KeepSessionResponse(session_port=port))
        ended: list[object] = []
        thread = threading.Thread(
            target=lambda: ended.append(carrier.serve(b"", lambda _: None)), daemon=True
        )
        thread.start()
        other, _ = listener.accept()
        assert other.recv(1)  # the handshake has begun, and is not answered
        carrier.close()
        thread.join(PATIENCE)
        other.close()
    assert ended == [framed_connection._BROKE]


def test_a_silent_connection_is_kept_alive(monkeypatch):
    """What forgets silent connections on the way would leave the next call without an answer for long."""
    lonely = Lonely(monkeypatch)
    sock = lonely.carrier._socket
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_KEEPIDLE"):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
    lonely.carrier.close()
    lonely.end()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux")
def test_a_connection_of_which_nothing_arrives_is_replaced(join, server, background, monkeypatch):
    """A path may fail for one connection only: gRPC's pings are answered, and what is sent here is lost."""
    assert framed_connection._UNACKNOWLEDGED <= 60
    monkeypatch.setattr(framed_connection, "_UNACKNOWLEDGED", 1.0)
    agent = join(server.address, 0, 1)
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a filter that returns 0
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    framed(agent)._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    background(agent.key_value_set, "k", b"v").result(PATIENCE)  # said again in the next session
    assert agent._session.generation == 2
    framed(agent)


def test_an_interrupted_send_breaks_it_rather_than_its_frames(monkeypatch):
    lonely = Lonely(monkeypatch)

    class Interrupted:
        def send(self, *args: object) -> int:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    real, lonely.carrier._socket = lonely.carrier._socket, Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        lonely.carrier.send(b"x")
    assert isinstance(lonely.end(), NoCarrier)


def test_without_file_descriptors_the_session_goes_over_grpc(join, server, monkeypatch, eventually):
    """Its thread lives on: nobody else would keep the task slot."""
    agent = join(server.address, 0, 1)

    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", fail)
    reset(agent)
    eventually(lambda: agent._session.generation == 2)
    assert isinstance(agent._session._carrier, GrpcStream)
    works(agent)


def test_a_bug_in_a_listener_ends_one_session_only(join, server, monkeypatch, eventually, caplog):
    agent = join(server.address, 0, 1)

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError

    monkeypatch.setattr(agent._session, "note_revision", fail)
    agent.key_value_set("k", "v")  # said again in the next session
    assert agent._session.generation == 2
    assert "could not be dealt with" in caplog.text


def test_the_session_ends_with_the_call_beside_it(join, server, eventually):
    """What gRPC's pings find out about the server counts for the connection, too."""
    agent = join(server.address, 0, 1)
    framed(agent)._call.cancel()
    eventually(lambda: agent._session.generation == 2)
    works(agent)
    framed(agent)
