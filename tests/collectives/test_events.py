"""Events of collectives: the begin and end of each call, and reports of long waits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, Cluster

from dmesh.collectives.events import CallRecord, EventReader, EventRing, Pending
from dmesh.collectives.services import WaitPolicy
from dmesh.coordination.activity import ActivityTracker
from dmesh.errors import CollectiveTimeoutError

QUICK = WaitPolicy(ask_after=(0.01,), ask_every=0.05, look_every=0.02, announce=lambda message: None)


class Notes(EventRing):
    """An event ring that keeps a log of what is written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[object, ...]] = []
        self.waits = threading.Semaphore(0)
        self.on_waiting = self.reported

    def began(self, record: CallRecord, work: Pending | None = None) -> None:
        super().began(record, work)
        assert self.operations()[threading.get_ident()] is record
        self.events.append(("begin", str(record)))

    def ended(self, record: CallRecord, error: BaseException | None = None) -> None:
        self.events.append(("end", str(record)))
        super().ended(record, error)
        assert threading.get_ident() not in self.operations()

    def reported(self, operation: str, ranks: Sequence[int], age: float) -> None:
        if not ranks:
            self.events.append(("done", operation))
            return
        self.events.append(("waiting", operation, tuple(ranks), age))
        self.waits.release()


@pytest.fixture
def observed():
    """Three ranks, the first of which is observed."""
    made = Cluster(3, wait_policy=QUICK)
    notes = Notes()
    made.communicators[0].events = notes
    made.communicators[0].stuck_after = 0.1
    yield made, notes
    made.close()


def test_every_call_begins_and_ends_and_no_short_wait_is_reported(observed):
    ranks, notes = observed
    ranks.communicators[0].stuck_after = 60.0
    ranks.all(lambda c: c.world.all_reduce(np.ones(3)))
    ranks.all(lambda c: c.world.barrier(async_op=True).result(LIMIT))
    assert notes.events == [
        ("begin", "all_reduce(sum, float64, shape (3,)), collective #1 of group world"),
        ("end", "all_reduce(sum, float64, shape (3,)), collective #1 of group world"),
        ("begin", "barrier(), collective #2 of group world"),
        ("end", "barrier(), collective #2 of group world"),
    ]


def test_a_long_wait_is_reported_once_an_interval_with_those_it_is_for_and_its_end(observed):
    ranks, notes = observed
    late = threading.Event()

    def body(communicator):
        if communicator.rank == 2:
            assert late.wait(LIMIT)
        communicator.world.barrier()

    waiter = threading.Thread(target=ranks.all, args=(body,))
    waiter.start()
    for _ in range(3):
        assert notes.waits.acquire(timeout=LIMIT)
    late.set()
    waiter.join(LIMIT)
    assert not waiter.is_alive()
    waiting = [event for event in notes.events if event[0] == "waiting"]
    assert len(waiting) >= 3
    assert {event[1] for event in waiting} == {"barrier(), collective #1 of group world"}
    assert {event[2] for event in waiting} == {(2,)}
    ages = [event[3] for event in waiting]
    assert ages[0] >= 0.1
    assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise(ages))
    assert [event[0] for event in notes.events[-2:]] == ["done", "end"]
    assert [event[0] for event in notes.events].count("done") == 1


def test_a_wait_that_ends_badly_is_over_too(observed):
    ranks, notes = observed
    with pytest.raises(CollectiveTimeoutError):
        ranks.communicators[0].world.barrier(timeout=0.3)
    assert [event[0] for event in notes.events[-2:]] == ["done", "end"]


def test_never_means_never(observed):
    ranks, notes = observed
    ranks.communicators[0].stuck_after = 0.0
    with pytest.raises(CollectiveTimeoutError):
        ranks.communicators[0].world.barrier(timeout=0.3)
    assert [event[0] for event in notes.events] == ["begin", "end"]


def test_the_activity_tracker_knows_the_call_of_a_thread_and_takes_its_end_for_progress():
    now = [100.0]
    ring, tracker = EventRing(lambda: now[0]), ActivityTracker(lambda: now[0])
    tracker.watch(ring)
    record = ring.called("world", 3, "barrier()", 0)
    before = tracker.progress
    assert not tracker.waiting
    with tracker.during("a step"):
        ring.began(record)
        now[0] += 62
        assert tracker.waiting
        assert (tracker.report().operation, tracker.report().age) == ("barrier(), #3 of world", 62)
        ring.ended(record)
        assert (tracker.report().operation, tracker.report().age) == ("a step", 0)
        assert tracker.progress != before
    assert not tracker.waiting


def test_a_call_that_is_older_than_the_rings_calls_is_still_known():
    ring = EventRing()
    first = ring.called("world", 1, "barrier()", 0)
    ring.began(first)

    def others():
        for number in range(300):
            record = ring.called("other", number, "barrier()", 0)
            ring.began(record)
            ring.ended(record)

    thread = threading.Thread(target=others)
    thread.start()
    thread.join(LIMIT)
    assert ring.oldest_running() is first
    assert ring.noted()[0] is first
    ring.ended(first)
    assert ring.oldest_running() is None


class Broken(EventReader):
    """A reader that fails at its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def read(self, calls: Sequence[CallRecord]) -> None:
        self.batches += len(calls)
        if self.batches == 1:
            raise ValueError("broken")

    def finish(self) -> None:
        """Nothing is left to do."""


def test_a_reader_that_fails_once_gets_the_next_call(caplog):
    ring, reader = EventRing(), Broken()
    ring.add_reader(reader)
    for number in range(2):
        record = ring.called("world", number, "barrier()", 0)
        ring.began(record)
        ring.ended(record)
    reader.close()
    reader.close()
    assert reader.batches == 2
    assert caplog.text.count("an event reader has failed") == 1


def test_observing_a_call_costs_less_than_thirty_empty_ones():
    """Less than a microsecond on a machine on which an empty call takes 30 ns."""
    ring = EventRing()

    def observe(record: CallRecord) -> None:
        ring.began(record)
        ring.ended(record)

    best = min(_seconds_of(observe) / _seconds_of(lambda record: None) for _ in range(20))
    assert best < 30


def _seconds_of(call: Callable[[CallRecord], None], times: int = 5_000) -> float:
    records = [CallRecord("world", number, "barrier()", 0, 0.0) for number in range(times)]
    began = time.thread_time()
    for record in records:
        call(record)
    return time.thread_time() - began
