"""The native sums of rows are within NumPy's error bound, and do not depend on CPU or address."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native.library import NAMES, Kernels

pytestmark = pytest.mark.slow

dtypes = pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])


def bound(length: int, dtype: np.dtype[np.floating]) -> float:
    """How far NumPy's pairwise sum may be from the exact one, by the sum of all magnitudes.

    Blocks of 128 elements have 8 accumulators: an element takes part in 15 additions, 3 more for the
    accumulators, and one for each level of pairs of blocks.
    """
    additions = 18 + math.ceil(math.log2(max(length, 128) / 128))
    unit = float(np.finfo(dtype).eps) / 2
    return additions * unit / (1 - additions * unit)


@dtypes
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3),
    length=st.integers(0, 300) | st.integers(900, 1200) | st.integers(5000, 40_000),
    spread=st.integers(0, 6),
    seed=st.integers(0, 2**32),
)
def test_errors_are_within_numpys_bound(
    kernels: Kernels, dtype: str, rows: int, length: int, spread: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    scale = np.exp2(generator.integers(-spread, spread + 1, (rows, length)))
    matrix = (generator.normal(size=(rows, length)) * scale).astype(dtype)
    sums = kernels.row_sums(matrix)
    assert sums is not None
    for row, found in zip(matrix, sums, strict=True):
        magnitude = math.fsum(abs(float(x)) for x in row)
        assert abs(float(found) - math.fsum(row.tolist())) <= bound(length, sums.dtype) * magnitude


@dtypes
@given(length=st.integers(0, 9000), offset=st.integers(0, 70), seed=st.integers(0, 2**32))
def test_bits_depend_on_neither_cpu_nor_address(
    kernels: Kernels, dtype: str, length: int, offset: int, seed: int
) -> None:
    matrix = np.random.default_rng(seed).normal(size=(2, length)).astype(dtype)
    elsewhere = np.empty(matrix.nbytes + offset, np.uint8)[offset:].view(dtype).reshape(matrix.shape)
    elsewhere[...] = matrix
    expected = kernels.row_sums(matrix)
    assert expected is not None
    for isa in ("ISA_BEST", "ISA_BASELINE"):
        np.testing.assert_array_equal(kernels.row_sums(elsewhere, isa), expected)


@dtypes
@pytest.mark.parametrize("length", [1, 5, 64, 129, 1024, 5000])
@pytest.mark.parametrize("isa", ["ISA_BEST", "ISA_BASELINE"])
def test_zeros_infinities_and_nan(kernels: Kernels, dtype: str, length: int, isa: str) -> None:
    rows = np.zeros((6, length), dtype)
    rows[1] = -0.0
    rows[2, -1], rows[3, 0], rows[4, length // 2] = np.inf, -np.inf, np.nan
    rows[5, 0], rows[5, -1] = np.inf, -np.inf if length > 1 else np.nan
    sums = kernels.row_sums(rows, isa)
    assert sums is not None
    np.testing.assert_array_equal(sums, [0, 0, np.inf, -np.inf, np.nan, np.nan])
    assert not np.signbit(sums[:2]).any()


def test_a_million_rows_are_added_each_by_itself(kernels: Kernels) -> None:
    matrix = np.arange(3_000_000, dtype="f4").reshape(-1, 3) % 1000
    np.testing.assert_array_equal(kernels.row_sums(matrix), matrix.sum(axis=1))


def test_there_are_kernels_for_floats_only(kernels: Kernels) -> None:
    for dtype in NAMES:
        assert (kernels.row_sums(np.zeros((1, 1), dtype)) is not None) == (dtype.kind == "f"), dtype
