"""The streams that the runtime holds open: sessions of members, and watches."""

from __future__ import annotations

from collections.abc import Callable

from dmesh_server.core.effects import HeartbeatAck, Message, SessionEnd, WatchPush
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.model import Caller
from dmesh_server.outbox import Outbox
from dmesh_server.telemetry import logs

MAX_SESSION_BYTES = 64 << 20
"""Bytes of answers that may wait for one session's reader. One answer alone may be larger."""


class Notice:
    """A message for one or many sessions; whoever sends it first keeps its encoding for the others."""

    __slots__ = ("encoded", "message")

    def __init__(self, message: Message) -> None:
        """Wraps `message`."""
        self.message = message
        self.encoded: bytes | None = None


class Session:
    """A client's attached life line.

    Attributes:
        number: Names the session to the core.
        caller: Whose it is.
        outbox: What the client is to be told: messages, and answers that are encoded already.
        express: A faster way for all but acknowledged heartbeats and the session's end, once there is one.
        fault: Why the server ends the session, if it does.
        dropped: It was, because its client does not read.
        on_told: Is told of every message, if anybody wants to know.
    """

    def __init__(
        self, number: int, caller: Caller, queue_limit: int, max_bytes: int = MAX_SESSION_BYTES
    ) -> None:
        """Makes a session that may fall `queue_limit` messages, or `max_bytes` of answers behind."""
        self.number = number
        self.caller = caller
        self.outbox: Outbox[Notice | bytes] = Outbox(queue_limit, max_bytes)
        self.express: Callable[[Notice | bytes], None] | None = None
        self.fault: CoreError | None = None
        self.dropped = False
        self.on_told: Callable[[Message], None] | None = None

    def tell(self, notice: Notice) -> None:
        """Queues a message; the last one closes the queue."""
        if self.on_told is not None:
            self.on_told(notice.message)
        if self.express is not None and not isinstance(notice.message, HeartbeatAck | SessionEnd):
            self.express(notice)
            return
        self._put(notice, 0)
        if isinstance(notice.message, SessionEnd):
            self.outbox.close()

    def answer(self, encoded: bytes) -> None:
        """Queues an answer to a call."""
        if self.express is not None:
            self.express(encoded)
        else:
            self._put(encoded, len(encoded))

    def fail(self, fault: CoreError | None = None) -> None:
        """Ends the session, after what is queued already; the client may come back."""
        if self.fault is None:
            self.fault = fault
        self.outbox.close()

    def drop(self) -> None:
        """Ends the session of a client that does not read what it is sent."""
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

    def _put(self, item: Notice | bytes, size: int) -> None:
        had_overflowed = self.outbox.overflowed
        self.outbox.put(item, size)
        if self.outbox.overflowed and not had_overflowed:
            self.drop()


class Watch:
    """A watch in place."""

    def __init__(self, token: int, queue_limit: int, max_bytes: int) -> None:
        """Makes a watch that may fall `queue_limit` revisions, or `max_bytes` of keys and values behind."""
        self.token = token
        self.outbox: Outbox[WatchPush] = Outbox(queue_limit, max_bytes)
        self.revision = 0


def describe_caller(caller: Caller) -> dict[str, object]:
    """Returns the log fields that name a caller."""
    return {
        "cluster": caller.cluster,
        "task": caller.task or "observer",
        "incarnation": f"{caller.incarnation:016x}",
    }
