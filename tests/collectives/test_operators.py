"""Scans, minimum and maximum with location, and reductions of the user's own, against NumPy."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectives.arrays import DTYPES, FORMS, in_form, meaningful, random_array, reduced, same
from tests.collectives.ranks import Cluster, cluster
from tests.collectives.test_values import EARLY, REDUCTIONS, SHAPES, clusters_of_all_sizes, values

from dmesh.collectives import Op
from dmesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTypeError,
    CollectiveValueError,
    PeerLostError,
)

WAYS = {
    "messages": {},
    "native": {"shm": ("native",)},
    "mpi": {"shm": ("no",), "mpi": True},
    "dedicated": {"shm": ("dedicated",), "tuning": (replace(EARLY, piece=64, streams=3),)},
}
SIZES = st.integers(1, 5)
SEEDS = st.integers(0, 99)


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def clusters(request):
    with clusters_of_all_sizes(request.param) as made:
        yield made


@values
@given(
    size=SIZES, reduction=REDUCTIONS, shape=SHAPES, form=st.sampled_from(FORMS), seed=SEEDS,
    use=st.sampled_from(["", "out", "async"]),
)  # fmt: skip
def test_scans(clusters: dict[int, Cluster], size, reduction, shape, form, seed, use):
    op, dtype = reduction
    arrays = [random_array(dtype, shape, seed * 10 + rank) for rank in range(size)]
    prefixes = [reduced(arrays[: rank + 1], op) for rank in range(size)]

    def body(communicator):
        group, x = communicator.world, in_form(arrays[communicator.rank], form)
        if use == "async":
            futures = [call(x, op, async_op=True) for call in (group.scan, group.exscan)]
            return [future.result(60) for future in futures]
        outs = [np.zeros(prefixes[0].shape, prefixes[0].dtype) if use else None for _ in range(2)]
        results = [group.scan(x, op, out=outs[0]), group.exscan(x, op, out=outs[1])]
        assert not use or results[0] is outs[0]
        assert not use or results[1] is (outs[1] if results[1] is not None else None)
        return results

    for rank, (inclusive, exclusive) in enumerate(clusters[size].all(body)):
        same(inclusive, prefixes[rank])
        if rank:
            same(exclusive, prefixes[rank - 1])
        elif op in ("min", "max", "mean"):
            assert exclusive is None
        else:
            identity = {"prod": 1, "all": 1, "bitwise_and": -1}.get(op, 0)
            same(exclusive, np.full(shape, identity).astype(prefixes[0].dtype))


@values
@given(size=SIZES, count=st.integers(1, 100), op=st.sampled_from(["sum", "max", "mean"]), seed=SEEDS)
def test_scans_in_place(clusters, size, count, op, seed):
    arrays = [random_array(np.dtype("f4"), (count,), seed * 10 + rank) for rank in range(size)]

    def body(communicator):
        group, found = communicator.world, [arrays[communicator.rank].copy() for _ in range(2)]
        assert group.scan(found[0], op, out=found[0]) is found[0]
        group.exscan(found[1], op, out=found[1])
        return found

    for rank, (inclusive, exclusive) in enumerate(clusters[size].all(body)):
        same(inclusive, reduced(arrays[: rank + 1], op))
        if rank:
            same(exclusive, reduced(arrays[:rank], op))
        else:
            same(exclusive, np.zeros_like(arrays[0]) if op == "sum" else arrays[0])


ORDERED = st.sampled_from([dtype for dtype in DTYPES if meaningful("min", dtype)])


@values
@given(
    size=SIZES, dtype=ORDERED, shape=SHAPES, form=st.sampled_from(FORMS), seed=SEEDS, root=st.integers(0, 4),
    is_min=st.booleans(),
)  # fmt: skip
def test_minimum_and_maximum_with_location(clusters, size, dtype, shape, form, seed, root, is_min):
    root %= size
    arrays = [random_array(dtype, shape, seed * 10 + rank) for rank in range(size)]
    if dtype.kind == "f" and arrays[-1].size:
        arrays[-1].flat[0] = np.nan  # wins
    if dtype.kind in "iu" or dtype.type.__module__ == "ml_dtypes":
        arrays = [np.asarray(array.astype(np.int16) % 2).astype(dtype) for array in arrays]  # some equal
    expected = np.array(arrays[0])
    best = np.zeros(shape, np.int64)
    for rank, array in enumerate(arrays):
        for at in np.ndindex(shape):
            new, old = array[at], expected[at]
            is_better = (new < old if is_min else new > old) or (new != new and old == old)
            if is_better and old == old:
                expected[at], best[at] = new, rank

    def body(communicator):
        group, x = communicator.world, in_form(arrays[communicator.rank], form)
        op = "min_location" if is_min else "max_location"
        pairs = np.zeros(shape, [("cost", dtype), ("item", "i4")])
        pairs["cost"], pairs["item"] = arrays[group.rank], 100 - group.rank
        return (
            group.all_reduce(x, op),
            group.scan(x, op),
            group.reduce(x, op, root),
            group.reduce_scatter(np.stack([x] * size), op),
            group.all_reduce(pairs, op),
        )

    for rank, (total, prefix, at_root, row, pairs) in enumerate(clusters[size].all(body)):
        for result in (
            total,
            row,
            *((prefix,) if rank == size - 1 else ()),
            *((at_root,) if rank == root else ()),
        ):
            same(np.array(result["value"]), expected)
            same(np.array(result["rank"]), best)
        assert (at_root is None) == (rank != root)
        same(np.array(pairs["cost"]), expected)
        for at in np.ndindex(shape):  # the smallest item among equals, that of the highest rank
            alike = [r for r in range(size) if arrays[r][at] == expected[at] or expected[at] != expected[at]]
            alike = [r for r in alike if (arrays[r][at] != arrays[r][at]) == (expected[at] != expected[at])]
            assert pairs["item"][at] == 100 - alike[-1]


UFUNCS = {
    np.hypot: ["f4", "f8", "f2"], np.logaddexp: ["f8"], np.gcd: ["i4", "u8"], np.fmax: ["f4", "i2"],
    np.add: ["f2", "f8", "i8", "?"], np.subtract: ["f8", "i4"], np.power: ["u1"], np.maximum: ["f4", "m8[s]"],
}  # fmt: skip
CASES = st.sampled_from([(ufunc, np.dtype(dtype)) for ufunc, dtypes in UFUNCS.items() for dtype in dtypes])


@values
@given(size=SIZES, case=CASES, shape=SHAPES, form=st.sampled_from(FORMS), seed=SEEDS)
def test_ufuncs(clusters, size, case, shape, form, seed):
    """Folded in the order of ranks, also where that makes a difference: the bits of a fold by hand."""
    ufunc, dtype = case
    arrays = [random_array(dtype, shape, seed * 10 + rank) for rank in range(size)]
    with np.errstate(all="ignore"):
        prefixes = [np.asarray(functools.reduce(ufunc, arrays[: rank + 1])) for rank in range(size)]

    def body(communicator):
        group, x = communicator.world, in_form(arrays[communicator.rank], form)
        return (
            group.all_reduce(x, ufunc),
            group.reduce_scatter(np.stack([x] * size), ufunc),
            group.scan(x, ufunc),
            group.exscan(x, ufunc),
        )

    for rank, (total, row, inclusive, exclusive) in enumerate(clusters[size].all(body)):
        same(total, prefixes[-1])
        same(row, prefixes[-1])
        same(inclusive, prefixes[rank])
        if rank:
            same(exclusive, prefixes[rank - 1])
        else:
            assert (exclusive is None) == (ufunc.identity is None)


def composed(first, second):
    """Of permutations: the order matters, and so does the whole array."""
    return first[second]


def affine(first, second):
    """Of maps x -> ax + b, elementwise over structures; may overwrite its first argument."""
    first["b"] = second["a"] * first["b"] + second["b"]
    first["a"] *= second["a"]
    return first


MAP = np.dtype([("a", "i8"), ("b", "i8")])


@values
@given(size=SIZES, count=st.integers(1, 40), seed=SEEDS, root=st.integers(0, 4), in_place=st.booleans())
def test_functions(clusters, size, count, seed, root, in_place):
    root %= size
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(count) for _ in range(size)]
    maps = [np.zeros((size, count), MAP) for _ in range(size)]
    for made in maps:
        made["a"], made["b"] = generator.integers(-3, 4, (2, size, count))
    folded_orders = [functools.reduce(composed, orders[: rank + 1]) for rank in range(size)]
    folded_maps = functools.reduce(affine, [maps[0].copy(), *maps[1:]])

    def body(communicator):
        group, x = communicator.world, orders[communicator.rank].copy()
        product = Op(composed, identity=np.arange(count))
        results = [
            group.scan(x, product),
            group.exscan(x, product),
            group.reduce(x, composed, root),
            group.reduce_scatter(maps[group.rank], affine),
            group.reduce_scatter(maps[group.rank], Op(affine, elementwise=True)),
            group.all_reduce(maps[group.rank], Op(affine, elementwise=True)),
            group.all_reduce(x, product, out=x if in_place else None),
        ]
        assert in_place or (x == orders[group.rank]).all()
        return results

    before = [maps[rank].copy() for rank in range(size)]
    for rank, results in enumerate(clusters[size].all(body)):
        inclusive, exclusive, at_root, row, pieces, whole, total = results
        same(inclusive, folded_orders[rank])
        same(exclusive, folded_orders[rank - 1] if rank else np.arange(count))
        assert (at_root is None) == (rank != root)
        if rank == root:
            same(at_root, folded_orders[-1])
        same(row, folded_maps[rank])
        same(pieces, folded_maps[rank])
        same(whole, folded_maps)
        same(total, folded_orders[-1])
        same(maps[rank], before[rank])


def test_what_cannot_be_reduced_is_refused_before_anything_is_sent():
    with cluster(2) as ranks:

        def body(communicator):
            world, x = communicator.world, np.ones(4)
            for op, error, match in [
                (
                    np.less,
                    CollectiveTypeError,
                    "the ufunc less cannot reduce arrays of dtype float64: it gives bool",
                ),
                (np.modf, CollectiveTypeError, "the ufunc modf cannot reduce"),
                (
                    np.bitwise_or,
                    CollectiveTypeError,
                    "the ufunc bitwise_or cannot reduce arrays of dtype float64",
                ),
                (lambda a, b: a, CollectiveValueError, r"compare operations by name.*Op\(function, name="),
                (
                    7,
                    CollectiveValueError,
                    "unknown reduction 7; it must be one of sum, .*max_location, a ufunc",
                ),
                ("least", CollectiveValueError, "unknown reduction 'least'"),
                # Of two arrays, `sum` would add the elements of one to the other.
                *((function, CollectiveTypeError, 'pass "sum"') for function in (sum, np.sum)),
                *((function, CollectiveTypeError, 'pass "max"') for function in (max, np.max)),
                (np.mean, CollectiveTypeError, 'mean is no function of two arrays.*pass "mean"'),
            ]:
                with pytest.raises(error, match=match):
                    world.all_reduce(x, op)
            with pytest.raises(CollectiveTypeError, match="'min_location' needs numbers, or structures"):
                world.all_reduce(np.zeros(3, [("a", "f4"), ("b", "f4")]), "min_location")
            with pytest.raises(CollectiveTypeError, match="'min' has no meaning for arrays of dtype <U3"):
                world.all_reduce(np.array(["abc"]), "max_location")
            with pytest.raises(CollectiveValueError, match="along an axis needs an operation"):
                world.reduce_scatter(np.ones((2, 2)), composed, axis=0)
            with pytest.raises(CollectiveValueError, match="identity of op 'composed' does not fit"):
                world.exscan(x, Op(composed, identity=np.arange(3)), timeout=5) if world.rank == 0 else 1 / 0
            with pytest.raises(CollectiveValueError, match="unknown reduction"):
                world.all_reduce(x, np.add, compress="float16")
            with pytest.raises(CollectiveTypeError, match="needs a function of two arrays, not int"):
                Op(3)
            with pytest.raises(CollectiveTypeError, match='pass "sum"'):
                Op(sum, name="total")

        results = ranks.run(body)
        assert results[0] is None
        assert isinstance(results[1], ZeroDivisionError)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_must_name_the_same_operation(way):
    with cluster(3, **WAYS[way]) as ranks:

        def body(communicator):
            communicator.world.barrier()
            name = "mine" if communicator.rank else "yours"
            return communicator.world.all_reduce(np.ones(2), Op(composed, name=name))

        for error in ranks.run(body):
            assert isinstance(error, CollectiveMismatchError)
            assert "all_reduce(op 'mine', float64, shape (2,))" in str(error)
            assert "all_reduce(op 'yours', float64, shape (2,))" in str(error)


@pytest.mark.parametrize("kind", ["all_reduce", "scan", "reduce_scatter"])
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_of_the_function_fails_the_call_on_all_ranks(way, kind):
    def broken(first, second):
        raise LookupError("no such thing")

    with cluster(3, **WAYS[way]) as ranks:
        errors = ranks.run(lambda c: getattr(c.world, kind)(np.ones((3, 4)), broken))
        assert any(isinstance(error, LookupError) for error in errors)
        for error in errors:
            assert "no such thing" in str(error)
            assert isinstance(error, CollectiveError | LookupError)


@pytest.mark.parametrize("kind", ["scan", "exscan", "all_reduce"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_dies_is_an_error_on_all_others(way, kind):
    with cluster(4, **WAYS[way]) as ranks:
        ranks.all(lambda c: c.world.barrier())

        def body(communicator):
            if communicator.rank == 1:
                return ranks.network.kill(1)
            return getattr(communicator.world, kind)(np.ones(1 << 16), composed)

        for rank, error in enumerate(ranks.run(body)):
            assert rank == 1 or (isinstance(error, PeerLostError) and error.rank == 1)


def test_what_a_function_returns_is_checked():
    with cluster(2) as ranks:
        for function in (np.dot, lambda a, b: a > b, lambda a, b: None):
            communicators = lambda c: c.new_group([0, 1]).all_reduce(np.ones(3), Op(function, name="f"))  # noqa: B023, E731
            errors = ranks.run(communicators)
            assert all("the function of op 'f' returned an array of" in str(error) for error in errors)


def test_a_function_may_not_change_what_it_is_given_of_others():
    def change(first, second):
        second[0] = 1
        return first

    with cluster(2) as ranks:
        errors = ranks.run(lambda c: c.world.all_reduce(np.zeros(3), change))
        assert all("read-only" in str(error) for error in errors)
