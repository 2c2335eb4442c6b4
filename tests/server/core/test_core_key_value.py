"""The key-value store: its calls and revisions, blocked reads, and limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.core.driving import OBSERVER, Driver, swapped, unequal

from dmesh_server.core.effects import KvDeleted, KvIncremented, KvRead, KvRevision, KvTransacted
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import Abandon, KvGet
from dmesh_server.core.model import KeyValue, Limits
from dmesh_server.core.ordered_keys import OrderedKeys


def joined(limits: Limits | None = None) -> Driver:
    d = Driver(2, limits)
    d.join(0, 1)
    return d


def keys(d: Driver, prefix: str = "") -> list[str]:
    return [kv.key for kv in d.accepted(d.list(prefix), KvRead).kvs]


def test_every_change_has_the_next_revision() -> None:
    d = joined()
    assert d.accepted(d.set("a", b"1"), KvRevision) == KvRevision(1)
    assert d.accepted(d.set("a", b"2"), KvRevision) == KvRevision(2)
    assert d.accepted(d.set("b", b"3", index=1), KvRevision) == KvRevision(3)
    assert d.accepted(d.increment("n"), KvIncremented) == KvIncremented(1, 4)
    assert d.accepted(d.compare_and_set("b", b"3", b"4"), KvTransacted).revision == 5
    assert d.accepted(d.delete("a"), KvDeleted) == KvDeleted(1, 6)
    assert d.accepted(d.get("b"), KeyValue) == KeyValue("b", b"4", 3, 5)
    assert d.accepted(d.delete("a"), KvDeleted) == KvDeleted(0, 6), "nothing changed"
    assert d.accepted(d.set("a", b"5"), KvRevision) == KvRevision(7)
    assert d.accepted(d.get("a"), KeyValue) == KeyValue("a", b"5", 7, 7), "a new key"


def test_a_key_that_exists_is_not_overwritten_by_chance() -> None:
    d = joined()
    d.accepted(d.set("a", b"1", overwrite=False), KvRevision)
    error = d.refused(d.set("a", b"2", overwrite=False))
    assert error.kind is ErrorKind.KEY_EXISTS
    assert "key 'a' has a value already (since revision 1, 1 bytes)" in error.message
    assert "allow_overwrite" in error.message
    assert d.accepted(d.get("a"), KeyValue).value == b"1"


def test_a_missing_key_is_an_error_for_who_does_not_wait() -> None:
    error = joined().refused(joined().get("a"))
    assert (error.kind, "'a'" in error.message) == (ErrorKind.KEY_NOT_FOUND, True)


def test_whoever_waits_for_a_key_gets_it_when_it_comes() -> None:
    d = joined()
    waiting = [d.get("a", 5.0), d.get("a", None), d.get("a", None, OBSERVER), d.get("b", None)]
    for read in waiting:
        d.apply(read)
        assert not d.effects
    d.apply(d.set("a", b"1", index=1))
    answers = d.replies()
    assert [answers.get(read.token) for read in waiting] == [KeyValue("a", b"1", 1, 1)] * 3 + [None]
    d.apply(d.increment("b", 5))
    assert d.replies()[waiting[3].token] == KeyValue("b", b"5", 2, 2)
    assert d.advance(10.0) is not None


def test_whoever_waits_too_long_is_told() -> None:
    d = joined()
    read = d.get("a", 5.0)
    d.apply(read)
    d.advance(4.9)
    assert not d.replies()
    d.advance(0.1)
    (answer,) = d.replies().values()
    assert isinstance(answer, CoreError)
    assert answer.kind is ErrorKind.DEADLINE_EXCEEDED
    assert "key 'a' did not appear in cluster 'c' within 5.0 s" in answer.message
    d.apply(d.set("a"))
    assert read.token not in d.replies()


def test_whoever_gives_up_waiting_is_forgotten() -> None:
    d = joined()
    read = d.get("a", 5.0)
    d.apply(read)
    assert d.apply(Abandon(read.token)) == []
    assert d.apply(Abandon(read.token)) == []
    d.advance(6.0)
    assert not d.replies()


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
def test_a_wait_needs_a_sensible_time(timeout: float) -> None:
    assert joined().refused(joined().get("a", timeout)).kind is ErrorKind.INVALID_ARGUMENT


def test_many_keys_are_read_at_one_revision_in_the_order_asked_for() -> None:
    d = joined()
    for key in ("a", "b", "c"):
        d.apply(d.set(key, key.encode()))
    read = d.accepted(d.get_many("c", "x", "a", "c"), KvRead)
    assert [kv.key for kv in read.kvs] == ["c", "a", "c"]
    assert read.revision == 3


def test_prefixes_are_plain_text_and_keys_are_sorted_by_their_bytes() -> None:
    d = joined()
    for key in ("b", "a/1", "a", "a/10", "a0", "é", "\U0001f600", "\uffff", "z"):
        d.apply(d.set(key))
    assert keys(d) == ["a", "a/1", "a/10", "a0", "b", "z", "é", "\uffff", "\U0001f600"]
    assert keys(d) == sorted(keys(d), key=str.encode)
    assert keys(d, "a/") == ["a/1", "a/10"]
    assert keys(d, "\uffff") == ["\uffff"]
    assert keys(d, "nothing") == []
    listed = d.accepted(d.list("a/", keys_only=True), KvRead)
    assert [kv.value for kv in listed.kvs] == [b"", b""]
    assert listed.kvs[0].mod_revision == 2


def test_deleting_a_prefix_is_one_change() -> None:
    d = joined()
    for key in ("a/1", "a/2", "b"):
        d.apply(d.set(key))
    assert d.accepted(d.delete("a/", prefix=True), KvDeleted) == KvDeleted(2, 4)
    assert keys(d) == ["b"]
    assert d.accepted(d.delete("", prefix=True), KvDeleted) == KvDeleted(1, 5)
    assert keys(d) == []


def test_increments_count() -> None:
    d = joined()
    assert d.accepted(d.increment("n", 5), KvIncremented).value == 5
    assert d.accepted(d.increment("n", -7), KvIncremented).value == -2
    assert d.accepted(d.get("n"), KeyValue).value == b"-2"
    d.apply(d.set("n", b"+12"))
    assert d.accepted(d.increment("n", 0), KvIncremented).value == 12


@pytest.mark.parametrize(
    "value", [b"", b"x", b"1.5", b" 1", b"1_0", b"0x1", b"9223372036854775808", b"\xff", b"1" * 50]
)
def test_only_integers_are_incremented(value: bytes) -> None:
    d = joined()
    d.apply(d.set("n", value))
    error = d.refused(d.increment("n"))
    assert (error.kind, "key 'n'" in error.message) == (ErrorKind.KEY_NOT_INTEGER, True)
    assert d.accepted(d.get("n"), KeyValue).value == value


def test_integers_stay_within_64_bits() -> None:
    d = joined()
    d.apply(d.set("n", str(2**63 - 1).encode()))
    assert d.refused(d.increment("n")).kind is ErrorKind.KEY_NOT_INTEGER
    assert d.accepted(d.increment("n", -(2**63)), KvIncremented).value == -1
    assert d.refused(d.increment("n", 2**63)).kind is ErrorKind.INVALID_ARGUMENT


def test_compare_and_set() -> None:
    d = joined()
    assert d.accepted(d.compare_and_set("a", b"0", b"1"), KvTransacted) == unequal(None, 0)
    created = KeyValue("a", b"1", 1, 1)
    assert d.accepted(d.compare_and_set("a", None, b"1"), KvTransacted) == swapped(1)
    assert d.accepted(d.compare_and_set("a", None, b"2"), KvTransacted) == unequal(created, 1)
    assert d.accepted(d.compare_and_set("a", b"", b"2"), KvTransacted) == unequal(created, 1)
    assert d.accepted(d.compare_and_set("a", b"1", b"2"), KvTransacted) == swapped(2)


@pytest.mark.parametrize("key", ["", "x" * 1025, "é" * 513, "a\0b", "\ud800"])
def test_malformed_keys_are_refused_by_every_call(key: str) -> None:
    d = joined()
    for event in (
        d.set(key),
        d.get(key),
        d.get_many("a", key),
        d.delete(key),
        d.increment(key),
        d.compare_and_set(key, None, b""),
    ):
        error = d.refused(event)
        assert error.kind is ErrorKind.INVALID_ARGUMENT
        assert len(error.message) < 400
    if key:
        for event in (d.list(key), d.watch(key), d.delete(key, prefix=True)):
            assert d.refused(event).kind is ErrorKind.INVALID_ARGUMENT
    assert keys(d) == []


def test_a_value_has_a_greatest_size() -> None:
    d = joined(Limits(max_value_bytes=10))
    d.accepted(d.set("a", b"x" * 10), KvRevision)
    for event in (d.set("a", b"x" * 11), d.compare_and_set("a", b"x" * 10, b"x" * 11)):
        error = d.refused(event)
        assert (error.kind, "11 bytes; the server allows 10" in error.message) == (
            ErrorKind.LIMIT_EXCEEDED,
            True,
        )


def test_the_store_has_a_greatest_size_and_deleting_makes_room() -> None:
    d = joined(Limits(max_store_bytes=20))
    d.accepted(d.set("a", b"x" * 9), KvRevision)
    d.accepted(d.set("b", b"x" * 9), KvRevision)
    error = d.refused(d.set("c", b""))
    assert error.kind is ErrorKind.LIMIT_EXCEEDED
    assert "20 bytes, and 1 more would pass the server's limit of 20" in error.message
    d.accepted(d.set("a", b"y" * 9), KvRevision)
    d.accepted(d.delete("b"), KvDeleted)
    d.accepted(d.set("c", b"x"), KvRevision)
    assert keys(d) == ["a", "c"]


def test_reads_and_waits_are_limited() -> None:
    d = joined(Limits(max_keys_per_read=2, max_waiters=2, max_read_bytes=10))
    assert d.refused(d.get_many("a", "b", "c")).kind is ErrorKind.LIMIT_EXCEEDED
    for key in ("a", "b"):
        d.apply(d.set(key, b"x" * 5))
    error = d.refused(d.list())
    assert (error.kind, "keys_only" in error.message) == (ErrorKind.LIMIT_EXCEEDED, True)
    assert len(d.accepted(d.list(keys_only=True), KvRead).kvs) == 2
    d.apply(d.get("x", None))
    d.apply(d.watch())
    assert d.refused(d.get("y", None)).kind is ErrorKind.LIMIT_EXCEEDED
    assert d.refused(d.watch()).kind is ErrorKind.LIMIT_EXCEEDED


def test_a_token_waits_once() -> None:
    d = joined()
    read = d.get("x", None)
    d.apply(read)
    assert d.refused(KvGet(read.token, read.caller, "y", None)).kind is ErrorKind.INVALID_ARGUMENT


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "remove", "prefix"]), st.text("ab/\uffff\U0001f600", max_size=4))
    )
)
def test_ordered_keys_are_a_sorted_map(steps: list[tuple[str, str]]) -> None:
    ordered, model = OrderedKeys(), dict[str, KeyValue]()
    for number, (step, key) in enumerate(steps, 1):
        if step == "put":
            kv = KeyValue(key, key.encode() * number, number, number)
            expected = sum(len(k.encode()) + len(v.value) for k, v in (model | {key: kv}).items())
            assert ordered.size + ordered.growth(key, kv.value) == expected
            ordered.put(kv)
            model[key] = kv
        else:
            gone = [k for k in model if (k.startswith(key) if step == "prefix" else k == key)]
            assert ordered.remove(key, is_prefix=step == "prefix") == [model.pop(k) for k in sorted(gone)]
        assert list(ordered.with_prefix("")) == [model[k] for k in sorted(model, key=str.encode)]
        assert list(ordered.with_prefix(key)) == [
            model[k] for k in sorted(model, key=str.encode) if k.startswith(key)
        ]
        assert ordered.size == sum(len(k.encode()) + len(v.value) for k, v in model.items())
