"""Collectives in shared memory: which way a group takes, and that all contracts hold on it."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from tests.collectives.ranks import LIMIT, cluster

from dmesh import native
from dmesh.collectives.backends import endpoints
from dmesh.collectives.backends.shm.setup import Sizes
from dmesh.collectives.services import WaitPolicy
from dmesh.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

QUICK = WaitPolicy(ask_after=(0.01,), ask_every=0.05, look_every=0.02, announce=lambda message: None)
NATIVE, DEDICATED = ("native",), ("dedicated",)

pytestmark = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")


@pytest.fixture(params=[NATIVE, DEDICATED], ids=["native", "dedicated"])
def medium(request) -> tuple[str, ...]:
    return request.param


def shares_memory(communicator) -> bool:
    return communicator.world._generation.endpoint is not None


# -- whether there is one ------------------------------------------------------------------------------------


def test_a_group_has_endpoints_from_its_second_call_on(medium):
    with cluster(3, shm=medium) as ranks:
        assert not any(map(shares_memory, ranks.communicators))
        ranks.all(lambda c: c.world.barrier())
        assert all(map(shares_memory, ranks.communicators))
        total = ranks.all(lambda c: c.world.all_reduce(np.array([1.5, c.rank])))
        for result in total:
            assert result.tolist() == [4.5, 3.0]


@pytest.mark.parametrize("refuses", [0, 1, 2])
@pytest.mark.parametrize(
    ("way", "reason"), [("no", "DMESH_SHARED_MEMORY forbids it"), ("without", "that needs the native core")]
)
def test_if_one_shares_nothing_all_exchange_messages(refuses, way, reason, caplog):
    ways = tuple(way if rank == refuses else "native" for rank in range(3))
    caplog.set_level("INFO", "dmesh")
    with cluster(3, shm=ways) as ranks:
        for _ in range(2):
            assert ranks.all(lambda c: int(c.world.all_reduce(np.array(c.rank)))) == [3, 3, 3]
        assert not any(map(shares_memory, ranks.communicators))
    assert f"rank {refuses} shares no memory" in caplog.text
    assert reason in caplog.text


def test_members_that_disagree_on_sizes_exchange_messages(caplog):
    caplog.set_level("INFO", "dmesh")
    with cluster(2, shm=NATIVE) as ranks:
        ranks.communicators[1].shared_memory.sizes = Sizes(slot=4096)
        for _ in range(2):
            assert ranks.all(lambda c: int(c.world.all_reduce(np.array(c.rank)))) == [1, 1]
        assert not any(map(shares_memory, ranks.communicators))
    assert (
        "divides shared memory into parts of [4096, 524288, 16384, 262144] bytes, not [65536, " in caplog.text
    )


def test_groups_give_their_regions_back():
    """Far more groups than there is room for, one after the other."""
    with cluster(2, shm=NATIVE, sizes=Sizes(slot=1 << 16, staging=1 << 26)) as ranks:  # 3 fit into 1 GiB

        def body(communicator):
            for number in range(12):
                group = communicator.new_group([0, 1])
                group.barrier()
                assert group._generation.endpoint is not None, number
                assert int(group.all_reduce(np.array(number))) == 2 * number
                del group
                gc.collect()
                communicator.world.barrier()  # the other has let go of it, too

        ranks.all(body)


def test_a_group_for_which_there_is_no_memory_left_exchanges_messages(caplog):
    caplog.set_level("INFO", "dmesh")
    with cluster(2, shm=NATIVE, sizes=Sizes(slot=1 << 16, staging=1 << 26)) as ranks:

        def body(communicator):
            groups = [communicator.new_group([0, 1]) for _ in range(6)]
            for group in groups:
                group.barrier()
                assert int(group.all_reduce(np.array(1))) == 2
            return [group._generation.endpoint is not None for group in groups]

        assert ranks.all(body) == [[True, True, True, False, False, False]] * 2
    assert "used up by other groups" in caplog.text


# -- order ---------------------------------------------------------------------------------------------------


def test_calls_of_all_sizes_and_kinds_follow_each_other(medium):
    sizes = Sizes(slot=128, staging=256)
    with cluster(3, shm=medium, sizes=sizes) as ranks:

        def body(communicator):
            group = communicator.world
            for number in range(200):
                x = np.arange(1 + number * 7 % 90, dtype="f4") + communicator.rank
                total = group.all_reduce(x[::-1] if number % 3 else x)[:: -1 if number % 3 else 1]
                assert (total == 3 * np.arange(x.size) + 3).all(), number
                assert (group.broadcast(x, root=number % 3) == np.arange(x.size) + number % 3).all(), number
            return group.generation

        ranks.all(body)


def test_asynchronous_and_synchronous_calls_keep_their_order(medium):
    with cluster(2, shm=medium) as ranks:

        def body(communicator):
            group = communicator.world
            for number in range(30):
                early = [group.all_reduce(np.array(number + k), async_op=True) for k in range(3)]
                late = group.all_reduce(np.array(number))
                assert int(late) == 2 * number
                assert [int(future.result(LIMIT)) for future in early] == [2 * (number + k) for k in range(3)]

        ranks.all(body)


def test_groups_in_several_threads_at_once(medium):
    with cluster(2, shm=medium) as ranks:

        def body(communicator):
            groups = [communicator.new_group([0, 1], name=str(number)) for number in range(4)]
            failures = []

            def work(number):
                try:
                    for turn in range(100):
                        total = groups[number].all_reduce(np.full(1 + 50 * number, turn + communicator.rank))
                        assert (total == 2 * turn + 1).all()
                except BaseException as error:  # noqa: BLE001 - told to the test
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT)
            assert not failures

        ranks.all(body)


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda g: g.all_reduce(np.zeros(3, "f4")), lambda g: g.all_reduce(np.zeros(4, "f4"))),
        (lambda g: g.all_reduce(np.zeros(3, "f4")), lambda g: g.all_reduce(np.zeros(3, "f8"))),
        (lambda g: g.all_reduce(np.zeros(3, "f4")), lambda g: g.all_reduce(np.zeros(3, "f4"), "max")),
        (lambda g: g.all_reduce(np.zeros(3, "f4")), lambda g: g.barrier()),
        (lambda g: g.broadcast(np.zeros(3)), lambda g: g.broadcast(np.zeros(3), root=1)),
        (lambda g: g.all_reduce(np.zeros(3, "f4")), lambda g: g.all_reduce(np.zeros(10**6, "f4"))),
        (lambda g: g.all_reduce(np.zeros(10**6, "f4")), lambda g: g.all_reduce(np.zeros(10**6 + 1, "f4"))),
        (lambda g: g.all_gather(np.zeros(3, "S3")), lambda g: g.all_gather(np.zeros(3, "S4"))),
    ],
)
def test_a_mismatch_is_an_error_on_all_ranks_and_names_both_sides(medium, first, second):
    with cluster(3, shm=medium, wait_policy=QUICK) as ranks:
        ranks.all(lambda c: c.world.barrier())
        errors = ranks.run(lambda c: (second if c.rank == 2 else first)(c.world))
        for error in errors:
            assert isinstance(error, CollectiveMismatchError), error
            assert "collective #2 of group world" in str(error)
            assert "rank 2 called" in str(error)


@pytest.mark.parametrize("count", [3, 10**6])
def test_a_peer_that_dies_is_named(medium, count):
    with cluster(3, shm=medium, wait_policy=QUICK) as ranks:
        ranks.all(lambda c: c.world.barrier())
        dies = threading.Timer(0.05, ranks.network.kill, (1, "killed by the test"))
        dies.start()
        errors = ranks.run(lambda c: c.world.all_reduce(np.zeros(count)), (0, 2))
        dies.join()
        for error in errors:
            assert isinstance(error, PeerLostError), error
            assert "rank 1" in str(error)
        (error,) = ranks.run(lambda c: c.world.barrier(), (0,))
        assert isinstance(error, PeerLostError)


def test_a_timeout_names_who_is_missing_and_where_it_is(medium):
    with cluster(3, shm=medium, wait_policy=QUICK, timeout=0.3) as ranks:
        ranks.all(lambda c: c.world.barrier())
        errors = ranks.run(lambda c: c.world.all_reduce(np.zeros(3)), (0, 1))
        for error in errors:
            assert isinstance(error, CollectiveTimeoutError), error
            assert "for rank 2" in str(error)
            assert "has not called #2" in str(error)


def test_a_word_that_cannot_be_is_an_error_that_names_its_owner():
    with cluster(2, shm=NATIVE, wait_policy=QUICK) as ranks:
        ranks.all(lambda c: c.world.barrier())
        region = ranks.communicators[1].world._generation.endpoint.keep_alive.region
        memory = region.segment.memory
        for note in (0, 64):
            memory[region.offset + note : region.offset + note + 8] = (10**6).to_bytes(8, "little")
        (error,) = ranks.run(lambda c: c.world.barrier(), (0,))
        assert isinstance(error, CollectiveError)
        assert "the memory that rank 1 shares" in str(error)


def test_a_lost_rank_is_replaced_and_the_endpoints_begin_anew(medium):
    with cluster(3, shm=medium, wait_policy=QUICK) as ranks:
        for _ in range(2):
            ranks.all(lambda c: c.world.all_reduce(np.ones(3)))
        ranks.replace(1)
        ranks.renew()
        for _ in range(3):
            for total in ranks.all(lambda c: c.world.all_reduce(np.array(c.rank))):
                assert int(total) == 3
        assert all(map(shares_memory, ranks.communicators))


def test_the_flight_recorder_has_what_ports_did(medium):
    with cluster(2, shm=medium) as ranks:
        for number in range(5):
            ranks.all(lambda c, n=number: c.world.all_reduce(np.zeros(n + 1, "f4")))
        for communicator in ranks.communicators:
            records = communicator.events.records()
            assert [record.sequence for record in records] == [1, 2, 3, 4, 5]
            assert [record.call for record in records] == [
                f"all_reduce(sum, float32, shape ({n + 1},))".replace("(1,)", "(1,)") for n in range(5)
            ]
            assert all(record.ended >= record.began >= record.called for record in records)


# -- shared arrays -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_arrays_in_shared_memory_are_used_where_they_are(seed):
    """Any mix of shared and private arrays, whole ones and parts, gives the same."""
    sizes = Sizes(slot=128, staging=512, p2p_slot=64, p2p_staging=64)
    with cluster(3, shm=NATIVE, sizes=sizes, single_copy_from=1 if seed % 2 else None) as ranks:

        def body(communicator):
            group, rank, size = communicator.world, communicator.rank, 3
            chance = np.random.default_rng([seed, rank])
            common = np.random.default_rng(seed)
            pool = communicator.pool

            def empty(*shape):
                if chance.random() < 0.4:
                    return np.empty(shape)
                whole = pool.empty((shape[0] + 7, *shape[1:]), float)
                assert communicator.shared_memory.registered.contains(whole)
                return whole[3 : 3 + shape[0]]

            group.barrier()
            for _ in range(12):
                count = size * int(common.integers(20, 400))
                inputs = [common.integers(0, 1000, count).astype(float) for _ in range(size)]
                total, block = sum(inputs), count // size
                x = empty(count)
                x[:] = inputs[rank]
                assert (group.all_reduce(x, out=empty(count)) == total).all()
                assert (
                    group.reduce_scatter(x, axis=0, out=empty(block)) == np.split(total, size)[rank]
                ).all()
                assert (group.all_gather(x, out=empty(size, count)) == np.stack(inputs)).all()
                assert (group.broadcast(x, root=1, out=empty(count)) == inputs[1]).all()
                gathered = group.gather(x, root=2, out=empty(size, count) if rank == 2 else None)
                assert rank != 2 or (gathered == np.stack(inputs)).all()
                parts = np.stack([np.split(one, size)[rank] for one in inputs]).ravel()
                assert (group.all_to_all(x, out=empty(count)) == parts).all()
                row = x[:block]
                dealt = group.scatter(x.reshape(size, block) if rank == 0 else row, root=0, out=empty(block))
                assert (dealt == np.split(inputs[0], size)[rank]).all()
                mine = group.reduce(x, "max", root=1, out=empty(count) if rank == 1 else None)
                assert rank != 1 or (mine == np.max(inputs, axis=0)).all()
                assert (group.all_reduce(x[::-1], out=empty(count)) == total[::-1]).all()
                assert (x == inputs[rank]).all()
                again = x.copy() if rank == 0 else x
                assert (group.all_to_all(again, out=again) == parts).all()
                x[:] = inputs[rank]
                assert (group.all_reduce(x, out=x) == total).all()
            return group.endpoint.keep_alive._attached

        assert all(ranks.all(body)), "nobody has mapped the others' arrays"


@pytest.mark.parametrize("nbytes", [100, 512, 4096, 3_000_000, 9_000_000])
def test_transfers_of_shared_arrays(nbytes):
    """Whole ones and parts of them, into shared and private ones: each is sent from where it is."""
    sizes = Sizes(slot=128, staging=512, p2p_slot=128, p2p_staging=2048)
    with cluster(3, shm=NATIVE, sizes=sizes) as ranks:

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            pool = communicator.pool
            group.barrier()
            following, previous = (rank + 1) % 3, (rank - 1) % 3
            whole = pool.empty((nbytes + 5,), np.uint8)
            assert communicator.shared_memory.registered.contains(whole)
            for number, out in enumerate([None, np.empty(nbytes, np.uint8), pool.empty((nbytes,), np.uint8)]):
                whole[:] = np.arange(nbytes + 5, dtype=np.uint64) * (rank + 1) + number
                sent = group.send(whole[2 : 2 + nbytes], following, async_op=True)
                got = group.recv(np.empty(nbytes, np.uint8), previous, out=out)
                expected = np.arange(2, 2 + nbytes, dtype=np.uint64) * (previous + 1) + number
                assert (got == expected.astype(np.uint8)).all()
                sent.result(LIMIT)
                # A private one afterwards: each transfer says for itself where its array is.
                private = np.full(min(nbytes // 2, 100_000), rank, np.uint8)
                sent = group.send(private, following, async_op=True)
                assert (group.recv(np.empty_like(private), previous) == previous).all()
                sent.result(LIMIT)
            return bool(group.endpoint.keep_alive._attached)

        assert ranks.all(body) == [nbytes > 128] * 3


def test_a_transfer_of_a_shared_array_that_the_receiver_takes_for_another_is_a_mismatch():
    with cluster(2, shm=NATIVE, wait_policy=QUICK) as ranks:

        def body(communicator):
            group, pool = communicator.world, communicator.pool
            group.barrier()
            x = pool.empty((10**6,), np.uint8)
            if communicator.rank == 0:
                group.send(x, 1)
            else:
                group.recv(np.empty(10**6, np.int8), 0)

        for error in ranks.run(body):
            assert isinstance(error, CollectiveMismatchError), error


# -- transfers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 16, 33, 100, 1000])
def test_transfers_of_all_sizes_in_both_directions_at_once(medium, count):
    sizes = Sizes(slot=128, staging=256, p2p_slot=128, p2p_staging=512)
    with cluster(3, shm=medium, sizes=sizes) as ranks:
        ranks.all(lambda c: c.world.barrier())

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            for number in range(20):
                x = np.arange(count, dtype="f8") + 1000 * rank + number
                for other in {0, 1, 2} - {rank}:
                    group.send(x[::-1], other, async_op=True)
                for other in {0, 1, 2} - {rank}:
                    got = group.recv(x, other)
                    assert (got[::-1] == np.arange(count) + 1000 * other + number).all()
            group.barrier()
            return {
                pair
                for pair, stream in group._generation.streams.items()
                if pair is not None and stream.endpoint is not None
            }

        for rank, pairs in enumerate(ranks.all(body)):
            assert pairs == {pair for a in range(3) if a != rank for pair in ((a, rank), (rank, a))}


def test_transfers_that_began_before_there_was_an_endpoint_go_on_as_messages(medium):
    with cluster(2, shm=medium) as ranks:

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            if rank == 0:
                sent = [group.send(np.array(number), 1, async_op=True) for number in range(5)]
            else:
                early = [group.recv(np.array(0), 0, async_op=True) for _ in range(2)]
                assert [int(future.result(LIMIT)) for future in early] == [0, 1]
            group.barrier()
            if rank == 0:
                for number in range(5, 10):
                    group.send(np.array(number), 1)
                return [future.result(LIMIT) for future in sent]
            return [int(group.recv(np.array(0), 0)) for _ in range(8)]

        assert ranks.all(body)[1] == [2, 3, 4, 5, 6, 7, 8, 9]


def test_a_mismatch_of_a_transfer_names_both_sides(medium):
    with cluster(2, shm=medium, wait_policy=QUICK) as ranks:
        ranks.all(lambda c: c.world.barrier())

        def body(communicator):
            if communicator.rank == 0:
                communicator.world.send(np.zeros(10**6, "f4"), 1)
            else:
                communicator.world.recv(np.zeros(10**6, "f8"), 0)

        for error in ranks.run(body):
            assert isinstance(error, CollectiveMismatchError), error
            assert "rank 0 called send(float32" in str(error)
            assert "rank 1 called recv(float64" in str(error)


def test_a_receiver_that_never_comes_is_named(medium):
    with cluster(2, shm=medium, wait_policy=QUICK, timeout=0.3) as ranks:
        ranks.all(lambda c: c.world.barrier())
        (error,) = ranks.run(lambda c: c.world.send(np.zeros(10**6), 1), (0,))
        assert isinstance(error, CollectiveTimeoutError)
        assert "rank 1" in str(error)
        assert "has not called #1" in str(error)


# -- what a review found -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 5])
def test_results_that_are_wider_than_what_is_folded(medium, size):
    with cluster(size, shm=medium, sizes=Sizes(slot=128, staging=512 * size)) as ranks:
        ranks.all(lambda c: c.world.barrier())
        for dtype, op in (("?", "sum"), ("?", "mean"), ("i1", "mean"), ("i2", "mean"), ("i4", "mean")):
            x = np.arange(5000).astype(dtype)
            wanted = x.astype("f8") if op == "mean" else size * x.astype("i8")
            for result in ranks.all(lambda c, x=x, op=op: c.world.all_reduce(x, op)):
                assert (result == wanted).all(), (dtype, op)


def test_a_region_is_not_used_again_before_all_have_left_it():
    with cluster(3, shm=NATIVE) as ranks:
        first = {}

        def begin(communicator):
            group = communicator.new_group([0, 1])
            group.barrier()
            first[communicator.rank] = (group.endpoint, group.endpoint.keep_alive.region.offset)
            return group

        kept = ranks.run(begin, (0, 1))
        offset = first[0][1]
        first.clear()
        del kept[0]
        gc.collect()

        def again(communicator):
            group = communicator.new_group([0, 2])
            group.barrier()
            return group._generation.endpoint.keep_alive.region.offset

        assert ranks.run(again, (0, 2))[0] != offset
        kept.clear()
        gc.collect()
        assert ranks.run(again, (0, 2))[0] == offset


def test_regions_that_members_had_who_are_gone_are_used_again():
    with cluster(
        3, shm=NATIVE, sizes=Sizes(slot=1 << 16, staging=1 << 26), wait_policy=QUICK
    ) as ranks:  # 3 fit

        def body(communicator):
            assert int(communicator.world.all_reduce(np.array(1))) == 3
            return communicator.world._generation.endpoint is not None

        for turn in range(5):
            assert ranks.all(body) == [True] * 3, turn
            ranks.replace(1 + turn % 2)
            ranks.renew()
            gc.collect()


def test_who_is_killed_before_it_has_left_regions_of_former_generations_does_not_keep_them():
    with cluster(
        3, shm=NATIVE, sizes=Sizes(slot=1 << 16, staging=1 << 26), wait_policy=QUICK
    ) as ranks:  # 3 fit
        held = []

        def body(communicator):
            assert int(communicator.world.all_reduce(np.array(1))) == 3
            return communicator.world._generation.endpoint is not None

        for turn in range(6):
            assert ranks.all(body) == [True] * 3, turn
            victim, survivor = 1 + turn % 2, 2 - turn % 2
            held.append(ranks.communicators[survivor].world.endpoint)  # and is killed in the next turn
            ranks.replace(victim)
            ranks.renew()
            gc.collect()


def test_a_call_in_a_callback_of_an_asynchronous_one(medium):
    with cluster(2, shm=medium) as ranks:
        ranks.all(lambda c: c.world.barrier())

        def body(communicator):
            group, results, done = communicator.world, [], threading.Event()

            def callback(future):
                results.append(int(group.all_reduce(np.array(3))))
                done.set()

            first = group.all_reduce(np.array(1), async_op=True)
            second = group.all_reduce(np.array(2), async_op=True)
            first.add_done_callback(callback)
            assert done.wait(LIMIT)
            return [int(first.result(LIMIT)), int(second.result(LIMIT)), *results]

        assert ranks.all(body) == [[2, 4, 6]] * 2


def test_groups_are_forgotten_without_the_garbage_collector(medium):
    with cluster(2, shm=medium, sizes=Sizes(slot=1 << 16, staging=1 << 26)) as ranks:

        def body(communicator):
            gc.disable()
            try:
                for _ in range(8):
                    group = communicator.new_group([0, 1])
                    group.barrier()
                    group.send(np.zeros(3), 1) if communicator.rank == 0 else group.recv(np.zeros(3), 0)
                    assert group._generation.endpoint is not None
                    del group
                    communicator.world.barrier()
            finally:
                gc.enable()

        ranks.all(body)


def test_groups_that_share_nothing_keep_no_memory():
    """Each offers a region, and gets it back when no memory is shared."""
    with cluster(
        3, shm=("native", "native", "no"), sizes=Sizes(slot=1 << 16, staging=1 << 26)
    ) as ranks:  # 3 fit
        groups = [ranks.all(lambda c: c.new_group([0, 1, 2])) for _ in range(5)]
        for members in groups:
            ranks.all(lambda c, members=members: members[c.rank].barrier())
            assert members[0]._generation.endpoint is None
        pair = ranks.run(lambda c: c.new_group([0, 1]), (0, 1))
        for _ in range(2):
            ranks.run(lambda c: pair[c.rank].barrier(), (0, 1))
        assert pair[0]._generation.endpoint is not None


def test_who_forgets_a_group_is_not_lost_to_other_groups(monkeypatch):
    """It has closed the group's dedicated connections, and its process lives."""
    monkeypatch.setattr(endpoints, "_EXPLAINED_WITHIN", 0.2)
    with cluster(2, shm=DEDICATED, wait_policy=QUICK) as ranks:
        groups = ranks.all(lambda c: c.new_group([0, 1], name="forgotten"))
        for _ in range(2):
            ranks.all(lambda c: groups[c.rank].barrier())
            ranks.all(lambda c: c.world.barrier())
        groups[0] = None
        gc.collect()
        (error,) = ranks.run(lambda c: groups[1].barrier(), (1,))
        assert type(error) is CollectiveError, error
        assert "the connection with rank 0 for this group has ended, although its process has not" in str(
            error
        )
        assert ranks.all(lambda c: int(c.world.all_reduce(np.array(1)))) == [2, 2]
