"""`dmesh events`, against something that answers as the REST interface does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from dmesh.cli import main

EVENTS = [
    {
        "id": n, "cursor": f"a-{n}", "time": 1767225600.0 + n, "kind": "member_lost", "severity": "error",
        "cluster": "train", "task": None, "message": f"member {n} \x1b[2J was lost", "details": {},
    }
    for n in range(1, 6)
]  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    asked: list[tuple[str, dict, str | None]]
    status = 200
    body: bytes | None = None

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.asked.append((parts.path, query, self.headers["Authorization"]))
        start = int(query["after"].partition("-")[2]) if "after" in query else 0
        events = EVENTS[start : start + 2]
        last = start + len(events)
        page = {"events": events, "next": f"a-{last}", "more": last < len(EVENTS), "gap": start == 4}
        body = json.dumps(page).encode() if self.body is None else self.body
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def handler() -> Iterator[type[_Handler]]:
    class Handler(_Handler):
        asked = []  # noqa: RUF012 -- its own

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Handler.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Handler
        server.shutdown()
        thread.join()


def test_all_pages_are_printed(handler, capsys, monkeypatch) -> None:
    monkeypatch.setenv("DMESH_TOKEN", "a-token-of-some-length")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert main(["events", "--http", handler.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2026-01-01T00:00:01Z error   train: member 1 \ufffd[2J was lost"
    assert [line for line in lines if "lost" in line] == [*lines[:4], lines[5]]
    assert "some events are missing" in lines[4]
    path, query, authorization = handler.asked[0]
    assert (path, query, authorization) == (
        "/api/v1/events",
        {"limit": "100"},
        "Bearer a-token-of-some-length",
    )
    assert [query.get("after") for _, query, _ in handler.asked] == [None, "a-2", "a-4"]


def test_following_goes_on_where_it_was_told_to(handler, capsys) -> None:
    words = [
        "events",
        "--http",
        handler.url,
        "--follow",
        "--after",
        "a-1",
        "--interval",
        "0.01",
        "--count",
        "4",
    ]
    assert main([*words, "--json", "--cluster", "train"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["id"] for line in lines if "id" in line] == [2, 3, 4, 5]
    assert handler.asked[0][1] == {"limit": "100", "cluster": "train", "after": "a-1"}


@pytest.mark.parametrize(
    ("status", "body", "code", "words"),
    [
        (401, b'{"status":"no token"}', 1, "refused: no token"),
        (403, b'{"status":"role"}', 1, "refused: role"),
        (404, b"{}", 1, "not a dmesh server, or an older version"),
        (200, b"<html>", 1, "not a dmesh server"),
        (500, b'{"status":"broken"}', 1, "refused: broken"),
    ],
)
def test_refusals(handler, capsys, status: int, body: bytes, code: int, words: str) -> None:
    handler.status, handler.body = status, body
    assert main(["events", "--http", handler.url]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:x", "h:1", "http://h/path"])
def test_what_is_no_address_is_a_usage_error(capsys, url: str) -> None:
    assert main(["events", "--http", url]) == 2
    assert "http://HOST:PORT" in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys) -> None:
    assert main(["events", "--http", "http://127.0.0.1:1"]) == 1
    assert "Name the server's HTTP address with --http" in capsys.readouterr().err
