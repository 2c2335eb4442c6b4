"""Calls of sessions take effect once, whatever the network delays, loses and repeats."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.server.core.driving import Driver

from dmesh_server.core.effects import Answer, KvDeleted, KvIncremented, KvRevision, KvTransacted
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import KvDelete, KvIncrement, Mutation, SessionClosed
from dmesh_server.core.replies import REPLY_SLOTS

IN_FLIGHT = 4
KINDS = ("increment", "create", "set", "delete")


@dataclass(eq=False)
class Call:
    """A call of the client. Each has a key of its own, so that a second effect shows."""

    event: Mutation
    answers: list[Answer] = field(default_factory=list)


@dataclass(eq=False)
class Connection:
    """A session's connection: what the server has not read yet, what the client has not read yet."""

    session: int
    to_server: deque[tuple[int, Mutation]] = field(default_factory=deque)
    to_client: deque[tuple[int, Answer]] = field(default_factory=deque)


class ExactlyOnce(RuleBasedStateMachine):
    """One client with a few calls in flight, over connections that break and a server that is killed."""

    @initialize()
    def start(self) -> None:
        self.d = Driver(2)
        self.d.join(1)
        self.d.apply(self.d.register(0))
        self.calls: dict[int, Call] = {}
        """Calls without an answer, by slot."""
        self.made = 0
        self.connections: list[Connection] = []
        self.current: Connection | None = None
        self.connect()

    # The client.

    @precondition(lambda self: len(self.calls) < IN_FLIGHT)
    @rule(kind=st.sampled_from(KINDS))
    def call(self, kind: str) -> None:
        slot = next(slot for slot in range(1, IN_FLIGHT + 1) if slot not in self.calls)
        key, d = f"key-{self.made}", self.d
        self.made += 1
        event = {
            "increment": lambda: d.increment(key),
            "create": lambda: d.compare_and_set(key, None, b"v"),
            "set": lambda: d.set(key, overwrite=False),
            "delete": lambda: d.delete(key),
        }[kind]()
        if kind == "delete":
            self.d.apply(self.d.set(key, index=1))
        self.calls[slot] = Call(event)
        self.send(slot)

    def send(self, slot: int) -> None:
        if self.current is not None:
            event, session = self.calls[slot].event, self.current.session
            sent = dataclasses.replace(event, token=self.d.token(), session=session, reply_slot=slot)
            self.current.to_server.append((slot, sent))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        del self.calls[data.draw(st.sampled_from(sorted(self.calls)))]

    @rule()
    def receive(self) -> None:
        if self.current is not None and self.current.to_client:
            token, answer = self.current.to_client.popleft()
            for slot, call in tuple(self.calls.items()):
                if call.answers and any(answer is one for one in call.answers) and token == slot:
                    del self.calls[slot]

    @rule()
    def connect(self) -> None:
        """Opens another session, while the server may not have read all of the one before."""
        event = self.d.attach(0)
        self.d.apply(event)
        self.current = Connection(event.session)
        self.connections.append(self.current)
        for slot in sorted(self.calls):
            self.send(slot)

    @rule()
    def disconnect(self) -> None:
        self.current = None

    # The server.

    @precondition(lambda self: any(connection.to_server for connection in self.connections))
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Reads the next message of any connection, also of one that the client has replaced."""
        connection = data.draw(st.sampled_from([c for c in self.connections if c.to_server]))
        slot, event = connection.to_server.popleft()
        answer = self.d.answer(event)
        if connection is not self.connections[-1]:
            assert isinstance(answer, CoreError)
            assert answer.kind is ErrorKind.NOT_REGISTERED, "a replaced session still changes something"
            return
        self.check(event, answer)
        call = self.calls.get(slot)
        if call is not None and call.event.request_id == event.request_id:
            assert all(answer == before for before in call.answers), "a retry got another answer"
            call.answers.append(answer)
            connection.to_client.append((slot, answer))

    def check(self, event: Mutation, answer: Answer) -> None:
        match answer:
            case KvIncremented(value):
                assert value == 1, "an increment counts twice"
            case KvTransacted(succeeded):
                assert succeeded, "a compare-and-set that succeeded reports failure"
            case KvDeleted(deleted):
                assert deleted == 1, "a key that was deleted is reported missing"
            case _:
                assert isinstance(answer, KvRevision), (event, answer)

    @rule()
    def notice_closed_connections(self) -> None:
        for connection in self.connections:
            if connection is not self.current:
                self.d.apply(SessionClosed(connection.session))
                connection.to_server.clear()

    @rule(data=st.data(), committed=st.booleans())
    def kill(self, data: st.DataObject, committed: bool) -> None:
        """Kills the server, perhaps between a call and its commit, or between its commit and its answer."""
        if self.current is not None and self.current.to_server:
            before = dict(self.d.durable)
            self.d.apply(self.current.to_server.popleft()[1])
            if not committed:
                self.d.durable = before
        self.d.restart()
        self.current = None
        self.connections.clear()
        self.connections.append(Connection(-1))

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        rows = [record for record in self.d.durable.values() if record.kind == "reply"]
        assert len([row for row in rows if row.key.startswith("worker/0/")]) <= IN_FLIGHT


TestExactlyOnce = ExactlyOnce.TestCase
TestExactlyOnce.settings = settings(max_examples=settings().max_examples, stateful_step_count=60)


@pytest.mark.parametrize("restart", [False, True])
def test_all_that_may_be_in_flight_is_remembered(restart: bool) -> None:
    d = Driver(2)
    d.join(0)
    calls = [in_session(d, d.increment("n"), slot) for slot in range(1, REPLY_SLOTS + 1)]
    answers = [d.answer(call) for call in calls]
    if restart:
        d.restart()
    d.apply(d.attach(0))
    again = [in_session(d, call, call.reply_slot) for call in calls]
    assert [d.answer(call) for call in again] == answers
    assert d.accepted(in_session(d, d.increment("n"), 1), KvIncremented).value == REPLY_SLOTS + 1


def test_the_next_call_of_a_slot_takes_the_place_of_the_one_before() -> None:
    d = Driver(2)
    d.join(0)
    for count in range(1, 100):
        assert d.accepted(in_session(d, d.increment("n"), 1), KvIncremented).value == count
    assert len([record for record in d.durable.values() if record.kind == "reply"]) == 1


@pytest.mark.parametrize("slot", [-1, REPLY_SLOTS + 1])
def test_slots_beyond_the_limit_are_refused(slot: int) -> None:
    d = Driver(2)
    d.join(0)
    error = d.refused(in_session(d, d.increment("n"), slot))
    assert error.kind is ErrorKind.LIMIT_EXCEEDED
    assert str(REPLY_SLOTS) in error.message


def test_a_replaced_session_changes_nothing() -> None:
    """A call that its client gave up comes late, after the client has used its slot again."""
    d = Driver(2)
    d.join(0)
    late = in_session(d, d.increment("n"), 1)
    d.apply(d.attach(0))
    d.accepted(in_session(d, d.set("other"), 1), KvRevision)
    assert d.refused(late).kind is ErrorKind.NOT_REGISTERED
    assert d.refused(d.get("n")).kind is ErrorKind.KEY_NOT_FOUND


def test_another_call_with_the_same_id_is_refused() -> None:
    d = Driver(2)
    d.join(0)
    call = in_session(d, d.increment("n"), 1)
    d.accepted(call, KvIncremented)
    other = dataclasses.replace(in_session(d, d.delete("n"), 1), request_id=call.request_id)
    error = d.refused(other)
    assert (error.kind, "was used for KvIncrement" in error.message) == (ErrorKind.INVALID_ARGUMENT, True)


def in_session(d: Driver, event: KvIncrement | KvDelete | Mutation, slot: int) -> Mutation:
    """Makes the call, or the same one again, in the session that the worker has now."""
    return dataclasses.replace(event, token=d.token(), session=d.sessions[0], reply_slot=slot)
