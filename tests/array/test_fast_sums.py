"""Sums of large blocks: as accurate as NumPy's, with its zeros, infinities, NaN and warnings."""

import math

import numpy as np
import pytest
from tests.array.worlds import WORLDS, run

import dmesh
from dmesh.arrays.dispatch.reduction import reduce_block

ONE, TWO = WORLDS[0], WORLDS[3]


@pytest.fixture(params=["auto", "0"], ids=["native", "without the native core"], autouse=True)
def _native(request, monkeypatch):
    monkeypatch.setenv("DMESH_NATIVE", request.param)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("length", [1 << 16, 100_003])
def test_a_large_sum_is_as_accurate_as_numpys(dtype, length):
    rng, ours, numpys = np.random.default_rng(length), [], []
    for _ in range(20):
        values = rng.random(length).astype(dtype)
        exact = math.fsum(values)
        ours.append(float(reduce_block(np.add, values, (0,), None, False)) - exact)
        numpys.append(float(values.sum()) - exact)
    assert np.std(ours) + abs(np.mean(ours)) <= 2 * max(np.std(numpys), np.spacing(values.sum()) / 2)


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4", "c16"])
@pytest.mark.parametrize("dims", [(0, 1, 2), (2,), (1, 2), (0,), (1,), ()])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("keepdims", [False, True])
def test_sums_along_any_dimensions_equal_numpys(dtype, dims, order, keepdims):
    values = np.asarray(np.random.default_rng(0).integers(-9, 10, (3, 11, 9001)), dtype, order=order)
    found = reduce_block(np.add, values, dims, None, keepdims)
    expected = np.add.reduce(values, axis=dims, keepdims=keepdims)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    assert np.shape(found) == np.shape(expected)


def test_sums_of_float16_are_rounded_once():
    values = np.random.default_rng(0).random((5, 40_001)).astype("f2")
    exact = np.array([math.fsum(row.tolist()) for row in values])
    for dtype in (None, "f4", "f8"):
        found = reduce_block(np.add, values, (1,), dtype, False)
        assert found.dtype == np.dtype(dtype or "f2")
        assert (
            abs(found - exact) <= abs(np.spacing(exact.astype(found.dtype))) * (1 if dtype is None else 20)
        ).all()


@pytest.mark.parametrize("value", [np.inf, 60_000])
def test_an_infinite_sum_of_float16_is_numpys(value):
    values = np.zeros((3, 50_000), "f2")
    values[1, :2] = value
    with np.errstate(over="ignore"):
        found, expected = reduce_block(np.add, values, (1,), None, False), np.add.reduce(values, axis=1)
    np.testing.assert_array_equal(found, expected)
    with np.errstate(over="raise"):
        if value == np.inf:
            reduce_block(np.add, values, (1,), None, False)
        else:
            with pytest.raises(FloatingPointError):
                reduce_block(np.add, values, (1,), None, False)


def test_a_narrower_dtype_is_numpys():
    values = np.random.default_rng(0).random(70_001) * 1e30
    values[:2] = 1e300, -1e300
    with np.errstate(all="ignore"):
        found = reduce_block(np.add, values, (0,), "f4", False)
        expected = np.add.reduce(values, dtype="f4")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_sums_do_not_depend_on_the_address():
    values = np.random.default_rng(3).normal(size=80_001)
    sums = {float(reduce_block(np.add, values, (0,), None, False))}
    for offset in (8, 16, 40):
        moved = np.empty(values.nbytes + offset, np.uint8)[offset:].view("f8")
        moved[...] = values
        sums.add(float(reduce_block(np.add, moved, (0,), None, False)))
    assert len(sums) == 1


@pytest.mark.parametrize("row", ["zeros", "minus zeros", "nan", "inf", "minus inf", "cancels"])
def test_special_rows_are_numpys(row):
    values = np.ones((4, 70_001))
    values[2] = {"zeros": 0.0, "minus zeros": -0.0}.get(row, 1.0)
    values[2, 5] = {"nan": np.nan, "inf": np.inf, "minus inf": -np.inf, "cancels": -70_000}.get(
        row, values[2, 5]
    )
    found, expected = reduce_block(np.add, values, (1,), None, False), values.sum(axis=1)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("values", [[np.inf, -np.inf], [1e308, 1e308]], ids=["invalid", "overflow"])
def test_numpys_warnings_are_given(values):
    block = np.zeros(70_001)
    block[:2] = values
    with pytest.warns(RuntimeWarning):
        reduce_block(np.add, block, (0,), None, False)
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        reduce_block(np.add, block, (0,), None, False)


@pytest.mark.parametrize("world", [ONE, TWO], ids=["one client", "two clients"])
def test_sums_and_contracted_products_of_large_arrays(world):
    def program(mesh):
        values = np.random.default_rng(1).random((600, 1000))
        cut, columns = dmesh.Layout(["x", "unsharded"], mesh), dmesh.Layout(["unsharded", "x"], mesh)
        x = dmesh.copy_to_mesh(values, cut)
        for function in (np.sum, np.mean, np.var):
            np.testing.assert_allclose(function(x).full(), function(values), rtol=1e-13)
            np.testing.assert_allclose(function(x, axis=1).full(), function(values, axis=1), rtol=1e-13)
        left, right = dmesh.copy_to_mesh(values, columns), dmesh.copy_to_mesh(values.T.copy(), cut)
        for layout in (cut, columns):
            product = dmesh.relayout(left @ right, layout)
            np.testing.assert_allclose(product.full(), values @ values.T, rtol=1e-12)

    run(world, program)
