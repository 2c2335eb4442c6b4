"""Tokens and the audit log over HTTP: for operators of all clusters only, and other names of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.faults.secured import write_tokens
from tests.server.web_server import Web, join_all, serving_web

from dmesh.security import tokens
from dmesh_server.listening import Address
from dmesh_server.security.access import Access
from dmesh_server.web.app import create_app
from dmesh_server.web.server import WebServer


@pytest.fixture
async def web(served, tmp_path: Path) -> AsyncIterator[Web]:
    async with serving_web(served.runtime, tmp_path) as running:
        yield running


async def test_an_issued_token_is_good_until_it_is_revoked(web: Web) -> None:
    await join_all(web.runtime, 1, "own")
    await join_all(web.runtime, 1, "other")
    async with web.client("admin") as operator:
        made = (await operator.post("/api/v1/tokens", json={"role": "viewer", "clusters": ["own"]})).json()
        headers = {"Authorization": f"Bearer {made['token']}"}
        async with web.client(None, **headers) as tenant:
            found = (await tenant.get("/api/v1/clusters")).json()["clusters"]
            assert [one["name"] for one in found] == ["own"]
            assert (await tenant.get("/api/v1/clusters/own/members")).status_code == 200
            assert (await tenant.get("/api/v1/clusters/other/members")).status_code == 403
            login = await tenant.post("/login", data={"token": made["token"]})
            assert login.status_code == 303
            for revoked in (True, False):
                answer = await operator.delete(f"/api/v1/tokens/{made['id']}")
                assert answer.json() == {"id": made["id"], "revoked": revoked}
            assert (await tenant.get("/api/v1/clusters")).status_code == 401
            del tenant.headers["Authorization"]
            assert (await tenant.get("/")).status_code == 303, "its logins end, too"


@pytest.mark.parametrize("role", ["viewer", "worker"])
async def test_only_operators_issue_tokens_and_read_the_audit_log(web: Web, role: str) -> None:
    async with web.client(role) as http:
        assert (await http.get("/api/v1/tokens")).status_code == 403
        assert (await http.post("/api/v1/tokens", json={})).status_code == 403
        assert (await http.delete("/api/v1/tokens/x")).status_code == 403
        assert (await http.get("/api/v1/audit")).status_code == 403


async def test_a_link_for_a_wall_screen_logs_one_browser_in_to_look(web: Web) -> None:
    async with web.client("admin") as operator, web.client("worker") as worker, web.client(None) as wall:
        assert (await worker.post("/api/v1/login-links")).status_code == 403
        old = (await operator.post("/api/v1/login-links")).json()["path"]
        made = (await operator.post("/api/v1/login-links")).json()
        assert (made["ttl"], old == made["path"]) == (600.0, False)
        assert (await wall.get(old)).status_code == 401, "the next one has replaced it"
        entered = await wall.get(made["path"])
        assert (entered.status_code, "/#/wall" in entered.text) == (200, True)
        assert "Max-Age=2592000" in entered.headers["set-cookie"]
        assert (await wall.get("/api/v1/clusters")).status_code == 200
        assert (await wall.get("/api/v1/tokens")).status_code == 401
        assert (await wall.post("/api/v1/login-links")).status_code == 401
        assert (await wall.get(made["path"])).status_code == 401, "it is good once"
        [second, first] = (await operator.get("/api/v1/audit?action=create_login_link")).json()["entries"]
        assert (first["outcome"], "the-viewer" in second["detail"]) == ("done", True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "owner"},
        {"ttl": 0},
        {"name": "a b"},
        {"clusters": ["a/b"]},
        {"quotas": {"kyes": 1}},
        {"quotas": {"keys": "1"}},
        {"quotas": {"keys": 1 << 53}},
        {"x": 1},
    ],
    ids=str,
)
async def test_a_request_that_makes_no_sense_is_refused(web: Web, wrong: dict[str, object]) -> None:
    async with web.client("admin") as operator:
        assert (await operator.post("/api/v1/tokens", json=wrong)).status_code == 422
        assert (await operator.get("/api/v1/tokens")).json()["tokens"] == []


async def test_what_operators_do_is_in_the_audit_log(web: Web) -> None:
    await join_all(web.runtime, 2, "c")
    async with web.client("admin") as operator:
        evict = "/api/v1/clusters/c/members/worker/1?incarnation={:016x}&reason=stuck"
        assert (await operator.delete(evict.format(1001))).status_code == 200
        assert (await operator.delete(evict.format(7))).status_code != 200
        assert (await operator.get("/api/v1/clusters/c/value?key=no")).status_code == 404
        page = (await operator.get("/api/v1/audit")).json()
        assert [(one["action"], one["outcome"]) for one in page["entries"]][:1] == [
            ("read_value", "KEY_NOT_FOUND")
        ]
        evictions = (await operator.get("/api/v1/audit?action=evict_member")).json()["entries"]
    assert (evictions[-1]["outcome"], evictions[-1]["detail"]) == ("done", "stuck")
    assert evictions[-1]["who"].endswith("(the-admin)")
    assert evictions[-1]["remote"] == "127.0.0.1"
    assert "c: /job:worker/task:1" in evictions[-1]["target"]
    assert evictions[0]["outcome"] not in ("done", "unchanged")


async def test_other_names_of_the_server_must_be_allowed(served, tmp_path: Path) -> None:
    value = tokens.generate()
    path = write_tokens(tmp_path / "tokens", f"{value} role=viewer")
    access = Access(tokens.find(None, str(path)))
    server = WebServer(Address("127.0.0.1", 0))
    app = create_app(served.runtime, "127.0.0.1", access, allowed_hosts=("dmesh.example.org",))
    await server.start(app)
    try:
        web = Web(served.runtime, server, access, {"viewer": value})
        for name, status in (
            ("dmesh.example.org", 200), ("DMESH.example.org:443", 200), ("evil.example.org", 421),
            ("dmesh.example.org.evil", 421),
        ):  # fmt: skip
            async with web.client("viewer", Host=name) as http:
                assert (await http.get("/api/v1/clusters")).status_code == status, name
                origin = {"Origin": "https://evil.example.org"}
                assert (await http.get("/api/v1/clusters", headers=origin)).status_code in (403, 421)
    finally:
        await server.stop()
