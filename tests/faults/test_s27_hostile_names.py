"""Scenario 27: names that are HTML, scripts, line breaks, text from right to left, or very long ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import grpc
import httpx
import pytest
from tests.faults.processes import LONG_LEASE, eventually
from tests.faults.secured import DEADLINE, Served, serving, write_tokens
from tests.server.raw_client import PATIENCE, RawClient, refusal

from dmesh.security import tokens
from dmesh.v1 import common_pb2, coordination_pb2
from dmesh_server.web.pages import visible

HOSTILE = {
    "image": "<img src=x onerror=alert(1)>",
    "script": "</td></table></bdi><script>alert(1)</script>",
    "attribute": '" onmouseover="alert(1)" x=\'',
    "link": "javascript:alert(1)",
    "template": "{{ 7*7 }}{% raw %}${7*7}",
    "line breaks": "a\r\nSet-Cookie: b=c\r\n\r\n2026-01-01T00:00:00.000Z INFO tokens_reloaded origin=forged",
    "terminal": "\x1b[2J\x1b]0;owned\x07",
    "right to left": "gnp\u202egpj.exe\u2066",
    "nothing to see": "\u200b\ufeff\u00a0",
    "long": "W" * 1_000,
}

TAGS = {
    "html", "head", "meta", "title", "link", "body", "header", "main", "section", "h1", "h2", "p", "span",
    "bdi", "div", "table", "caption", "thead", "tbody", "tr", "th", "td", "small", "code", "a", "form",
    "button", "noscript", "script", "details", "summary",
}  # fmt: skip
"""What the page itself is made of."""

ATTRIBUTES = {
    "lang", "charset", "name", "content", "http-equiv", "rel", "href", "class", "scope", "title", "method",
    "action", "type", "src", "id", "aria-label",
}  # fmt: skip

LINKS = {
    "/static/dashboard.css", "/static/vendor/uplot.css", "/static/views.css", "/static/icon.svg",
    "/static/app.js", "/logout", "/api/v1/clusters",
}  # fmt: skip


class Page(HTMLParser):
    """What a browser makes of the page: its elements and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.foreign += [tag] if tag not in TAGS else []
        for name, value in attributes:
            if name not in ATTRIBUTES or (name in ("href", "action", "src") and value not in LINKS):
                self.foreign.append(f"{tag} {name}={value}")
            self.text += f" {value} " if name == "title" else ""

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def token() -> str:
    return tokens.generate()


@pytest.fixture(scope="module", params=["text", "json"])
def served(
    request: pytest.FixtureRequest, token: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    path: Path = write_tokens(tmp_path_factory.mktemp("tokens") / "t", f"{token} role=admin")
    options = ("--memory", "--token-file", str(path), "--log-format", request.param, *LONG_LEASE)
    with serving(*options) as server:
        yield server


def browse(served: Served, token: str) -> httpx.Response:
    """Logs in with a form, as a browser does, and reads the page."""
    with httpx.Client(base_url=served.http, trust_env=False, timeout=DEADLINE) as browser:
        assert browser.get("/").status_code == 303
        assert browser.post("/login", data={"token": token}).status_code == 303
        return browser.get("/")


async def register(served: Served, token: str, cluster: str, name: str) -> RawClient:
    client = RawClient(served.grpc, 0, cluster=cluster, size=2, token=token)
    process = common_pb2.Process(host=name, boot_id=name, program=name, dmesh_version=name)
    devices = [common_pb2.Device(type="CPU", index=1, description=name)]
    request = client.registration(process=process, devices=devices)
    await client.coordination.Register(request, timeout=PATIENCE)
    return client


async def report(client: RawClient, name: str) -> None:
    request = coordination_pb2.ReportErrorRequest(
        caller=client.caller, request_id=client.request_id(), message=f"because of {name}"
    )
    await client.coordination.ReportError(request, timeout=PATIENCE)


@pytest.mark.parametrize("kind", HOSTILE)
async def test_they_are_rendered_inert(served: Served, token: str, kind: str) -> None:
    name = HOSTILE[kind]
    client = await register(served, token, f"c{list(HOSTILE).index(kind)}", name)
    stream = await client.attach()
    entered = name if name.isprintable() and len(name) <= 256 else f"refused {kind}"
    await stream.enter(entered, timeout_ms=600_000)

    answer = browse(served, token)
    page = Page(answer.text)
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert page.foreign == []
    shown = visible(name)
    assert page.text.count(shown) >= 3, "host, program, device description"
    assert visible(entered) in page.text
    assert all(c.isprintable() or c in "\n\u00a0" for c in page.text)

    await report(client, name)
    page = Page(browse(served, token).text)
    assert page.foreign == []
    assert visible(f"because of {name}") in page.text
    members = httpx.get(
        f"{served.http}/api/v1/clusters", headers={"Authorization": f"Bearer {token}"},
        trust_env=False, timeout=DEADLINE,
    )  # fmt: skip
    assert members.headers["content-type"] == "application/json"
    assert members.headers["x-content-type-options"] == "nosniff"
    await client.channel.close()


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if not HOSTILE[kind].isprintable()])
async def test_what_nobody_can_read_is_no_barriers_name(served: Served, token: str, kind: str) -> None:
    client = RawClient(served.grpc, 0, cluster=f"b{list(HOSTILE).index(kind)}", size=1, token=token)
    stream = await client.join()
    await stream.enter(HOSTILE[kind], timeout_ms=600_000)
    assert "printable" in (await stream.result()).error.message
    await client.channel.close()


@pytest.mark.parametrize("field", ["host", "program", "cluster", "job", "device"])
async def test_ten_kilobytes_are_no_name(served: Served, token: str, field: str) -> None:
    name = "W" * 10_240
    client = RawClient(served.grpc, 0, cluster=name if field == "cluster" else "long", token=token)
    request = client.registration()
    if field == "job":
        request.jobs.add(name=name, addresses=["a:1"])
    elif field == "device":
        request.devices.add(type="CPU", index=1, description=name)
    elif field != "cluster":
        setattr(request.process, field, name)
    code, error = await refusal(lambda: client.coordination.Register(request, timeout=PATIENCE))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "10240 characters" in error.message
    assert len(error.message) < 1_000
    await client.channel.close()


async def test_a_line_of_the_log_stays_a_line(served: Served, token: str) -> None:
    """Each line is one of the server's own, whole and of plain characters."""
    for number, name in enumerate(HOSTILE.values()):
        client = await register(served, token, f"l{number}", name)
        await report(client, name)
        await client.channel.close()
    eventually(lambda: served.log.count("because of") >= len(HOSTILE), "a line for each name")
    lines = served.log.splitlines()
    message = ("The dashboard: http://", "  (logs one browser in")  # for people: no lines of the log
    shown = [line for line in lines if line.startswith(message)]
    assert len(shown) in (0, 2)
    lines = [line for line in lines if line not in shown]
    for line in lines:
        assert line.isascii()
        assert line.isprintable()
        if line.startswith("{"):
            assert json.loads(line)["event"]
        else:
            assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) \w+", line)
            assert not line.startswith("2026-01-01T00:00:00.000Z")


def test_a_wrong_token_is_not_repeated(served: Served) -> None:
    with httpx.Client(base_url=served.http, trust_env=False, timeout=DEADLINE) as browser:
        answer = browser.post("/login", data={"token": "<img src=x onerror=alert(1)>"})
        assert answer.status_code == 401
        assert "onerror" not in answer.text
        assert not browser.cookies
        assert browser.get("/").status_code == 303
