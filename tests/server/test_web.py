"""The HTTP side, through a real server in the same event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import httpx
import pytest
from tests.server.raw_client import PATIENCE, RawClient

from dmesh.errors import AddressInUseError
from dmesh_server.listening import Address
from dmesh_server.web.app import create_app
from dmesh_server.web.server import WebServer


@pytest.fixture
async def web(served) -> AsyncIterator[WebServer]:
    server = WebServer(Address("127.0.0.1", 0))
    await server.start(create_app(served.runtime, "127.0.0.1"))
    yield server
    await server.stop()


@pytest.fixture
async def http(web: WebServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://{web.address}", timeout=PATIENCE, trust_env=False
    ) as client:
        yield client


async def test_probes_of_a_healthy_server(http: httpx.AsyncClient) -> None:
    for path in ("/livez", "/readyz"):
        response = await http.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_not_ready_says_why(http: httpx.AsyncClient, served) -> None:
    served.runtime.begin_shutdown()
    response = await http.get("/readyz")
    assert (response.status_code, response.json()) == (503, {"status": "shutting down"})
    assert (await http.get("/livez")).status_code == 200
    assert (await http.get("/api/v1/clusters")).status_code == 503


async def test_no_secret_is_shown(http: httpx.AsyncClient, make_client: Callable[..., RawClient]) -> None:
    secret = (await make_client(0).register()).peer_secret
    shown = (await http.get("/api/v1/clusters")).content
    assert secret.hex().encode() not in shown
    assert b"secret" not in shown


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[evil]"])
async def test_foreign_names_are_refused(http: httpx.AsyncClient, host: str) -> None:
    response = await http.get("/api/v1/clusters", headers={"Host": host})
    assert response.status_code == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8471", "[::1]:8471", "10.0.0.1"])
async def test_own_names_are_welcome(http: httpx.AsyncClient, host: str) -> None:
    assert (await http.get("/livez", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_it_is_read_only(http: httpx.AsyncClient, method: str) -> None:
    assert (await http.request(method, "/api/v1/clusters")).status_code == 405


async def test_interface_is_described(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert {"/livez", "/readyz", "/api/v1/clusters"} <= set(paths)
    assert (await http.get("/docs")).status_code == 404, "it would load scripts from another site"


@pytest.mark.parametrize("length", [b"5", b"99999999", b"none"])
async def test_a_refusal_is_not_lost_with_a_body_that_nobody_reads(served, length: bytes) -> None:
    """A connection that is closed with unread bytes is reset, and what was sent last may be gone."""
    steps = list[str]()

    async def receive() -> dict[str, object]:
        steps.append("read")
        return {"type": "http.request", "body": b"x", "more_body": steps.count("read") < 5}

    async def send(message: MutableMapping[str, Any]) -> None:
        steps.append(message["type"])
        answered.append(message)

    answered = list[MutableMapping[str, Any]]()
    scope = {
        "type": "http", "method": "PUT", "path": "/", "query_string": b"", "scheme": "http",
        "headers": [(b"host", b"evil.example"), (b"content-length", length)],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await create_app(served.runtime, "127.0.0.1")(scope, receive, send)
    # What is large, or wrong, is not waited for.
    assert steps == ["read"] * 5 * (length == b"5") + ["http.response.start", "http.response.body"]
    assert answered[0]["status"] == 421
    assert (b"content-length", b"%d" % len(answered[1]["body"])) in answered[0]["headers"]


async def test_taken_port(web: WebServer) -> None:
    with pytest.raises(AddressInUseError, match=str(web.address)):
        WebServer(web.address)
