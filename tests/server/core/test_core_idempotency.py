"""A retried request has one effect and the same answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.server.core.driving import Driver, swapped

from dmesh_server.core.effects import Done, KvDeleted, KvRevision, KvTransacted
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.model import Limits

MUTATIONS: dict[str, Callable[[Driver], Any]] = {
    "set": lambda d: d.set("new", b"1", overwrite=False),
    "overwrite": lambda d: d.set("old", b"1"),
    "increment": lambda d: d.increment("n", 3),
    "compare_and_set": lambda d: d.compare_and_set("old", b"v", b"w"),
    "create": lambda d: d.compare_and_set("new", None, b"w"),
    "delete": lambda d: d.delete("old"),
    "delete prefix": lambda d: d.delete("", prefix=True),
    "cancel": lambda d: d.cancel(0, "b"),
    "report": lambda d: d.report(0),
    "leave": lambda d: d.leave(0),
}


def joined(limits: Limits | None = None) -> Driver:
    d = Driver(2, limits)
    d.join(0, 1)
    d.apply(d.set("old", b"v", index=1))
    d.enter(0, "b")
    return d


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_retry_is_answered_alike_and_changes_nothing(name: str, restart: bool) -> None:
    d = joined()
    mutation = MUTATIONS[name](d)
    answer = d.answer(mutation)
    if restart:
        d.restart()
    before = dict(d.durable)
    retry = dataclasses.replace(mutation, token=d.token())
    assert d.answer(retry) == answer
    assert d.durable == before
    assert len(d.effects) == 1


def test_answers_are_remembered_through_later_changes() -> None:
    d = joined()
    mutation = d.compare_and_set("old", b"v", b"w")
    answer = d.accepted(mutation, KvTransacted)
    assert answer == swapped(2)
    d.apply(d.set("old", b"other"))
    assert d.answer(mutation) == answer


def test_calls_without_an_effect_are_judged_anew() -> None:
    d = joined()
    refused = d.set("old", b"w", overwrite=False)
    assert d.refused(refused).kind is ErrorKind.KEY_EXISTS
    nothing = d.delete("none")
    assert d.accepted(nothing, KvDeleted).deleted == 0
    unequal = d.compare_and_set("old", b"w", b"x")
    assert not d.accepted(unequal, KvTransacted).succeeded
    d.apply(d.delete("old"))
    d.apply(d.set("none"))
    d.accepted(refused, KvRevision)
    assert d.accepted(nothing, KvDeleted).deleted == 1
    assert d.accepted(unequal, KvTransacted).succeeded


def test_request_ids_belong_to_one_process_and_one_call() -> None:
    d = joined()
    mutation = d.set("a", b"1")
    d.accepted(mutation, KvRevision)
    other = dataclasses.replace(mutation, caller=d.caller(1), value=b"2")
    assert d.accepted(other, KvRevision) == KvRevision(3), "another's id is another request"
    mixed = dataclasses.replace(d.increment("a"), request_id=mutation.request_id)
    error = d.refused(mixed)
    assert (error.kind, "was used for KvSet" in error.message) == (ErrorKind.INVALID_ARGUMENT, True)
    for bad in ("", "x" * 65, "a\nb"):
        assert d.refused(dataclasses.replace(mutation, request_id=bad)).kind is ErrorKind.INVALID_ARGUMENT


@pytest.mark.parametrize("restart", [False, True])
def test_a_bounded_number_of_answers_is_remembered_per_member(restart: bool) -> None:
    d = joined(Limits(replies_per_member=3))
    mutations = [d.set(f"k{number}", overwrite=False) for number in range(5)]
    answers = [d.answer(mutation) for mutation in mutations]
    assert len([record for record in d.durable.values() if record.kind == "reply"]) == 3 + 1
    if restart:
        d.restart()
    assert [d.answer(mutation) for mutation in mutations[2:]] == answers[2:]
    assert d.refused(mutations[1]).kind is ErrorKind.KEY_EXISTS


def test_the_departed_are_fenced_but_their_retries_answered() -> None:
    d = joined()
    done, late = d.set("a"), d.set("b")
    answer = d.answer(done)
    d.lose(0)
    assert d.answer(done) == answer
    assert d.refused(late).kind is ErrorKind.FENCED
    d.accepted(d.leave(0), Done)
    d.apply(d.leave(1))
    assert d.answer(done) == answer, "until the next generation"
    d.apply(d.register(0, 999))
    assert d.refused(done).kind is ErrorKind.FENCED
