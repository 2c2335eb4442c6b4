"""A task slot's credential: whoever only knows the incarnation cannot act for the task or change anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.server.core.driving import Driver, worker

from dmesh_server.core.effects import Attached, Done, KvRead, Registered, Reply
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    GetBarrier,
    GetClusterState,
    GetMember,
    GrantLease,
    KvWatch,
    RenewLease,
    Request,
    RevokeLease,
)
from dmesh_server.core.model import ClusterSettings, RestartPolicy, SeenState

PROOF = b"p" * 32


class Proving(Driver):
    """A driver whose workers register with a proof."""

    def caller(self, index: int, incarnation: int | None = None):  # type: ignore[no-untyped-def]
        return replace(super().caller(index, incarnation), proof=PROOF)


REQUESTS: dict[str, Callable[[Proving], Request]] = {
    "retried registration": lambda d: d.register(0),
    "registration": lambda d: d.register(0, request_id="new"),
    "registration from another store": lambda d: d.register(0, seen=SeenState(9, 9, 9, 99, 99)),
    "registration from a later state": lambda d: d.register(
        0, seen=SeenState(d.core._store.value, 9, 9, 99, 99)
    ),
    "attach": lambda d: d.attach(0),
    "leave": lambda d: d.leave(0),
    "error": lambda d: d.report(0),
    "passed barriers": lambda d: d.present(0, ()),
    "cancelled barrier": lambda d: d.cancel(0),
    "set": lambda d: d.set("k"),
    "get": lambda d: d.get("k"),
    "get many": lambda d: d.get_many("k"),
    "list": lambda d: d.list(),
    "delete": lambda d: d.delete("k"),
    "increment": lambda d: d.increment("k"),
    "transaction": lambda d: d.transaction(then=(d.set("k"),)),
    "watch": lambda d: KvWatch(d.token(), d.caller(0), "", 0),
    "grant": lambda d: GrantLease(d.token(), d.caller(0), "g", 5, 60.0),
    "renew": lambda d: RenewLease(d.token(), d.caller(0), 5),
    "revoke": lambda d: RevokeLease(d.token(), d.caller(0), "v", 5),
    "members": lambda d: GetClusterState(d.token(), d.caller(0)),
    "member": lambda d: GetMember(d.token(), d.caller(0), worker(1)),
    "barrier": lambda d: GetBarrier(d.token(), d.caller(0), "b"),
}


@pytest.mark.parametrize("proof", [b"", b"q" * 32, PROOF[:-1]], ids=["none", "another", "part"])
@pytest.mark.parametrize("what", REQUESTS)
def test_an_incarnation_alone_is_refused_and_changes_nothing(what: str, proof: bytes) -> None:
    d = Proving()
    d.join(0, 1)
    d.enter(0)
    d.advance(1.0)
    before, due, durable = d.state(), d.core.next_deadline(), dict(d.durable)
    request = REQUESTS[what](d)
    error = d.refused(replace(request, caller=replace(request.caller, proof=proof)))
    assert error.kind is ErrorKind.PERMISSION_DENIED
    assert "/job:worker/task:0 of cluster 'c'" in error.message
    assert f"its credential is {'wrong' if proof else 'missing'}" in error.message
    assert [type(effect) for effect in d.effects] == [Reply]
    assert (d.state(), d.core.next_deadline(), d.durable) == (before, due, durable)
    effects = d.apply(request)
    assert not [e for e in effects if isinstance(e, Reply) and _denied(e)], "the process itself is accepted"


def _denied(reply: Reply) -> bool:
    return isinstance(reply.answer, CoreError) and reply.answer.kind is ErrorKind.PERMISSION_DENIED


def test_the_credential_is_asked_for_after_a_restart_and_a_departure() -> None:
    d = Proving()
    d.join(0, 1)
    d.restart()
    stranger = replace(d.caller(0), proof=b"")
    assert d.refused(replace(d.attach(0), caller=stranger)).kind is ErrorKind.PERMISSION_DENIED
    d.accepted(d.attach(0), Attached)
    d.accepted(d.leave(0), Done)
    # The answer to a registration has the secret of the cluster's peers.
    assert d.refused(d.register(0, caller=stranger)).kind is ErrorKind.PERMISSION_DENIED
    d.accepted(d.register(0), Registered)


def test_an_incarnation_is_no_key_to_another_slot_either() -> None:
    """Whoever registers elsewhere with a member's incarnation would own its lease, and the keys of that."""
    d = Proving(3)
    d.join(0)
    for index in (2, -1):
        caller = replace(d.caller(index, 1000), proof=b"q" * 32)
        assert d.refused(d.register(index, 1000, caller=caller)).kind is ErrorKind.PERMISSION_DENIED


def test_another_process_takes_the_slot_of_a_lost_one_with_a_credential_of_its_own() -> None:
    d = Proving()
    settings = ClusterSettings(RestartPolicy.REJOIN)
    d.apply(d.register(0, settings=settings))
    d.apply(d.attach(0))
    d.join(1)
    successor = replace(d.caller(0, 999), proof=b"s" * 32)
    assert d.refused(d.register(0, caller=successor)).kind is ErrorKind.TASK_TAKEN
    d.lose(0)
    assert d.accepted(d.register(0, caller=successor, request_id="r"), Registered).rejoined
    d.accepted(replace(d.list(), caller=successor), KvRead)
    assert d.refused(d.list()).kind is ErrorKind.FENCED


def test_a_member_without_a_credential_is_served() -> None:
    """Clients of versions 1 to 3 have none."""
    d = Driver()
    d.join(0, 1)
    d.restart()
    d.accepted(d.attach(0), Attached)


def test_neither_an_event_nor_the_state_shows_a_proof() -> None:
    d = Proving()
    d.join(0, 1)
    shown = [repr(d.register(0)), repr(d.attach(0)), repr(d.caller(0)), repr(d.state()), repr(d.effects)]
    shown += [repr(slot) for slot in d.core._clusters["c"].roster.slots.values()]
    assert not [text for text in shown if "pppp" in text or PROOF.hex() in text]
