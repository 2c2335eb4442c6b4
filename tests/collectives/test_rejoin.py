"""A lost rank's task slot is taken by another process: how the others go on, and what is left behind."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.ranks import LIMIT, Cluster, cluster

from dmesh.collectives.backends.tcp.channel import Peer
from dmesh.collectives.control_messages import Abort, Farewell, encode
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.services import WaitPolicy
from dmesh.errors import CollectiveError, CollectiveTimeoutError, CollectiveValueError, PeerLostError

QUICK = WaitPolicy(
    ask_after=(0.01,), ask_every=0.05, look_every=0.02, announce_every=3600.0, announce=lambda message: None
)
LARGE = 200_000


def total(ranks: Cluster, size: int = 1000) -> None:
    """All ranks add up, and get what they should."""
    results = ranks.all(lambda c: c.world.all_reduce(np.full(size, float(c.rank + 1))))
    expected = sum(range(1, ranks.size + 1))
    for result in results:
        assert result.tobytes() == np.full(size, float(expected)).tobytes()


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_replaced_rank_takes_part_again(victim, size):
    with cluster(3, wait_policy=QUICK) as ranks:
        for _ in range(5):
            total(ranks, size)
            ranks.replace(victim)
            survivors = tuple(rank for rank in range(3) if rank != victim)
            for error in ranks.run(lambda c: c.world.barrier(), survivors):
                assert type(error) is PeerLostError
                assert error.rank == victim
            ranks.renew()
        total(ranks, size)


def test_groups_that_users_hold_begin_anew():
    with cluster(3, wait_policy=QUICK) as ranks:
        pairs = ranks.all(lambda c: c.new_group([0, 2], "pair") if c.rank != 1 else None)
        meshes = ranks.all(lambda c: c.mesh_group("m", "x", [0, 1, 2]))
        for _ in range(3):  # so that the survivors' numbers are not those of the process that comes
            ranks.run(lambda c: pairs[c.rank].barrier(), (0, 2))
            ranks.all(lambda c: meshes[c.rank].barrier())
            ranks.run(lambda c: pairs[c.rank].send(1, 1) if c.rank == 0 else pairs[c.rank].recv(1, 0), (0, 2))
        ranks.replace(2)
        pairs[2] = ranks.communicators[2].new_group([0, 2], "pair")
        meshes[2] = ranks.communicators[2].mesh_group("m", "x", [0, 1, 2])
        ranks.renew()
        assert ranks.communicators[0].mesh_group("m", "x", [0, 1, 2]) is meshes[0]
        for _ in range(3):
            assert ranks.run(lambda c: pairs[c.rank].all_reduce(c.rank).item(), (0, 2)) == [2, 2]
            assert ranks.all(lambda c: meshes[c.rank].all_reduce(c.rank).item()) == [3, 3, 3]
            sent, received = ranks.run(
                lambda c: pairs[c.rank].send(7, 1) if c.rank == 0 else pairs[c.rank].recv(1, 0), (0, 2)
            )
            assert (sent, received) == (None, 7)


def test_what_is_under_way_in_the_former_generation_fails_and_says_so():
    with cluster(3, wait_policy=QUICK) as ranks:
        pair = [ranks.communicators[rank].new_group([0, 1]) for rank in (0, 1)]
        waiting = pair[0].all_reduce(np.ones(3), async_op=True)  # of no interest to rank 2, that will be lost
        queued = pair[0].barrier(async_op=True)
        ranks.replace(2)
        ranks.renew()
        for future in (waiting, queued):
            with pytest.raises(CollectiveError, match="generation 2 of the collectives has begun") as caught:
                future.result(LIMIT)
            assert not isinstance(caught.value, (PeerLostError, CollectiveTimeoutError))
            assert "calls of generation 0 have ended" in str(caught.value)
        assert ranks.run(lambda c: pair[c.rank].all_reduce(1).item(), (0, 1)) == [2, 2]
        total(ranks)


def test_a_process_that_takes_a_task_slot_makes_no_calls_before_it_has_met_the_others():
    with cluster(2, wait_policy=QUICK) as ranks:
        newcomer = ranks.replace(1)
        group = newcomer.new_group([0, 1])
        for make in (newcomer.world.barrier, newcomer.world.barrier, group.barrier):
            with pytest.raises(CollectiveError, match=r"replaced a lost client.*barrier"):
                make()
        other = ranks.communicators[0].new_group([0, 1])
        ranks.renew()
        assert ranks.run(lambda c: (other, group)[c.rank].all_reduce(1).item()) == [2, 2]
        total(ranks)


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_renews_late_loses_nothing_that_was_sent_before(late, size):
    """Two go on at once and are well into their calls when the third one comes."""
    with cluster(3, wait_policy=QUICK) as ranks:
        total(ranks)
        ranks.replace(1)
        early = tuple(rank for rank in range(3) if rank != late)
        ranks.renew(*early)
        futures = {
            rank: [
                ranks.communicators[rank].world.all_gather(np.full(size, rank * 10 + turn), async_op=True)
                for turn in range(3)
            ]
            for rank in early
        }
        ranks.settle(*early)
        ranks.renew(late)
        futures[late] = [
            ranks.communicators[late].world.all_gather(np.full(size, late * 10 + turn), async_op=True)
            for turn in range(3)
        ]
        for rank in range(3):
            for turn, future in enumerate(futures[rank]):
                assert [int(row[0]) for row in future.result(LIMIT)] == [turn, 10 + turn, 20 + turn]


def test_a_failure_of_the_new_generation_reaches_who_renews_late():
    with cluster(3, wait_policy=QUICK) as ranks:
        ranks.replace(2)
        ranks.renew(0, 2)
        ranks.communicators[0].world.fail(Failure(Cause.BROKEN, "rank 0 gave up in generation 2", (0,)))
        ranks.settle()
        ranks.renew(1)
        with pytest.raises(CollectiveError, match="rank 0 gave up in generation 2"):
            ranks.communicators[1].world.barrier()


def test_news_of_the_former_generation_changes_nothing():
    with cluster(3, wait_policy=QUICK) as ranks:
        former = ranks.communicators[2]
        ranks.replace(2)
        ranks.renew()
        survivor = ranks.communicators[0]
        lost = Failure(Cause.LOST, "lost rank 2", (2,), "late news")
        survivor.on_control(1, encode(Abort(0, survivor.world.id, lost)))
        survivor.lose(2, "late news", former.transport.incarnation, hearsay=True)
        survivor.on_mismatch(survivor.world.id, 1, 1, b"barrier()", 0)
        total(ranks)


def test_a_former_process_is_not_heard_any_more():
    with cluster(3, wait_policy=QUICK) as ranks:
        former = ranks.communicators[2]
        ranks.network.hold(2, 0)
        former.send_control(0, Farewell("I go"))
        ranks.network.replace(2)  # it lives on, but was declared lost
        ranks.generation = 2
        ranks.former.append(former)
        ranks.communicators[2] = ranks._communicator(2, joined=2)
        ranks.renew()
        ranks.network.release(2, 0)
        former.send_control(1, Farewell("I go, really"))
        ranks.settle()
        total(ranks)
        with pytest.raises(CollectiveTimeoutError):
            former.world.barrier(timeout=0.2)
        total(ranks)


def test_who_waits_in_a_former_generation_is_told_that_the_others_have_gone_on():
    with cluster(3, wait_policy=QUICK) as ranks:
        pair = [ranks.communicators[rank].new_group([0, 1]) for rank in (0, 1)]
        ranks.replace(2)
        ranks.renew(0, 2)
        with pytest.raises(CollectiveError, match=r"rank 0.* is in generation 2 of") as caught:
            pair[1].barrier()
        assert not isinstance(caught.value, PeerLostError)


def test_who_waits_for_a_process_that_came_later_is_told_that_the_one_before_is_lost():
    """Rank 1 dies again when all have passed the barrier, and its next successor is in the table already."""
    with cluster(2, wait_policy=QUICK) as ranks:
        ranks.replace(1)
        between = ranks.generation
        ranks.replace(1)
        ranks.communicators[0].renew(ranks.network.peers(0), between)
        with pytest.raises(PeerLostError, match="another process has replaced it") as caught:
            ranks.communicators[0].world.barrier()
        assert caught.value.rank == 1
        ranks.renew()  # the process is the same as before, and not lost any more
        total(ranks)


def test_who_has_not_come_yet_is_named_so():
    with cluster(3, wait_policy=QUICK) as ranks:
        ranks.replace(2)
        ranks.renew(0, 2)
        with pytest.raises(
            CollectiveTimeoutError, match=r"rank 1, .*, is still in an earlier generation of the collectives"
        ):
            ranks.communicators[0].world.barrier(timeout=0.3)


def test_a_rank_that_is_lost_and_not_replaced_stays_lost():
    with cluster(3, wait_policy=QUICK) as ranks:
        ranks.network.kill(1, "killed by the test")
        ranks.replace(2)
        ranks.renew(0, 2)
        for communicator in (ranks.communicators[0], ranks.communicators[2]):
            with pytest.raises(PeerLostError) as caught:
                communicator.world.barrier()
            assert caught.value.rank == 1


def test_rumours_end_with_their_generation():
    """Another client has said that this one is lost, and that was of a former process."""
    with cluster(3, wait_policy=QUICK) as ranks:
        survivor = ranks.communicators[0]
        rumour = Failure(Cause.LOST, "lost rank 1", (1,), "so they say")
        survivor.on_control(2, encode(Abort(0, survivor.world.id, rumour)))
        with pytest.raises(PeerLostError, match="lost rank 1 "):
            survivor.world.barrier()
        ranks.replace(2)
        ranks.renew()
        total(ranks)


def test_what_renew_refuses_changes_nothing():
    with cluster(3, wait_policy=QUICK) as ranks:
        communicator = ranks.communicators[0]
        peers = ranks.network.peers(0)
        nameless = tuple(Peer(p.rank, p.addresses, 0, p.description) for p in peers)
        for bad, generation, message in [
            (peers, 0, "generation 0 is not a new one"),
            (peers, -1, "generation -1 is not a new one"),
            (peers[:1], 1, "must have the same ranks 0 to 2 as before"),
            ((*peers, peers[0]), 1, "must have the same ranks"),
            (nameless, 1, r"the incarnations of the ranks \[1, 2\] are missing"),
        ]:
            with pytest.raises(CollectiveValueError, match=message):
                communicator.renew(bad, generation)
        total(ranks)
        communicator.close(0.0)
        with pytest.raises(CollectiveError, match="shut down"):
            communicator.renew(peers, 1)


def test_without_a_coordination_service_nobody_is_replaced():
    with cluster(2) as ranks:
        communicator = ranks.communicators[0]
        communicator._peers = {1: Peer(1, ("local:2",), 0, "somebody")}
        with pytest.raises(CollectiveValueError, match="without a coordination service cannot be replaced"):
            communicator.renew(ranks.network.peers(0), 1)


def test_a_world_of_one_renews_too():
    with cluster(1) as ranks:
        held = ranks.communicators[0].new_group([0])
        ranks.communicators[0].renew((), 4)
        assert held.generation == ranks.communicators[0].world.generation == 4
        assert held.all_reduce(3).item() == 3


def test_nothing_is_kept_of_former_generations():
    with cluster(2, wait_policy=QUICK) as ranks:
        survivor = ranks.communicators[0]
        for _ in range(20):
            frames = ranks.communicators[1].transport.message_queue.open(99, 1, b"x", ranks.generation)
            frames.send(0, 0, memoryview(bytearray(1000)))  # kept for a channel that never opens
            ranks.settle(0)
            assert survivor.transport.message_queue.buffered_bytes(1) > 1000
            ranks.replace(1)
            ranks.renew()
            total(ranks)
            assert survivor.transport.message_queue.buffered_bytes(1) == 0
        message_queue = survivor.transport.message_queue
        gc.collect()
        assert len(message_queue._closed) == 1
        assert not message_queue._early
        assert len(message_queue._budgets) <= 1
        assert not survivor.control._early
        assert len(survivor.all_groups()) == 1


def test_threads_that_call_while_it_renews_get_a_result_or_an_error():
    with cluster(3, wait_policy=QUICK) as ranks:
        groups = [ranks.communicators[rank].new_group([0, 1], "busy") for rank in (0, 1)]
        stop = threading.Event()
        outcomes: list[set[str]] = [set(), set()]
        calling = [threading.Event(), threading.Event()]

        def keep_calling(position: int) -> None:
            while not stop.is_set():
                try:
                    assert groups[position].all_reduce(1).item() == 2
                    outcomes[position].add("ok")
                    calling[position].set()
                except CollectiveError as error:
                    outcomes[position].add(type(error).__name__)

        threads = [threading.Thread(target=keep_calling, args=(position,)) for position in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            assert all(event.wait(LIMIT) for event in calling)  # a busy machine may take its time
            for _ in range(10):
                ranks.replace(2)
                ranks.renew()
        finally:
            # Both may be out of step for good, as after any failure, but for the next generation.
            stop.set()
            for position in (0, 1):
                groups[position].fail(Failure(Cause.BROKEN, "the test is over", (position,)))
            for thread in threads:
                thread.join(LIMIT)
        assert not any(thread.is_alive() for thread in threads)
        assert all("ok" in seen for seen in outcomes)
        ranks.replace(2)
        ranks.renew()
        assert [g.all_reduce(1, async_op=True) for g in groups][1].result(LIMIT).item() == 2
        total(ranks)


@given(st.data())
@settings(max_examples=60)
def test_any_interleaving_of_deaths_renewals_and_calls(data):
    """Ranks renew in any order, with calls in between, held back frames, and deaths on the way."""
    size = data.draw(st.integers(2, 4), "size")
    with cluster(size, wait_policy=QUICK) as ranks:
        for _ in range(data.draw(st.integers(1, 3), "rounds")):
            victim = data.draw(st.integers(0, size - 1), "victim")
            calls = data.draw(st.integers(0, 2), "calls before")
            survivors = [rank for rank in range(size) if rank != victim]
            before = np.ones(data.draw(st.sampled_from([1, LARGE]), "length before"))
            old = [
                ranks.communicators[rank].world.all_reduce(before, async_op=True)
                for rank in survivors
                for _ in range(calls)
            ]
            ranks.replace(victim)
            lanes = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
            held = data.draw(st.lists(lanes, max_size=4, unique=True), "held")
            for lane in held:
                ranks.network.hold(*lane)
            order = data.draw(st.permutations(range(size)), "order")
            length = data.draw(st.sampled_from([1, 1000, LARGE]), "length")
            new = []
            for rank in order:
                ranks.renew(rank)
                new += [
                    (
                        turn,
                        ranks.communicators[rank].world.all_gather(
                            np.full(length, rank + turn), async_op=True
                        ),
                    )
                    for turn in range(2)
                ]
                if held and data.draw(st.booleans(), "release one"):
                    ranks.network.release(*held.pop())
            for lane in held:
                ranks.network.release(*lane)
            for turn, future in new:
                rows = future.result(LIMIT)
                assert [int(row[-1]) for row in rows] == [rank + turn for rank in range(size)]
            for future in old:
                with pytest.raises(CollectiveError):
                    future.result(LIMIT)
