"""Charts of the last 15 minutes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.browser.conftest import OpenPage
from tests.browser.in_process import Held, calls, held_server
from tests.browser.test_scenes import LOOKS, SIZES, check_access, take
from tests.server.web_server import join_all

from dmesh_server.runtime import Runtime
from dmesh_server.web.series import STEP, Recorder

pytestmark = pytest.mark.browser

RANKS = 8
COLUMNS = 60


async def beat_and_record(runtime: Runtime, recorder: Recorder, number: int) -> None:
    for slot in runtime._core._clusters["big"].roster.slots.values():
        slot.last_seen_at = runtime.now() - 1.5 - number % 4 / 4
    await recorder.record()


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Five minutes of eight ranks, of which rank 5 is slow, and hangs in the end."""
    now = [1_000_000_000.0]
    monkeypatch.setattr("dmesh_server.web.series.time.time", lambda: now[0])
    with held_server(tmp_path) as held:
        held.do(lambda runtime: join_all(runtime, RANKS))
        recorder = held.web.server._app.recorder  # type: ignore[union-attr]
        held.do(lambda _: recorder.stop())  # here, time passes at the test's pace
        offset = [0.0]
        clock = held.web.runtime.progress._clock
        monkeypatch.setattr(held.web.runtime.progress, "_clock", lambda: clock() + offset[0])
        monkeypatch.setattr(held.web.runtime, "_clock", lambda: clock() + offset[0])
        for number in range(COLUMNS):
            hangs = number >= COLUMNS - 6
            for rank in range(RANKS):
                report = calls(rank, 20 * min(number, COLUMNS - 6) + (hangs and rank != 5), RANKS,
                               waits_for=5 if hangs and rank != 5 else None)  # fmt: skip
                group = report.groups[0]
                group.counted, group.elapsed_us = 20, 4_000_000
                group.waited_us = 100_000 if rank == 5 else 2_600_000 + 50_000 * rank
                held.report(rank, report)
            offset[0] += STEP
            now[0] += STEP
            held.do(partial(beat_and_record, recorder=recorder, number=number))
        yield held


def test_charts_show_who_waits_and_who_is_slow(recorded: Held, open_page: OpenPage) -> None:
    for size, theme in LOOKS:
        page = open_page(
            recorded.web.url,
            "time",
            viewport=SIZES[size],
            color_scheme=theme,
            token=recorded.web.tokens["viewer"],
        )
        wait = page.locator("[data-chart=wait]")
        wait.locator("canvas").wait_for()
        assert "up to 100 %" in wait.inner_text()
        for name in ("calls", "bytes", "pace", "silence", "cpu"):
            assert page.locator(f"[data-chart={name}] canvas").is_visible(), name
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]["width"]
        check_access(page)
        take(page, f"time-{size}-{theme}")
        over = wait.locator(".u-over").bounding_box()
        assert over is not None
        page.mouse.move(over["x"] + over["width"] * 0.9, over["y"] + over["height"] * 5.5 / RANKS)
        assert "rank 5 waited" in wait.locator("figcaption").inner_text()
        page.mouse.click(over["x"] + over["width"] * 0.9, over["y"] + over["height"] * 5.5 / RANKS)
        page.wait_for_url("**/#/time/big/at*")
        page.reload()
        page.locator("[data-chart=calls] canvas").wait_for()  # the server has kept them
        assert "/s" in page.locator("[data-chart=calls] figcaption").inner_text()
