"""Invariants of a core between any two events; tests check them after each event."""

from __future__ import annotations

from dmesh_server.core.cluster import Cluster
from dmesh_server.core.core import Core
from dmesh_server.core.deadlines import (
    BarrierDue,
    Deadlines,
    LeaseDue,
    LivenessDue,
    StuckDue,
    WaitDue,
)
from dmesh_server.core.model import Liveness, MemberState
from dmesh_server.core.watches import BlockedRead


def check(core: Core) -> None:
    """Check everything. Takes time in proportion to the state's size.

    Raises:
        AssertionError: Something is wrong with the core itself.
    """
    shared, sessions, waiting = core._shared, set[int](), set[int]()
    for name, cluster in core._clusters.items():
        assert name == cluster.name
        assert cluster.ended == (name in core._ended), f"{name}: its end was not noted"
        _check_members(cluster, shared.deadlines, core.stopping)
        _check_barriers(cluster, shared.deadlines, core.stopping)
        _check_liveness(cluster, shared.deadlines, core.stopping)
        _check_keys(cluster, shared.deadlines)
        sessions |= cluster.roster.sessions.keys()
        waiting |= {*cluster.store.waiters.tokens(), *cluster.epoch_waits.tokens()}
        assert all(shared.sessions[session] is cluster for session in cluster.roster.sessions)
        assert all(shared.waiting[token] is cluster.store for token in cluster.store.waiters.tokens())
        assert all(shared.waiting[token] is cluster.epoch_waits for token in cluster.epoch_waits.tokens())
    assert sessions == shared.sessions.keys(), "a session belongs to no cluster"
    assert waiting == shared.waiting.keys(), "a token waits in no cluster"


def _check_members(cluster: Cluster, deadlines: Deadlines, stopping: bool) -> None:
    roster = cluster.roster
    assert roster.everyone == roster.slots.keys() | set(roster.vacant())
    assert not roster.slots.keys() & set(roster.vacant())
    assert {task for task, slot in roster.slots.items() if slot.state.departed} == roster.departed.keys()
    fallen = {task for task, slot in roster.departed.items() if slot.state is not MemberState.LEFT}
    assert fallen == roster.fallen.keys()
    assert list(roster.members()) == [
        roster.slots[task].snapshot()
        for task in sorted(roster.slots, key=lambda task: (task.job, task.index))
    ]
    assert cluster.epoch >= len(roster.slots) + len(roster.departed), "a change of membership had no epoch"
    for task, slot in roster.slots.items():
        label = f"{cluster.name} {task}"
        assert (slot.state is MemberState.CONNECTED) == (slot.session is not None), f"{label}: wrong state"
        if slot.session is not None:
            assert roster.sessions[slot.session] is slot, f"{label}: its session belongs to another"
        lease = slot.lease
        assert lease.ended == slot.state.departed, f"{label}: a member without a lease, or the reverse"
        assert not (lease.suspected and slot.session), f"{label}: suspected, but attached"
        if not stopping and not lease.ended:
            waits = slot.liveness is Liveness.BLOCKED and slot.session is not None
            assert (LeaseDue(lease.number) in deadlines) != waits, f"{label}: wrong deadline"
        assert slot.incarnation not in slot.former, f"{label}: its holder was declared gone before"
        assert not slot.former or cluster.rejoin, f"{label}: taken again"
        assert 0 < slot.epoch <= cluster.epoch, f"{label}: came in with no epoch"
        if slot.state.departed:
            assert slot.session is None, f"{label}: departed, but attached"
            assert not slot.tokens, f"{label}: departed, but waiting"
    assert len(roster.sessions) == sum(slot.session is not None for slot in roster.slots.values())


def _check_barriers(cluster: Cluster, deadlines: Deadlines, stopping: bool) -> None:
    barriers, roster = cluster.table, cluster.roster
    for name, current in barriers.under_way.items():
        label = f"{cluster.name} barrier {name!r}"
        assert current.participants <= roster.everyone, f"{label}: strangers take part"
        assert current.arrived.keys() < current.expected, f"{label}: all are there, but it goes on"
        assert current.arrived, f"{label}: nobody is there"
        assert current.blind <= current.arrived.keys(), f"{label}: somebody left no number, but is not there"
        if current.alive is not None:
            active = {task for task, slot in roster.slots.items() if not slot.state.departed}
            assert current.alive == current.participants & active, f"{label}: it waits for others"
        for gone in current.participants & roster.departed.keys() if current.alive is None else ():
            assert cluster.rejoin, f"{label}: it waits for the departed"
            assert gone in roster.fallen, f"{label}: it waits for one that has left"
            assert gone not in current.arrived, f"{label}: the departed is there"
        if not stopping:
            due = BarrierDue(cluster.name, name) in deadlines
            assert due == (current.timeout is not None), f"{label}: wrong deadline"
            assert due == (current.deadline is not None), f"{label}: wrong deadline"
        last = barriers.finished.get(name)
        restored = barriers.restored_at is not None
        assert last is None or last.number < current.number, f"{label}: it is over already"
        assert last is None or last.number + 1 == current.number or restored, f"{label}: one was left out"
    assert len(barriers.finished) <= cluster.limits.max_barriers
    assert len(barriers.under_way) <= cluster.limits.max_barriers
    assert all(finished.epoch <= cluster.epoch for finished in barriers.finished.values())


def _check_liveness(cluster: Cluster, deadlines: Deadlines, stopping: bool) -> None:
    watchdog, roster = cluster.watchdog, cluster.roster
    for task, slot in roster.slots.items():
        label = f"{cluster.name} {task}"
        live = slot.liveness is Liveness.LIVE
        assert live == (not slot.complaint), f"{label}: trouble without a reason, or the reverse"
        assert (slot.activity is not None) == (slot.liveness is Liveness.STUCK), f"{label}: wrong activity"
        assert live or not slot.state.departed, f"{label}: departed, but blocked or stuck"
        assert live or task in watchdog._reported or task in watchdog._changed, (
            f"{label}: no session will be notified"
        )
        assert not live or task not in watchdog._reported or task in watchdog._changed, f"{label}: likewise"
        if slot.liveness is Liveness.STUCK:
            query = watchdog._queries[task]
            assert watchdog._is_waited_for(task, query), f"{label}: stuck, but nobody waits for it"
    waits = {(task, waiter) for waiter, wait in watchdog._waits.items() for task in wait.tasks}
    assert waits == {(task, waiter) for task, all_ in watchdog._waiters.items() for waiter in all_}
    if not stopping:
        assert all(roster.slots[waiter].session is not None for waiter in watchdog._waits)
        waiting = bool(cluster.table.under_way or watchdog._waits)
        armed = StuckDue(cluster.name) in deadlines
        assert armed or not waiting or watchdog._stuck_after == float("inf"), "nobody looks who is stuck"
        assert armed == (watchdog.looks_at != float("inf"))
        assert LivenessDue(cluster.name) in deadlines or not watchdog._changed, "changes stay unreported"


def _check_keys(cluster: Cluster, deadlines: Deadlines) -> None:
    store = cluster.store
    entries = list(store.keys.with_prefix(""))
    assert [kv.key for kv in entries] == sorted(kv.key for kv in entries) == store.keys.keys()
    assert len(entries) == len(store.keys)
    assert store.keys.size == sum(len(kv.key.encode()) + len(kv.value) for kv in entries)
    assert all(1 <= kv.create_revision <= kv.mod_revision <= store.revision for kv in entries)
    attached = {kv.key: kv.lease for kv in entries if kv.lease}
    leases = store.leases.items()
    assert attached == {key: number for number, keys in leases.items() for key in keys}, "wrong attachments"
    kept = store.history.revisions()
    assert kept == list(range(store.revision - len(kept) + 1, store.revision + 1)), "the history has gaps"
    if cluster.ended:
        assert store.revision == 0, "an ended generation has keys"
        assert not store.waiters.tokens(), "somebody waits in an ended generation"
    for token in store.waiters.tokens():
        waiter = store.waiters.of(token)
        if isinstance(waiter, BlockedRead):
            assert store.keys.get(waiter.key) is None, "somebody waits for a key that exists"
            assert (WaitDue(token) in deadlines) == (waiter.timeout is not None)
