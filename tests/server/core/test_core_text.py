"""The core itself refuses texts that cannot be encoded, and names with NUL characters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from tests.server.core.driving import OBSERVER, Driver, worker

from dmesh_server.core.effects import Reply
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    DeclareCluster,
    DropKey,
    Evict,
    GetBarrier,
    GetMember,
    GrantLease,
    KvWatch,
    Request,
    RestoreKeys,
    RevokeLease,
    StopBarrier,
    Tick,
    WithdrawCluster,
)
from dmesh_server.core.model import Condition, ConditionOperator, ConditionTarget, PassedBarrier, Process

REQUESTS: dict[str, Callable[[Driver], Request]] = {
    "register": lambda d: d.register(
        2, process=Process("h", 1, "boot", "p.py", "0.1", "3.11", pid_namespace="ns")
    ),
    "attach": lambda d: d.attach(0),
    "leave": lambda d: d.leave(0, "why"),
    "error": lambda d: d.report(0),
    "passed barriers": lambda d: d.present(0, (PassedBarrier("b", 0, (worker(0),)),)),
    "cancelled barrier": lambda d: d.cancel(0),
    "set": lambda d: d.set("k"),
    "get": lambda d: d.get("k"),
    "get many": lambda d: d.get_many("k"),
    "list": lambda d: d.list("p"),
    "delete": lambda d: d.delete("k"),
    "delete a prefix": lambda d: d.delete("k", prefix=True),
    "increment": lambda d: d.increment("k"),
    "transaction": lambda d: d.transaction(
        [Condition("c", ConditionTarget.MOD_REVISION, ConditionOperator.EQUAL, 0)], [d.set("k")]
    ),
    "watch": lambda d: KvWatch(d.token(), d.caller(0), "p", 0),
    "grant": lambda d: GrantLease(d.token(), d.caller(0), "g", 5, 60.0),
    "revoke": lambda d: RevokeLease(d.token(), d.caller(0), "v", 5),
    "member": lambda d: GetMember(d.token(), d.caller(0), worker(1)),
    "barrier": lambda d: GetBarrier(d.token(), d.caller(0), "b"),
    "declare": lambda d: DeclareCluster(d.token(), OBSERVER, "me", (("worker", 2),), d.register(0).settings),
    "withdraw": lambda d: WithdrawCluster(d.token(), OBSERVER, "me"),
    "stop a barrier": lambda d: StopBarrier(d.token(), OBSERVER, "me", "b", 0),
    "evict": lambda d: Evict(d.token(), OBSERVER, "me", worker(1), 1001, "why"),
    "drop a key": lambda d: DropKey(d.token(), OBSERVER, "me", "k", 1),
    "restore": lambda d: RestoreKeys(d.token(), OBSERVER, "me", {"k": b"v"}, merge=True),
}

FREE = {"leave.reason", "error.message", "evict.reason"}
"""Texts for people, in which NUL characters harm nobody."""

UNUSED = (
    "register.owner",
    "grant.request_id",
    "revoke.request_id",
    "transaction.then.caller",
    "transaction.then.request_id",
)
"""Not a client's, or without a meaning: a lease is named by its number, an operation is its transaction's."""

UNKNOWN = {ErrorKind.UNKNOWN_TASK, ErrorKind.NOT_REGISTERED, ErrorKind.SPEC_MISMATCH}
"""Refusals of a text that is looked up in a table of texts that were checked when they came in."""


def variants(value: Any, bad: Callable[[str], str], path: str) -> Iterator[tuple[str, Any]]:
    """Yields a value with each of its texts replaced, in turn."""
    if isinstance(value, str):
        yield path, bad(value)
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            for name, new in variants(part, bad, path):
                yield name, (*value[:index], new, *value[index + 1 :])
    elif isinstance(value, dict):
        for key, kept in value.items():
            yield path, {bad(key): kept}
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            old = getattr(value, field.name)
            for name, new in variants(old, bad, f"{path}.{field.name}"):
                yield name, replace(value, **{field.name: new})


def refusal(d: Driver, request: Request) -> CoreError:
    """Returns the refusal of a request; that of a restore comes when its keys are prepared."""
    d.apply(request)
    while request.token not in d.replies():
        due = d.core.next_deadline()
        assert isinstance(request, RestoreKeys), "it was not answered"
        assert due is not None
        assert due <= d.now
        d.apply(Tick())
    error = d.replies()[request.token]
    assert isinstance(error, CoreError), error
    return error


@pytest.mark.parametrize("bad", ["\ud800", "\0"], ids=["surrogate", "NUL"])
@pytest.mark.parametrize("what", REQUESTS)
def test_no_text_of_a_request_is_taken(what: str, bad: str) -> None:
    d = Driver(3)
    d.join(0, 1)
    d.apply(d.set("k"))
    d.enter(0)
    before, durable = d.state(), dict(d.durable)
    tried = 0
    for path, request in variants(REQUESTS[what](d), lambda text: f"{text}{bad}", what):
        if (bad == "\0" and path in FREE) or path.startswith(UNUSED):
            continue
        tried += 1
        error = refusal(d, request)
        looked_up = path.endswith((".cluster", ".job")) or path.startswith("register.jobs")
        assert error.kind is ErrorKind.INVALID_ARGUMENT or (looked_up and error.kind in UNKNOWN), path
        assert bad not in error.message
        error.message.encode()
        assert [type(effect) for effect in d.effects] == [Reply], path
        assert (d.state(), d.durable) == (before, durable), path
    assert tried >= 1


def test_the_first_registration_is_checked_like_the_next_ones() -> None:
    for bad in ("\ud800", "\0"):
        d = Driver()
        for path, request in variants(d.register(0), lambda text, bad=bad: f"{text}{bad}", "register"):
            if path in UNUSED:
                continue
            assert d.refused(request).kind in (ErrorKind.INVALID_ARGUMENT, ErrorKind.UNKNOWN_TASK), path
        assert not d.core.clusters()
