"""The rate at which a peer is listened to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmesh_server.security.pace import Pace

idle = st.lists(st.floats(0, 3), min_size=1, max_size=200)


@given(rate=st.integers(1, 50), idle=idle)
def test_nobody_says_more_than_the_rate_and_one_second_ahead(rate: int, idle: list[float]) -> None:
    """In any window, a peer that is listened to as told says at most `rate * seconds + rate` messages."""
    pace, now, times = Pace(rate, 0.0), 0.0, []
    for gap in idle:
        now += gap
        times.append(now)
        now += pace.spend(now)
    for begin, first in enumerate(times):
        for end in range(begin, len(times)):
            assert end - begin + 1 <= rate * (times[end] - first) + rate + 1 + 1e-6


@given(rate=st.integers(1, 50), count=st.integers(1, 200))
def test_who_stays_below_the_rate_is_never_held_up(rate: int, count: int) -> None:
    pace = Pace(rate, 0.0)
    assert all(pace.spend((number + 1) / rate) == 0.0 for number in range(count))


def test_a_burst_is_paid_off_afterwards() -> None:
    pace = Pace(10, 0.0)
    assert [pace.spend(0.0) for _ in range(12)][9:] == [0.0, 0.1, 0.2]
    assert pace.spend(0.2) == 0.1
