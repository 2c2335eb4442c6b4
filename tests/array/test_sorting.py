# ruff: noqa: E501
"""Sorting, sets and order statistics of dimensions that are cut equal NumPy's, and gather nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.array.test_operations import EXAMPLES, in_turn
from tests.array.worlds import WORLDS, Made, World, arrays, assert_same, run, specs, whole

import dmesh
from dmesh import Layout
from dmesh.arrays.ops.sorting import stable_argsort, stable_sort

FEW = settings(EXAMPLES, max_examples=15)
R = ("float64", "float32", "int64", "int32", "uint8")
ANY = (*R, "complex128", "bool")
LENGTHS = st.sampled_from([0, 1, 2, 3, 5, 8, 17, 64, 301])

ONE = {
    "sort": (np.sort, ANY), "stable argsort": (lambda a: np.argsort(a, kind="stable"), ANY),
    "argsort": (lambda a: np.take(a, np.argsort(a)), R), "partition": (lambda a: np.partition(a, 0)[:1] if a.size else a, R),
    "argpartition": (lambda a: a[np.argpartition(a, 0)[:1]] if a.size else a, R), "unique": (np.unique, ANY),
    "unique with all": (lambda a: np.unique(a, True, True, True), ANY), "unique_all": (np.unique_all, ANY),
    "unique_counts": (np.unique_counts, ANY), "unique_inverse": (np.unique_inverse, ANY),
    "unique_values": (lambda a: np.sort(np.unique_values(a)), R), "lexsort": (lambda a: np.lexsort((a * 3 % 7, a % 2)), R),
    "sort_complex": (np.sort_complex, ANY[:-1]), "distinct": (lambda a: np.unique(a, equal_nan=False), ("float64",)),
    "median": (lambda a: np.median(a) if a.size else a, R), "quantile": (lambda a: np.quantile(a, [0, 0.3, 1]) if a.size else a, R),
    "percentile": (lambda a: np.percentile(a, 70) if a.size else a, R), "nanmedian": (lambda a: np.nanmedian(a) if a.size else a, R),
    "nanpercentile": (lambda a: np.nanpercentile(a, [[20, 50]]) if a.size else a, R),
}  # fmt: skip
TWO = {
    "union1d": (np.union1d, ANY), "intersect1d": (np.intersect1d, ANY), "setdiff1d": (np.setdiff1d, ANY),
    "setxor1d": (np.setxor1d, ANY), "isin": (np.isin, ANY), "not isin": (lambda a, b: np.isin(a, b, invert=True), ANY),
    "intersect1d with places": (lambda a, b: np.intersect1d(a, b, return_indices=True), R),
    "setdiff1d of unique": (lambda a, b: np.setdiff1d(np.unique(a), np.unique(b), assume_unique=True), R),
    "searchsorted": (lambda a, b: np.searchsorted(np.sort(a), b), R),
    "searchsorted right": (lambda a, b: np.searchsorted(np.sort(a), b, "right"), R),
    "place": (lambda a, b: written(np.place, a, b), R), "putmask": (lambda a, b: written(np.putmask, a, b), R),
    "mask": (lambda a, b: written(lambda c, m, v: c.__setitem__(m, v[: int(m.sum())]), a, b), R),
    "put": (lambda a, b: written(lambda c, m, v: np.put(c, np.arange(len(c) // 2) * 2, v), a, b), R),
    "nonzero": (lambda a, b: written(lambda c, m, v: c.__setitem__(np.nonzero(m), 7), a, b), R),
}  # fmt: skip


def written(write, a, values):
    """Returns a copy that was written to where it is odd."""
    copy = a * 1
    if values.size and len(values) >= len(a):
        write(copy, a % 2 == 1, values)
    return copy


def with_nan(pick, made):
    if made.values.dtype.kind not in "fc" or made.partial or not pick(st.booleans()):
        return made
    values = made.values.copy()
    values[:: pick(st.sampled_from([1, 2, 3]))] = np.nan
    return made._replace(values=values)


@FEW
@given(data=st.data())
def test_arrays_of_one_dimension(data):
    world = data.draw(st.sampled_from(WORLDS))
    names = data.draw(st.lists(st.sampled_from(sorted(ONE)), min_size=5, max_size=5, unique=True))
    cases = []
    for name in names:
        function, dtypes = ONE[name]
        made = data.draw(arrays(world, [data.draw(LENGTHS)], dtypes))
        if name not in ("unique_inverse", "unique_all"):  # for NumPy, which NaN is which is not determined
            made = with_nan(data.draw, made)
        cases.append((name, function, [made]))
    run(world, in_turn, cases)


@FEW
@given(data=st.data())
def test_two_arrays(data):
    world = data.draw(st.sampled_from(WORLDS))
    names = data.draw(st.lists(st.sampled_from(sorted(TWO)), min_size=4, max_size=4, unique=True))
    cases = []
    for name in names:
        function, dtypes = TWO[name]
        dtype = data.draw(st.sampled_from(dtypes))
        pair = [data.draw(arrays(world, [data.draw(LENGTHS)], (dtype,))) for _ in range(2)]
        if name[:5] in ("inter", "setdi", "setxo", "union", "isin"):
            pair = [with_nan(data.draw, made) for made in pair]
        cases.append((name, function, pair))
    run(world, in_turn, cases)


METHODS = (
    "inverted_cdf", "averaged_inverted_cdf", "closest_observation", "interpolated_inverted_cdf", "hazen", "weibull", "linear",
    "median_unbiased", "normal_unbiased", "lower", "higher", "midpoint", "nearest",
)  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_quantiles_of_all_methods(method):
    q = np.linspace(0, 1, 13)
    cases = []
    for n in (1, 7, 24):
        values = np.sin(np.arange(n) * 7.0)
        holes = np.where(np.arange(n) % 3 == 1, np.nan, values)
        whole_numbers = np.arange(n) * 5 % n
        for data in (values, values.astype("float32"), holes, whole_numbers):
            made = Made(data, ("x",))
            cases += [
                ("quantile", lambda a: np.quantile(a, q, method=method), [made]),
                ("percentile", lambda a: np.percentile(a, 37, method=method), [made]),
                ("nanquantile", lambda a: np.nanquantile(a, [[0.1, 0.5]], method=method), [made]),
            ]
    run(World(2, 2, (4,)), in_turn, cases)


ALONG = {
    "sort": lambda a, axis: np.sort(a, axis), "argsort": lambda a, axis: np.argsort(a, axis, kind="stable"),
    "median": lambda a, axis: np.median(a, axis) if a.size else a, "quantile": lambda a, axis: np.quantile(a, [0.2, 1], axis) if a.size else a,
    "nanmedian": lambda a, axis: np.nanmedian(a, axis) if a.size else a,
}  # fmt: skip


@FEW
@given(data=st.data())
def test_a_dimension_of_several(data):
    world = data.draw(st.sampled_from([w for w in WORLDS if len(w.shape) > 1]))
    shape = [data.draw(st.sampled_from([0, 1, 2, 3, 5, 9])) for _ in range(data.draw(st.integers(2, 3)))]
    cases = []
    for name in data.draw(st.lists(st.sampled_from(sorted(ALONG)), min_size=2, max_size=3, unique=True)):
        axis = data.draw(st.integers(-len(shape), len(shape) - 1))
        made = with_nan(data.draw, data.draw(arrays(world, shape, R[:3])))
        cases.append((f"{name} along {axis}", lambda a, f=ALONG[name], axis=axis: f(a, axis), [made]))
    run(world, in_turn, cases)


@FEW
@given(data=st.data())
def test_distinct_rows(data):
    world = data.draw(st.sampled_from(WORLDS))
    shape = [data.draw(st.sampled_from([1, 2, 3, 5, 9])) for _ in range(data.draw(st.integers(2, 3)))]
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    made = data.draw(arrays(world, shape, ("int32", "float64", "bool", "complex128")))
    run(world, in_turn, [
        ("values", lambda a: np.unique(a, axis=axis), [made]),
        ("all", lambda a: np.unique(a, True, True, True, axis), [made]),
    ])  # fmt: skip


@pytest.mark.parametrize("kind", ["random", "equal", "sorted", "reversed", "few", "nan"])
def test_blocks_stay_as_the_layout_says_and_nothing_is_gathered(kind):
    rng = np.random.default_rng(3)
    n = 4001
    values = {
        "random": rng.standard_normal(n), "equal": np.ones(n), "sorted": np.arange(n, dtype=float),
        "reversed": np.arange(n, dtype=float)[::-1], "few": rng.integers(0, 3, n) * 1.0,
        "nan": np.where(rng.random(n) < 0.7, np.nan, 1.0),
    }[kind]  # fmt: skip

    def program(mesh):
        x = dmesh.copy_to_mesh(values, Layout(["x"], mesh), uneven=True)
        with dmesh.debug.bytes_moved() as moved:
            result = np.sort(x)
        assert result.layout == x.layout
        assert [b.shape for b in result.blocks] == list(result.spec.local_shapes)
        assert_same(result.full(), np.sort(values))
        assert_same(np.argsort(x).full(), np.argsort(values, kind="stable"))
        assert moved.total < values.nbytes
        return moved.by_kind

    run(World(2, 2, (4,)), program)


def test_text_dates_and_fields_are_sorted():
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 50, 101)
    pairs = np.zeros(101, [("a", int), ("b", float)])
    pairs["a"], pairs["b"] = numbers % 5, -numbers

    def program(mesh):
        for values in (numbers.astype("S3"), numbers.astype("datetime64[D]"), numbers.astype("U4")):
            x = dmesh.copy_to_mesh(values, Layout(["x"], mesh), uneven=True)
            assert_same(np.sort(x).full(), np.sort(values))
            assert_same(np.unique(x).full(), np.unique(values))
        x = dmesh.copy_to_mesh(pairs, Layout(["x"], mesh), uneven=True)
        assert_same(np.argsort(x, order=["b"]).full(), np.argsort(pairs, order=["b"], kind="stable"))

    run(World(2, 2, (4,)), program)


def test_a_small_table_is_read_and_a_large_one_counts_in_its_place():
    def program(mesh):
        table = dmesh.arange(1000.0, layout=Layout(["x"], mesh))
        found = np.searchsorted(table, 17.5)
        assert found.partial == ("x",)
        assert int(found) == 18
        values = dmesh.copy_to_mesh(np.array([3.0, -1.0, 2000.0]), Layout.replicated(mesh, 1))
        with dmesh.debug.bytes_moved() as moved:
            counts = np.searchsorted(table, values, "right")
        assert not moved.total
        assert whole(counts).tolist() == [4, 0, 1000]

    run(World(2, 2, (4,)), program)


@FEW
@given(data=st.data())
def test_masks_and_lists_take_arrays(data):
    world = data.draw(st.sampled_from(WORLDS))
    shape = tuple(data.draw(st.sampled_from([1, 2, 4, 5])) for _ in range(data.draw(st.integers(1, 3))))
    made = data.draw(arrays(world, shape, ("float64", "int32")))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    mask = Made(rng.random(shape) < 0.5, data.draw(specs(world, len(shape))))
    count = int(mask.values.sum())
    values = Made(np.arange(count) + 10, data.draw(specs(world, 1)))
    places = [rng.integers(0, n, 6) for n in shape]
    listed = Made(np.arange(6) + 20, data.draw(specs(world, 1)))

    def by_mask(a, m, v):
        b = a * 1
        b[m] = v
        return b

    def by_plain_mask(a, v):
        return by_mask(a, mask.values, v)

    def by_lists(a, v):
        return by_mask(a, tuple(places), v)

    run(world, in_turn, [
        ("mask", by_mask, [made, mask, values]), ("plain mask", by_plain_mask, [made, values]),
        ("lists", by_lists, [made, listed]), ("number", lambda a: by_mask(a, tuple(places), 7), [made]),
        ("nonzero", lambda a, m: by_mask(a, np.nonzero(m), 7), [made, mask]),
        ("apart", lambda a: by_mask(a, (*places[:-1], slice(None, None, -2)), 7), [made]),
        ("ends", lambda a: by_mask(a, (places[0], ..., places[-1]) if a.ndim > 1 else places[0], 7), [made]),
    ])  # fmt: skip


def test_a_number_is_written_by_lists_where_the_elements_are():
    def program(mesh):
        x = dmesh.zeros((5, 6), layout=Layout(["x", "y"], mesh))
        rows, columns = np.array([0, 4, 4, 2]), np.array([5, 0, 0, 3])
        with dmesh.debug.bytes_moved() as moved:
            x[rows, columns] = 7
        assert not moved.total
        expected = np.zeros((5, 6))
        expected[rows, columns] = 7
        assert_same(x.full(), expected)
        with pytest.raises(ValueError, match="could not be broadcast"):
            x[rows, columns] = dmesh.zeros((4, 1), layout=Layout.replicated(mesh, 2))

    run(World(2, 2, (2, 2)), program)


def test_a_mask_and_values_of_another_count_are_refused():
    def program(mesh):
        x = dmesh.arange(9.0, layout=Layout(["x"], mesh))
        with pytest.raises(ValueError, match="cannot assign 9 input values to the 4 output values"):
            x[x > 4] = x
        assert_same(x.full(), np.arange(9.0))

    run(World(2, 2, (4,)), program)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "u4", "i1", "?", "c16", "U3"])
def test_sorts_of_blocks_are_stable_ones(dtype):
    rng = np.random.default_rng(0)
    for shape in ((0,), (1,), (300,), (3, 40), (2, 3, 7)):
        x = rng.integers(-3, 4, shape).astype(dtype)
        if x.dtype.kind == "f":
            for value in (np.nan, -0.0, -np.inf):
                x[rng.random(shape) < 0.2] = value
        for axis in range(x.ndim):
            found, expected = stable_sort(x, axis), np.sort(x, axis, kind="stable")
            np.testing.assert_array_equal(found, expected)
            if x.dtype.kind == "f":
                np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(expected[found == 0]))
            np.testing.assert_array_equal(stable_argsort(x, axis), np.argsort(x, axis, kind="stable"))
