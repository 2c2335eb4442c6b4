"""Messages that come through an agent's session, dispatched; questions among them are answered.

Everything here runs on the session's thread and must not block for long, but for `report_waiting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dmesh._locks import Lock
from dmesh.coordination.activity import ActivityTracker
from dmesh.coordination.barrier_reconciliation import BarrierReconciliation
from dmesh.coordination.barriers import Barriers
from dmesh.coordination.carrier import Carrier
from dmesh.coordination.dispatcher import EventDispatcher
from dmesh.coordination.faults import Fault
from dmesh.coordination.identity import Identity
from dmesh.coordination.liveness import LivenessBoard
from dmesh.coordination.members import Member, Task
from dmesh.coordination.pending_calls import PendingCalls
from dmesh.coordination.reports import Reports
from dmesh.errors import CoordinationError
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1.progress_pb2 import ProgressReport

_LONGEST_OPERATION = 200


class SessionEvents:
    """The listener of an agent's session: see `session_listener.SessionListener`.

    Args:
        own: Who this agent is.
        waiting: The barriers that are waited at.
        reconciliation: Presents those that have succeeded.
        pending_calls: The calls that are not answered yet.
        notices: Tells the agent's listeners.
        liveness: Tells the user who is blocked or stuck.
        tracker: Knows what this process is doing.
        reports: Makes what goes with heartbeats.
        catch_up: Asks for departures since an epoch, after a time without a session.
        on_over: Called when the session failed: interrupts what waits for it.
        on_store_lost: Called when the server has lost its store: interrupts watches, sets owned keys again.
    """

    def __init__(
        self,
        own: Identity,
        waiting: Barriers,
        reconciliation: BarrierReconciliation,
        pending_calls: PendingCalls,
        notices: EventDispatcher,
        liveness: LivenessBoard,
        tracker: ActivityTracker,
        reports: Reports,
        *,
        catch_up: Callable[[int], object],
        on_over: Callable[[], None],
        on_store_lost: Callable[[], None],
    ) -> None:
        self._own = own
        self._waiting = waiting
        self._reconciliation = reconciliation
        self._pending_calls = pending_calls
        self.on_barrier = waiting.resolve
        """A barrier is over."""
        self.on_reply = pending_calls.resolve
        """A call of the key-value store is answered."""
        self._dispatcher = notices
        self._liveness = liveness
        self._tracker = tracker
        self._reports = reports
        self._catch_up = catch_up
        self._on_over = on_over
        self._on_store_lost = on_store_lost
        self._lock = Lock()
        self._carrier: Carrier | None = None
        self._wait: pb.Waiting | None = None
        self.seen_epoch = 0
        """Epoch up to which all departures are known; 0 if they never were."""

    # What the session calls ---------------------------------------------------------------------------------

    def on_attached(self, carrier: Carrier, *, again: bool) -> None:
        """The session is attached: send the state that the server needs again."""
        self._waiting.attach(carrier.enter_barrier)
        self._pending_calls.attach(carrier.send)
        with self._lock:
            self._carrier = carrier
            if self._wait is not None:
                carrier.put(pb.SessionRequest(waiting=self._wait))
        if again:
            # Departures are pushed only to attached sessions: ask for those during the interruption.
            self._catch_up(self.seen_epoch)

    def on_detached(self) -> None:
        """The session broke."""
        with self._lock:
            self._carrier = None
        self._waiting.detach()
        self._pending_calls.detach()

    def on_departed(self, epoch: int, members: Sequence[Member]) -> None:
        """Members are gone."""
        self.departed(members)
        if self.seen_epoch:
            self.seen_epoch = epoch

    def on_rejoined(self, epoch: int, members: Sequence[Member]) -> None:
        """Task slots of departed members have new holders."""
        self._dispatcher.rejoined(member for member in members if member.incarnation != self._own.incarnation)
        if self.seen_epoch:
            self.seen_epoch = epoch

    def on_liveness(self, members: Sequence[Member]) -> None:
        """Members have become blocked or stuck, or live again."""
        self._liveness.update(members)
        self._dispatcher.liveness(members)

    def on_status_request(self) -> common_pb2.Activity:
        """The server asks what this process is doing, because others wait for it."""
        return self._tracker.report_proto()

    def on_registered(self, cluster_incarnation: int) -> None:
        """The task slot is taken, in this generation of the cluster."""
        self._waiting.begin_generation(cluster_incarnation)

    def on_store_lost(self) -> None:
        """Fail pending calls: the server's store lacks data that this process has seen."""
        self._pending_calls.drop()
        self._on_store_lost()

    def reconcile(self, server_incarnation: int) -> Fault | None:
        """Present the barriers that have succeeded to a server that may have forgotten them."""
        return self._reconciliation.present(server_incarnation)

    def on_failure(self, error: CoordinationError, *, final: bool) -> None:
        """The process was fenced (final), or the coordinator has been gone for too long (not final)."""
        self._waiting.wake()
        self._pending_calls.wake()
        self._on_over()
        self._dispatcher.failed(error, final=final)

    def progress(self) -> int:
        """For the next heartbeat: a number that changes whenever the program gets on."""
        return self._tracker.progress

    def report(self) -> ProgressReport | None:
        """For the next heartbeat: what this process does."""
        return self._reports.due()

    # What the agent calls -----------------------------------------------------------------------------------

    def departed(self, members: Iterable[Member]) -> None:
        """Tell of those among `members` that departed, unless it is this process itself."""
        self._dispatcher.departed(
            member
            for member in members
            if member.state.departed and member.incarnation != self._own.incarnation
        )

    def report_waiting(self, operation: str, tasks: Sequence[Task], age: float) -> None:
        """Report the tasks for which this process waits outside of barriers; none if it does not wait."""
        report = pb.Waiting(
            operation=operation[:_LONGEST_OPERATION],
            tasks=[task.to_proto() for task in tasks],
            age_ms=int(age * 1000),
        )
        with self._lock:
            over = not tasks and self._wait is None
            self._wait = report if tasks else None
            if self._carrier is not None and not over:
                self._carrier.put(pb.SessionRequest(waiting=report))
