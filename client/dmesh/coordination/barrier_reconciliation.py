"""Reconciliation with a restarted server: presents the barriers whose success it may have forgotten.

The server tells its clients at once that a barrier has succeeded, and makes that durable a moment later. So
after a restart of the server, clients that got the result report it to the new one, for those that did not.
The server that sent the result needs no report, however often connections break. All results may be more than
the server
reads in one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import grpc

from dmesh.coordination.barriers import Barriers
from dmesh.coordination.faults import Fault
from dmesh.coordination.link import Link
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb

_REQUEST_BYTES = 16 << 10
"""Size of one request, less than any server refuses; larger only for a single barrier that is larger."""


class BarrierReconciliation:
    """The coordinator's knowledge of the barriers that this process has passed.

    Args:
        barriers: The barriers of this process.
        link: Connects to the coordinator.
        caller: This process.
        attempt: Seconds that one request may take.
    """

    def __init__(self, barriers: Barriers, link: Link, caller: common_pb2.Caller, attempt: float) -> None:
        self._barriers = barriers
        self._link = link
        self._caller = caller
        self._attempt = attempt
        self.known_to = 0
        """Incarnation of the server that knows all of them; 0 before the first session."""

    def present(self, server_incarnation: int) -> Fault | None:
        """Present them to a server that may not know them. Returns why that failed, or None."""
        if server_incarnation == self.known_to:
            return None
        for passed in _split(self._barriers.passed()):
            request = pb.PresentBarriersRequest(caller=self._caller, passed=passed)
            outcome = self._link.attempt(self._link.coordination.PresentBarriers, request, self._attempt)
            if isinstance(outcome, Fault):
                return outcome
            if outcome.server_incarnation != server_incarnation:
                return Fault(0, "the coordinator was restarted again", code=grpc.StatusCode.UNAVAILABLE)
        self.known_to = server_incarnation
        return None


def _split(passed: Iterable[pb.PassedBarrier]) -> Iterator[list[pb.PassedBarrier]]:
    """Yield them in portions, each small enough for a request."""
    portion: list[pb.PassedBarrier] = []
    size = 0
    for barrier in passed:
        if portion and size + barrier.ByteSize() > _REQUEST_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(barrier)
        size += barrier.ByteSize()
    if portion:
        yield portion
