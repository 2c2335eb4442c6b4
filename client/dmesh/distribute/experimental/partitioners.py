"""Partitioners: number of parts of an array along one of its dimensions.

```python
from dmesh.distribute.experimental.partitioners import MaxSizePartitioner

parts = MaxSizePartitioner(max_shard_bytes=1 << 20)((1000, 1024), "float32")  # -> [4, 1]
```

They compute the number only. `numpy.array_split(array, parts[0])` divides an array so.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from dmesh.errors import StrategyTypeError, StrategyValueError

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner:
    """Base of all partitioners: an object that is called with a shape and a dtype."""

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of parts along each dimension.

        Args:
            shape: The lengths of the array's dimensions.
            dtype: The type of its elements.
            axis: Dimension to divide; negative counts from the end.

        Raises:
            StrategyValueError: There is no such dimension, or a length is negative.
            StrategyTypeError: The shape or dtype is none.
        """
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """A fixed number of parts; fewer for a shorter array.

    Args:
        num_shards: Number of parts.

    Raises:
        StrategyValueError: It is less than 1.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of parts along each dimension; see `Partitioner`."""
        lengths, axis = _checked(shape, axis)
        return _parts(lengths, axis, min(self._num_shards, lengths[axis]))


class MinSizePartitioner(Partitioner):
    """As many parts as possible with a minimum size.

    Args:
        min_shard_bytes: Bytes that each part has at least.
        max_shards: Largest number of parts.
        bytes_per_string: Bytes that are counted for each element of an array of text or objects.

    Raises:
        StrategyValueError: One of them is less than 1.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of parts along each dimension; see `Partitioner`."""
        lengths, axis = _checked(shape, axis)
        size = math.prod(lengths) * _item_size(dtype, self._bytes_per_string)
        return _parts(lengths, axis, min(lengths[axis], self._max_shards, -(-size // self._min_shard_bytes)))


class MaxSizePartitioner(Partitioner):
    """As few parts as possible with a maximum size.

    Args:
        max_shard_bytes: Bytes that each part has at most, unless `max_shards` or a single row is more.
        max_shards: Largest number of parts; None for no limit.
        bytes_per_string: Bytes that are counted for each element of an array of text or objects.

    Raises:
        StrategyValueError: One of them is less than 1.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of parts along each dimension; see `Partitioner`."""
        lengths, axis = _checked(shape, axis)
        rows = lengths[axis]
        row = math.prod(lengths[:axis] + lengths[axis + 1 :]) * _item_size(dtype, self._bytes_per_string)
        rows_per_part = max(1, self._max_shard_bytes // row if row else rows)
        parts = -(-rows // rows_per_part)
        return _parts(lengths, axis, parts if self._max_shards is None else min(parts, self._max_shards))


def _parts(lengths: list[int], axis: int, parts: int) -> list[int]:
    return [max(1, parts) if index == axis else 1 for index in range(len(lengths))]


def _positive(name: str, value: SupportsIndex) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise StrategyTypeError(f"{name} must be an integer, got {value!r:.80}") from None
    if number < 1:
        raise StrategyValueError(f"{name} must be at least 1, got {number}")
    return number


def _checked(shape: Sequence[int], axis: int) -> tuple[list[int], int]:
    """Return a shape and a non-negative axis."""
    try:
        lengths = [operator.index(length) for length in shape]
        axis = operator.index(axis)
    except TypeError:
        raise StrategyTypeError(
            f"a partitioner needs a shape and an axis of integers, got {shape!r:.80} and {axis!r:.80}"
        ) from None
    if any(length < 0 for length in lengths):
        raise StrategyValueError(f"the shape {lengths} has a negative length")
    if not -len(lengths) <= axis < len(lengths):
        raise StrategyValueError(f"the shape {lengths} has no axis {axis} along which to divide it")
    return lengths, axis % len(lengths)


def _item_size(dtype: DTypeLike, bytes_per_string: int) -> int:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise StrategyTypeError(f"a partitioner needs a dtype, got {dtype!r:.80}: {error}") from None
    return bytes_per_string if kind.kind in "OSU" else kind.itemsize
