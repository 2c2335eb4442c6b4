"""What a client presents to a server that was restarted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc

from dmesh.coordination.barrier_reconciliation import BarrierReconciliation
from dmesh.coordination.barriers import MAX_PASSED, Barriers
from dmesh.coordination.faults import Fault
from dmesh.v1 import common_pb2
from dmesh.v1 import coordination_pb2 as pb

AWAY = Fault(0, "away", code=grpc.StatusCode.UNAVAILABLE)


class Server:
    """In place of a connection: takes requests and answers as a server of one incarnation."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.requests: list[pb.PresentBarriersRequest] = []
        self.away_after = 1 << 30
        self.coordination = SimpleNamespace(PresentBarriers=None)

    def attempt(self, method: Any, request: pb.PresentBarriersRequest, deadline: float) -> Any:
        if len(self.requests) >= self.away_after:
            return AWAY
        self.requests.append(request)
        return pb.PresentBarriersResponse(server_incarnation=self.incarnation)


def passed(names: int) -> Barriers:
    barriers = Barriers()
    for number in range(names):
        name = f"{number:05}" + "x" * 250
        barriers.enter(name, (), 0)
        barriers.resolve(pb.BarrierResult(name=name, instance=0, epoch=3))
    return barriers


def reconciliation(barriers: Barriers, server: Server) -> BarrierReconciliation:
    return BarrierReconciliation(barriers, server, common_pb2.Caller(cluster="c"), 5.0)  # type: ignore[arg-type]


def test_each_server_is_told_once_in_requests_of_bounded_size() -> None:
    server = Server(7)
    told = reconciliation(passed(2000), server)
    assert told.present(7) is None
    names = [barrier.name for request in server.requests for barrier in request.passed]
    assert names == [f"{number:05}" + "x" * 250 for number in range(2000 - MAX_PASSED, 2000)]
    assert max(request.ByteSize() for request in server.requests) < 17_000
    assert len(server.requests) < 20
    server.requests.clear()
    assert told.present(7) is None
    assert not server.requests, "the server that knows them is not told again"
    assert told.known_to == 7


def test_an_attempt_that_failed_is_begun_anew() -> None:
    server = Server(7)
    told = reconciliation(passed(200), server)
    server.away_after = 2
    assert told.present(7) is AWAY
    assert told.known_to == 0
    server.away_after, server.requests = 1 << 30, []
    assert told.present(7) is None
    assert sum(len(request.passed) for request in server.requests) == 200


def test_a_server_that_was_restarted_in_between_is_not_taken_for_the_other() -> None:
    server = Server(8)
    told = reconciliation(passed(200), server)
    fault = told.present(7)
    assert fault is not None
    assert fault.transient
    assert told.known_to == 0
