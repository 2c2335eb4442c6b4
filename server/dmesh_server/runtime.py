"""The one place where clock, randomness, disk and core meet.

Everything here runs on one event loop; only the store has a thread of its own (see `commits`). Servicers hand
events in and get answers, sessions and watches back; they never see the core.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from dmesh_server import effect_logging, failpoints
from dmesh_server.commits import CommitPipeline
from dmesh_server.core import records
from dmesh_server.core.core import Core
from dmesh_server.core.declarations import Declarations
from dmesh_server.core.effects import (
    Attached,
    BarrierResult,
    Effect,
    HeartbeatAck,
    KvRevision,
    MembershipChange,
    Noted,
    Probe,
    Push,
    Reply,
    SessionEnd,
    WatchPush,
)
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    Abandon,
    Attach,
    CancelBarrier,
    DeclareCluster,
    DropKey,
    Event,
    Evict,
    GetBarrier,
    GetClusterState,
    GetMember,
    GrantLease,
    KvDelete,
    KvGet,
    KvGetMany,
    KvIncrement,
    KvList,
    KvSet,
    KvTransaction,
    KvWatch,
    Leave,
    Mutation,
    Operation,
    PresentBarriers,
    Register,
    RenewLease,
    ReportError,
    RestoreKeys,
    RevokeLease,
    SessionClosed,
    SessionMessage,
    Shutdown,
    SnapshotKeys,
    Stalled,
    StopBarrier,
    Tick,
    WithdrawCluster,
)
from dmesh_server.core.log_events import BarrierEnded
from dmesh_server.core.model import Caller, Limits, MemberState, SeenState
from dmesh_server.core.quotas import Quotas
from dmesh_server.core.views import ClusterViews
from dmesh_server.event_log import PREEMPTION_NOTICES, EventLog, ServerNote, preemption
from dmesh_server.probes import Prober
from dmesh_server.progress import ProgressBook
from dmesh_server.sessions import OutgoingMessage, Session, Watch, describe_caller
from dmesh_server.store.base import Store
from dmesh_server.telemetry import logs
from dmesh_server.telemetry.measures import Measures

A = TypeVar("A")

AnsweredEvent = (
    Register
    | Leave
    | ReportError
    | GetClusterState
    | GetMember
    | GetBarrier
    | Attach
    | PresentBarriers
    | CancelBarrier
    | KvSet
    | KvGet
    | KvGetMany
    | KvList
    | KvDelete
    | KvIncrement
    | KvTransaction
    | GrantLease
    | RenewLease
    | RevokeLease
    | KvWatch
    | DeclareCluster
    | WithdrawCluster
    | StopBarrier
    | Evict
    | DropKey
    | SnapshotKeys
    | RestoreKeys
)
"""The events that are answered."""

Sink = Callable[[object], None]
"""Takes the answer of one request, which may be a `CoreError`; called on the loop, and must not fail."""

SHUTTING_DOWN = "the coordination server is shutting down; reconnect to its successor, if there is one"
"""Refusal of every request to a stopping server."""

_PULSE = 0.25
"""Seconds between two looks at whether the event loop runs; a stall is what comes later by as much again."""

_AFTER_FAILED_TICK = 1.0
"""Seconds until time is looked at again after it could not be dealt with."""


class Runtime:
    """Runs a `Core` in real time over a real store.

    Attributes:
        server_incarnation: Random number of this start of the server.
        limits: The bounds and times that the core keeps to.
        progress: Members' latest progress reports.
        event_log: Latest events, for people.
        measures: Counts and durations of the server.
    """

    def __init__(
        self,
        store: Store,
        limits: Limits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        session_queue: int = 1024,
        quotas: Quotas | None = None,
    ) -> None:
        """Make a runtime that is not started yet.

        Args:
            store: Where accepted events become durable.
            limits: Bounds and times; the defaults if None.
            clock: Monotonic seconds.
            session_queue: How many unread messages a session may pile up before it is dropped.
            quotas: Bounds on tenants; none if None.
        """
        self.server_incarnation = secrets.randbits(64) or 1
        self.limits = limits if limits is not None else Limits()
        self.progress = ProgressBook(clock)
        self.event_log = EventLog(time.time)
        self.measures = Measures()
        self._clock = clock
        self._session_queue = session_queue
        self._core = Core(self.server_incarnation, self.limits, quotas)
        self._pipeline = CommitPipeline(
            store, self._release, self._refuse, self._store_changed, self.measures
        )
        self._pending: dict[int, Sink] = {}
        self._sessions: dict[int, Session] = {}
        self._watches: dict[int, Watch] = {}
        self._last_number = 0
        self._prober = Prober(self._apply, self._core.is_suspected)
        self._pulse: asyncio.TimerHandle | None = None
        self._pulse_at = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._not_ready: str | None = "starting"
        self._stopping = False
        self._listeners: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Restore the store's state; the runtime is ready when this returns."""
        found = await self._pipeline.load()
        self._core.restore(found, self._clock())
        self._not_ready = None
        logs.info("runtime_started", incarnation=f"{self.server_incarnation:016x}", records=len(found))
        self.event_log.note(ServerNote("server_started", f"{len(found)} records were taken up"))
        self._beat()
        self._schedule()
        self._readiness_changed()

    def begin_shutdown(self) -> None:
        """Announce that the server stops: pending calls are answered, sessions end. Idempotent."""
        if self._stopping:
            return
        self._cancel_timer()
        if self._pulse is not None:
            self._pulse.cancel()
        self._prober.close()
        self._apply(Shutdown())
        self._stopping = True
        self._not_ready = "shutting down"
        self.event_log.close()
        self._readiness_changed()

    async def shutdown(self) -> None:
        """Begin the shutdown and end all waits."""
        self.begin_shutdown()
        await self._pipeline.drain()
        pending, self._pending = self._pending, {}
        for sink in pending.values():
            sink(CoreError(ErrorKind.SHUTTING_DOWN, SHUTTING_DOWN))
        for session in self._sessions.values():
            session.end()
        for watch in self._watches.values():
            watch.send_queue.close()

    async def close(self) -> None:
        """End the runtime; everything acknowledged is durable when this returns."""
        await self.shutdown()
        await self._pipeline.close()

    def readiness(self) -> str | None:
        """Return why the server cannot do its work now, or None if it can."""
        return self._not_ready or self._pipeline.failure

    @property
    def views(self) -> ClusterViews:
        """Read models of the clusters, as of now.

        Raises:
            CoreError: The server is not ready, or stops.
        """
        refusal = self._not_now()
        if refusal is not None:
            raise refusal
        return self._core.views

    @property
    def declarations(self) -> Declarations:
        """The declared clusters, as of now.

        Raises:
            CoreError: The server is not ready, or stops.
        """
        self.views  # noqa: B018 - refuses
        return self._core.declarations

    @property
    def store_failure(self) -> str | None:
        """Reason for which changes are refused for now; None if they are accepted."""
        return self._pipeline.failure

    @property
    def open_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    @property
    def unanswered(self) -> int:
        """Number of requests not answered yet."""
        return len(self._pending)

    def add_readiness_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the loop whenever `readiness` may have changed."""
        self._listeners.append(listener)

    def now(self) -> float:
        """Return the time by the runtime's monotonic clock, seconds."""
        return self._clock()

    def next_number(self) -> int:
        """Return a number that was never used before, for a token or a session."""
        self._last_number += 1
        return self._last_number

    def random_incarnation(self) -> int:
        """Return a random number for a new generation of a cluster."""
        return secrets.randbits(64) or 1

    def random_secret(self) -> bytes:
        """Return a secret for a new generation of a cluster."""
        return secrets.token_bytes(32)

    async def request(self, event: AnsweredEvent, answer: type[A]) -> A:
        """Hand a request in and wait for its answer, which must be an `answer`.

        Cancelling the call abandons the request: a change may still happen, a blocked read ends.

        Raises:
            CoreError: The request was refused.
        """
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def settle(answer: object) -> None:
            if not future.done():
                future.set_result(answer)

        self.ask(event, settle)
        try:
            result = await future
        except asyncio.CancelledError:
            self.abandon(event.token)
            raise
        if isinstance(result, CoreError):
            # A copy: one error may answer many, and raising gives each its own traceback.
            raise replace(result)
        if not isinstance(result, answer):
            raise TypeError(f"{type(event).__name__} was answered with {type(result).__name__}")
        return result

    def ask(self, event: AnsweredEvent, sink: Sink) -> None:
        """Hand a request in; `sink` gets its answer, now or later, unless the request is abandoned."""
        refusal = self._early_refusal(event)
        if refusal is not None:
            sink(refusal)
            return
        if isinstance(event, KvSet) and event.key.startswith(PREEMPTION_NOTICES):
            sink = self._noting(event, sink)
        self._pending[event.token] = sink
        try:
            self._apply(event)
        except BaseException:
            self._pending.pop(event.token, None)
            raise

    def abandon(self, token: int) -> None:
        """Forget a request: a change may still happen, a blocked read ends. Idempotent."""
        self._pending.pop(token, None)
        self._apply(Abandon(token))

    async def open_session(
        self, caller: Caller, seen: SeenState | None = None, remote: str = ""
    ) -> tuple[Session, Attached]:
        """Attach a new session to the caller's task slot. Pair with `close_session`.

        Args:
            caller: Whose task slot it is.
            seen: Latest state that the caller has seen; None if it does not say.
            remote: Address from which the session comes; empty if it is not known.

        Raises:
            CoreError: The task slot is not the caller's.
        """
        session = Session(self.next_number(), caller, self._session_queue, remote=remote)
        self._sessions[session.number] = session
        try:
            attached = await self.request(Attach(self.next_number(), caller, session.number, seen), Attached)
        except BaseException:
            self.close_session(session)
            raise
        logs.debug("session_attached", **describe_caller(caller), session=session.number)
        return session, attached

    def close_session(self, session: Session) -> None:
        """Note that a session's stream has ended. Idempotent."""
        if self._sessions.pop(session.number, None) is not None:
            session.end()
            self.measures.sessions_dropped += session.dropped
            self._apply(SessionClosed(session.number, session.remote))
            logs.debug("session_closed", **describe_caller(session.caller), session=session.number)

    def send(self, event: SessionMessage) -> None:
        """Hand in a session's message."""
        self._apply(event)

    async def open_watch(self, event: KvWatch) -> Watch:
        """Put a watch in place. Pair with `close_watch`.

        Raises:
            CoreError: The watch was refused.
        """
        # A watch may lag by as much as the server remembers; beyond that it could not be resumed either.
        limits = self.limits
        watch = Watch(event.token, max(limits.watch_history, 1), max(limits.watch_history_bytes, 1))
        self._watches[event.token] = watch
        try:
            watch.revision = (await self.request(event, KvRevision)).revision
        except BaseException:
            self.close_watch(watch)
            raise
        return watch

    def close_watch(self, watch: Watch) -> None:
        """End a watch. Idempotent."""
        if self._watches.pop(watch.token, None) is not None:
            watch.send_queue.close()
            self._apply(Abandon(watch.token))

    def tick(self) -> None:
        """Let the core act on the time that has passed; called by the timer, or by a test's clock."""
        self._apply(Tick())

    def _noting(self, event: KvSet, sink: Sink) -> Sink:
        """Note a preemption when its announcement has become a key; of several, the first one does."""

        def settle(answer: object) -> None:
            if isinstance(answer, KvRevision):
                self.event_log.note(preemption(event))
            sink(answer)

        return settle

    def _not_now(self) -> CoreError | None:
        if self._stopping:
            return CoreError(ErrorKind.SHUTTING_DOWN, SHUTTING_DOWN)
        if self._not_ready is not None:
            return CoreError(
                ErrorKind.INTERNAL,
                f"the coordination server cannot answer yet: {self._not_ready}. Retry later.",
            )
        return None

    def _early_refusal(self, event: AnsweredEvent) -> CoreError | None:
        refusal = self._not_now()
        if refusal is not None:
            return refusal
        if self._pipeline.failure is not None and isinstance(event, Mutation | Operation):
            return CoreError(
                ErrorKind.STORE_UNAVAILABLE,
                f"the coordination server cannot change anything for now: {self._pipeline.failure}. Reads "
                "go on. Retry when the operator has mended that.",
            )
        if self._pipeline.failure is not None and self._would_show_undurable(event):
            return CoreError(
                ErrorKind.STORE_UNAVAILABLE,
                "the latest change of what was asked for is not durable yet, so that a crash could undo it: "
                f"{self._pipeline.failure}. Retry when the operator has mended that.",
            )
        return None

    def _would_show_undurable(self, event: AnsweredEvent) -> bool:
        """Return whether a read would show a change that the store has refused so far."""
        match event:
            case KvGet():
                return self._pipeline.is_undurable(event.caller.cluster, records.KEY, event.key)
            case GetClusterState():
                return self._pipeline.is_undurable(event.caller.cluster, records.MEMBER)
            case KvGetMany() | KvList() | KvWatch():
                # Their answers include the latest revision.
                return self._pipeline.is_undurable(event.caller.cluster, records.CHANGE)
        return False

    def _apply(self, event: Event) -> None:
        if self._stopping:
            # Nothing that happens now may count: streams close because we close them, not because clients
            # died.
            return
        if failpoints.armed:
            failpoints.hit("runtime.before_apply")
        self._note_stall()
        effects = self._core.apply(event, self._clock())
        if failpoints.armed:
            failpoints.hit("runtime.after_apply")
        if effects:
            self._pipeline.submit(effects)
        self._schedule()

    def _beat(self) -> None:
        """Measure stalls: it is called every `_PULSE`, unless the loop does not run."""
        self._note_stall()
        loop = asyncio.get_running_loop()
        self._pulse_at = loop.time() + _PULSE
        self._pulse = loop.call_at(self._pulse_at, self._beat)

    def _note_stall(self) -> None:
        """Report a past stall to the core before it checks any deadline against the passed time."""
        now = asyncio.get_running_loop().time()
        stall = now - self._pulse_at
        if stall > _PULSE:
            self._pulse_at = now
            logs.warning("stalled", seconds=round(stall, 3))
            self._core.apply(Stalled(stall), self._clock())

    def _schedule(self) -> None:
        deadline = self._core.wake_at
        if deadline is None or self._stopping or deadline >= self._timer_at:
            # A timer that is set too early does no harm: it finds nothing due and is set again. Moving it at
            # every heartbeat would cost more.
            return
        self._cancel_timer()
        self._timer_at = deadline
        delay = max(0.0, deadline - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        try:
            self.tick()
        except Exception:  # noqa: BLE001 -- a bug, but without a timer no member would ever be declared lost again
            logs.error("tick_failed", exc_info=True)
            self._timer_at = self._clock() + _AFTER_FAILED_TICK
            self._timer = asyncio.get_running_loop().call_later(_AFTER_FAILED_TICK, self._on_timer)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, float("inf")

    def _store_changed(self) -> None:
        failure = self._pipeline.failure
        kind = "store_recovered" if failure is None else "store_failed"
        self.event_log.note(ServerNote(kind, failure or ""))
        self._readiness_changed()

    def _readiness_changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _release(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                sink = self._pending.pop(effect.token, None)
                if sink is not None:
                    sink(effect.answer)
            elif isinstance(effect, Push):
                if self._pipeline.failure is not None and _reports_loss(effect):
                    self._pipeline.hold(effect)
                else:
                    self._push(effect)
            elif isinstance(effect, WatchPush):
                watch = self._watches.get(effect.token)
                if watch is not None:
                    watch.send_queue.put(effect, effect.size)
            elif isinstance(effect, Noted):
                self._note(effect)
            elif isinstance(effect, Probe):
                self._prober.begin(effect)

    def _note(self, noted: Noted) -> None:
        log_event = noted.log_event
        if isinstance(log_event, BarrierEnded):
            self.measures.barriers["failed" if log_event.error else "passed"].observe(log_event.waited)
        self.event_log.note(log_event)

    def _refuse(self, effects: Sequence[Effect], reason: str) -> list[Effect]:
        """Carries out the effects of a failed commit that need no durability; returns the others."""
        failed = CoreError(
            ErrorKind.STORE_UNAVAILABLE,
            f"the coordination server could not make the change durable: {reason}. It takes effect if "
            "the store recovers: retry with the same request id to learn of it.",
        )
        held: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Reply):
                answer = effect.answer if isinstance(effect.answer, CoreError) else failed
                self._release([Reply(effect.token, answer)])
            elif isinstance(effect, WatchPush) or (isinstance(effect, Push) and _reports_loss(effect)):
                held.append(effect)
            else:
                self._release([effect])
        return held

    def _push(self, push: Push) -> None:
        message = push.message
        outgoing = OutgoingMessage(message)
        for number in push.sessions:
            session = self._sessions.get(number)
            if session is not None:
                session.send(outgoing)
        passed = isinstance(message, BarrierResult) and message.error is None
        if not passed and not isinstance(message, HeartbeatAck) and push.sessions:
            effect_logging.log_message(message, self._cluster_of(push))

    def _cluster_of(self, push: Push) -> str:
        sessions = (self._sessions.get(number) for number in push.sessions)
        return next((session.caller.cluster for session in sessions if session is not None), "")


def _reports_loss(push: Push) -> bool:
    """Return whether a message says that a member was lost or failed.

    Others act on it, so a crash of the server must not undo it: nobody hears of it before it is durable.
    """
    match push.message:
        case MembershipChange():
            return True
        case BarrierResult(error=CoreError() as error):
            return any(member.state in (MemberState.LOST, MemberState.FAILED) for member in error.members)
        case SessionEnd(error):
            return error.kind is ErrorKind.FENCED
    return False
