"""Logging in with a browser: what its cookie is good for, and what it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from tests.faults.secured import write_tokens
from tests.server.raw_client import PATIENCE

from dmesh.security import tokens
from dmesh.testing import ManualClock
from dmesh_server.listening import Address
from dmesh_server.security.access import Access
from dmesh_server.web import app
from dmesh_server.web.app import create_app
from dmesh_server.web.logins import LoginCodes, Logins, cookie_name
from dmesh_server.web.server import WebServer

TOKEN = tokens.generate()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens", f"{TOKEN} role=viewer")


@pytest.fixture
def codes(served) -> LoginCodes:
    return LoginCodes(served.runtime.now)


@pytest.fixture
async def web(served, token_file: Path, codes: LoginCodes) -> AsyncIterator[tuple[WebServer, Access]]:
    access = Access(tokens.find(None, str(token_file)))
    server = WebServer(Address("127.0.0.1", 0))
    await server.start(create_app(served.runtime, "127.0.0.1", access, codes=codes))
    yield server, access
    await server.stop()


@pytest.fixture
async def browser(web: tuple[WebServer, Access]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://{web[0].address}", timeout=PATIENCE, trust_env=False
    ) as client:
        yield client


async def log_in(browser: httpx.AsyncClient) -> httpx.Response:
    return await browser.post("/login", data={"token": TOKEN})


async def test_a_visitor_is_led_to_the_form_and_in(browser: httpx.AsyncClient) -> None:
    answer = await browser.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    form = await browser.get("/login")
    assert (form.status_code, 'type="password"' in form.text) == (200, True)
    assert (await browser.get("/static/dashboard.css")).headers["content-type"].startswith("text/css")
    answer = await log_in(browser)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    page = await browser.get("/")
    assert page.status_code == 200
    assert "No cluster yet" in page.text
    assert "Log out" in page.text


async def test_a_line_of_the_token_file_may_be_pasted(browser: httpx.AsyncClient) -> None:
    answer = await browser.post("/login", data={"token": f"  {TOKEN} role=viewer name=alice "})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert (await browser.get("/")).status_code == 200


async def test_a_link_logs_in_once(browser: httpx.AsyncClient, codes: LoginCodes) -> None:
    code = codes.issue(TOKEN)
    answer = await browser.get("/login", params={"code": code})
    assert (answer.status_code, 'content="0; url=/"' in answer.text) == (200, True)
    assert code not in answer.text
    [(_, morsel)] = SimpleCookie(answer.headers["set-cookie"]).items()
    assert (morsel["httponly"], morsel["samesite"]) == (True, "strict")
    assert not {TOKEN, code} & {morsel.value}
    assert (await browser.get("/")).status_code == 200
    assert (await browser.get("/metrics")).status_code == 401, "it is a login like any other"
    browser.cookies.clear()
    again = await browser.get("/login", params={"code": code})
    assert (again.status_code, "used already, or is too old" in again.text) == (401, True)
    assert not browser.cookies


@pytest.mark.parametrize("code", ["x", "x" * 5000, "\ud800", "%00"])
async def test_other_codes_log_nobody_in_and_leave_the_right_one_as_it_is(
    browser: httpx.AsyncClient, codes: LoginCodes, code: str
) -> None:
    issued = codes.issue(TOKEN)
    answer = await browser.get(f"/login?code={quote(code, errors='surrogatepass')}")
    assert answer.status_code == 401
    assert codes.redeem(issued) == TOKEN


async def test_a_link_of_a_revoked_token_shows_nothing(
    browser: httpx.AsyncClient, web: tuple[WebServer, Access], codes: LoginCodes, token_file: Path
) -> None:
    code = codes.issue(TOKEN)
    write_tokens(token_file, tokens.generate())
    web[1].refresh()
    await browser.get("/login", params={"code": code})
    assert (await browser.get("/")).status_code == 303


def test_codes_end_by_time_by_use_and_by_another() -> None:
    clock = ManualClock()
    codes = LoginCodes(clock, lifetime=10)
    assert codes.redeem("") is None
    first, second = codes.issue("a"), codes.issue("b")
    assert (codes.redeem(first), codes.redeem(second), codes.redeem(second)) == (None, "b", None)
    third = codes.issue("c")
    clock.advance(10)
    assert codes.redeem(third) is None


def test_the_link_stands_for_the_token_that_may_do_the_least(tmp_path: Path) -> None:
    admin, bound, viewer, old = (tokens.generate() for _ in range(4))
    path = write_tokens(
        tmp_path / "many", f"{admin} role=admin", f"{bound} role=viewer cluster=c", f"{viewer} role=viewer",
        f"{old} role=viewer expires=2001-01-01",
    )  # fmt: skip
    access = Access(tokens.find(None, str(path)))
    assert access.token_to_look().value == viewer  # type: ignore[union-attr]
    write_tokens(path, f"{bound} role=viewer cluster=c", f"{old} role=admin expires=2001-01-01")
    access.refresh()
    assert access.token_to_look().value == bound  # type: ignore[union-attr]


async def test_the_cookie_is_not_the_token_and_scripts_cannot_read_it(
    browser: httpx.AsyncClient, web: tuple[WebServer, Access]
) -> None:
    [(name, morsel)] = SimpleCookie((await log_in(browser)).headers["set-cookie"]).items()
    assert name == cookie_name(web[0].address.port)
    assert TOKEN not in morsel.value
    assert (morsel["httponly"], morsel["samesite"], morsel["path"]) == (True, "strict", "/")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/openapi.json"),
        ("GET", "/metrics"),
        ("POST", "/"),
        ("DELETE", "/"),
        ("PATCH", "/api/v1/clusters"),
        ("DELETE", "/api/v1/clusters/c/members/worker/0?incarnation=00000000000000ff"),
        ("GET", "/api/v1/clusters/c/value?key=k"),
    ],
)
async def test_it_is_good_for_reading_only(browser: httpx.AsyncClient, method: str, path: str) -> None:
    await log_in(browser)
    assert (await browser.request(method, path)).status_code == 401


async def test_scripts_of_the_page_read_what_a_viewer_may(browser: httpx.AsyncClient) -> None:
    assert (await browser.get("/api/v1/clusters")).status_code == 401
    await log_in(browser)
    assert (await browser.get("/api/v1/clusters")).status_code == 200
    for site, status in (("same-origin", 200), ("same-site", 401), ("cross-site", 401), ("none", 401)):
        answer = await browser.get("/api/v1/clusters", headers={"Sec-Fetch-Site": site})
        assert answer.status_code == status, site


async def test_a_token_in_the_header_does_without(browser: httpx.AsyncClient) -> None:
    page = await browser.get("/", headers={"Authorization": f"Bearer {TOKEN}"})
    assert page.status_code == 200
    assert "Log out" not in page.text
    wrong = await browser.get("/", headers={"Authorization": f"Bearer {tokens.generate()}"})
    assert wrong.status_code == 401


async def test_logging_out_ends_it_for_whoever_has_the_cookie(browser: httpx.AsyncClient) -> None:
    await log_in(browser)
    cookies = dict(browser.cookies)
    answer = await browser.post("/logout")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert not browser.cookies
    kept = "; ".join(f"{name}={value}" for name, value in cookies.items())
    assert (await browser.get("/", headers={"Cookie": kept})).status_code == 303


async def test_a_revoked_token_ends_its_logins(
    browser: httpx.AsyncClient, web: tuple[WebServer, Access], token_file: Path
) -> None:
    await log_in(browser)
    assert (await browser.get("/")).status_code == 200
    write_tokens(token_file, tokens.generate())
    web[1].refresh()
    assert (await browser.get("/")).status_code == 303


@pytest.mark.parametrize("path", ["/login", "/logout"])
async def test_forms_of_other_sites_are_refused(browser: httpx.AsyncClient, path: str) -> None:
    answer = await browser.post(path, data={"token": TOKEN}, headers={"Origin": "http://evil.example"})
    assert answer.status_code == 403
    assert not browser.cookies


@pytest.mark.parametrize(
    "body",
    [b"", b"token=", b"nothing=1", b"token=\xff\xfe", b"token=" + b"x" * 20_000, b"&".join([b"a=1"] * 50)],
)
async def test_forms_that_no_browser_sends(browser: httpx.AsyncClient, body: bytes) -> None:
    assert (await browser.post("/login", content=body)).status_code == 401
    assert not browser.cookies


def unfinished_form(web: WebServer) -> bytes:
    return f"POST /login HTTP/1.1\r\nHost: {web.address}\r\nContent-Length: 100\r\n\r\ntoken=".encode()


async def test_a_form_that_never_ends_keeps_no_connection(
    web: tuple[WebServer, Access], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_FORM_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection(web[0].address.host, web[0].address.port)
    writer.write(unfinished_form(web[0]))
    async with asyncio.timeout(PATIENCE):
        answer = await reader.read()  # until the server hangs up
    assert answer.startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_who_hangs_up_within_a_form_leaves_no_traceback(
    web: tuple[WebServer, Access], caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection(web[0].address.host, web[0].address.port)
    writer.write(unfinished_form(web[0]))
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await web[0].stop()  # waits for what is under way
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


async def test_a_server_without_tokens_asks_for_none(served) -> None:
    server = WebServer(Address("127.0.0.1", 0))
    await server.start(create_app(served.runtime, "127.0.0.1"))
    async with httpx.AsyncClient(base_url=f"http://{server.address}", trust_env=False) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/login")).headers["location"] == "/"
        assert (await client.post("/login")).headers["location"] == "/"
    await server.stop()


def test_logins_end_by_time_and_by_number() -> None:
    clock = ManualClock()
    logins = Logins(clock, lifetime=10, most=2)
    first, second = logins.enter("a"), logins.enter("b")
    assert logins.token(f"{cookie_name(1)}={first}", 1) == "a"
    assert logins.token(f"{cookie_name(1)}={first}", 2) is None, "another server's cookie"
    third = logins.enter("c")
    assert logins.token(f"{cookie_name(1)}={first}", 1) is None
    assert logins.token(f"x=y; {cookie_name(1)}={second}", 1) == "b"
    clock.advance(10)
    assert logins.token(f"{cookie_name(1)}={third}", 1) is None


@pytest.mark.parametrize("header", [None, "", "=;=", "a\x00b", f"{cookie_name(1)}", "x" * 10_000])
def test_cookies_that_no_browser_sends(header: str | None) -> None:
    assert Logins(ManualClock()).token(header, 1) is None
