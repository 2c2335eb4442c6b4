"""The dashboard in a browser, before a cluster of eight real clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from tests.browser.conftest import OpenPage
from tests.e2e.clients import DEADLINE, Process, run_clients
from tests.faults.secured import Served
from tests.faults.test_s27_hostile_names import HOSTILE
from tests.server.raw_client import PATIENCE, RawClient

from dmesh.v1 import common_pb2, key_value_pb2
from dmesh_server.web.pages import visible

pytestmark = pytest.mark.browser

CLIENTS = 8
VIEWS = ("overview", "time", "mesh", "members", "barriers", "collectives", "events", "keys")

SCRIPT = """
import sys
import numpy as np
import dmesh
dmesh.initialize_accelerator_system("CPU")
mesh = dmesh.create_distributed_mesh([("batch", 4), ("model", 4)], device_type="CPU", mesh_name="grid")
if dmesh.client_id() == 0:
    dmesh.coordination.key_value_set("checkpoint/latest", b"step 17")
for _ in range(5):
    dmesh.collectives.all_reduce(np.ones(1000))
print("joined", flush=True)
if dmesh.client_id() == 2:
    sys.stdin.readline()
dmesh.coordination.barrier("epoch-17", timeout=600)
print("passed", flush=True)
sys.stdin.readline()
dmesh.shutdown_accelerator_system()
"""


def cluster(served: Served, token: str) -> contextlib.AbstractContextManager[dict[int, Process]]:
    """Runs eight clients, of which client 2 does not come to the barrier."""
    environ = {
        "DMESH_COORDINATOR": served.grpc, "DMESH_CLUSTER": "train", "DMESH_TOKEN": token,
        "DMESH_HEARTBEAT_INTERVAL": "0.5", "DMESH_NUM_CPU_DEVICES": "2",
    }  # fmt: skip
    return run_clients(CLIENTS, SCRIPT, environ=environ, stdin=True)


@contextlib.contextmanager
def hostile_members(served: Served, token: str) -> Iterator[None]:
    """Keeps members with such names, in such barriers, with such keys; on a thread of their own."""
    ready, over = threading.Event(), threading.Event()

    async def run() -> None:
        clients = []
        for index, name in enumerate(HOSTILE.values()):
            client = RawClient(served.grpc, index, cluster="hostile", size=len(HOSTILE) + 1, token=token)
            clients.append(client)
            process = common_pb2.Process(host=name, boot_id=name, program=name, dmesh_version=name)
            devices = [common_pb2.Device(type="CPU", index=1, description=name)]
            await client.coordination.Register(
                client.registration(process=process, devices=devices), timeout=PATIENCE
            )
            stream = await client.attach()
            if name.isprintable() and len(name) <= 256:
                await stream.enter(name, timeout_ms=600_000)
            await client.key_value.Set(
                key_value_pb2.SetRequest(
                    caller=client.caller, request_id=client.request_id(), key=f"key {name}", value=b"secret"
                ),
                timeout=PATIENCE,
            )
        ready.set()
        await asyncio.to_thread(over.wait)
        for client in clients:
            await client.channel.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(DEADLINE)
        yield
    finally:
        over.set()
        thread.join(DEADLINE)


def test_a_cluster_comes_waits_and_loses_a_worker(served: Served, token: str, open_page: OpenPage) -> None:
    page = open_page(served.http)
    page.get_by_text("No cluster yet").wait_for()
    with cluster(served, token) as clients:
        page.get_by_text(f"{CLIENTS} / {CLIENTS}").wait_for(timeout=DEADLINE * 1000)
        for client in clients.values():
            client.wait_for("joined")

        page.click("nav >> text=Barriers")
        missing = page.locator("[data-barrier='epoch-17'] [data-task]")
        page.locator("[data-barrier='epoch-17']").wait_for()
        page.get_by_text(f"{CLIENTS - 1} of {CLIENTS} there").wait_for()
        assert missing.evaluate_all("found => found.map((one) => one.dataset.task)") == ["/job:worker/task:2"]

        page.click("nav >> text=Overview")
        page.get_by_text(re.compile(r"Rank 2 is holding up 7 ranks")).first.wait_for()
        page.locator(".hero .fact").get_by_text("barrier 'epoch-17' (instance 0)").wait_for()

        page.click("nav >> text=Mesh")
        page.get_by_text(re.compile("batch 4 . model 4, CPU")).wait_for()
        page.click("nav >> text=Keys")
        page.get_by_text("checkpoint/latest").wait_for()
        assert "step 17" not in page.content()
        page.click("nav >> text=Collectives")
        page.get_by_text(f"{CLIENTS} ranks · call #").first.wait_for()

        page.click("nav >> text=Members")
        row = page.locator(".row[data-task='/job:worker/task:5']")
        row.get_by_text("CONNECTED").wait_for()
        page.evaluate("window.sameDocument = true")
        clients[5].signal(signal.SIGKILL)
        killed = time.monotonic()
        page.locator(".row[data-task='/job:worker/task:5'][data-condition='LOST']").wait_for(timeout=2000)
        assert time.monotonic() - killed < 2.0
        # At once, or with the next verdict: the one before has it wait for rank 2, as all do.
        page.wait_for_function(
            """() => {
              const chip = document.querySelector(".row[data-task='/job:worker/task:5'] .chip");
              const [red, green, blue] = getComputedStyle(chip).color.match(/\\d+/g).map(Number);
              return red > 2 * Math.max(green, blue);
            }"""
        )
        assert page.evaluate("window.sameDocument"), "without a reload"
        page.get_by_role("button", name=re.compile(r"CONNECTED\s*8")).wait_for(state="detached")

        page.click("nav >> text=Events")
        page.locator("[data-kind='member_lost']").first.wait_for()


def test_a_lost_connection_is_said_and_comes_back(served: Served, token: str, open_page: OpenPage) -> None:
    page = open_page(served.http)
    page.locator(".light[data-state=live]").wait_for()
    page.context.set_offline(True)
    page.get_by_text("Connection lost at").wait_for()
    assert page.locator("body.stale").count() == 1
    page.context.set_offline(False)
    page.locator(".light[data-state=live]").wait_for()
    assert page.locator("[role=alert]").is_hidden()
    # What the browser itself says of a network that is not there is no fault of the page.
    open_page.forgiven.append("ERR_INTERNET_DISCONNECTED")  # type: ignore[attr-defined]


def test_clusters_stay_until_the_server_has_told_of_all(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.http)
    page.locator(".light[data-state=live]").wait_for()
    page.clock.install()
    page.evaluate(
        """async () => {
          const { Model } = await import("/static/model.js");
          window.model = new Model();
          model.setClusters([{ name: "old" }, { name: "late" }], []);
          model.opened();
        }"""
    )
    names = "[...model.clusters.keys()]"
    page.clock.fast_forward(60_000)
    assert page.evaluate(names) == ["old", "late"], "however long the server takes"
    page.evaluate("model.setClusters([{ name: 'late' }], [])")
    page.evaluate("model.complete()")
    assert page.evaluate(names) == ["late"]


def test_a_cluster_that_is_gone_after_a_lost_connection_is_not_shown(
    served: Served, token: str, open_page: OpenPage
) -> None:
    page = open_page(served.http, fragment=False)
    summary = {
        "name": "ghost", "tasks": 1, "members": {"CONNECTED": 1}, "vacant": 0, "barriers": 0, "ended": False,
        "waits_in": None, "epoch": 1, "keys": 0, "key_bytes": 0, "revision": 0, "waiters": 0,
    }  # fmt: skip
    blocks = {"hello": {"cursor": ""}, "clusters": {"clusters": [summary], "gone": []}, "complete": {}}
    body = "retry: 200\n\n" + "".join(
        f"event: {event}\ndata: {json.dumps(data)}\n\n" for event, data in blocks.items()
    )
    # Until it is seen, answers are of a server that has this cluster, and end at once; then the server's own.
    stream = "**/api/v1/events/stream*"
    page.route(stream, lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.reload()
    page.locator("#cluster option", has_text="ghost").wait_for(state="attached")
    page.unroute(stream)
    page.locator("#cluster option").wait_for(state="detached")
    page.get_by_text("No cluster yet").wait_for()
    open_page.forgiven.append("404")  # type: ignore[attr-defined] -- the cluster's resources


def test_hostile_names_are_inert_in_every_view(served: Served, token: str, open_page: OpenPage) -> None:
    page = open_page(served.http)
    with hostile_members(served, token):
        page.locator("#cluster").select_option("hostile")
        shown = ""
        for view in VIEWS:
            page.click(f"nav >> [data-view={view}]")
            page.locator(f"nav a[aria-current=page][data-view={view}]").wait_for()
            page.locator("main .view").wait_for()
            if view in ("mesh", "members", "barriers", "keys"):
                page.get_by_text(visible(HOSTILE["image"])).locator("visible=true").first.wait_for()
            assert page.locator("main img, main script, main [onmouseover], main iframe").count() == 0
            shown += page.locator("main").inner_text()
        page.click("nav >> [data-view=members]")
        page.get_by_role("button", name="/job:worker/task:0", exact=True).click()
        page.locator("dialog").get_by_text(visible(HOSTILE["image"])).first.wait_for()
        page.keyboard.press("Escape")
        for kind, name in HOSTILE.items():
            assert " ".join(visible(name).split())[:60] in " ".join(shown.split()), kind
        assert not any(ord(one) < 32 and one not in "\n\t" for one in shown)
        assert "secret" not in page.content()


def test_tables_are_there_without_scripts(served: Served, token: str, open_page: OpenPage) -> None:
    with cluster(served, token) as clients:
        for client in clients.values():
            client.wait_for("joined")
        page = open_page(served.http, java_script_enabled=False)
        assert page.get_by_role("row").filter(has_text="/job:worker/task:7").count() == 1
        assert (
            page.get_by_role("row").filter(has_text="epoch-17").get_by_text("/job:worker/task:2").count() == 1
        )


def test_keyboard_and_quiet_eyes(served: Served, token: str, open_page: OpenPage) -> None:
    page = open_page(served.http, reduced_motion="reduce")
    page.locator(".light[data-state=live]").wait_for()
    page.locator("nav a").first.focus()
    for _ in range(2):
        page.keyboard.press("Tab")  # past "Time"
    page.keyboard.press("Enter")
    page.locator("nav a[aria-current=page][data-view=members]").wait_for()
    moving = "[...document.getAnimations()].filter((one) => one.playState === 'running').length"
    assert page.evaluate(moving) == 0


def test_a_phone_has_no_sideways_scrolling(served: Served, token: str, open_page: OpenPage) -> None:
    page = open_page(served.http, viewport={"width": 390, "height": 844})
    for view in VIEWS:
        page.goto(f"{served.http}/#/{view}")
        page.locator(f"nav a[aria-current=page][data-view={view}]").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
