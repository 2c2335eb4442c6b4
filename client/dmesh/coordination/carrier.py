"""Carriers of a session's messages, and the heartbeats that they send by themselves."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from dmesh.coordination.faults import Fault
from dmesh.v1 import coordination_pb2 as pb
from dmesh.v1.progress_pb2 import ProgressReport

Receive = Callable[[pb.SessionResponse], Fault | None]
"""Takes a message of the server; returns why the session is over, if it is."""


class Heartbeats:
    """Says when a heartbeat is due, and makes it.

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
        self._beating = False
        self._sequence = 0
        self._due = clock() + interval

    def start(self) -> None:
        """Begin: the session is attached."""
        self._beating = True

    @property
    def left(self) -> float:
        """Seconds until the next one is due; not positive if it is."""
        return self._due - self._clock()

    def take(self) -> bytes | None:
        """Return an encoded heartbeat if one is due.

        A process that was stopped sends one when it goes on, not all that it missed.
        """
        if self._clock() < self._due:
            return None
        self._due = self._clock() + self._interval
        if not self._beating:
            return None
        self._sequence += 1
        beat = pb.Heartbeat(sequence=self._sequence, progress=self._progress(), report=self._report())
        return pb.SessionRequest(heartbeat=beat).SerializeToString()


class Carrier(ABC):
    """Carries the messages of one session. What it can hold is bounded by its users.

    These are one attach, one arrival for each thread that waits at a barrier, and as many calls as may be
    unanswered. What cannot be sent because it breaks is said again in the next session.
    """

    def __init__(self, heartbeats: Heartbeats) -> None:
        self.heartbeats = heartbeats
        """Sent whenever one is due, whatever else waits."""

    @abstractmethod
    def serve(self, attach: bytes, receive: Receive) -> Fault:
        """Open the session, and pass on what comes until it is over; return why it is.

        Args:
            attach: The first message, encoded.
            receive: Takes the messages, on the thread of the call.

        Raises:
            NoCarrier: This server cannot be reached in this way.
        """

    @abstractmethod
    def send(self, request: bytes) -> None:
        """Send an encoded request after those before it; never waits. Nothing happens once it is closed."""

    @abstractmethod
    def close(self) -> None:
        """End the session without a word. Idempotent; may be called by any thread."""

    def put(self, request: pb.SessionRequest) -> None:
        """Send a request after those before it."""
        self.send(request.SerializeToString())

    def enter_barrier(self, arrival: pb.EnterBarrier) -> None:
        """Send an arrival at a barrier."""
        self.send(pb.SessionRequest(enter_barrier=arrival).SerializeToString())


class NoCarrier(Exception):
    """A carrier cannot be used; says why.

    Args:
        reason: In words.
        certain: Trying again would be of no use.
    """

    def __init__(self, reason: str, *, certain: bool = False) -> None:
        super().__init__(reason)
        self.certain = certain
