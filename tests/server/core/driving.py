"""Drives a core in tests: short names for events, a clock that moves when told to, and restarts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from dmesh_server.core import invariants
from dmesh_server.core.core import Core
from dmesh_server.core.effects import (
    Answer,
    BarrierResult,
    Effect,
    KvRead,
    KvRevision,
    KvTransacted,
    LazyRecord,
    LivenessChange,
    MembershipChange,
    Message,
    Persist,
    Probe,
    Push,
    Record,
    Reply,
    SessionEnd,
    StatusRequest,
    WatchPush,
)
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    Attach,
    CancelBarrier,
    EnterBarrier,
    Event,
    Evidence,
    GetClusterState,
    Heartbeat,
    KvDelete,
    KvGet,
    KvGetMany,
    KvIncrement,
    KvList,
    KvOperation,
    KvSet,
    KvTransaction,
    KvWatch,
    Leave,
    PresentBarriers,
    Register,
    ReportError,
    SessionClosed,
    Stalled,
    Tick,
)
from dmesh_server.core.model import (
    Caller,
    ClusterState,
    Condition,
    ConditionOperator,
    ConditionTarget,
    Device,
    Job,
    KeyValue,
    Limits,
    Liveness,
    Member,
    MemberState,
    PassedBarrier,
    Process,
    Task,
)

A = TypeVar("A", bound=Answer)

OBSERVER = Caller("c")


def worker(index: int) -> Task:
    return Task("worker", index)


def swapped(revision: int) -> KvTransacted:
    """The answer to a compare-and-set that set the key."""
    return KvTransacted(True, (KvRevision(revision),), revision)


def unequal(current: KeyValue | None, revision: int) -> KvTransacted:
    """The answer to a compare-and-set that found another value."""
    return KvTransacted(False, (KvRead((current,) if current else (), revision),), revision)


def workers(count: int) -> tuple[Job, ...]:
    return (Job("worker", tuple(f"host{index}:70" for index in range(count))),)


class Driver:
    """A core with a cluster "c" of `tasks` workers, a clock, and everything that it persisted."""

    def __init__(self, tasks: int = 2, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.core = Core(1, self.limits)
        self.jobs = workers(tasks)
        self.now = 100.0
        self.durable: dict[tuple[str, str, str], Record] = {}
        self.lazy: list[Record | LazyRecord] = []
        self.effects: list[Effect] = []
        self.numbers = itertools.count(1)
        self.sessions: dict[int, int] = {}

    def apply(self, event: Event) -> list[Effect]:
        self.effects = self.core.apply(event, self.now)
        persists = [effect for effect in self.effects if isinstance(effect, Persist)]
        assert self.effects[: len(persists)] == persists, "something is released before it is durable"
        for persist in persists:
            self.lazy += persist.records
            if not persist.lazy:
                self.commit(len(self.lazy))
        invariants.check(self.core)
        return self.effects

    def commit(self, count: int) -> None:
        """Makes the oldest of the records durable that were not yet: the order is always kept."""
        for record in (record.encoded() for record in self.lazy[:count]):
            address = (record.cluster, record.kind, record.key)
            self.durable.pop(address, None)
            if record.value is not None:
                self.durable[address] = record
        del self.lazy[:count]

    def flush(self) -> None:
        """Makes everything durable."""
        self.commit(len(self.lazy))

    def restart(self, kept: int = 1 << 30) -> None:
        """Kills the server and starts another from what was durable, with some of the lazy records."""
        self.commit(kept)
        self.lazy.clear()
        self.core = Core(self.core.server_incarnation + 1, self.limits)
        self.core.restore(self.durable.values(), self.now)
        self.sessions.clear()
        invariants.check(self.core)

    def advance(self, seconds: float) -> list[Effect]:
        """Lets time pass, with a Tick whenever the core wants one; returns all effects."""
        end, effects = self.now + seconds, []
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            effects += self.apply(Tick())
        self.now = end
        self.effects = effects
        return effects

    def beat(self, seconds: float, *indices: int) -> list[Effect]:
        """Lets time pass while these workers send heartbeats."""
        end, effects = self.now + seconds, []
        while self.now < end:
            effects += self.advance(min(self.limits.heartbeat_interval, end - self.now))
            for index in indices:
                effects += self.apply(Heartbeat(self.sessions[index], 1))
        self.effects = effects
        return effects

    # What was released.

    def answer(self, event: Any) -> Answer:
        """Applies a request and returns its answer, which must come at once."""
        answers = [effect.answer for effect in self.apply(event) if is_reply(effect, event.token)]
        assert len(answers) == 1, self.effects
        return answers[0]

    def accepted(self, event: Any, kind: type[A]) -> A:
        answer = self.answer(event)
        assert isinstance(answer, kind), answer
        return answer

    def refused(self, event: Any) -> CoreError:
        answer = self.answer(event)
        assert isinstance(answer, CoreError), answer
        return answer

    def pushed(self, index: int | None = None, session: int | None = None) -> list[Message]:
        """What the last event told a worker's session."""
        session = self.sessions[index] if session is None and index is not None else session
        return [e.message for e in self.effects if isinstance(e, Push) and session in e.sessions]

    def results(self, index: int) -> list[BarrierResult]:
        return [message for message in self.pushed(index) if isinstance(message, BarrierResult)]

    def liveness(self, index: int) -> list[tuple[int, Liveness]]:
        """Whose liveness the last event told a worker's session of."""
        changes = [message for message in self.pushed(index) if isinstance(message, LivenessChange)]
        return [(member.task.index, member.liveness) for change in changes for member in change.members]

    def asked(self, index: int) -> list[int]:
        """The questions that the last event asked a worker's session."""
        return [message.id for message in self.pushed(index) if isinstance(message, StatusRequest)]

    def notices(self, index: int) -> list[MembershipChange]:
        return [message for message in self.pushed(index) if isinstance(message, MembershipChange)]

    def ends(self, session: int) -> list[ErrorKind]:
        return [m.error.kind for m in self.pushed(session=session) if isinstance(m, SessionEnd)]

    def watched(self, token: int) -> list[WatchPush]:
        return [effect for effect in self.effects if isinstance(effect, WatchPush) and effect.token == token]

    def replies(self) -> dict[int, Answer]:
        return {effect.token: effect.answer for effect in self.effects if isinstance(effect, Reply)}

    # Events.

    def token(self) -> int:
        return next(self.numbers)

    def request_id(self) -> str:
        return f"request-{next(self.numbers)}"

    def caller(self, index: int, incarnation: int | None = None) -> Caller:
        return Caller("c", worker(index), incarnation or 1000 + index)

    def register(self, index: int, incarnation: int | None = None, **changes: Any) -> Register:
        fields: dict[str, Any] = {
            "caller": self.caller(index, incarnation),
            "request_id": f"register-{index}-{incarnation}",
            "jobs": self.jobs,
            "process": Process(host=f"host{index}", pid=70 + index, program="train.py"),
            "devices": (Device("CPU", 0),),
            "peer_addresses": (f"host{index}:70",),
            "fresh_incarnation": next(self.numbers) + 5000,
            "fresh_secret": bytes(32),
        }
        return Register(self.token(), **(fields | changes))

    def attach(self, index: int, incarnation: int | None = None) -> Attach:
        session = next(self.numbers) + 10_000
        self.sessions[index] = session
        return Attach(self.token(), self.caller(index, incarnation), session)

    def present(
        self, index: int, passed: Iterable[PassedBarrier], incarnation: int | None = None
    ) -> PresentBarriers:
        return PresentBarriers(self.token(), self.caller(index, incarnation), tuple(passed))

    def join(self, *indices: int) -> None:
        """Registers workers and attaches sessions for them."""
        for index in indices:
            self.apply(self.register(index))
            self.apply(self.attach(index))

    def close(self, index: int) -> list[Effect]:
        return self.apply(SessionClosed(self.sessions[index]))

    def success(self, name: str, instance: int) -> BarrierResult:
        """What everybody is told of a barrier that succeeds now."""
        state = self.core.cluster_state("c")
        assert state is not None
        return BarrierResult(name, instance, None, state.epoch)

    def lose(self, index: int) -> list[Effect]:
        """Breaks a worker's connection, and tells that its process is gone."""
        self.close(index)
        return self.evidence(index, gone=True)

    def stall(self, seconds: float) -> list[Effect]:
        """Lets time pass in which the server does not run."""
        self.now += seconds
        self.apply(Stalled(seconds))
        return self.apply(Tick())

    def probes(self) -> list[Probe]:
        """Whom the last event had looked for."""
        return [effect for effect in self.effects if isinstance(effect, Probe)]

    def evidence(self, index: int, *, gone: bool) -> list[Effect]:
        """Tells what was found out about a suspected worker's process."""
        (probe,) = self.probes()
        assert probe.task == worker(index)
        return self.apply(Evidence(probe.cluster, probe.task, probe.lease, gone, "its process is gone"))

    def enter(
        self,
        index: int,
        name: str = "b",
        instance: int = 0,
        participants: Sequence[int] = (),
        timeout: float | None = None,
    ) -> list[Effect]:
        listed = tuple(map(worker, participants))
        return self.apply(EnterBarrier(self.sessions[index], name, instance, listed, timeout))

    def cancel(self, index: int, name: str = "b", instance: int = -1) -> CancelBarrier:
        return CancelBarrier(self.token(), self.caller(index), self.request_id(), name, instance)

    def leave(self, index: int, reason: str = "", *, clean: bool = False) -> Leave:
        return Leave(self.token(), self.caller(index), self.request_id(), reason, clean=clean)

    def report(self, index: int, message: str = "ValueError: no") -> ReportError:
        return ReportError(self.token(), self.caller(index), self.request_id(), message)

    def set(self, key: str, value: bytes = b"v", index: int = 0, overwrite: bool = True) -> KvSet:
        return KvSet(self.token(), self.caller(index), self.request_id(), key, value, overwrite)

    def get(self, key: str, timeout: float | None = 0, caller: Caller | None = None) -> KvGet:
        return KvGet(self.token(), caller or self.caller(0), key, timeout)

    def get_many(self, *keys: str) -> KvGetMany:
        return KvGetMany(self.token(), self.caller(0), keys)

    def list(self, prefix: str = "", keys_only: bool = False) -> KvList:
        return KvList(self.token(), self.caller(0), prefix, keys_only)

    def delete(self, key: str, prefix: bool = False) -> KvDelete:
        return KvDelete(self.token(), self.caller(0), self.request_id(), key, prefix)

    def increment(self, key: str, amount: int = 1) -> KvIncrement:
        return KvIncrement(self.token(), self.caller(0), self.request_id(), key, amount)

    def transaction(
        self,
        compare: Sequence[Condition] = (),
        then: Sequence[KvOperation] = (),
        otherwise: Sequence[KvOperation] = (),
    ) -> KvTransaction:
        return KvTransaction(
            self.token(), self.caller(0), self.request_id(), tuple(compare), tuple(then), tuple(otherwise)
        )

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> KvTransaction:
        absent = Condition(key, ConditionTarget.MOD_REVISION, ConditionOperator.EQUAL, 0)
        if expected is None:
            condition = absent
        else:
            condition = Condition(key, ConditionTarget.VALUE, ConditionOperator.EQUAL, expected)
        return self.transaction([condition], [self.set(key, value)], [self.get_many(key)])

    def watch(self, prefix: str = "", revision: int = 0, caller: Caller | None = None) -> KvWatch:
        return KvWatch(self.token(), caller or self.caller(0), prefix, revision)

    # The state, as an observer sees it.

    def state(self) -> ClusterState:
        effects = self.effects
        state = self.accepted(GetClusterState(self.token(), OBSERVER), ClusterState)
        self.effects = effects
        return state

    def member(self, index: int) -> Member:
        return next(member for member in self.state().members if member.task == worker(index))

    def state_of(self, index: int) -> MemberState:
        return self.member(index).state


def is_reply(effect: Effect, token: int) -> bool:
    return isinstance(effect, Reply) and effect.token == token
