"""Servers whose store lacks what clients were told: it is empty, an older copy, or another cluster's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.server.core.driving import Driver

from dmesh_server.core.effects import Answer, Attached, KvRead, KvRevision, Record, Registered
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import SeenState

Durable = dict[tuple[str, str, str], Record]


def joined(tasks: int = 2, members: int = 2) -> Driver:
    d = Driver(tasks)
    d.join(*range(members))
    return d


def seen(d: Driver, revision: int = 0) -> SeenState:
    """What the first worker knows now."""
    known = d.accepted(d.register(0), Registered)
    return SeenState(known.store, known.cluster_incarnation, d.core.server_incarnation, known.epoch, revision)


def attach(d: Driver, last: SeenState | None, index: int = 0) -> Answer:
    return d.answer(replace(d.attach(index), seen=last))


def refusal(answer: Answer) -> ErrorKind:
    assert isinstance(answer, CoreError), answer
    return answer.kind


def register(d: Driver, last: SeenState | None, index: int = 0, **changes: Any) -> Answer:
    return d.answer(replace(d.register(index), seen=last, **changes))


def begin_with(d: Driver, durable: Durable) -> None:
    d.durable = dict(durable)
    d.restart()


def test_a_store_keeps_its_identity_through_restarts() -> None:
    d = joined()
    revision = d.accepted(d.set("a"), KvRevision).revision
    last = seen(d, revision)
    assert last.store != 0
    d.restart()
    assert isinstance(attach(d, last), Attached)
    assert isinstance(attach(d, None, 1), Attached)
    assert seen(d).store == last.store
    assert d.answer(replace(d.watch(), seen=last)) == KvRevision(revision)


def test_an_empty_store_has_the_client_register_and_goes_on_behind_what_it_was_told() -> None:
    d = joined()
    for _ in range(5):
        d.apply(d.set("a"))
    last = replace(seen(d, 5), epoch=40)
    begin_with(d, {})
    assert refusal(attach(d, last)) is ErrorKind.NOT_REGISTERED
    answer = register(d, last)
    assert isinstance(answer, Registered)
    assert answer.store not in (0, last.store)
    assert answer.cluster_incarnation != last.cluster_incarnation
    assert answer.epoch > 40
    assert d.accepted(d.list(), KvRead) == KvRead((), 5)
    assert isinstance(register(d, last, 1), Registered), "the others follow"
    assert d.accepted(d.set("a"), KvRevision).revision == 6
    d.restart()
    assert seen(d).store == answer.store
    assert d.accepted(d.list(), KvRead).revision == 6


def test_an_older_store_gets_another_identity_and_all_register_again() -> None:
    d = joined()
    d.apply(d.set("a"))
    copy = dict(d.durable)
    second = replace(seen(d, 1))
    last = replace(seen(d, d.accepted(d.set("a", b"new"), KvRevision).revision))
    begin_with(d, copy)
    assert isinstance(attach(d, second, 1), Attached), "it was told nothing that is missing"
    session = d.sessions[1]
    assert refusal(attach(d, last)) is ErrorKind.NOT_REGISTERED
    assert refusal(d.answer(replace(d.watch(), seen=last))) is ErrorKind.NOT_REGISTERED
    answer = register(d, last)
    assert d.ends(session) == [ErrorKind.NOT_REGISTERED]
    assert isinstance(answer, Registered)
    assert answer.cluster_incarnation == last.cluster_incarnation
    assert answer.store != last.store
    assert answer.epoch > last.epoch
    assert refusal(attach(d, second, 1)) is ErrorKind.NOT_REGISTERED
    again = register(d, second, 1)
    assert isinstance(again, Registered)
    assert again.store == answer.store, "once is enough"
    # What it was told by this server it cannot have lost.
    assert isinstance(attach(d, seen(d, 1 << 40)), Attached)
    d.restart()
    assert seen(d).store == answer.store


def test_an_epoch_that_is_missing_shows_an_older_store() -> None:
    d = joined()
    copy = dict(d.durable)
    d.lose(1)
    last = seen(d)
    begin_with(d, copy)
    assert refusal(attach(d, last)) is ErrorKind.NOT_REGISTERED
    answer = register(d, last)
    assert isinstance(answer, Registered)
    assert answer.epoch > last.epoch


def test_the_store_of_another_cluster_has_no_place_for_the_client() -> None:
    mine, theirs = joined(3), joined(3)
    last = replace(seen(mine), store=12345, cluster_incarnation=678)
    theirs.restart()
    assert refusal(attach(theirs, last)) is ErrorKind.NOT_REGISTERED
    for index in (0, 2):
        answer = register(theirs, last, index, caller=theirs.caller(index, 77))
        assert isinstance(answer, CoreError)
        assert answer.kind is ErrorKind.STORE_LOST
        assert "another cluster" in answer.message
    # When all of its members are gone, there is nothing to mix with.
    theirs.advance(1000)
    assert isinstance(register(theirs, last, 0, caller=theirs.caller(0, 77)), Registered)


def test_a_place_that_another_process_has_in_an_older_store_is_told_as_such() -> None:
    d = joined()
    copy = dict(d.durable)
    last = replace(seen(d), epoch=90)
    begin_with(d, copy)
    answer = register(d, last, 0, caller=d.caller(0, 77))
    assert isinstance(answer, CoreError)
    assert answer.kind is ErrorKind.STORE_LOST
    assert "is held by another process" in answer.message
