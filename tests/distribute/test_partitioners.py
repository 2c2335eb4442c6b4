"""Partitioners, compared with the numbers that TensorFlow 2.21 gives."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmesh.distribute.experimental.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from dmesh.errors import StrategyTypeError, StrategyValueError


@pytest.mark.parametrize(
    ("partitioner", "shape", "dtype", "axis", "parts"),
    [
        (FixedShardsPartitioner(2), (10, 3), np.float32, 0, [2, 1]),
        (FixedShardsPartitioner(2), (10, 3), np.float32, 1, [1, 2]),
        (FixedShardsPartitioner(20), (10, 3), np.float32, 0, [10, 1]),
        (MinSizePartitioner(4, max_shards=2), (6, 1), np.float32, 0, [2, 1]),
        (MinSizePartitioner(4, max_shards=10), (6, 1), np.float32, 0, [6, 1]),
        (MinSizePartitioner(max_shards=100), (1024, 1024), np.float32, 0, [16, 1]),
        (MinSizePartitioner(max_shards=8), (1024, 1024), np.float32, 1, [1, 8]),
        (MinSizePartitioner(), (1024, 1024), np.float32, 0, [1, 1]),
        (MinSizePartitioner(64, max_shards=9, bytes_per_string=32), (8,), object, 0, [4]),
        (MaxSizePartitioner(4), (6, 1), np.float32, 0, [6, 1]),
        (MaxSizePartitioner(4, max_shards=2), (6, 1), np.float32, 0, [2, 1]),
        (MaxSizePartitioner(1024), (6, 1), np.float32, 0, [1, 1]),
        (MaxSizePartitioner(32), (8,), "U5", 0, [4]),
        (MaxSizePartitioner(2), (3, 2), np.float64, -1, [1, 2]),
    ],
)
def test_number_of_parts(partitioner, shape, dtype, axis, parts):
    assert partitioner(shape, dtype, axis) == parts
    assert isinstance(partitioner, Partitioner)


@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    most=st.integers(1, 500),
    limit=st.integers(1, 10),
    data=st.data(),
)
def test_parts_keep_their_sizes(shape, most, limit, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    item = np.dtype(np.float32).itemsize
    row = item * math.prod(shape) // max(1, shape[axis])
    parts = MaxSizePartitioner(most)(shape, np.float32, axis)[axis]
    rows = math.ceil(shape[axis] / parts)
    assert rows * row <= most or rows <= 1 or row == 0
    assert 1 <= MaxSizePartitioner(most, limit)(shape, np.float32, axis)[axis] <= limit
    assert 1 <= MinSizePartitioner(most, limit)(shape, np.float32, axis)[axis] <= limit
    assert 1 <= FixedShardsPartitioner(limit)(shape, np.float32, axis)[axis] <= max(1, shape[axis])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FixedShardsPartitioner(0), StrategyValueError, "num_shards must be at least 1, got 0"),
        (lambda: MinSizePartitioner(0), StrategyValueError, "min_shard_bytes must be at least 1"),
        (lambda: MinSizePartitioner(max_shards=-1), StrategyValueError, "max_shards must be at least 1"),
        (lambda: MaxSizePartitioner(8, 0), StrategyValueError, "max_shards must be at least 1"),
        (lambda: MaxSizePartitioner("8"), StrategyTypeError, "max_shard_bytes must be an integer, got '8'"),
        (lambda: FixedShardsPartitioner(2)((4,), "f4", 1), StrategyValueError, "has no axis 1"),
        (lambda: FixedShardsPartitioner(2)((), "f4"), StrategyValueError, "has no axis 0"),
        (lambda: FixedShardsPartitioner(2)((-1,), "f4"), StrategyValueError, "a negative length"),
        (lambda: FixedShardsPartitioner(2)(3, "f4"), StrategyTypeError, "a shape and an axis of integers"),
        (lambda: MaxSizePartitioner(2)((4,), "nothing"), StrategyTypeError, "needs a dtype, got 'nothing'"),
    ],
)
def test_what_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
