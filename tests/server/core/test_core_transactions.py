"""Transactions over keys: all of one, at one revision, or nothing; against a model, and across restarts."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.core.driving import OBSERVER, Driver

from dmesh_server.core.effects import (
    KvDeleted,
    KvIncremented,
    KvRead,
    KvRevision,
    KvTransacted,
)
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import KvDelete, KvGetMany, KvIncrement, KvList, KvSet, KvTransaction
from dmesh_server.core.model import (
    Condition,
    ConditionOperator,
    ConditionTarget,
    KeyEvent,
    KeyValue,
    Limits,
)

EQUAL, NOT_EQUAL, LESS, GREATER = ConditionOperator
VALUE, CREATE, MOD = ConditionTarget.VALUE, ConditionTarget.CREATE_REVISION, ConditionTarget.MOD_REVISION


def joined(limits: Limits | None = None) -> Driver:
    d = Driver(2, limits)
    d.join(0, 1)
    return d


def put(key: str, value: bytes = b"v", overwrite: bool = True) -> KvSet:
    return KvSet(0, OBSERVER, "", key, value, overwrite)


def drop(key: str, prefix: bool = False) -> KvDelete:
    return KvDelete(0, OBSERVER, "", key, prefix)


def add(key: str, amount: int = 1) -> KvIncrement:
    return KvIncrement(0, OBSERVER, "", key, amount)


def read(*keys: str) -> KvGetMany:
    return KvGetMany(0, OBSERVER, keys)


def absent(key: str) -> Condition:
    return Condition(key, MOD, EQUAL, 0)


def state(d: Driver) -> tuple[KeyValue, ...]:
    return d.accepted(d.list(), KvRead).kvs


def test_everything_changes_at_one_revision() -> None:
    d = joined()
    d.apply(d.set("old/a", b"1"))
    d.apply(d.set("old/b", b"2"))
    watch = d.watch("")
    d.apply(watch)
    event = d.transaction(
        [absent("new")], [put("new", b"3"), drop("old/", True), add("n", 5), read("n", "old/a", "new")]
    )
    answer = d.accepted(event, KvTransacted)
    new, number = KeyValue("new", b"3", 3, 3), KeyValue("n", b"5", 3, 3)
    assert answer == KvTransacted(
        True, (KvRevision(3), KvDeleted(2, 3), KvIncremented(5, 3), KvRead((number, new), 3)), 3
    )
    (push,) = d.watched(watch.token)
    assert push.revision == 3
    assert push.events == (
        KeyEvent(number),
        KeyEvent(new),
        KeyEvent(KeyValue("old/a", b"", 1, 3), deleted=True),
        KeyEvent(KeyValue("old/b", b"", 2, 3), deleted=True),
    )
    assert state(d) == (number, new)


def test_otherwise_is_done_when_a_condition_fails() -> None:
    d = joined()
    d.apply(d.set("a", b"1"))
    event = d.transaction([absent("b"), absent("a")], [put("b")], [read("a")])
    kv = KeyValue("a", b"1", 1, 1)
    assert d.accepted(event, KvTransacted) == KvTransacted(False, (KvRead((kv,), 1),), 1)
    nothing = d.transaction([absent("a")], [put("b")])
    assert d.accepted(nothing, KvTransacted) == KvTransacted(False, (), 1)
    assert state(d) == (kv,)


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (Condition("a", VALUE, EQUAL, b"m"), True),
        (Condition("a", VALUE, NOT_EQUAL, b"m"), False),
        (Condition("a", VALUE, LESS, b"n"), True),
        (Condition("a", VALUE, GREATER, b"m"), False),
        (Condition("a", VALUE, GREATER, b""), True),
        (Condition("a", CREATE, EQUAL, 1), True),
        (Condition("a", MOD, EQUAL, 1), False),
        (Condition("a", MOD, GREATER, 1), True),
        (Condition("a", MOD, LESS, 3), True),
        (Condition("none", VALUE, EQUAL, b""), False),
        (Condition("none", VALUE, NOT_EQUAL, b""), True),
        (Condition("none", VALUE, LESS, b"z"), False),
        (Condition("none", VALUE, GREATER, b""), False),
        (Condition("none", CREATE, EQUAL, 0), True),
        (Condition("none", MOD, LESS, 1), True),
    ],
)
def test_conditions(condition: Condition, holds: bool) -> None:
    d = joined()
    d.apply(d.set("a", b"l"))
    d.apply(d.set("a", b"m"))
    assert d.accepted(d.transaction([condition], []), KvTransacted).succeeded is holds


def test_nothing_is_changed_if_one_operation_is_refused() -> None:
    d = joined(Limits(max_store_bytes=100))
    d.apply(d.set("word", b"x"))
    d.apply(d.set("number", b"1"))
    watch = d.watch("")
    d.apply(watch)
    before, revision = state(d), 2
    for refused, kind in (
        (add("word"), ErrorKind.KEY_NOT_INTEGER),
        (put("word", b"y", False), ErrorKind.KEY_EXISTS),
        (put("large", bytes(100)), ErrorKind.LIMIT_EXCEEDED),
        (put("new", b"twice"), ErrorKind.INVALID_ARGUMENT),
        (drop("n", True), ErrorKind.INVALID_ARGUMENT),
        (drop("new"), ErrorKind.INVALID_ARGUMENT),
    ):
        error = d.refused(d.transaction([], [put("new", b"1"), add("number"), refused]))
        assert error.kind is kind
        assert d.watched(watch.token) == []
        assert state(d) == before
    assert d.accepted(d.list(), KvRead).revision == revision
    d.restart()
    assert state(d) == before


def test_blocked_reads_get_what_a_transaction_sets() -> None:
    d = joined()
    waiting = d.get("b", None)
    d.apply(waiting)
    d.apply(d.transaction([], [put("a"), put("b", b"1")]))
    assert d.replies()[waiting.token] == KeyValue("b", b"1", 1, 1)


def test_bounds() -> None:
    d = joined(Limits(max_transaction_operations=2, max_remembered_read_bytes=10))
    for event in (
        d.transaction([absent("a")] * 3, []),
        d.transaction([], [put("a"), put("b"), put("c")]),
        d.transaction([], [], [put("a"), put("b"), put("c")]),
    ):
        error = d.refused(event)
        assert (error.kind, "2" in error.message) == (ErrorKind.LIMIT_EXCEEDED, True)
    d.apply(d.set("a", bytes(10)))
    assert d.refused(d.transaction([], [put("b"), read("a")])).kind is ErrorKind.LIMIT_EXCEEDED
    assert d.accepted(d.transaction([], [read("a")]), KvTransacted).results, "nothing is remembered of it"
    assert len(state(d)) == 1
    bad = dataclasses.replace(d.transaction([Condition("", MOD, EQUAL, 0)], []))
    assert d.refused(bad).kind is ErrorKind.INVALID_ARGUMENT


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("observer", [False, True])
def test_a_retry_is_answered_alike(restart: bool, observer: bool) -> None:
    d = joined()
    d.apply(d.set("a", b"1"))
    event = d.transaction(
        [Condition("a", VALUE, EQUAL, b"1")], [put("a", b"2"), add("n", -3), drop("x"), read("a")]
    )
    if observer:
        event = dataclasses.replace(event, caller=OBSERVER)
    answer = d.accepted(event, KvTransacted)
    if restart:
        d.restart()
    before = dict(d.durable)
    assert d.answer(dataclasses.replace(event, token=d.token())) == answer
    assert d.durable == before
    d.apply(d.set("a", b"other"))
    assert d.answer(dataclasses.replace(event, token=d.token())) == answer


def test_increments_of_observers_are_counted_once() -> None:
    d = joined()
    event = dataclasses.replace(d.increment("n", 5), caller=OBSERVER)
    assert d.accepted(event, KvIncremented) == KvIncremented(5, 1)
    assert d.accepted(event, KvIncremented) == KvIncremented(5, 1)
    d.restart()
    assert d.accepted(event, KvIncremented) == KvIncremented(5, 1)
    other = dataclasses.replace(d.increment("n", 5), caller=OBSERVER)
    assert d.accepted(other, KvIncremented) == KvIncremented(10, 2)


KEYS = st.sampled_from(["a", "a/1", "a/2", "b"])
VALUES = st.sampled_from([b"", b"1", b"7", b"x"])
REVISIONS = st.integers(0, 6)
CONDITIONS = st.one_of(
    st.builds(Condition, KEYS, st.just(VALUE), st.sampled_from(ConditionOperator), VALUES),
    st.builds(Condition, KEYS, st.sampled_from([CREATE, MOD]), st.sampled_from(ConditionOperator), REVISIONS),
)
OPERATIONS = st.lists(
    st.one_of(
        st.builds(put, KEYS, VALUES, st.booleans()),
        st.builds(drop, KEYS, st.booleans()),
        st.builds(add, KEYS, st.integers(-3, 3)),
        st.builds(read, KEYS, KEYS),
        st.builds(lambda prefix: KvList(0, OBSERVER, prefix, False), KEYS),
    ),
    max_size=4,
)


class Model:
    """A key-value store as simple as can be: a transaction works on a copy."""

    def __init__(self) -> None:
        self.keys: dict[str, KeyValue] = {}
        self.revision = 0

    def transact(self, event: KvTransaction) -> KvTransacted | None:
        """Carries a transaction out; None if it is refused."""
        succeeded = all(self.holds(condition) for condition in event.compare)
        after = copy.deepcopy(self)
        changed: set[str] = set()
        results = []
        for operation in event.then if succeeded else event.otherwise:
            result = after.perform(operation, self.revision + 1, changed)
            if result is None:
                return None
            results.append(result)
        after.revision += bool(changed)
        self.keys, self.revision = after.keys, after.revision
        return KvTransacted(succeeded, tuple(results), self.revision)

    def holds(self, condition: Condition) -> bool:
        kv = self.keys.get(condition.key)
        mine: Any = {
            VALUE: kv and kv.value,
            CREATE: kv.create_revision if kv else 0,
            MOD: kv.mod_revision if kv else 0,
        }[condition.target]
        if mine is None:
            return condition.operator is NOT_EQUAL
        operand: Any = condition.operand
        return bool(
            {
                EQUAL: mine == operand,
                NOT_EQUAL: mine != operand,
                LESS: mine < operand,
                GREATER: mine > operand,
            }[condition.operator]
        )

    def perform(self, operation: Any, revision: int, changed: set[str]) -> Any:
        now = revision if changed else self.revision
        match operation:
            case KvSet(key=key, value=value):
                if not operation.allow_overwrite and key in self.keys:
                    return None
                return KvRevision(revision) if self.put(key, value, revision, changed) else None
            case KvIncrement(key=key):
                old = self.keys[key].value if key in self.keys else b"0"
                if old in (b"", b"x"):
                    return None
                total = int(old) + operation.amount
                done = self.put(key, str(total).encode(), revision, changed)
                return KvIncremented(total, revision) if done else None
            case KvDelete(key=key):
                if any(one.startswith(key) if operation.is_prefix else one == key for one in changed):
                    return None
                gone = [
                    one for one in self.keys if (one.startswith(key) if operation.is_prefix else one == key)
                ]
                for one in gone:
                    del self.keys[one]
                changed.update(gone)
                return KvDeleted(len(gone), revision if changed else self.revision)
            case KvGetMany():
                return KvRead(tuple(self.keys[key] for key in operation.keys if key in self.keys), now)
            case KvList():
                names = sorted(key for key in self.keys if key.startswith(operation.prefix))
                return KvRead(tuple(self.keys[key] for key in names), now)

    def put(self, key: str, value: bytes, revision: int, changed: set[str]) -> bool:
        if key in changed:
            return False
        changed.add(key)
        old = self.keys.get(key)
        self.keys[key] = KeyValue(key, value, old.create_revision if old else revision, revision)
        return True


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(CONDITIONS, max_size=2), OPERATIONS, OPERATIONS, st.booleans(), st.booleans()),
        max_size=8,
    )
)
def test_a_history_of_transactions_is_the_models(history: list[tuple[Any, ...]]) -> None:
    d, model = joined(), Model()
    watch = d.watch("")
    d.apply(watch)
    watched: dict[str, KeyValue] = {}
    for compare, then, otherwise, retried, restarted in history:
        event = d.transaction(compare, then, otherwise)
        revision = model.revision
        answer, expected = d.answer(event), model.transact(event)
        if expected is None:
            assert isinstance(answer, CoreError)
        else:
            assert answer == expected
        for push in d.watched(watch.token):
            assert push.revision == model.revision == revision + 1
            for change in push.events:
                assert change.kv.mod_revision == push.revision
                if change.deleted:
                    del watched[change.kv.key]
                else:
                    watched[change.kv.key] = change.kv
        assert watched == model.keys
        if restarted:
            d.restart()
            watch = d.watch("", model.revision + 1)
            d.apply(watch)
        if retried and expected is not None and model.revision > revision:
            assert d.answer(dataclasses.replace(event, token=d.token())) == expected
        assert state(d) == tuple(model.keys[key] for key in sorted(model.keys))
