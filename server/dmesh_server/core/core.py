"""The state machine: events in, effects out.

    core = Core(server_incarnation, limits)
    core.restore(records, now)                # after a restart
    effects = core.apply(event, now)          # for everything that happens
    core.next_deadline()                      # when to apply a Tick

Time comes in as `now`, seconds of one monotonic clock, and must not go back. Deadlines take effect only on
`Tick`: an event that was on its way when its deadline passed is still in time if it is applied before the
Tick.

**Stalls.** If the server itself was held up (suspended, overloaded) so that an event comes more than a
heartbeat interval after a deadline that should have been served, signs of life may be waiting unread. All
leases and session graces then start anew: nobody is declared lost for the server's own absence.

**Sessions.** A `Heartbeat` or `EnterBarrier` on a session that is not attached (never, not any more, or
replaced) is answered by `SessionEnd` with NOT_REGISTERED: attach again. `SessionEnd` with FENCED or
SHUTTING_DOWN is final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, assert_never

from dmesh_server.core import membership, operations, records, registration, validation, wording
from dmesh_server.core.census import Census
from dmesh_server.core.cluster import Cluster, ServerState
from dmesh_server.core.cluster_settings import decide
from dmesh_server.core.deadlines import (
    BarrierDue,
    GraceDue,
    LeaseDue,
    LivenessDue,
    NoticeDue,
    StuckDue,
    WaitDue,
)
from dmesh_server.core.effects import (
    Answer,
    Attached,
    Clusters,
    Done,
    Effect,
    HeartbeatAck,
    Record,
    SessionEnd,
)
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import (
    Abandon,
    Attach,
    CancelBarrier,
    DropKey,
    EnterBarrier,
    Event,
    Evict,
    GetClusterState,
    Heartbeat,
    KvCompareAndSet,
    KvDelete,
    KvGet,
    KvGetMany,
    KvIncrement,
    KvList,
    KvSet,
    KvWatch,
    Leave,
    ListClusters,
    Mutation,
    Register,
    ReportError,
    ReportStatus,
    ReportWaiting,
    Request,
    SessionClosed,
    Shutdown,
    StopBarrier,
    Tick,
)
from dmesh_server.core.model import Caller, ClusterState, Limits, MemberState
from dmesh_server.core.records import Life
from dmesh_server.core.replies import RememberedAnswer, completed, had_effect, without_value
from dmesh_server.core.restoring import FLOOR, restore_all
from dmesh_server.core.roster import Seat
from dmesh_server.core.turn import Turn

_Request = TypeVar("_Request", bound=Request)


class Core:
    """All clusters of one server.

    Args:
        server_incarnation: Random number of this run of the server.
        limits: Bounds and times.
    """

    def __init__(self, server_incarnation: int, limits: Limits) -> None:
        self.server_incarnation = server_incarnation
        self.limits = limits
        self.stopping = False
        """True after `Shutdown`."""
        self._clusters: dict[str, Cluster] = {}
        self._ended: dict[str, None] = {}
        """Clusters without a life, in order of their ends: the first to make room."""
        self._shared = ServerState(limits)
        self._deadlines = self._shared.deadlines
        self._shortest_interval = limits.heartbeat_interval
        """The shortest heartbeat interval of any cluster so far."""
        self.census = Census(self._clusters)
        """What there is to see of them."""
        self._epoch_floor = 0
        """The highest epoch of any cluster forgotten, so that epochs grow even through that."""

    # The interface of the runtime.

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Changes the state as `event` demands and returns what is to be done about it, in order."""
        turn = Turn(now)
        due = self._deadlines.next()
        if due is not None and now - due > self._shortest_interval:
            self._forgive(now - due, now)
        self._dispatch(event, turn)
        while turn.unsettled:
            self._settle(self._clusters[turn.unsettled.pop()], turn)
        return turn.effects()

    def next_deadline(self) -> float | None:
        """Returns when the runtime must apply a `Tick`; None: not before something else happens. Cheap."""
        return self._deadlines.next()

    def restore(self, durable: Iterable[Record], now: float) -> None:
        """Takes up what a store has kept, in the order in which it was last written. Only for a new core.

        Raises:
            RecordError: A record cannot be understood.
        """
        assert not self._clusters, "only a new core can be restored"
        self._epoch_floor, restored = restore_all(durable, now, self._shared)
        self._clusters.update(restored)
        for cluster in self._clusters.values():
            self._note_interval(cluster)
        self._ended = {name: None for name, cluster in self._clusters.items() if cluster.ended}

    def clusters(self) -> tuple[str, ...]:
        """Returns the names of all clusters, sorted."""
        return tuple(sorted(self._clusters))

    def cluster_state(self, name: str) -> ClusterState | None:
        """Returns the state of one cluster, if there is one of that name."""
        cluster = self._clusters.get(name)
        return cluster.state() if cluster else None

    def _forgive(self, delay: float, now: float) -> None:
        """Lets leases and graces begin anew where the server itself was held up for too long."""
        for cluster in self._clusters.values():
            if delay > cluster.settings.heartbeat_interval:
                cluster.floor = now

    # What can happen, the most frequent first.

    def _dispatch(self, event: Event, turn: Turn) -> None:
        match event:
            case Heartbeat():
                self._heartbeat(event, turn)
            case EnterBarrier():
                self._enter_barrier(event, turn)
            case KvGet():
                self._answer(event, turn, self._kv_get)
            case KvSet():
                self._write_keys(event, turn, lambda cluster: cluster.store.set(event, turn))
            case KvIncrement():
                self._mutate(event, turn, lambda cluster, seat: cluster.store.increment(event, turn))
            case KvCompareAndSet():
                self._mutate(event, turn, lambda cluster, seat: cluster.store.compare_and_set(event, turn))
            case KvDelete():
                self._write_keys(event, turn, lambda cluster: cluster.store.delete(event, turn))
            case KvGetMany():
                self._answer(
                    event, turn, lambda event, turn: self._reader(event, turn)[0].store.get_many(event)
                )
            case KvList():
                self._answer(event, turn, lambda event, turn: self._reader(event, turn)[0].store.list(event))
            case KvWatch():
                self._answer(event, turn, self._kv_watch)
            case Tick():
                self._tick(turn)
            case Abandon():
                store = self._shared.waiting.get(event.token)
                if store is not None:
                    store.dismiss(event.token, None, turn)
            case Attach():
                self._answer(event, turn, self._attach)
            case SessionClosed():
                cluster = self._shared.sessions.get(event.session)
                if cluster is not None:
                    membership.session_closed(cluster, cluster.roster.sessions[event.session], turn)
            case Register():
                self._answer(event, turn, self._register)
            case CancelBarrier():
                self._mutate(
                    event, turn, lambda cluster, seat: self._cancel_barrier(cluster, seat, event, turn)
                )
            case GetClusterState():
                self._answer(
                    event, turn, lambda event, turn: self._reader(event, turn)[0].state(event.known_epoch)
                )
            case ListClusters():
                turn.reply(
                    event.token,
                    Clusters(tuple(self._clusters[name].state() for name in sorted(self._clusters))),
                )
            case Leave():
                self._answer(event, turn, self._leave)
            case ReportError():
                self._mutate(
                    event, turn, lambda cluster, seat: self._report_error(cluster, seat, event, turn)
                )
            case ReportStatus() | ReportWaiting():
                self._report(event, turn)
            case StopBarrier() | Evict() | DropKey():
                self._answer(event, turn, self._operate)
            case Shutdown():
                self._shutdown(turn)
            case _:
                assert_never(event)

    # Sessions.

    def _heartbeat(self, event: Heartbeat, turn: Turn) -> None:
        cluster = self._shared.sessions.get(event.session)
        if cluster is None:
            self._refuse_session(event.session, turn)
            return
        seat = cluster.roster.sessions[event.session]
        membership.seen(cluster, seat, turn)
        if event.progress != seat.progress:
            cluster.watchdog.progressed(seat, event.progress, turn)
        seat.beat_at = turn.now
        turn.push((event.session,), HeartbeatAck(event.sequence, cluster.epoch))

    def _report(self, event: ReportStatus | ReportWaiting, turn: Turn) -> None:
        cluster = self._shared.sessions.get(event.session)
        if cluster is None:
            self._refuse_session(event.session, turn)
            return
        seat = cluster.roster.sessions[event.session]
        membership.seen(cluster, seat, turn)
        if isinstance(event, ReportStatus):
            cluster.watchdog.report_status(seat, event.id, event.activity, turn)
        else:
            cluster.watchdog.report_waiting(seat, event.operation, event.tasks, event.age, turn)

    def _enter_barrier(self, event: EnterBarrier, turn: Turn) -> None:
        cluster = self._shared.sessions.get(event.session)
        if cluster is None:
            self._refuse_session(event.session, turn)
            return
        seat = cluster.roster.sessions[event.session]
        membership.seen(cluster, seat, turn)
        cluster.barriers.enter(seat, event, turn)

    def _refuse_session(self, session: int, turn: Turn) -> None:
        error = _stopping() if self.stopping else _not_attached()
        turn.push((session,), SessionEnd(error))

    def _attach(self, event: Attach, turn: Turn) -> Answer:
        cluster = self._cluster(event.caller)
        seat = membership.authorize(cluster, event.caller, turn)
        if event.session in self._shared.sessions:
            raise validation.invalid(f"session {event.session} is attached already")
        membership.attach(cluster, seat, event, turn)
        return Attached(cluster.epoch)

    # Membership.

    def _register(self, event: Register, turn: Turn) -> Answer:
        name = event.caller.cluster
        validation.cluster_name(name)
        cluster = self._clusters.get(name)
        event = registration.seated(event, cluster, turn)
        task = validation.caller_task(event.caller)
        seat = cluster.roster.seats.get(task) if cluster else None
        if cluster is not None and seat is not None and registration.is_holder(cluster, seat, event, turn):
            return registration.registered(cluster, seat)
        if cluster is not None and not cluster.ended:
            registration.check_registration(event, cluster, self.limits)
            registration.check_free(cluster, task, turn)
        else:
            registration.check_registration(event, None, self.limits)
            validation.jobs(event.jobs, self.limits)
            settings = decide(event.settings, self.limits, sum(len(job.addresses) for job in event.jobs))
            life = Life(event.fresh_incarnation, event.fresh_secret, event.jobs, settings)
            if cluster is None:
                self._make_room(name, turn)
                cluster = self._clusters[name] = Cluster(name, life, self._epoch_floor, self._shared)
            cluster.begin(life, turn)
            self._note_interval(cluster)
            self._ended.pop(name, None)
        return registration.registered(cluster, registration.admit(cluster, event, task, turn))

    def _note_interval(self, cluster: Cluster) -> None:
        self._shortest_interval = min(self._shortest_interval, cluster.settings.heartbeat_interval)

    def _make_room(self, name: str, turn: Turn) -> None:
        """Forgets the cluster that ended first, if there are as many as there may be."""
        if len(self._clusters) < self.limits.max_clusters:
            return
        if not self._ended:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"cluster {wording.quote(name)} cannot begin: {len(self._clusters)} clusters are running, "
                "which is the server's limit",
            )
        oldest = next(iter(self._ended))
        del self._ended[oldest]
        forgotten = self._clusters.pop(oldest)
        forgotten.forget(turn)
        self._epoch_floor = max(self._epoch_floor, forgotten.epoch)
        turn.persist("", records.CLUSTER, FLOOR, records.encode_number(self._epoch_floor))

    def _leave(self, event: Leave, turn: Turn) -> Answer:
        validation.request_id(event.request_id)
        validation.reason(event.reason, required=False)
        validation.caller_task(event.caller)
        cluster = self._cluster(event.caller)
        seat = membership.find(cluster, event.caller, turn)
        if not seat.state.departed:
            cluster.passing.take(seat, event.passed, turn)
            seat.last_seen_at = turn.now
            state = MemberState.FAILED if event.reason and not event.clean else MemberState.LEFT
            membership.depart(cluster, seat, state, event.reason, turn)
        return Done()

    def _report_error(self, cluster: Cluster, seat: Seat, event: ReportError, turn: Turn) -> RememberedAnswer:
        validation.reason(event.message, required=True)
        membership.depart(cluster, seat, MemberState.FAILED, event.message, turn)
        return Done()

    def _settle(self, cluster: Cluster, turn: Turn) -> None:
        """Draws the conclusions from what has happened, when all of this event's is known."""
        if not cluster.ended:
            membership.tell_changes(cluster, turn)
            cluster.watchdog.settle(turn)
        elif cluster.name not in self._ended:
            cluster.end(turn)
            self._ended[cluster.name] = None

    # Barriers and keys.

    def _cancel_barrier(
        self, cluster: Cluster, seat: Seat, event: CancelBarrier, turn: Turn
    ) -> RememberedAnswer:
        cluster.barriers.cancel(seat, event, turn)
        return Done()

    def _kv_get(self, event: KvGet, turn: Turn) -> Answer | None:
        cluster, seat = self._reader(event, turn)
        if event.timeout != 0:
            self._check_waiter(cluster, event.token)
        return cluster.store.get(event, seat, turn)

    def _kv_watch(self, event: KvWatch, turn: Turn) -> None:
        cluster, seat = self._reader(event, turn)
        self._check_waiter(cluster, event.token)
        cluster.store.watch(event, seat, turn)

    def _check_waiter(self, cluster: Cluster, token: int) -> None:
        if cluster.ended:
            raise CoreError(
                ErrorKind.CLUSTER_ENDING,
                f"cluster {wording.quote(cluster.name)} has ended: all its members have departed, so there "
                "is nothing to wait for",
            )
        if token in self._shared.waiting:
            raise validation.invalid(f"token {token} waits already")

    # Requests in general.

    def _cluster(self, caller: Caller) -> Cluster:
        cluster = self._clusters.get(caller.cluster)
        if cluster is None:
            raise CoreError(
                ErrorKind.NOT_REGISTERED,
                f"nobody has registered in a cluster {wording.quote(caller.cluster)} on this server",
            )
        return cluster

    def _operate(self, event: StopBarrier | Evict | DropKey, turn: Turn) -> Answer:
        if event.caller.task is not None:
            raise validation.invalid("members do not operate on their cluster from outside: name no task")
        cluster = self._cluster(event.caller)
        match event:
            case StopBarrier():
                return operations.stop_barrier(cluster, event, turn)
            case Evict():
                return operations.evict(cluster, event, turn)
            case DropKey():
                return operations.drop_key(cluster, event, turn)

    def _reader(self, event: Request, turn: Turn) -> tuple[Cluster, Seat | None]:
        """Returns the cluster that is read, and the seat of the reader; None for an observer."""
        cluster = self._cluster(event.caller)
        if event.caller.task is None:
            return cluster, None
        return cluster, membership.authorize(cluster, event.caller, turn)

    def _answer(self, event: _Request, turn: Turn, handle: Callable[[_Request, Turn], Answer | None]) -> None:
        """Answers a request with what `handle` returns, or its refusal; None: answered by it, or later."""
        try:
            if self.stopping and not isinstance(event, Leave | ReportError):
                raise _stopping()
            answer = handle(event, turn)
        except CoreError as error:
            cluster = self._clusters.get(event.caller.cluster)
            answer = CoreError(error.kind, error.message, error.members, cluster.epoch if cluster else 0)
        if answer is not None:
            turn.reply(event.token, answer)

    def _mutate(
        self, event: Mutation, turn: Turn, change: Callable[[Cluster, Seat], RememberedAnswer]
    ) -> None:
        """Answers a mutation: with the remembered answer if it is a retry, else by making the change."""

        def handle(event: Mutation, turn: Turn) -> Answer:
            validation.caller_task(event.caller)
            validation.request_id(event.request_id)
            cluster = self._cluster(event.caller)
            seat = membership.find(cluster, event.caller, turn)
            call = type(event).__name__
            remembered = seat.replies.find(event.request_id, call)
            if remembered is not None:
                return completed(remembered, event)
            if seat.state.departed:
                raise membership.fenced(cluster, seat)
            membership.seen(cluster, seat, turn)
            answer = change(cluster, seat)
            if had_effect(answer):
                kept = seat.replies.add(event.request_id, call, without_value(answer))
                key = records.reply_key(seat.task, seat.replies.slot(kept))
                turn.persist(cluster.name, records.REPLY, key, records.encode_reply(seat.incarnation, kept))
            return answer

        self._answer(event, turn, handle)

    def _write_keys(
        self, event: KvSet | KvDelete, turn: Turn, change: Callable[[Cluster], RememberedAnswer]
    ) -> None:
        """Answers who sets or deletes keys, which observers may do as well.

        An observer has no seat in which answers could be remembered: its retry is a call of its own, which
        asks for the same state.
        """

        def handle(event: KvSet | KvDelete, turn: Turn) -> Answer:
            validation.request_id(event.request_id)
            cluster = self._cluster(event.caller)
            if cluster.ended:
                raise CoreError(
                    ErrorKind.CLUSTER_ENDING,
                    f"all members of cluster {wording.quote(cluster.name)} are gone: its keys are not those "
                    "of the next ones. Write them when the first of these has registered.",
                )
            return change(cluster)

        if event.caller.task is None:
            self._answer(event, turn, handle)
        else:
            self._mutate(event, turn, lambda cluster, seat: change(cluster))

    # Time and the end.

    def _tick(self, turn: Turn) -> None:
        while (due := self._deadlines.pop(turn.now)) is not None:
            match due:
                case LeaseDue(name, task):
                    cluster = self._clusters[name]
                    membership.lease_due(cluster, cluster.roster.seats[task], turn)
                case GraceDue(name, task):
                    cluster = self._clusters[name]
                    membership.grace_due(cluster, cluster.roster.seats[task], turn)
                case NoticeDue(name):
                    membership.tell_changes(self._clusters[name], turn)
                case StuckDue(name):
                    self._clusters[name].watchdog.look(turn)
                case LivenessDue(name):
                    self._clusters[name].watchdog.tell(turn)
                case BarrierDue(name, barrier):
                    self._clusters[name].barriers.time_out(barrier, turn)
                case WaitDue(token):
                    self._shared.waiting[token].time_out(token, turn)
                case _:
                    assert_never(due)

    def _shutdown(self, turn: Turn) -> None:
        if self.stopping:
            return
        self.stopping = True
        for cluster in self._clusters.values():
            cluster.dismiss_waiters(_stopping(), turn)
            sessions = dict(cluster.roster.sessions)
            for seat in sessions.values():
                cluster.unbind(seat)
                seat.state = MemberState.REGISTERED
            turn.push(sessions, SessionEnd(_stopping()))
        # From here on nobody is declared lost and no barrier times out: that is for the successor to judge.
        self._deadlines.clear()


def _stopping() -> CoreError:
    return CoreError(
        ErrorKind.SHUTTING_DOWN,
        "the coordination server is shutting down; connect again to its successor, if there will be one",
    )


def _not_attached() -> CoreError:
    return CoreError(
        ErrorKind.NOT_REGISTERED, "this session is not attached to a member (any more): attach again"
    )
