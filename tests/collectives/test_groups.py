"""Groups: who they are, how they are told apart, and that they do not get into each other's way."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster

from dmesh import collectives
from dmesh.collectives.api import World
from dmesh.collectives.backends.tcp.local import LocalNetwork
from dmesh.collectives.communicator import Communicator
from dmesh.errors import CollectiveError, CollectiveTypeError, CollectiveValueError


def test_positions_follow_the_order_of_ranks():
    with cluster(4) as ranks:

        def body(communicator):
            if communicator.rank == 2:
                return None
            group = communicator.new_group([3, 0, 1])
            assert (group.size, group.ranks, group.name) == (3, (3, 0, 1), "")
            assert "ranks [3, 0, 1]" in repr(group)
            return (
                group.rank,
                group.all_gather(communicator.rank).tolist(),
                group.broadcast(communicator.rank, 0).item(),
            )

        assert ranks.all(body) == [(1, [3, 0, 1], 3), (2, [3, 0, 1], 3), None, (0, [3, 0, 1], 3)]


def test_members_agree_on_which_group_is_which():
    """Groups of the same ranks are told apart by their name and by the order in which they are made."""
    with cluster(2) as ranks:

        def body(communicator):
            groups = [communicator.new_group([0, 1], name) for name in ("a", "b", "a", "a", "")]
            assert len({group.id for group in groups} | {communicator.world.id}) == 6
            if communicator.rank == 0:
                pending = [group.all_reduce(2**i, async_op=True) for i, group in enumerate(groups)]
            else:  # in another order: they are independent
                pending = [groups[i].all_reduce(2**i, async_op=True) for i in reversed(range(5))][::-1]
            return [group.id for group in groups], [future.result(LIMIT).item() for future in pending]

        assert len({str(result) for result in ranks.all(body)}) == 1
        assert (
            ranks.all(lambda c: c.new_group([1, 0]).id)[0] != ranks.all(lambda c: c.new_group([0, 1]).id)[0]
        )


def test_mesh_groups_are_made_once():
    with cluster(2) as ranks:

        def body(communicator):
            group = communicator.mesh_group("mesh", "batch", (0, 1))
            assert communicator.mesh_group("mesh", "batch", [0, 1]) is group
            assert communicator.mesh_group("mesh", "model", (0, 1)) is not group
            assert communicator.mesh_group("other", "batch", (0, 1)) is not group
            return group.id, group.name, group.all_reduce(1).item()

        first, second = ranks.all(body)
        assert first == second
        assert first[1:] == ("batch", 2)


def test_groups_and_threads_at_once():
    """Each thread has a group of its own; transfers between different ranks need none."""
    with cluster(3) as ranks:

        def body(communicator):
            groups = [communicator.new_group([0, 1, 2], f"thread {i}") for i in range(4)]
            results: dict[object, object] = {}

            def reduce(i):
                results[i] = [groups[i].all_reduce(np.full(i + 1, step)).tolist() for step in range(20)]

            def exchange(other):
                send = [
                    communicator.world.send(np.array([communicator.rank, step]), other, async_op=True)
                    for step in range(5)
                ]
                results["from", other] = [
                    communicator.world.recv(np.zeros(2, int), other).tolist() for _ in range(5)
                ]
                for future in send:
                    future.result(LIMIT)

            threads = [threading.Thread(target=reduce, args=(i,)) for i in range(4)]
            threads += [
                threading.Thread(target=exchange, args=(other,))
                for other in range(3)
                if other != communicator.rank
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT)
            return results

        for rank, results in enumerate(ranks.all(body)):
            for i in range(4):
                assert results[i] == [[3 * step] * (i + 1) for step in range(20)]
            for other in range(3):
                if other != rank:
                    assert results["from", other] == [[other, step] for step in range(5)]


def test_asynchronous_calls_keep_their_order():
    with cluster(3) as ranks:

        def body(communicator):
            group = communicator.world
            futures = [group.all_reduce(np.array(step), async_op=True) for step in range(30)]
            direct = group.all_reduce(1000)  # its number follows theirs
            assert all(isinstance(future, Future) for future in futures)
            assert not futures[-1].cancel()
            wait_for_futures(futures, timeout=LIMIT)
            return [future.result().item() for future in futures], direct.item()

        assert ranks.all(body) == [([3 * step for step in range(30)], 3000)] * 3


def test_asynchronous_calls_on_one_side_only():
    with cluster(2) as ranks:

        def body(communicator):
            group = communicator.world
            if communicator.rank == 0:
                futures = [group.broadcast(np.full(3, step), async_op=True) for step in range(5)]
                return [future.result(LIMIT)[0].item() for future in futures]
            return [group.broadcast(np.zeros(3, int))[0].item() for _ in range(5)]

        assert ranks.all(body) == [[0, 1, 2, 3, 4]] * 2


def test_asynchronous_calls_check_their_arguments_at_once():
    with cluster(2) as ranks, pytest.raises(CollectiveValueError, match="unknown reduction"):
        ranks.communicators[0].world.all_reduce(1, "average", async_op=True)


def test_a_forgotten_group_ends_its_thread():
    with cluster(1) as ranks:
        group = ranks.communicators[0].new_group([0], "forgotten")
        group.barrier(async_op=True).result(LIMIT)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "dmesh-group-forgotten"]
        del group
        gc.collect()
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_closing_ends_the_threads_of_all_groups():
    with cluster(2) as ranks:
        ranks.all(lambda communicator: communicator.world.barrier(async_op=True).result(LIMIT))
        threads = [thread for thread in threading.enumerate() if thread.name == "dmesh-group-world"]
        assert len(threads) >= 2
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    with pytest.raises(CollectiveError, match="shut down"):
        ranks.communicators[0].world.barrier(async_op=True)


def test_a_world_of_one_needs_no_transport():
    network = LocalNetwork(1)
    communicator = Communicator(0, network.peers(0), network.transport(0), 5.0)
    group = communicator.world
    assert group.all_reduce([1, 2]).tolist() == [1, 2]
    assert group.all_reduce(True).dtype == np.int64
    assert group.reduce_scatter([[1, 2]]).tolist() == [1, 2]
    assert group.all_gather(5).tolist() == [5]
    assert group.permute([1], [(0, 0)]).tolist() == [1]
    assert group.permute([1], []).tolist() == [0]
    group.barrier()
    communicator.connect_all(5.0)
    communicator.close(0.0)
    communicator.close(0.0)


def test_peers_must_be_complete():
    network = LocalNetwork(3)
    with pytest.raises(CollectiveValueError, match="must have the ranks 0 to n - 1"):
        Communicator(0, network.peers(0)[1:], network.transport(0), 5.0)


def test_the_flight_recorder_has_the_last_calls():
    with cluster(2) as ranks:

        def body(communicator):
            for _ in range(300):
                communicator.world.all_reduce(np.zeros(4, "f4"))
            if communicator.rank == 0:
                communicator.world.send(1, 1)
            else:
                communicator.world.recv(1, 0)
            communicator.world.all_reduce(np.zeros(4 + communicator.rank))

        ranks.run(body)
        for rank, communicator in enumerate(ranks.communicators):
            records = communicator.events.records()
            assert len(records) == 256
            *_, reduced, transfer, failed = records
            assert (reduced.group, reduced.sequence) == ("world", 300)
            assert (reduced.call, reduced.nbytes) == ("all_reduce(sum, float32, shape (4,))", 16)
            assert reduced.called <= reduced.began <= reduced.ended
            assert 0 <= reduced.waited <= reduced.ended - reduced.began
            assert reduced.error is None
            assert transfer.call == ("send" if rank == 0 else "recv") + "(int64, shape ())"
            assert failed.error.startswith("CollectiveMismatchError: collective #301 of group world")


def test_functions_work_on_the_world_of_the_context(monkeypatch):
    from dmesh.errors import NotInitializedError
    from dmesh.runtime import context

    with pytest.raises(NotInitializedError):
        collectives.all_reduce(1)
    with cluster(1) as ranks:
        communicator = ranks.communicators[0]

        state = context.Context(0, communicator, World(communicator.world))
        monkeypatch.setattr(context, "current", lambda: state)
        assert collectives.world() is communicator.world
        assert collectives.new_group([0], "g").name == "g"
        assert collectives.all_reduce([1, 2]).tolist() == [1, 2]
        assert collectives.reduce([1, 2], "max", 0).tolist() == [1, 2]
        assert collectives.reduce_scatter([[1, 2]], axis=1).tolist() == [[1, 2]]
        assert collectives.broadcast([1, 2], 0).tolist() == [1, 2]
        assert collectives.all_gather([1, 2], axis=0).tolist() == [1, 2]
        assert collectives.gather([1, 2]).tolist() == [[1, 2]]
        assert collectives.scatter([[1, 2]]).tolist() == [1, 2]
        assert collectives.all_to_all([1, 2]).tolist() == [1, 2]
        assert collectives.permute([1, 2], [(0, 0)]).tolist() == [1, 2]
        assert collectives.barrier(timeout=5) is None
        assert collectives.all_reduce(1, group=collectives.new_group([0]), async_op=True).result(LIMIT) == 1
        collectives.send([1], 0, tag=2)
        assert collectives.iprobe(0) is None
        assert collectives.probe(0, tag=2).tag == 2
        assert collectives.recv(None, collectives.ANY_SOURCE, tag=collectives.ANY_TAG).tolist() == [1]
        assert collectives.sendrecv([3], 0, None, 0).tolist() == [3]
        with pytest.raises(CollectiveTypeError, match=r"group must be a dmesh\.collectives\.Group, got str"):
            collectives.barrier(group="batch")
