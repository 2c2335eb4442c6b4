"""What a client tells of its collectives: how far it has come in each group, and for whom it waits."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster

from dmesh import native
from dmesh.collectives.communicator import Communicator
from dmesh.collectives.progress import CollectiveReports
from dmesh.errors import CollectiveError
from dmesh.v1 import progress_pb2 as pb

WAYS = [(), *([("native",), ("dedicated",), ("encrypted",)] if native.core() is not None else [])]


def report_of(communicator: Communicator) -> pb.ProgressReport:
    report = pb.ProgressReport()
    CollectiveReports(communicator).fill(report)
    return report


@pytest.fixture(params=WAYS, ids=lambda ways: "-".join(ways) or "messages")
def ranks(request):
    with cluster(3, shm=request.param) as made:
        yield made


def test_who_has_called_nothing_has_nothing_to_tell(ranks):
    assert report_of(ranks.communicators[0]) == pb.ProgressReport()


def test_each_group_tells_how_far_it_is(ranks):
    def body(communicator):
        for _ in range(5):
            communicator.world.all_reduce(np.zeros(4))
        if communicator.rank == 2:
            return None
        pair = communicator.new_group((1, 0), "pair")
        pair.broadcast(np.zeros(2, "f4"))
        return pair

    held = ranks.all(body)
    assert held[1].size == 2
    pair, world = report_of(ranks.communicators[1]).groups
    assert (world.name, world.size, list(world.ranks)) == ("world", 3, [])
    assert (pair.name, pair.size, list(pair.ranks)) == ("pair", 2, [1, 0])
    assert (world.issued, world.finished, world.counted) == (5, 5, 5)
    last = world.last
    assert (last.sequence, last.nbytes, last.state) == (5, 32, pb.CALL_STATE_DONE)
    assert last.call == "all_reduce(sum, float64, shape (4,))"
    assert last.age_us >= last.elapsed_us
    assert world.elapsed_us >= world.waited_us
    ids = {report_of(communicator).groups[-1].id for communicator in ranks.communicators}
    assert ids == {world.id}, "all members say the same"


def test_a_call_that_waits_says_for_whom_and_since_when(ranks):
    late, here = threading.Event(), threading.Semaphore(0)

    def body(communicator):
        for _ in range(3):
            communicator.world.barrier()
        here.release()
        if communicator.rank == 2:
            assert late.wait(LIMIT)
        communicator.world.all_reduce(np.ones(3))

    waiter = threading.Thread(target=ranks.all, args=(body,))
    waiter.start()
    for _ in range(3):
        assert here.acquire(timeout=LIMIT)
    for _ in range(2000):
        world = report_of(ranks.communicators[0]).groups[0]
        behind = report_of(ranks.communicators[2]).groups[0]
        if list(world.last.waits_for) == [2]:
            break
        late.wait(0.005)
    late.set()
    waiter.join(LIMIT)
    assert (world.issued, world.finished, world.last.sequence) == (4, 3, 4)
    assert world.last.state == pb.CALL_STATE_WAITING
    assert world.last.elapsed_us > 0
    assert (world.last.waited_us, world.last.nbytes) == (-1, 24)
    assert (behind.issued, behind.finished, behind.last.call) == (3, 3, "barrier()")


def test_transfers_are_told_of_by_pair(ranks):
    def body(communicator):
        if communicator.rank == 0:
            communicator.world.send(np.arange(3.0), 2)
        if communicator.rank == 2:
            communicator.world.recv(np.empty(3), 0)

    ranks.all(body)
    [sent] = report_of(ranks.communicators[0]).groups
    [received] = report_of(ranks.communicators[2]).groups
    assert (sent.name, list(sent.ranks), sent.size) == ("world: 0 to 2", [0, 2], 2)
    assert sent.id == received.id
    assert (sent.last.call, received.last.call) == (
        "send(float64, shape (3,))",
        "recv(float64, shape (3,))",
    )


def test_a_failure_is_told(ranks):
    ranks.run(lambda c: c.world.all_reduce(np.zeros(1 + c.rank)))
    [world] = report_of(ranks.communicators[0]).groups
    assert world.last.state == pb.CALL_STATE_FAILED
    assert world.last.error.startswith("CollectiveMismatchError")
    assert "#1 of group world" in world.failure
    with pytest.raises(CollectiveError):
        ranks.communicators[0].world.barrier()


def test_recent_calls_are_few_and_the_last(ranks):
    ranks.all(lambda c: [c.world.barrier() for _ in range(40)])
    recent = report_of(ranks.communicators[0]).recent
    assert [call.sequence for call in recent] == list(range(25, 41))
    assert {call.state for call in recent} == {pb.CALL_STATE_DONE}


def test_many_groups_are_cut_to_those_that_matter(ranks):
    def body(communicator):
        communicator.world.barrier()
        kept = [communicator.new_group(range(3), f"g{n}") for n in range(40)]
        for group in kept:
            group.barrier()
        return kept

    kept = ranks.all(body)
    groups = report_of(ranks.communicators[0]).groups
    assert [group.name for group in groups] == [f"g{n}" for n in range(39, 7, -1)]
    del kept


@pytest.mark.skipif(native.core() is None, reason="no native core")
def test_the_native_core_tells_how_long_small_calls_waited():
    with cluster(2, shm=("native",)) as ranks:
        ranks.all(lambda c: c.world.barrier())

        def body(communicator):
            if communicator.rank == 1:
                threading.Event().wait(0.0004)
            communicator.world.all_reduce(np.zeros(1))

        for _ in range(20):
            ranks.all(body)
        endpoint = ranks.communicators[0].world.streams[0].endpoint
        calls, elapsed, waited = endpoint.totals()
        entries = endpoint.recent()
        assert calls == len(entries) <= 20
        assert elapsed == sum(ended - began for *_, began, ended, _ in entries)
        assert waited == sum(entry[-1] for entry in entries) <= elapsed
        last = endpoint.recent(2)  # fewer if one of the last two had to wait, and was left to Python
        assert last == entries[len(entries) - len(last) :]
        assert len(last) <= 2
        for wrong in (-1, 257, "x"):
            with pytest.raises((ValueError, OverflowError, TypeError)):
                endpoint.recent(wrong)
