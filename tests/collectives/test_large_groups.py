"""Schedules for large groups, carried out over messages: their values and bits, and the peers they need."""

from __future__ import annotations

import math
import threading
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from tests.collectives.ranks import cluster

from dmesh import native
from dmesh.collectives.backends.tcp.local import LocalTransport
from dmesh.collectives.schedules import choice
from dmesh.collectives.services import WaitPolicy
from dmesh.collectives.tuning import Tuning
from dmesh.errors import CollectiveMismatchError, PeerLostError

QUICK = WaitPolicy(ask_after=(0.01,), ask_every=0.05, look_every=0.02, announce=lambda message: None)
SIZE = 5
CASES = [(kind, way, False) for kind, ways in choice.SCHEDULES.items() for way in ways] + [
    (kind, way, True) for kind, ways in choice.OTHER_ORDERS.items() for way in ways
]
INPUTS = [
    ("f4", "sum"),
    (ml_dtypes.bfloat16, "sum"),
    ("f2", "mean"),
    ("i8", "mean"),
    ("?", "any"),
    ("c8", "prod"),
    ("i2", "max"),
]


@pytest.fixture
def force(monkeypatch):
    """Makes one schedule the only one of its kind, in groups of all sizes."""

    def use(kind, schedule):
        monkeypatch.setattr(choice, "MOST_DIRECT", 0)
        monkeypatch.setitem(choice.SCHEDULES, kind, (schedule,))
        choice.select.cache_clear()
        choice.choose.cache_clear()

    yield use
    monkeypatch.undo()
    choice.select.cache_clear()
    choice.choose.cache_clear()


def call(group, kind, x, op, root, in_place=False):
    """One call of a kind with rows for all ranks, where it takes such."""
    rows = np.stack([x + x] * group.size) if kind in ("all_to_all", "reduce_scatter", "scatter") else x.copy()
    match kind:
        case "all_reduce":
            return group.all_reduce(rows, op, out=rows if in_place else None)
        case "reduce_scatter":
            return group.reduce_scatter(rows, op)
        case "reduce":
            return group.reduce(rows, op, root)
        case "broadcast" | "gather":
            return getattr(group, kind)(rows, root)
        case "scatter":
            return (
                group.scatter(rows, root) if group.rank == root else group.scatter(None, root, out=x.copy())
            )
    return getattr(group, kind)(rows)


def results(ranks, kind):
    def body(communicator):
        group, found = communicator.world, []
        for dtype, op in INPUTS if kind in ("all_reduce", "reduce", "reduce_scatter") else INPUTS[:2]:
            for shape in ((), (3,), (2, 700)):
                x = np.array(np.random.default_rng(group.rank).normal(size=shape) * 9)
                for in_place in (False, kind == "all_reduce" and op != "mean"):
                    found.append(call(group, kind, np.asarray(x.astype(dtype)), op, 3, in_place))
        return found

    return ranks.all(body)


@pytest.mark.parametrize(("kind", "schedule", "other_order"), CASES)
def test_a_schedule_has_the_values_of_the_direct_one(force, kind, schedule, other_order):
    """And its bits, if it folds in the order of ranks; all ranks have the same in any case."""
    with cluster(SIZE) as ranks:
        expected = results(ranks, kind)
        force(kind, schedule)
        for found, direct in zip(results(ranks, kind), expected, strict=True):
            for one, other in zip(found, direct, strict=True):
                if one is None or other is None:
                    assert one is other
                elif other_order and one.dtype.kind not in "bi":
                    assert one.dtype == other.dtype
                    tolerance = 0.1 if one.dtype.itemsize == 2 else 1e-3
                    np.testing.assert_allclose(
                        one.astype("c16"), other.astype("c16"), rtol=tolerance, atol=tolerance
                    )
                else:
                    assert one.tobytes() == other.tobytes()
        if kind == "all_reduce":
            assert len({b"".join(x.tobytes() for x in found) for found in results(ranks, kind)}) == 1


@pytest.fixture
def pairs(monkeypatch):
    """Pairs of ranks that exchange frames."""
    pairs, transmit = set(), LocalTransport.transmit

    def noted(self, peer, *arguments):
        pairs.update([(self.rank, peer), (peer, self.rank)])
        return transmit(self, peer, *arguments)

    monkeypatch.setattr(LocalTransport, "transmit", noted)
    return pairs


@pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")
def test_ranks_that_share_memory_find_each_other_through_few_peers(pairs):
    with cluster(33, shm=("native",)) as ranks:
        assert all(total == 33 for total in ranks.all(lambda c: c.world.all_reduce(np.ones(1))))
        found = ranks.all(lambda c: c.world.all_gather(np.array([c.rank])).tolist())
        assert found == [[[rank] for rank in range(33)]] * 33
        assert all(c.world.backend("shm") for c in ranks.communicators)
        peers = Counter(rank for rank, _ in pairs)
        assert max(peers.values()) <= 4 * math.log2(33), peers


def test_chosen_schedules_take_few_peers(pairs):
    """33 ranks, all kinds: with arrays that are not long, each rank talks to a few of the others."""
    with cluster(33) as ranks:

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            for count in (1, 1000):
                x = np.arange(count, dtype="f4") + rank
                total = np.arange(count, dtype="f4") * 33 + 33 * 16
                assert (group.all_reduce(x) == total).all()
                assert (group.all_gather(x)[:, 0] == np.arange(33)).all()
                assert (group.broadcast(x, 7) == x - rank + 7).all()
                assert (group.reduce_scatter(np.stack([x] * 33)) == total).all()
                mine = group.reduce(x, "sum", 3)
                assert mine is None or (mine == total).all()
                rows = np.stack([x] * 33)
                assert (group.all_to_all(rows)[:, 0] == np.arange(33)).all()
                assert (group.scatter(rows if rank == 2 else rows[0], 2) == x - rank + 2).all()

        ranks.all(body)
        ranks.settle()
        peers = Counter(rank for rank, _ in pairs)
        assert max(peers.values()) <= 4 * math.log2(33), peers


@pytest.mark.parametrize("folding", ["rank", "host"])
def test_bits_do_not_depend_on_the_size_of_the_array(folding):
    """In the order of ranks, an element has the same bits in arrays of every length."""
    columns = np.random.default_rng(1).normal(size=(20, 40_000)).astype("f4") * 1000
    total = columns[0].copy()
    for row in columns[1:]:
        total += row
    with cluster(20, tuning=(Tuning(folding=folding),)) as ranks:
        for count in (1, 100, 3000, 40_000):
            for found in ranks.all(lambda c, n=count: c.world.all_reduce(columns[c.rank, :n])):
                assert found.tobytes() == total[:count].tobytes()


@pytest.mark.parametrize("count", [10, 40_000])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast", "reduce"])
def test_all_ranks_hear_of_a_mismatch_and_of_a_death(kind, count):
    """Although most of them exchange nothing with the rank that is the cause."""
    with cluster(20, wait_policy=QUICK) as ranks:
        ranks.all(lambda c: c.world.barrier())
        errors = ranks.run(lambda c: getattr(c.world, kind)(np.zeros(count + (c.rank == 7))))
        for error in errors:
            assert isinstance(error, CollectiveMismatchError), error
            assert "rank 7 called" in str(error)
    with cluster(20, wait_policy=QUICK) as ranks:
        ranks.all(lambda c: c.world.barrier())
        dies = threading.Timer(0.05, ranks.network.kill, (7, "killed by the test"))
        dies.start()
        others = tuple(rank for rank in range(20) if rank != 7)
        for error in ranks.run(lambda c: getattr(c.world, kind)(np.zeros(count)), others):
            assert isinstance(error, PeerLostError), error
            assert "rank 7" in str(error)
        dies.join()


@pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")
def test_more_than_64_ranks_share_memory():
    with cluster(70, shm=("native",)) as ranks:

        def body(communicator):
            group = communicator.world
            for count in (1, 20_000):
                x = np.arange(count) + group.rank
                assert (group.all_reduce(x) == 70 * np.arange(count) + sum(range(70))).all()
            assert (group.all_to_all(np.full(70, group.rank)) == range(70)).all()
            return [backend.name for backend in group.current.backends][:2]

        assert ranks.all(body) == [["shm", "messages"]] * 70
