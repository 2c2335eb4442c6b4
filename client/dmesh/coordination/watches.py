"""Watching keys: a stream of changes that survives the connection it comes through."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import grpc

from dmesh._locks import Lock
from dmesh.coordination import faults
from dmesh.coordination.calls import Calls
from dmesh.coordination.faults import Fault
from dmesh.coordination.link import Link
from dmesh.coordination.retry import Patience
from dmesh.coordination.session import Session
from dmesh.coordination.tracing import Carried
from dmesh.coordination.values import decode_value
from dmesh.coordination.waiting import Worker, take
from dmesh.errors import DMeshError
from dmesh.v1 import common_pb2
from dmesh.v1 import key_value_pb2 as pb


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """One change of one key."""

    key: str
    """The key."""
    value: bytes | None
    """Its new value; None if it was deleted."""
    revision: int
    """Revision of the store that the change made. Keys deleted together share one."""
    create_revision: int
    """Revision at which the key came into being; of no meaning if it was deleted."""

    @property
    def deleted(self) -> bool:
        """True if the key was deleted."""
        return self.value is None

    def text(self, encoding: str = "utf-8") -> str | None:
        """Return the new value as text; None if the key was deleted."""
        return None if self.value is None else decode_value(self.value, self.key, encoding)


_Batch: TypeAlias = list[KeyEvent]
"""The changes of one message."""


class WatchStream:
    """The stream behind a watch: placed, read, and placed again from the next revision when it breaks.

    Runs on the watch's thread, but for `close`.
    """

    def __init__(
        self,
        link: Link,
        session: Session,
        calls: Calls,
        caller: common_pb2.Caller,
        patience: Patience,
        prefix: str,
        from_revision: int,
    ) -> None:
        self._link = link
        self._session = session
        self._calls = calls
        self._caller = caller
        self._patience = patience
        self._prefix = prefix
        self.next_revision = from_revision
        """The first revision whose changes have not been received; 0 for whichever comes next."""
        self.tracing = link.tracing
        """Makes spans of its calls."""
        self._losses = session.store_losses
        self._lock = Lock()
        self._call: grpc._CallIterator[pb.WatchResponse] | None = None
        self.closed = False
        """True once no reader wants it any more."""
        self._server = 0
        """Incarnation of the server that serves the watch; the session's may still be another."""

    def read(self) -> _Batch:
        """Wait for the next changes; an empty batch means that the watch was put in place, or closed."""
        with self._lock:
            call = self._call
        if call is None:
            self._place_patiently()
            return []
        fault: Fault | None = None
        try:
            response = next(call)
        except StopIteration:
            fault = _ENDED
        except grpc.RpcError as error:
            fault = faults.from_rpc(error)
        if fault is not None:
            with self._lock:
                self._call = None
            self._examine(fault)
            return []
        self._link.contact.heard()
        if response.revision < self.next_revision:
            return []
        self.next_revision = response.revision + 1
        self._session.note_seen(self._server, revision=response.revision)
        return [
            KeyEvent(
                key=event.kv.key,
                value=None if event.deleted else event.kv.value,
                revision=response.revision,
                create_revision=event.kv.create_revision,
            )
            for event in response.events
        ]

    def close(self) -> None:
        """Make `read` return, now and ever after. May be called by any thread."""
        self.closed = True
        self.interrupt()

    def interrupt(self) -> None:
        """Break the connection, so that `read` looks at the session's state. May be called by any thread."""
        with self._lock:
            call = self._call
        if call is not None:
            self._link.cancel(call)

    def _place_patiently(self) -> None:
        """Put the watch in place, however often that has to be tried."""
        delays = self._patience.retry.delays()
        while not self.closed:
            self._session.check()
            generation = self._session.generation
            fault = self._place()
            if fault is None:
                return
            self._examine(fault)
            if self._session.gone:
                raise self._session.unavailable(f"watching the keys that start with {self._prefix!r}")
            self._session.pause(next(delays), generation)

    def _place(self) -> Fault | None:
        """Open the stream and wait for its first message, which says that the watch is in place."""
        with self._link.tracing.call("/dmesh.v1.KeyValueService/Watch") as span:
            fault = self._open(span.carried)
            if fault is not None:
                span.over(fault.status, fault.message)
            return fault

    def _open(self, carried: Carried) -> Fault | None:
        request = pb.WatchRequest(
            caller=self._caller,
            prefix=self._prefix,
            from_revision=self.next_revision,
            last_told=self._session.last_seen(),
        )
        # In this order: then the server judges by the store that this watch belongs to.
        self._check_losses()
        try:
            call = self._link.key_value.Watch(request, metadata=carried)
        except ValueError:
            return faults.CHANNEL_CLOSED
        with self._lock:
            self._call = call
        if self.closed:
            call.cancel()
        try:
            placed = next(call)
            self._server = placed.server_incarnation
            self._link.contact.heard()
        except BaseException as error:
            with self._lock:
                self._call = None
            call.cancel()
            if isinstance(error, grpc.RpcError):
                fault = faults.from_rpc(error)
            elif isinstance(error, StopIteration):
                fault = _ENDED
            else:
                raise
            self._link.note(fault)
            return fault
        # With a revision to start from, the changes from there to the store's revision follow.
        self.next_revision = self.next_revision or placed.revision + 1
        return None

    def _check_losses(self) -> None:
        """Raise an error if the store changed, because this watch's revisions are of the former one."""
        losses = self._session.store_losses
        if losses != self._losses:
            raise self._calls.witness.error(losses)

    def _examine(self, fault: Fault) -> None:
        """Raise what no other attempt can change."""
        if self.closed:
            return
        self._session.check()
        self._check_losses()
        if fault.transient:
            return
        if fault.fences:
            self._calls.fence(fault)
        raise fault.exception()


_ENDED = Fault(0, "the coordinator ended the watch", code=grpc.StatusCode.UNAVAILABLE)


class Watch(Iterator[KeyEvent]):
    """The changes of all keys with a prefix, in order of revision, each exactly once.

    Iterating blocks until the next change. A connection that breaks is replaced, and the changes made
    meanwhile follow. Iterate in one thread; `close` may be called by any, and ends the iteration. Usable in a
    `with` statement. Made by `Agent.watch`; when that returns, the watch is in place.

    What the iteration raises (a `CoordinatorUnavailableError`, say) does not end the watch: iterating again
    goes on where it stopped.

    A thread of its own reads the stream, as many messages as are fetched: the others wait in the connection,
    not in memory.
    """

    def __init__(self, prefix: str, stream: WatchStream, on_close: Callable[[Watch], None]) -> None:
        self._prefix = prefix
        self._stream = stream
        self._on_close = on_close
        self._demands: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_Batch | DMeshError | None] = queue.SimpleQueue()
        self._demanded = False
        self._events: deque[KeyEvent] = deque()
        try:
            Worker(stream.tracing.bound(self._run), "dmesh-watch").start()
            self._fetch()
        except BaseException:
            self.close()
            raise

    @property
    def prefix(self) -> str:
        """The prefix of the keys that are watched."""
        return self._prefix

    @property
    def closed(self) -> bool:
        """True once the watch was closed."""
        return self._stream.closed

    @property
    def next_revision(self) -> int:
        """The revision from which a new watch would go on after the changes received so far."""
        return self._events[0].revision if self._events else self._stream.next_revision

    def __next__(self) -> KeyEvent:
        """Wait for the next change.

        Raises:
            StopIteration: The watch was closed.
            WatchCompactedError: The server no longer has the changes that come next.
            CoordinatorUnavailableError: The coordinator has been silent for its lease and a margin.
        """
        while not self._stream.closed:
            if self._events:
                return self._events.popleft()
            self._fetch()
        raise StopIteration

    def poll(self, timeout: float) -> KeyEvent | None:
        """Wait for the next change for a time; return None if there was none, or the watch was closed.

        Args:
            timeout: Seconds; 0 for what has arrived already.

        Raises:
            WatchCompactedError: The server no longer has the changes that come next.
            CoordinatorUnavailableError: The coordinator has been silent for its lease and a margin.
        """
        deadline = time.monotonic() + timeout
        while not self._stream.closed:
            if self._events:
                return self._events.popleft()
            try:
                self._fetch(max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
        return None

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the watch and the iteration. Idempotent."""
        self._stream.close()
        self._demands.put(False)
        self._results.put(None)
        self._on_close(self)

    def interrupt(self) -> None:
        """Make a blocked iteration look at the state of its agent."""
        self._stream.interrupt()

    def _fetch(self, timeout: float | None = None) -> None:
        """Wait for one message. If it is interrupted, the next call waits for the same one.

        Raises:
            queue.Empty: The message did not come in time.
        """
        if not self._demanded:
            self._demanded = True
            self._demands.put(True)
        result = self._results.get() if timeout is None else take(self._results, timeout)
        self._demanded = False
        if isinstance(result, DMeshError):
            raise result
        self._events.extend(result or ())

    def _run(self) -> None:
        while self._demands.get() and not self._stream.closed:
            try:
                self._results.put(self._stream.read())
            except DMeshError as error:
                self._results.put(error)
