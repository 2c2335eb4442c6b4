"""Survivors of a failure decide alike, whoever dies, comes late or is only taken for lost."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.ranks import LIMIT, cluster
from tests.collectives.test_failures import QUICK

import dmesh
from dmesh.collectives.consensus import survivors
from dmesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CollectiveTypeError,
    CollectiveValueError,
    PeerLostError,
)
from dmesh.testing import FakeCluster
from dmesh.testing.keys import FakeKeys


def keys(ranks):
    """Gives all ranks a store."""
    made = FakeKeys()
    for communicator in ranks.communicators:
        communicator.store = lambda: made
    return made


RANKS = tuple(range(6))


@given(
    came=st.sets(st.sampled_from(RANKS), min_size=1),
    lost=st.lists(st.sets(st.sampled_from(RANKS)), min_size=6, max_size=6),
    gone=st.sets(st.sampled_from(RANKS)),
)
def test_survivors_have_not_lost_each_other(came, lost, gone):
    order = sorted(came)
    found = survivors(order, dict(enumerate(lost)), gone)
    assert list(found) == [rank for rank in order if rank in found]
    assert not set(found) & gone
    assert not any(other in lost[rank] for rank in found for other in found if other != rank)
    if not any(lost[rank] & came - {rank} for rank in came):
        assert set(found) == came - gone, "nobody is left out without a reason"
    assert bool(found) == bool(came - gone)


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ({0: [3], 1: [3], 2: [3]}, (0, 1, 2)),  # rank 3 has died after it arrived
        ({3: [0, 1, 2]}, (0, 1, 2)),  # rank 3 was cut off, and took the others for lost
        ({1: [2]}, (0, 1, 3)),  # of two, the one that was lost
        ({1: [2], 2: [1]}, (0, 1, 3)),  # a connection that both have lost: the later one
        ({0: [1], 2: [3]}, (0, 2)),
    ],
)
def test_the_one_that_most_have_lost_is_left_out(lost, expected):
    assert survivors(range(4), {rank: lost.get(rank, ()) for rank in range(4)}, ()) == expected


FLAGS = {"bool": st.booleans(), "int": st.integers(-(2**63), 2**63 - 1)}


@given(st.sampled_from(["bool", "int"]).flatmap(lambda kind: st.lists(FLAGS[kind], min_size=3, max_size=3)))
@settings(max_examples=20)
def test_agree_is_the_and_of_all_flags(flags):
    with cluster(3) as ranks:
        kept = keys(ranks)
        expected = flags[0] & flags[1] & flags[2]
        for _ in range(3):
            found = ranks.all(lambda communicator: communicator.world.agree(flags[communicator.rank]))
            assert found == [expected] * 3
            assert {type(value) for value in found} == {type(expected)}
            assert [communicator.world.missing for communicator in ranks.communicators] == [()] * 3
        assert len(kept.keys) == 2, "only the latest decision is kept"


def test_flags_of_numpy_and_bad_ones():
    with cluster(1) as ranks:
        keys(ranks)
        group = ranks.communicators[0].world
        assert group.agree(np.True_) is True
        assert group.agree(np.int8(-1)) == -1
        for bad in (1.0, "yes", None, np.ones(2)):
            with pytest.raises(CollectiveTypeError, match="agree needs a bool or an integer"):
                group.agree(bad)
        with pytest.raises(CollectiveValueError, match="64 bits"):
            group.agree(2**63)


def test_without_a_coordination_service():
    with cluster(2) as ranks:
        for call in (lambda group: group.agree(True), lambda group: group.shrink()):
            for error in ranks.run(lambda communicator, call=call: call(communicator.world)):
                assert type(error) is CollectiveError
                assert "needs a coordination service" in str(error)
        ranks.all(lambda communicator: communicator.world.barrier())


def test_different_calls_are_an_error_on_all():
    with cluster(3, wait_policy=QUICK) as ranks:
        keys(ranks)
        for calls in (
            lambda group: group.agree(True if group.rank else 1),
            lambda group: group.agree(1) if group.rank else group.shrink(),
        ):
            errors = ranks.run(lambda communicator, calls=calls: calls(communicator.world))
            assert [type(error) for error in errors] == [CollectiveMismatchError] * 3, errors
            assert len({str(error) for error in errors}) == 1
            assert "rank 0 called " in str(errors[0])
        assert ranks.all(lambda communicator: communicator.world.agree(7)) == [7] * 3


def test_a_member_that_does_not_come_is_named_and_can_come_later():
    with cluster(3, wait_policy=QUICK) as ranks:
        keys(ranks)
        for _ in range(2):
            for error in ranks.run(lambda communicator: communicator.world.agree(3, timeout=0.2), (0, 2)):
                assert type(error) is CollectiveTimeoutError, error
                assert error.missing == (1,)
        (error,) = ranks.run(lambda communicator: communicator.world.agree(3), (1,))
        assert type(error) is CollectiveTimeoutError, "the one that comes late hears of it"
        assert ranks.all(lambda communicator: communicator.world.agree(3)) == [3] * 3


def shrink_and_use(communicator, group=None):
    made = (group or communicator.world).shrink()
    total = made.all_reduce(np.array([communicator.rank, 1]))
    return made.ranks, total.tolist(), made.id


def assert_alike(results, members):
    assert len({str(result) for result in results}) == 1, results
    assert results[0][:2] == (tuple(members), [sum(members), len(members)])


@pytest.mark.parametrize("victims", [(0,), (3,), (1, 2), (0, 1, 2)])
def test_the_survivors_go_on(victims):
    with cluster(4, shm=("native",), wait_policy=QUICK) as ranks:
        keys(ranks)
        ranks.all(lambda communicator: communicator.world.barrier())
        left = tuple(rank for rank in range(4) if rank not in victims)
        for victim in victims:
            ranks.network.kill(victim, "killed by the test")
        assert ranks.run(lambda communicator: communicator.world.agree(communicator.rank | 8), left) == [
            8 | int(np.bitwise_and.reduce(left))
        ] * len(left)
        for rank in left:
            assert ranks.communicators[rank].world.missing == victims
        assert_alike(ranks.run(shrink_and_use, left), left)
        assert ranks.communicators[left[0]].world.missing == victims
        (error,) = ranks.run(lambda communicator: communicator.world.barrier(), left[:1])
        assert type(error) is PeerLostError, "the old group stays failed"


def test_again_and_again_down_to_one():
    with cluster(5, wait_policy=QUICK) as ranks:
        keys(ranks)
        groups = {rank: ranks.communicators[rank].new_group([4, 2, 0, 1, 3], "mine") for rank in range(5)}
        left = [4, 2, 0, 1, 3]
        for victim in (0, 4, 3, 1):
            ranks.network.kill(victim, "killed by the test")
            left.remove(victim)

            def body(communicator):
                made = groups[communicator.rank] = groups[communicator.rank].shrink()
                return made.ranks, made.all_reduce(np.array([communicator.rank, 1])).tolist(), repr(made)

            found = ranks.run(body, tuple(sorted(left)))
            assert len({result[:2] for result in map(str, found)}) == 1
            assert found[0][:2] == (tuple(left), [sum(left), len(left)])
            assert "Group mine, shrunk:" in found[0][2]


def test_two_groups_at_once():
    with cluster(4, wait_policy=QUICK) as ranks:
        keys(ranks)
        pairs = ranks.all(lambda c: [c.new_group(range(4), name) for name in ("first", "second")])
        ranks.network.kill(1, "killed by the test")

        def body(communicator):
            found = {}
            threads = [
                threading.Thread(
                    target=lambda group=group: found.update({group.name: shrink_and_use(communicator, group)})
                )
                for group in pairs[communicator.rank]
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT)
            return found

        results = ranks.run(body, (0, 2, 3))
        for name in ("first", "second"):
            assert_alike([result[name] for result in results], [0, 2, 3])
        assert results[0]["first"][2] != results[0]["second"][2]


def test_shrinking_a_group_in_which_nobody_is_lost_ends_the_calls_of_the_others():
    with cluster(3, wait_policy=QUICK) as ranks:
        keys(ranks)

        def body(communicator):
            if communicator.rank:
                with pytest.raises(CollectiveError, match=r"rank 0 called shrink\(\) of group world"):
                    communicator.world.barrier()
            return shrink_and_use(communicator)

        assert_alike(ranks.all(body), [0, 1, 2])


def test_one_that_was_only_taken_for_lost_is_told_so():
    with cluster(3, wait_policy=QUICK) as ranks:
        keys(ranks)
        for rank in (0, 1):
            ranks.communicators[rank].lose(2, "its network was cut", hearsay=True)
        assert_alike(ranks.run(shrink_and_use, (0, 1)), [0, 1])
        (error,) = ranks.run(shrink_and_use, (2,))
        assert type(error) is CollectiveError
        assert "the others took rank 2 for lost: ranks 0, 1 went on without it" in str(error)


def test_an_interrupted_call_can_be_made_again():
    with cluster(2, wait_policy=QUICK) as ranks:
        store = keys(ranks)
        waits = threading.Event()

        class Interrupted:
            transaction = store.transaction

            def key_value_get(self, key, timeout):
                waits.set()
                raise KeyboardInterrupt

        ranks.communicators[0].store = Interrupted
        (error,) = ranks.run(lambda communicator: communicator.world.agree(5), (0,))
        assert type(error) is KeyboardInterrupt
        ranks.communicators[0].world._consensus = None
        ranks.communicators[0].store = lambda: store
        assert ranks.all(lambda communicator: communicator.world.agree(5)) == [5, 5]


@pytest.mark.parametrize("seed", range(6))
def test_members_that_die_in_the_call(seed):
    """At any moment of it: those that are left have the same group, and the same value."""
    chance = random.Random(seed)
    with cluster(6, wait_policy=QUICK) as ranks:
        keys(ranks)
        victims = chance.sample(range(6), 3)
        delays = [chance.uniform(0, 0.02) for _ in victims]
        left = tuple(rank for rank in range(6) if rank not in victims)

        def kill():
            for victim, delay in zip(victims, delays, strict=True):
                time.sleep(delay)
                ranks.network.kill(victim, "killed by the test")

        def body(communicator):
            if communicator.rank in victims:
                try:
                    communicator.world.agree(True)
                    communicator.world.shrink()
                except CollectiveError:
                    pass
                return None
            agreed = communicator.world.agree(communicator.rank + 64)
            missing, group, seen = communicator.world.missing, communicator.world, []
            while True:
                group = group.shrink()
                seen.append(group.ranks)
                try:
                    return agreed, missing, seen, group.all_reduce(np.array(1)).item()
                except PeerLostError:
                    continue

        killer = threading.Thread(target=kill)
        killer.start()
        results = ranks.run(body)
        killer.join(LIMIT)
        found = [results[rank] for rank in left]
        assert len({str(result) for result in found}) == 1, found


def test_the_survivors_of_a_fake_cluster():
    """Programs that go on after failures can be tested without processes."""

    def program():
        group = dmesh.collectives.world()
        if group.rank == 1:
            raise SystemExit(1)
        with pytest.raises(PeerLostError):
            group.barrier()
        group = dmesh.collectives.shrink()
        return group.ranks, group.all_reduce(np.array(1)).item(), dmesh.collectives.agree(True, group)

    with FakeCluster(3) as fake:
        results = fake.run(program, check=False)
        assert [results[rank] for rank in (0, 2)] == [((0, 2), 2, True)] * 2


def test_a_process_alone(monkeypatch):
    monkeypatch.setenv("DTENSOR_JOBS", "")
    dmesh.initialize_accelerator_system()
    try:
        made = dmesh.collectives.shrink()
        assert made.all_reduce(np.array(5)).item() == 5
        assert dmesh.collectives.agree(6) == 6
        dmesh.collectives.reset()
    finally:
        dmesh.shutdown_accelerator_system()
