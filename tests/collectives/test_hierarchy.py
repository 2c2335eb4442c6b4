"""Groups with several members on each of several hosts: shared memory intra-host, connections inter-host."""

from __future__ import annotations

import math
import threading

import ml_dtypes
import numpy as np
import pytest
from tests.collectives import ranks as threads

from dmesh import native
from dmesh.collectives import connect
from dmesh.collectives.backends import hierarchical
from dmesh.collectives.backends.hierarchical import cells_of
from dmesh.collectives.backends.shm.setup import Sizes
from dmesh.collectives.backends.tcp import dedicated
from dmesh.collectives.services import WaitPolicy
from dmesh.collectives.tuning import Tuning
from dmesh.errors import CollectiveMismatchError, PeerLostError

QUICK = WaitPolicy(ask_after=(0.01,), ask_every=0.05, look_every=0.02, announce=lambda message: None)
SMALL = Sizes(slot=128, staging=1024)
HOSTS = ("native@a", "native@b")

pytestmark = pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")


def cluster(size, **options):
    """One in which small arrays go by rows, too."""
    return threads.cluster(size, tuning=(Tuning(rows=256),), **options)


def rows(communicator):
    found = communicator.world.backend("hierarchical")
    return None if found is None else (list(found._intra[0]), list(found._inter[0]))


def test_members_find_their_row_and_their_column():
    """Ranks need not lie together."""
    with cluster(6, shm=("native@a", "native@b", "native@c"), sizes=SMALL) as ranks:
        ranks.all(lambda c: c.world.barrier())
        found = [rows(communicator) for communicator in ranks.communicators]
        assert found == [
            ([0, 3], [0, 1, 2]),
            ([1, 4], [0, 1, 2]),
            ([2, 5], [0, 1, 2]),
            ([0, 3], [3, 4, 5]),
            ([1, 4], [3, 4, 5]),
            ([2, 5], [3, 4, 5]),
        ]


@pytest.mark.parametrize(
    ("size", "shm"),
    [
        (2, HOSTS),  # one on each host
        (4, ("native@a",)),  # one host: shared memory
        (4, ("dedicated@a", "dedicated@b")),  # rows that share nothing
    ],
)
def test_other_groups_have_none(size, shm):
    with cluster(size, shm=shm, sizes=SMALL) as ranks:
        ranks.all(lambda c: c.world.barrier())
        assert [rows(communicator) for communicator in ranks.communicators] == [None] * size
        for total in ranks.all(lambda c: c.world.all_reduce(np.full(1000, c.rank))):
            assert (total == sum(range(size))).all()


CASES = [
    (op, dtype)
    for op in ("sum", "prod", "min", "max", "mean")
    for dtype in ("f4", "f8", "c8", "i8", "u1", "f2", "bfloat16")
    if not (op == "mean" and dtype in ("i8", "u1")) and not (op in ("min", "max") and dtype == "c8")
]


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_values(op, dtype):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with cluster(4, shm=HOSTS, sizes=SMALL) as ranks:
        ranks.all(lambda c: c.world.barrier())
        for count in (64, 257, 1000, 4099):
            inputs = [np.random.default_rng(r).integers(1, 4, count).astype(dtype) for r in range(4)]
            wide = np.stack(inputs).astype("c16" if dtype.kind == "c" else "f8")
            fold = {"sum": np.sum, "prod": np.prod, "mean": np.mean, "min": np.min, "max": np.max}[op]
            results = ranks.all(lambda c, x=inputs: c.world.all_reduce(x[c.rank], op))
            for result in results:
                assert result.dtype == dtype
                assert (result.astype(wide.dtype) == fold(wide, axis=0)).all(), (count, op)
            own = ranks.all(lambda c, x=inputs: _in_place(c.world, x[c.rank].copy(), op))
            assert all(a.tobytes() == results[0].tobytes() for a in own)


def _in_place(group, x, op):
    assert group.all_reduce(x, op, out=x) is x
    return x


UNEVEN = [
    (3, ("native@a", "native@b")),
    (4, ("native@a", "native@a", "native@a", "native@b")),
    (5, ("native@a", "native@b")),
    (6, ("native@a", "native@b", "native@a", "native@c", "native@a", "native@b")),
]


@pytest.mark.parametrize("size", [4, 5])
def test_leaders_encrypt(size):
    """What the ranks of a host share goes through memory all the same."""
    with cluster(size, shm=HOSTS, sizes=SMALL, tls=True) as ranks:
        ranks.all(lambda c: c.world.barrier())
        for count in (100, 20_000):
            inputs = [np.random.default_rng([rank, count]).integers(0, 99, count) for rank in range(size)]
            for total in ranks.all(lambda c, x=inputs: c.world.all_reduce(x[c.rank])):
                assert (total == sum(inputs)).all()
            for result in ranks.all(lambda c, x=inputs: c.world.broadcast(x[c.rank], 1)):
                assert (result == inputs[1]).all()
        assert all(c.world.backend("hierarchical") is not None for c in ranks.communicators)


@pytest.mark.parametrize(("size", "shm"), UNEVEN)
@pytest.mark.parametrize("dtype", ["f4", "i8"])
def test_hosts_with_different_numbers_of_members(size, shm, dtype):
    """As many blocks as the smallest host has members; every kind, from and to every root."""
    with cluster(size, shm=shm, sizes=SMALL) as ranks:
        ranks.all(lambda c: c.world.barrier())
        assert all(c.world.backend("hierarchical") for c in ranks.communicators)
        for count in (700, 1001, 4099):
            inputs = [np.random.default_rng(r).integers(1, 9, count).astype(dtype) for r in range(size)]
            total = np.sum(inputs, axis=0)
            for result in ranks.all(lambda c, x=inputs: c.world.all_reduce(x[c.rank])):
                assert (result == total).all()
            for result in ranks.all(lambda c, x=inputs: _in_place(c.world, x[c.rank].copy(), "max")):
                assert (result == np.max(inputs, axis=0)).all()
            for root in range(size):
                found = ranks.all(lambda c, x=inputs, r=root: c.world.reduce(x[c.rank], "sum", r))
                assert (found[root] == total).all()
                assert [result is None for result in found] == [rank != root for rank in range(size)]
                for result in ranks.all(lambda c, x=inputs, r=root: c.world.broadcast(x[c.rank], r)):
                    assert (result == inputs[root]).all()


@pytest.mark.parametrize(
    ("size", "shm"), [(4, HOSTS), (4, ("native@a", "native@a", "native@b", "native@b")), *UNEVEN]
)
def test_rows_of_several_hosts(size, shm):
    """All-gathers and reduce-scatters, along any axis, also in arrays that they are a part of."""
    with cluster(size, shm=shm, sizes=SMALL) as ranks:
        ranks.all(lambda c: c.world.barrier())
        for shape in [(1000,), (7, 101), (2, 3, 200)]:
            inputs = [np.random.default_rng(r).integers(0, 99, shape).astype("f4") for r in range(size)]
            for found in ranks.all(lambda c, x=inputs: c.world.all_gather(x[c.rank])):
                assert (found == np.stack(inputs)).all()
            for axis in range(len(shape)):
                for found in ranks.all(lambda c, x=inputs, a=axis: c.world.all_gather(x[c.rank], axis=a)):
                    assert (found == np.concatenate(inputs, axis)).all()
            wide = [
                np.random.default_rng(r).integers(0, 99, (size, *shape)).astype("f4") for r in range(size)
            ]
            for op, total in [("sum", sum(wide)), ("max", np.max(wide, 0)), ("mean", np.mean(wide, 0, "f4"))]:
                found = ranks.all(lambda c, x=wide, op=op: c.world.reduce_scatter(x[c.rank], op))
                for rank, row in enumerate(found):
                    np.testing.assert_allclose(row, total[rank], rtol=1e-6)
            found = ranks.all(lambda c, x=wide: _rows_in_place(c.world, x[c.rank].copy()))
            for result in found:
                assert (result == sum(wide)).all()


def _rows_in_place(group, x):
    own = x[group.rank]
    assert group.reduce_scatter(x, out=own) is own
    assert group.all_gather(own, out=x) is x
    return x


@pytest.mark.parametrize("single_copy_from", [None, 1])
@pytest.mark.parametrize(("size", "shm"), [(4, HOSTS), UNEVEN[2]])
def test_arrays_in_shared_memory_are_used_where_they_are(size, shm, single_copy_from):
    """Any mix of shared and private arrays gives the same, whether or not ranks read each other's process."""
    with cluster(size, shm=shm, sizes=SMALL, single_copy_from=single_copy_from) as ranks:

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            chance, common = np.random.default_rng(rank), np.random.default_rng(0)

            def empty(*shape):
                return np.empty(shape) if chance.random() < 0.4 else communicator.pool.empty(shape, float)

            group.barrier()
            for _ in range(8):
                count = int(common.integers(100, 3000))
                inputs = common.integers(0, 99, (size, size, count)).astype(float)
                x, own = empty(size, count), empty(count)
                x[:], own[:] = inputs[rank], inputs[rank, 0]
                root = int(common.integers(size))
                assert (group.all_gather(own, out=empty(size, count)) == inputs[:, 0]).all()
                assert (group.reduce_scatter(x, out=empty(count)) == inputs.sum(0)[rank]).all()
                assert (group.all_reduce(x, out=empty(size, count)) == inputs.sum(0)).all()
                assert (group.broadcast(x, root, out=empty(size, count)) == inputs[root]).all()
                reduced = group.reduce(x, "max", root, out=empty(size, count) if rank == root else None)
                assert reduced is None if rank != root else (reduced == inputs.max(0)).all()
                assert (x == inputs[rank]).all()
                assert (_rows_in_place(group, x) == inputs.sum(0)).all()

        ranks.all(body)


class _Counting:
    """Endpoint that counts the bytes that are given to it."""

    def __init__(self, endpoint):
        self._endpoint = endpoint
        self.given = 0

    def __getattr__(self, name):
        return getattr(self._endpoint, name)

    def start(self, *arguments):
        self.given += 0 if arguments[7] is None else arguments[7].nbytes
        self._endpoint.start(*arguments)


@pytest.mark.parametrize(("kind", "rows"), [("all_gather", 1), ("reduce_scatter", 4)])
def test_rows_cross_the_network_once_for_each_host(kind, rows):
    """Of 4 ranks on 2 hosts, each exchanges one row with one rank of the other host, not with both."""
    with cluster(4, shm=HOSTS, sizes=SMALL) as ranks:
        ranks.all(lambda c: c.world.barrier())
        counted = []
        for communicator in ranks.communicators:
            backend = communicator.world.backend("hierarchical")
            counted.append(_Counting(backend._inter[1]))
            backend._inter = (backend._inter[0], counted[-1])
        x = np.squeeze(np.zeros((rows, 1000)))
        ranks.all(lambda c: getattr(c.world, kind)(x))
        shared = 1 if kind == "all_gather" else 2  # a reduce-scatter is given this host's row, too
        assert [endpoint.given for endpoint in counted] == [shared * 8000] * 4


@pytest.mark.parametrize("shm", [HOSTS, UNEVEN[1][1]])
def test_reduces_and_broadcasts_of_several_hosts(shm):
    """Means, and arrays that are sent from and received in themselves."""
    with cluster(4, shm=shm, sizes=SMALL) as ranks:

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            group.barrier()
            x = np.arange(1000.0) + rank
            mean = group.reduce(x, "mean", 3)
            assert mean is None if rank != 3 else (mean == np.arange(1000) + 1.5).all()
            assert group.broadcast(x, 2, out=x) is x
            assert (x == np.arange(1000) + 2).all()
            return group.reduce(np.full(1000, 0.1 * rank, "f4"), "sum", 0)

        first, again = ranks.all(body)[0], ranks.all(body)[0]
        assert first.tobytes() == again.tobytes()


@pytest.mark.parametrize("kind", ["all_reduce", "reduce", "broadcast", "all_gather"])
@pytest.mark.parametrize("shm", [HOSTS, UNEVEN[1][1]])
def test_every_rank_hears_of_a_mismatch_and_of_a_death(kind, shm):
    with cluster(4, shm=shm, sizes=SMALL, wait_policy=QUICK) as ranks:
        ranks.all(lambda c: c.world.barrier())
        errors = ranks.run(lambda c: getattr(c.world, kind)(np.zeros(1001 if c.rank == 2 else 1000)))
        for error in errors:
            assert isinstance(error, CollectiveMismatchError), error
    with cluster(4, shm=shm, sizes=SMALL, wait_policy=QUICK) as ranks:
        ranks.all(lambda c: c.world.barrier())
        dies = threading.Timer(0.05, ranks.network.kill, (2, "killed by the test"))
        dies.start()
        for error in ranks.run(lambda c: getattr(c.world, kind)(np.zeros(1000)), (0, 1, 3)):
            assert isinstance(error, PeerLostError), error
        dies.join()


ALONE = [
    (4, tuple(f"native@{rank}" for rank in range(4))),
    (7, tuple(f"native@{rank}" for rank in range(7))),
    (6, ("dedicated@a", "dedicated@b", "dedicated@a")),  # hosts whose ranks share nothing
]
"""Groups that are divided into cells."""


@pytest.mark.parametrize(("size", "shm"), [(4, HOSTS), *UNEVEN[1:], *ALONE])
def test_groups_that_are_too_large_for_connections_of_all_pairs(size, shm, monkeypatch, caplog):
    """Few pairs have connections; small arrays, other calls and transfers go by messages."""
    monkeypatch.setattr(dedicated, "MOST_MEMBERS", size - 1)
    caplog.set_level("INFO", "dmesh")
    with cluster(size, shm=shm, sizes=SMALL, wait_policy=QUICK) as ranks:

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            group.barrier()
            sent = group.send(np.array([rank]), (rank + 1) % size, async_op=True)
            for count in (3, 1001):
                x = np.arange(count) + rank
                later = group.all_reduce(x, async_op=True)
                total = group.all_reduce(x)
                assert (total == size * np.arange(count) + sum(range(size))).all()
                assert (group.reduce_scatter(np.stack([x] * size)) == total).all()
                assert (group.all_gather(x) == np.arange(count) + np.arange(size)[:, None]).all()
                assert (group.all_to_all(np.stack([x] * size))[:, 0] == range(size)).all()
                for root in range(size):
                    reduced = group.reduce(x, "sum", root)
                    assert reduced is None if rank != root else (reduced == total).all()
                    assert (group.broadcast(x, root) == np.arange(count) + root).all()
                assert (later.result(30) == total).all()
            assert group.recv(np.zeros(1, int), (rank - 1) % size) == (rank - 1) % size
            sent.result(30)
            return [backend.name for backend in group.current.backends][:2]

        assert ranks.all(body) == [["hierarchical", "messages"]] * size
        errors = ranks.run(lambda c: c.world.broadcast(np.zeros(1001 if c.rank == 2 else 1000)))
        assert all(isinstance(error, CollectiveMismatchError) for error in errors), errors
    assert f"for it has more than {size - 1} members" in caplog.text


def test_too_many_ranks_on_hosts_of_their_own_exchange_messages(monkeypatch, caplog):
    monkeypatch.setattr(dedicated, "MOST_MEMBERS", 2)
    caplog.set_level("INFO", "dmesh")
    with cluster(3, shm=("native@a", "native@b", "native@c"), sizes=SMALL) as ranks:
        for total in ranks.all(lambda c: c.world.all_reduce(np.full(1000, c.rank))):
            assert (total == 3).all()
    assert (
        "it has more than 2 members, and is not hierarchical: its hosts have 1, 1, 1 members" in caplog.text
    )


def test_members_find_their_cell_and_the_leaders_of_their_block(monkeypatch, caplog):
    monkeypatch.setattr(dedicated, "MOST_MEMBERS", 5)
    caplog.set_level("INFO", "dmesh")
    with cluster(6, shm=tuple(f"native@{rank}" for rank in range(6)), sizes=SMALL) as ranks:
        ranks.all(lambda c: c.world.barrier())
        found = [rows(communicator) for communicator in ranks.communicators]
        columns = [[0, 3], [1, 4], [2, 5]]
        assert found == [([0, 1, 2], column) for column in columns] + [([3, 4, 5], c) for c in columns]
    assert "has dedicated connections with the tuning of rank 0" in caplog.text
    assert "within 2 cells, and between these, for large arrays" in caplog.text


@pytest.mark.parametrize("most", [64, 3], ids=["hosts", "cells"])
def test_connections_are_closed_if_the_backend_cannot_be_made(monkeypatch, most):
    opened = []

    def fail(*args):
        raise MemoryError("no endpoint for the test")

    for module in (connect, hierarchical):

        def note(*args, real=module.open_connections, **options):
            opened.append((yield from real(*args, **options)))
            return opened[-1]

        monkeypatch.setattr(module, "open_connections", note)
    monkeypatch.setattr(hierarchical, "TcpEndpoints", fail)
    monkeypatch.setattr(dedicated, "MOST_MEMBERS", most)
    shm = HOSTS if most == 64 else tuple(f"native@{rank}" for rank in range(4))
    with cluster(4, shm=shm, sizes=SMALL, wait_policy=QUICK) as ranks:
        errors = ranks.run(lambda c: c.world.barrier())
        assert any(isinstance(error, MemoryError) for error in errors), errors
        sockets = [sock for found in opened for its in found.sockets.values() for sock in its]
        assert len(opened) == 8
        assert {sock.fileno() for sock in sockets} == {-1}


@pytest.mark.parametrize("members", [65, 67, 96, 100, 128, 144, 255, 256])
def test_cells_are_about_as_many_as_each_has_members(members):
    """So each rank has about 2 sqrt(N) connections."""
    cells = cells_of([list(range(members))])
    assert [at for cell in cells for at in cell] == list(range(members))
    sizes = set(map(len, cells))
    assert max(sizes) - min(sizes) <= (0 if members in (96, 100, 128, 144, 256) else 1)
    assert len(cells) + max(sizes) <= 2.2 * math.sqrt(members) + 1


def test_folding_by_rank_has_no_hierarchy():
    with threads.cluster(4, shm=HOSTS, tuning=(Tuning(rows=256, folding="rank"),), sizes=SMALL) as ranks:
        ranks.all(lambda c: c.world.barrier())
        assert [rows(communicator) for communicator in ranks.communicators] == [None] * 4


@pytest.mark.parametrize("shm", [HOSTS, UNEVEN[1][1]])
def test_all_ranks_have_the_same_bits(shm):
    with cluster(4, shm=shm, sizes=SMALL) as ranks:
        ranks.all(lambda c: c.world.barrier())
        first = None
        for _ in range(3):
            results = ranks.all(
                lambda c: c.world.all_reduce(np.random.default_rng(c.rank).normal(size=5001).astype("f4"))
            )
            first = first or results[0].tobytes()
            assert {result.tobytes() for result in results} == {first}


def test_calls_of_all_sizes_follow_each_other():
    with cluster(4, shm=HOSTS, sizes=SMALL) as ranks:

        def body(communicator):
            group = communicator.world
            group.barrier()
            for number in range(150):
                x = np.arange(1 + number * 13 % 400, dtype="f8") + communicator.rank
                future = group.all_reduce(x, async_op=True) if number % 5 == 0 else None
                total = group.all_reduce(x[::-1])[::-1] if number % 3 else group.all_reduce(x)
                assert (total == 4 * np.arange(x.size) + 6).all(), number
                assert future is None or (future.result(30) == total).all()

        ranks.all(body)


@pytest.mark.parametrize("other", [(1001,), (10, 100), (2000,), (1,)])
def test_a_mismatch_names_both_sides(other):
    """Also where the steps that ranks make together are alike."""
    with cluster(4, shm=HOSTS, sizes=SMALL, wait_policy=QUICK) as ranks:
        ranks.all(lambda c: c.world.barrier())
        errors = ranks.run(lambda c: c.world.all_reduce(np.zeros(other if c.rank == 3 else 1000)))
        for error in errors:
            assert isinstance(error, CollectiveMismatchError), error
            assert "rank 3 called" in str(error)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_peer_that_dies_is_named(victim):
    with cluster(4, shm=HOSTS, sizes=SMALL, wait_policy=QUICK) as ranks:
        ranks.all(lambda c: c.world.barrier())
        dies = threading.Timer(0.05, ranks.network.kill, (victim, "killed by the test"))
        dies.start()
        others = tuple(rank for rank in range(4) if rank != victim)
        errors = ranks.run(lambda c: c.world.all_reduce(np.zeros(1000)), others)
        dies.join()
        for error in errors:
            assert isinstance(error, PeerLostError), error
            assert f"rank {victim}" in str(error)


def test_a_lost_rank_is_replaced_and_everything_begins_anew():
    with cluster(4, shm=HOSTS, sizes=SMALL, wait_policy=QUICK) as ranks:
        for _ in range(2):
            ranks.all(lambda c: c.world.all_reduce(np.ones(1000)))
        ranks.replace(1)
        ranks.renew()
        for _ in range(3):
            for total in ranks.all(lambda c: c.world.all_reduce(np.full(1000, c.rank))):
                assert (total == 6).all()
        assert all(map(rows, ranks.communicators))


@pytest.mark.parametrize(("op", "wanted"), [("mean", 40_000), ("max", 40_000), ("sum", np.inf)])
def test_what_some_fold_must_not_overflow_where_the_whole_does_not(op, wanted):
    """float16 ends at 65504."""
    with cluster(4, shm=HOSTS, sizes=SMALL) as ranks:
        ranks.all(lambda c: c.world.barrier())
        for result in ranks.all(lambda c: c.world.all_reduce(np.full(1000, 40_000, np.float16), op)):
            assert (result == wanted).all()
        signs = [1, -1, 1, -1]  # 1 and 1 in one row
        for result in ranks.all(lambda c: c.world.all_reduce(np.full(1000, 40_000 * signs[c.rank], "f2"))):
            assert (result == 0).all()


def test_no_rank_is_told_of_numbers_that_overflow():
    with cluster(4, shm=HOSTS, sizes=SMALL) as ranks:

        def body(communicator):
            communicator.world.barrier()
            with np.errstate(all="raise"):
                return communicator.world.all_reduce(np.full(1000, 1e-45, "f4"), "mean")

        ranks.all(body)
