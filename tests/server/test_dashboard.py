"""The dashboard as the server gives it out: what it is made of, may do, and reads. No browser."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.server.web_server import Web, join_all, serving_web

from dmesh.v1 import common_pb2
from dmesh.v1 import progress_pb2 as pb
from dmesh_server.core.model import Caller, Task
from dmesh_server.security.roles import role_for_http
from dmesh_server.web import app
from dmesh_server.web.machines import label_machines

STATIC = Path(app.__file__).parent / "static"
ASSETS = sorted(path for path in STATIC.rglob("*") if path.is_file())
OWN = [path for path in ASSETS if path.parent.name != "vendor"]
"""All but uPlot, which is as its authors publish it, with a line that exports it."""
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
TEMPLATES = sorted((STATIC.parent / "templates").glob("*.html"))


@pytest.fixture
async def web(served, tmp_path: Path) -> AsyncIterator[Web]:
    async with serving_web(served.runtime, tmp_path) as running:
        yield running


class Page(HTMLParser):
    """Elements of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))


def named(path: Path) -> str:
    return path.relative_to(STATIC).as_posix()


def of_assets(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


@pytest.mark.parametrize("path", ["/", "/login", "/static/app.js", "/static/nothing.js", "/livez"])
async def test_the_policy_lets_nothing_in_but_our_own_files(web: Web, path: str) -> None:
    async with web.client() as http:
        headers = (await http.get(path)).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'self'", "object-src": "'none'", "frame-ancestors": "'none'", "base-uri": "'none'",
        "form-action": "'self'", "require-trusted-types-for": "'script'", "trusted-types": "'none'",
    }  # fmt: skip
    assert headers["x-content-type-options"] == "nosniff"
    # Browsers say of forms of pages with `no-referrer` that they come from elsewhere: nobody could log in.
    assert headers["referrer-policy"] == "same-origin"


async def test_the_page_has_no_code_of_its_own_and_its_links_are_there(web: Web) -> None:
    await join_all(web.runtime, 3)
    async with web.client() as http, web.client(None) as stranger:
        page = Page((await http.get("/")).text)
        links = []
        for tag, attributes in page.elements:
            assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
            assert tag != "style"
            if tag == "script":
                assert set(attributes) == {"type", "src"}
            links += [
                value for name, value in attributes.items() if name in ("href", "src") and value is not None
            ]
        assert len(links) >= 4
        for link in links:
            assert link.startswith("/")
            client = stranger if link.startswith("/static/") else http
            assert (await client.get(link)).status_code == 200, link


async def test_scripts_are_open_and_import_what_there_is(web: Web) -> None:
    async with web.client(None) as stranger:
        for path in SCRIPTS:
            answer = await stranger.get(f"/static/{named(path)}")
            assert answer.status_code == 200, path.name
            assert "javascript" in answer.headers["content-type"]
            for imported in re.findall(r'from "([^"]+)"', answer.text):
                assert (path.parent / imported).resolve() in ASSETS, f"{path.name} imports {imported}"


@of_assets([*SCRIPTS, *TEMPLATES, STATIC / "vendor" / "uplot.js"])
def test_nothing_makes_markup_or_code_of_text(path: Path) -> None:
    found = re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|"
        r"createContextualFragment|setAttribute\(\"style|javascript:|\|safe\b|<style|\son[a-z]+=\"",
        path.read_text(),
    )
    assert found is None, found


@of_assets([*OWN, *TEMPLATES])
def test_nothing_is_loaded_from_elsewhere(path: Path) -> None:
    text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.search(r"https?:|[\"'(]//", text) is None


@of_assets(SCRIPTS)
def test_scripts_are_small_and_say_what_they_are_for(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ")
    assert len(lines) <= 400


def test_scripts_change_nothing_but_what_an_operator_confirms() -> None:
    changing = [
        path.name for path in SCRIPTS if re.search(r"\bchange\b.* from \"\./api\.js\"", path.read_text())
    ]
    assert changing == ["actions.js"]
    for path in SCRIPTS:
        assert re.search(r"sendBeacon|XMLHttpRequest|\.submit\(|WebSocket", path.read_text()) is None
        assert len(re.findall(r"\bfetch\(", path.read_text())) == (2 if path.name == "api.js" else 0)
    asked = (STATIC / "actions.js").read_text()
    assert asked.count("run:") - 1 == asked.count("return ask({") == 5, "each change asks first"


@pytest.mark.parametrize(
    "path",
    ["/static/../api/v1/clusters", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/app.js\n",
     "/static/", "/static/views/../../app.py", "/static/app.js/", "/static/views", "/static/x.py"],
)  # fmt: skip
async def test_only_assets_are_open(web: Web, path: str) -> None:
    assert role_for_http("GET", path) is not None
    async with web.client(None) as stranger:
        answer = await stranger.get(path.replace("\n", "%0a"))
    assert answer.status_code in (401, 404)
    assert b"import" not in answer.content


async def test_looking_changes_nothing(web: Web) -> None:
    await join_all(web.runtime, 4)
    async with web.client("admin") as http:
        description = (await http.get("/openapi.json")).json()
        before = (await http.get("/api/v1/clusters/big")).json()
        last = (await http.get("/api/v1/server")).json()["last_event"]
        read = 0
        for path, methods in description["paths"].items():
            if "get" in methods and not path.endswith("/stream"):
                where = path.format(cluster="big", job="worker", index=0) if "{" in path else path
                answer = await http.get(where, params={"key": "k"} if path.endswith("/value") else {})
                assert answer.status_code in (200, 303, 404), where
                read += 1
        assert read >= 14
        assert (await http.get("/api/v1/clusters/big")).json() == before
        assert (await http.get("/api/v1/server")).json()["last_event"] == last


async def test_task_slots_are_all_members_in_columns(web: Web) -> None:
    await join_all(web.runtime, 20)
    async with web.client() as http:
        page = (await http.get("/api/v1/clusters/big/tasks")).json()
        assert (page["conditions"], page["total"], page["next"]) == ("C" * 20, 20, None)
        assert page["jobs"] == [{"name": "worker", "tasks": 20}]
        assert [page["hosts"][host] for host in page["host"]] == [f"host{index // 8}" for index in range(20)]
        assert page["pids"] == list(range(20))
        assert page["devices"] == {"CPU": [2] * 20}
        part = (await http.get("/api/v1/clusters/big/tasks?after=15&limit=3")).json()
        assert (part["first"], part["pids"], part["next"]) == (15, [15, 16, 17], 18)
        beyond = (await http.get("/api/v1/clusters/big/tasks?after=99")).json()
        assert (beyond["conditions"], beyond["next"]) == ("", None)
        assert (await http.get("/api/v1/clusters/none/tasks")).status_code == 404


async def test_task_slots_that_nobody_took_and_members_that_left(web: Web, make_client) -> None:
    clients = [make_client(index, cluster="few", size=4) for index in (0, 2)]
    for client in clients:
        await client.join()
    await clients[1].leave()
    async with web.client() as http:
        page = (await http.get("/api/v1/clusters/few/tasks")).json()
    assert (page["conditions"], page["host"][1], page["host"][3]) == ("CVLV", -1, -1)


async def test_task_slots_of_machines_of_one_name(web: Web, make_client) -> None:
    for index, (host, boot_id) in enumerate([("pi", "a"), ("pi", ""), ("node", "a"), ("pi", "a")]):
        client = make_client(index, cluster="few", size=5)
        process = common_pb2.Process(host=host, boot_id=boot_id, pid=index)
        await client.coordination.Register(client.registration(process=process))
    async with web.client() as http:
        page = (await http.get("/api/v1/clusters/few/tasks")).json()
        plain = (await http.get("/")).text
    assert (page["host"], page["hosts"]) == ([0, 1, 2, 0, -1], ["pi", "pi", "node"])
    assert page["boot_ids"] == ["a", "", "a"]
    assert page["machines"] == ["pi (boot a)", "pi (boot unknown)", "node"]
    assert [plain.count(f"<bdi>{one}</bdi>") for one in page["machines"]] == [2, 1, 1]


def test_machines_are_labelled_as_briefly_as_tells_them_apart() -> None:
    machines = [
        ("a", "0123456789"),
        ("b", "0123456789"),
        ("b", "0123456788"),
        ("b", ""),
        ("c", "01"),
        ("c", "0123456789"),
    ]
    assert [label_machines(machines)[one] for one in machines] == [
        "a", "b (boot 0123456789)", "b (boot 0123456788)", "b (boot unknown)", "c (boot 01)",
        "c (boot 01234567)",
    ]  # fmt: skip


def report(rank: int, *, issued: int, waiting: bool) -> bytes:
    last = pb.CallRecord(
        group=7, sequence=issued, call="all_reduce(sum)", nbytes=80, age_us=8_000_000, elapsed_us=7_000_000,
        waited_us=6_000_000, state=pb.CALL_STATE_WAITING if waiting else pb.CALL_STATE_DONE,
    )  # fmt: skip
    group = pb.GroupProgress(
        id=7, name="world", size=3, issued=issued, finished=issued - waiting, last=last, counted=4,
        elapsed_us=40, waited_us=10,
    )  # fmt: skip
    return pb.ProgressReport(
        where=f"late.py:{rank} in train", idle_ms=7_000, groups=[group], recent=[last]
    ).SerializeToString()


async def tell(web: Web) -> None:
    await join_all(web.runtime, 3)
    for rank in range(3):
        caller = Caller("big", Task("worker", rank), 1000 + rank)
        web.runtime.progress.note(caller, report(rank, issued=5 if rank == 2 else 6, waiting=rank != 2))


async def test_why_is_the_verdict_of_the_command_line(web: Web) -> None:
    await tell(web)
    async with web.client() as http:
        why = (await http.get("/api/v1/clusters/big/why")).json()
        assert (why["waiting"], why["kind"], why["severity"]) == (True, "waiting", "bad")
        assert re.fullmatch(r"Rank 2 is holding up 2 ranks · 8\.\d s", why["headline"])
        assert [one["task"] for one in why["culprits"]] == ["/job:worker/task:2"]
        assert why["victims"] == {"worker": [0, 1]}
        assert [fact["brief"] for fact in why["evidence"] if fact["brief"]] == [
            "late.py:2 train", "all_reduce #6 · sum", "pid 2 · host0",
        ]  # fmt: skip
        assert (await http.get("/api/v1/clusters/none/why")).status_code == 404


async def test_why_is_worked_out_anew_when_a_member_is_gone(web: Web, make_client) -> None:
    clients = [make_client(index, cluster="few", size=3) for index in range(3)]
    for client in clients:
        await client.join()
    async with web.client() as http:
        assert (await http.get("/api/v1/clusters/few/why")).json()["kind"] == "healthy"
        await clients[1].leave("ValueError: bad batch")
        why = (await http.get("/api/v1/clusters/few/why")).json()
    assert (why["kind"], why["headline"]) == ("failed", "Rank 1 failed with ValueError")


async def test_nothing_to_wait_for(web: Web) -> None:
    await join_all(web.runtime, 2, "calm")
    async with web.client() as http:
        why = (await http.get("/api/v1/clusters/calm/why")).json()
    assert (why["waiting"], why["since"], why["culprits"], why["victims"]) == (False, None, [], {})
    assert why["headline"] == "Nothing is waiting · 2 members are connected"


async def test_past_calls_are_told_of_who_asks(web: Web) -> None:
    await tell(web)
    async with web.client() as http:
        [group] = (await http.get("/api/v1/clusters/big/collectives?recent=16")).json()["groups"]
        [call] = group["members"][0]["recent"]
        assert (call["sequence"], call["elapsed"], call["waited"], call["state"]) == (5, 7.0, 6.0, "DONE")
        assert call["age"] >= 8.0
        [group] = (await http.get("/api/v1/clusters/big/collectives")).json()["groups"]
        assert group["members"][0]["recent"] == []
