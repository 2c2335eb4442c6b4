"""A real browser before a real server. Debian's chromium, driven by Playwright; see `make browser`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.faults.secured import Served, serving, write_tokens

from dmesh.security import tokens

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

# Leaves a note of each breach of the policy, and of each script that a name has smuggled in.
_WATCH = """
window.breaches = [];
const note = (event) => window.breaches.push(event.violatedDirective);
document.addEventListener("securitypolicyviolation", note);
window.alert = () => window.breaches.push("alert");
"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Skips, and says what is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def token() -> str:
    return tokens.generate()


@pytest.fixture
def served(token: str, tmp_path: Path) -> Iterator[Served]:
    path = write_tokens(tmp_path / "tokens", f"{token} role=admin")
    with serving("--memory", "--token-file", str(path)) as server:
        yield server


OpenPage = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser, token: str) -> Iterator[OpenPage]:
    """Opens a page of a server, logged in; at the end none of them may have complained of anything."""
    own = token
    pages: list[Page] = []
    complaints: list[str] = []

    def open_one(
        url: str,
        view: str = "overview",
        *,
        log_in: bool = True,
        token: str | None = None,
        fragment: bool = True,
        **options: object,
    ) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))  # type: ignore[arg-type]
        context.add_init_script(_WATCH)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        if log_in:
            page.fill("#token", token or own)
            page.click("button")
        if fragment:
            page.goto(f"{url}/#/{view}")
        pages.append(page)
        return page

    forgiven: list[str] = []
    open_one.forgiven = forgiven  # type: ignore[attr-defined]
    yield open_one
    for page in pages:
        if page.evaluate("typeof window.breaches") == "object":
            assert json.loads(page.evaluate("JSON.stringify(window.breaches)")) == []
        page.context.close()
    assert [one for one in complaints if not any(text in one for text in forgiven)] == []
