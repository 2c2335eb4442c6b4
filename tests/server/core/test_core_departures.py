"""Who is told of departures, when, and what they do to others."""

from __future__ import annotations

from tests.server.core.driving import Driver, worker

from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import Heartbeat, Tick
from dmesh_server.core.model import Limits, MemberState


def test_everybody_is_told_at_once_who_departed_and_why() -> None:
    d = Driver(3)
    d.join(0, 1, 2)
    before = d.state().epoch
    d.lose(0)
    for index in (1, 2):
        (outgoing,) = d.notices(index)
        assert outgoing.epoch == before + 1
        (gone,) = outgoing.departed
        assert (gone.task, gone.state, gone.process.pid) == (worker(0), MemberState.LOST, 70)
        assert gone.reason.startswith("its connection closed without a goodbye")
    assert not d.notices(0)


def test_departures_soon_after_a_notice_are_told_together() -> None:
    d = Driver(5)
    d.join(*range(5))
    d.apply(d.report(0, "no"))
    assert [member.task.index for member in d.notices(4)[0].departed] == [0]
    d.advance(0.02)
    d.apply(d.leave(1))
    d.apply(d.report(2, "no"))
    assert not d.notices(4)
    d.advance(0.02)
    assert not d.notices(4)
    d.advance(0.02)
    (outgoing,) = d.notices(4)
    assert [(m.task.index, m.state.name) for m in outgoing.departed] == [(1, "LEFT"), (2, "FAILED")]
    assert outgoing.epoch == d.state().epoch
    d.advance(1.0)
    d.apply(d.report(3, "no"))
    assert [member.task.index for member in d.notices(4)[0].departed] == [3]


def test_the_more_there_are_to_tell_the_longer_departures_gather() -> None:
    """Telling all who stay of each who goes would cost a large cluster that ends its square."""
    d = Driver(5, Limits(departure_batch=0.05, departure_quiet_per_session=0.1))
    d.join(*range(5))
    d.apply(d.report(0, "no"))
    assert len(d.notices(4)) == 1
    d.apply(d.report(1, "no"))
    d.advance(0.39)
    assert not d.notices(4)
    d.advance(0.02)
    assert [member.task.index for member in d.notices(4)[0].departed] == [1]


def test_who_leaves_in_good_order_is_told_of_after_a_while() -> None:
    """A job that ends for all at once tells nobody: whoever was to be told has left, too."""
    d = Driver(5, Limits(departure_batch=0.05, leave_quiet_per_session=0.1))
    d.join(*range(5))
    d.apply(d.leave(0))
    d.advance(0.2)
    d.apply(d.leave(1))
    d.advance(0.19)
    assert not any(d.notices(index) for index in range(5))
    d.advance(0.02)
    for index in (2, 3, 4):
        (outgoing,) = d.notices(index)
        assert [(m.task.index, m.state.name) for m in outgoing.departed] == [(0, "LEFT"), (1, "LEFT")]


def test_a_loss_takes_those_along_who_left_before() -> None:
    d = Driver(5, Limits(leave_quiet_per_session=10))
    d.join(*range(5))
    d.apply(d.leave(0))
    d.apply(d.report(1, "no"))
    (outgoing,) = d.notices(4)
    assert [(m.task.index, m.state.name) for m in outgoing.departed] == [(0, "LEFT"), (1, "FAILED")]
    d.apply(d.leave(2))
    d.advance(1.0)
    assert not d.notices(4)


def test_departures_found_in_one_moment_are_told_together() -> None:
    d = Driver(4)
    for index in (0, 1, 2):
        d.apply(d.register(index))
    d.join(3)
    d.now += 14.9
    d.apply(Heartbeat(d.sessions[3], 1))
    d.now += 0.2
    d.apply(Tick())
    (outgoing,) = d.notices(3)
    assert [member.task.index for member in outgoing.departed] == [0, 1, 2]


def test_epochs_grow_with_registrations_and_departures_only() -> None:
    d = Driver()
    epochs = [0]
    for event in (d.register(0), d.register(1), d.leave(0)):
        d.apply(event)
        epochs.append(d.state().epoch)
    assert epochs == [0, 1, 2, 3]
    d.apply(d.attach(1))
    d.apply(d.set("key", index=1))
    assert d.state().epoch == 3


def test_what_the_departed_waited_for_is_answered_fenced() -> None:
    d = Driver()
    d.join(0, 1)
    read, watch = d.get("key", 60.0), d.watch("k")
    other = d.get("key", 60.0, d.caller(1))
    for event in (read, watch, other):
        d.apply(event)
    d.lose(0)
    (answer,) = d.replies().values()
    assert isinstance(answer, CoreError)
    assert (answer.kind, list(d.replies())) == (ErrorKind.FENCED, [read.token])
    assert [push.error.kind for push in d.watched(watch.token) if push.error] == [ErrorKind.FENCED]
    d.apply(d.set("key", index=1))
    assert list(d.replies()) == [other.token, max(d.replies())]


def test_nobody_waits_in_a_cluster_that_has_ended() -> None:
    from tests.server.core.driving import OBSERVER

    d = Driver(1, Limits())
    d.join(0)
    read, watch = d.get("key", None, OBSERVER), d.watch(caller=OBSERVER)
    d.apply(read)
    d.apply(watch)
    d.apply(d.leave(0))
    answer = d.replies()[read.token]
    assert isinstance(answer, CoreError)
    assert answer.kind is ErrorKind.CLUSTER_ENDING
    assert [push.error.kind for push in d.watched(watch.token) if push.error] == [ErrorKind.CLUSTER_ENDING]
    assert d.refused(d.get("key", 1.0, OBSERVER)).kind is ErrorKind.CLUSTER_ENDING
    assert d.refused(d.watch(caller=OBSERVER)).kind is ErrorKind.CLUSTER_ENDING
