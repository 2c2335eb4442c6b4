"""Who is told that the coordinator has lost its store, and which keys are set again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dmesh.coordination.store_loss import LossWitness, OwnedKeys
from dmesh.errors import LimitExceededError, StoreLostError


class Session:
    """A session that loses the store when it is told to."""

    store_losses = 0
    store_loss = "the store was lost."

    def check(self) -> None:
        pass


def test_every_thread_is_told_once() -> None:
    session = Session()
    witness = LossWitness(session)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for thread in (first, second):
            assert thread.submit(witness.begin).result() == 0
        session.store_losses = 1
        for thread in (first, second):
            with pytest.raises(StoreLostError, match="the store was lost"):
                thread.submit(witness.begin).result()
            assert thread.submit(witness.begin).result() == 1
    # Those that begin later were never told anything by the store that is gone, and somebody knows.
    assert witness.begin() == 1


def test_a_new_thread_is_told_if_nobody_was() -> None:
    session = Session()
    witness = LossWitness(session)
    session.store_losses = 2
    with pytest.raises(StoreLostError):
        witness.begin()
    assert witness.begin() == 2


def test_a_call_under_way_is_told_and_the_same_thread_not_twice() -> None:
    session = Session()
    witness = LossWitness(session)
    begun = witness.begin()
    witness.check(begun)
    session.store_losses = 1
    with pytest.raises(StoreLostError):
        witness.check(begun)
    assert witness.begin() == 1


def test_owned_keys_are_set_again_before_anybody_is_told() -> None:
    session, found, go = Session(), {}, threading.Event()

    def put(key: str, value: bytes) -> None:
        assert go.wait(60)
        found[key] = value

    owned = OwnedKeys(session, put)
    witness = LossWitness(session, owned.wait)
    for key in ("a/1", "a/2", "b", "c"):
        owned.keep(key, b"old")
    owned.keep("b", b"new")
    owned.forget("a/", is_prefix=True)
    session.store_losses = 1
    owned.store_lost()
    owned.store_lost()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(witness.begin)
        assert not waiting.done()
        go.set()
        with pytest.raises(StoreLostError, match="2 keys that this process owns were set again"):
            waiting.result(60)
    assert found == {"b": b"new", "c": b"old"}


def test_a_loss_meanwhile_has_all_keys_set_again() -> None:
    session, calls = Session(), []

    def put(key: str, value: bytes) -> None:
        calls.append(key)
        if len(calls) == 2:
            session.store_losses = 2
            owned.store_lost()
            raise StoreLostError("again")

    owned = OwnedKeys(session, put)
    owned.keep("a", b"")
    owned.keep("b", b"")
    session.store_losses = 1
    owned.store_lost()
    assert "2 keys" in owned.wait(2)
    assert calls == ["a", "b", "a", "b"]


def test_a_key_that_cannot_be_set_again_is_told() -> None:
    def put(key: str, value: bytes) -> None:
        if key == "a":
            raise LimitExceededError("the store is full")

    session = Session()
    owned = OwnedKeys(session, put)
    owned.keep("a", b"")
    owned.keep("b", b"")
    session.store_losses = 1
    owned.store_lost()
    told = owned.wait(1)
    assert told == " Of 2 keys that this process owns 1 were set again: the store is full."
