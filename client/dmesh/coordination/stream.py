"""One session stream, with as few threads as it can do with.

gRPC's own streams of Python cost a thread that draws requests and waits for a condition after each, a thread
that polls and notifies, and one that reads: twice the processor time for a message and its answer. Beneath
them is what its single-threaded calls are made of: a call with a completion queue of its own, which the
reading thread polls itself. That is used here. It is no public interface of gRPC, so `open_stream` falls back
to the public one where it is not as expected: slower, and otherwise the same.
"""

from __future__ import annotations

import importlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import grpc

from dmesh._log import logger
from dmesh.coordination.waiting import Worker
from dmesh.v1.coordination_pb2 import SessionResponse

METHOD = "/dmesh.v1.CoordinationService/Session"

_CODES = {code.value[0]: code for code in grpc.StatusCode}

try:
    _core: Any = importlib.import_module("grpc._cython.cygrpc")
except ImportError:  # pragma: no cover -- another implementation of gRPC
    _core = None


class Stream(Protocol):
    """An open stream: iterating yields responses and ends, or raises a `grpc.RpcError`, with the stream."""

    def __iter__(self) -> Iterator[SessionResponse]: ...

    def cancel(self) -> object:
        """End it."""


def open_stream(
    channel: grpc.Channel, requests: Iterator[bytes], metadata: Iterable[tuple[str, str]]
) -> Stream:
    """Open a session stream.

    Args:
        channel: A channel of gRPC.
        requests: What to send; drawn from by a thread that ends with it.
        metadata: What goes with the call.

    Raises:
        ValueError: The channel is closed.
    """
    core_channel = getattr(channel, "_channel", None)
    if _core is not None and hasattr(core_channel, "segregated_call"):
        try:
            stream = DirectStream(core_channel, tuple(metadata))
        except (AttributeError, TypeError) as error:
            logger.debug("this version of gRPC is not as expected (%s): using its slower streams", error)
        else:
            stream.start(requests)
            return stream
    method: Any = channel.stream_stream(METHOD, None, SessionResponse.FromString)
    stream_of_grpc: Stream = method(requests, metadata=tuple(metadata))
    return stream_of_grpc


class StreamError(grpc.RpcError):
    """A stream ended with an error."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code = code
        self._details = details
        self._trailing_metadata = trailing_metadata

    def code(self) -> grpc.StatusCode:
        """Return the status."""
        return self._code

    def details(self) -> str:
        """Return what happened, in words."""
        return self._details

    def trailing_metadata(self) -> Any:
        """Return what came with the status."""
        return self._trailing_metadata


class DirectStream(Iterator[SessionResponse]):
    """A stream whose completion queue is polled by the thread that iterates.

    One message can be on its way out at a time: those that are drawn meanwhile are sent by the reading thread
    when it learns that there is room.
    """

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._sending = False
        self._due_lock = threading.Lock()
        self._due = 4
        self._status: tuple[grpc.StatusCode, str, Any] | None = None
        self._call = channel.segregated_call(
            _core.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            METHOD.encode(),
            None,
            None,
            metadata,
            None,
            (
                ((_core.SendInitialMetadataOperation(metadata, 0),), "begun"),
                ((_core.ReceiveStatusOnClientOperation(0),), "over"),
                ((_core.ReceiveInitialMetadataOperation(0),), "begun"),
                ((_core.ReceiveMessageOperation(0),), "received"),
            ),
            None,
        )

    def start(self, requests: Iterator[bytes]) -> None:
        """Begin to draw from `requests`, on a thread that ends with them."""
        Worker(lambda: self._send_all(requests), "dmesh-session-send").start()

    def cancel(self) -> None:
        """End the stream; its reader gets the status CANCELLED."""
        self._call.cancel(_core.StatusCode.cancelled, "the session was ended by this process")

    def __next__(self) -> SessionResponse:
        while self._due:
            event = self._call.next_event()
            with self._due_lock:
                self._due -= 1
            tag = event.tag
            if tag == "received":
                data = event.batch_operations[0].message()
                if data is not None:
                    self._operate(_core.ReceiveMessageOperation(0), "received")
                    return SessionResponse.FromString(data)
            elif tag == "sent":
                self._send_next()
            elif tag == "over":
                status = event.batch_operations[0]
                code = _CODES.get(status.code(), grpc.StatusCode.UNKNOWN)
                details = status.details()
                text = details.decode(errors="replace") if isinstance(details, bytes) else str(details or "")
                self._status = (code, text, status.trailing_metadata())
        if self._status is None or self._status[0] is grpc.StatusCode.OK:
            raise StopIteration
        raise StreamError(*self._status)

    def _operate(self, operation: Any, tag: str) -> bool:
        """Have something done; False if the call is over. An event will tell of its completion."""
        with self._due_lock:
            begun = bool(self._call.operate((operation,), tag))
            self._due += begun
        return begun

    def _send_all(self, requests: Iterator[bytes]) -> None:
        for request in requests:
            with self._lock:
                if self._sending:
                    self._unsent.append(request)
                    continue
                self._sending = True
                self._send(request)

    def _send_next(self) -> None:
        with self._lock:
            if self._unsent:
                self._send(self._unsent.popleft())
            else:
                self._sending = False

    def _send(self, request: bytes) -> None:
        try:
            self._operate(_core.SendMessageOperation(request, 0), "sent")
        except ValueError as error:  # the call is ending: its status says why
            logger.debug("a message of the session was not sent: %s", error)
