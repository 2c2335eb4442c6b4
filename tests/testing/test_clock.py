"""The clock that a test moves."""

from __future__ import annotations

import pytest

from dmesh.errors import ConfigurationError
from dmesh.testing import ManualClock


def test_it_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(5.0)
    assert clock() == clock() == clock.now == 5.0
    assert clock.advance(1.5) == 6.5
    assert clock() == 6.5
    clock.advance(0)
    assert clock.now == 6.5


@pytest.mark.parametrize("step", [-1, float("inf"), float("nan"), True, "1"])
def test_it_never_goes_backwards(step) -> None:
    clock = ManualClock()
    with pytest.raises(ConfigurationError, match="monotonic"):
        clock.advance(step)
    assert clock.now == 1000.0
