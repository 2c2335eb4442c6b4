"""What others read is put into the caches or past them: which of the two, and that values are the same."""

from __future__ import annotations

import ctypes
import random
import subprocess

import numpy as np
import pytest
from tests.collectives.ranks import cluster
from tests.native.library import CORE, FLAGS, compiler

from dmesh import native

CACHED, NON_TEMPORAL = 0, 1
SIZE = 64 * 1024


class CopyPolicy(ctypes.Structure):
    _fields_ = (
        ("mode", ctypes.c_int),
        ("cost", ctypes.c_uint32 * 2),
        ("trials", ctypes.c_uint32),
        ("uses", ctypes.c_uint32),
        ("fixed", ctypes.c_int),
    )


class PathPolicy(ctypes.Structure):
    _fields_ = (
        ("best", ctypes.c_int),
        ("cost", ctypes.c_uint32 * 2),
        ("uses", ctypes.c_uint32),
        ("trial", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    command = compiler()
    if command is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("copy_policy") / "copy_policy.so"
    sources = [CORE / name for name in ("copy.c", "wait.c")]
    subprocess.run([command, *FLAGS, "-O2", "-shared", "-fPIC", *sources, "-o", built], check=True)
    found = ctypes.CDLL(str(built))
    found.dmesh_copy_learn.argtypes = (
        ctypes.POINTER(CopyPolicy), ctypes.c_int, ctypes.c_size_t, ctypes.c_int64,
    )  # fmt: skip
    found.dmesh_path_learn.argtypes = (
        ctypes.POINTER(PathPolicy), ctypes.c_int, ctypes.c_size_t, ctypes.c_int64,
    )  # fmt: skip
    return found


def use(library, policy: CopyPolicy, nanoseconds: dict[int, int], times: int) -> list[int]:
    """Publishes `SIZE` bytes several times, which takes so long in each mode; returns the modes taken."""
    modes = []
    for _ in range(times):
        mode = library.dmesh_copy_choose(ctypes.byref(policy))
        library.dmesh_copy_learn(ctypes.byref(policy), mode, SIZE, nanoseconds[mode])
        modes.append(mode)
    return modes


NEAR = {CACHED: 3_000, NON_TEMPORAL: 3_000}
FAR = {CACHED: 16_000, NON_TEMPORAL: 3_000}
SLOW_MEMORY = {CACHED: 16_000, NON_TEMPORAL: 12_000}


def test_cores_that_share_a_cache_write_into_it_and_try_nothing_else(library):
    assert use(library, CopyPolicy(), NEAR, 1000) == [CACHED] * 1000


def test_where_writing_into_caches_is_slow_it_goes_past_them(library):
    policy = CopyPolicy()
    use(library, policy, FAR, 100)
    assert policy.mode == NON_TEMPORAL
    modes = use(library, policy, FAR, 1000)
    assert modes.count(CACHED) < 0.1 * len(modes)


def test_processes_that_move_together_are_noticed_and_those_that_move_apart(library):
    policy = CopyPolicy()
    for _ in range(3):
        use(library, policy, FAR, 400)
        assert policy.mode == NON_TEMPORAL
        use(library, policy, NEAR, 400)
        assert policy.mode == CACHED


def test_slow_memory_is_no_reason(library):
    policy = CopyPolicy()
    modes = use(library, policy, SLOW_MEMORY, 1000)
    assert policy.mode == CACHED
    assert modes.count(NON_TEMPORAL) < 0.1 * len(modes)


def test_an_interruption_now_and_then_changes_nothing(library):
    policy, chance = CopyPolicy(), random.Random(1)
    for _ in range(1000):
        mode = library.dmesh_copy_choose(ctypes.byref(policy))
        took = 5_000_000 if chance.random() < 0.02 else NEAR[mode]
        library.dmesh_copy_learn(ctypes.byref(policy), mode, SIZE, took)
        assert mode == CACHED


STAGED, SINGLE_COPY = 0, 1


def move(library, policy: PathPolicy, nanoseconds: dict[int, int], times: int) -> list[int]:
    """Moves arrays of 4 MiB, which takes so long on each path; returns the paths taken."""
    taken = []
    for _ in range(times):
        path = library.dmesh_path_choose(ctypes.byref(policy))
        library.dmesh_path_learn(ctypes.byref(policy), path, 4 << 20, nanoseconds[path])
        taken.append(path)
    return taken


@pytest.mark.parametrize("first", [STAGED, SINGLE_COPY])
def test_the_faster_path_is_found_at_once_and_again_when_the_cores_move(library, first):
    policy = PathPolicy(best=first)
    for fast in (STAGED, SINGLE_COPY) * 3:
        cost = {fast: 250_000, 1 - fast: 400_000}
        begins = move(library, policy, cost, 500)
        assert policy.best == fast
        assert begins[-400:].count(1 - fast) <= 400 // 32 + 1
    assert (
        move(library, PathPolicy(best=first), {first: 400_000, 1 - first: 250_000}, 5)[3:] == [1 - first] * 2
    )


def test_a_path_that_is_much_slower_is_tried_seldom(library):
    taken = move(library, PathPolicy(), {STAGED: 250_000, SINGLE_COPY: 1_000_000}, 1000)
    assert taken.count(SINGLE_COPY) <= 1000 // 128 + 1


def test_a_path_that_is_hardly_faster_is_not_taken(library):
    policy = PathPolicy()
    move(library, policy, {STAGED: 250_000, SINGLE_COPY: 240_000}, 1000)
    assert policy.best == STAGED


@pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")
@pytest.mark.parametrize("kind", ["broadcast", "all_to_all", "scatter", "permute", "transfer"])
def test_both_paths_are_measured_and_give_the_same_values(kind):
    """Staged calls come first, then one by a single copy, where it is permitted, then the faster path."""
    with cluster(2, shm=("native",)) as ranks:

        def body(communicator):
            group, rank = communicator.world, communicator.rank
            group.barrier()
            rows = np.arange(2 << 18, dtype=float).reshape(2, -1)  # 4 MiB

            def call():
                x = rows * (rank + 1)
                if kind == "broadcast":
                    return (group.broadcast(x, root=1) == rows * 2).all()
                if kind == "all_to_all":
                    return (group.all_to_all(x) == np.stack([rows[rank], 2 * rows[rank]])).all()
                if kind == "scatter":
                    return (group.scatter(x if rank == 0 else x[0], root=0) == rows[rank]).all()
                if kind == "permute":
                    return (group.permute(x, [(0, 1), (1, 0)]) == rows * (2 - rank)).all()
                if rank == 0:
                    group.send(x, 1)
                    return True
                return (group.recv(np.empty_like(x), 0) == rows).all()

            tried, endpoints = False, []
            for _ in range(8):
                assert call()
                group.barrier()
                endpoints = group._generation.endpoints
                tried |= any(endpoint.single_copies for endpoint in endpoints)
            assert tried == all(endpoint.can_read_peers for endpoint in endpoints)

        ranks.all(body)


@pytest.mark.skipif(native.core() is None, reason=f"no native core: {native.reason()}")
@pytest.mark.parametrize("seed", range(4))
def test_values_are_the_same_in_both_ways(seed):
    """Each rank in its own mode, which changes; private and shared arrays, at odd places."""
    with cluster(3, shm=("native",)) as ranks:

        def body(communicator):
            group, rank, size = communicator.world, communicator.rank, 3
            group.barrier()
            for other in {0, 1, 2} - {rank}:  # opens the pipes
                group.send(np.zeros(1), other, async_op=True)
            for other in {0, 1, 2} - {rank}:
                group.recv(np.zeros(1), other)
            endpoints = group._generation.endpoints
            assert len(endpoints) == 5
            common, own = np.random.default_rng(seed), np.random.default_rng([seed, rank])

            def array(count, *, shared):
                whole = communicator.pool.empty((count + 3,), float) if shared else np.empty(count + 3)
                return whole[1 : 1 + count]

            for nbytes in (8_000, 24_000, 64_000, 100_000, 600_000, 3_000_000, 9_000_000):
                for endpoint in endpoints:
                    endpoint.non_temporal = own.random() < 0.5
                count = nbytes // 24 * 3
                inputs = [common.standard_normal(count) for _ in range(size)]
                total = inputs[0] + inputs[1] + inputs[2]
                x = array(count, shared=own.random() < 0.3)
                x[:] = inputs[rank]
                out = array(count, shared=own.random() < 0.3)
                assert (group.all_reduce(x, out=out) == total).all()
                assert (group.all_gather(x) == np.stack(inputs)).all()
                assert (group.reduce_scatter(x, axis=0) == np.split(total, size)[rank]).all()
                assert (group.broadcast(x, root=2) == inputs[2]).all()
                parts = np.stack([np.split(one, size)[rank] for one in inputs]).ravel()
                assert (group.all_to_all(x) == parts).all()
                reduced = group.reduce(x, root=1)
                assert rank != 1 or (reduced == total).all()
                sent = group.send(x, (rank + 1) % size, async_op=True)
                assert (group.recv(out, (rank - 1) % size) == inputs[rank - 1]).all()
                sent.result()
                assert (group.all_reduce(x, out=x) == total).all()
            return [endpoint.non_temporal for endpoint in endpoints]

        ranks.all(body)
