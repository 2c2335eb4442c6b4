"""The streams that the runtime holds open: sessions of members, and watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dmesh.security.tokens import Token
from dmesh_server.core.effects import Message, SessionEnd, WatchPush
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Caller
from dmesh_server.security.pace import Pace
from dmesh_server.send_queue import SendQueue
from dmesh_server.telemetry import logs

MAX_SESSION_BYTES = 64 << 20
"""Bytes of answers that may wait for one session's reader. One answer alone may be larger."""


@dataclass(slots=True, eq=False)
class OutgoingMessage:
    """A message for one or many sessions."""

    message: Message
    encoded: bytes | None = None
    """Its encoding, made for the first session and kept for the others."""


class Session:
    """Session of an attached client.

    Attributes:
        number: Names the session to the core.
        caller: The client.
        remote: Address from which it came; empty if it is not known.
        send_queue: Messages and encoded answers for the client, unless they are written at once.
        fault: Error with which the server ends the session; None if it does not.
        dropped: True if the server dropped the session because its client does not read.
        token: Token with which it was opened; None if the server checks none.
        call_rate: Quota of calls of that token; None for none.
        on_sent: Called with every message that is sent; None for nobody.
    """

    def __init__(
        self,
        number: int,
        caller: Caller,
        queue_limit: int,
        max_bytes: int = MAX_SESSION_BYTES,
        remote: str = "",
    ) -> None:
        """Make a session that may fall `queue_limit` messages, or `max_bytes` of answers behind."""
        self.number = number
        self.caller = caller
        self.remote = remote
        self.send_queue: SendQueue[OutgoingMessage | bytes] = SendQueue(queue_limit, max_bytes)
        self._write: Callable[[OutgoingMessage | bytes], None] | None = None
        self._on_over: Callable[[], None] | None = None
        self.fault: CoreError | None = None
        self.dropped = False
        self.token: Token | None = None
        self.call_rate: Pace | None = None
        self.on_sent: Callable[[Message], None] | None = None

    def send(self, outgoing: OutgoingMessage) -> None:
        """Queue a message; the last one closes the queue."""
        if self.on_sent is not None:
            self.on_sent(outgoing.message)
        self._put(outgoing, 0)
        if isinstance(outgoing.message, SessionEnd):
            self.end()

    def answer(self, encoded: bytes) -> None:
        """Queue an answer to a call."""
        self._put(encoded, len(encoded))

    def carry(self, write: Callable[[OutgoingMessage | bytes], None], on_over: Callable[[], None]) -> None:
        """Have the queued messages and all later ones written at once.

        Args:
            write: Takes a message; does not wait.
            on_over: Called when the session ends; perhaps more than once.
        """
        for item in self.send_queue.take_all():
            write(item)
        self._write, self._on_over = write, on_over
        if self.send_queue.closed:
            on_over()

    def fail(self, fault: CoreError | None = None) -> None:
        """End the session after the queued messages; the client may come back."""
        if self.fault is None:
            self.fault = fault
        self.end()

    def end(self) -> None:
        """End the session after the messages so far. Idempotent."""
        self.send_queue.close()
        if self._on_over is not None:
            self._on_over()

    def drop(self) -> None:
        """End the session of a client that does not read its messages."""
        self.dropped = True
        logs.warning(
            "session_dropped", **describe_caller(self.caller), reason="it does not read what it is sent"
        )
        self.fail(
            CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                "the session was dropped because it did not read what it was sent; attach again",
            )
        )

    def _put(self, item: OutgoingMessage | bytes, size: int) -> None:
        if self._write is not None:
            self._write(item)
            return
        had_overflowed = self.send_queue.overflowed
        self.send_queue.put(item, size)
        if self.send_queue.overflowed and not had_overflowed:
            self.drop()


class Watch:
    """A watch that the core has registered."""

    def __init__(self, token: int, queue_limit: int, max_bytes: int) -> None:
        """Make a watch that may fall `queue_limit` revisions, or `max_bytes` of keys and values behind."""
        self.token = token
        self.send_queue: SendQueue[WatchPush] = SendQueue(queue_limit, max_bytes)
        self.revision = 0


def describe_caller(caller: Caller) -> dict[str, object]:
    """Return the log fields that name a caller."""
    return {
        "cluster": caller.cluster,
        "task": caller.task or "observer",
        "incarnation": f"{caller.incarnation:016x}",
    }
