"""What operators change from the dashboard: after a confirmation, with an admin's token, and on record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.conftest import OpenPage
from tests.browser.in_process import Held, held_server
from tests.browser.test_scenes import check_access
from tests.server.raw_client import PATIENCE
from tests.server.web_server import join_all

from dmesh_server.core.effects import KvRevision
from dmesh_server.core.events import EnterBarrier, KvSet
from dmesh_server.core.model import Caller, Task

pytestmark = pytest.mark.browser


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    with held_server(tmp_path) as server:
        server.do(lambda runtime: join_all(runtime, 3))
        yield server


def audited(held: Held) -> list[tuple[str, str]]:
    """Returns action and outcome of each entry, oldest first."""
    log = held.web.server._app._app.state.audit  # type: ignore[union-attr, attr-defined]
    return [(one.action, one.outcome) for one in reversed(held.do(lambda _: log.latest(100)))]


def test_an_operator_evicts_a_member_and_ends_the_cluster(held: Held, open_page: OpenPage) -> None:
    page = open_page(held.web.url, "members/big/member=worker:1", token=held.web.tokens["viewer"])
    page.get_by_role("button", name="Evict this member").click()
    check_access(page)
    page.get_by_label("Reason").fill("too slow")
    page.get_by_label("Token of an admin").fill(held.web.tokens["viewer"])
    page.get_by_role("button", name="Evict the member").click()
    page.get_by_text("needs admin").wait_for()
    open_page.forgiven.append("403")  # type: ignore[attr-defined] -- the browser says so, too
    page.get_by_label("Token of an admin").fill(held.web.tokens["admin"])
    page.get_by_role("button", name="Evict the member").click()
    page.locator(".row[data-task='/job:worker/task:1'][data-condition=FAILED]").wait_for()
    page.keyboard.press("Escape")
    assert audited(held) == [("evict_member", "done")]

    page.goto(f"{held.web.url}/#/overview/big")
    page.get_by_text("Rank 1 was evicted by an operator").first.wait_for()
    page.get_by_text("Server", exact=True).click()
    page.get_by_role("button", name="End this cluster").click()
    page.get_by_role("button", name="Keep it").click()
    assert audited(held)[1:] == []
    page.get_by_role("button", name="End this cluster").click()
    page.get_by_role("button", name="End the cluster").click()
    page.get_by_text("0 / 3").wait_for()
    assert audited(held)[1:] == [("end_cluster", "done")]


def test_an_operator_cancels_a_barrier_and_deletes_a_key(held: Held, open_page: OpenPage) -> None:
    caller = Caller("big", Task("worker", 0), 1000)

    async def prepare(runtime) -> None:
        runtime.send(EnterBarrier(min(runtime._sessions), "epoch-17", 0, (), PATIENCE * 10))
        await runtime.request(KvSet(runtime.next_number(), caller, "set", "old", b"x", True, 0), KvRevision)

    held.do(prepare)
    page = open_page(held.web.url, "barriers/big", token=held.web.tokens["viewer"])
    page.get_by_role("button", name="Cancel …").click()
    page.get_by_label("Token of an admin").fill(held.web.tokens["admin"])
    page.get_by_role("button", name="Cancel the barrier").click()
    page.get_by_text("No barrier is under way").wait_for()
    page.click("nav >> [data-view=keys]")
    page.get_by_role("button", name="Delete old").click()
    page.get_by_role("button", name="Delete the key").click()  # the page remembers the token
    page.get_by_text("No such key").wait_for()
    assert audited(held) == [("cancel_barrier", "done"), ("delete_key", "done")]


def test_a_confirmation_is_for_the_cluster_that_was_asked_about(held: Held, open_page: OpenPage) -> None:
    async def prepare(runtime) -> None:
        await join_all(runtime, 2, cluster="other")
        for cluster in ("big", "other"):
            caller = Caller(cluster, Task("worker", 0), 1000)
            await runtime.request(
                KvSet(runtime.next_number(), caller, f"set {cluster}", "old", b"x", True, 0), KvRevision
            )

    held.do(prepare)
    page = open_page(held.web.url, "keys/big", token=held.web.tokens["viewer"])
    page.get_by_role("button", name="Delete old").click()
    page.evaluate("location.hash = '#/keys/other'")
    page.wait_for_function("document.title.includes('other')")
    page.get_by_label("Token of an admin").fill(held.web.tokens["admin"])
    page.get_by_role("button", name="Delete the key").click()
    page.locator("dialog").wait_for(state="detached")
    page.goto(f"{held.web.url}/#/keys/big")
    page.get_by_text("No such key").wait_for()
    assert audited(held) == [("delete_key", "done")]


def test_a_wall_screen_logs_in_by_a_link_once_and_can_only_look(held: Held, open_page: OpenPage) -> None:
    page = open_page(held.web.url, token=held.web.tokens["viewer"])
    page.locator("summary[aria-label=Menu]").click()
    page.get_by_role("button", name="Link for a wall screen").click()
    page.get_by_label("Token of an admin").fill(held.web.tokens["admin"])
    page.get_by_role("button", name="Make the link").click()
    page.locator("dialog .result").wait_for()
    link = page.locator("dialog .result").inner_text()
    wall = open_page(link, log_in=False, fragment=False)
    wall.wait_for_url("**/#/wall")
    wall.get_by_text("Nothing is waiting · 3 members are connected").wait_for()
    assert wall.locator("main button:visible, nav:visible, main a:visible").count() == 0
    again = open_page(link, log_in=False, fragment=False)
    again.get_by_text("used already").wait_for()
    assert audited(held) == [("create_login_link", "done")]
    open_page.forgiven.append("401")  # type: ignore[attr-defined]
