"""Leases by themselves: renewal, suspicion, stalls, and what is attached to them."""

from __future__ import annotations

import pytest

from dmesh_server.core.deadlines import Deadlines, LeaseDue
from dmesh_server.core.lease import Lease, Leases
from dmesh_server.core.model import Limits
from dmesh_server.core.transaction import Transaction

TTL = 15.0


class Item:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def lease_ended(self, lease: Lease, transaction: Transaction) -> None:
        self.log.append(f"{self.name} of {lease.owner} at {transaction.now:g}")


class Clock:
    """Leases, a clock, and the deadlines that come due when it moves."""

    def __init__(self, **limits: float) -> None:
        self.deadlines = Deadlines()
        self.leases = Leases(Limits(**limits), self.deadlines)  # type: ignore[arg-type]
        self.now = 100.0
        self.log: list[str] = []

    def grant(self, owner: str = "a", ttl: float = TTL) -> Lease:
        lease = self.leases.grant(owner, ttl, self.now)
        lease.attach(Item(self.log, "item"))
        return lease

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while (when := self.deadlines.next()) is not None and when <= end:
            self.now = max(self.now, when)
            due = self.deadlines.pop(self.now)
            assert isinstance(due, LeaseDue)
            self.leases.due(due.lease, Transaction(self.now))
        self.now = end


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_silence_for_its_time_to_live_ends_a_lease_and_its_items_are_told(clock: Clock) -> None:
    lease = clock.grant()
    lease.attach(Item(clock.log, "another"))
    clock.advance(14.9)
    assert not clock.log
    clock.advance(0.2)
    assert clock.log == ["item of a at 115", "another of a at 115"]
    assert lease.ended
    assert clock.leases.find(lease.number) is None
    assert clock.deadlines.next() is None
    with pytest.raises(ValueError, match="over"):
        lease.attach(Item(clock.log, "late"))


def test_every_renewal_counts(clock: Clock) -> None:
    lease = clock.grant()
    for _ in range(20):
        clock.advance(14.0)
        clock.leases.renew(lease, clock.now)
    assert not lease.ended
    clock.advance(15.0)
    assert lease.ended


def test_a_detached_item_is_not_told_and_a_dropped_lease_tells_nobody(clock: Clock) -> None:
    lease, other = clock.grant(), clock.leases.grant("b", TTL, clock.now)
    item = Item(clock.log, "item")
    other.attach(item)
    other.detach(item)
    other.detach(item)
    clock.leases.drop(lease)
    clock.advance(100.0)
    assert clock.log == []
    assert len(clock.leases) == 0


def test_revoking_tells_the_items_once(clock: Clock) -> None:
    lease = clock.grant()
    for _ in range(2):
        clock.leases.revoke(lease, Transaction(clock.now))
    assert clock.log == ["item of a at 100"]


def test_a_closed_connection_brings_the_deadline_closer(clock: Clock) -> None:
    lease = clock.grant()
    clock.leases.suspect(lease, clock.now)
    assert clock.leases.remaining(lease, clock.now) == pytest.approx(5.005)
    clock.advance(4.9)
    assert not lease.ended
    clock.advance(0.2)
    assert lease.ended


def test_an_owner_that_is_back_has_lost_nothing(clock: Clock) -> None:
    lease = clock.grant()
    for _ in range(10):
        clock.leases.suspect(lease, clock.now)
        clock.advance(4.9)
        clock.leases.clear(lease, clock.now)
        assert clock.leases.remaining(lease, clock.now) == TTL
        clock.advance(1.0)
    clock.advance(13.9)
    assert not lease.ended


def test_a_sign_of_life_starts_the_suspicion_anew(clock: Clock) -> None:
    lease = clock.grant()
    clock.leases.suspect(lease, clock.now)
    for _ in range(10):
        clock.advance(4.0)
        clock.leases.renew(lease, clock.now)
    assert lease.suspected
    clock.advance(5.1)
    assert lease.ended


def test_suspicion_never_lasts_longer_than_the_lease(clock: Clock) -> None:
    short = clock.grant(ttl=2.0)
    clock.leases.suspect(short, clock.now)
    assert clock.leases.remaining(short, clock.now) == 2.0
    silent = clock.grant("b")
    clock.advance(12.0)
    clock.leases.suspect(silent, clock.now)
    assert clock.leases.remaining(silent, clock.now) == pytest.approx(3.0)


def test_there_is_always_time_to_connect_again(clock: Clock) -> None:
    lease = clock.grant()
    clock.advance(14.9)
    clock.leases.suspect(lease, clock.now)
    assert clock.leases.remaining(lease, clock.now) == pytest.approx(1.0)


def test_many_that_are_suspected_together_have_more_time() -> None:
    clock = Clock()
    leases = [clock.grant(str(number), ttl=50.0) for number in range(5_000)]
    for lease in leases:
        clock.leases.suspect(lease, clock.now)
    clock.advance(29.9)
    assert not any(lease.ended for lease in leases), "the first one counts the last one, too"
    for lease in leases[1:]:
        clock.leases.clear(lease, clock.now)
    clock.advance(0.2)
    assert [lease.ended for lease in leases[:2]] == [True, False]
    clock.leases.suspect(leases[1], clock.now)
    assert clock.leases.remaining(leases[1], clock.now) == pytest.approx(5.005), "the storm is over"


def test_whose_process_exists_has_the_whole_lease(clock: Clock) -> None:
    lease = clock.grant()
    clock.advance(3.0)
    clock.leases.suspect(lease, clock.now)
    clock.leases.vouch(lease)
    clock.advance(11.9)
    assert not lease.ended
    clock.advance(0.2)
    assert lease.ended


def test_a_stall_of_the_server_extends_every_lease_and_a_moment_more(clock: Clock) -> None:
    lease, suspect = clock.grant(), clock.grant("b")
    clock.leases.suspect(suspect, clock.now)
    clock.advance(4.9)
    clock.now += 3.0
    clock.leases.note_stall(3.0)
    clock.advance(1.0)
    assert not suspect.ended
    assert clock.leases.remaining(lease, clock.now) == pytest.approx(15.0 - 5.9 + 1.0)
    clock.advance(0.2)
    assert suspect.ended
    clock.advance(20.0)
    assert lease.ended


def test_a_sign_of_life_right_after_a_stall_brings_no_end_forward(clock: Clock) -> None:
    lease, suspect = clock.grant(), clock.grant("b")
    clock.leases.suspect(suspect, clock.now)
    clock.now += 3.0
    clock.leases.note_stall(3.0)
    before = [clock.leases.remaining(one, clock.now) for one in (lease, suspect)]
    for one in (lease, suspect):
        clock.leases.renew(one, clock.now)
    assert [clock.leases.remaining(one, clock.now) for one in (lease, suspect)] >= before


def test_who_judges_may_leave_a_lease_without_a_deadline_until_it_is_renewed(clock: Clock) -> None:
    judged: list[float] = []
    lease = clock.leases.grant("a", TTL, clock.now, lambda transaction: judged.append(transaction.now))
    clock.advance(100.0)
    assert judged == [115.0]
    assert not lease.ended
    assert clock.deadlines.next() is None
    clock.leases.renew(lease, clock.now)
    clock.advance(16.0)
    assert judged == [115.0, 215.0]
    clock.leases.suspect(lease, clock.now)
    clock.advance(16.0)
    assert len(judged) == 3
