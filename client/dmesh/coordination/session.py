"""The session with the coordinator: registered, attached, kept alive, and built up again when it breaks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

import grpc

from dmesh import protocol
from dmesh._locks import Lock
from dmesh._log import logger
from dmesh.coordination import faults, framed_connection
from dmesh.coordination.carrier import Carrier, Heartbeats, NoCarrier
from dmesh.coordination.faults import Fault
from dmesh.coordination.framed_connection import FramedConnection
from dmesh.coordination.link import Link
from dmesh.coordination.members import Member
from dmesh.coordination.neighbors import NeighborWatch
from dmesh.coordination.registration import Registration, request_task, too_old
from dmesh.coordination.retry import Patience
from dmesh.coordination.session_listener import SessionListener
from dmesh.coordination.store_loss import loss_between, refused_by, revision_of
from dmesh.coordination.stream import GrpcStream
from dmesh.coordination.waiting import Bell, Worker, may_start_threads
from dmesh.errors import CoordinationError, CoordinatorUnavailableError, DMeshError, StoreLostError
from dmesh.v1 import common_pb2, coordination_pb2
from dmesh.v1 import coordination_pb2 as pb

_JOIN = 10.0
"""Seconds that the thread may take to end."""
_ENDING = 1.0
"""Seconds for the coordinator to hear that this process ends its session without leaving."""
_SETTLED = 1.0
"""Seconds after which a session that breaks counts as having worked: its successor is tried for at once."""
_SLOW = 1.0
"""Seconds from which on the failure of a connection is not waited for at every attempt."""
_AGAIN = 60.0
"""Seconds after such a failure for which sessions go over gRPC without an attempt."""

# Refusals that no patience changes. Everything else may be over in a moment, and a session is worth trying
# for.
_FINAL = frozenset(
    {
        common_pb2.ERROR_KIND_FENCED,
        common_pb2.ERROR_KIND_TASK_TAKEN,
        common_pb2.ERROR_KIND_SPEC_MISMATCH,
        common_pb2.ERROR_KIND_CLUSTER_ENDING,
        common_pb2.ERROR_KIND_UNKNOWN_TASK,
        common_pb2.ERROR_KIND_INVALID_ARGUMENT,
        common_pb2.ERROR_KIND_VERSION_MISMATCH,
    }
)


class Session:
    """Keeps this process's task slot: one background thread, one session at a time.

    A session that breaks is opened again at once, then with growing waits. A server that does not know the
    caller any more (it was restarted without its store) is registered with again, with the same incarnation.
    Only fencing ends the session for good; a coordinator that stays away longer than lease and margin is
    reported, once per absence, and looked for all the same.
    """

    def __init__(
        self,
        link: Link,
        caller: common_pb2.Caller,
        describe: Callable[[], pb.RegisterRequest],
        listener: SessionListener,
        patience: Patience,
    ) -> None:
        self._link = link
        self._caller = caller
        self._describe = describe
        self._listener = listener
        self._patience = patience
        self._neighbors = NeighborWatch()
        self._lock = Lock()
        self._bell = Bell()
        self._registration: Registration | None = None
        self._epoch = 0
        self._revision = 0
        self._losses = 0
        self._loss = ""
        self._generation = 0
        self._attached = False
        self._closed = False
        self._leaving = False
        self._failure: Callable[[], CoordinationError] | None = None
        self._carrier: Carrier | None = None
        self._framed_from = 0.0
        self._failures = 0
        self._slower = ""
        self._worker = Worker(self._run, "dmesh-session")
        self._last_words = "nothing was tried yet"

    # What others may ask ------------------------------------------------------------------------------------

    @property
    def registration(self) -> Registration:
        """The server's answer to the latest registration."""
        with self._lock:
            if self._registration is None:
                raise CoordinationError(f"not registered with the coordinator at {self._link.address} yet")
            return self._registration

    @property
    def address(self) -> str:
        """HOST:PORT of the coordinator."""
        return self._link.address

    def tls_problem(self) -> str | None:
        """Find out, by connecting, whether TLS is why the coordinator cannot be reached; None if not."""
        return self._link.tls_problem()

    @property
    def epoch(self) -> int:
        """The latest epoch heard of."""
        with self._lock:
            return self._epoch

    @property
    def store_losses(self) -> int:
        """Number of times the server came back without data that it had acknowledged to this process."""
        with self._lock:
            return self._losses

    @property
    def store_loss(self) -> str:
        """The data lost the last time, in words; empty if none was lost."""
        with self._lock:
            return self._loss

    def last_seen(self) -> common_pb2.LastTold | None:
        """Return the latest state that this process has seen; None before the first registration."""
        with self._lock:
            registration = self._registration
            if registration is None:
                return None
            return common_pb2.LastTold(
                store_id=registration.store_id,
                cluster_incarnation=registration.cluster_incarnation,
                server_incarnation=registration.server_incarnation,
                epoch=self._epoch,
                revision=self._revision,
            )

    @property
    def generation(self) -> int:
        """Count the sessions that were attached."""
        with self._lock:
            return self._generation

    @property
    def last_words(self) -> str:
        """Cause of the failure of the latest attempt to reach the coordinator."""
        with self._lock:
            return self._last_words

    @property
    def attached(self) -> bool:
        """True while the coordinator can tell this process something."""
        with self._lock:
            return self._attached

    @property
    def gone(self) -> bool:
        """True if the coordinator has been silent for so long that callers should stop waiting."""
        with self._lock:
            registration = self._registration
        if registration is None:
            return False
        return self._link.contact.lost_for(self._patience.silence_allowed(registration.lease))

    def check(self) -> None:
        """Raise the session's error, or an error that it is closed."""
        with self._lock:
            failure, closed = self._failure, self._closed
        if failure is not None:
            raise failure()
        if closed:
            raise CoordinationError(
                f"the session with the coordinator at {self._link.address} was closed by this process; "
                "no more calls can be made"
            )

    def pause(self, seconds: float, generation: int) -> None:
        """Wait before another attempt: for `seconds`, or until the session is newly attached or over."""
        self._bell.wait_for(lambda: self.generation != generation or self._over(), seconds)

    def note_epoch(self, epoch: int) -> None:
        """Note an epoch that came with some answer."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)

    def note_revision(self, revision: int) -> None:
        """Note a revision of the key-value store that came with some answer."""
        with self._lock:
            self._revision = max(self._revision, revision)

    def note_seen(self, server_incarnation: int, *, epoch: int = 0, revision: int = 0) -> None:
        """Note an epoch or revision from the answer to another call; ignore it if another server answered.

        A call may reach a restarted server before the session does. Its epochs and revisions must not mix
        with those of the previous server, with which `last_seen` is compared.
        """
        with self._lock:
            registration = self._registration
            if registration is not None and registration.server_incarnation == server_incarnation:
                self._epoch = max(self._epoch, epoch)
                self._revision = max(self._revision, revision)

    # Life ---------------------------------------------------------------------------------------------------

    def register(self, request_id: str, timeout: float) -> Fault | None:
        """Take the task slot, in one attempt. Returns why it failed, or None."""
        request = self._describe()
        request.request_id = request_id
        request.protocol_version = protocol.VERSION
        seen = self.last_seen()
        if seen is not None:
            request.last_told.CopyFrom(seen)
        response = request_task(self._link, request, timeout)
        if isinstance(response, Fault):
            self._say(response)
            return response
        if not response.HasField("settings"):
            fault = too_old(self._link.address)
            self._say(fault)
            return fault
        registration = Registration.from_proto(response)
        with self._lock:
            before, self._registration = self._registration, registration
            loss = "" if before is None else loss_between(before, registration, self._link.address)
            same_server = before is not None and before.server_incarnation == registration.server_incarnation
            self._epoch = max(self._epoch, response.epoch) if same_server else response.epoch
            if loss:
                self._losses, self._loss = self._losses + 1, loss
        if loss:
            logger.error("%s", loss)
            self._listener.on_store_lost()
        self._listener.on_registered(registration.cluster_incarnation)
        return None

    def start(self) -> None:
        """Start the thread that attaches; the caller has registered."""
        self._worker.start()

    def wait_attached(self, timeout: float) -> bool:
        """Wait for the first attachment; False if `timeout` seconds passed before. Raises like `check`."""
        self._bell.wait_for(lambda: self.generation > 0 or self._over(), max(0.0, timeout))
        self.check()
        return self.generation > 0

    def leave(self) -> bool:
        """Note that the slot is about to be given up: the session's end is not to be repaired or reported.

        Returns whether there is a task slot to give up.
        """
        with self._lock:
            if self._registration is None or self._closed or self._leaving or self._failure is not None:
                return False
            self._leaving = True
        self._bell.ring()
        return True

    def close(self) -> None:
        """End the session; `hang_up` ends its connection. Idempotent.

        A server that hears of it need not find out by itself that nobody will come back.
        """
        with self._lock:
            goodbye = self._attached and not (self._closed or self._leaving or self._failure)
            self._closed = True
            carrier = self._carrier
        self._bell.ring()
        if carrier is not None and goodbye:
            carrier.put(pb.SessionRequest(ending=pb.Ending()))

    def hang_up(self) -> None:
        """End the connection of a closed session, after a moment for the server to end it. Idempotent."""
        with self._lock:
            carrier, heard = self._carrier, self._attached and not (self._leaving or self._failure)
        if carrier is not None:
            if heard:
                self._worker.join(_ENDING)
            carrier.close()

    def join(self) -> None:
        """Wait for the thread to end; return at once when called on that thread."""
        self._worker.join(_JOIN)

    def fail(self, error: CoordinationError) -> None:
        """End the session for good: every call and wait raises `error` from now on."""
        cls, message, members = type(error), str(error), error.members
        with self._lock:
            if self._failure is not None or self._closed or self._leaving:
                return
            self._failure = lambda: cls(message, members)
            carrier = self._carrier
        self._bell.ring()
        if carrier is not None:
            carrier.close()
        self._listener.on_failure(error, final=True)

    # The thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        delays = self._patience.retry.delays()
        registered, reported, request_id, registrations = True, False, "", 0
        while not self._over():
            fault: Fault | None
            if registered:
                opened = time.monotonic()
                fault = self._serve()
                settled = time.monotonic() - opened >= _SETTLED
            else:
                # The same id in all attempts of one registration, another one for the next.
                request_id = request_id or secrets.token_hex(16)
                fault, settled = self.register(request_id, self._patience.attempt), False
            if self._over():
                return
            if fault is None:  # only a registration succeeds for good
                logger.warning("registered again with the coordinator at %s", self._link.address)
                registered, request_id = True, ""
                continue
            if fault.needs_registration and registered:
                registered = False
                registrations += 1
                if registrations > 1:  # a server that forgets at once is not asked in a tight loop
                    self.pause(next(delays), self.generation)
                continue
            if fault.kind == common_pb2.ERROR_KIND_STORE_LOST:
                self.fail(StoreLostError(refused_by(self._link.address, fault.message), fault.members))
                return
            if fault.kind in _FINAL or fault.code is grpc.StatusCode.UNIMPLEMENTED:
                self.fail(_as_coordination_error(fault.exception()))
                return
            if self.gone and not reported:
                reported = True
                self._listener.on_failure(self.unavailable("keeping the session"), final=False)
            if not self.gone:
                reported = False
            if settled:
                delays, registrations = self._patience.retry.delays(), 0
                continue
            self.pause(next(delays), self.generation)

    def _serve(self) -> Fault:
        """Open a session in the fastest way there is, and serve it until it ends; return why it did."""
        if not may_start_threads():
            return self._ended(Fault(0, "the program is over", code=grpc.StatusCode.UNAVAILABLE))
        if not framed_connection.AVAILABLE:
            self._slower = "this system has no `poll`"
        elif self._link.use_proxy:
            self._slower = "the environment's proxy is used"
        elif (begun := time.monotonic()) >= self._framed_from:
            try:
                fault = self._carry(FramedConnection(self._link, self._caller, self._heartbeats()))
            except NoCarrier as reason:
                self._slower, self._failures = str(reason), self._failures + 1
                if time.monotonic() - begun >= _SLOW:
                    self._framed_from = time.monotonic() + _AGAIN
                elif (
                    not reason.certain and self._failures == 1
                ):  # the network may be about to break, or to heal
                    return self._ended(Fault(0, self._slower, code=grpc.StatusCode.UNAVAILABLE))
            else:
                self._failures = 0
                return fault
        return self._carry(GrpcStream(self._link, self._heartbeats()))

    def _heartbeats(self) -> Heartbeats:
        interval = self.registration.heartbeat_interval
        return Heartbeats(interval, self._listener.progress, report=self._listener.report)

    def _carry(self, carrier: Carrier) -> Fault:
        """Attach, and serve the session until it ends; return why it did."""
        with self._lock:
            self._carrier = carrier
            stale = self._closed or self._failure is not None
        if stale:
            carrier.close()
        attach = pb.Attach(caller=self._caller, last_told=self.last_seen())
        encoded = pb.SessionRequest(attach=attach).SerializeToString()
        try:
            end = carrier.serve(encoded, lambda response: self._receive(response, carrier))
        finally:
            with self._lock:
                self._carrier = None
                was_attached, self._attached = self._attached, False
            self._link.contact.disconnected(sum(self._patience.pings))
            carrier.close()
            if was_attached:
                self._listener.on_detached()
        return self._ended(end)

    def _ended(self, end: Fault) -> Fault:
        self._link.note(end)
        self._say(end)
        return end

    def _receive(self, response: pb.SessionResponse, carrier: Carrier) -> Fault | None:
        """Handle one message; return the reason if it says that the session is over."""
        kind = response.WhichOneof("kind")
        if kind == "key_value_reply":
            self.note_revision(revision_of(response.key_value_reply))
            self._listener.on_reply(response.key_value_reply)
        elif kind == "barrier_result":
            self._listener.on_barrier(response.barrier_result)
        elif kind == "attached":
            return self._on_attached(response.attached, carrier)
        elif kind == "heartbeat_ack":
            self._link.contact.heard()
            self.note_epoch(response.heartbeat_ack.epoch)
        elif kind == "status_request":
            status = pb.Status(id=response.status_request.id, activity=self._listener.on_status_request())
            carrier.put(pb.SessionRequest(status=status))
        elif kind == "process_query":
            self._neighbors.ask(response.process_query, carrier.put)
        elif kind == "liveness_change":
            self._listener.on_liveness([Member.from_proto(m) for m in response.liveness_change.members])
        elif kind == "membership_change":
            change = response.membership_change
            self.note_epoch(change.epoch)
            if change.departed:
                self._listener.on_departed(
                    change.epoch, [Member.from_proto(member) for member in change.departed]
                )
            if change.rejoined:
                self._listener.on_rejoined(
                    change.epoch, [Member.from_proto(member) for member in change.rejoined]
                )
        elif kind == "session_end":
            return faults.from_error(response.session_end.error)
        return None

    def _on_attached(self, attached: coordination_pb2.Attached, carrier: Carrier) -> Fault | None:
        self._link.contact.heard()
        carrier.heartbeats.start()
        if (fault := self._listener.reconcile(attached.server_incarnation)) is not None:
            return fault
        if isinstance(carrier, GrpcStream):
            logger.info(
                "the session with the coordinator at %s goes over gRPC, which is slower than a connection of "
                "its own: %s",
                self._link.address,
                self._slower,
            )
        self._link.contact.connected()
        with self._lock:
            self._attached = True
            again = self._generation > 0
            registration = self._registration
            if registration is not None and registration.server_incarnation != attached.server_incarnation:
                self._registration = replace(registration, server_incarnation=attached.server_incarnation)
                self._epoch = attached.epoch
            self._epoch = max(self._epoch, attached.epoch)
        if again:
            logger.warning("the session with the coordinator at %s is attached again", self._link.address)
        self._listener.on_attached(carrier, again=again)
        with self._lock:
            # Last, so that threads that waited for the session find everything in place.
            self._generation += 1
        self._bell.ring()
        return None

    def _over(self) -> bool:
        with self._lock:
            return self._closed or self._leaving or self._failure is not None

    def _say(self, fault: Fault) -> None:
        with self._lock:
            self._last_words = fault.message

    def unavailable(self, doing: str) -> CoordinatorUnavailableError:
        """Make the error for a coordinator that does not answer."""
        return faults.unavailable(
            self._link.address,
            self.last_words,
            self._link.contact.silence,
            doing=doing,
            ever_connected=self._link.contact.ever,
        )


def _as_coordination_error(error: DMeshError) -> CoordinationError:
    return error if isinstance(error, CoordinationError) else CoordinationError(str(error))
