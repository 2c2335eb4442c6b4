"""Agents with express connections: the same calls, whatever becomes of the connection."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from dmesh.coordination import express as express_module
from dmesh.coordination import send_queue, session
from dmesh.coordination.credentials import ClientTls
from dmesh.coordination.express import Express
from dmesh.testing import FaultProxy
from dmesh.v1 import coordination_pb2 as pb
from dmesh_server.core.model import Limits

PATIENCE = 60.0


def riding(agent) -> Express:
    """The agent's express connection, once it carries messages."""
    express = agent._session._express
    assert express is not None
    return express


@pytest.fixture
def busy(eventually):
    """Has an agent say enough to be worth an express connection, and waits for that."""

    def make(agent) -> Express:
        for number in range(send_queue._BUSY):
            agent.key_value_set(f"busy/{number}", "", True)
        eventually(lambda: riding(agent).carrying)
        return riding(agent)

    return make


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def reset(express: Express) -> None:
    """Breaks a connection in the middle of whatever it is doing."""
    sock = express._socket
    if sock is not None:
        with contextlib.suppress(OSError):  # broken already
            sock.shutdown(socket.SHUT_RDWR)


def test_a_quiet_session_stays_with_its_stream(join, server):
    agent = join(server.address, 0, 1)
    agent.key_value_set("k", "v")
    agent.barrier("b")
    assert not riding(agent).carrying
    assert riding(agent)._socket is None


def test_calls_barriers_and_waiting_reads(join, server, busy, background):
    first, second = (join(server.address, index, 2) for index in range(2))
    for agent in (first, second):
        busy(agent)
    waits = background(first.key_value_get, "late", 60)
    second.key_value_set("late", b"\x00" * (1 << 20))
    assert waits.result(PATIENCE) == b"\x00" * (1 << 20)
    for _ in range(50):
        meets = background(first.barrier, "b")
        second.barrier("b")
        meets.result(PATIENCE)
    assert first._session.generation == 1


# Whoever does not come back within the grace is dead, which is not what this is about.
@pytest.mark.parametrize("limits", [Limits(lease=120.0, suspicion=PATIENCE)])
def test_a_connection_that_breaks_costs_no_call_and_repeats_none(join, server, busy, background, monkeypatch):
    """Every increment counts once, every barrier passes once, however often it breaks."""
    monkeypatch.setattr(session, "_EXPRESS_AGAIN", 0.0)
    agents = [join(server.address, index, 2) for index in range(2)]
    for agent in agents:
        busy(agent)

    def work(agent) -> None:
        for _ in range(400):
            agent.key_value_increment("n", 1)
            agent.barrier("b")

    done = [background(work, agent) for agent in agents]
    breaks = 0
    while not all(future.done() for future in done):
        for agent in agents:
            reset(busy(agent))
            breaks += 1
    for future in done:
        future.result(PATIENCE)
    assert breaks >= 4
    assert agents[0].key_value_get("n", encoding="utf-8") == "800"


def test_what_the_server_said_before_it_stopped_is_heard(join, server, busy, background, monkeypatch):
    """The end of the session comes by another way than what was said before, and must not overtake it."""
    late, early = (join(server.address, index, 2) for index in range(2))
    for agent in (late, early):
        busy(agent)
    original = session.Session._receive_express

    def receive(self: session.Session, response: pb.SessionResponse, send_queue: object) -> object:
        if self is late._session and response.HasField("barrier_result"):
            time.sleep(0.1)
        return original(self, response, send_queue)

    monkeypatch.setattr(express_module, "_LAST_WORDS", PATIENCE, raising=False)
    monkeypatch.setattr(session.Session, "_receive_express", receive)
    waits = background(late.barrier, "b")
    early.barrier("b")
    server.stop(0.1)
    waits.result(PATIENCE)


def test_after_a_break_it_is_the_stream_for_a_while(join, server, busy, eventually):
    agent = join(server.address, 0, 1)
    express = busy(agent)
    reset(express)
    eventually(lambda: agent._session.generation == 2)
    for number in range(2 * send_queue._BUSY):
        agent.key_value_set(f"k{number}", "v")
    assert agent._session._express is None


def test_what_the_server_does_not_take_at_once_is_sent_later(join, standalone, busy, background):
    """The server is stopped while more is said than the network holds; nobody who speaks is kept waiting."""
    coordinator = standalone()
    agent = join(coordinator.address, 0, 1)
    express = busy(agent)
    os.kill(coordinator.child.pid, signal.SIGSTOP)
    try:
        calls = [background(agent.key_value_set, f"k{number}", bytes(1 << 20)) for number in range(20)]
        with agent._pending_calls._lock:  # free, whatever the network does
            pass
    finally:
        os.kill(coordinator.child.pid, signal.SIGCONT)
    for call in calls:
        call.result(PATIENCE)
    for number in range(20):
        assert len(agent.key_value_get(f"k{number}")) == 1 << 20
    assert express._late_worker is not None


def test_behind_something_that_forwards_one_port_there_is_none(join, server):
    with FaultProxy(server.address) as proxy:
        agent = join(proxy.address, 0, 1)
        for number in range(2 * send_queue._BUSY):
            agent.key_value_set(f"k{number}", "v")
        assert agent._session._express is None


@pytest.mark.parametrize("why", ["encrypted", "proxy"])
def test_who_wants_encryption_or_a_proxy_asks_for_none(join, server, monkeypatch, why):
    """What ends the encryption may stand before a server that does not know of it."""
    agent = join(server.address, 0, 1, start=False, use_proxy=why == "proxy")
    if why == "encrypted":
        monkeypatch.setattr(agent._link._credentials, "tls", ClientTls(Path("ca.pem")))
    agent.start()
    for number in range(2 * send_queue._BUSY):
        agent.key_value_set(f"k{number}", "v")
    assert agent._session._express is None


def test_a_server_may_do_without(join, standalone):
    agent = join(standalone("--express-port", "off").address, 0, 1)
    for number in range(2 * send_queue._BUSY):
        agent.key_value_set(f"k{number}", "v")
    assert agent._session._express is None


def test_a_server_may_be_told_the_port(join, standalone, busy):
    port = free_port()
    agent = join(standalone("--express-port", str(port)).address, 0, 1)
    assert busy(agent)._socket.getpeername() == ("127.0.0.1", port)


def test_a_port_that_nobody_answers_at_is_no_harm(join, server, monkeypatch):
    port = free_port()
    tried = threading.Event()
    original = Express._connect

    def connect(self: Express) -> socket.socket:
        self._address = ("127.0.0.1", port)
        try:
            return original(self)
        finally:
            tried.set()

    monkeypatch.setattr(Express, "_connect", connect)
    agent = join(server.address, 0, 1)
    for number in range(2 * send_queue._BUSY):
        agent.key_value_set(f"k{number}", "v")
    assert tried.wait(PATIENCE)
    assert agent.key_value_get("k1") == b"v"
    assert agent._session.generation == 1


def lonely(receive=lambda response: None, broken=lambda: None):
    """An express connection to a listener of the test's own, and the other end of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    offer = pb.Express(port=listener.getsockname()[1], ticket=b"t" * 32)
    express = Express("127.0.0.1", offer, receive, broken)
    express.start()
    other, _ = listener.accept()
    listener.close()
    assert other.recv(32, socket.MSG_WAITALL) == b"t" * 32
    return express, other


def test_frames_that_no_server_sends_break_it(eventually):
    for nonsense in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xff\xff"):
        broke = threading.Event()
        express, other = lonely(broken=broke.set)
        express.begin()
        other.sendall(nonsense)
        assert broke.wait(PATIENCE)
        assert other.recv(1) == b""
        other.close()


def test_a_server_that_hangs_up_before_it_begins_is_no_break(eventually):
    broke = threading.Event()
    express, other = lonely(broken=broke.set)
    other.close()
    eventually(lambda: express._closed)
    assert not broke.is_set()


def test_a_forked_child_does_not_speak_for_its_parent(monkeypatch, eventually):
    express, other = lonely()
    express.begin()
    eventually(lambda: express._socket is not None)
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    express.send(b"child")
    monkeypatch.setattr(os, "getpid", lambda: own)
    express.send(b"parent")
    assert other.recv(100) == b"\x00\x00\x00\x06parent"
    express.close()
    other.close()


def test_a_silent_connection_is_kept_alive(eventually):
    """What forgets silent connections on the way would leave the next call without an answer for long."""
    express, other = lonely()
    assert express._socket is not None
    assert express._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_KEEPIDLE"):
        assert express._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
    express.close()
    other.close()


def test_without_a_thread_for_it_there_is_none(join, server, monkeypatch):
    """Who happens to send the message that makes a session busy is told nothing of it."""
    tried = threading.Event()
    original = express_module.Worker.start

    def start(self: express_module.Worker) -> None:
        if self._thread.name.startswith("dmesh-express"):
            tried.set()
            raise RuntimeError("can't start new thread")
        original(self)

    agent = join(server.address, 0, 1)
    monkeypatch.setattr(express_module.Worker, "start", start)
    for number in range(2 * send_queue._BUSY):
        agent.key_value_set(f"k{number}", "v")
    assert tried.is_set()


@pytest.mark.parametrize(("host", "port"), [("x" * 70, 1), ("127.0.0.1", 1 << 20)])
def test_an_address_that_is_none_is_no_harm(host, port, monkeypatch):
    unexpected: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unexpected.append)
    express = Express(host, pb.Express(port=port), lambda response: None, lambda: None)
    express.start()
    express._worker.join(PATIENCE)
    assert not unexpected


def test_the_end_of_the_session_is_no_break(monkeypatch):
    """The stream says why it ended: it must not be cancelled before."""
    monkeypatch.setattr(express_module, "_LAST_WORDS", PATIENCE, raising=False)
    broke = threading.Event()
    express, other = lonely(broken=broke.set)
    express.begin()
    other.shutdown(socket.SHUT_WR)
    assert not broke.wait(0.05)
    express.close()
    assert other.recv(1) == b""
    express._worker.join(PATIENCE)
    assert not broke.is_set()
    other.close()


def test_what_comes_before_the_mark_waits_for_it():
    got: list[pb.SessionResponse] = []
    arrived = threading.Event()

    def receive(response: pb.SessionResponse) -> None:
        got.append(response)
        arrived.set()

    express, other = lonely(receive)
    frame = pb.SessionResponse(express_begins=pb.ExpressBegins()).SerializeToString()
    other.sendall(len(frame).to_bytes(4, "big") + frame)
    assert not arrived.wait(0.05)
    express.begin()
    assert arrived.wait(PATIENCE)
    express.close()
    other.close()


def test_an_interrupted_send_breaks_it_rather_than_its_frames(eventually, monkeypatch):
    broke = threading.Event()
    express, other = lonely(broken=broke.set)
    express.begin()
    eventually(lambda: express._socket is not None)

    class Interrupted:
        def send(self, *args: object) -> int:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    real, express._socket = express._socket, Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        express.send(b"x")
    assert broke.is_set()
    assert other.recv(10) == b""
    other.close()


def test_systems_that_cannot_do_it_go_without(join, server, monkeypatch):
    monkeypatch.setattr(express_module, "AVAILABLE", False)
    agent = join(server.address, 0, 1)
    assert agent._session._express is None


def test_threads_end_with_the_session(join, server, busy, eventually):
    agent = join(server.address, 0, 1)
    busy(agent)
    agent.leave()
    eventually(lambda: not any(t.name.startswith("dmesh-express") for t in threading.enumerate()))
