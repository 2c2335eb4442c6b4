"""After an error in which nobody was lost, all members reset the group, and it works again."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster
from tests.collectives.test_failures import QUICK

from dmesh import native
from dmesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)

WAYS = [(), *([("native",), ("dedicated",), ("encrypted",)] if native.core() is not None else [])]
LARGE = 200_000


@pytest.fixture(params=WAYS, ids=lambda way: way[0] if way else "messages")
def way(request):
    return request.param


def use(group, salt=0):
    """Calls of all sorts whose results show at once if one took what was sent for another."""
    rank, size = group.rank, group.size
    for count in (3, LARGE):
        got = group.all_reduce(np.full(count, rank + salt, np.int64))
        assert (got == size * (size - 1) // 2 + size * salt).all()
    sent = group.send(np.full(7, rank + salt), (rank + 1) % size, async_op=True)
    assert (group.recv(np.empty(7, int), (rank - 1) % size) == (rank - 1) % size + salt).all()
    sent.result(LIMIT)
    rows = [group.all_gather(np.array(rank + salt), async_op=True) for _ in range(3)]
    for row in rows:
        assert row.result(LIMIT).tolist() == [other + salt for other in range(size)]


def mismatch(group):
    group.all_reduce(np.ones(5 + (group.rank == 1)))


def late(group):
    if group.rank == 0:
        raise CollectiveTimeoutError("this rank does not call", ())
    group.all_gather(np.ones(LARGE), timeout=0.2)


def exception(group):
    if group.rank == 1:
        raise ZeroDivisionError  # the others wait for it
    group.broadcast(np.ones(LARGE), 1)


def unmatched(group):
    """What rank 1 has sent is there, or on its way, when the group fails."""
    if group.rank == 1:
        futures = [group.send(np.full(1000, 77.0), 0, async_op=True) for _ in range(5)]
        futures += [group.send(np.full(LARGE, 78.0), 2, async_op=True)]
    mismatch(group)


@pytest.mark.parametrize("failure", [mismatch, late, exception, unmatched])
def test_the_group_works_again(failure, way):
    together = threading.Barrier(3)
    with cluster(3, shm=way, wait_policy=QUICK) as ranks:

        def body(communicator):
            group = communicator.world
            number = group.id
            use(group)
            for salt in range(1, 4):
                together.wait(LIMIT)  # a rank that resets while others are in a call fails it
                with pytest.raises((CollectiveError, ZeroDivisionError)):
                    failure(group)
                group.reset()
                use(group, salt * 100)
            return group.id, number, len(communicator.all_groups())

        results = ranks.all(body)
        assert len(set(results)) == 1
        (number, before, groups) = results[0]
        assert number != before
        assert groups == 1


def test_a_reset_without_a_failure_tells_the_others():
    with cluster(3, wait_policy=QUICK) as ranks:

        def body(communicator):
            group = communicator.world
            if group.rank != 1:
                with pytest.raises(CollectiveError, match=r"rank 1 called reset\(\) of group world"):
                    group.barrier()
            group.reset()
            use(group)

        ranks.all(body)


def test_a_member_that_does_not_come_is_named_and_can_come_later():
    with cluster(3, wait_policy=QUICK) as ranks:
        ranks.run(lambda communicator: mismatch(communicator.world))
        errors = ranks.run(lambda communicator: communicator.world.reset(timeout=0.3), (0, 1))
        for error in errors:
            assert type(error) is CollectiveTimeoutError, error
            assert error.missing == (2,)
            assert "rank 2" in str(error)
            assert "has not called reset()" in str(error)
        (error,) = ranks.run(lambda communicator: communicator.world.reset(), (2,))
        assert type(error) is CollectiveTimeoutError, "it hears that the others have given up"
        ranks.all(lambda communicator: communicator.world.reset())
        ranks.all(lambda communicator: use(communicator.world))


def test_a_lost_member_is_an_error_of_the_reset():
    with cluster(3, wait_policy=QUICK) as ranks:
        ranks.network.kill(2, "killed by the test")
        for error in ranks.run(lambda communicator: communicator.world.reset(), (0, 1)):
            assert type(error) is PeerLostError, error
            assert error.rank == 2


def test_the_error_of_a_failed_group_says_what_to_do():
    with cluster(2, wait_policy=QUICK) as ranks:
        ranks.run(lambda communicator: mismatch(communicator.world))
        for error in ranks.run(lambda communicator: communicator.world.barrier()):
            assert str(error).endswith("reset() makes it work again, if all its members call it.")
        other = ranks.all(lambda communicator: communicator.new_group([0, 1], "other"))
        ranks.network.kill(1, "killed by the test")
        assert ranks.wait_until(lambda: other[0].failure is not None)
        for _ in range(2):
            (error,) = ranks.run(lambda communicator: other[0].barrier(), (0,))
        assert str(error).endswith(
            "shrink() returns a group of the members that are left, if all of them call it."
        )


def test_frames_of_before_take_no_room(way):
    """The budget for frames that nobody waits for is not used up by those of former lives of the group."""
    with cluster(2, shm=way, wait_policy=QUICK) as ranks:

        def body(communicator):
            group = communicator.world
            for _ in range(4):
                if group.rank == 1:
                    for _ in range(20):
                        group.send(np.ones(1000), 0, async_op=True)
                with pytest.raises(CollectiveMismatchError):
                    mismatch(group)
                group.reset()
            group.barrier()
            return communicator.transport.message_queue.buffered_bytes(1 - group.rank)

        assert ranks.all(body) == [0, 0]


def test_renewed_after_a_reset():
    """When a lost client is replaced, all members come to the group's first id again."""
    with cluster(3, wait_policy=QUICK) as ranks:
        before = [communicator.world.id for communicator in ranks.communicators]
        ranks.run(lambda communicator: mismatch(communicator.world))
        ranks.all(lambda communicator: communicator.world.reset())
        ranks.replace(1)
        renewing = [threading.Thread(target=ranks.renew, args=(rank,)) for rank in range(3)]
        for thread in renewing:
            thread.start()
        for thread in renewing:
            thread.join(LIMIT)
        ranks.all(lambda communicator: use(communicator.world))
        assert [communicator.world.id for communicator in ranks.communicators] == before
