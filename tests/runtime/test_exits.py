"""The end of a process that has been a client."""

from __future__ import annotations

import pytest

from dmesh.errors import DMeshError
from dmesh.runtime import exits


def test_that_an_earlier_client_was_fenced_says_nothing_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "_fenced", True)
    assert exits.leave_after(DMeshError("after its end")) == exits.EXIT_FENCED
    exits.install()
    try:
        assert exits.leave_after(DMeshError("after the end of another client")) is None
    finally:
        exits.uninstall()
