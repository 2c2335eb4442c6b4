# ruff: noqa: E501
"""Functions that are made of others equal NumPy's."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.array.test_operations import EXAMPLES, in_turn
from tests.array.worlds import WORLDS, Made, World, arrays, run, specs

import dmesh
from dmesh import Layout

FEW = settings(EXAMPLES, max_examples=10)
N = ("float64", "float32", "int64", "int32", "complex128")
R = N[:4]


def filled(a):
    b = a * 1
    np.fill_diagonal(b, 7)
    return b


def put(a, indices, values, axis):
    b = a * 1
    np.put_along_axis(b, indices, values, axis)
    return b


ONE = {
    "gradient": (lambda a: np.gradient(a) if min(a.shape) > 1 else a, N), "gradient of steps": (lambda a: np.gradient(a, 0.5, edge_order=2) if min(a.shape) > 2 else a, R),
    "gradient along": (lambda a: np.gradient(a, 2, axis=-1) if a.shape[-1] > 1 else a, R), "polyval": (lambda a: np.polyval([1, -2, 3], a), N),
    "meshgrid": (lambda a: np.meshgrid(a.ravel(), a.ravel()[:2]), N), "meshgrid ij": (lambda a: np.meshgrid(a.ravel(), a.ravel()[:2], indexing="ij", sparse=True), N),
    "resize": (lambda a: np.resize(a, (7, 3)) if a.size else a, N), "resize less": (lambda a: np.resize(a, 2) if a.size > 1 else a, N),
    "unravel_index": (lambda a: np.unravel_index(abs(a), (4, 3)), ("int64", "int32")), "cross": (lambda a: np.cross(np.stack([a, a * 2, a + 1], -1), np.stack([a, a, a - 1], -1)), N),
    "cross along": (lambda a: np.cross(np.stack([a, a * 2, a + 1]), np.stack([a, a, a - 1]), axis=0), N), "fill_diagonal": (lambda a: filled(a) if a.ndim == 2 else a, N),
    "tril_indices_from": (lambda a: np.tril_indices_from(a, 1) if a.ndim == 2 else a, N), "triu_indices_from": (lambda a: np.triu_indices_from(a) if a.ndim == 2 else a, N),
    "diag_indices_from": (lambda a: np.diag_indices_from(np.concatenate([a] * a.shape[1])[: a.shape[1]]) if a.ndim == 2 else a, N),
    "choose": (lambda a: np.choose(a % 3, [a, a * 2, a + 100]), ("int64", "int32")), "choose clipped": (lambda a: np.choose(a, [a, a * 2], mode="clip"), ("int64", "int32")),
    "ravel_multi_index": (lambda a: np.ravel_multi_index((a % 4, a % 3), (4, 3)), ("int64", "int32")),
    "ravel_multi_index wrapped": (lambda a: np.ravel_multi_index((a, a), (4, 3), mode=("wrap", "clip")), ("int64", "int32")),
    "histogram_bin_edges": (lambda a: np.histogram_bin_edges(a, 4), R), "histogram2d": (lambda a: np.histogram2d(a.ravel(), (a * 2).ravel(), (3, [-9, 0, 2, 9])), R),
    "histogramdd": (lambda a: np.histogramdd(np.stack([a.ravel(), a.ravel() * 2], 1), 3, [(-5, 5), (-3, 4)]), R), "cov": (lambda a: np.cov(a.ravel()) if a.size > 1 else a, N),
    "insert": (lambda a: np.insert(a, 1, 7, 0), N), "insert flat": (lambda a: np.insert(a, [0, -1, 0], a.ravel()[:1]), N),
    "insert rows": (lambda a: np.insert(a, 0, a.T, -1) if a.ndim == 2 else a, N), "insert many": (lambda a: np.insert(a, slice(0, 1), a[:1], 0), N),
    "block": (lambda a: np.block([[a, a * 2], [a, a]]) if a.ndim == 2 else np.block([a, a]), N), "block of rows": (lambda a: np.block([[a], [a]]), N),
}  # fmt: skip


@FEW
@given(data=st.data())
def test_convolutions(data):
    world = data.draw(st.sampled_from(WORLDS))
    mode = data.draw(st.sampled_from(["full", "same", "valid"]))
    lengths = st.sampled_from([1, 2, 3, 5, 8, 13])
    x, y = (data.draw(arrays(world, [data.draw(lengths)], N)) for _ in range(2))
    run(world, in_turn, [
        ("convolve", lambda a, b: np.convolve(a, b, mode), [x, y]),
        ("correlate", lambda a, b: np.correlate(a, b, mode), [x, y]),
        ("smoothed", lambda a: np.convolve(a, [1, 2.5, -1], mode), [x]),
        ("found", lambda a: np.correlate(a, np.array([1, 2j]), mode), [x]),
    ])  # fmt: skip


def test_a_polynomial_is_fitted():
    x = np.linspace(-1, 2, 101)
    y = 3 - x + 0.5 * x**3 + np.sin(50 * x)

    def program(mesh):
        rows = Layout([mesh.dim_names[0]], mesh)
        points, values = (dmesh.copy_to_mesh(one, rows, uneven=True) for one in (x, y))
        weights = dmesh.copy_to_mesh(x + 2, rows, uneven=True)
        return np.polyfit(points, values, 3).full(), np.polyfit(points, values, 2, w=weights).full()

    for found, weighted in run(World(2, 2, (2, 2)), program):
        np.testing.assert_allclose(found, np.polyfit(x, y, 3), rtol=1e-10)
        np.testing.assert_allclose(weighted, np.polyfit(x, y, 2, w=x + 2), rtol=1e-10)


@FEW
@given(data=st.data())
def test_functions_of_one_array(data):
    world = data.draw(st.sampled_from(WORLDS))
    cases = []
    for name in data.draw(st.lists(st.sampled_from(sorted(ONE)), min_size=4, max_size=4, unique=True)):
        function, dtypes = ONE[name]
        shape = [data.draw(st.sampled_from([1, 2, 3, 5, 8])) for _ in range(data.draw(st.integers(1, 2)))]
        cases.append((name, function, [data.draw(arrays(world, shape, dtypes))]))
    run(world, in_turn, cases)


@FEW
@given(data=st.data())
def test_writing_along_a_dimension(data):
    world = data.draw(st.sampled_from(WORLDS))
    shape = [data.draw(st.sampled_from([1, 2, 5])) for _ in range(data.draw(st.integers(1, 3)))]
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    made = data.draw(arrays(world, shape, R))
    order = np.argsort(np.random.default_rng(data.draw(st.integers(0, 99))).random(shape), axis)
    places = Made(np.take(order, [0], axis), data.draw(specs(world, len(shape))))
    values = Made(places.values * 3 + 10, data.draw(specs(world, len(shape))))
    run(world, in_turn, [
        ("array", lambda a, i, v: put(a, i, v, axis), [made, places, values]),
        ("number", lambda a, i: put(a, i, 7, axis), [made, places]),
    ])  # fmt: skip
