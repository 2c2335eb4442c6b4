"""The key-value calls of one session: begun when they arrive, answered through the session's send queue."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import grpc

from dmesh.v1 import coordination_pb2 as pb
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.replies import REPLY_SLOTS
from dmesh_server.rpc import convert
from dmesh_server.rpc.errors import STATUS_CODES
from dmesh_server.rpc.key_value_calls import METHODS, SERVICE, Method
from dmesh_server.runtime import Runtime
from dmesh_server.security.access import calls_exceeded
from dmesh_server.sessions import Session
from dmesh_server.telemetry import logs
from dmesh_server.telemetry.measures import Measures

if TYPE_CHECKING:
    from dmesh_server.telemetry.tracing import CallSpan, Traces

_RESENDING = 1.0
"""Seconds from a session's begin in which calls of the session before come again."""

_NAMES = {kind: "".join(word.capitalize() for word in kind.split("_")) for kind in METHODS}
"""Name of the RPC that each kind of call stands for."""


def count(measures: Measures) -> None:
    """Show, from the beginning, that nothing was called yet."""
    for name in _NAMES.values():
        measures.rpc(name, "session")


class SessionCalls:
    """The calls of one session that are not answered yet. Neither a task nor a future is made for one."""

    def __init__(self, runtime: Runtime, session: Session, traces: Traces | None = None) -> None:
        """Begin empty.

        Args:
            runtime: Answers the requests.
            session: The session of the calls.
            traces: Makes spans of them; None for none.
        """
        self._traces = traces
        self._spans: dict[int, CallSpan] = {}
        self._runtime = runtime
        self._session = session
        self._began = runtime.now()
        self._unanswered: dict[int, tuple[int, int]] = {}
        """Token and reply slot of each call, by its id."""
        self._taken: set[int] = set()
        """Reply slots of these calls."""

    def begin(self, call: pb.KeyValueCall) -> None:
        """Hand a call in; its answer is queued now or later.

        Raises:
            CoreError: It says nothing that this server understands: the session ends.
        """
        kind = call.WhichOneof("request")
        method = METHODS.get(kind) if kind is not None else None
        if kind is None or method is None:
            raise convert.invalid("a key-value call is empty or of a kind that this server does not know")
        if call.id in self._unanswered:
            raise convert.invalid(f"a call with id {call.id} is not answered yet: give each call its own")
        if call.reply_slot in self._taken:
            raise convert.invalid(
                f"the call in reply slot {call.reply_slot} is not answered yet: use a free slot"
            )
        if len(self._unanswered) >= REPLY_SLOTS:
            self._answer(kind, method, call.id, _too_many())
            return
        if self._over_quota():
            self._answer(kind, method, call.id, calls_exceeded(self._session.token))
            return
        if self._traces is not None:
            self._spans[call.id] = self._traces.call(
                f"/{SERVICE}/{_NAMES[kind]}", call.trace_context, self._session.caller
            )
        token = self._runtime.next_number()
        try:
            session = self._session
            event = method.read(token, session.caller, getattr(call, kind), session.number, call.reply_slot)
        except CoreError as refusal:
            self._answer(kind, method, call.id, refusal)
            return
        self._unanswered[call.id] = token, call.reply_slot
        if call.reply_slot:
            self._taken.add(call.reply_slot)
        try:
            self._runtime.ask(
                event, partial(self._answer_in_time, kind, method, call.id, self._runtime.now())
            )
        except Exception:  # noqa: BLE001 -- a bug, which must cost one call its answer, not the session its life
            logs.error("request_failed", exc_info=True, request=f"dmesh.v1.KeyValueCall.{kind}")
            self._answer(kind, method, call.id, _failed(kind))

    def _over_quota(self) -> bool:
        """Count a call against its token's quota; return whether it must be refused."""
        rate, now = self._session.call_rate, self._runtime.now()
        # Right after a reconnection calls come again: what may have taken effect is not refused.
        return rate is not None and not rate.take(now) and now - self._began > _RESENDING

    def abandon(self, call_id: int) -> None:
        """Answer a call no more. Unknown ones, which may have been answered meanwhile, are ignored."""
        token = self._forget(call_id)
        if token is not None:
            self._runtime.abandon(token)
            if call_id in self._spans:
                self._spans.pop(call_id).end(grpc.StatusCode.CANCELLED, "the caller does not wait any more")

    def close(self) -> None:
        """Answer nothing any more: the session is over."""
        for call_id in tuple(self._unanswered):
            self.abandon(call_id)

    def _forget(self, call_id: int) -> int | None:
        token, reply_slot = self._unanswered.pop(call_id, (None, 0))
        self._taken.discard(reply_slot)
        return token

    def _answer_in_time(self, kind: str, method: Method, call_id: int, begin: float, answer: object) -> None:
        self._runtime.measures.rpc(_NAMES[kind], "session").observe(self._runtime.now() - begin)
        self._answer(kind, method, call_id, answer)

    def _answer(self, kind: str, method: Method, call_id: int, answer: object) -> None:
        self._forget(call_id)
        if not isinstance(answer, CoreError | method.answer):
            logs.error("request_failed", request=kind, answer=type(answer).__name__)
            answer = _failed(kind)
        response = pb.SessionResponse()
        reply = response.key_value_reply
        reply.id = call_id
        if isinstance(answer, CoreError):
            self._runtime.measures.refused[answer.kind.name] += 1
            if call_id in self._spans:
                self._spans.pop(call_id).end(STATUS_CODES[answer.kind], answer.message)
            reply.error.CopyFrom(convert.error_to_proto(answer, self._runtime.now()))
        else:
            getattr(reply, kind).CopyFrom(method.write(answer))
            if call_id in self._spans:
                self._spans.pop(call_id).end()
        self._session.answer(response.SerializeToString())


def _too_many() -> CoreError:
    return CoreError(
        ErrorKind.LIMIT_EXCEEDED,
        f"{REPLY_SLOTS} calls of this session are not answered yet, which is the limit: wait for some "
        "answers first",
    )


def _failed(kind: str) -> CoreError:
    return CoreError(
        ErrorKind.INTERNAL, f"the coordination server failed to handle a {kind} call; see its log"
    )
