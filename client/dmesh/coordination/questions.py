"""Pending calls of this process: sent through its session and not answered yet."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from google.protobuf.message import Message

from dmesh.coordination.tracing import Carried
from dmesh.coordination.waiting import take
from dmesh.errors import LimitExceededError
from dmesh.v1 import coordination_pb2 as pb

MAX_UNANSWERED = 256
"""Questions that may be on their way at a time; the server refuses more."""

Send = Callable[[bytes], None]
"""Sends an encoded `SessionRequest`."""


class Question:
    """One call of the key-value store, through one or more sessions. Made for one thread.

    Args:
        kind: The field of `KeyValueCall` that holds the request, and of the reply that holds the response.
        request: Makes the request, for each session anew: the time that is left to wait differs.
        carried: Says where the call belongs in a trace.
    """

    __slots__ = ("_carried", "_news", "id", "kind", "reply", "request")

    def __init__(self, kind: str, request: Callable[[], Message], carried: Carried = ()) -> None:
        self._carried = carried
        self.kind = kind
        self.request = request
        self.id = 0
        self.reply: pb.KeyValueReply | None = None
        """The answer, once there is one."""
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def encode(self) -> bytes:
        """Makes the message that asks it."""
        message = pb.SessionRequest()
        call = message.key_value_call
        call.id = self.id
        getattr(call, self.kind).CopyFrom(self.request())
        if self._carried:
            call.trace_context.update(self._carried)
        return message.SerializeToString()

    def wait(self, seconds: float) -> pb.KeyValueReply | None:
        """Waits for the answer. May return early without one, when woken."""
        with contextlib.suppress(queue.Empty):
            take(self._news, seconds)
        return self.reply

    def settle(self, reply: pb.KeyValueReply) -> None:
        """Takes the answer."""
        self.reply = reply
        self._news.put(None)

    def wake(self) -> None:
        """Makes `wait` return."""
        self._news.put(None)


class Questions:
    """The questions of one process: asked at once if there is a session, and on every new one. Thread-safe.

    The server is never asked more than it answers at a time; what is beyond waits here for its turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_id = 0
        self._asked: dict[int, Question] = {}
        self._waiting: dict[int, Question] = {}
        self._send: Send | None = None

    def ask(self, question: Question, max_bytes: int) -> None:
        """Asks, now or as soon as there is a session. To be paired with `withdraw`.

        Args:
            question: The question.
            max_bytes: Size of the largest message that the server reads: a larger one would break the session
                again and again.

        Raises:
            LimitExceededError: The question is larger.
        """
        with self._lock:
            self._last_id += 1
            question.id = self._last_id
            question.reply = None
            encoded = question.encode()
            if len(encoded) > max_bytes:
                raise LimitExceededError(
                    f"the request has {len(encoded)} bytes; one message to the coordinator may have "
                    f"{max_bytes}. Nothing was asked: ask for less at a time, keep large data elsewhere, or "
                    "start the server with a larger --max-request-size."
                )
            if len(self._asked) >= MAX_UNANSWERED:
                self._waiting[question.id] = question
                return
            self._asked[question.id] = question
            if self._send is not None:
                self._send(encoded)

    def withdraw(self, question: Question) -> None:
        """Stops to wait for an answer. Does nothing if it has come."""
        with self._lock:
            if self._waiting.pop(question.id, None) is not None or self._asked.pop(question.id, None) is None:
                return
            if self._send is not None:
                abandon = pb.SessionRequest(abandon_call=pb.AbandonCall(id=question.id))
                self._send(abandon.SerializeToString())
            self._ask_more()

    def attach(self, send: Send) -> None:
        """Begins to send through a new session, with everything that has no answer yet."""
        with self._lock:
            self._send = send
            for question in self._asked.values():
                send(question.encode())

    def detach(self) -> None:
        """Stops to send: the session broke."""
        with self._lock:
            self._send = None

    def resolve(self, reply: pb.KeyValueReply) -> None:
        """Delivers an answer; one that nobody waits for any more is dropped."""
        with self._lock:
            question = self._asked.pop(reply.id, None)
            if self._waiting:
                self._ask_more()
        if question is not None:
            question.settle(reply)

    def wake(self) -> None:
        """Makes every waiting thread look at the state of its agent."""
        with self._lock:
            questions = (*self._asked.values(), *self._waiting.values())
        for question in questions:
            question.wake()

    def _ask_more(self) -> None:
        while self._waiting and len(self._asked) < MAX_UNANSWERED:
            question = self._waiting.pop(next(iter(self._waiting)))
            self._asked[question.id] = question
            if self._send is not None:
                self._send(question.encode())
