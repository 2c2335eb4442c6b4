"""The state machine: events in, effects out.

    core = Core(server_incarnation, limits)
    core.restore(records, now)                # after a restart
    effects = core.apply(event, now)          # for everything that happens
    core.next_deadline()                      # when to apply a Tick

Time comes in as `now`, seconds of one monotonic clock, and must not go back. Deadlines take effect only on
`Tick`: an event that was on its way when its deadline passed is still in time if it is applied before the
Tick.

**Stalls.** If the server itself was held up (suspended, overloaded), signs of life may be waiting unread.
`Stalled` says for how long and extends all leases: nobody is declared lost for the server's own absence.

**Sessions.** A `Heartbeat` or `EnterBarrier` on a session that is not attached (never, not any more, or
replaced) is answered by `SessionEnd` with NOT_REGISTERED: attach again. `SessionEnd` with FENCED or
SHUTTING_DOWN is final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar, assert_never

from dmesh_server.core import membership, messages, reads, records, registration, store_loss, validation
from dmesh_server.core.cluster import Cluster, ServerState
from dmesh_server.core.cluster_settings import decide
from dmesh_server.core.deadlines import (
    BarrierDue,
    LeaseDue,
    LivenessDue,
    NoticeDue,
    RestoreDue,
    StuckDue,
    WaitDue,
)
from dmesh_server.core.declarations import Declaration, Declarations
from dmesh_server.core.effects import (
    Answer,
    Attached,
    Done,
    Effect,
    HeartbeatAck,
    Operated,
    Record,
    Registered,
    SessionEnd,
)
from dmesh_server.core.errors import CoreError, ErrorKind, not_attached, stopping
from dmesh_server.core.events import (
    Abandon,
    Attach,
    CancelBarrier,
    DeclareCluster,
    DropKey,
    EndSession,
    EnterBarrier,
    Event,
    Evict,
    Evidence,
    GetBarrier,
    GetClusterState,
    GetMember,
    GrantLease,
    Heartbeat,
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
    PresentBarriers,
    Register,
    RenewLease,
    ReportError,
    ReportProcess,
    ReportStatus,
    ReportWaiting,
    Request,
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
from dmesh_server.core.key_restore import KeyCall
from dmesh_server.core.model import Caller, ClusterState, DepartureCause, Limits, Liveness, MemberState
from dmesh_server.core.operations import OperatorEvent, operate
from dmesh_server.core.quotas import Quotas
from dmesh_server.core.records import Generation
from dmesh_server.core.replies import RememberedAnswer
from dmesh_server.core.restoring import FLOOR, restore_all
from dmesh_server.core.roster import TaskSlot
from dmesh_server.core.store_loss import StoreIdentity
from dmesh_server.core.transaction import Transaction
from dmesh_server.core.views import ClusterViews

_Request = TypeVar("_Request", bound=Request)


class Core:
    """All clusters of one server.

    Args:
        server_incarnation: Random number of this run of the server.
        limits: Bounds and times.
        quotas: Bounds on tenants; none if None.
    """

    def __init__(self, server_incarnation: int, limits: Limits, quotas: Quotas | None = None) -> None:
        self.server_incarnation = server_incarnation
        self.limits = limits
        self.stopping = False
        """True after `Shutdown`."""
        self._clusters: dict[str, Cluster] = {}
        self._ended: dict[str, None] = {}
        """Clusters without a life, in order of their ends: the first to make room."""
        self._shared = ServerState(limits, quotas=quotas or Quotas())
        self._deadlines = self._shared.deadlines
        self.views = ClusterViews(self._clusters)
        """Read models of the clusters."""
        self._store = StoreIdentity(server_incarnation)
        self.declarations = Declarations(limits)
        """The clusters that operators have declared."""
        self._epoch_floor = 0
        """The highest epoch of any cluster forgotten, so that epochs grow even through that."""

    # The interface of the runtime.

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Apply an event to the state, and return its effects, in order."""
        transaction = Transaction(now)
        self._dispatch(event, transaction)
        while transaction.unsettled:
            self._settle(self._clusters[transaction.unsettled.pop()], transaction)
        return transaction.effects()

    @property
    def wake_at(self) -> float | None:
        """A lower bound of `next_deadline`, for the price of a look; None if nothing is due ever."""
        heap = self._deadlines.heap
        return heap[0][0] if heap else None

    def next_deadline(self) -> float | None:
        """Return when the runtime must apply a `Tick`; None: not before something else happens. Cheap."""
        return self._deadlines.next()

    def restore(self, durable: Iterable[Record], now: float) -> None:
        """Restore a store's records, in the order in which they were last written. Only for a new core.

        Raises:
            RecordError: A record cannot be understood.
        """
        assert not self._clusters, "only a new core can be restored"
        self._store.value, self._epoch_floor, restored, declared = restore_all(durable, now, self._shared)
        self.declarations.restore(declared)
        self._clusters.update(restored)
        self._ended = {name: None for name, cluster in self._clusters.items() if cluster.ended}

    def clusters(self) -> tuple[str, ...]:
        """Return the names of all clusters, sorted."""
        return tuple(sorted(self._clusters))

    def cluster_state(self, name: str) -> ClusterState | None:
        """Return the state of one cluster, if there is one of that name."""
        cluster = self._clusters.get(name)
        return cluster.state() if cluster else None

    def is_suspected(self, lease: int) -> bool:
        """Return whether the owner of a lease is suspected, so that its process is worth looking for."""
        return self._shared.leases.suspect_of(lease) is not None

    # What can happen, the most frequent first.

    def _dispatch(self, event: Event, transaction: Transaction) -> None:
        match event:
            case (
                Heartbeat() | EnterBarrier() | ReportStatus() | ReportWaiting() | ReportProcess()
                | EndSession()
            ):  # fmt: skip
                self._take_message(event, transaction)
            case (
                KvGet() | KvGetMany() | KvList() | KvWatch() | GetClusterState() | GetMember() | GetBarrier()
            ):
                self._answer(event, transaction, self._read)
            case KvSet() | KvDelete() | KvIncrement() | KvTransaction() if self._defers(event):
                pass
            case RevokeLease() | DropKey() | RestoreKeys() if self._defers(event):
                pass
            case KvSet() | KvDelete() | KvIncrement():
                self._write_keys(event, transaction, lambda cluster: cluster.store.write(event, transaction))
            case KvTransaction():
                self._write_keys(
                    event, transaction, lambda cluster: cluster.store.transact(event, transaction)
                )
            case GrantLease() | RenewLease() | RevokeLease():
                self._answer(event, transaction, self._change_lease)
            case Tick():
                self._tick(transaction)
            case Abandon():
                store = self._shared.waiting.get(event.token)
                if store is not None:
                    store.dismiss(event.token, None, transaction)
            case Attach():
                self._answer(event, transaction, self._attach)
            case PresentBarriers():
                self._answer(event, transaction, self._present_barriers)
            case SessionClosed():
                cluster = self._shared.sessions.get(event.session)
                if cluster is not None:
                    slot = cluster.roster.sessions[event.session]
                    membership.session_closed(cluster, slot, event, transaction)
            case Evidence():
                if event.cluster in self._clusters:
                    membership.take_evidence(self._clusters[event.cluster], event, transaction)
            case Stalled():
                self._shared.leases.note_stall(event.seconds)
            case Register():
                self._answer(event, transaction, self._register)
            case CancelBarrier():
                self._mutate(
                    event,
                    transaction,
                    lambda cluster, slot: self._cancel_barrier(cluster, slot, event, transaction),
                )
            case Leave():
                self._answer(event, transaction, self._leave)
            case ReportError():
                self._mutate(
                    event,
                    transaction,
                    lambda cluster, slot: self._report_error(cluster, slot, event, transaction),
                )
            case (
                DeclareCluster() | WithdrawCluster() | StopBarrier() | Evict() | DropKey() | SnapshotKeys()
                | RestoreKeys()
            ):  # fmt: skip
                self._answer(event, transaction, self._operate)
            case Shutdown():
                self._shutdown(transaction)
            case _:
                assert_never(event)

    # Sessions.

    def _take_message(self, event: SessionMessage, transaction: Transaction) -> None:
        """Act on a session's message, which is a sign of life; end a session that has no member."""
        cluster = self._shared.sessions.get(event.session)
        if cluster is None:
            error = stopping() if self.stopping else not_attached()
            transaction.push((event.session,), SessionEnd(error))
            return
        slot = cluster.roster.sessions[event.session]
        _seen(cluster, slot, transaction)
        match event:
            case Heartbeat():
                if event.progress != slot.progress:
                    cluster.watchdog.progressed(slot, event.progress, transaction)
                slot.beat_at = transaction.now
                transaction.push((event.session,), HeartbeatAck(event.sequence, cluster.epoch))
            case EnterBarrier():
                cluster.barriers.enter(slot, event, transaction)
            case ReportStatus():
                cluster.watchdog.report_status(slot, event.id, event.activity, transaction)
            case ReportWaiting():
                cluster.watchdog.report_waiting(slot, event.operation, event.tasks, event.age, transaction)
            case ReportProcess():
                membership.take_report(cluster, slot, event, transaction)
            case EndSession():
                membership.lose(cluster, slot, DepartureCause.PROCESS_GONE, membership.ENDED, transaction)

    def _attach(self, event: Attach, transaction: Transaction) -> Answer:
        cluster = self._cluster(event.caller)
        self._store.check(cluster, event.seen)
        slot = membership.authorize(cluster, event.caller, transaction)
        _seen(cluster, slot, transaction)
        if event.session in self._shared.sessions:
            raise validation.invalid(f"session {event.session} is attached already")
        membership.attach(cluster, slot, event, transaction)
        return Attached(cluster.epoch)

    # Membership.

    def _register(self, event: Register, transaction: Transaction) -> Answer:
        name, seen = event.caller.cluster, event.seen
        validation.cluster_name(name)
        cluster = self._clusters.get(name)
        if cluster is not None:
            registration.check_incarnation(event.caller, cluster)
        if cluster is not None and seen is not None and self._store.is_older(cluster, seen):
            self._store.renew(event.fresh_incarnation, self._clusters.values(), transaction)
        if seen is None or seen.store == self._store.value:
            answer = self._admit(event, transaction)
        else:
            if cluster is not None and not cluster.ended:
                store_loss.check_place(cluster, seen)
            try:
                answer = self._admit(event, transaction)
            except CoreError as error:
                raise store_loss.translated(error) from error
            cluster = self._clusters[name]
            store_loss.go_on(cluster, seen, transaction)
            answer = replace(answer, epoch=cluster.epoch)
        return replace(answer, store=self._store.named(event.fresh_incarnation, transaction))

    def _admit(self, event: Register, transaction: Transaction) -> Registered:
        name = event.caller.cluster
        cluster = self._clusters.get(name)
        event = registration.choose_task(event, cluster, transaction)
        task = validation.caller_task(event.caller)
        slot = cluster.roster.slots.get(task) if cluster else None
        if (
            cluster is not None
            and slot is not None
            and registration.is_member(cluster, slot, event, transaction)
        ):
            if not slot.state.departed:
                _seen(cluster, slot, transaction)
            return registration.registered(cluster, slot)
        if cluster is not None and not cluster.ended:
            registration.check_registration(event, cluster, self.limits)
            registration.check_free(cluster, task, transaction)
        else:
            event = self.declarations.applied(event)
            registration.check_registration(event, None, self.limits)
            validation.jobs(event.jobs, self.limits)
            settings = decide(event.settings, self.limits, sum(len(job.addresses) for job in event.jobs))
            self._shared.quotas.check_cluster(event.owner, sum(len(job.addresses) for job in event.jobs))
            generation = Generation(
                event.fresh_incarnation, event.fresh_secret, event.jobs, settings, event.owner
            )
            if cluster is None:
                self._make_room(name, transaction)
                cluster = self._clusters[name] = Cluster(name, generation, self._epoch_floor, self._shared)
            cluster.begin(generation, transaction)
            self._shared.quotas.add(cluster)
            self._ended.pop(name, None)
        return registration.registered(cluster, registration.admit(cluster, event, task, transaction))

    def _make_room(self, name: str, transaction: Transaction) -> None:
        """Forget the cluster that ended first, if there are as many as there may be."""
        if len(self._clusters) < self.limits.max_clusters:
            return
        if not self._ended:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"cluster {messages.quote(name)} cannot start: {len(self._clusters)} clusters are "
                "running, which is the server's limit",
            )
        oldest = next(iter(self._ended))
        del self._ended[oldest]
        forgotten = self._clusters.pop(oldest)
        forgotten.forget(transaction)
        self._epoch_floor = max(self._epoch_floor, forgotten.epoch)
        transaction.persist("", records.CLUSTER, FLOOR, records.encode_number(self._epoch_floor))

    def _leave(self, event: Leave, transaction: Transaction) -> Answer:
        validation.request_id(event.request_id)
        validation.reason(event.reason, required=False)
        validation.caller_task(event.caller)
        cluster = self._cluster(event.caller)
        slot = membership.find(cluster, event.caller, transaction)
        if not slot.state.departed:
            slot.last_seen_at = transaction.now
            state, cause = MemberState.LEFT, DepartureCause.LEFT
            if event.reason and not event.clean:
                state, cause = MemberState.FAILED, DepartureCause.EXITED
            membership.depart(cluster, slot, state, cause, event.reason, transaction)
        return Done()

    def _report_error(
        self, cluster: Cluster, slot: TaskSlot, event: ReportError, transaction: Transaction
    ) -> RememberedAnswer:
        validation.reason(event.message, required=True)
        if event.code not in validation.INT32:
            raise validation.invalid(f"the code {event.code} of an error is a number of 32 bits")
        cause = DepartureCause.REPORTED_ERROR
        membership.depart(cluster, slot, MemberState.FAILED, cause, event.message, transaction, event.code)
        return Done()

    def _settle(self, cluster: Cluster, transaction: Transaction) -> None:
        """Derive the consequences of an event after all of its direct changes."""
        if not cluster.ended:
            cluster.epoch_waits.release(transaction)
            membership.report_changes(cluster, transaction)
            cluster.watchdog.settle(transaction)
        elif cluster.name not in self._ended:
            self._ended[cluster.name] = None
            self._end_restore(cluster, _ended(cluster), transaction)
            cluster.end(transaction)

    # Barriers and keys.

    def _present_barriers(self, event: PresentBarriers, transaction: Transaction) -> Answer:
        cluster = self._cluster(event.caller)
        slot = membership.find(cluster, event.caller, transaction)
        if not slot.state.departed:
            _seen(cluster, slot, transaction)
            cluster.reconciliation.take(slot, event.passed, transaction)
        return Done()

    def _cancel_barrier(
        self, cluster: Cluster, slot: TaskSlot, event: CancelBarrier, transaction: Transaction
    ) -> RememberedAnswer:
        cluster.barriers.cancel(slot, event, transaction)
        return Done()

    def _change_lease(self, event: GrantLease | RenewLease | RevokeLease, transaction: Transaction) -> Answer:
        cluster, _ = self._reader(event, transaction)
        if cluster.ended:
            raise _ended(cluster)
        return cluster.store.change_lease(event, transaction)

    def _read(self, event: reads.Read, transaction: Transaction) -> Answer | None:
        if isinstance(event, KvWatch):
            self._store.check(self._cluster(event.caller), event.seen)
        cluster, slot = self._reader(event, transaction)
        return reads.answer(cluster, slot, event, transaction)

    def _defers(self, event: KeyCall) -> bool:
        """Defer a call that would change keys, if keys are being restored; return whether it was."""
        cluster = self._clusters.get(event.caller.cluster)
        return cluster is not None and cluster.store.defers(event)

    def _end_restore(self, cluster: Cluster, answer: Answer | None, transaction: Transaction) -> None:
        """Answer a restore, if there is one and an answer, and make the calls that it has deferred."""
        for event in cluster.store.end_restore(answer, transaction):
            self._dispatch(event, transaction)

    # Requests in general.

    def _cluster(self, caller: Caller) -> Cluster:
        cluster = self._clusters.get(caller.cluster)
        if cluster is None:
            raise CoreError(
                ErrorKind.NOT_REGISTERED,
                f"no client has registered in cluster {messages.quote(caller.cluster)} on this server",
            )
        return cluster

    def _operate(
        self, event: OperatorEvent | DeclareCluster | WithdrawCluster, transaction: Transaction
    ) -> Answer | None:
        if event.caller.task is not None:
            raise validation.invalid(
                "members cannot call operations on their own cluster: leave out the task"
            )
        validation.cluster_name(event.caller.cluster)
        validation.operator(event.by)
        match event:
            case DeclareCluster():
                declaration = Declaration(event.tasks, event.settings)
                return Operated(self.declarations.declare(event.caller.cluster, declaration, transaction))
            case WithdrawCluster():
                return Operated(self.declarations.withdraw(event.caller.cluster, transaction))
            case _:
                return operate(self._cluster(event.caller), event, transaction)

    def _reader(self, event: Request, transaction: Transaction) -> tuple[Cluster, TaskSlot | None]:
        """Return the cluster that is read, and the task slot of the reader; None for an observer."""
        cluster = self._cluster(event.caller)
        if event.caller.task is None:
            return cluster, None
        slot = membership.authorize(cluster, event.caller, transaction)
        _seen(cluster, slot, transaction)
        return cluster, slot

    def _answer(
        self,
        event: _Request,
        transaction: Transaction,
        handle: Callable[[_Request, Transaction], Answer | None],
    ) -> None:
        """Answer a request with what `handle` returns, or its refusal; None: answered by it, or later."""
        try:
            if self.stopping and not isinstance(event, Leave | ReportError):
                raise stopping()
            answer = handle(event, transaction)
        except CoreError as error:
            cluster = self._clusters.get(event.caller.cluster)
            answer = replace(error, epoch=cluster.epoch if cluster else 0)
        if answer is not None:
            transaction.reply(event.token, answer)

    def _mutate(
        self,
        event: Mutation,
        transaction: Transaction,
        change: Callable[[Cluster, TaskSlot], RememberedAnswer],
    ) -> None:
        """Answer a mutation: with the remembered answer if it is a retry, else by making the change."""

        def handle(event: Mutation, transaction: Transaction) -> Answer:
            validation.caller_task(event.caller)
            validation.request_id(event.request_id)
            cluster = self._cluster(event.caller)
            slot = membership.find(cluster, event.caller, transaction)
            if event.session and event.session != slot.session and not slot.state.departed:
                raise not_attached()  # what a replaced session asked may have been given up since
            remembered = slot.replies.find(event.request_id, type(event).__name__, event.reply_slot)
            if remembered is not None:
                return remembered
            if slot.state.departed:
                raise membership.fenced(cluster, slot)
            _seen(cluster, slot, transaction)
            answer = change(cluster, slot)
            cluster.remember(slot, event, answer, transaction)
            return answer

        self._answer(event, transaction, handle)

    def _write_keys(
        self,
        event: KvSet | KvDelete | KvIncrement | KvTransaction,
        transaction: Transaction,
        change: Callable[[Cluster], RememberedAnswer],
    ) -> None:
        """Answer a change of keys, which observers may make as well."""

        def handle(event: Mutation, transaction: Transaction) -> Answer:
            validation.request_id(event.request_id)
            cluster = self._cluster(event.caller)
            remembered = cluster.replies.find(event.request_id, type(event).__name__, 0)
            if remembered is not None:
                return remembered
            if cluster.ended:
                raise _ended(cluster)
            answer = change(cluster)
            cluster.remember(None, event, answer, transaction)
            return answer

        if event.caller.task is None:
            self._answer(event, transaction, handle)
        else:
            self._mutate(event, transaction, lambda cluster, slot: change(cluster))

    # Time and the end.

    def _tick(self, transaction: Transaction) -> None:
        while (due := self._deadlines.pop(transaction.now)) is not None:
            match due:
                case LeaseDue(lease):
                    self._shared.leases.due(lease, transaction)
                case NoticeDue(name):
                    membership.report_changes(self._clusters[name], transaction)
                case StuckDue(name):
                    self._clusters[name].watchdog.look(transaction)
                case LivenessDue(name):
                    self._clusters[name].watchdog.report(transaction)
                case BarrierDue(name, barrier):
                    self._clusters[name].barriers.time_out(barrier, transaction)
                case WaitDue(token):
                    self._shared.waiting[token].time_out(token, transaction)
                case RestoreDue(name):
                    answer = self._clusters[name].store.step_restore(transaction)
                    self._end_restore(self._clusters[name], answer, transaction)
                case _:
                    assert_never(due)

    def _shutdown(self, transaction: Transaction) -> None:
        if self.stopping:
            return
        self.stopping = True
        for cluster in self._clusters.values():
            self._end_restore(cluster, stopping(), transaction)
            cluster.dismiss_waiters(stopping(), transaction)
            sessions = dict(cluster.roster.sessions)
            for slot in sessions.values():
                cluster.unbind(slot)
                slot.state = MemberState.REGISTERED
            transaction.push(sessions, SessionEnd(stopping()))
        # From here on no member is declared lost and no barrier times out: the next server decides that.
        self._deadlines.clear()


def _ended(cluster: Cluster) -> CoreError:
    return CoreError(
        ErrorKind.CLUSTER_ENDING,
        f"all members of cluster {messages.quote(cluster.name)} are gone: its keys are not those of the next "
        "ones. Write them when the first of these has registered.",
    )


def _seen(cluster: Cluster, slot: TaskSlot, transaction: Transaction) -> None:
    """Note a member's sign of life, whichever way it came."""
    slot.last_seen_at = transaction.now
    cluster.leases.renew(slot.lease, transaction.now)
    if slot.liveness is Liveness.BLOCKED:
        cluster.watchdog.unblock(slot, transaction)
