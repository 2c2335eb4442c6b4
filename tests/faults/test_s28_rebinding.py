"""Scenario 28: web pages that try to reach the server through their visitor's browser, with every method."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.faults.secured import DEADLINE, Served, serving, write_tokens

from dmesh.security import tokens

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
PATH = "/api/v1/clusters"
REFUSED = (400, 403, 421)


@pytest.fixture(scope="module")
def admin() -> str:
    return tokens.generate()


@pytest.fixture(scope="module")
def served(admin: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = write_tokens(tmp_path_factory.mktemp("tokens") / "t", f"{admin} role=admin")
    with serving("--memory", "--token-file", str(path)) as server:
        yield server


def ask(served: Served, method: str, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, f"{served.http}{PATH}", headers=names, trust_env=False, timeout=DEADLINE)


def raw(served: Served, request: str) -> str:
    """Sends what no client would; returns the head of the answer."""
    address = urlsplit(served.http)
    with socket.create_connection((address.hostname, address.port), timeout=DEADLINE) as connection:
        connection.sendall(request.replace("\n", "\r\n").encode())
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer.decode(errors="replace").split("\r\n\r\n")[0]


def test_the_owner_is_let_in(served: Served, admin: str) -> None:
    assert ask(served, "GET", Authorization=f"Bearer {admin}").status_code == 200


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "evil.example:80"]
)
def test_a_name_that_was_pointed_here(served: Served, admin: str, method: str, host: str) -> None:
    answer = ask(served, method, Host=host, Authorization=f"Bearer {admin}")
    assert answer.status_code in REFUSED


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1.evil.example", "http://127.0.0.1:1"]
)
def test_a_page_of_another_origin(served: Served, admin: str, method: str, origin: str) -> None:
    answer = ask(served, method, Origin=origin, Authorization=f"Bearer {admin}")
    assert answer.status_code in REFUSED
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_preflight_permits_nothing(served: Served, method: str) -> None:
    answer = ask(
        served, "OPTIONS", Origin="http://evil.example",
        Access_Control_Request_Method=method, Access_Control_Request_Headers="authorization",
    )  # fmt: skip
    assert answer.status_code in REFUSED
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("method", METHODS)
def test_a_cookie_is_no_token(served: Served, admin: str, method: str) -> None:
    assert ask(served, method, Cookie=f"token={admin}; authorization=Bearer {admin}").status_code == 401


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("GET", "HEAD")])
def test_even_the_owner_changes_nothing(served: Served, admin: str, method: str) -> None:
    assert ask(served, method, Authorization=f"Bearer {admin}").status_code == 405


@pytest.mark.parametrize(
    "head",
    [
        "GET {path} HTTP/1.1\nConnection: close\n",  # no name at all
        "GET {path} HTTP/1.0\n",
        "GET {path} HTTP/1.1\nHost: 127.0.0.1\nHost: evil.example\nConnection: close\n",
        "GET {path} HTTP/1.1\nHost: 127.0.0.1\nOrigin: null\nOrigin: http://127.0.0.1\nConnection: close\n",
        "GET http://evil.example{path} HTTP/1.1\nHost: evil.example\nConnection: close\n",
    ],
)
def test_what_no_browser_sends(served: Served, admin: str, head: str) -> None:
    answer = raw(served, head.format(path=PATH) + f"Authorization: Bearer {admin}\n\n")
    assert int(answer.split()[1]) in REFUSED
