"""Watches: ordered, each change once, resumable."""

from __future__ import annotations

from tests.server.core.driving import OBSERVER, Driver

from dmesh_server.core.effects import KvRevision, WatchPush
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.events import Abandon
from dmesh_server.core.model import KeyEvent, KeyValue, Limits


def joined(limits: Limits | None = None) -> Driver:
    d = Driver(2, limits)
    d.join(0, 1)
    return d


def test_a_watch_tells_of_changes_from_now_on() -> None:
    d = joined()
    d.apply(d.set("a/0"))
    watch = d.watch("a/")
    assert d.accepted(watch, KvRevision) == KvRevision(1)
    assert not d.watched(watch.token)
    d.apply(d.set("a/1", b"x"))
    assert d.watched(watch.token) == [WatchPush(watch.token, 2, (KeyEvent(KeyValue("a/1", b"x", 2, 2)),))]
    d.apply(d.set("b"))
    assert not d.watched(watch.token)
    d.apply(d.increment("a/n", 5))
    assert d.watched(watch.token)[0].events == (KeyEvent(KeyValue("a/n", b"5", 4, 4)),)
    d.apply(d.delete("a/1"))
    assert d.watched(watch.token)[0].events == (KeyEvent(KeyValue("a/1", b"", 2, 5), True),)


def test_the_changes_of_one_revision_come_together_sorted() -> None:
    d = joined()
    for key in ("a/2", "a/1", "a0"):
        d.apply(d.set(key))
    watches = [d.watch("a/"), d.watch(""), d.watch("a/2"), d.watch("a/", caller=OBSERVER)]
    for watch in watches:
        d.apply(watch)
    d.apply(d.delete("a", prefix=True))
    told = [[event.kv.key for push in d.watched(w.token) for event in push.events] for w in watches]
    assert told == [["a/1", "a/2"], ["a/1", "a/2", "a0"], ["a/2"], ["a/1", "a/2"]]
    assert all(len(d.watched(watch.token)) == 1 for watch in watches)


def test_a_watch_can_start_in_the_past() -> None:
    d = joined()
    for key in ("a", "b", "a"):
        d.apply(d.set(key))
    watch = d.watch("a", 1)
    effects = d.apply(watch)
    assert [type(effect).__name__ for effect in effects] == ["Reply", "WatchPush", "WatchPush"]
    assert [push.revision for push in d.watched(watch.token)] == [1, 3]
    later = d.watch("", 3)
    d.apply(later)
    assert [push.revision for push in d.watched(later.token)] == [3]
    now = d.watch("", 4)
    d.apply(now)
    assert not d.watched(now.token)
    d.apply(d.set("a"))
    assert [push.revision for push in d.watched(now.token)] == [4]


def test_what_is_forgotten_cannot_be_watched() -> None:
    d = joined(Limits(watch_history=2))
    for _ in range(4):
        d.apply(d.set("a"))
    error = d.refused(d.watch("", 2))
    assert error.kind is ErrorKind.COMPACTED
    assert "keeps the changes since revision 3 (now 4)" in error.message
    d.accepted(d.watch("", 3), KvRevision)
    assert {record.key for record in d.durable.values() if record.kind == "change"} == {"3", "4"}


def test_the_history_is_limited_in_bytes_too() -> None:
    d = joined(Limits(watch_history_bytes=25))
    for _ in range(4):
        d.apply(d.set("a", b"x" * 9))
    assert d.refused(d.watch("", 2)).kind is ErrorKind.COMPACTED
    d.accepted(d.watch("", 3), KvRevision)
    d.apply(d.set("a", b"x" * 100))
    d.accepted(d.watch("", 5), KvRevision)


def test_a_revision_that_has_not_come_is_of_another_life() -> None:
    d = joined()
    error = d.refused(d.watch("", 2))
    assert (error.kind, "new generation" in error.message) == (ErrorKind.COMPACTED, True)
    assert d.refused(d.watch("", -1)).kind is ErrorKind.INVALID_ARGUMENT
    d.accepted(d.watch("", 1), KvRevision)


def test_an_abandoned_watch_is_silent() -> None:
    d = joined()
    watch, other = d.watch("a"), d.watch("a")
    d.apply(watch)
    d.apply(other)
    d.apply(Abandon(watch.token))
    d.apply(d.set("a"))
    assert not d.watched(watch.token)
    assert d.watched(other.token)
    d.apply(Abandon(other.token))
    d.apply(d.set("a"))
    assert not d.watched(other.token)
