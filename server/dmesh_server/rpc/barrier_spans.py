"""Spans of one session's waits at barriers, from the arrival to the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import grpc

from dmesh_server.core.effects import BarrierResult, Message
from dmesh_server.rpc.errors import STATUS_CODES
from dmesh_server.sessions import Session

if TYPE_CHECKING:
    from dmesh_server.telemetry.tracing import CallSpan, Traces

_MOST = 256
"""Barriers that a session waits at which have spans at a time."""


class BarrierSpans:
    """The spans that are not over yet."""

    def __init__(self, traces: Traces, session: Session) -> None:
        """Begin empty.

        Args:
            traces: Makes them.
            session: Whose they are.
        """
        self._traces = traces
        self._session = session
        self._open: dict[str, CallSpan] = {}
        session.on_sent = self._sent

    def arrived(self, name: str, fields: Mapping[str, str]) -> None:
        """The session's member arrives at a barrier."""
        if name not in self._open and len(self._open) < _MOST:
            self._open[name] = self._traces.barrier(name, fields, self._session.caller)

    def close(self) -> None:
        """The session is over."""
        self._session.on_sent = None
        for span in self._open.values():
            span.end(grpc.StatusCode.CANCELLED, "the session ended before the barrier")
        self._open.clear()

    def _sent(self, message: Message) -> None:
        if not isinstance(message, BarrierResult):
            return
        span = self._open.pop(message.name, None)
        if span is not None and message.error is None:
            span.end()
        elif span is not None and message.error is not None:
            span.end(STATUS_CODES[message.error.kind], message.error.message)
