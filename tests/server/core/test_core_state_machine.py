"""The core against a simple model, in random histories with crashes of clients and of the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.server.core.barrier_model import BarrierHistory, Client, passed, refused
from tests.server.core.driving import OBSERVER, Driver, worker

from dmesh_server.core.deadlines import LivenessDue, NoticeDue
from dmesh_server.core.effects import (
    Answer,
    Attached,
    BarrierResult,
    Done,
    Effect,
    KvCompared,
    KvDeleted,
    KvIncremented,
    KvRead,
    KvRevision,
    LivenessChange,
    MembershipChange,
    Persist,
    Push,
    Registered,
    Reply,
    SessionEnd,
    StatusRequest,
    WatchPush,
)
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    Abandon,
    Attach,
    EnterBarrier,
    Heartbeat,
    KvList,
    Leave,
    ReportStatus,
    ReportWaiting,
    SessionClosed,
    Tick,
)
from dmesh_server.core.model import (
    Activity,
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


class ClusterMachine(RuleBasedStateMachine):
    """One cluster of three workers."""

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
        self.life = 0
        self.epoch = 0
        self.floor = self.d.now
        self.unanswered: dict[int, str] = {}
        self.answered: set[int] = set()
        self.watches: dict[int, Watching] = {}
        self.barriers = BarrierHistory()
        self.mutations: list[tuple[Any, Answer]] = []
        self.begin_life()

    def begin_life(self) -> None:
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
                        self.barriers.kept(self.life, record, lazy=effect.lazy)
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
        self.barriers.told(self.life, client, result, others)
        client.waits.discard(name)
        client.finished[name] = result.instance + 1
        if result.error is None:
            client.passed[name] = passed(result, tuple(map(worker, PARTICIPANTS[name])))

    def sign(self, client: Client, *, always: bool = False) -> None:
        if always or client.session is not None:
            client.last_sign = self.d.now

    def someone(self, index: int) -> Client | None:
        return self.clients.get(index)

    # Membership.

    @rule(index=WORKERS)
    def register(self, index: int) -> None:
        client = self.clients.get(index)
        if client is not None:
            event = self.d.register(index, client.incarnation, settings=self.settings)
            answer = self.do(event)
            assert isinstance(answer, Registered)
            assert answer.rejoined == client.rejoined
            self.sign(client, always=True)
            return
        self.incarnations += 1
        answer = self.do(self.d.register(index, self.incarnations, settings=self.settings))
        state = self.departed.get(index)
        fallen = {i for i, state in self.departed.items() if state is not MemberState.LEFT}
        rejoins = bool(self.clients) and self.rejoin and index in fallen
        if state is not None and self.clients and not rejoins:
            assert isinstance(answer, CoreError)
            assert answer.kind is ErrorKind.CLUSTER_ENDING
            assert {member.task.index for member in answer.members} == self.clients.keys()
            return
        if self.clients and not self.rejoin and fallen:
            assert isinstance(answer, CoreError)
            assert answer.kind is ErrorKind.CLUSTER_ENDING
            assert {member.task.index for member in answer.members} == fallen
            return
        assert isinstance(answer, Registered)
        assert answer.rejoined == rejoins
        assert answer.settings.restart_policy is self.settings.restart_policy
        if not self.clients:
            self.life += 1
            self.departed.clear()
            self.former.clear()
            self.begin_life()
        self.departed.pop(index, None)
        born = self.barriers.now()
        self.clients[index] = Client(index, self.incarnations, self.d.now, born, rejoins)

    @rule()
    def join_all(self) -> None:
        for index in range(TASKS):
            self.register(index)
            self.attach(index, again=False)

    @rule(index=WORKERS)
    def intrude(self, index: int) -> None:
        if index in self.clients:
            answer = self.do(self.d.register(index, 7, settings=self.settings))
            assert isinstance(answer, CoreError)
            assert answer.kind is ErrorKind.TASK_TAKEN

    @rule(index=WORKERS, again=st.booleans())
    def attach(self, index: int, again: bool) -> None:
        client = self.someone(index)
        if client is None or (client.session is not None and not again):
            return
        event = self.d.attach(index, client.incarnation, list(client.passed.values()))
        # What the old session is told, if anything, does not reach the client; the new one is told at once.
        client.session, client.closed_at = event.session, None
        client.troubled.clear()
        client.asked = None
        answer = self.do(event)
        assert isinstance(answer, Attached)
        client.speaks = True
        self.sign(client)
        for name in sorted(client.waits):
            self.present(client, name, 30.0)

    @rule(index=WORKERS)
    def break_session(self, index: int) -> None:
        client = self.someone(index)
        if client is not None and client.session is not None:
            session, client.session = client.session, None
            client.closed_at = self.d.now
            self.take(self.d.apply(SessionClosed(session)))

    @rule(index=WORKERS, back=st.booleans())
    def replace_a_process(self, index: int, back: bool) -> None:
        """A process is killed, and another one started for its seat."""
        self.break_session(index)
        self.wait(0.4)
        self.note_departures()
        self.register(index)
        if back:
            self.attach(index, again=False)
        for incarnation in self.former.get(index, ()):
            self.stays_out(self.d.register(index, incarnation, request_id="new", settings=self.settings))

    @rule()
    def heartbeats(self) -> None:
        for client in list(self.clients.values()):
            if client.session is not None:
                self.sign(client)
                self.take(self.d.apply(Heartbeat(client.session, 1, client.progress)))

    @rule(index=WORKERS)
    def beat(self, index: int) -> None:
        client = self.someone(index)
        if client is not None and client.session is not None:
            client.progress += 1
            self.sign(client)
            self.take(self.d.apply(Heartbeat(client.session, 1, client.progress)))
            assert self.member(index).liveness is not Liveness.BLOCKED

    @rule(index=WORKERS, age=st.sampled_from([0.0, 3.0, 30.0]))
    def answer(self, index: int, age: float) -> None:
        client = self.someone(index)
        if client is not None and client.session is not None and client.asked is not None:
            self.sign(client)
            activity = Activity("all_reduce", age, ("train.py:9 in step",))
            self.take(self.d.apply(ReportStatus(client.session, client.asked, activity)))
            if age < 4.0:
                assert self.member(index).liveness is Liveness.LIVE, "it gets on, but is called stuck"

    @rule(index=WORKERS, others=st.sets(WORKERS), age=st.sampled_from([0.0, 9.0]))
    def wait_for(self, index: int, others: set[int], age: float) -> None:
        client = self.someone(index)
        if client is not None and client.session is not None:
            self.sign(client)
            tasks = tuple(map(worker, sorted(others)))
            self.take(self.d.apply(ReportWaiting(client.session, "all_reduce", tasks, age)))

    @rule(index=WORKERS, reason=st.sampled_from(["", "why"]), report=st.booleans())
    def go(self, index: int, reason: str, report: bool) -> None:
        client = self.someone(index)
        if client is None:
            return
        event: Any = self.d.report(index, "no") if report else self.d.leave(index, reason)
        event = dataclasses.replace(event, caller=self.d.caller(index, client.incarnation))
        if isinstance(event, Leave):
            event = dataclasses.replace(event, passed=tuple(client.passed.values()))
            client.speaks = True
            if not reason:
                client.session = None
        assert isinstance(self.do(event), Done)

    @rule(index=WORKERS, data=st.data())
    def rise_from_the_dead(self, index: int, data: st.DataObject) -> None:
        if self.former.get(index):
            incarnation = data.draw(st.sampled_from(self.former[index]))
            caller = self.d.caller(index, incarnation)
            self.stays_out(self.d.register(index, incarnation, request_id="new", settings=self.settings))
            self.stays_out(Attach(self.d.token(), caller, -1))
            self.stays_out(dataclasses.replace(self.d.set("a"), caller=caller))

    def stays_out(self, event: Any) -> None:
        answer = self.do(event)
        assert isinstance(answer, CoreError)
        assert answer.kind is ErrorKind.FENCED

    # Barriers.

    def present(self, client: Client, name: str, timeout: float | None) -> None:
        assert client.session is not None
        client.waits.add(name)
        client.arrived.add(name)
        self.sign(client)
        listed = tuple(map(worker, PARTICIPANTS[name]))
        instance = client.count(name)
        latest = self.barriers.latest(self.life, name)
        self.take(self.d.apply(EnterBarrier(client.session, name, instance, listed, timeout)))
        if instance == latest:
            assert name not in client.waits, "whoever comes late was not told the result"
            assert client.finished[name] == instance + 1, "whoever comes late was refused"

    @rule(name=st.sampled_from(sorted(PARTICIPANTS)))
    def meet(self, name: str) -> None:
        for index in PARTICIPANTS[name] or range(TASKS):
            self.enter(index, name, None)

    @rule(
        index=WORKERS, name=st.sampled_from(sorted(PARTICIPANTS)), timeout=st.sampled_from([None, 1.0, 20.0])
    )
    def enter(self, index: int, name: str, timeout: float | None) -> None:
        client = self.someone(index)
        takes_part = not PARTICIPANTS[name] or index in PARTICIPANTS[name]
        if takes_part and client is not None and client.session is not None and name not in client.waits:
            self.present(client, name, timeout)

    @rule(name=st.sampled_from(sorted(PARTICIPANTS)), kill=st.booleans())
    def miss_the_result(self, name: str, kill: bool) -> None:
        """One participant's connection breaks before the last arrives; then, perhaps, the server dies."""
        first, *others = PARTICIPANTS[name] or range(TASKS)
        self.enter(first, name, None)
        self.break_session(first)
        for index in others:
            self.enter(index, name, None)
        if kill and self.life:
            self.kill_server(0)
        for index in range(TASKS):
            self.attach(index, again=False)

    @rule(victim=WORKERS, name=st.sampled_from(sorted(PARTICIPANTS)), blind=st.booleans(), last=WORKERS)
    def replace_a_process_amid_a_crash(self, victim: int, name: str, blind: bool, last: int) -> None:
        """One participant does not hear of a success, the server forgets it, the process is replaced."""
        self.join_all()
        self.enter(victim, name, None)
        self.break_session(victim)
        self.meet(name)
        self.kill_server(0)
        self.attach(victim, again=False)
        if blind:
            self.replace_a_process(victim, back=True)
            self.enter(victim, name, None)
        for index in range(TASKS):
            if index != last:
                self.attach(index, again=False)

    @rule(index=WORKERS, name=st.sampled_from(sorted(PARTICIPANTS)))
    def cancel(self, index: int, name: str) -> None:
        client = self.someone(index)
        if client is not None:
            event = self.d.cancel(index, name)
            self.sign(client)
            answer = self.do(dataclasses.replace(event, caller=self.d.caller(index, client.incarnation)))
            assert isinstance(answer, Done | CoreError)
            if isinstance(answer, CoreError):
                assert answer.kind is ErrorKind.BARRIER_MISMATCH

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
                assert answer == KvCompared(True, self.put(key, value), self.revision)
            else:
                assert answer == KvCompared(False, old, self.revision)

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
        seat = self.d.member(event.caller.task.index)
        if seat.incarnation == event.caller.incarnation:
            assert retried == answer  # From memory: it proves nothing new, and is no sign of life.
        else:
            assert isinstance(retried, CoreError)
            assert retried.kind is ErrorKind.FENCED, "what another has taken over is not answered any more"

    @rule(key=KEYS, timeout=st.sampled_from([0, 5.0, None]))
    def get(self, key: str, timeout: float | None) -> None:
        answer = self.do(self.d.get(key, timeout, OBSERVER), blocking=True)
        if not self.life:
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

    # Time and crashes.

    @rule(times=st.integers(1, 6))
    def live(self, times: int) -> None:
        for _ in range(times):
            self.wait(3.0)
            self.heartbeats()
            self.note_departures()

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.4, 3.0, 8.0, 16.0]))
    def wait(self, seconds: float) -> None:
        end = self.d.now + seconds
        while (due := self.d.core.next_deadline()) is not None and due <= end:
            self.d.now = max(self.d.now, due)
            self.take(self.d.apply(Tick()))
            self.note_departures()
        self.d.now = end
        for client in self.clients.values():
            silent = self.d.now >= max(client.last_sign, self.floor) + self.d.limits.lease + MARGIN
            if client.session is not None:
                assert not silent or self.member(client.index).liveness is Liveness.BLOCKED
            else:
                assert not silent, "nobody noticed that it is gone"
            if client.closed_at is not None:
                assert self.d.now < max(client.closed_at, self.floor) + self.d.limits.session_grace + MARGIN

    @rule()
    def stall(self) -> None:
        if self.d.core.next_deadline() is not None:
            self.d.now = self.floor = self.d.now + 30.0
            self.take(self.d.apply(Tick()))

    @precondition(lambda self: self.life)
    @rule(kept=st.integers(0, 3))
    def kill_server(self, kept: int) -> None:
        before = self.d.state()
        self.barriers.lost(self.life, self.d.lazy[kept:])
        self.d.restart(kept)
        after = self.d.state()
        assert (after.incarnation, after.epoch, after.jobs, after.vacant) == (
            before.incarnation,
            before.epoch,
            before.jobs,
            before.vacant,
        )
        for old, new in zip(before.members, after.members, strict=True):
            connected = old.state is MemberState.CONNECTED
            assert new.state is (MemberState.REGISTERED if connected else old.state)
            assert (new.task, new.incarnation) == (old.task, old.incarnation)
            assert new.reason == (old.reason if old.state.departed else "")
            assert new.liveness is Liveness.LIVE
        self.floor = self.d.now
        self.unanswered.clear()
        self.watches.clear()
        for client in self.clients.values():
            client.session = client.closed_at = None
            client.last_sign = self.d.now
            client.speaks = False
            client.arrived.clear()
            if not client.rejoined:
                # Who neither counts nor has a reason not to cannot say in which instance it was.
                client.waits -= {name for name in client.waits if client.count(name) < 0}

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
                    silence = self.d.now - max(client.last_sign, self.floor)
                    away = (
                        self.d.now - max(client.closed_at, self.floor) if client.closed_at is not None else 0
                    )
                    lease, grace = self.d.limits.lease, self.d.limits.session_grace
                    assert silence >= lease - MARGIN or away >= grace - MARGIN, "lost too early"
                del self.clients[client.index]
                self.departed[client.index] = member.state
                self.former.setdefault(client.index, []).append(client.incarnation)
        if self.life and not self.clients:
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


TestCluster = ClusterMachine.TestCase
TestCluster.settings = settings(max_examples=settings().max_examples, stateful_step_count=60)
