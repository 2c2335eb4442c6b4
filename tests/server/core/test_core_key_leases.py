"""Keys that end with a lease: one that was granted, or a member's own. Time is the driver's."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.server.core.driving import OBSERVER, Driver

from dmesh_server.core.effects import KvDeleted, KvRead, KvRevision, LeaseGranted
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.events import GrantLease, KvSet, RenewLease, RevokeLease
from dmesh_server.core.model import Caller

LEASE = 0xABCDEF


def joined(tasks: int = 2) -> Driver:
    d = Driver(tasks)
    d.join(*range(tasks))
    return d


def grant(d: Driver, ttl: float = 5.0, number: int = LEASE, caller: Caller = OBSERVER) -> GrantLease:
    return GrantLease(d.token(), caller, d.request_id(), number, ttl)


def put(d: Driver, key: str, lease: int = LEASE, value: bytes = b"v", index: int = 0) -> KvSet:
    return KvSet(d.token(), d.caller(index), d.request_id(), key, value, True, lease)


def keys(d: Driver) -> list[str]:
    return [kv.key for kv in d.accepted(d.list(), KvRead).kvs]


def test_keys_end_with_a_lease_that_is_not_renewed() -> None:
    d = joined()
    d.accepted(grant(d), LeaseGranted)
    d.apply(d.set("stays"))
    for key in ("b", "a"):
        d.accepted(put(d, key), KvRevision)
    watch = d.watch("")
    d.apply(watch)
    d.beat(4.0, 0, 1)
    assert keys(d) == ["a", "b", "stays"]
    effects = d.beat(2.0, 0, 1)
    (push,) = [e for e in effects if getattr(e, "events", None)]
    assert [(event.kv.key, event.deleted) for event in push.events] == [("a", True), ("b", True)]
    assert keys(d) == ["stays"]
    assert d.refused(RenewLease(d.token(), OBSERVER, LEASE)).kind is ErrorKind.LEASE_NOT_FOUND
    assert d.refused(put(d, "c")).kind is ErrorKind.LEASE_NOT_FOUND


def test_a_renewed_lease_goes_on() -> None:
    d = joined()
    d.accepted(grant(d), LeaseGranted)
    d.apply(put(d, "a"))
    for _ in range(5):
        d.beat(4.0, 0, 1)
        assert d.accepted(RenewLease(d.token(), OBSERVER, LEASE), LeaseGranted).ttl == 5.0
    assert keys(d) == ["a"]


def test_revoking_ends_the_keys_once() -> None:
    d = joined()
    d.accepted(grant(d), LeaseGranted)
    d.apply(put(d, "a"))
    d.apply(put(d, "b"))
    revoke = RevokeLease(d.token(), OBSERVER, "r", LEASE)
    assert d.accepted(revoke, KvDeleted) == KvDeleted(2, 3)
    assert d.accepted(revoke, KvDeleted).deleted == 0
    assert keys(d) == []


def test_a_key_leaves_its_lease() -> None:
    d = joined()
    d.accepted(grant(d), LeaseGranted)
    for key in ("set", "deleted", "counted", "moved"):
        d.apply(put(d, key, value=b"1"))
    d.apply(d.set("set"))
    d.apply(d.delete("deleted"))
    d.apply(d.set("deleted"))
    d.apply(d.increment("counted"))
    d.apply(put(d, "moved", d.caller(1).incarnation))
    d.beat(6.0, 0, 1)
    assert keys(d) == ["deleted", "moved", "set"], "an increment leaves a key where it is"


@pytest.mark.parametrize("how", ["leave", "report", "lose"])
def test_ephemeral_keys_end_with_their_member(how: str) -> None:
    d = joined()
    for index, key in ((0, "a"), (1, "b"), (1, "c")):
        d.apply(put(d, key, d.caller(index).incarnation, index=index))
    d.close(1)
    d.apply(d.attach(1))
    assert keys(d) == ["a", "b", "c"], "a connection that breaks is no departure"
    if how == "lose":
        d.lose(1)
    else:
        d.apply(d.leave(1) if how == "leave" else d.report(1))
    assert keys(d) == ["a"]
    assert d.refused(put(d, "d", d.caller(1).incarnation)).kind is ErrorKind.LEASE_NOT_FOUND


def test_leases_and_keys_survive_a_restart() -> None:
    d = joined()
    d.accepted(grant(d), LeaseGranted)
    d.apply(put(d, "granted"))
    d.apply(put(d, "member", d.caller(1).incarnation))
    d.beat(4.0, 0, 1)
    d.restart()
    for index in (0, 1):
        d.apply(d.attach(index))
    assert [kv.lease for kv in d.accepted(d.list(), KvRead).kvs] == [LEASE, d.caller(1).incarnation]
    d.beat(4.0, 0, 1)
    assert keys(d) == ["granted", "member"], "the time begins anew"
    d.beat(2.0, 0, 1)
    d.apply(d.leave(1))
    assert keys(d) == []
    d.restart()
    assert keys(d) == []
    assert not [record for record in d.durable.values() if record.kind in ("lease", "attachment")]


def test_nothing_is_left_of_a_cluster_that_has_ended() -> None:
    d = joined()
    d.accepted(grant(d), LeaseGranted)
    d.apply(put(d, "granted"))
    d.apply(put(d, "member", d.caller(1).incarnation))
    d.apply(d.leave(0))
    d.apply(d.leave(1))
    assert not [record for record in d.durable.values() if record.kind in ("lease", "attachment", "key")]
    assert d.core.next_deadline() is None or d.advance(100.0) is not None
    assert d.refused(grant(d)).kind is ErrorKind.CLUSTER_ENDING


def test_granting_is_idempotent_and_bounded() -> None:
    d = joined()
    assert d.accepted(grant(d, 5.0), LeaseGranted).ttl == 5.0
    assert d.accepted(grant(d, 7.0), LeaseGranted).ttl == 5.0
    for ttl in (0.0, -1.0, 0.01, 1e9, float("nan")):
        assert d.refused(grant(d, ttl, 7)).kind is ErrorKind.INVALID_ARGUMENT
    assert d.refused(grant(d, 5.0, 0)).kind is ErrorKind.INVALID_ARGUMENT
    assert d.refused(grant(d, 5.0, d.caller(0).incarnation)).kind is ErrorKind.INVALID_ARGUMENT
    member = RevokeLease(d.token(), OBSERVER, "r", d.caller(0).incarnation)
    assert d.accepted(member, KvDeleted).deleted == 0, "it has no keys"
    d.apply(put(d, "a", d.caller(0).incarnation))
    assert d.refused(member).kind is ErrorKind.INVALID_ARGUMENT


class KeysOfLeases(RuleBasedStateMachine):
    """Keys, leases and members at random, against when each key must be gone."""

    @initialize()
    def start(self) -> None:
        self.d = joined(3)
        self.alive = {0, 1, 2}
        self.granted: dict[int, float] = {}
        """When each lease ends."""
        self.keys: dict[str, int] = {}

    def beat(self, seconds: float) -> None:
        self.d.beat(seconds, *sorted(self.alive))
        for lease in [lease for lease, end in self.granted.items() if end <= self.d.now]:
            self.end(lease)

    def end(self, lease: int) -> None:
        self.granted.pop(lease, None)
        self.keys = {key: one for key, one in self.keys.items() if one != lease}

    def exists(self, lease: int) -> bool:
        return lease in (0, *self.granted) or lease - 1000 in self.alive

    @rule(lease=st.integers(1, 3), ttl=st.sampled_from([2.0, 5.0, 9.0]))
    def grant(self, lease: int, ttl: float) -> None:
        got = self.d.accepted(grant(self.d, ttl, lease), LeaseGranted).ttl
        assert got == ttl or lease in self.granted
        self.granted[lease] = self.d.now + got

    @rule(lease=st.integers(1, 3))
    def renew(self, lease: int) -> None:
        event = RenewLease(self.d.token(), OBSERVER, lease)
        if lease in self.granted:
            self.granted[lease] = self.d.now + self.d.accepted(event, LeaseGranted).ttl
        else:
            assert self.d.refused(event).kind is ErrorKind.LEASE_NOT_FOUND

    @rule(lease=st.integers(1, 3))
    def revoke(self, lease: int) -> None:
        event = RevokeLease(self.d.token(), OBSERVER, self.d.request_id(), lease)
        deleted = list(self.keys.values()).count(lease)
        assert self.d.accepted(event, KvDeleted).deleted == deleted
        self.end(lease)

    @rule(key=st.sampled_from("abcdef"), lease=st.sampled_from([0, 1, 2, 3, 1000, 1001, 1002]))
    def put(self, key: str, lease: int) -> None:
        event = KvSet(self.d.token(), OBSERVER, self.d.request_id(), key, b"v", True, lease)
        if self.exists(lease):
            self.d.accepted(event, KvRevision)
            self.keys[key] = lease
        else:
            assert self.d.refused(event).kind is ErrorKind.LEASE_NOT_FOUND

    @rule(key=st.sampled_from("abcdef"))
    def delete(self, key: str) -> None:
        self.d.apply(self.d.delete(key)) if 0 in self.alive else None
        if 0 in self.alive:
            self.keys.pop(key, None)

    @precondition(lambda self: len(self.alive) > 1)
    @rule(index=st.integers(1, 2))
    def leave(self, index: int) -> None:
        if index in self.alive:
            self.d.apply(self.d.leave(index))
            self.alive.discard(index)
            self.end(1000 + index)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.beat(seconds)

    @rule()
    def restart(self) -> None:
        self.d.restart()
        ttls = {
            lease: self.d.core._clusters["c"].store.leases.remaining(lease, self.d.now)
            for lease in self.granted
        }
        for lease, ttl in ttls.items():
            assert ttl is not None
            self.granted[lease] = self.d.now + ttl
        for index in sorted(self.alive):
            self.d.apply(self.d.attach(index))

    @invariant()
    def the_keys_are_the_models(self) -> None:
        read = self.d.accepted(self.d.list(), KvRead).kvs
        assert {kv.key: kv.lease for kv in read} == self.keys


TestKeysOfLeases = KeysOfLeases.TestCase
TestKeysOfLeases.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
