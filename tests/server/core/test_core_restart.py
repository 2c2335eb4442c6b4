"""A server that is killed and started again goes on where its clients were."""

from __future__ import annotations

import pytest
from tests.server.core.driving import Driver, worker, workers

from dmesh_server.core import records
from dmesh_server.core.core import Core
from dmesh_server.core.effects import Attached, Done, KvRead, KvRevision, Record, Registered
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.events import Heartbeat
from dmesh_server.core.model import Limits, MemberState
from dmesh_server.core.records import RecordError


def test_members_keys_and_history_are_as_before() -> None:
    d = Driver(4)
    d.join(0, 1, 2)
    for key in ("a", "b", "a"):
        d.apply(d.set(key, key.encode()))
    d.apply(d.delete("b"))
    d.apply(d.report(2, "no"))
    before, keys = d.state(), d.accepted(d.list(), KvRead)
    d.restart()
    after = d.state()
    assert (after.name, after.incarnation, after.epoch, after.jobs, after.vacant) == (
        before.name,
        before.incarnation,
        before.epoch,
        before.jobs,
        before.vacant,
    )
    assert [(m.task, m.incarnation, m.process, m.devices, m.reason) for m in after.members] == [
        (m.task, m.incarnation, m.process, m.devices, m.reason) for m in before.members
    ]
    assert [m.state for m in after.members] == [MemberState.REGISTERED] * 2 + [MemberState.FAILED]
    d.join(0)
    assert d.accepted(d.list(), KvRead) == keys
    watch = d.watch("", 2)
    d.apply(watch)
    assert [push.revision for push in d.watched(watch.token)] == [2, 3, 4]
    assert d.accepted(d.set("c"), KvRevision) == KvRevision(5)


def test_members_have_a_lease_to_come_back() -> None:
    d = Driver()
    d.join(0, 1)
    d.now += 1000.0
    d.restart()
    d.advance(14.9)
    d.accepted(d.attach(0), Attached)
    d.advance(0.2)
    assert [d.state_of(0), d.state_of(1)] == [MemberState.CONNECTED, MemberState.LOST]
    assert d.member(1).reason == "it did not come back within 15.0 s of the server's restart"
    assert [member.task for member in d.notices(0)[0].departed] == [worker(1)]


def test_a_returning_member_registers_again_and_is_still_itself() -> None:
    d = Driver()
    d.join(0, 1)
    epoch = d.state().epoch
    d.restart()
    answer = d.accepted(d.register(0, request_id="again"), Registered)
    assert answer.epoch == epoch
    assert answer.peer_secret == bytes(32)
    assert d.refused(d.register(0, 999)).kind is ErrorKind.TASK_TAKEN


def test_a_half_arrived_barrier_completes_when_its_participants_present_themselves_again() -> None:
    d = Driver(3)
    d.join(0, 1, 2)
    for instance in range(2):
        for index in range(3):
            d.enter(index, instance=instance)
    d.enter(0, instance=2, timeout=5.0)
    d.enter(1, instance=2, timeout=5.0)
    d.restart()
    d.join(2, 1, 0)
    for index in (2, 0, 1):
        d.enter(index, instance=2, timeout=5.0)
    assert [d.results(index) for index in range(3)] == [[d.success("b", 2)]] * 3


@pytest.mark.parametrize("participants", [(), (0, 1)])
def test_a_result_that_only_some_were_told_is_told_the_others_after_a_restart(
    participants: tuple[int, ...],
) -> None:
    d = Driver(3 if participants else 2)
    d.join(0, 1)
    d.enter(0, participants=participants)
    d.enter(1, participants=participants)
    d.restart()
    d.join(0, 1)
    d.enter(0, "other", participants=participants)
    d.enter(1, participants=participants)
    assert d.results(1) == [d.success("b", 0)]
    d.enter(1, "other", participants=participants)
    assert d.results(0) == [d.success("other", 0)]


def test_a_failed_barrier_fails_alike_after_a_restart() -> None:
    d = Driver(3)
    d.join(0, 1)
    d.enter(0, timeout=1.0)
    d.advance(1.0)
    (failed,) = d.results(0)
    d.restart()
    d.join(0, 1)
    d.enter(1)
    (again,) = d.results(1)
    assert again.error is not None
    assert failed.error is not None
    assert (again.error.kind, again.error.message) == (failed.error.kind, failed.error.message)
    assert [member.task for member in again.error.members] == [worker(1), worker(2)]


def test_a_cluster_that_has_ended_stays_so() -> None:
    d = Driver()
    d.join(0)
    d.apply(d.leave(0))
    epoch = d.state().epoch
    d.restart()
    assert d.state_of(0) is MemberState.LEFT
    assert d.core.next_deadline() is None
    assert d.accepted(d.register(0, 999), Registered).epoch > epoch


def test_a_restarted_server_can_be_restarted() -> None:
    d = Driver()
    d.join(0, 1)
    for _ in range(3):
        d.apply(d.increment("n"))
        d.restart()
        d.join(0, 1)
        d.apply(Heartbeat(d.sessions[0], 1))
    assert d.accepted(d.increment("n"), type(d.answer(d.increment("m")))).value == 4  # type: ignore[attr-defined]


def test_the_oldest_barrier_is_forgotten_first_after_a_restart_too() -> None:
    d = Driver(1, Limits(max_barriers=2))
    d.join(0)
    for name in ("x", "y", "x"):
        d.enter(0, name, -1)
    d.restart()
    d.join(0)
    d.enter(0, "z")
    d.flush()
    assert {record.key for record in d.durable.values() if record.kind == "barrier"} == {"x", "z"}


def test_nothing_is_left_of_a_forgotten_life() -> None:
    d = Driver(2, Limits(max_clusters=1))
    d.join(0, 1)
    d.apply(d.set("a"))
    d.enter(0)
    d.enter(1)
    for index in (0, 1):
        d.accepted(d.leave(index), Done)
    other = d.register(0, 7, caller=d.caller(0).__class__("other", worker(0), 7))
    d.accepted(other, Registered)
    assert {record.cluster for record in d.durable.values()} == {"", "other"}
    d.restart()
    assert d.core.clusters() == ("other",)


@pytest.mark.parametrize("kind", ["cluster", "member", "key", "change", "barrier", "reply"])
@pytest.mark.parametrize("damage", [b"", b"\xff", b"{}", b"[1]", b"null", b'{"number":"x"}'])
def test_a_damaged_record_is_named(kind: str, damage: bytes) -> None:
    d = Driver(1)
    d.join(0)
    d.apply(d.set("a"))
    d.enter(0)
    d.flush()
    key = next(record.key for record in d.durable.values() if record.kind == kind)
    bad = Record("c", kind, key, damage)
    with pytest.raises(RecordError) as caught:
        Core(1, Limits()).restore(
            [*(r for r in d.durable.values() if (r.kind, r.key) != (kind, key)), bad], 0.0
        )
    assert f"the {kind} record {key!r} of cluster 'c' cannot be read" in str(caught.value)


def test_missing_and_unknown_records_are_noticed() -> None:
    d = Driver(1)
    d.join(0)
    for missing in d.durable.values():
        with pytest.raises(RecordError, match="missing"):
            Core(1, Limits()).restore([r for r in d.durable.values() if r is not missing], 0.0)
    with pytest.raises(RecordError, match="unknown kinds"):
        Core(1, Limits()).restore([*d.durable.values(), Record("c", "new", "", b"")], 0.0)
    stranger = Record("c", records.MEMBER, "worker/5", d.durable["c", "member", "worker/0"].value)
    with pytest.raises(RecordError):
        Core(1, Limits()).restore([*d.durable.values(), stranger], 0.0)
    assert workers(1) == d.jobs
