"""The log of what happened: order, bounds, gaps, readers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmesh_server.core.events import KvSet
from dmesh_server.core.log_events import BarrierEnded, MemberDeparted, MemberJoined
from dmesh_server.core.model import EMPTY_PROCESS, Caller, Member, MemberState, Task
from dmesh_server.event_log import (
    EVERYTHING,
    KINDS,
    AdminAction,
    Event,
    EventLog,
    Filter,
    ServerNote,
    kind_of,
    preemption,
)


def member(index: int, state: MemberState = MemberState.REGISTERED, reason: str = "") -> Member:
    return Member(Task("worker", index), 7, state, EMPTY_PROCESS, (), (), 0.0, 0.0, reason)


def joined(index: int, cluster: str = "c") -> MemberJoined:
    return MemberJoined(cluster, member(index), 1, False)


def passed(name: str = "b", cluster: str = "c") -> BarrierEnded:
    return BarrierEnded(cluster, name, 0, 2, (), 0, 0.1, "", "")


def event_log(most: int = 10, most_routine: int = 3) -> EventLog:
    return EventLog(lambda: 1.5, most=most, most_routine=most_routine)


def numbers(entries: object) -> list[int]:
    return [entry.number for entry in entries]  # type: ignore[attr-defined]


def test_events_come_in_order_and_in_pages() -> None:
    log = event_log()
    for index in range(3):
        log.note(joined(index))
        log.note(passed())
    first = log.page(None, 4, EVERYTHING)
    assert (numbers(first.entries), first.last, first.more, first.lost) == ([1, 2, 3, 4], 4, True, 0)
    rest = log.page(first.last, 4, EVERYTHING)
    assert (numbers(rest.entries), rest.last, rest.more, rest.lost) == ([5, 6], 6, False, 0)
    assert numbers(log.latest(0, 2, EVERYTHING)) == [6, 5]
    assert numbers(log.latest(5, 2, EVERYTHING)) == [4, 3]
    assert +log.counts == {"member_joined": 3, "barrier_passed": 3}


def test_barriers_that_pass_push_out_nothing_else() -> None:
    log = event_log()
    log.note(joined(0))
    for _ in range(100):
        log.note(passed())
    page = log.page(None, 100, EVERYTHING)
    assert numbers(page.entries) == [1, 99, 100, 101]


def test_a_reader_is_told_of_a_gap_and_only_of_its_own() -> None:
    log = event_log(most=4, most_routine=2)
    for index in range(8):
        log.note(joined(index))
    assert log.page(4, 10, EVERYTHING).lost == 0
    page = log.page(3, 10, EVERYTHING)
    assert (page.lost, numbers(page.entries)) == (4, [5, 6, 7, 8])
    assert log.page(None, 10, EVERYTHING).lost == 0, "who begins has missed nothing"
    for _ in range(5):
        log.note(passed())
    assert log.page(8, 10, EVERYTHING).lost == 11
    assert log.page(8, 10, Filter(kinds=frozenset({"member_joined"}))).lost == 0


def test_long_texts_are_bounded_together() -> None:
    log = event_log(most=10_000)
    for index in range(4_000):
        log.note(MemberDeparted("c", member(index, MemberState.FAILED, "x" * 4096), 1))
    kept = numbers(log.page(None, 10_000, EVERYTHING).entries)
    assert 1_000 < len(kept) < 2_500
    assert kept[-1] == 4_000


def test_filters() -> None:
    log = event_log()
    log.note(joined(0))
    log.note(joined(1, "d"))
    log.note(AdminAction("c", "evict_member", "t", Task("worker", 0), "me"))
    log.note(ServerNote("store_failed", "full"))
    assert numbers(log.page(None, 9, Filter(cluster="c")).entries) == [1, 3]
    assert numbers(log.page(None, 9, Filter(kinds=frozenset({"store_failed"}))).entries) == [4]
    assert numbers(log.page(None, 9, Filter(task=Task("worker", 0))).entries) == [1, 3]
    assert numbers(log.latest(0, 9, Filter(cluster="d"))) == [2]


async def test_feeds() -> None:
    log = event_log()
    feed = log.subscribe(Filter(cluster="c"), limit=2)
    log.note(joined(0))
    log.note(joined(0, "d"))
    entry = await feed.send_queue.get()
    assert entry is not None
    assert entry.number == 1
    for index in range(3):  # nobody reads
        log.note(joined(index))
    assert feed.send_queue.overflowed
    assert await feed.send_queue.get() is None
    log.unsubscribe(feed)
    log.close()
    assert await log.subscribe(EVERYTHING).send_queue.get() is None, "the server stops"


def test_every_kind_is_known() -> None:
    events: list[Event] = [
        joined(0), passed(), MemberJoined("c", member(0), 1, True),
        BarrierEnded("c", "b", 0, 2, (), 1, 0.1, "BARRIER_TIMEOUT", "late"),
        *(MemberDeparted("c", member(0, state), 1) for state in MemberState if state.departed),
    ]  # fmt: skip
    assert {kind_of(event) for event in events} <= set(KINDS)


@given(st.binary(max_size=200) | st.just(b"[" * 100_000) | st.just(b'{"reason": 7}'))
def test_any_announcement_is_read(value: bytes) -> None:
    event = KvSet(1, Caller("c", Task("worker", 1), 5), "r", "dmesh/preemption/notice/1", value, False)
    assert preemption(event).reason == ""


def test_an_announcement_is_read() -> None:
    caller = Caller("c", Task("worker", 1), 5)
    event = KvSet(1, caller, "r", "dmesh/preemption/notice/1", b'{"reason": "spot"}', False)
    assert (preemption(event).reason, preemption(event).task) == ("spot", Task("worker", 1))


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 60), st.integers(1, 5), st.integers(1, 5))
def test_pages_have_every_event_that_is_kept_once(
    routine: list[bool], after: int, most: int, most_routine: int
) -> None:
    log = event_log(most, most_routine)
    for is_routine in routine:
        log.note(passed() if is_routine else joined(0))
    ids = [number for number, is_routine in enumerate(routine, 1) if is_routine][-most_routine:]
    ids += [number for number, is_routine in enumerate(routine, 1) if not is_routine][-most:]
    expected = sorted(number for number in ids if number > after)
    found, at = [], after
    while True:
        page = log.page(at, 3, EVERYTHING)
        found += numbers(page.entries)
        at = page.last
        if not page.more:
            break
    assert found == expected
    lost = [n for n in range(after + 1, len(routine) + 1) if n not in expected]
    assert log.page(after, 3, EVERYTHING).lost == max(lost, default=0)
