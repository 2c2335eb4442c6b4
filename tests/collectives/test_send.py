"""Blocking sends: up to `SEND_BUFFER` bytes may return before the receiver's call, larger ones wait."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.collectives.ranks import cluster

from dmesh.collectives.tuning import SEND_BUFFER
from dmesh.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

MEDIA = {
    "messages": {},
    "shm": {"shm": ("native",)},
    "dedicated": {"shm": ("dedicated",)},
    "encrypted": {"shm": ("encrypted",)},
    "mpi": {"shm": ("no",), "mpi": True},
}


@pytest.fixture(params=MEDIA)
def ranks(request):
    with cluster(2, **MEDIA[request.param]) as made:
        made.all(lambda c: c.world.barrier())  # the group's first call sets its media up
        yield made


def exchange(nbytes, timeout=10.0):
    """Return a body in which both ranks send before they receive."""

    def body(communicator):
        other = 1 - communicator.rank
        communicator.world.send(np.full(nbytes, communicator.rank, "u1"), other, timeout=timeout)
        return communicator.world.recv(np.empty(nbytes, "u1"), other)

    return body


@pytest.mark.parametrize("nbytes", [0, 8, SEND_BUFFER])
def test_two_small_sends_pass_each_other(ranks, nbytes):
    for _ in range(3):
        results = ranks.all(exchange(nbytes))
        assert [result.tolist() for result in results] == [[1] * nbytes, [0] * nbytes]


def test_two_large_sends_wait_for_each_other(ranks):
    errors = ranks.run(exchange(SEND_BUFFER + 1, timeout=0.3))
    assert [type(error) for error in errors] == [CollectiveTimeoutError] * 2


@pytest.mark.parametrize("nbytes", [SEND_BUFFER + 1, 10 * SEND_BUFFER, 1 << 20])
def test_a_large_send_returns_only_after_the_receivers_call(ranks, nbytes):
    returned = threading.Event()

    def body(communicator):
        group = communicator.world
        if communicator.rank == 0:
            group.send(np.ones(nbytes, "u1"), 1)
            returned.set()
            return True
        assert not returned.wait(0.2)
        return bool(group.recv(np.empty(nbytes, "u1"), 0).all())

    assert ranks.all(body) == [True, True]


def test_small_sends_are_received_in_order(ranks):
    def body(communicator):
        group = communicator.world
        if communicator.rank == 0:
            for number in range(100):
                group.send(np.full(number, number, "i4"), 1)
            return []
        return [group.recv(np.empty(number, "i4"), 0).sum() for number in range(100)]

    assert ranks.all(body)[1] == [number * number for number in range(100)]


@pytest.mark.parametrize("count", [0, 1])
def test_the_receiver_finds_a_small_send_of_something_else(ranks, count):
    def body(communicator):
        group = communicator.world
        if communicator.rank == 0:
            group.send(np.zeros(count, "f4"), 1)
            group.barrier()
        else:
            group.recv(np.zeros(3, "f8"), 0)

    assert [type(error) for error in ranks.run(body)] == [CollectiveMismatchError] * 2


def test_a_failed_group_refuses_the_first_transfers_of_a_pair_again_and_again(ranks):
    ranks.run(lambda c: c.world.broadcast(np.zeros(2 + c.rank)))
    x = np.zeros(3)
    for call in (lambda c: c.world.send(x, 1 - c.rank), lambda c: c.world.recv(x, 1 - c.rank, timeout=10)):
        for _ in range(3):
            assert [type(error) for error in ranks.run(call)] == [CollectiveMismatchError] * 2


@pytest.mark.parametrize("nbytes", [8, SEND_BUFFER + 1])
@pytest.mark.parametrize("used", [False, True], ids=["first", "later"])
def test_a_send_to_a_rank_that_has_left_is_an_error(ranks, nbytes, used):
    if used:
        ranks.all(exchange(8))
    group, other = (c.world for c in ranks.communicators)
    other.send(np.ones(3), 0)
    ranks.communicators[1].close(linger=0.0)
    assert ranks.wait_until(lambda: group.current.departed)
    assert group.recv(np.empty(3), 1).tolist() == [1.0] * 3
    with pytest.raises(PeerLostError, match=r"it has left the cluster.*during send"):
        group.send(np.ones(nbytes, "u1"), 1, timeout=10.0)
