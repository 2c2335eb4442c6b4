"""One process's membership of one cluster: its task slot, its session, and what is done through them."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
import weakref
from collections.abc import Callable, Sequence

from dmesh import _log
from dmesh._locks import Lock
from dmesh.coordination import joining
from dmesh.coordination.activity import TRACKER, ActivityTracker
from dmesh.coordination.barrier_methods import STATUS_TIMEOUT, BarrierMethods
from dmesh.coordination.barrier_reconciliation import BarrierReconciliation
from dmesh.coordination.barriers import Barriers
from dmesh.coordination.calls import Announcer, Calls
from dmesh.coordination.cluster_settings import ClusterSettings
from dmesh.coordination.credentials import Credentials
from dmesh.coordination.dispatcher import (
    DepartureListener,
    EventDispatcher,
    FailureListener,
    LivenessListener,
    RejoinListener,
)
from dmesh.coordination.identity import Identity
from dmesh.coordination.key_value import KeyValueMethods
from dmesh.coordination.leases import Lease
from dmesh.coordination.link import Link
from dmesh.coordination.liveness import LivenessBoard
from dmesh.coordination.members import ClusterState, Member, Task
from dmesh.coordination.pending_calls import PendingCalls
from dmesh.coordination.preemption import PreemptionSync
from dmesh.coordination.registration import Registration
from dmesh.coordination.reports import Reports, ReportSource
from dmesh.coordination.retry import DEFAULT_PATIENCE, Patience
from dmesh.coordination.session import Session
from dmesh.coordination.session_events import SessionEvents
from dmesh.coordination.store_loss import OwnedKeys
from dmesh.coordination.tracing import NO_TRACING, Tracing
from dmesh.coordination.values import check_timeout, encode_key
from dmesh.coordination.watches import Watch, WatchStream
from dmesh.errors import (
    ConfigurationError,
    CoordinationError,
    CoordinatorUnavailableError,
    WaitTimeoutError,
)
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1 import progress_pb2

__all__ = ["Agent", "Identity"]

_MAX_MESSAGE = 4096
_GIVE_UP = 2.0
"""Seconds to notify the coordinator that this process gives up while joining."""


class Agent(KeyValueMethods, BarrierMethods):
    """Joins a cluster, keeps the session alive in the background, and offers the coordinator's functions.

    Thread-safe. Every call that blocks can be ended by Ctrl-C in the main thread, says every
    `announce_interval` seconds whom it waits for, and ends with a `CoordinatorUnavailableError` when the
    coordinator has been silent for its lease and a margin. Until then a coordinator that is away, or
    restarted, is waited for.

    Args:
        address: HOST:PORT of the coordinator.
        identity: Who joins which cluster.
        connect_timeout: Seconds within which `start` must find the coordinator.
        announce: Says to the user whom a call waits for.
        patience: Limits, intervals and retries.
        credentials: What this process shows the coordinator; by default what the environment says.
        use_proxy: Reach the coordinator through the proxy that the environment names.
        tracker: Knows what this process is doing.
        tracing: Makes spans of calls and barriers.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        *,
        connect_timeout: float = 300.0,
        announce: Callable[[str], None] = _log.announce,
        patience: Patience = DEFAULT_PATIENCE,
        credentials: Credentials | None = None,
        use_proxy: bool = False,
        tracker: ActivityTracker = TRACKER,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        if not 0 < connect_timeout < math.inf:
            raise ConfigurationError(
                f"connect_timeout must be a positive number of seconds, not {connect_timeout!r}"
            )
        self._address = address
        self._identity = identity
        self._connect_timeout = connect_timeout
        self._announce = announce
        self._patience = patience
        caller = identity.caller()
        self._tracing = tracing
        self._link = Link(
            address, credentials=credentials, patience=patience, use_proxy=use_proxy, tracing=tracing
        )
        self._barriers = Barriers()
        self._reconciliation = BarrierReconciliation(self._barriers, self._link, caller, patience.attempt)
        self._pending_calls = PendingCalls()
        self._dispatcher = EventDispatcher("dmesh-notices")
        self._tracker = tracker
        self._reports = Reports(tracker, self._barriers)
        self._events = SessionEvents(
            identity,
            self._barriers,
            self._reconciliation,
            self._pending_calls,
            self._dispatcher,
            LivenessBoard(
                identity.incarnation, tracker, lambda line: self._dispatcher.dispatch(lambda: announce(line))
            ),
            tracker,
            self._reports,
            catch_up=self._catch_up,
            on_over=self._interrupt_watches,
            on_store_lost=self._on_store_lost,
        )
        self._session = Session(self._link, caller, identity.registration, self._events, patience)
        owned = OwnedKeys(self._session, self._quiet_store().put_again)
        calls = Calls(self._link, self._session, self._pending_calls, patience, announce, owned.wait)
        KeyValueMethods.__init__(self, calls, owned)
        BarrierMethods.__init__(
            self, identity, self._barriers, self._session, self._link, calls, tracker, tracing, self._learn
        )
        self._owned_keys = owned
        self._caller = caller
        self._lock = Lock()
        self._watches: set[Watch] = set()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._preemption: PreemptionSync | None = None
        self._joined: Registration | None = None
        self._started = False
        self._closed = False

    # Joining and leaving ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register and attaches; when it returns, this process is a member of the cluster.

        Raises:
            CoordinatorUnavailableError: The coordinator did not answer within `connect_timeout`.
            ClientIdTakenError: Another process holds the slot; `members` has it. Where this process wishes
                for the restart policy `rejoin`, it waits for a while for that one to be declared lost.
            JobMismatchError: The job list is not the one that the cluster was formed with.
            CoordinationError: The coordinator refused for another reason.
        """
        with self._lock:
            if self._started or self._closed:
                raise CoordinationError(
                    "an agent can only be started once; create a new one, with a new incarnation"
                )
            self._started = True
        deadline = time.monotonic() + self._connect_timeout
        try:
            joining.register(
                self._session, self._identity, self._patience, self._announce, self._connect_timeout
            )
            self._joined = self._session.registration
            if self._joined.rejoined:
                self._barriers.join_late()
            self._session.start()
            joining.attach(self._session, self._patience, self._announce, deadline)
        except BaseException:
            # A task slot taken by a process that gives up would block its successor until the lease runs out.
            with contextlib.suppress(CoordinationError):
                self.leave("gave up while joining", timeout=_GIVE_UP)
            raise

    def leave(self, reason: str = "", timeout: float = 10.0, *, clean: bool = False) -> None:
        """Give the task slot up and close the agent, whether or not the coordinator answers.

        Args:
            reason: Empty for a clean leave. Otherwise this process ends without a proper shutdown, and is
                FAILED for this reason, unless `clean` is set.
            timeout: Seconds to try to notify the coordinator.
            clean: The leave is clean although it has a reason: the program ended normally.

        Raises:
            CoordinatorUnavailableError: The coordinator did not answer; it will detect the departure itself.
        """
        request = pb.LeaveRequest(
            caller=self._caller,
            request_id=secrets.token_hex(16),
            reason=reason[:_MAX_MESSAGE],
            clean=clean,
        )
        try:
            if self._session.leave():
                self._leave(request, time.monotonic() + timeout)
        except CoordinatorUnavailableError:
            raise
        except CoordinationError:
            pass  # fenced, or forgotten by the server: there is no task slot to give up any more
        finally:
            self.close()

    def _leave(self, request: pb.LeaveRequest, deadline: float) -> None:
        while True:
            request.server_incarnation = self._reconciliation.known_to
            response = self._calls.call(
                self._link.coordination.Leave,
                request,
                doing="leaving",
                timeout=deadline - time.monotonic(),
                repeatable=True,
                needs_task=False,
            )
            if not response.present_to:
                return
            fault = self._reconciliation.present(response.present_to)
            if fault is not None and (not fault.transient or time.monotonic() >= deadline):
                raise fault.exception()

    def close(self) -> None:
        """End the session and its threads without a goodbye. Idempotent; after `leave` there is no need.

        A member that closes without leaving is declared lost.
        """
        with self._lock:
            self._closed = True
            preemption = self._preemption
        # Before the session: a watch that finds its session closed, and itself not, raises instead of ending.
        for watch in self._open_watches():
            watch.close()
        self._session.close()
        self._barriers.wake()
        if preemption is not None:
            preemption.close()
        self._pending_calls.wake()
        with self._lock:
            leases = tuple(self._leases)
        for lease in leases:
            lease.close()
        self._session.hang_up()
        self._link.close()
        self._session.join()
        self._dispatcher.close()

    def abandon(self, error: CoordinationError) -> None:
        """End the session because of something that was learned elsewhere, such as the death of its host.

        Every call and wait raises `error` from now on, and the failure listeners are called.
        """
        self._session.fail(error)

    # What is known ------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """HOST:PORT of the coordinator."""
        return self._address

    @property
    def identity(self) -> Identity:
        """Identity of this process in its cluster."""
        return self._identity

    @property
    def server_incarnation(self) -> int:
        """Random number that the server drew when it started; changes when it is restarted."""
        return self._session.registration.server_incarnation

    @property
    def cluster_incarnation(self) -> int:
        """Random number of this generation of the cluster."""
        return self._session.registration.cluster_incarnation

    @property
    def peer_secret(self) -> bytes:
        """With which peers prove to one another that they belong to the cluster. Never to be logged."""
        return self._session.registration.peer_secret

    @property
    def epoch(self) -> int:
        """The latest epoch of the cluster that was heard of."""
        return self._session.epoch

    @property
    def attached(self) -> bool:
        """True while a session with the coordinator is open."""
        return self._session.attached

    @property
    def rejoined(self) -> bool:
        """True if this process took the slot of a lost one after the others had started."""
        return self._joined is not None and self._joined.rejoined

    @property
    def joined_epoch(self) -> int:
        """The cluster's epoch when this process took its task slot."""
        return self._session.registration.epoch if self._joined is None else self._joined.epoch

    @property
    def suspicion(self) -> float:
        """Seconds for which a member whose session broke may come back, whatever the reason."""
        return self._session.registration.suspicion

    @property
    def cluster_settings(self) -> ClusterSettings:
        """The settings of the cluster."""
        return self._session.registration.settings

    def add_departure_listener(self, listener: DepartureListener) -> None:
        """Add a listener for every other member that leaves, fails or is lost, once each.

        Departures that are known already are dispatched at once. Listeners are called in order, on one thread
        of the agent; they may block and may call the agent.
        """
        self._dispatcher.add_departure_listener(listener)

    def add_rejoin_listener(self, listener: RejoinListener) -> None:
        """Add a listener for processes that take the slot of a departed member, from now on."""
        self._dispatcher.add_rejoin_listener(listener)

    def add_liveness_listener(self, listener: LivenessListener) -> None:
        """Add a listener for members that become blocked, stuck or live again, from now on."""
        self._dispatcher.add_liveness_listener(listener)

    def add_failure_listener(self, listener: FailureListener) -> None:
        """Add a listener for the fencing of this process and for absences of the coordinator.

        It gets a `CoordinatorUnavailableError` once per absence, and the coordinator is looked for all the
        same; any other error is final.
        """
        self._dispatcher.add_failure_listener(listener)

    def cluster_state(self, timeout: float | None = None) -> ClusterState:
        """Ask for the members, the vacant tasks and the barriers under way."""
        request = pb.GetClusterStateRequest(caller=self._caller)
        response = self._calls.call(
            self._link.coordination.GetClusterState,
            request,
            doing="asking for the members",
            timeout=timeout,
            mutates=False,
        )
        return self._learn(response)

    def members(self, timeout: float | None = None) -> tuple[Member, ...]:
        """Ask for the members, the departed ones included, sorted by job and rank."""
        return self.cluster_state(timeout).members

    def member(self, task: int | str, timeout: float | None = None) -> Member:
        """Return one member, independent of the cluster's size; without incarnation if it never registered.

        Args:
            task: A rank (client id) of this process's job, or a task (`/job:worker/task:2`).
            timeout: Seconds after which to give up; None for the agent's usual patience.

        Raises:
            ConfigurationError: There is no such task.
        """
        wanted = Task.parse(task) if isinstance(task, str) else Task(self._identity.job, int(task))
        request = pb.GetMemberRequest(caller=self._caller, task=wanted.to_proto())
        response = self._calls.call(
            self._link.coordination.GetMember,
            request,
            doing=f"asking for {wanted}",
            timeout=timeout,
            mutates=False,
        )
        return Member.from_proto(response.member)

    def wait_for_epoch(self, after: int, timeout: float | None = None) -> ClusterState:
        """Wait until the cluster's epoch is larger than `after`: a member has come, left or was lost.

        Args:
            after: An epoch.
            timeout: Seconds; 0 not to wait, None for no limit.

        Raises:
            WaitTimeoutError: Nothing changed in time.
        """
        if isinstance(after, bool) or not isinstance(after, int):
            raise ConfigurationError(f"after is an epoch, an integer; not {after!r}")
        check_timeout(timeout)
        started = time.monotonic()
        announcer = self._calls.announcer()
        while True:
            waited = time.monotonic() - started
            left = math.inf if timeout is None else timeout - waited
            # Not longer than one attempt may take; one that does not come back is made again.
            wait = max(0.0, min(left, announcer.left, self._patience.attempt / 2))
            request = pb.GetClusterStateRequest(
                caller=self._caller, known_epoch=after, wait_ms=math.ceil(wait * 1000)
            )
            response = self._calls.call(
                self._link.coordination.GetClusterState,
                request,
                doing="waiting for the next epoch",
                mutates=False,
            )
            if response.epoch > after:
                return self._learn(response)
            if time.monotonic() - started >= (math.inf if timeout is None else timeout):
                raise WaitTimeoutError(
                    f"the members of cluster {self._identity.cluster!r} have not changed within {timeout:g} "
                    f"s: its epoch is {response.epoch}"
                )
            if announcer.due:
                announcer.say(f"still waiting for the epoch after {after}, for {waited:.0f} s")

    def vacant(self, timeout: float | None = None) -> tuple[Task, ...]:
        """Return the task slots that were never taken, sorted."""
        return self.cluster_state(timeout).vacant

    def report_error(self, message: str, code: int = 0) -> None:
        """Declare this process FAILED and report the reason to every member.

        From then on the coordinator accepts nothing from it: every call raises `FencedError`.

        Args:
            message: Description for people.
            code: Code for programs, of 32 bits; 0 for none.
        """
        if not isinstance(message, str) or not message.strip():
            raise ConfigurationError(f"message must be a text that says what failed, got {message!r}")
        if isinstance(code, bool) or not isinstance(code, int) or not -(1 << 31) <= code < 1 << 31:
            raise ConfigurationError(f"code must be an integer of 32 bits, not {code!r}")
        request = pb.ReportErrorRequest(
            caller=self._caller, request_id=secrets.token_hex(16), message=message[:_MAX_MESSAGE],
            code=code,
        )  # fmt: skip
        self._calls.call(self._link.coordination.ReportError, request, doing="reporting an error")

    def report_waiting(self, operation: str, ranks: Sequence[int], age: float) -> None:
        """Tell the coordinator that this process has waited long for others where it cannot see that.

        It queries the awaited members, and reports them to all clients if they are stuck. Does not block.

        Args:
            operation: What this process waits in: "all_reduce number 12 of the world".
            ranks: For whom; empty when the wait is over.
            age: For how long already, seconds.
        """
        job = self._identity.job
        self._events.report_waiting(operation, [Task(job, rank) for rank in ranks], age)

    def add_report_source(self, source: ReportSource) -> None:
        """Add a source of this process's progress, for the reports to the coordinator."""
        self._reports.add(source)

    def announce_mesh(self, mesh: progress_pb2.AnnouncedMesh) -> None:
        """Note a mesh that the program has made, for people who look at the cluster. Does not block."""
        self._reports.announce_mesh(mesh)

    # Watching (what else there is of keys and values is in KeyValueMethods) ---------------------------------

    def lease(self, ttl: float, *, keep_alive: bool = True) -> Lease:
        """Grant a lease of keys, and renew it in the background.

        Args:
            ttl: Seconds for which it lives unless it is renewed.
            keep_alive: Renew it in the background; otherwise it ends after `ttl`, or later by `Lease.renew`.
        """
        lease = Lease(self._link, self._calls, self._caller, ttl, keep_alive=keep_alive)
        with self._lock:
            self._leases.add(lease)
            closed = self._closed
        if closed:
            lease.close()
        return lease

    def announcer(self) -> Announcer:
        """Return what says to the user whom a call waits for, from time to time."""
        return self._calls.announcer()

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """Start to watch all keys that start with `prefix`; when it returns, the watch is in place.

        Args:
            prefix: The prefix; empty for all keys.
            from_revision: First revision of interest; None for changes from now on.

        Raises:
            WatchCompactedError: The server no longer has the changes since `from_revision`.
        """
        if from_revision is not None and (
            isinstance(from_revision, bool) or not isinstance(from_revision, int) or from_revision < 1
        ):
            raise ConfigurationError(
                f"from_revision is a revision from 1, or None for now; not {from_revision!r}"
            )
        self._session.check()
        stream = WatchStream(
            self._link,
            self._session,
            self._calls,
            self._caller,
            self._patience,
            encode_key(prefix, "prefix"),
            from_revision or 0,
        )
        watch = Watch(encode_key(prefix, "prefix"), stream, self._forget)
        with self._lock:
            self._watches.add(watch)
            closed = self._closed
        if closed:  # by another thread, which did not see this watch
            watch.close()
        return watch

    @property
    def preemption(self) -> PreemptionSync:
        """Agreeing with the other members on the step at which all stop."""
        with self._lock:
            if self._preemption is None:
                self._preemption = PreemptionSync(
                    self._identity,
                    self._session,
                    self._dispatcher,
                    self.cluster_state,
                    self._quiet_store(),
                    self._tracker,
                    self._announce,
                    self._patience.announce_interval,
                )
            return self._preemption

    # Inside -------------------------------------------------------------------------------------------------

    def _learn(self, response: pb.GetClusterStateResponse) -> ClusterState:
        """Take note of what an answer says about departures."""
        state = ClusterState.from_proto(response)
        self._session.note_seen(state.server_incarnation, epoch=state.epoch)
        self._events.departed(state.members)
        self._events.seen_epoch = state.epoch
        return state

    def _catch_up(self, known_epoch: int) -> None:
        request = pb.GetClusterStateRequest(caller=self._caller, known_epoch=known_epoch)
        response = self._calls.try_once(self._link.coordination.GetClusterState, request, STATUS_TIMEOUT)
        if response is not None:
            self._learn(response)

    def _quiet_store(self) -> KeyValueMethods:
        """Make calls for background threads, which announce nothing to the user."""
        return KeyValueMethods(
            Calls(self._link, self._session, self._pending_calls, self._patience, lambda line: None)
        )

    def _on_store_lost(self) -> None:
        self._owned_keys.store_lost()
        self._interrupt_watches()

    def _forget(self, watch: Watch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def _interrupt_watches(self) -> None:
        for watch in self._open_watches():
            watch.interrupt()

    def _open_watches(self) -> tuple[Watch, ...]:
        with self._lock:
            return tuple(self._watches)
