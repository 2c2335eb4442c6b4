"""Who may take a task slot, and how a generation of a cluster begins and ends."""

from __future__ import annotations

import pytest
from tests.server.core.driving import OBSERVER, Driver, worker, workers

from dmesh_server.core.effects import Done, KvDeleted, KvIncremented, KvRead, KvRevision, Registered
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.events import (
    Attach,
    GetClusterState,
    KvDelete,
    KvIncrement,
    KvSet,
    Leave,
    ReportError,
)
from dmesh_server.core.model import (
    Caller,
    ClusterState,
    Device,
    Job,
    KeyValue,
    Limits,
    MemberState,
    Process,
)


def test_the_first_registration_forms_the_cluster_and_the_others_join_it() -> None:
    d = Driver(3)
    first = d.accepted(d.register(0, fresh_incarnation=7, fresh_secret=b"s" * 32), Registered)
    second = d.accepted(d.register(2, fresh_incarnation=8, fresh_secret=b"t" * 32), Registered)
    assert (first.cluster_incarnation, first.peer_secret) == (7, b"s" * 32)
    assert (second.cluster_incarnation, second.peer_secret) == (7, b"s" * 32)
    assert second.epoch > first.epoch
    state = d.state()
    assert [member.task for member in state.members] == [worker(0), worker(2)]
    assert state.vacant == (worker(1),)
    assert d.member(0).process.host == "host0"
    assert d.member(0).state is MemberState.REGISTERED


def test_registering_again_with_the_same_incarnation_changes_nothing() -> None:
    d = Driver()
    first = d.accepted(d.register(0), Registered)
    again = d.accepted(d.register(0, request_id="another"), Registered)
    assert first == again
    assert not [record for record in d.effects if "Persist" in type(record).__name__]


def test_a_task_slot_that_is_held_is_refused_with_the_holders_name() -> None:
    d = Driver()
    d.join(0)
    d.advance(2.0)
    error = d.refused(d.register(0, 999))
    assert error.kind is ErrorKind.TASK_TAKEN
    assert (
        "/job:worker/task:0 (host host0, pid 70, last seen 2.0 s ago), registered 2.0 s ago" in error.message
    )
    assert error.fields == ("caller.task.index",)
    assert [member.incarnation for member in error.members] == [1000]


def test_the_task_slot_of_a_departed_member_is_barred_while_others_are_there() -> None:
    d = Driver(3)
    d.join(0, 1)
    d.lose(0)
    error = d.refused(d.register(0, 999))
    assert error.kind is ErrorKind.CLUSTER_ENDING
    assert "host0, pid 70) was lost: its connection closed without a goodbye" in error.message
    assert "/job:worker/task:1 (host host1, pid 71" in error.message
    assert [member.task for member in error.members] == [worker(1)]
    # Nor can the cluster be joined by anybody else, for it cannot go on.
    error = d.refused(d.register(2))
    assert error.kind is ErrorKind.CLUSTER_ENDING
    assert "its restart policy is fail-fast" in error.message
    assert "host0, pid 70) was lost: its connection closed without a goodbye" in error.message
    assert [member.task for member in error.members] == [worker(0)]


def test_a_goodbye_does_not_keep_others_from_coming() -> None:
    d = Driver(3)
    d.join(0, 1)
    d.apply(d.leave(0))
    d.accepted(d.register(2), Registered)


def test_a_new_life_begins_when_all_have_departed() -> None:
    d = Driver()
    d.join(0, 1)
    d.apply(d.set("key"))
    for index in (0, 1):
        d.enter(index)
    old = d.state()
    d.accepted(d.leave(0), Done)
    d.lose(1)
    ended = d.state()
    assert [member.state for member in ended.members] == [MemberState.LEFT, MemberState.LOST]
    assert not [record for record in d.durable.values() if record.kind in ("key", "change", "barrier")]

    new = d.accepted(d.register(0, 999, fresh_incarnation=8, fresh_secret=b"t" * 32), Registered)
    assert (new.cluster_incarnation, new.peer_secret) == (8, b"t" * 32)
    assert new.epoch > ended.epoch > old.epoch
    assert d.state().vacant == (worker(1),)
    keys = d.accepted(d.list().__class__(d.token(), OBSERVER, "", False), KvRead)
    assert (keys.kvs, keys.revision) == ((), 0)
    d.apply(d.attach(0, 999))
    d.apply(d.register(1, 998))
    d.apply(d.attach(1, 998))
    d.enter(0)
    assert not d.effects, "the barrier of the earlier life is forgotten"
    d.enter(1)
    assert [result.instance for result in d.results(0)] == [0]
    assert {record.key for record in d.durable.values() if record.kind == "member"} == {
        "worker/0",
        "worker/1",
    }


def test_a_new_life_may_have_other_jobs() -> None:
    d = Driver(3)
    d.join(0, 2)
    d.apply(d.leave(0))
    d.apply(d.leave(2))
    d.jobs = workers(1)
    d.accepted(d.register(0, 999), Registered)
    assert d.state().jobs == workers(1)
    assert [record.key for record in d.durable.values() if record.kind == "member"] == ["worker/0"]


def test_a_departed_process_cannot_come_back_but_its_retried_registration_is_answered() -> None:
    d = Driver()
    d.join(0, 1)
    d.lose(0)
    assert d.refused(d.register(0, request_id="new")).kind is ErrorKind.FENCED
    d.accepted(d.register(0), Registered)
    assert d.refused(d.attach(0)).kind is ErrorKind.FENCED
    d.apply(d.leave(1))
    error = d.refused(d.register(0, request_id="new"))
    assert error.kind is ErrorKind.FENCED, "not even after the life's end"
    assert "was lost: its connection closed without a goodbye" in error.message


def test_a_differing_job_list_is_refused_with_the_differences() -> None:
    d = Driver(3)
    d.join(0)
    error = d.refused(d.register(1, jobs=(Job("worker", ("host0:70", "other:71")), Job("ps", ("p:1",)))))
    assert error.kind is ErrorKind.SPEC_MISMATCH
    assert "/job:worker/task:1 (host host1, pid 71)" in error.message
    assert "formed by /job:worker/task:0 (host host0, pid 70)" in error.message
    assert "job 'ps' is not in the cluster's list" in error.message
    assert "job 'worker' has 2 tasks in the client's list and 3 in the cluster's" in error.message
    assert (
        "task 1 of job 'worker' is 'other:71' in the client's list and 'host1:70' in the cluster's"
        in error.message
    )
    assert error.fields == ("jobs",)
    assert d.state().vacant == (worker(1), worker(2))


def test_a_differing_job_list_is_the_first_thing_said_about_a_task_slot_in_use() -> None:
    d = Driver(2)
    d.join(0)
    assert d.refused(d.register(0, 999, jobs=workers(5))).kind is ErrorKind.SPEC_MISMATCH


def test_the_order_of_jobs_does_not_matter() -> None:
    d = Driver()
    d.jobs = (Job("a", ("x:1",)), Job("worker", ("y:1", "z:1")))
    d.accepted(d.register(0), Registered)
    d.accepted(d.register(1, jobs=d.jobs[::-1]), Registered)


def test_a_task_outside_the_job_list_is_refused() -> None:
    d = Driver(2)
    error = d.refused(d.register(2))
    assert error.kind is ErrorKind.UNKNOWN_TASK
    assert "/job:worker/task:2" in error.message
    assert "/job:worker/task:0-1" in error.message
    assert error.fields == ("caller.task.job", "caller.task.index")
    assert d.refused(d.register(0, caller=Caller("c", worker(-2), 5))).kind is ErrorKind.UNKNOWN_TASK
    assert d.core.clusters() == (), "a refused registration forms no cluster"
    d.join(0)
    assert d.refused(d.register(2)).kind is ErrorKind.UNKNOWN_TASK


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"caller": Caller("", worker(0), 1)}, "cluster name ''"),
        ({"caller": Caller("a/b", worker(0), 1)}, "cluster name 'a/b'"),
        ({"caller": Caller("x" * 129, worker(0), 1)}, "(129 characters)"),
        ({"caller": Caller("c\n", worker(0), 1)}, "cluster name 'c\\n'"),
        ({"caller": Caller("c")}, "observer"),
        ({"caller": Caller("c", worker(0), 0)}, "incarnation 0"),
        ({"request_id": ""}, "request id"),
        ({"request_id": "x" * 65}, "request id"),
        ({"jobs": (Job("", ("a:1",)), *workers(1))}, "job name ''"),
        ({"jobs": (Job("work er", ("a:1",)), *workers(1))}, "job name 'work er'"),
        ({"jobs": workers(1) * 2}, "listed twice"),
        ({"jobs": (*workers(1), Job("ps", ()))}, "no tasks"),
        ({"jobs": (Job("worker", ("x" * 2000,)),)}, "2000 characters"),
        ({"process": Process(host="x" * 2000)}, "(2000 characters)"),
        ({"process": Process(pid=-1)}, "process id -1"),
        ({"devices": (Device("FPGA", 0),)}, "device type 'FPGA' must be one of CPU, GPU, TPU"),
        ({"devices": (Device("CPU", -1),)}, "index -1"),
        ({"devices": (Device("CPU", 0), Device("CPU", 0))}, "CPU:0 is listed twice"),
        ({"peer_addresses": ("",)}, "peer address ''"),
        ({"peer_addresses": ("a:1",) * 65}, "65 peer addresses"),
    ],
)
def test_malformed_registrations_are_refused_and_leave_no_trace(
    changes: dict[str, object], said: str
) -> None:
    d = Driver(1)
    error = d.refused(d.register(0, **changes))
    assert error.kind is ErrorKind.INVALID_ARGUMENT
    assert said in error.message
    assert "\n" not in error.message
    assert d.core.clusters() == ()
    assert not d.durable


def test_a_registration_without_jobs_is_refused() -> None:
    assert Driver().refused(Driver().register(0, jobs=())).kind is ErrorKind.UNKNOWN_TASK


def test_the_numbers_of_tasks_and_clusters_are_limited() -> None:
    d = Driver(3, Limits(max_tasks=2))
    error = d.refused(d.register(0))
    assert (error.kind, "3 tasks" in error.message) == (ErrorKind.LIMIT_EXCEEDED, True)

    d = Driver(1, Limits(max_clusters=2))

    def caller(name: str) -> Caller:
        return Caller(name, worker(0), 5)

    d.accepted(d.register(0, caller=caller("a")), Registered)
    d.accepted(d.register(0, caller=caller("b")), Registered)
    assert d.refused(d.register(0, caller=caller("c"))).kind is ErrorKind.LIMIT_EXCEEDED
    leave = d.leave(0)
    d.accepted(type(leave)(d.token(), caller("a"), "r", ""), Done)
    old_epoch = d.accepted(GetClusterState(d.token(), Caller("a")), ClusterState).epoch
    d.accepted(d.register(0, caller=caller("c")), Registered)
    assert d.core.clusters() == ("b", "c"), "the one that ended made room"
    assert {record.cluster for record in d.durable.values()} == {"", "b", "c"}
    d.restart()
    d.accepted(type(leave)(d.token(), caller("c"), "r", ""), Done)
    reborn = d.accepted(d.register(0, caller=caller("a")), Registered)
    assert reborn.epoch > old_epoch, "epochs grow even if a cluster was forgotten in between"


def test_unknown_callers_are_told_to_register() -> None:
    d = Driver()
    assert d.refused(d.attach(0)).kind is ErrorKind.NOT_REGISTERED
    assert "no client has registered in cluster 'c'" in d.refused(d.get("key")).message
    assert d.refused(GetClusterState(d.token(), OBSERVER)).kind is ErrorKind.NOT_REGISTERED
    d.join(0)
    assert d.refused(d.attach(1)).kind is ErrorKind.NOT_REGISTERED
    assert d.refused(d.get("key", caller=d.caller(1))).kind is ErrorKind.NOT_REGISTERED
    assert d.refused(d.get("key", caller=d.caller(7))).kind is ErrorKind.UNKNOWN_TASK
    foreign = d.refused(Attach(d.token(), d.caller(0, 999), 77))
    assert foreign.kind is ErrorKind.FENCED
    assert "held by another process, /job:worker/task:0 (host host0, pid 70)" in foreign.message


def test_observers_may_read_and_write_keys_but_change_nothing_else() -> None:
    d = Driver()
    d.join(0)
    assert d.refused(d.get("key", caller=OBSERVER)).kind is ErrorKind.KEY_NOT_FOUND
    set_it = KvSet(d.token(), OBSERVER, "r", "key", b"v", False)
    assert d.accepted(set_it, KvRevision).revision == 1
    assert d.accepted(d.get("key"), KeyValue).value == b"v"
    assert d.refused(KvSet(d.token(), OBSERVER, "s", "key", b"w", False)).kind is ErrorKind.KEY_EXISTS
    assert d.accepted(KvDelete(d.token(), OBSERVER, "d", "key", False), KvDeleted).deleted == 1
    assert d.accepted(KvIncrement(d.token(), OBSERVER, "i", "key", 1), KvIncremented).value == 1
    error = d.refused(ReportError(d.token(), OBSERVER, "e", "no"))
    assert error.kind is ErrorKind.INVALID_ARGUMENT
    assert "observer" in error.message
    assert d.refused(KvSet(d.token(), OBSERVER, "", "key", b"", True)).kind is ErrorKind.INVALID_ARGUMENT
    d.accepted(Leave(d.token(), d.caller(0), "l", ""), Done)
    assert d.refused(KvSet(d.token(), OBSERVER, "t", "key", b"", True)).kind is ErrorKind.CLUSTER_ENDING
    assert d.refused(Attach(d.token(), OBSERVER, 5)).kind is ErrorKind.INVALID_ARGUMENT


def test_the_state_leaves_members_out_for_those_who_know_them() -> None:
    d = Driver()
    d.join(0)
    epoch = d.state().epoch
    known = d.accepted(GetClusterState(d.token(), OBSERVER, epoch), ClusterState)
    assert (known.members, known.vacant) == ((), (worker(1),))
    d.join(1)
    assert len(d.accepted(GetClusterState(d.token(), OBSERVER, epoch), ClusterState).members) == 2


def test_secrets_are_not_shown() -> None:
    d = Driver()
    registration = d.register(0, fresh_secret=b"hush" * 8)
    shown = repr(registration) + repr(d.apply(registration)) + repr(d.durable)
    assert "hush" not in shown
    assert "aHVzaGh1" not in shown
