"""The session with the coordinator: registered, attached, kept alive, and built up again when it breaks."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import grpc

from dmesh import protocol
from dmesh._log import logger
from dmesh.coordination import express, faults
from dmesh.coordination.express import Express
from dmesh.coordination.faults import CHANNEL_CLOSED, Fault
from dmesh.coordination.link import Link
from dmesh.coordination.members import Member
from dmesh.coordination.neighbors import NeighborWatch
from dmesh.coordination.registration import Registration, request_task, too_old
from dmesh.coordination.retry import Patience
from dmesh.coordination.send_queue import SendQueue
from dmesh.coordination.store_loss import loss_between, refused_by, revision_of
from dmesh.coordination.stream import Stream
from dmesh.coordination.waiting import Bell, Worker
from dmesh.errors import CoordinationError, CoordinatorUnavailableError, DMeshError, StoreLostError
from dmesh.v1 import common_pb2, coordination_pb2
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1.progress_pb2 import ProgressReport

_JOIN = 10.0
"""Seconds that the thread may take to end."""
_ENDING = 1.0
"""Seconds for the coordinator to hear that this process ends its session without leaving."""
_SETTLED = 1.0
"""Seconds after which a session that breaks counts as having worked: its successor is tried for at once."""
_EXPRESS_AGAIN = 10.0
"""Seconds without express connections after a session that ended with one: it may have been the reason."""

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


class SessionListener(Protocol):
    """Listeners to a session, called on the session's thread; they must not block for long."""

    def on_registered(self, cluster_incarnation: int) -> None:
        """The task slot is taken, in this generation of the cluster."""

    def on_store_lost(self) -> None:
        """The server's store lacks what this process was told; called before `on_registered`."""

    def reconcile(self, server_incarnation: int) -> Fault | None:
        """The session is attached to this server, which is told what it may have forgotten; or why not."""

    def progress(self) -> int:
        """Asked at every heartbeat, on any thread: a number that changes whenever the program gets on."""

    def report(self) -> ProgressReport | None:
        """Asked at every heartbeat, on its thread: what this process does, for people; None for nothing."""

    def on_attached(self, send_queue: SendQueue, *, again: bool) -> None:
        """The session is attached; what the server must know again can be sent."""

    def on_detached(self) -> None:
        """The session broke."""

    def on_departed(self, epoch: int, members: Sequence[Member]) -> None:
        """Members are gone."""

    def on_rejoined(self, epoch: int, members: Sequence[Member]) -> None:
        """Task slots of departed members have new holders."""

    def on_liveness(self, members: Sequence[Member]) -> None:
        """Members have become blocked or stuck, or live again."""

    def on_status_request(self) -> common_pb2.Activity:
        """The server asks what this process is doing; the answer is sent."""

    def on_barrier(self, result: pb.BarrierResult) -> None:
        """A barrier is over."""

    def on_reply(self, reply: pb.KeyValueReply) -> None:
        """A call of the key-value store is answered."""

    def on_failure(self, error: CoordinationError, *, final: bool) -> None:
        """The process was fenced (final), or the coordinator has been gone for too long (not final)."""


class Session:
    """Keeps this process's task slot: one background thread, one stream at a time.

    A stream that breaks is opened again at once, then with growing waits. A server that does not know the
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
        self._lock = threading.Lock()
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
        self._stream: tuple[SendQueue, Stream] | None = None
        self._express: Express | None = None
        self._express_from = 0.0
        self._settled = False
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
        """Number of times the server came back without data that this process had been told was stored."""
        with self._lock:
            return self._losses

    @property
    def store_loss(self) -> str:
        """The data lost the last time, in words; empty if none was lost."""
        with self._lock:
            return self._loss

    def last_told(self) -> common_pb2.LastTold | None:
        """The latest state that a server told this process; None before the first registration."""
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
        """Count the streams that were attached."""
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
        """True if the coordinator has been silent for so long that nobody should wait for it."""
        with self._lock:
            registration = self._registration
        if registration is None:
            return False
        return self._link.contact.lost_for(self._patience.silence_allowed(registration.lease))

    def check(self) -> None:
        """Raise what the session failed with, or that it is closed."""
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

    def note_told(self, server_incarnation: int, *, epoch: int = 0, revision: int = 0) -> None:
        """Note what another call was told, unless by another server than the session's.

        A call may reach a restarted server before the session does. What that one says is not what the
        server before it had said, which is what `last_told` is compared with.
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
        told = self.last_told()
        if told is not None:
            request.last_told.CopyFrom(told)
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
        """Note that the slot is about to be given up: the stream's end is not to be repaired or reported.

        Returns whether there is a task slot to give up.
        """
        with self._lock:
            if self._registration is None or self._closed or self._leaving or self._failure is not None:
                return False
            self._leaving = True
        self._bell.ring()
        return True

    def close(self) -> None:
        """End the session; `hang_up` ends its stream. Idempotent.

        A server that hears of it need not find out by itself that nobody will come back.
        """
        with self._lock:
            goodbye = self._attached and not (self._closed or self._leaving or self._failure)
            self._closed = True
            stream = self._stream
        self._bell.ring()
        if stream is not None and goodbye:
            stream[0].put(pb.SessionRequest(ending=pb.Ending()))

    def hang_up(self) -> None:
        """End the stream of a closed session, after a moment for the server to end it. Idempotent."""
        with self._lock:
            stream, heard = self._stream, self._attached and not (self._leaving or self._failure)
        if stream is not None:
            if heard:
                self._worker.join(_ENDING)
            stream[0].close()
            self._link.cancel(stream[1])

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
            stream = self._stream
        self._bell.ring()
        if stream is not None:
            stream[0].close()
            self._link.cancel(stream[1])
        self._listener.on_failure(error, final=True)

    # The thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        delays = self._patience.retry.delays()
        registered, told, request_id, registrations = True, False, "", 0
        while not self._over():
            fault: Fault | None
            if registered:
                opened, self._settled = time.monotonic(), False
                fault = self._serve_stream()
                self._settled = self._settled or time.monotonic() - opened >= _SETTLED
            else:
                # The same id in all attempts of one registration, another one for the next.
                request_id = request_id or secrets.token_hex(16)
                fault, self._settled = self.register(request_id, self._patience.attempt), False
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
            if self.gone and not told:
                told = True
                self._listener.on_failure(self.unavailable("keeping the session"), final=False)
            if not self.gone:
                told = False
            if self._settled:
                delays, registrations = self._patience.retry.delays(), 0
                continue
            self.pause(next(delays), self.generation)

    def _serve_stream(self) -> Fault:
        """Open a stream, attach, and read until it ends; return why it did."""
        send_queue = SendQueue(
            self.registration.heartbeat_interval, self._listener.progress, report=self._listener.report
        )
        attach = pb.Attach(caller=self._caller, last_told=self.last_told())
        if express.AVAILABLE and time.monotonic() >= self._express_from:
            attach.port = self._link.express_port
        send_queue.put(pb.SessionRequest(attach=attach))
        end: Fault | None = None
        try:
            call = self._link.open_session(send_queue)
        except ValueError:
            return CHANNEL_CLOSED
        with self._lock:
            self._stream = (send_queue, call)
            stale = self._closed or self._failure is not None
        if stale:
            call.cancel()
        try:
            for response in call:
                end = self._receive(response, send_queue) or end
        except grpc.RpcError as error:
            end = end or faults.from_rpc(error)
        finally:
            if end is not None and end.from_server and self._express is not None and not self._over():
                # It says so itself, so it has said all else before. Who was cut off hurries back instead.
                self._express.hear_out()
            with self._lock:
                self._stream = None
                was_attached, self._attached = self._attached, False
            self._link.contact.disconnected(sum(self._patience.pings))
            send_queue.close()
            self._end_express()
            call.cancel()
            if was_attached:
                self._listener.on_detached()
        end = end or Fault(0, "the coordinator ended the session", code=grpc.StatusCode.UNAVAILABLE)
        self._link.note(end)
        self._say(end)
        return end

    def _receive(self, response: pb.SessionResponse, send_queue: SendQueue) -> Fault | None:
        """Handle one message of the stream; return the reason if it says that the session is over."""
        self._link.contact.heard()
        return self._handle(response, send_queue)

    def _handle(self, response: pb.SessionResponse, send_queue: SendQueue) -> Fault | None:
        kind = response.WhichOneof("kind")
        if kind == "key_value_reply":
            self.note_revision(revision_of(response.key_value_reply))
            self._listener.on_reply(response.key_value_reply)
        elif kind == "barrier_result":
            self._listener.on_barrier(response.barrier_result)
        elif kind == "attached":
            return self._on_attached(response.attached, send_queue)
        elif kind == "heartbeat_ack":
            self.note_epoch(response.heartbeat_ack.epoch)
        elif kind == "status_request":
            status = pb.Status(id=response.status_request.id, activity=self._listener.on_status_request())
            send_queue.put(pb.SessionRequest(status=status))
        elif kind == "process_query":
            self._neighbors.ask(response.process_query, send_queue.put)
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
        elif kind == "express_begins":
            if self._express is not None:
                mark = pb.SessionRequest(express_begins=pb.ExpressBegins())
                send_queue.divert(mark, self._express.send)
                self._express.begin()
        elif kind == "session_end":
            return faults.from_error(response.session_end.error)
        return None

    def _on_attached(self, attached: coordination_pb2.Attached, send_queue: SendQueue) -> Fault | None:
        send_queue.start_heartbeats()
        if (fault := self._listener.reconcile(attached.server_incarnation)) is not None:
            self._cancel_stream(send_queue)
            return fault
        if attached.HasField("express"):
            self._express = Express(
                self._link.host,
                attached.express,
                lambda response: self._receive_express(response, send_queue),
                lambda: self._cancel_stream(send_queue),
            )
            send_queue.when_busy(self._express.start)
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
        self._listener.on_attached(send_queue, again=again)
        with self._lock:
            # Only now: whoever waited for the session finds everything in place.
            self._generation += 1
        self._bell.ring()
        return None

    def _receive_express(self, response: pb.SessionResponse, send_queue: SendQueue) -> None:
        """Handle a message of the express connection, unless the session that it belongs to is over.

        It is no sign of life: the stream is, on which every heartbeat is acknowledged.
        """
        with self._lock:
            stream = self._stream
        if stream is not None and stream[0] is send_queue:
            self._handle(response, send_queue)

    def _cancel_stream(self, send_queue: SendQueue) -> None:
        """End the stream if it is still the session's. What was on its way is said again on the next one."""
        with self._lock:
            stream = self._stream
        if stream is not None and stream[0] is send_queue:
            self._link.cancel(stream[1])

    def _end_express(self) -> None:
        """The session is over. That it had an express connection shows that it had worked."""
        if self._express is None:
            return
        self._express.close()
        self._express.join()
        if self._express.carrying:
            self._express_from = time.monotonic() + _EXPRESS_AGAIN
            self._settled = True
        self._express = None

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
