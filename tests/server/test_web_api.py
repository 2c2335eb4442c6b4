"""The REST interface, over HTTP: what it shows, in which pages, to whom, and what operators may do."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from tests.server.raw_client import RawClient
from tests.server.web_server import Web, join_all, serving_web

from dmesh.v1 import coordination_pb2, key_value_pb2, progress_pb2
from dmesh_server.core.events import EnterBarrier
from dmesh_server.core.model import Caller, Task

METHODS = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@pytest.fixture
async def web(served, tmp_path: Path) -> AsyncIterator[Web]:
    async with serving_web(served.runtime, tmp_path) as web:
        yield web


@pytest.fixture
async def viewer(web: Web) -> AsyncIterator[httpx.AsyncClient]:
    async with web.client() as client:
        yield client


@pytest.fixture
async def admin(web: Web) -> AsyncIterator[httpx.AsyncClient]:
    async with web.client("admin") as client:
        yield client


async def get(http: httpx.AsyncClient, path: str, **query: object) -> dict:
    response = await http.get(path, params=query)  # type: ignore[arg-type]
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


async def waits(http: httpx.AsyncClient, cluster: str, count: int = 1) -> dict:
    """Returns the barriers as soon as there are so many: sessions are one way."""
    while (found := await get(http, f"/api/v1/clusters/{cluster}/barriers"))["total"] < count:
        await asyncio.sleep(0)
    return found


async def set_key(client: RawClient, key: str, value: bytes) -> None:
    await client.key_value.Set(
        key_value_pb2.SetRequest(
            caller=client.caller, request_id=client.request_id(), key=key, value=value, allow_overwrite=True
        )
    )


async def test_a_cluster_in_numbers_and_by_itself(
    viewer: httpx.AsyncClient, served, make_client: Callable[..., RawClient]
) -> None:
    assert (await get(viewer, "/api/v1/clusters"))["clusters"] == []
    client = make_client(0, cluster="train", size=3)
    stream = await client.join()
    await make_client(2, cluster="train", size=3).register()
    await set_key(client, "k", b"123")
    await stream.enter("epoch", timeout_ms=60_000)
    await waits(viewer, "train")
    page = await get(viewer, "/api/v1/clusters")
    assert page["server_incarnation"] == f"{served.runtime.server_incarnation:016x}"
    [cluster] = page["clusters"]
    assert (cluster["name"], cluster["tasks"], cluster["vacant"]) == ("train", 3, 1)
    assert cluster["members"] == {"CONNECTED": 1, "REGISTERED": 1}
    assert (cluster["keys"], cluster["key_bytes"], cluster["revision"]) == (1, 4, 1)
    assert (cluster["barriers"], cluster["waits_in"]["arrived"]) == (1, 1)
    detail = await get(viewer, "/api/v1/clusters/train")
    assert detail["jobs"] == [{"name": "worker", "tasks": 3}]
    assert detail["vacant_tasks"] == ["/job:worker/task:1"]
    assert detail["settings"]["restart_policy"] == "FAIL_FAST"


async def test_clusters_come_in_pages(viewer: httpx.AsyncClient, served) -> None:
    for name in ("a", "b", "c"):
        await join_all(served.runtime, 1, name)
    page = await get(viewer, "/api/v1/clusters", limit=2)
    assert ([one["name"] for one in page["clusters"]], page["next"], page["total"]) == (["a", "b"], "b", 3)
    page = await get(viewer, "/api/v1/clusters", limit=2, after=page["next"])
    assert ([one["name"] for one in page["clusters"]], page["next"]) == (["c"], None)


async def test_a_thousand_members_in_pages_of_bounded_size(viewer: httpx.AsyncClient, served) -> None:
    await join_all(served.runtime, 1000, devices=64)
    path, found, after = "/api/v1/clusters/big/members", list[int](), None
    while True:
        response = await viewer.get(path, params={"limit": 300} | ({"after": after} if after else {}))
        assert len(response.content) < 200_000
        page = response.json()
        found += [member["index"] for member in page["members"]]
        assert page["total"] == 1000
        after = page["next"]
        if after is None:
            break
    assert found == list(range(1000))
    assert page["members"][0]["devices"] == {"CPU": 64}
    assert (await viewer.get(path, params={"limit": 1001})).status_code == 422
    topology = await get(viewer, "/api/v1/clusters/big/topology", limit=5)
    assert (topology["total"], topology["next"], len(topology["hosts"])) == (125, 5, 5)
    assert topology["hosts"][0]["devices"] == {"CPU": 512}
    assert (topology["meshes"], topology["meshes_unknown"]) == ([], 1000), "said to be unknown, not invented"


async def test_members_in_trouble_can_be_asked_for(
    viewer: httpx.AsyncClient, make_client: Callable[..., RawClient]
) -> None:
    clients = [make_client(index, cluster="train", size=3) for index in range(3)]
    for client in clients:
        await client.join()
    await clients[1].leave("out of memory")
    page = await get(viewer, "/api/v1/clusters/train/members", condition=["FAILED", "LOST"])
    [member] = page["members"]
    assert (member["task"], member["reason"], page["total"]) == ("/job:worker/task:1", "out of memory", 1)
    assert (member["host"], member["pid"], member["condition"]) == ("host1", 101, "FAILED")
    detail = await get(viewer, "/api/v1/clusters/train/members/worker/1")
    assert detail["device_list"] == [{"type": "CPU", "index": 0, "description": ""}]
    assert detail["peer_addresses"] == ["127.0.0.1:9"]
    assert detail["incarnation"] == f"{clients[1].caller.incarnation:016x}"


async def test_a_barrier_names_who_is_missing(
    viewer: httpx.AsyncClient, make_client: Callable[..., RawClient]
) -> None:
    stream = await make_client(0, cluster="train", size=4).join()
    await make_client(2, cluster="train", size=4).join()
    await stream.enter("epoch", timeout_ms=60_000)
    [barrier] = (await waits(viewer, "train"))["barriers"]
    assert (barrier["name"], barrier["arrived"], barrier["participants"]) == ("epoch", 1, 4)
    assert [(one["task"], one["condition"], one["host"]) for one in barrier["missing"]] == [
        ("/job:worker/task:1", "VACANT", ""),
        ("/job:worker/task:2", "CONNECTED", "host2"),
        ("/job:worker/task:3", "VACANT", ""),
    ]
    assert 0 < barrier["remaining"] <= 60
    [barrier] = (await get(viewer, "/api/v1/clusters/train/barriers", missing=1))["barriers"]
    assert (len(barrier["missing"]), barrier["missing_count"]) == (1, 3)


async def test_keys_have_sizes_for_viewers_and_values_for_admins(
    web: Web, viewer: httpx.AsyncClient, admin: httpx.AsyncClient, make_client: Callable[..., RawClient]
) -> None:
    client = make_client(0, cluster="train", size=1)
    await client.join()
    for key, value in (("../../etc/passwd", b"x"), ("a/1", b"\xff\x00"), ("a/2", b"12"), ("<b>", b"")):
        await set_key(client, key, value)
    path = "/api/v1/clusters/train/keys"
    page = await get(viewer, path, limit=3)
    assert [(one["key"], one["size"]) for one in page["keys"]] == [
        ("../../etc/passwd", 1), ("<b>", 0), ("a/1", 2),
    ]  # fmt: skip
    page = await get(viewer, path, limit=3, after=page["next"])
    assert ([one["key"] for one in page["keys"]], page["next"], page["total"]) == (["a/2"], None, 4)
    assert [one["key"] for one in (await get(viewer, path, prefix="a/"))["keys"]] == ["a/1", "a/2"]
    query = {"key": "a/1"}
    for role in ("viewer", "worker"):
        async with web.client(role) as http:
            # A router may take some of these for the same path; the role must be asked for all the same.
            for ending in ("", "%0A", "/", "%2F", "%20", "%00", "%0D%0A", ";", "/."):
                response = await http.get(f"/api/v1/clusters/train/value{ending}", params=query)
                assert response.status_code in ((403,) if ending == "" else (403, 404)), ending
    found = await get(admin, "/api/v1/clusters/train/value", **query)
    assert (base64.b64decode(found["base64"]), found["text"], found["size"]) == (b"\xff\x00", None, 2)
    assert (await get(admin, "/api/v1/clusters/train/value", key="a/2"))["text"] == "12"
    assert (await admin.get("/api/v1/clusters/train/value", params={"key": "no"})).status_code == 404


async def test_events_can_be_read_on(
    viewer: httpx.AsyncClient, served, make_client: Callable[..., RawClient]
) -> None:
    client = make_client(0, cluster="train", size=1)
    stream = await client.join()
    page = await get(viewer, "/api/v1/events", limit=2)
    assert [event["kind"] for event in page["events"]] == ["server_started", "cluster_formed"]
    assert (page["more"], page["gap"]) == (True, False)
    page = await get(viewer, "/api/v1/events", after=page["next"])
    assert [event["kind"] for event in page["events"]] == ["member_joined"]
    await stream.enter("b")
    await stream.result()
    await client.leave("ValueError: no")
    page = await get(viewer, "/api/v1/events", after=page["next"])
    assert [event["kind"] for event in page["events"]] == ["barrier_passed", "member_failed", "cluster_ended"]
    event = page["events"][1]
    assert (event["cluster"], event["task"], event["severity"]) == ("train", "/job:worker/task:0", "error")
    assert event["message"] == "/job:worker/task:0 (host host0, pid 100) failed: ValueError: no"
    assert (await get(viewer, "/api/v1/events", after=event["cursor"]))["events"][0]["id"] == event["id"] + 1
    assert (await get(viewer, "/api/v1/events", after=page["next"]))["events"] == []
    for query in (
        {"severity": "error"},
        {"kind": "member_failed"},
        {"task": "/job:worker/task:0", "severity": "error"},
    ):
        assert [one["id"] for one in (await get(viewer, "/api/v1/events", **query))["events"]] == [
            event["id"]
        ]
    assert (await get(viewer, "/api/v1/events", cluster="other"))["events"] == []
    assert [one["id"] for one in (await get(viewer, "/api/v1/errors"))["errors"]] == [event["id"]]
    old = await get(viewer, "/api/v1/events", after="00000000000000aa-3", limit=1)
    assert (old["gap"], old["events"][0]["id"]) == (True, 1), "of an earlier start of the server"


async def test_a_preemption_is_an_event(
    viewer: httpx.AsyncClient, make_client: Callable[..., RawClient]
) -> None:
    client = make_client(0, cluster="train", size=1)
    await client.join()
    await set_key(client, "dmesh/preemption/notice/1", json.dumps({"reason": "spot"}).encode())
    [event] = (await get(viewer, "/api/v1/events", kind="preemption_announced"))["events"]
    assert event["message"] == "/job:worker/task:0 announced a preemption: spot"


async def test_what_members_said_of_their_collectives(
    viewer: httpx.AsyncClient, make_client: Callable[..., RawClient]
) -> None:
    for index, (issued, waits_for) in enumerate([(7, [2]), (7, [2]), (6, [])]):
        client = make_client(index, cluster="train", size=4)
        stream = await client.join()
        state = progress_pb2.CALL_STATE_WAITING if waits_for else progress_pb2.CALL_STATE_DONE
        last = progress_pb2.CallRecord(
            group=5, sequence=issued, call="all_reduce(sum) of float64 (9,)", nbytes=72, state=state,
            elapsed_us=2_000_000, waited_us=1_500_000, waits_for=waits_for,
        )  # fmt: skip
        group = progress_pb2.GroupProgress(
            id=5, name="world", size=4, issued=issued, finished=6, last=last, counted=6,
            elapsed_us=3_000_000, waited_us=1_000_000,
        )  # fmt: skip
        mesh = progress_pb2.AnnouncedMesh(
            name="grid", axes=[progress_pb2.MeshAxis(name="batch", size=4)], device_type="CPU"
        )
        report = progress_pb2.ProgressReport(where=f"train.py:{index} in step", groups=[group], meshes=[mesh])
        await stream.send(heartbeat=coordination_pb2.Heartbeat(sequence=1, report=report))
        await stream.read_kind("heartbeat_ack")
    await make_client(3, cluster="train", size=4).join()
    page = await get(viewer, "/api/v1/clusters/train/collectives")
    assert (page["reported"], page["unknown"]) == (3, 1)
    [group] = page["groups"]
    assert (group["name"], group["size"], group["reported"], group["latest"]) == ("world", 4, 3, 7)
    assert group["stragglers"] == ["/job:worker/task:2"]
    first = group["members"][0]
    assert (first["task"], first["issued"], first["where"]) == ("/job:worker/task:2", 6, "train.py:2 in step")
    assert (first["waited"], first["transferred"]) == (1.0, 2.0)
    waiting = group["members"][1]["last"]
    assert (waiting["state"], waiting["waits_for"]) == ("WAITING", ["/job:worker/task:2"])
    topology = await get(viewer, "/api/v1/clusters/train/topology")
    assert topology["meshes"] == [
        {
            "name": "grid",
            "axes": [{"name": "batch", "size": 4}],
            "device_type": "CPU",
            "announced_by": 3,
            "placement": None,
        }
    ]
    assert topology["meshes_unknown"] == 1


async def test_facts_about_the_server(viewer: httpx.AsyncClient, served) -> None:
    facts = await get(viewer, "/api/v1/server")
    assert (facts["ready"], facts["store"]["kind"]) == (True, "memory")
    assert facts["last_event"].startswith(facts["incarnation"])


async def test_an_admin_evicts_the_process_that_was_meant(
    web: Web,
    admin: httpx.AsyncClient,
    make_client: Callable[..., RawClient],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "dmesh_server")
    clients = [make_client(index, cluster="train", size=2) for index in range(2)]
    streams = [await client.join() for client in clients]
    path = "/api/v1/clusters/train/members/worker/1"
    query = {"incarnation": f"{clients[1].caller.incarnation:016x}", "reason": "too\nslow"}
    first = await admin.delete(path, params=query)
    assert first.status_code == 200, first.text
    change = (await streams[0].read_kind("membership_change")).membership_change
    assert "evicted by an operator (token" in change.departed[0].reason
    assert (await streams[1].read_kind("session_end")).session_end.error.message
    again = await admin.delete(path, params=query)
    assert (again.status_code, again.json()) == (200, first.json()), "a repeated request"
    assert (await admin.delete(path, params={"incarnation": "0" * 15 + "9"})).status_code == 404
    assert (await admin.delete(path)).status_code == 422, "it must say whom it means"
    lines = [record.fields for record in caplog.records if record.getMessage().startswith("admin_action")]
    assert [line.get("changed") for line in lines] == [True, False, None]
    assert lines[0]["by"].endswith("(the-admin)")
    assert all(web.tokens["admin"] not in str(record.__dict__) for record in caplog.records)
    events = (await get(admin, "/api/v1/events", kind="admin_action"))["events"]
    assert [event["task"] for event in events] == ["/job:worker/task:1"], "one effect, one event"


async def test_an_admin_cancels_a_barrier_and_deletes_a_key(
    admin: httpx.AsyncClient, make_client: Callable[..., RawClient]
) -> None:
    client = make_client(0, cluster="train", size=2)
    stream = await client.join()
    await stream.enter("a/b c", timeout_ms=60_000)
    await waits(admin, "train")
    query: dict[str, object] = {"name": "a/b c", "instance": 0}
    for _ in range(2):
        assert (await admin.delete("/api/v1/clusters/train/barriers", params=query)).status_code == 200
    assert "cancelled by an operator" in (await stream.result()).error.message
    query["instance"] = 1
    assert (await admin.delete("/api/v1/clusters/train/barriers", params=query)).status_code == 409
    query["name"] = "a\x0eb"
    assert (await admin.delete("/api/v1/clusters/train/barriers", params=query)).status_code == 409
    await set_key(client, "k", b"1")
    await set_key(client, "k", b"2")
    path = "/api/v1/clusters/train/keys"
    assert (await admin.delete(path, params={"key": "k", "revision": 1})).status_code == 409
    for _ in range(2):
        assert (await admin.delete(path, params={"key": "k", "revision": 2})).status_code == 200
    assert (await get(admin, path))["total"] == 0


async def test_an_admin_increments_a_counter_once_for_each_request_id(
    admin: httpx.AsyncClient, make_client: Callable[..., RawClient]
) -> None:
    client = make_client(0, cluster="train", size=1)
    await client.join()
    path = "/api/v1/clusters/train/increments"
    for query, value, revision in (
        ({"request_id": "a"}, 1, 1),
        ({"request_id": "a"}, 1, 1),
        ({"request_id": "b", "amount": -5}, -4, 2),
    ):
        done = await admin.post(path, params={"key": "n", **query})
        assert (done.status_code, done.json()) == (200, {"key": "n", "value": value, "revision": revision})
    assert (await get(admin, "/api/v1/clusters/train/value", key="n"))["text"] == "-4"
    await set_key(client, "k", b"v")
    await set_key(client, "n", str((1 << 63) - 1).encode())
    for query, status, kind in (
        ({"key": "k", "request_id": "c"}, 409, "KEY_NOT_INTEGER"),
        ({"key": "n", "request_id": "d", "amount": 1}, 409, "KEY_NOT_INTEGER"),
        ({"key": "n", "request_id": "e", "amount": 1 << 53}, 422, "INVALID_ARGUMENT"),
        ({"key": "n"}, 422, "INVALID_ARGUMENT"),
        ({"key": "x" * 1025, "request_id": "f"}, 422, "INVALID_ARGUMENT"),
        ({"key": "dmesh/x", "request_id": "g"}, 403, "PERMISSION_DENIED"),
    ):
        refused = await admin.post(path, params=query)
        assert (refused.status_code, refused.json()["kind"]) == (status, kind), query
    assert (await get(admin, "/api/v1/clusters/train/keys"))["total"] == 2
    none = await admin.post(path.replace("train", "none"), params={"key": "n", "request_id": "h"})
    assert none.status_code == 404
    entries = (await get(admin, "/api/v1/audit", action="increment_key"))["entries"]
    assert (entries[-1]["target"], entries[-1]["outcome"]) == ("train: n (by 1, request a)", "done")


MUTATIONS = (
    "/api/v1/clusters/train/members/worker/0?incarnation=00000000000000ff",
    "/api/v1/clusters/train/barriers?name=b&instance=0",
    "/api/v1/clusters/train/keys?key=k&revision=1",
    "/api/v1/clusters/train/increments?key=k&request_id=r",
)


@pytest.mark.parametrize("path", MUTATIONS)
async def test_only_admins_change_anything_and_no_other_method_does(
    web: Web, path: str, make_client: Callable[..., RawClient]
) -> None:
    client = make_client(0, cluster="train", size=1, incarnation=255)
    await client.join()
    await set_key(client, "k", b"1")
    for role, statuses in ((None, {401}), ("viewer", {403}), ("worker", {403})):
        async with web.client(role) as http:
            for method in METHODS:
                assert (await http.request(method, path)).status_code in statuses, (role, method)
    changes = "POST" if "/increments" in path else "DELETE"
    async with web.client("admin") as http:
        for method in METHODS:
            if method != changes:
                assert (await http.request(method, path)).status_code == 405, method
        for method in ("GET", "HEAD", changes):  # no page of another site, no name that was pointed here
            assert (
                await http.request(method, path, headers={"Origin": "http://evil.example"})
            ).status_code == 403
            assert (await http.request(method, path, headers={"Host": "evil.example"})).status_code == 421
        assert (await http.request(changes, path, headers={"Host": ""})).status_code in (400, 421)
    state = web.runtime.views.summary("train")
    assert (dict(state.members), state.keys) == ({"CONNECTED": 1}, 1)


@pytest.mark.parametrize("role", ["viewer", "admin"])
async def test_a_cookie_changes_nothing(web: Web, role: str, make_client: Callable[..., RawClient]) -> None:
    client = make_client(0, cluster="train", size=1, incarnation=255)
    await client.join()
    async with web.client(None) as browser:
        await browser.post("/login", data={"token": web.tokens[role]})
        assert (await browser.get("/api/v1/clusters/train/members")).status_code == 200
        for path in MUTATIONS:
            for method in METHODS:
                assert (await browser.request(method, path)).status_code == 401
        assert (await browser.get("/api/v1/clusters/train/value?key=k")).status_code == 401
    assert dict(web.runtime.views.summary("train").members) == {"CONNECTED": 1}


REFUSED = [
    ("/api/v1/clusters/none", 404),
    ("/api/v1/clusters/none/members", 404),
    ("/api/v1/clusters/none/members/worker/0", 404),
    ("/api/v1/clusters/none/topology", 404),
    ("/api/v1/clusters/none/barriers", 404),
    ("/api/v1/clusters/none/collectives", 404),
    ("/api/v1/clusters/none/keys", 404),
    ("/api/v1/clusters/a%20b", 422),
    ("/api/v1/clusters/" + "x" * 200, 422),
    ("/api/v1/clusters/c/members/worker/99", 404),
    ("/api/v1/clusters/c/members/worker/-1", 422),
    ("/api/v1/clusters/c/members/worker/99999999999", 422),
    ("/api/v1/clusters/c/members?after=%00", 422),
    ("/api/v1/clusters/c/members?after=AAAA", 422),
    ("/api/v1/clusters/c/members?condition=WELL", 422),
    ("/api/v1/clusters/c/barriers?limit=1000", 422),
    ("/api/v1/clusters/c/keys?after=%00", 422),
    ("/api/v1/clusters?clustr=c", 422),
    ("/api/v1/clusters/c/members/worker/0?incarnation=00000000000000ff", 422),
    ("/metrics?x=1", 422),
    ("/api/v1/events?after=1", 422),
    ("/api/v1/events?kind=nothing", 422),
    ("/api/v1/events?severity=awful", 422),
    ("/api/v1/events?task=worker", 422),
    ("/api/v1/errors?before=x", 422),
    ("/api/v1/clusters/", 404),
    ("/api/v1/clusters/c/../../../etc/passwd", 404),
    ("/api/v1/clusters/%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404),
    ("/api/v1/clusters/c/value/%2e%2e", 404),
    ("/api/v1/nothing", 404),
]
"""What is asked for, and the status of the answer."""


async def test_what_makes_no_sense_is_refused_in_words(served, admin: httpx.AsyncClient) -> None:
    await join_all(served.runtime, 1, "c")
    for path, status in REFUSED:
        response = await admin.get(path)
        assert response.status_code == status, (path, response.text)
        if status == 422:
            assert response.json()["kind"] == "INVALID_ARGUMENT"


async def test_a_server_that_stops_says_so(served, viewer: httpx.AsyncClient) -> None:
    served.runtime.begin_shutdown()
    for path in ("/api/v1/clusters", "/api/v1/events/stream", "/api/v1/clusters/c/keys"):
        response = await viewer.get(path)
        assert (response.status_code, response.json()["kind"]) == (503, "SHUTTING_DOWN")
    assert (await viewer.get("/api/v1/events")).status_code == 200, "what happened can still be read"
    assert (await viewer.get("/metrics")).status_code == 200


async def test_many_barriers_come_in_pages(served, viewer: httpx.AsyncClient) -> None:
    runtime = served.runtime
    await join_all(runtime, 1, "c")
    await join_all(runtime, 2, "d")
    session, _ = await runtime.open_session(Caller("d", Task("worker", 0), 1000))
    for number in range(30):
        runtime.send(EnterBarrier(session.number, f"b{number}", -1, (), None))
    page = await get(viewer, "/api/v1/clusters/d/barriers", limit=20)
    assert (len(page["barriers"]), page["next"], page["total"]) == (20, 20, 30)
    page = await get(viewer, "/api/v1/clusters/d/barriers", limit=20, after=page["next"])
    assert (len(page["barriers"]), page["next"]) == (10, None)
