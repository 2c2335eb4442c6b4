"""Calls that are answered once: made again while the coordinator is away, interruptible, never silent."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from dmesh.coordination import faults
from dmesh.coordination.faults import Fault
from dmesh.coordination.link import Link
from dmesh.coordination.pending_calls import PendingCall, PendingCalls
from dmesh.coordination.retry import Patience
from dmesh.coordination.session import Session
from dmesh.coordination.store_loss import LossWitness
from dmesh.coordination.tracing import Span
from dmesh.errors import CoordinationError, CoordinatorUnavailableError, DMeshError, LimitExceededError
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb

_LOOK = 0.5
"""Seconds between two looks at the state of the session while an answer is waited for."""

_METHODS = {
    kind: f"/dmesh.v1.KeyValueService/{''.join(word.capitalize() for word in kind.split('_'))}"
    for kind in ("set", "get", "get_many", "list", "delete", "increment", "compare_and_set", "transaction")
}
"""The RPC that each kind of question stands for."""
_IN_SESSION = {"dmesh.in_session": True}
_MOST_CHANGES = 64
"""Calls outside of the session that may be unanswered at a time: the server keeps the latest 64 answers."""

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class Calls:
    """Makes calls for one agent. Thread-safe.

    Every request carries its request id, so that an attempt whose answer was lost may be repeated: the server
    answers the same and does it once.
    """

    def __init__(
        self,
        link: Link,
        session: Session,
        pending_calls: PendingCalls,
        patience: Patience,
        announce: Callable[[str], None],
        settle: Callable[[int], str] = lambda losses: "",
    ) -> None:
        self._link = link
        self._session = session
        self._pending_calls = pending_calls
        self.patience = patience
        """Limits, intervals and retries."""
        self._announce = announce
        self._changes = threading.BoundedSemaphore(_MOST_CHANGES)
        self.witness = LossWitness(session, settle)
        """Tells who calls that the coordinator has lost its store."""

    def announcer(self, since: float | None = None) -> Announcer:
        """Return an announcer of a long wait, which began now or at `since`."""
        return Announcer(self._announce, self.patience.announce_interval, since=since)

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        doing: str,
        timeout: float | None = None,
        mutates: bool = True,
        repeatable: bool = False,
        needs_task: bool = True,
    ) -> _Response:
        """Make a call that the server answers at once, again and again while it is away.

        Args:
            method: The method of a stub.
            request: What to send, the same in every attempt.
            doing: What the caller is doing, for messages: "setting key 'a'".
            timeout: Seconds after which to give up. Default: when the coordinator was silent for its lease
                and a margin.
            mutates: Whether the call changes something, so that giving up leaves open whether it did.
            repeatable: Whether it changes nothing more when it is carried out again, so that the server need
                not keep its answer.
            needs_task: Whether to wait for the session to register again if the server does not know the
                caller.

        Raises:
            CoordinatorUnavailableError: The coordinator does not answer. Whether a change took effect is
                unknown.
            LimitExceededError: Too many calls that change something are unanswered already.
            DMeshError: The server refused.
        """
        limit = self.patience.call if timeout is None else timeout
        started = time.monotonic()
        delays = self.patience.retry.delays()
        bounded = mutates and not repeatable
        if bounded and not self._changes.acquire(blocking=False):
            raise LimitExceededError(
                f"{_MOST_CHANGES} calls of this process that change something outside of its session are "
                f"unanswered: {doing} could be applied twice if its answer were lost. Wait for some of "
                "them first."
            )
        try:
            while True:
                self._session.check()
                generation = self._session.generation
                left = max(0.05, limit - (time.monotonic() - started))
                outcome = self._link.attempt(
                    method, request, min(left, self.patience.attempt), self._session.check
                )
                if not isinstance(outcome, Fault):
                    return outcome
                self._session.check()  # what ended the session says more than what the call got because of it
                waited = time.monotonic() - started
                if not outcome.transient or (outcome.needs_registration and not needs_task):
                    raise self._refusal(outcome)
                if waited >= limit or self._session.gone:
                    if mutates:
                        doing += " (whether that took effect is unknown)"
                    raise self._too_long(outcome, doing, waited)
                self._session.pause(min(next(delays), limit - waited), generation)
        finally:
            if bounded:
                self._changes.release()

    def ask(
        self,
        kind: str,
        request: Callable[[], Message],
        *,
        doing: str,
        mutates: bool = True,
    ) -> pb.KeyValueReply:
        """Make a call of the key-value store that is answered at once, through the session.

        Asked again on every session until there is an answer. A server that is blocked, whose connection
        lives, is waited for without limit; a line tells the user.

        Args:
            kind: The field of `KeyValueCall` that holds the request.
            request: Makes the request, the same each time.
            doing: What the caller is doing, for messages: "setting key 'a'".
            mutates: Whether the call changes something, so that giving up leaves open whether it did.

        Raises:
            CoordinatorUnavailableError: The coordinator does not answer. Whether a change took effect is
                unknown.
            DMeshError: The server refused.
        """
        with self._link.tracing.call(_METHODS[kind], _IN_SESSION) as span:
            return self._ask(kind, request, doing, mutates, span)

    def _ask(
        self, kind: str, request: Callable[[], Message], doing: str, mutates: bool, span: Span
    ) -> pb.KeyValueReply:
        pending = PendingCall(kind, request, span.carried)
        started = time.monotonic()
        announcer: Announcer | None = None
        delays = None
        unknown = " (whether that took effect is unknown)" if mutates else ""
        self._session.check()
        losses = self.witness.begin()
        try:
            while True:
                generation = self._session.generation
                self._pending_calls.ask(pending, self._session.registration.max_request_bytes)
                self._check(losses)
                while (reply := pending.wait(_LOOK)) is None:
                    self._check(losses)
                    announcer = announcer or Announcer(
                        self._announce, self.patience.announce_interval - _LOOK
                    )
                    waited = time.monotonic() - started
                    if self._session.gone:
                        raise self._session.unavailable(doing + unknown)
                    if waited >= self.patience.call and not self._link.contact.silent_for(waited / 2):
                        raise self._reachable_but(waited, doing + unknown)
                    if announcer.due:
                        announcer.say(f"still {doing}, for {waited:.0f} s{self.absence()}")
                self._check(losses)  # what ended the session says more than what the call got because of it
                if not reply.HasField("error"):
                    span.over(grpc.StatusCode.OK)
                    return reply
                fault = faults.from_error(reply.error)
                span.over(fault.status)
                waited = time.monotonic() - started
                if not fault.transient:
                    raise self._refusal(fault)
                if waited >= self.patience.call or self._session.gone:
                    raise self._too_long(fault, doing + unknown, waited)
                delays = delays or self.patience.retry.delays()
                self._session.pause(min(next(delays), self.patience.call - waited), generation)
        finally:
            self._pending_calls.withdraw(pending)

    def wait(
        self,
        kind: str,
        request: Callable[[float | None], Message],
        *,
        doing: str,
        timeout: float | None,
    ) -> pb.KeyValueReply | None:
        """Make a call of the key-value store that waits for an event; return None after `timeout`.

        Args:
            kind: The field of `KeyValueCall` that holds the request.
            request: Makes the request for the seconds that are left.
            doing: What is waited for, for messages and announcements: "waiting for key 'a'".
            timeout: Seconds; None for no limit.

        Raises:
            CoordinatorUnavailableError: The coordinator has been silent for its lease and a margin.
            DMeshError: The server refused.
        """
        with self._link.tracing.call(_METHODS[kind], _IN_SESSION) as span:
            reply = self._wait(kind, request, doing, timeout, span)
            if reply is None:
                span.over(grpc.StatusCode.DEADLINE_EXCEEDED)
            return reply

    def _wait(
        self,
        kind: str,
        request: Callable[[float | None], Message],
        doing: str,
        timeout: float | None,
        span: Span,
    ) -> pb.KeyValueReply | None:
        started = time.monotonic()

        def left() -> float | None:
            return None if timeout is None else max(0.0, timeout - (time.monotonic() - started))

        pending = PendingCall(kind, lambda: request(left()), span.carried)
        announcer = self.announcer()
        delays = self.patience.retry.delays()
        # The server's own limit comes first; this one is for a server that does not keep to it.
        limit = math.inf if timeout is None else timeout + self.patience.slack

        def look() -> None:
            self._check(losses)
            if self._session.gone:
                raise self._session.unavailable(doing)
            if announcer.due:
                of = "" if timeout is None else f" of {timeout:g}"
                announcer.say(f"still {doing}, for {time.monotonic() - started:.0f}{of} s{self.absence()}")

        self._session.check()
        losses = self.witness.begin()
        try:
            while True:
                generation = self._session.generation
                self._pending_calls.ask(pending, self._session.registration.max_request_bytes)
                self._check(losses)
                while (
                    reply := pending.wait(
                        max(0.0, min(_LOOK, announcer.left, started + limit - time.monotonic()))
                    )
                ) is None:
                    look()
                    if time.monotonic() - started >= limit:
                        return None
                self._check(losses)
                if not reply.HasField("error"):
                    span.over(grpc.StatusCode.OK)
                    return reply
                fault = faults.from_error(reply.error)
                span.over(fault.status)
                if not fault.transient:
                    raise self._refusal(fault)
                look()
                if timeout is not None and time.monotonic() - started >= timeout:
                    return None
                self._session.pause(next(delays), generation)
        finally:
            self._pending_calls.withdraw(pending)

    def try_once(
        self, method: grpc.UnaryUnaryMultiCallable[_Request, _Response], request: _Request, timeout: float
    ) -> _Response | None:
        """Make one attempt of a call; None if it fails, for answers that are only nice to have."""
        outcome = self._link.attempt(method, request, timeout)
        return None if isinstance(outcome, Fault) else outcome

    def _check(self, losses: int) -> None:
        """Raise the session's error, or StoreLostError if the store was lost since a call began."""
        self._session.check()
        self.witness.check(losses)

    def fence(self, fault: Fault) -> None:
        """End the session: the server said that this process may not act for its task slot any more."""
        error = fault.exception()
        assert isinstance(error, CoordinationError)
        self._session.fail(error)

    def absence(self) -> str:
        """Return words about a coordinator that was silent for a suspicious time; else nothing."""
        contact = self._link.contact
        silence = contact.silence
        if silence < 2 * self._session.registration.heartbeat_interval + 1:
            return ""
        if contact.blocked:
            return (
                f" (the coordinator at {self._link.address} has been blocked for {silence:.0f} s: its "
                "connection lives, but it does nothing)"
            )
        return f" (no contact with the coordinator at {self._link.address} for {silence:.0f} s)"

    def _refusal(self, fault: Fault) -> DMeshError:
        if fault.code is grpc.StatusCode.UNIMPLEMENTED and not fault.from_server:
            return faults.not_a_coordinator(self._link.address, fault.message)
        if fault.fences:
            self.fence(fault)
        return fault.exception()

    def _too_long(self, fault: Fault, doing: str, waited: float) -> DMeshError:
        if fault.kind == common_pb2.ERROR_KIND_STORE_UNAVAILABLE:
            return fault.exception()
        if fault.from_server:
            return CoordinatorUnavailableError(
                f"the coordinator at {self._link.address} refused for {waited:.1f} s ({fault.message}), "
                f"while {doing}"
            )
        if self._session.gone:
            return self._session.unavailable(doing)
        if fault.code is grpc.StatusCode.DEADLINE_EXCEEDED and self._link.contact.silence < waited / 2:
            return self._reachable_but(waited, doing)
        return faults.unavailable(
            self._link.address, fault.message, waited, doing=doing, ever_connected=self._link.contact.ever
        )

    def _reachable_but(self, waited: float, doing: str) -> CoordinatorUnavailableError:
        return CoordinatorUnavailableError(
            f"the coordinator at {self._link.address} lives but gave no answer for {waited:.1f} s, while "
            f"{doing}. Look at its log: it may be overloaded, or its disk full."
        )


class Announcer:
    """Says something at most once per interval, the first time after one interval."""

    def __init__(
        self,
        announce: Callable[[str], None],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        since: float | None = None,
    ) -> None:
        self._announce = announce
        self._interval = interval
        self._clock = clock
        self._next = (clock() if since is None else since) + interval

    @property
    def due(self) -> bool:
        """True if it is time to say something."""
        return self._clock() >= self._next

    @property
    def left(self) -> float:
        """Seconds until it is time to say something."""
        return max(0.0, self._next - self._clock())

    def say(self, message: str) -> None:
        """Say it."""
        self._next = self._clock() + self._interval
        self._announce(message)
