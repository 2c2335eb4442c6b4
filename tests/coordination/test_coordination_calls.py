"""Bounds on calls outside of a session, and what changes that others make mean for owned keys."""

from __future__ import annotations

import threading

import pytest

from dmesh.coordination import Delete, Get, Increment, Put
from dmesh.coordination.calls import _MOST_CHANGES
from dmesh.coordination.members import MemberState
from dmesh.errors import LimitExceededError
from dmesh.v1.coordination_pb2 import CancelBarrierRequest
from dmesh.v1.key_value_pb2 import GrantLeaseRequest
from dmesh.v1.progress_pb2 import ListClustersRequest, ListClustersResponse

SECONDS = 60.0


def test_no_more_calls_are_unanswered_than_the_server_keeps_answers(
    server, limits, join, background, monkeypatch
) -> None:
    assert limits.replies_per_member == _MOST_CHANGES
    agent = join(server.address, 0, 1)
    attempt, go, begun = agent._link.attempt, threading.Event(), threading.Semaphore(0)

    def slow(*arguments):
        begun.release()
        assert go.wait(SECONDS)
        return attempt(*arguments)

    monkeypatch.setattr(agent._link, "attempt", slow)
    calls = [background(agent.cancel_barrier, f"b{number}") for number in range(_MOST_CHANGES)]
    for _ in calls:
        assert begun.acquire(timeout=SECONDS)
    with pytest.raises(LimitExceededError, match=r"64 calls .* cancelling barrier 'one more'"):
        agent.cancel_barrier("one more")
    agent.key_value_set("k", "v")  # within the session
    go.set()
    for call in calls:
        call.exception(SECONDS)  # there is no such barrier
    with pytest.raises(Exception, match="one more") as refused:
        agent.cancel_barrier("one more")
    assert not isinstance(refused.value, LimitExceededError)


def test_calls_that_the_server_may_carry_out_twice_are_not_bounded(
    server, join, background, monkeypatch
) -> None:
    agent, other = join(server.address, 0, 2), join(server.address, 1, 2)
    attempt, go, begun = agent._link.attempt, threading.Event(), threading.Semaphore(0)

    def slow(method, request, *rest):
        if isinstance(request, CancelBarrierRequest | GrantLeaseRequest):
            begun.release()
            assert go.wait(SECONDS)
        return attempt(method, request, *rest)

    monkeypatch.setattr(agent._link, "attempt", slow)
    cancelled = [background(agent.cancel_barrier, f"b{number}") for number in range(_MOST_CHANGES)]
    leases = [background(agent.lease, SECONDS) for _ in range(_MOST_CHANGES + 1)]
    for _ in (*cancelled, *leases):
        assert begun.acquire(timeout=SECONDS)
    go.set()
    for lease in leases:
        lease.result(SECONDS).revoke()
    go.clear()
    for call in cancelled:
        call.exception(SECONDS)
    cancelled = [background(agent.cancel_barrier, f"b{number}") for number in range(_MOST_CHANGES)]
    for _ in cancelled:
        assert begun.acquire(timeout=SECONDS)
    agent.leave()
    go.set()
    assert other.member(0).state is MemberState.LEFT


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda agent: agent.key_value_increment("a/1"), {"a/2", "b"}),
        (lambda agent: agent.key_value_compare_and_set("a/1", "1", "2"), {"a/2", "b"}),
        (lambda agent: agent.key_value_compare_and_set("a/1", "x", "2"), {"a/1", "a/2", "b"}),
        (lambda agent: agent.key_value_delete("a/", is_prefix=True), {"b"}),
        (lambda agent: agent.transaction((), [Put("a/1", "2"), Increment("b"), Get("a/2")]), {"a/2"}),
        (lambda agent: agent.transaction(then=iter([Delete("a/", is_prefix=True)])), {"b"}),
    ],
)
def test_a_key_that_is_changed_otherwise_is_owned_no_longer(server, join, change, left) -> None:
    agent = join(server.address, 0, 1)
    for key in ("a/1", "a/2", "b"):
        agent.key_value_set(key, "1", owned=True)
    change(agent)
    assert set(agent._owned._values) == left


def test_a_call_made_when_the_program_is_over_is_answered(server, spawn) -> None:
    """Python 3.12 and later start no thread any more, and none of gRPC's is there to be used."""
    child = spawn(
        """
        import atexit
        from dmesh.v1.progress_pb2 import ListClustersRequest
        link = agent._link

        def ask():
            for _ in range(2):
                say(str(link.attempt(link.coordination.ListClusters, ListClustersRequest(), 30.0)))
            agent.close()
            say("closed")

        atexit.register(ask)
        """,
        server.address,
    )
    assert child.wait(SECONDS) == 0
    assert "code=" not in child.out
    assert child.out.endswith("closed")
    assert child.err == ""


def test_a_call_that_grpc_cannot_begin_says_why(server, join, monkeypatch) -> None:
    agent = join(server.address)
    link = agent._link

    def start(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(type(link.coordination.ListClusters), "future", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            agent.cancel_barrier("b")
    agent.key_value_set("k", "v")


def test_calls_go_on_when_grpc_could_not_start_its_thread_for_one(server, join, monkeypatch) -> None:
    """Its channel counts that call as one that has a thread, and starts none for later calls."""
    link = join(server.address, start=False)._link

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def ask() -> object:
        return link.attempt(link.coordination.ListClusters, ListClustersRequest(), SECONDS)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            ask()
    assert isinstance(ask(), ListClustersResponse)
