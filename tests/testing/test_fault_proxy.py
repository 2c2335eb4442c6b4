"""What the public fault proxy does to real connections."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
from tests.waiting import free_ports

from dmesh.errors import AddressInUseError, ConfigurationError, DMeshError
from dmesh.testing import FaultProxy, fault_proxy

PATIENCE = 30.0


class Echo:
    """A server that sends back what it gets, and remembers how connections ended."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.ends: list[str] = []
        self.ended = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
                self.ends.append("end")
            except ConnectionResetError:
                self.ends.append("reset")
            except OSError as error:
                self.ends.append(repr(error))
        self.ended.release()

    def close(self) -> None:
        # Closing alone does not wake accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(PATIENCE)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.address) as proxy:
        yield proxy


@contextlib.contextmanager
def connect(proxy: FaultProxy) -> Iterator[socket.socket]:
    host, _, port = proxy.address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as sock:
        yield sock


def ask(sock: socket.socket, data: bytes) -> bytes:
    sock.sendall(data)
    return receive(sock, len(data))


def receive(sock: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        part = sock.recv(count - len(got))
        assert part, "the connection ended"
        got += part
    return got


def silent(sock: socket.socket, seconds: float = 0.2) -> bool:
    sock.settimeout(seconds)
    try:
        return not sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(PATIENCE)


def test_bytes_pass_both_ways_and_are_counted(proxy: FaultProxy) -> None:
    data = bytes(range(256)) * 4096
    with connect(proxy) as sock:
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        assert receive(sock, len(data)) == data
        sender.join(PATIENCE)
        assert proxy.connections == 1
        assert proxy.moved == {"to_target": len(data), "to_client": len(data)}
    assert proxy.accepted == 1


def test_ends_of_streams_are_passed_on(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as sock:
        sock.sendall(b"last words")
        sock.shutdown(socket.SHUT_WR)
        assert receive(sock, 10) == b"last words"
        assert sock.recv(1) == b""
    assert echo.ended.acquire(timeout=PATIENCE)
    assert echo.ends == ["end"]


def test_delays_hold_everything_back_in_order(proxy: FaultProxy) -> None:
    with connect(proxy) as sock:
        started = time.monotonic()
        with proxy.delay(0.15, jitter=0.05):
            assert ask(sock, b"abc") == b"abc"
            assert time.monotonic() - started >= 0.2 - 0.001
            for number in range(50):
                sock.sendall(bytes([number]))
            assert receive(sock, 50) == bytes(range(50))
        started = time.monotonic()
        assert ask(sock, b"abc") == b"abc"
        assert time.monotonic() - started < 10


def test_what_a_long_delay_held_comes_when_it_is_taken_back(proxy: FaultProxy) -> None:
    with connect(proxy) as sock:
        fault = proxy.delay(3600, direction="to_client")
        sock.sendall(b"abc")
        assert silent(sock)
        fault.heal()
        assert receive(sock, 3) == b"abc"


@pytest.mark.parametrize("direction", ["both", "to_target", "to_client"])
def test_what_is_dropped_is_silence_and_comes_after_healing(proxy: FaultProxy, direction) -> None:
    with connect(proxy) as sock:
        assert ask(sock, b"before") == b"before"
        with proxy.drop(direction):
            sock.sendall(b"during")
            assert silent(sock)
            arrived = proxy.moved["to_target"] - 6
            assert arrived == (6 if direction == "to_client" else 0)
        assert receive(sock, 6) == b"during"
        proxy.heal()


def test_a_new_connection_into_a_black_hole_hears_nothing(proxy: FaultProxy) -> None:
    proxy.drop()
    with connect(proxy) as sock:
        sock.sendall(b"anybody?")
        assert silent(sock)
        proxy.heal()
        assert receive(sock, 8) == b"anybody?"


def test_what_is_held_back_is_bounded(proxy: FaultProxy) -> None:
    proxy.drop()
    with connect(proxy) as sock:
        sock.settimeout(0.5)
        sent = 0
        with pytest.raises(TimeoutError):
            for _ in range(1024):
                sent += sock.send(bytes(1 << 20))
        assert sent < 64 << 20


def test_half_open_the_end_is_not_told(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as sock:
        assert ask(sock, b"x") == b"x"
        fault = proxy.half_open("to_target")
        sock.shutdown(socket.SHUT_WR)
        assert not echo.ended.acquire(timeout=0.2)
        fault.heal()
        assert echo.ended.acquire(timeout=PATIENCE)
    with pytest.raises(ConfigurationError, match="drop"):
        proxy.half_open("both")


def test_throttled_bytes_come_slowly_and_completely(proxy: FaultProxy) -> None:
    data = bytes(range(256)) * 80  # 20 KiB
    with connect(proxy) as sock:
        with proxy.throttle(50_000, "to_client"):
            started = time.monotonic()
            assert ask(sock, data) == data
            assert time.monotonic() - started >= 0.3
        with proxy.throttle(1000, "to_client"):
            sock.sendall(data)  # would take 20 s
            assert receive(sock, 50)
        assert len(receive(sock, len(data) - 50)) == len(data) - 50


def test_reset_ends_both_sides_and_new_connections_are_welcome(proxy: FaultProxy, echo: Echo) -> None:
    with connect(proxy) as first, connect(proxy) as second:
        assert ask(first, b"1") == b"1"
        assert ask(second, b"2") == b"2"
        assert proxy.reset() == 2
        for sock in (first, second):
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
    for _ in range(2):
        assert echo.ended.acquire(timeout=PATIENCE)
    assert echo.ends == ["reset", "reset"]
    with connect(proxy) as sock:
        assert ask(sock, b"3") == b"3"


def test_refuse_and_accept_again_at_the_same_port(proxy: FaultProxy) -> None:
    with connect(proxy) as sock:
        assert ask(sock, b"x") == b"x"
        with proxy.refuse():
            with pytest.raises(ConnectionRefusedError), connect(proxy):
                pass
            assert ask(sock, b"still") == b"still"
        with connect(proxy) as other:
            assert ask(other, b"y") == b"y"


def test_a_target_that_is_not_there_is_a_reset_and_may_change(proxy: FaultProxy, echo: Echo) -> None:
    proxy.target = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ConnectionResetError), connect(proxy) as sock:
        sock.recv(1)
    proxy.target = echo.address
    assert proxy.target == echo.address
    with connect(proxy) as sock:
        assert ask(sock, b"x") == b"x"


def test_nobody_gets_the_port_while_connections_are_refused(proxy: FaultProxy) -> None:
    host, _, port = proxy.address.rpartition(":")
    refusal = proxy.refuse()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
            other.listen()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=10)
    refusal.heal()
    socket.create_connection((host, int(port)), timeout=10).close()


def test_bad_arguments_are_refused_by_name(proxy: FaultProxy) -> None:
    with pytest.raises(ConfigurationError, match="target"):
        FaultProxy("nowhere")
    with pytest.raises(ConfigurationError, match="to_target"):
        proxy.drop("left")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="seconds"):
        proxy.delay(-1)
    with pytest.raises(ConfigurationError, match="drop"):
        proxy.throttle(0)
    with pytest.raises(ConfigurationError, match="once"):
        proxy.start()


def test_a_taken_port_is_refused_and_a_closed_proxy_says_so(echo: Echo) -> None:
    with pytest.raises(AddressInUseError, match="cannot listen"):
        FaultProxy(echo.address, listen=echo.address).start()
    proxy = FaultProxy(echo.address)
    with pytest.raises(DMeshError, match="not running"):
        proxy.reset()
    with proxy:
        fault = proxy.drop()
    fault.heal()
    proxy.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "dmesh-fault-proxy"]


def test_end_of_a_proxy_leaves_no_connection_that_has_just_come(echo: Echo) -> None:
    """Connections come while it ends: each is accepted and reset, or never accepted; none is forgotten."""
    for _ in range(40):
        with FaultProxy(echo.address) as proxy:
            host, port = proxy.address.rsplit(":", 1)
            clients = [socket.create_connection((host, int(port))) for _ in range(8)]
        for client in clients:
            client.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert not [str(warning.message) for warning in caught if warning.category is ResourceWarning]


def test_out_of_descriptors_it_says_so_and_accepts_later(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fault_proxy, "_PAUSE", 0.01)
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED, errno.ENFILE]

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if not listener.getblocking() and failures:
            code = failures.pop()
            raise OSError(code, os.strerror(code))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with FaultProxy(echo.address) as proxy, connect(proxy) as sock:
        assert ask(sock, b"hello") == b"hello"
    assert not failures
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [
        f"the FaultProxy cannot accept a connection: {os.strerror(code)}"
        for code in (errno.ENFILE, errno.EMFILE)
    ]
