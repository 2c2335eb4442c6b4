"""Send queue of a session: an iterator for gRPC to draw from, which adds the heartbeats by itself.

All but the heartbeats can be diverted to a faster way once there is one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

from dmesh.coordination.waiting import take
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1.progress_pb2 import ProgressReport

_BUSY = 8
"""Messages after which a session is known to have more to say than to join and to meet once or twice."""


class SendQueue(Iterator[bytes]):
    """The requests of one session stream, encoded, in order, with a heartbeat whenever one is due.

    gRPC draws from it on a thread of its own, which thereby is the heartbeat's timer. It ends when it is
    closed. What it can hold is bounded by its users: one attach, one arrival for each thread that waits at a
    barrier, and as many calls as may be unanswered.

    Args:
        interval: Seconds between heartbeats.
        progress: Returns a number that changes whenever the program gets on.
        report: Returns what goes with a heartbeat, or nothing.
    """

    def __init__(
        self,
        interval: float,
        progress: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        *,
        report: Callable[[], ProgressReport | None] = lambda: None,
    ) -> None:
        self._interval = interval
        self._progress = progress
        self._report = report
        self._clock = clock
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = False
        self._beating = False
        self._sequence = 0
        self._due = clock() + interval
        self._lock = threading.Lock()
        self._sink: Callable[[bytes], None] = self._queue.put
        self._until_busy = _BUSY
        self._when_busy: Callable[[], None] | None = None

    def send(self, request: bytes) -> None:
        """Send an encoded request after those before it; nothing happens if the send queue is closed."""
        with self._lock:
            self._sink(request)
            if self._when_busy is None:
                return
            self._until_busy -= 1
            if self._until_busy > 0:
                return
            begin, self._when_busy = self._when_busy, None
        begin()

    def when_busy(self, begin: Callable[[], None]) -> None:
        """Have `begin` called, once, when this session turns out to have much to say."""
        with self._lock:
            self._when_busy = begin

    def divert(self, mark: pb.SessionRequest, sink: Callable[[bytes], None]) -> None:
        """Send `mark`, and all requests after it through `sink`; heartbeats go on as before."""
        with self._lock:
            self._sink(mark.SerializeToString())
            self._sink = sink

    def enter_barrier(self, arrival: pb.EnterBarrier) -> None:
        """Send an arrival at a barrier."""
        self.send(pb.SessionRequest(enter_barrier=arrival).SerializeToString())

    def put(self, request: pb.SessionRequest) -> None:
        """Send a request after those before it; nothing happens if the send queue is closed."""
        self.send(request.SerializeToString())

    def start_heartbeats(self) -> None:
        """Begin to send heartbeats: the session is attached."""
        self._beating = True

    def close(self) -> None:
        """End the stream of requests. What was not drawn is dropped."""
        self._closed = True
        self._queue.put(None)

    def __next__(self) -> bytes:
        while True:
            left = self._due - self._clock()
            request: bytes | None = None
            if left <= 0:
                # Whatever waits: a program that sends without pause must not be taken for a dead one. A
                # process that was stopped sends one heartbeat when it goes on, not all that it missed.
                self._due = self._clock() + self._interval
                if self._beating and not self._closed:
                    self._sequence += 1
                    beat = pb.Heartbeat(
                        sequence=self._sequence, progress=self._progress(), report=self._report()
                    )
                    return pb.SessionRequest(heartbeat=beat).SerializeToString()
                continue
            try:
                request = take(self._queue, left)
            except queue.Empty:
                continue
            if request is None or self._closed:
                self._closed = True
                raise StopIteration
            return request
