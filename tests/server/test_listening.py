"""Addresses to listen on, and the accepting of connections."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import pytest
import uvloop

from dmesh.errors import AddressInUseError, ConfigurationError
from dmesh_server import listening
from dmesh_server.listening import Acceptor, Address, bind


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:8470", "127.0.0.1", 8470), ("localhost:0", "localhost", 0), ("[::1]:65535", "::1", 65535)],
)
def test_parse(text: str, host: str, port: int) -> None:
    address = Address.parse(text, "--listen")
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1", ":80", "host:", "host:http", "host:-1", "host:65536", "host:99999999999", "::1:80",
     "a b:1", "http://h:1", "[h]:1x", "[]:1", "host:\uff11", " host:1", "u@h:1"],
)  # fmt: skip
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--listen is") as caught:
        Address.parse(text, "--listen")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True), ("localhost:1", True),
     ("0.0.0.0:1", False), ("[::]:1", False), ("192.0.2.1:1", False)],
)  # fmt: skip
def test_loopback(text: str, loopback: bool) -> None:
    assert Address.parse(text, "x").is_loopback() is loopback


def test_bind_any_free_port() -> None:
    sockets = bind(Address("localhost", 0))
    ports = {listener.getsockname()[1] for listener in sockets}
    assert len(ports) == 1
    assert ports != {0}
    for listener in sockets:
        listener.close()


def test_bind_refuses_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"127.0.0.1:{port}.*this process uses the port already"):
            bind(Address("127.0.0.1", port))


def test_bind_refuses_a_name_of_which_one_address_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"localhost:{port}"):
            bind(Address("localhost", port))


def test_bind_refuses_somebody_elses_address() -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1:0: it is not an address of this machine"):
        bind(Address("192.0.2.1", 0))


def test_bind_refuses_an_unknown_host() -> None:
    with pytest.raises(ConfigurationError, match="cannot be resolved"):
        bind(Address("no-such-host.invalid", 0))


class FullListener(socket.socket):
    """Listening socket of a process that has no file descriptors left for a while."""

    attempts = 0
    full = True

    def accept(self) -> tuple[socket.socket, Any]:
        self.attempts += 1
        if self.full:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_accepting_pauses_without_file_descriptors(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_ACCEPT_AGAIN", 0.05)

    async def scene() -> None:
        accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
        with FullListener() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            acceptor = Acceptor([listener], lambda connection, _: accepted.put_nowait(connection))
            with socket.create_connection(listener.getsockname()) as client:
                loop = asyncio.get_running_loop()
                began, turns = loop.time(), 0
                while listener.attempts < 4:
                    turns += 1
                    await asyncio.sleep(0.001)
                assert loop.time() - began > 3 * 0.05 * 0.9  # not at every turn of the loop
                assert turns > listener.attempts
                listener.full = False
                connection = await accepted.get()
                assert connection.getpeername() == client.getsockname()
                connection.close()
            acceptor.close()
            socket.create_connection(listener.getsockname()).close()
            await asyncio.sleep(0.01)
            assert accepted.empty()

    run(scene())


@pytest.mark.parametrize(
    ("host", "reachable"), [("0.0.0.0", "127.0.0.1:7"), ("::", "[::1]:7"), ("127.0.0.1", "127.0.0.1:7")]
)
def test_an_address_that_stands_for_all_is_reached_at_loopback(host: str, reachable: str) -> None:
    assert str(Address(host, 7).reachable()) == reachable
