"""Requests without a token: a small budget, in which no host takes that of all others."""

from __future__ import annotations

from dmesh.testing import ManualClock
from dmesh_server.security.shedding import Budget, LoadShedder

BUDGET = Budget(per_second=100, per_second_and_host=10, burst_seconds=2, trust_seconds=60)


def test_a_host_beyond_its_budget_does_not_take_that_of_the_others() -> None:
    clock = ManualClock()
    shedder = LoadShedder(clock, BUDGET)
    assert sum(shedder.serves("10.0.0.1") for _ in range(1000)) == 20
    assert all(shedder.serves("10.0.0.2") for _ in range(20))
    clock.advance(60)
    assert sum(shedder.serves("10.0.0.1") for _ in range(1000)) == 20


def test_many_hosts_share_one_budget() -> None:
    shedder = LoadShedder(ManualClock(), BUDGET)
    assert sum(shedder.serves(f"10.0.{host}.1") for host in range(256) for _ in range(10)) == 200


def test_a_host_far_beyond_its_budget_is_not_listened_to_for_a_while() -> None:
    clock = ManualClock()
    shedder = LoadShedder(clock, BUDGET)
    for _ in range(30):
        shedder.serves("10.0.0.1")
    assert shedder.listens("10.0.0.1")
    for _ in range(10_000):
        shedder.serves("10.0.0.1")
    assert not shedder.listens("10.0.0.1")
    assert shedder.listens("10.0.0.2")
    clock.advance(5)
    assert shedder.listens("10.0.0.1")


def test_a_host_with_a_token_is_listened_to() -> None:
    clock = ManualClock()
    shedder = LoadShedder(clock, BUDGET)
    shedder.authenticated("10.0.0.1")
    for _ in range(10_000):
        shedder.serves("10.0.0.1")
    assert shedder.listens("10.0.0.1")
    clock.advance(61)
    for _ in range(10_000):
        shedder.serves("10.0.0.1")
    assert not shedder.listens("10.0.0.1")


def test_a_machine_with_many_addresses_is_one_host() -> None:
    shedder = LoadShedder(ManualClock(), BUDGET)
    assert sum(shedder.serves(f"2001:db8::{n:x}") for n in range(1, 100)) == 20
    assert shedder.serves("2001:db8:0:1::1")
