"""The documentation's notebook runs, and shows what it says."""

from __future__ import annotations

import pytest
from tests.engines import notebooks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def test_the_notebook_shows_what_is_written_down() -> None:
    now, then = notebooks.cells(notebooks.execute()), notebooks.cells(notebooks.stored())
    assert [cell["source"] for cell in now] == ["".join(cell["source"]) for cell in then]
    for ran, told in zip(now, then, strict=True):
        assert notebooks.shown(ran) == notebooks.shown(told), ran["source"]
