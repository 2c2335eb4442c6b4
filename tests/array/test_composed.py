# ruff: noqa: E501
"""Functions that are made of others equal NumPy's."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.array.test_operations import EXAMPLES, in_turn
from tests.array.worlds import WORLDS, Made, arrays, run, specs

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
}  # fmt: skip


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
