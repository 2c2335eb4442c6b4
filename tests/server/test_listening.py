"""Addresses to listen on."""

from __future__ import annotations

import socket

import pytest

from dmesh.errors import AddressInUseError, ConfigurationError
from dmesh_server.listening import Address, bind


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
        with pytest.raises(AddressInUseError, match=f"127.0.0.1:{port}.*another process"):
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
