"""Every collective against NumPy, over dtypes, shapes, sizes of groups and forms of memory."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.arrays import (
    ALL_DTYPES,
    DTYPES,
    FORMS,
    in_form,
    meaningful,
    random_array,
    reduced,
    same,
)
from tests.collectives.ranks import Cluster, cluster

from dmesh.collectives.backends.shm.setup import Sizes
from dmesh.collectives.request import OPS
from dmesh.collectives.tuning import Tuning

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


SMALL = Sizes(slot=128, staging=5 * 512)
"""So that small arrays take the ways of large ones in shared memory, too."""
EARLY = Tuning(message_flat=64, message_tree=64)
"""With which small arrays take the ways of large ones, too."""
WAYS = {
    "messages": {},
    "native": {"shm": ("native",)},
    "native in small pieces": {"shm": ("native",), "sizes": SMALL},
    "mpi": {"shm": ("no",), "mpi": True},
    "dedicated": {"shm": ("dedicated",)},
    "dedicated in small pieces, on several streams": {
        "shm": ("dedicated",),
        "tuning": (replace(EARLY, piece=64, streams=3),),
    },
    "encrypted": {"shm": ("encrypted",)},
    "encrypted in small pieces, on two streams": {
        "shm": ("encrypted",),
        "tuning": (replace(EARLY, piece=64, streams=2),),
    },
}


@contextlib.contextmanager
def clusters_of_all_sizes(options):
    """Clusters of 1 to 5 ranks, by size, in which small arrays take the ways of large ones."""
    with contextlib.ExitStack() as stack:
        options = {"tuning": (EARLY,), **options}
        made = {size: stack.enter_context(cluster(size, **options)) for size in range(1, 6)}
        for ranks in made.values():
            ranks.all(lambda communicator: communicator.world.barrier())  # finds out the tuning
        yield made


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def clusters(request):
    with clusters_of_all_sizes(request.param) as made:
        yield made


values = settings(max_examples=settings.default.max_examples * 3 // 5)
"""Of tests that run over all media: each starts threads for every example."""


REDUCTIONS = st.sampled_from([(op, dtype) for op in OPS for dtype in DTYPES if meaningful(op, dtype)])


@values
@given(
    size=st.integers(1, 5), reduction=REDUCTIONS, shape=SHAPES, form=st.sampled_from(FORMS),
    seed=st.integers(0, 99), root=st.integers(0, 4), use_out=st.booleans(),
)  # fmt: skip
def test_reductions(clusters: dict[int, Cluster], size, reduction, shape, form, seed, root, use_out):
    op, dtype = reduction
    root %= size
    arrays = [random_array(dtype, shape, seed * 10 + rank) for rank in range(size)]
    expected = reduced(arrays, op)

    def body(communicator):
        group, x = communicator.world, in_form(arrays[communicator.rank], form)
        out = np.zeros(expected.shape, expected.dtype) if use_out else None
        total = group.all_reduce(x, op, out=out)
        assert out is None or total is out
        rows = np.stack([x] * group.size)
        columns = np.concatenate([x] * group.size, axis=-1) if x.ndim else None
        return (
            total.copy(),
            group.reduce(x, op, root, out=out if group.rank == root else None),
            group.reduce_scatter(rows, op),
            None if columns is None else group.reduce_scatter(columns, op, axis=-1),
        )

    for rank, (total, at_root, row, block) in enumerate(clusters[size].all(body)):
        same(total, expected)
        same(row, expected)
        if block is not None:
            same(block, expected)
        if rank == root:
            same(at_root, expected)
        else:
            assert at_root is None


@values
@given(
    size=st.integers(1, 5), dtype=st.sampled_from(ALL_DTYPES), shape=SHAPES, form=st.sampled_from(FORMS),
    seed=st.integers(0, 99), root=st.integers(0, 4), data=st.data(),
)  # fmt: skip
def test_movements(clusters: dict[int, Cluster], size, dtype, shape, form, seed, root, data):
    root %= size
    arrays = [random_array(dtype, shape, seed * 10 + rank) for rank in range(size)]
    rows = [random_array(dtype, (size, *shape), seed * 10 + rank) for rank in range(size)]
    axis = data.draw(st.integers(-len(shape), len(shape) - 1)) if shape else None
    targets = data.draw(st.lists(st.integers(0, size - 1), unique=True))
    pairs = list(enumerate(targets))

    def body(communicator):
        group, rank = communicator.world, communicator.rank
        x, many = in_form(arrays[rank], form), in_form(rows[rank], form)
        like = np.zeros(shape, dtype)
        results = {
            "broadcast": group.broadcast(x if rank == root else like, root),
            "all_gather": group.all_gather(x),
            "joined": None if axis is None else group.all_gather(x, axis=axis),
            "gather": group.gather(x, root),
            "scatter": group.scatter(many if rank == root else like, root),
            "all_to_all": group.all_to_all(many),
            "permute": group.permute(x, pairs),
        }
        if group.size > 1:
            sent = group.send(x, (rank + 1) % group.size, async_op=True)
            results["recv"] = group.recv(like, (rank - 1) % group.size)
            sent.result(60)
        return results

    for rank, results in enumerate(clusters[size].all(body)):
        same(results["broadcast"], arrays[root])
        same(results["all_gather"], np.stack(arrays))
        if axis is not None:
            same(results["joined"], np.concatenate(arrays, axis=axis))
        if rank == root:
            same(results["gather"], np.stack(arrays))
        else:
            assert results["gather"] is None
        same(results["scatter"], rows[root][rank, ...])
        same(results["all_to_all"], np.stack([rows[other][rank, ...] for other in range(size)]))
        origin = {target: source for source, target in pairs}
        same(results["permute"], arrays[origin[rank]] if rank in origin else np.zeros(shape, dtype))
        if size > 1:
            same(results["recv"], arrays[(rank - 1) % size])


@values
@given(size=st.integers(1, 5), count=st.integers(0, 100), dtype=st.sampled_from(["i1", "f4", "f8", "?"]),
       op=st.sampled_from(["sum", "max", "mean", "any"]), seed=st.integers(0, 9))  # fmt: skip
def test_in_place(clusters, size, count, dtype, op, seed):
    """`out` may be the input itself, whatever way the elements take."""
    arrays = [random_array(np.dtype(dtype), (size * count,), seed * 10 + rank) for rank in range(size)]
    total = reduced(arrays, op)
    pairs = [(rank, (rank + 1) % size) for rank in range(size)]

    def body(communicator):
        group, rank = communicator.world, communicator.rank
        results = []
        if total.dtype == arrays[rank].dtype:
            x = arrays[rank].copy()
            assert group.all_reduce(x, op, out=x) is x
            y = arrays[rank].copy()
            group.reduce(y, op, 0, out=y if rank == 0 else None)
            results += [(x, total)] + ([(y, total)] if rank == 0 else [])
        for call, expected in [
            (lambda z: group.broadcast(z, size - 1, out=z), arrays[size - 1]),
            (lambda z: group.permute(z, pairs, out=z), arrays[rank - 1]),
            (lambda z: group.all_to_all(z, out=z),
             np.concatenate([a.reshape(size, count)[rank] for a in arrays])),
        ]:  # fmt: skip
            z = arrays[rank].copy()
            assert call(z) is z
            results.append((z, expected))
        return results

    for results in clusters[size].all(body):
        for actual, expected in results:
            same(actual, expected)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *(("sum", dtype) for dtype in ("f4", "f8", "F", "D", np.float16, ml_dtypes.bfloat16)),
        *((op, dtype) for op in ("prod", "mean") for dtype in ("f4", "D", ml_dtypes.bfloat16)),
    ],
)
def test_the_same_bits_whatever_the_way(monkeypatch, clusters, dtype, op):
    """On all ranks, for every algorithm and size of message."""
    arrays = [random_array(np.dtype(dtype), (3, 1001), rank) * np.dtype(dtype).type(100) for rank in range(4)]

    def body(communicator, limit):
        monkeypatch.setattr(communicator, "tuning", replace(communicator.tuning, message_flat=limit))
        group = communicator.new_group(communicator.world.ranks, f"up to {limit}")
        group.barrier()
        return group.all_reduce(arrays[communicator.rank], op).tobytes()

    scattered = clusters[4].all(lambda communicator: body(communicator, 0))
    flat = clusters[4].all(lambda communicator: body(communicator, 1 << 30))
    assert len({*scattered, *flat}) == 1
    assert scattered[0] == reduced(arrays, op).tobytes()

    def by_parts(communicator):
        parts = np.array_split(arrays[communicator.rank], 7, axis=1)
        return np.concatenate([communicator.world.all_reduce(part, op) for part in parts], axis=1).tobytes()

    assert set(clusters[4].all(by_parts)) == {scattered[0]}

    def one_by_one(communicator):
        row = arrays[communicator.rank][0, :20]
        return [communicator.world.all_reduce(row[i : i + 1], op).tobytes() for i in range(20)]

    size = np.dtype(dtype).itemsize
    for single in clusters[4].all(one_by_one):
        assert b"".join(single) == scattered[0][: 20 * size]


def test_nan_wins_in_min_and_max_and_counts_as_true(clusters):
    columns = [np.array([np.nan, 1.0, 0.0], dtype) for dtype in ("f4",)]
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
        columns = [np.array([np.nan, 1, 0]).astype(dtype), np.array([1, np.nan, 0]).astype(dtype)]

        def body(communicator, columns=columns):
            x = columns[communicator.rank]
            return [communicator.world.all_reduce(x, op) for op in ("min", "max", "any", "all")]

        for low, high, some, every in clusters[2].all(body):
            for extreme in (low, high):
                assert np.isnan(extreme.astype(float)).tolist() == [True, True, False]
            assert some.tolist() == [True, True, False]
            assert every.tolist() == [True, True, False]


def test_numbers_that_are_none_give_no_warning(clusters):
    """Such as what memory holds that a plan has not been given values for yet."""
    x = np.array([0x7F800001, 0], np.uint32).view(np.float32)  # a signaling NaN, which counts as true
    for result in clusters[2].all(lambda communicator: communicator.world.all_reduce(x, "any")):
        assert result.tolist() == [True, False]


def test_large_arrays(clusters):
    """Larger than what is sent at once, in parts that are not equal."""
    arrays = [random_array(np.dtype("f4"), (300_007,), rank) for rank in range(3)]

    def body(communicator):
        group, x = communicator.world, arrays[communicator.rank]
        return [
            (group.all_reduce(x), reduced(arrays, "sum")),
            (group.broadcast(x, 1), arrays[1]),
            (group.all_gather(x), np.stack(arrays)),
            (group.all_to_all(np.stack([x, x, x])), np.stack(arrays)),
        ]

    for results in clusters[3].all(body):
        for actual, expected in results:
            same(actual, expected)


def test_array_likes_and_results_are_arrays(clusters):
    def body(communicator):
        group = communicator.world
        zero = group.all_reduce(3)
        assert isinstance(zero, np.ndarray)
        assert zero.shape == ()
        return [zero.item(), group.all_reduce([[1, 2], [3, 4]]).tolist(), group.broadcast(True).item()]

    assert clusters[3].all(body) == [[9, [[3, 6], [9, 12]], True]] * 3


def test_inputs_are_left_alone(clusters):
    def body(communicator):
        group, rank = communicator.world, communicator.rank
        x = np.full((3, 2), rank)
        x.flags.writeable = False
        group.all_reduce(x)
        group.broadcast(x, 1)
        group.all_to_all(x)
        group.scatter(x if rank == 0 else x[0], 0)
        result = group.permute(x, [])
        result += 1  # a result is the caller's to change
        return x.tolist()

    assert clusters[3].all(body) == [[[rank, rank]] * 3 for rank in range(3)]
