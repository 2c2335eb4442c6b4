"""What a session sends: an iterator for gRPC to draw from, which adds the heartbeats by itself."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

from dmesh.v1 import coordination_pb2 as pb


class Outbox(Iterator[pb.SessionRequest]):
    """The requests of one session stream, in order, with a heartbeat whenever one is due.

    gRPC draws from it on a thread of its own, which thereby is the heartbeat's timer. It ends when it is
    closed. What it can hold is bounded by its users: one attach, and one arrival for each thread that waits
    at a barrier.

    Args:
        interval: Seconds between heartbeats.
        alive: Called when a heartbeat is due; False ends the stream, for a server that no longer answers.
        progress: Returns what heartbeats tell of the program's progress.
    """

    def __init__(
        self,
        interval: float,
        alive: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        self._interval = interval
        self._alive = alive
        self._progress = progress
        self._clock = clock
        self._queue: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._closed = False
        self._beating = False
        self._sequence = 0
        self._due = clock() + interval

    def put(self, request: pb.SessionRequest) -> None:
        """Sends a request after those before it; nothing happens if the outbox is closed."""
        self._queue.put(request)

    def start_heartbeats(self) -> None:
        """Begins to send heartbeats: the session is attached."""
        self._beating = True

    def close(self) -> None:
        """Ends the stream of requests. What was not drawn is dropped."""
        self._closed = True
        self._queue.put(None)

    def __next__(self) -> pb.SessionRequest:
        while True:
            request: pb.SessionRequest | None = None
            try:
                request = self._queue.get(timeout=max(0.0, self._due - self._clock()))
            except queue.Empty:
                # A process that was stopped sends one heartbeat when it goes on, not all that it missed.
                self._due = self._clock() + self._interval
                if not self._closed and self._alive():
                    if not self._beating:
                        continue
                    self._sequence += 1
                    heartbeat = pb.Heartbeat(sequence=self._sequence, progress=self._progress())
                    return pb.SessionRequest(heartbeat=heartbeat)
            if request is None or self._closed:
                self._closed = True
                raise StopIteration
            return request
