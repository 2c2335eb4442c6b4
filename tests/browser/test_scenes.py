"""What an operator sees in each situation: on a screen and on a phone, in light and in dark.

`DMESH_PICTURES=docs/images make browser` takes the pictures of the documentation anew.
"""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.browser.conftest import OpenPage
from tests.browser.in_process import Held, calls, held_server
from tests.e2e.clients import DEADLINE, Process, run_clients
from tests.faults.secured import Served
from tests.server.web_server import join_all

from dmesh_server.core.effects import Done
from dmesh_server.core.events import Leave
from dmesh_server.core.model import Caller, Task
from dmesh_server.runtime import Runtime

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

PICTURES = os.environ.get("DMESH_PICTURES")  # read before tests are given an environment without
SIZES = {"screen": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
THEMES = ("light", "dark")
TAKEN = {
    "late-screen-light",
    "killed-screen-dark",
    "killed-phone-light",
    "members-screen-light",
    "time-screen-dark",
}
"""Pictures that the documentation shows."""
LOOKS = [(size, theme) for size in SIZES for theme in THEMES]
FIRST = 300
"""Pixels from the top within which a failure says who, where and why."""

LATE = """import sys
import numpy as np
import dmesh

def step(number):
    dmesh.collectives.all_reduce(np.ones(20_000))
    if number == 48 and dmesh.client_id() == 3:
        sys.stdin.readline()

dmesh.initialize_accelerator_system("CPU")
dmesh.create_distributed_mesh([("batch", 3), ("model", 4)], device_type="CPU", mesh_name="grid")
for number in dmesh.progress(range(400), desc="train"):
    step(number)
    if number == 47:
        print("far enough", flush=True)
"""

Look = Callable[[str], "Iterator[Page]"]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    with held_server(tmp_path) as server:
        yield server


@pytest.fixture
def late(served: Served, token: str) -> Iterator[dict[int, Process]]:
    """Six clients, of which rank 3 hangs in line 8 while the others wait."""
    environ = {
        "DMESH_COORDINATOR": served.grpc, "DMESH_CLUSTER": "train", "DMESH_TOKEN": token,
        "DMESH_HEARTBEAT_INTERVAL": "0.5", "DMESH_NUM_CPU_DEVICES": "2",
    }  # fmt: skip
    named = f"import sys; sys.argv = ['late.py']; exec(compile({LATE!r}, 'late.py', 'exec'))"
    with run_clients(6, named, environ=environ, stdin=True) as clients:
        for client in clients.values():
            client.wait_for("far enough")
        yield clients


@pytest.fixture
def every_look(open_page: OpenPage) -> Callable[..., Iterator[tuple[str, Page]]]:
    """Opens a page in each size and theme; each is checked, and its picture taken if it has a name."""

    def looks(
        url: str, view: str = "overview", *, wait: str, name: str = "", token: str | None = None
    ) -> Iterator[tuple[str, Page]]:
        for size, theme in LOOKS:
            page = open_page(url, view, viewport=SIZES[size], color_scheme=theme, token=token)
            page.get_by_text(re.compile(wait)).first.wait_for(timeout=DEADLINE * 1000)
            width = SIZES[size]["width"]
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
            check_access(page)
            take(page, f"{name}-{size}-{theme}")
            yield f"{size}-{theme}", page

    return looks


def take(page: Page, name: str) -> None:
    """Takes a picture, if the documentation shows it and is to have new ones."""
    if PICTURES and name in TAKEN:
        page.wait_for_timeout(1_500)
        page.screenshot(path=Path(PICTURES, f"dashboard-{name}.png"))


@contextmanager
def film(name: str, page: Page) -> Iterator[Callable[[float], None]]:
    """Yields a function that adds what the page shows, for some seconds, to a moving picture; see `take`."""
    frames: list[tuple[bytes, float]] = []

    def add(seconds: float) -> None:
        if PICTURES:
            frames.append((page.screenshot(), seconds))

    yield add
    if PICTURES:
        from PIL import Image

        images = [Image.open(io.BytesIO(data)).convert("RGB").quantize(64) for data, _ in frames]
        images[0].save(
            Path(PICTURES, f"{name}.gif"),
            save_all=True,
            append_images=images[1:],
            duration=[int(seconds * 1000) for _, seconds in frames],
            loop=0,
        )


def check_access(page: Page) -> None:
    """Asks axe-core whether everybody can use the page (WCAG 2.1, A and AA)."""
    from axe_playwright_python.sync_playwright import Axe

    options = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}}
    found = Axe().run(page, options=options).response["violations"]
    told = [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in found]
    assert not told, told


def bottom_of(page: Page, selector: str) -> float:
    box = page.locator(selector).first.bounding_box()
    assert box is not None, f"{selector} is not to be seen"
    return box["y"] + box["height"]


def test_an_empty_server_says_how_to_begin(served: Served, every_look) -> None:
    for _, page in every_look(served.http, wait="No cluster yet"):
        assert f"dmesh run --coordinator {served.grpc} -n 4" in page.locator(".start code").inner_text()
        page.get_by_text("No recent problems").wait_for()


def test_an_idle_cluster(held: Held, every_look) -> None:
    held.do(lambda runtime: join_all(runtime, 6))
    for rank in range(6):
        held.report(rank, calls(rank, 49, 6))
    for _, page in every_look(
        held.web.url, wait="Nothing is waiting · 6 members are connected", token=held.web.tokens["viewer"]
    ):
        assert page.locator(".hero.tone-ok").count() == 1
        assert page.locator(".tone-bad:visible, .tone-warn:visible").count() == 0


def test_a_late_rank(late: dict[int, Process], served: Served, every_look) -> None:
    for look, page in every_look(
        served.http, wait=r"Rank 3 is holding up 5 ranks · ([5-9]\.|\d\d)", name="late"
    ):
        chips = page.locator(".hero .fact").all_inner_texts()
        assert chips[0] == "late.py:8 step"
        assert chips[1] == "all_reduce #50 · float64 (20000,)"
        assert chips[2].startswith(f"pid {late[3].pid} · ")
        assert bottom_of(page, ".hero-head") < FIRST
        assert bottom_of(page, ".fact[data-label=line]") < FIRST
        page.get_by_role("link", name="Rank 3 and its stack").click()
        page.locator("dialog").get_by_text("late.py:8 in step").wait_for()
        page.keyboard.press("Escape")
        page.locator(".legend").get_by_text("5 victim (CONNECTED)").wait_for()
        if look.startswith("screen"):
            page.click("nav >> text=Collectives")
            row = page.locator("tr[data-task='/job:worker/task:3']")
            row.get_by_text("culprit").wait_for()
            assert page.locator("tr[data-tone=bad]").count() == 1
            assert page.locator("tr[data-tone=warn]").count() == 5


def test_a_killed_rank(late: dict[int, Process], served: Served, open_page: OpenPage, every_look) -> None:
    before = open_page(served.http)
    before.locator(".fact[data-label=line]").wait_for(timeout=DEADLINE * 1000)  # its last report is there
    late[3].signal(signal.SIGKILL)
    for client in late.values():
        client.wait()
    for look, page in every_look(served.http, wait="Rank 3 was killed · late.py:8", name="killed"):
        page.get_by_text("5 others stopped because of it").first.wait_for()
        for part in (".hero-head", ".fact[data-label=line]", ".hero-why >> nth=1"):
            assert bottom_of(page, part) < FIRST, (look, part)
        page.click("nav >> [data-view=members]")
        page.locator(".row[data-task='/job:worker/task:3'][data-tone=bad]").wait_for()
        take(page, f"members-{look}")
        assert page.locator(".row[data-tone=warn]").count() == 5
        assert page.locator(".row[data-tone=bad]").count() == 1
        first = page.locator(".rows-inner .row").first
        if look.startswith("phone"):
            assert f"3 · {os.uname().nodename} · pid {late[3].pid}" in first.inner_text().replace("\n", "")


def test_an_open_page_follows_what_happens(
    late: dict[int, Process], served: Served, open_page: OpenPage
) -> None:
    page = open_page(served.http, viewport={"width": 1120, "height": 700}, color_scheme="dark")
    with film("dashboard", page) as film_frame:
        for shown, seconds in (
            (r"Rank 3 is holding up 5 ranks · \d", 1.5),
            (r"Rank 3 is holding up 5 ranks · ([7-9]\.|\d\d)", 1.5),
            (r"Rank 3 is holding up 5 ranks · (1[2-9]|[2-9]\d)", 1.5),
        ):
            page.get_by_text(re.compile(shown)).first.wait_for(timeout=DEADLINE * 1000)
            film_frame(seconds)
        page.get_by_role("link", name="Rank 3 and its stack").click()
        page.locator("dialog").get_by_text("late.py:8 in step").wait_for()
        film_frame(3.0)
        page.keyboard.press("Escape")
        late[3].signal(signal.SIGKILL)
        page.get_by_text("Rank 3 was killed · late.py:8").first.wait_for(timeout=DEADLINE * 1000)
        page.get_by_text("5 others stopped because of it").first.wait_for(timeout=DEADLINE * 1000)
        film_frame(4.0)
    for client in late.values():
        client.wait()


def test_a_killed_server(late: dict[int, Process], served: Served, open_page: OpenPage) -> None:
    pages = [open_page(served.http, viewport=SIZES[size], color_scheme=theme) for size, theme in LOOKS]
    for page in pages:
        page.get_by_text("Rank 3 is holding up 5 ranks").first.wait_for(timeout=DEADLINE * 1000)
    served.process.signal(signal.SIGKILL)
    for page in pages:
        page.get_by_text("Connection lost at").wait_for()
        assert page.locator("body.stale").count() == 1
    open_page.forgiven.append("net::ERR")  # type: ignore[attr-defined] -- the browser says that nobody answers


def test_a_thousand_members(held: Held, every_look) -> None:
    held.do(lambda runtime: join_all(runtime, 1000))
    for rank in range(1000):
        held.report(
            rank, calls(rank, 49 if rank == 417 else 50, 1000, waits_for=None if rank == 417 else 417)
        )
    for look, page in every_look(
        held.web.url, wait=r"Rank 417 is holding up 999 ranks", token=held.web.tokens["viewer"]
    ):
        views = ("members", "time", "collectives", "barriers", "mesh", "events", "keys", "overview")
        for view in views if look.startswith("screen") else ("members", "overview"):
            page.click(f"nav >> [data-view={view}]")
            page.locator(f"nav a[aria-current=page][data-view={view}]").wait_for()
            check_access(page)
        assert page.locator("*").count() < 900
        took = page.evaluate("performance.getEntriesByName('dmesh-update').map((one) => one.duration)")
        assert sorted(took)[len(took) // 2] < 200, took


def test_two_clusters(held: Held, every_look) -> None:
    for cluster in ("eval", "train"):
        held.do(lambda runtime, cluster=cluster: join_all(runtime, 4, cluster))
    from playwright.sync_api import expect

    for _, page in every_look(held.web.url, wait="Nothing is waiting", token=held.web.tokens["viewer"]):
        assert page.locator("#cluster").input_value() == "eval"
        page.locator("section.card").get_by_role("link", name="train").click()
        page.wait_for_url("**/#/overview/train")
        expect(page).to_have_title(re.compile("train: Nothing is waiting"))


def test_a_finished_cluster(held: Held, every_look) -> None:
    async def finish(runtime: Runtime) -> None:
        await join_all(runtime, 4)
        for rank in range(4):
            caller = Caller("big", Task("worker", rank), 1000 + rank)
            await runtime.request(Leave(runtime.next_number(), caller, "leave", ""), Done)

    held.do(finish)
    for _, page in every_look(
        held.web.url, wait="Finished: 4 members left cleanly", token=held.web.tokens["viewer"]
    ):
        assert page.locator(".tone-bad:visible, .tone-warn:visible").count() == 0
