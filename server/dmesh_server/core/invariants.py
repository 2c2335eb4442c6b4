"""What is true of a core between any two events. Tests check it after each; so can whoever hunts a bug."""

from __future__ import annotations

from dmesh_server.core.cluster import Cluster
from dmesh_server.core.core import Core
from dmesh_server.core.deadlines import BarrierDue, Deadlines, GraceDue, LeaseDue, WaitDue
from dmesh_server.core.model import MemberState
from dmesh_server.core.watches import BlockedRead


def check(core: Core) -> None:
    """Checks everything. Takes time in proportion to the state's size.

    Raises:
        AssertionError: Something is wrong with the core itself.
    """
    shared, sessions, waiting = core._shared, set[int](), set[int]()
    for name, cluster in core._clusters.items():
        assert name == cluster.name
        assert cluster.ended == (name in core._ended), f"{name}: its end was not noted"
        _check_members(cluster, shared.deadlines, core.stopping)
        _check_barriers(cluster, shared.deadlines, core.stopping)
        _check_keys(cluster, shared.deadlines)
        sessions |= cluster.roster.sessions.keys()
        waiting |= set(cluster.store.waiters.tokens())
        assert all(shared.sessions[session] is cluster for session in cluster.roster.sessions)
        assert all(shared.waiting[token] is cluster.store for token in cluster.store.waiters.tokens())
    assert sessions == shared.sessions.keys(), "a session belongs to no cluster"
    assert waiting == shared.waiting.keys(), "a token waits in no cluster"


def _check_members(cluster: Cluster, deadlines: Deadlines, stopping: bool) -> None:
    roster = cluster.roster
    assert roster.everyone == roster.seats.keys() | set(roster.vacant())
    assert not roster.seats.keys() & set(roster.vacant())
    assert {task for task, seat in roster.seats.items() if seat.state.departed} == roster.departed.keys()
    assert cluster.epoch >= len(roster.seats) + len(roster.departed), "a change of membership had no epoch"
    for task, seat in roster.seats.items():
        label = f"{cluster.name} {task}"
        assert (seat.state is MemberState.CONNECTED) == (seat.session is not None), f"{label}: wrong state"
        if seat.session is not None:
            assert roster.sessions[seat.session] is seat, f"{label}: its session belongs to another"
        grace, lease = GraceDue(cluster.name, task) in deadlines, LeaseDue(cluster.name, task) in deadlines
        if not stopping:
            assert grace == (seat.closed_at is not None), f"{label}: grace without a broken session, or none"
            assert lease == (not seat.state.departed), f"{label}: a member without a lease, or the reverse"
        if seat.state.departed:
            assert seat.session is None, f"{label}: departed, but attached"
            assert not seat.tokens, f"{label}: departed, but waiting"
    assert len(roster.sessions) == sum(seat.session is not None for seat in roster.seats.values())


def _check_barriers(cluster: Cluster, deadlines: Deadlines, stopping: bool) -> None:
    barriers, roster = cluster.barriers, cluster.roster
    for name, current in barriers.under_way.items():
        label = f"{cluster.name} barrier {name!r}"
        assert current.participants <= roster.everyone, f"{label}: strangers take part"
        assert current.arrived.keys() < current.participants, f"{label}: all are there, but it goes on"
        assert not current.participants & roster.departed.keys(), f"{label}: it waits for the departed"
        if not stopping:
            due = BarrierDue(cluster.name, name) in deadlines
            assert due == (current.timeout is not None), f"{label}: wrong deadline"
        last = barriers.finished.get(name)
        assert last is None or last.number + 1 == current.number, f"{label}: an instance was left out"
    assert len(barriers.finished) <= cluster.limits.max_barriers
    assert len(barriers.under_way) <= cluster.limits.max_barriers


def _check_keys(cluster: Cluster, deadlines: Deadlines) -> None:
    store = cluster.store
    entries = list(store.keys.with_prefix(""))
    assert [kv.key for kv in entries] == sorted(kv.key for kv in entries) == store.keys.keys()
    assert len(entries) == len(store.keys)
    assert store.keys.size == sum(len(kv.key.encode()) + len(kv.value) for kv in entries)
    assert all(1 <= kv.create_revision <= kv.mod_revision <= store.revision for kv in entries)
    kept = store.history.revisions()
    assert kept == list(range(store.revision - len(kept) + 1, store.revision + 1)), "the history has gaps"
    if cluster.ended:
        assert store.revision == 0, "an ended life has keys"
        assert not store.waiters.tokens(), "somebody waits in an ended life"
    for token in store.waiters.tokens():
        waiter = store.waiters.of(token)
        if isinstance(waiter, BlockedRead):
            assert store.keys.get(waiter.key) is None, "somebody waits for a key that exists"
            assert (WaitDue(token) in deadlines) == (waiter.timeout is not None)
