"""Pending calls of this process: sent through its session and not answered yet."""

from __future__ import annotations

import contextlib
import heapq
import queue
from collections.abc import Callable

from google.protobuf.message import Message

from dmesh._locks import Lock
from dmesh.coordination.tracing import Carried
from dmesh.coordination.waiting import take
from dmesh.errors import LimitExceededError
from dmesh.v1 import coordination_pb2 as pb

REPLY_SLOTS = 256
"""Calls that may be unanswered at a time: the server keeps one answer in each slot, and has no more slots."""

Send = Callable[[bytes], None]
"""Sends an encoded `SessionRequest`."""


class PendingCall:
    """One call of the key-value store, through one or more sessions. Made for one thread.

    Args:
        kind: The field of `KeyValueCall` that holds the request, and of the reply that holds the response.
        request: Makes the request, for each session anew: the time that is left to wait differs.
        carried: Says where the call belongs in a trace.
    """

    __slots__ = ("_carried", "_news", "id", "kind", "reply", "reply_slot", "request")

    def __init__(self, kind: str, request: Callable[[], Message], carried: Carried = ()) -> None:
        self._carried = carried
        self.kind = kind
        self.request = request
        self.id = 0
        self.reply_slot = 0
        """Slot in which the server keeps the answer, from the first attempt to the last; 0 for none."""
        self.reply: pb.KeyValueReply | None = None
        """The answer, once there is one."""
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def encode(self) -> bytes:
        """Make the message that asks it."""
        message = pb.SessionRequest()
        call = message.key_value_call
        call.id = self.id
        call.reply_slot = self.reply_slot
        getattr(call, self.kind).CopyFrom(self.request())
        if self._carried:
            call.trace_context.update(self._carried)
        return message.SerializeToString()

    def wait(self, seconds: float) -> pb.KeyValueReply | None:
        """Wait for the answer. May return early without one, when woken."""
        with contextlib.suppress(queue.Empty):
            take(self._news, seconds)
        return self.reply

    def settle(self, reply: pb.KeyValueReply) -> None:
        """Take the answer."""
        self.reply = reply
        self._news.put(None)

    def wake(self) -> None:
        """Make `wait` return."""
        self._news.put(None)


class PendingCalls:
    """The calls of one process: sent at once if there is a session, and again on every new one. Thread-safe.

    A call has its reply slot to itself until its answer has come or nobody waits for it any more, a refusal
    after which it is made again included. Calls for which no slot is free wait here.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._last_id = 0
        self._free = list(range(1, REPLY_SLOTS + 1))
        """The free reply slots, a heap: the lowest is used first, so that the server keeps few answers."""
        self._asked: dict[int, PendingCall] = {}
        self._waiting: dict[int, PendingCall] = {}
        self._send: Send | None = None

    def ask(self, pending: PendingCall, max_bytes: int) -> None:
        """Ask, now or as soon as there is a session. To be paired with `withdraw`.

        Args:
            pending: The call.
            max_bytes: Size of the largest message that the server reads: a larger one would break the session
                again and again.

        Raises:
            LimitExceededError: The call is larger.
        """
        with self._lock:
            self._last_id += 1
            pending.id = self._last_id
            pending.reply = None
            if not pending.reply_slot and self._free:
                pending.reply_slot = heapq.heappop(self._free)
            encoded = pending.encode()
            if len(encoded) > max_bytes:
                raise LimitExceededError(
                    f"the request has {len(encoded)} bytes; one message to the coordinator may have "
                    f"{max_bytes}. It was not sent: split the request, keep large data elsewhere, or "
                    "start the server with a larger --max-request-size."
                )
            if not pending.reply_slot:
                self._waiting[pending.id] = pending
                return
            self._asked[pending.id] = pending
            if self._send is not None:
                self._send(encoded)

    def withdraw(self, pending: PendingCall) -> None:
        """Stop to wait for an answer. Does nothing if it has come."""
        with self._lock:
            self._waiting.pop(pending.id, None)
            if self._asked.pop(pending.id, None) is not None and self._send is not None:
                abandon = pb.SessionRequest(abandon_call=pb.AbandonCall(id=pending.id))
                self._send(abandon.SerializeToString())
            self._release(pending)

    def attach(self, send: Send) -> None:
        """Begin to send through a new session, with everything that has no answer yet."""
        with self._lock:
            self._send = send
            for pending in self._asked.values():
                send(pending.encode())

    def detach(self) -> None:
        """Stop to send: the session broke."""
        with self._lock:
            self._send = None

    def resolve(self, reply: pb.KeyValueReply) -> None:
        """Deliver an answer; drop it if no thread waits for it any more."""
        with self._lock:
            pending = self._asked.pop(reply.id, None)
            if pending is not None and not reply.HasField("error"):
                self._release(pending)
        if pending is not None:
            pending.settle(reply)

    def drop(self) -> None:
        """Send none of the calls again, and wake the threads that wait for their answers."""
        with self._lock:
            dropped = (*self._asked.values(), *self._waiting.values())
            self._asked.clear()
            self._waiting.clear()
        for pending in dropped:
            pending.wake()

    def wake(self) -> None:
        """Make every waiting thread look at the state of its agent."""
        with self._lock:
            pending_calls = (*self._asked.values(), *self._waiting.values())
        for pending in pending_calls:
            pending.wake()

    def _release(self, pending: PendingCall) -> None:
        """Take a call's reply slot back, and send the call that has waited for one the longest."""
        reply_slot, pending.reply_slot = pending.reply_slot, 0
        if not reply_slot:
            return
        if not self._waiting:
            heapq.heappush(self._free, reply_slot)
            return
        heir = self._waiting.pop(next(iter(self._waiting)))
        heir.reply_slot = reply_slot
        self._asked[heir.id] = heir
        if self._send is not None:
            self._send(heir.encode())
