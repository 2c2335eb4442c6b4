"""Keys and values, and watching them, against a real server."""

from __future__ import annotations

import itertools
import re
import threading
from concurrent import futures

import grpc
import pytest

from dmesh import coordination
from dmesh.coordination import Condition, Delete, Get, Increment, Put
from dmesh.coordination.agent_source import AgentSource
from dmesh.coordination.retry import Patience
from dmesh.coordination.watches import KeyEvent
from dmesh.errors import (
    ConfigurationError,
    CoordinatorUnavailableError,
    KeyExistsError,
    KeyNotFoundError,
    KeyTypeError,
    KeyWaitTimeoutError,
    LimitExceededError,
    NotInitializedError,
    WatchCompactedError,
)
from dmesh.runtime import context
from dmesh.runtime.context import Context
from dmesh.v1 import coordination_pb2
from dmesh.v1.coordination_pb2_grpc import (
    CoordinationServiceServicer,
    add_CoordinationServiceServicer_to_server,
)
from dmesh_server.core.model import Limits


@pytest.fixture
def agent(server, join):
    return join(server.address, 0, 1)


@pytest.fixture
def pair(server, join):
    return join(server.address, 0), join(server.address, 1)


def test_values_come_back_as_bytes_or_as_text(agent) -> None:
    agent.key_value_set("text", "Käse")
    agent.key_value_set("bytes", b"\x00\xff")
    assert agent.key_value_get("text") == "Käse".encode()
    assert agent.key_value_get("text", encoding="utf-8") == "Käse"
    assert agent.key_value_get("bytes") == b"\x00\xff"
    assert agent.key_value_try_get("text", encoding="utf-8") == "Käse"
    assert agent.key_value_try_get("none") is None
    with pytest.raises(ConfigurationError, match=r"'bytes' \(2 bytes\) is not utf-8 text"):
        agent.key_value_get("bytes", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="unknown encoding 'nonsense'"):
        agent.key_value_get("text", encoding="nonsense")


def test_overwriting_must_be_allowed(agent) -> None:
    first = agent.key_value_set("k", "1")
    with pytest.raises(KeyExistsError, match="'k'"):
        agent.key_value_set("k", "2")
    assert agent.key_value_set("k", "2", allow_overwrite=True) > first
    assert agent.key_value_get("k") == b"2"


def test_a_get_waits_for_the_key(pair, background) -> None:
    waiting = background(pair[1].key_value_get, "k", 60)
    pair[0].key_value_set("k", "v")
    assert waiting.result(60) == b"v"


def test_a_get_without_waiting_and_one_that_waits_in_vain(agent) -> None:
    with pytest.raises(KeyNotFoundError, match="'k'"):
        agent.key_value_get("k", timeout=0)
    with pytest.raises(KeyWaitTimeoutError, match="'k'"):
        agent.key_value_get("k", timeout=0.05)


def test_who_waits_for_a_key_is_told_so(server, join, background, quick) -> None:
    said: list[str] = []
    enough = threading.Event()
    agent = join(
        server.address, 0, 1, patience=quick, announce=lambda message: (said.append(message), enough.set())
    )
    waiting = background(agent.key_value_get, "config", 300)
    assert enough.wait(60)
    agent.key_value_set("config", b"")
    assert waiting.result(60) == b""
    assert re.fullmatch(r"still waiting for key 'config', for \d+ of 300 s", said[0])


def test_reading_many(agent) -> None:
    for number in range(5):
        agent.key_value_set(f"a/{number}", str(number))
    agent.key_value_set("b", "x")
    many = agent.key_value_get_many(["a/3", "none", "a/1"])
    assert list(many.items()) == [("a/3", b"3"), ("a/1", b"1")]
    assert many.revision == 6
    assert many.text() == {"a/3": "3", "a/1": "1"}
    listed = agent.key_value_list("a/")
    assert list(listed) == [f"a/{number}" for number in range(5)]
    assert listed.revision == 6
    assert len(agent.key_value_list("")) == 6
    assert agent.key_value_list("c") == {}


def test_deleting(agent) -> None:
    for key in ("a/1", "a/2", "b"):
        agent.key_value_set(key, "x")
    assert agent.key_value_delete("a/1") == 1
    assert agent.key_value_delete("a/1") == 0
    assert agent.key_value_delete("a/", is_prefix=True) == 1
    assert list(agent.key_value_list("")) == ["b"]


def test_incrementing(pair, background) -> None:
    def count(agent) -> None:
        for _ in range(50):
            agent.key_value_increment("n")

    for future in [background(count, agent) for agent in pair]:
        future.result(60)
    assert pair[0].key_value_get("n") == b"100"
    assert pair[0].key_value_increment("n", -101) == -1
    pair[0].key_value_set("text", "x")
    with pytest.raises(KeyTypeError, match="'text'"):
        pair[0].key_value_increment("text")


def test_comparing_and_setting(agent) -> None:
    first = agent.key_value_compare_and_set("k", None, "1")
    assert first
    assert first.value == b"1"
    lost = agent.key_value_compare_and_set("k", None, "2")
    assert not lost
    assert lost.value == b"1"
    assert agent.key_value_compare_and_set("k", b"1", b"2").revision == 2
    assert not agent.key_value_compare_and_set("gone", "x", "y")
    assert agent.key_value_compare_and_set("gone", "x", "y").value is None


def test_a_transaction(agent) -> None:
    agent.key_value_set("jobs/waiting/7", "x")
    conditions = [Condition.exists("jobs/waiting/7"), Condition.absent("jobs/running/7")]
    operations = [
        Delete("jobs/waiting/7"), Put("jobs/running/7", "node3"), Increment("started", 2), Get("jobs/", True),
    ]  # fmt: skip
    moved = agent.transaction(conditions, operations, [Get("jobs/running/7"), Get("none")])
    assert moved
    assert moved.revision == 2
    assert moved.results == (1, 2, 2, {"jobs/running/7": b"node3"})
    again = agent.transaction(conditions, operations, [Get("jobs/running/7"), Get("none")])
    assert not again
    assert again.results == ({"jobs/running/7": b"node3"}, {})
    assert again.results[0].create_revisions == {"jobs/running/7": 2}
    assert again.revision == 2


def test_conditions_of_a_transaction(agent) -> None:
    agent.key_value_set("k", "a")
    agent.key_value_set("k", "b", allow_overwrite=True)
    for condition, holds in (
        (Condition.value("k", "==", "b"), True),
        (Condition.value("k", "!=", b"b"), False),
        (Condition.value("k", "<", "c"), True),
        (Condition.value("none", ">", ""), False),
        (Condition.revision("k", "==", 2), True),
        (Condition.revision("k", ">", 2), False),
        (Condition.create_revision("k", "<", 2), True),
        (Condition.absent("k"), False),
    ):
        assert agent.transaction([condition]).succeeded is holds, condition


def test_transactions_that_make_no_sense(agent) -> None:
    for arguments, error, match in (
        (([Condition.value("k", "=", "x")],), ConfigurationError, "operator"),
        (([Condition.value("k", "==", 7)],), KeyTypeError, "str or bytes"),
        (([Condition.revision("k", "==", "7")],), KeyTypeError, "integer"),
        ((["k"],), ConfigurationError, "conditions"),
        (((), [("k", "v")]), ConfigurationError, "Put, Delete"),
        (((), [Put("k", 7)]), KeyTypeError, "str or bytes"),
        (((), [Put("", "v")]), ConfigurationError, "key"),
        (((), [Increment("k", 1 << 63)]), ConfigurationError, "64 bits"),
        (((), [Put("k", "1"), Delete("k")]), ConfigurationError, "changed more than once"),
        (((), [Put("n", "x"), Increment("word")]), KeyTypeError, "word"),
    ):
        agent.key_value_set("word", "x", allow_overwrite=True)
        with pytest.raises(error, match=match):
            agent.transaction(*arguments)
    assert agent.key_value_list("") == {"word": b"x"}


def test_bad_input_is_refused_before_anything_is_sent(agent) -> None:
    for call, error, match in (
        (lambda: agent.key_value_set("", "v"), ConfigurationError, "key"),
        (lambda: agent.key_value_set(7, "v"), ConfigurationError, "key"),
        (lambda: agent.key_value_set("\ud800", "v"), ConfigurationError, "UTF-8"),
        (lambda: agent.key_value_set("k", "\ud800"), ConfigurationError, "UTF-8"),
        (lambda: agent.key_value_set("k", 7), KeyTypeError, "str or bytes, not int"),
        (lambda: agent.key_value_get("k", timeout=-1), ConfigurationError, "timeout"),
        (lambda: agent.key_value_get("k", timeout=float("nan")), ConfigurationError, "timeout"),
        (lambda: agent.key_value_get_many("abc"), ConfigurationError, "collection"),
        (lambda: agent.key_value_increment("k", 1.5), KeyTypeError, "integer"),
        (lambda: agent.key_value_increment("k", 1 << 63), ConfigurationError, "64 bits"),
        (lambda: agent.watch("", from_revision=0), ConfigurationError, "from_revision"),
    ):
        with pytest.raises(error, match=match):
            call()
    assert agent.key_value_list("") == {}


@pytest.mark.parametrize("limits", [Limits(max_value_bytes=100)])
def test_too_large_a_value_is_refused(agent) -> None:
    with pytest.raises(LimitExceededError, match="101 bytes"):
        agent.key_value_set("k", b"x" * 101)


def test_a_value_larger_than_a_message_is_refused(agent) -> None:
    with pytest.raises(LimitExceededError):
        agent.key_value_set("k", b"x" * (3 << 19))
    agent.key_value_set("k", b"x" * (1 << 20))


# Watching


def test_changes_come_in_order(pair) -> None:
    pair[0].key_value_set("before", "x")
    with pair[1].watch("a/") as watch:
        pair[0].key_value_set("a/1", "1")
        pair[0].key_value_set("b", "not watched")
        pair[0].key_value_set("a/1", "2", allow_overwrite=True)
        pair[0].key_value_set("a/2", "3")
        pair[0].key_value_delete("a/", is_prefix=True)
        events = list(itertools.islice(watch, 5))
    assert events == [
        KeyEvent("a/1", b"1", 2, 2),
        KeyEvent("a/1", b"2", 4, 2),
        KeyEvent("a/2", b"3", 5, 5),
        KeyEvent("a/1", None, 6, events[3].create_revision),
        KeyEvent("a/2", None, 6, events[4].create_revision),
    ]
    assert [event.deleted for event in events] == [False, False, False, True, True]
    assert events[0].text() == "1"
    assert events[4].text() is None
    assert list(watch) == []


def test_a_watch_may_start_in_the_past_or_after_a_read(agent) -> None:
    for number in range(4):
        agent.key_value_set(f"k{number}", str(number))
    with agent.watch("k", from_revision=2) as watch:
        assert [next(watch).revision for _ in range(3)] == [2, 3, 4]
        assert watch.next_revision == 5
    listed = agent.key_value_list("k")
    agent.key_value_set("k9", "9")
    with agent.watch("k", listed.revision + 1) as watch:
        assert next(watch).key == "k9"


def test_a_watch_is_closed_from_another_thread(agent, background) -> None:
    watch = agent.watch("k")
    consumed = background(list, watch)
    agent.key_value_set("k", "v")
    watch.close()
    assert len(consumed.result(60)) <= 1
    watch.close()


@pytest.mark.parametrize("limits", [Limits(watch_history=3)])
def test_a_past_that_is_forgotten_is_refused(agent) -> None:
    for number in range(6):
        agent.key_value_set(f"k{number}", "v")
    with pytest.raises(WatchCompactedError, match="revision"):
        agent.watch("k", from_revision=1)


def test_many_events_arrive_once_each(pair, background) -> None:
    count = 300
    with pair[1].watch("n") as watch:
        consumed = background(lambda: [next(watch) for _ in range(count)])
        for _ in range(count):
            pair[0].key_value_increment("n")
        events = consumed.result(60)
    assert [int(event.value) for event in events] == list(range(1, count + 1))
    assert len({event.revision for event in events}) == count


# Retries


class Flaky(CoordinationServiceServicer):
    """A coordinator whose first sessions break at an increment, before it is answered."""

    def __init__(self, drops: int, silent: bool) -> None:
        self.drops = drops
        self.silent = silent
        self.requests: list[str] = []

    def Register(self, request, context):
        return coordination_pb2.RegisterResponse(
            server_incarnation=1,
            cluster_incarnation=2,
            epoch=1,
            heartbeat_interval_ms=1000,
            lease_ms=60_000,
            settings=coordination_pb2.ClusterSettings(),
        )

    def Session(self, requests, context):
        assert next(requests).HasField("attach")
        yield coordination_pb2.SessionResponse(
            attached=coordination_pb2.Attached(server_incarnation=1, epoch=1)
        )
        for request in requests:
            if request.HasField("heartbeat"):
                ack = coordination_pb2.HeartbeatAck(sequence=request.heartbeat.sequence)
                yield coordination_pb2.SessionResponse(heartbeat_ack=ack)
            if request.HasField("key_value_call"):
                call = request.key_value_call
                self.requests.append(call.increment.request_id)
                if len(self.requests) <= self.drops:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "dropped")
                if not self.silent:
                    reply = coordination_pb2.KeyValueReply(id=call.id)
                    reply.increment.value = 1
                    yield coordination_pb2.SessionResponse(key_value_reply=reply)

    def Leave(self, request, context):
        return coordination_pb2.LeaveResponse()

    CancelBarrier = ReportError = GetClusterState = None


@pytest.fixture
def flaky():
    servers = []

    def make(drops: int = 0, silent: bool = False) -> tuple[Flaky, str]:
        flaky = Flaky(drops, silent)
        server = grpc.server(futures.ThreadPoolExecutor(4))
        add_CoordinationServiceServicer_to_server(flaky, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return flaky, f"127.0.0.1:{port}"

    yield make
    for server in servers:
        server.stop(0).wait()


def test_an_attempt_is_repeated_with_the_same_request_id(flaky, join) -> None:
    service, address = flaky(drops=3)
    agent = join(address, 0, 1)
    assert agent.key_value_increment("n") == 1
    assert agent.key_value_increment("n") == 1
    first, second = service.requests[:4], service.requests[4:]
    assert len(set(first)) == 1
    assert len(second) == 1
    assert second[0] != first[0]


def test_a_call_that_is_never_answered_is_given_up(flaky, join) -> None:
    _, address = flaky(silent=True)
    agent = join(address, 0, 1, patience=Patience(call=0.5))
    with pytest.raises(CoordinatorUnavailableError, match="whether that took effect is unknown"):
        agent.key_value_increment("n")


# The module's functions


@pytest.fixture
def initialized(agent):
    context.install(Context(0, AgentSource(agent)))
    yield
    context.clear()


def test_functions_act_on_the_current_session(initialized) -> None:
    coordination.key_value_set("k", "v")
    assert coordination.key_value_get("k", encoding="utf-8") == "v"
    assert coordination.key_value_get("k") == b"v"
    assert coordination.key_value_try_get("k") == b"v"
    assert coordination.key_value_try_get("none", encoding="utf-8") is None
    assert coordination.key_value_get_many(["k"]) == {"k": b"v"}
    assert coordination.key_value_list("") == {"k": b"v"}
    assert coordination.key_value_increment("n") == 1
    assert coordination.key_value_compare_and_set("k", "v", "w")
    assert coordination.transaction([Condition.exists("k")], [Put("t", "1")])
    with pytest.raises(ConfigurationError, match="reserved for dmesh"):
        coordination.transaction((), [Delete("dmesh/x")])
    with coordination.watch("k", from_revision=1) as watch:
        assert next(watch).value == b"v"
    assert coordination.key_value_delete("k") == 1
    coordination.barrier("b", participants=[0], timeout=60)
    assert [member.rank for member in coordination.members()] == [0]
    coordination.report_error("enough")


def test_functions_need_an_initialized_system() -> None:
    with pytest.raises(NotInitializedError):
        coordination.members()


def test_every_public_name_exists() -> None:
    assert all(hasattr(coordination, name) for name in coordination.__all__)
