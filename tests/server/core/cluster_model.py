"""The simple model that random histories of one cluster are held against, and the rules of its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.server.core.barrier_model import BarrierHistory, Client, passed, refused
from tests.server.core.driving import OBSERVER, Driver, swapped, unequal, worker

from dmesh_server.core.deadlines import LivenessDue, NoticeDue
from dmesh_server.core.effects import (
    Answer,
    BarrierResult,
    Effect,
    KvDeleted,
    KvIncremented,
    KvRead,
    KvRevision,
    LivenessChange,
    MembershipChange,
    Persist,
    Probe,
    Push,
    Reply,
    SessionEnd,
    StatusRequest,
    WatchPush,
)
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    Abandon,
    KvList,
)
from dmesh_server.core.model import (
    ClusterSettings,
    KeyValue,
    Limits,
    Liveness,
    Member,
    MemberState,
    RestartPolicy,
)

TASKS = 3
PARTICIPANTS = {"all": (), "pair": (0, 1)}
KEYS = st.sampled_from(["a", "a/1", "a/2", "b"])
PREFIXES = st.sampled_from(["", "a", "a/", "b"])
VALUES = st.sampled_from([b"", b"1", b"7", b"x"])
WORKERS = st.integers(0, TASKS - 1)
MARGIN = 1e-6


@dataclass(eq=False)
class Watching:
    """A watch and everything that it was told."""

    prefix: str
    start: int
    told: list[tuple[int, str, bytes | None]] = field(default_factory=list)


class ClusterModel(RuleBasedStateMachine):
    """One cluster of three workers: what it must be like, and what its clients know."""

    @initialize(rejoin=st.booleans())
    def start(self, rejoin: bool) -> None:
        self.d = Driver(TASKS, Limits(replies_per_member=4, watch_history=1000, max_barriers=8))
        self.clients: dict[int, Client] = {}
        self.rejoin = rejoin
        self.settings = ClusterSettings(
            RestartPolicy.REJOIN if rejoin else RestartPolicy.FAIL_FAST, stuck_after=8.0
        )
        self.departed: dict[int, MemberState] = {}
        self.former: dict[int, list[int]] = {}
        self.incarnations = 1000
        self.generation = 0
        self.epoch = 0
        self.stalled = 0.0
        self.probes: dict[int, Probe] = {}
        self.unanswered: dict[int, str] = {}
        self.answered: set[int] = set()
        self.watches: dict[int, Watching] = {}
        self.barriers = BarrierHistory()
        self.mutations: list[tuple[Any, Answer]] = []
        self.begin_generation()

    def begin_generation(self) -> None:
        self.keys: dict[str, KeyValue] = {}
        self.revision = 0
        self.changes: list[tuple[int, str, bytes | None]] = []
        self.mutations.clear()

    # Applying events, and what must be true of all effects.

    def do(self, event: Any, blocking: bool = False) -> Answer | None:
        """Applies a request; returns its answer, if it came at once."""
        self.unanswered[event.token] = type(event).__name__
        answers = self.take(self.d.apply(event))
        assert blocking or event.token in answers, "a request was not answered"
        return answers.get(event.token)

    def take(self, effects: Iterable[Effect]) -> dict[int, Answer]:
        """Checks effects and hands what they say to the clients."""
        answers: dict[int, Answer] = {}
        for effect in effects:
            match effect:
                case Persist():
                    for record in effect.records:
                        self.barriers.kept(self.generation, record.encoded(), lazy=effect.lazy)
                case Reply(token, answer):
                    assert token in self.unanswered, "an answer that nobody waits for"
                    del self.unanswered[token]
                    assert token not in self.answered, "a request was answered twice"
                    self.answered.add(token)
                    answers[token] = answer
                case WatchPush(token, revision, events, error):
                    watch = self.watches[token]
                    watch.told += [(revision, e.kv.key, None if e.deleted else e.kv.value) for e in events]
                    if error is not None:
                        del self.watches[token]
                case Push(sessions, message):
                    self.take_push(sessions, message)
        return answers

    def take_push(self, sessions: tuple[int, ...], message: object) -> None:
        attached = {client.session: client for client in self.clients.values() if client.session is not None}
        assert len(set(sessions)) == len(sessions)
        match message:
            case BarrierResult(name):
                if len(sessions) > 1 and not self.rejoin:
                    arrived = {s for s, client in attached.items() if name in client.arrived}
                    assert set(sessions) == arrived, "not all who arrived were told"
                for session in sessions:
                    client = attached[session]
                    self.note_result(client, message)
            case MembershipChange(epoch, departed, rejoined):
                assert set(sessions) == attached.keys(), "not all were told of a change"
                assert epoch == self.d.core.cluster_state("c").epoch  # type: ignore[union-attr]
                assert all(member.state.departed for member in departed)
                assert not rejoined or self.rejoin
                for client in attached.values():
                    for member in departed:
                        client.troubled.pop(member.task.index, None)
            case LivenessChange(members):
                for session in sessions:
                    for member in members:
                        assert not member.state.departed
                        attached[session].troubled[member.task.index] = member.liveness
            case StatusRequest(number):
                for session in sessions:
                    attached[session].asked = number
            case SessionEnd(error):
                for session in sessions:
                    assert session not in attached or error.kind is ErrorKind.FENCED
                    if session in attached:
                        attached[session].session = None
            case _:
                assert all(session in attached for session in sessions)

    def note_result(self, client: Client, result: BarrierResult) -> None:
        name = result.name
        client.arrived.discard(name)
        if refused(result):
            client.waits.discard(name)
            client.finished[name] = -1
            return
        others = [self.clients[i] for i in PARTICIPANTS[name] or range(TASKS) if i in self.clients]
        self.barriers.told(self.generation, client, result, others)
        client.waits.discard(name)
        client.finished[name] = result.instance + 1
        if result.error is None:
            client.passed[name] = passed(result, tuple(map(worker, PARTICIPANTS[name])))

    def served(self) -> float:
        return self.d.now - self.stalled

    def sign(self, client: Client) -> None:
        client.last_sign = max(client.last_sign, self.served())

    def someone(self, index: int) -> Client | None:
        return self.clients.get(index)

    # Keys.

    def mutate(self, index: int, event: Any) -> Answer | None:
        client = self.someone(index)
        if client is None:
            return None
        event = dataclasses.replace(event, caller=self.d.caller(index, client.incarnation))
        self.sign(client)
        before = self.revision
        answer = self.do(event)
        assert answer is not None
        if getattr(answer, "revision", before) == before + 1:
            self.mutations.append((event, answer))
        return answer

    def put(self, key: str, value: bytes) -> KeyValue:
        self.revision += 1
        old = self.keys.get(key)
        self.keys[key] = kv = KeyValue(
            key, value, old.create_revision if old else self.revision, self.revision
        )
        self.changes.append((self.revision, key, value))
        return kv

    @rule(index=WORKERS, key=KEYS, value=VALUES, overwrite=st.booleans())
    def set_key(self, index: int, key: str, value: bytes, overwrite: bool) -> None:
        answer = self.mutate(index, self.d.set(key, value, overwrite=overwrite))
        if isinstance(answer, KvRevision):
            assert overwrite or key not in self.keys
            self.put(key, value)
            assert answer.revision == self.revision
        elif answer is not None:
            assert isinstance(answer, CoreError)
            assert (answer.kind, key in self.keys, overwrite) == (ErrorKind.KEY_EXISTS, True, False)

    @rule(index=WORKERS, key=KEYS, amount=st.integers(-5, 5))
    def increment(self, index: int, key: str, amount: int) -> None:
        answer = self.mutate(index, self.d.increment(key, amount))
        old = self.keys[key].value if key in self.keys else b"0"
        if isinstance(answer, KvIncremented):
            assert answer.value == int(old) + amount
            self.put(key, str(answer.value).encode())
            assert answer.revision == self.revision
        elif answer is not None:
            assert old in (b"", b"x")

    @rule(index=WORKERS, key=KEYS, expected=st.none() | VALUES, value=VALUES)
    def compare_and_set(self, index: int, key: str, expected: bytes | None, value: bytes) -> None:
        answer = self.mutate(index, self.d.compare_and_set(key, expected, value))
        if answer is not None:
            old = self.keys.get(key)
            if (old.value if old else None) == expected:
                self.put(key, value)
                assert answer == swapped(self.revision)
            else:
                assert answer == unequal(old, self.revision)

    @rule(index=WORKERS, key=KEYS, prefix=st.booleans())
    def delete(self, index: int, key: str, prefix: bool) -> None:
        answer = self.mutate(index, self.d.delete(key, prefix))
        if answer is not None:
            gone = sorted(k for k in self.keys if (k.startswith(key) if prefix else k == key))
            self.revision += bool(gone)
            for name in gone:
                del self.keys[name]
                self.changes.append((self.revision, name, None))
            assert answer == KvDeleted(len(gone), self.revision)

    @precondition(lambda self: self.mutations and self.clients)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        # Each member's latest answers are remembered; a client retries what it was not answered.
        latest = {event.caller: (event, answer) for event, answer in self.mutations}
        event, answer = data.draw(st.sampled_from(list(latest.values())))
        retried = self.do(dataclasses.replace(event, token=self.d.token()))
        slot = self.d.member(event.caller.task.index)
        if slot.incarnation == event.caller.incarnation:
            assert retried == answer  # From memory: it proves nothing new, and is no sign of life.
        else:
            assert isinstance(retried, CoreError)
            assert retried.kind is ErrorKind.FENCED, "what another has taken over is not answered any more"

    @rule(key=KEYS, timeout=st.sampled_from([0, 5.0, None]))
    def get(self, key: str, timeout: float | None) -> None:
        answer = self.do(self.d.get(key, timeout, OBSERVER), blocking=True)
        if not self.generation:
            assert isinstance(answer, CoreError)
            assert answer.kind is ErrorKind.NOT_REGISTERED
        elif key in self.keys and self.clients:
            assert answer == self.keys[key]
        elif timeout == 0 or not self.clients:
            assert isinstance(answer, CoreError)
        else:
            assert answer is None

    @precondition(lambda self: self.clients)
    @rule(prefix=PREFIXES, back=st.integers(0, 3))
    def watch(self, prefix: str, back: int) -> None:
        start = 0 if back == 0 else max(1, self.revision + 2 - back)
        event = self.d.watch(prefix, start, OBSERVER)
        self.watches[event.token] = Watching(prefix, start or self.revision + 1)
        assert self.do(event) == KvRevision(self.revision)

    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        tokens = sorted(self.unanswered.keys() | self.watches.keys())
        if tokens:
            token = data.draw(st.sampled_from(tokens))
            self.unanswered.pop(token, None)
            self.watches.pop(token, None)
            assert self.d.apply(Abandon(token)) == []

    # What is true between any two steps (beside `core.invariants`, which the driver checks).

    @invariant()
    def everything_is_right(self) -> None:
        self.note_departures()
        self.keys_are_the_models()
        self.watches_were_told_everything_once()
        self.everybody_knows_who_gets_nowhere()

    def note_departures(self) -> None:
        state = self.d.core.cluster_state("c")
        if state is None:
            return
        assert state.epoch >= self.epoch, "the epoch went back"
        self.epoch = state.epoch
        assert len({member.task for member in state.members}) == len(state.members)
        for member in state.members:
            client = self.clients.get(member.task.index)
            if not member.state.departed:
                assert client is not None, "somebody rose from the dead"
                assert client.incarnation == member.incarnation
            elif client is not None and client.incarnation == member.incarnation:
                if member.state is MemberState.LOST:
                    assert client.session is None, "lost although its connection answers"
                    silence, away = self.served() - client.last_sign, 0.0
                    if client.closed_at is not None:
                        away = self.served() - max(client.closed_at, client.last_sign)
                    over = silence >= self.d.limits.lease - MARGIN
                    suspect = away >= self.d.limits.suspicion - MARGIN and not client.vouched
                    assert over or suspect or client.killed, "lost too early"
                del self.clients[client.index]
                self.departed[client.index] = member.state
                self.former.setdefault(client.index, []).append(client.incarnation)
        if self.generation and not self.clients:
            self.keys, self.revision = {}, 0
            assert not self.unanswered, "somebody waits in a life that has ended"
            assert not self.watches

    def member(self, index: int) -> Member:
        return self.d.member(index)

    def everybody_knows_who_gets_nowhere(self) -> None:
        state = self.d.core.cluster_state("c")
        held_back = (LivenessDue("c"), NoticeDue("c"))
        if state is None or any(due in self.d.core._deadlines for due in held_back):
            return
        troubled = {
            member.task.index: member.liveness
            for member in state.members
            if member.liveness is not Liveness.LIVE
        }
        for client in self.clients.values():
            if client.session is not None:
                believed = {i: live for i, live in client.troubled.items() if live is not Liveness.LIVE}
                assert believed == troubled

    def keys_are_the_models(self) -> None:
        if self.clients:
            read = self.d.accepted(KvList(self.d.token(), OBSERVER, "", False), KvRead)
            assert read == KvRead(tuple(self.keys[key] for key in sorted(self.keys)), self.revision)

    def watches_were_told_everything_once(self) -> None:
        for watch in self.watches.values():
            assert watch.told == [
                change
                for change in self.changes
                if change[0] >= watch.start and change[1].startswith(watch.prefix)
            ]
