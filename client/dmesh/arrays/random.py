"""Random arrays that do not depend on their layout: `dmesh.random`.

Methods and arguments are those of `numpy.random.Generator`, with `layout=` added. Element i of a call takes
words i * k to (i + 1) * k - 1 of a Philox stream whose key is the seed and the number of the call; k is fixed
for each method. Every client makes its own blocks; only `permutation` sends anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dmesh.arrays.dtensor import DTensor
from dmesh.arrays.spec import Bounds, spec_for
from dmesh.errors import ConfigurationError
from dmesh.layout import Layout

_AT_ONCE = 1 << 20
"""Number of words generated at once."""
_SCALE = 1.0 / (1 << 53)
Words = NDArray[np.uint64]
Size = int | Sequence[int] | None


class Generator:
    """Generator of random arrays: equal seeds give equal arrays, whatever the layout.

    All clients must make the same calls. `random` gives the same bits as
    `numpy.random.Generator(numpy.random.Philox(key=[seed, call]))`, with calls counted from 0; the other
    methods give numbers of their own. Parameters of distributions are numbers, not arrays.

    ```python
    rng = dmesh.random.Generator(7)
    x = rng.normal(size=(8, 3), layout=dmesh.Layout(["x", "unsharded"], mesh))
    ```

    Args:
        seed: A number from 0 to 2**64 - 1.

    Raises:
        ConfigurationError: The seed is out of that range.
    """

    def __init__(self, seed: int) -> None:
        self.seed = operator.index(seed)
        """The seed."""
        if not 0 <= self.seed < 1 << 64:
            raise ConfigurationError(f"the seed must be an integer from 0 to 2**64 - 1, got {seed!r}")
        self.calls = 0
        """Number of calls so far."""

    def random(self, size: Size = None, dtype: DTypeLike = np.float64, *, layout: Layout) -> DTensor:
        """Return numbers that are distributed evenly over [0, 1).

        Args:
            size: Shape of the array; None is that of an array without dimensions.
            dtype: float64 or float32.
            layout: Where the array lies.

        Raises:
            TypeError: The dtype is another one.
            LayoutError: The layout does not have as many dimensions as `size`.
        """
        kind = _float(dtype)
        unit = _unit if kind == np.float64 else _unit32
        return self._make(size, layout, kind, 1, lambda words: unit(words[..., 0]))

    def uniform(self, low: float = 0.0, high: float = 1.0, size: Size = None, *, layout: Layout) -> DTensor:
        """Return float64 numbers that are distributed evenly over [low, high)."""
        low, high = float(low), float(high)
        return self._make(size, layout, float, 1, lambda words: low + (high - low) * _unit(words[..., 0]))

    def standard_normal(self, size: Size = None, dtype: DTypeLike = np.float64, *, layout: Layout) -> DTensor:
        """Return normally distributed numbers of mean 0 and deviation 1, as float64 or float32."""
        return self._make(size, layout, _float(dtype), 2, _normal)

    def normal(self, loc: float = 0.0, scale: float = 1.0, size: Size = None, *, layout: Layout) -> DTensor:
        """Return normally distributed float64 numbers of mean `loc` and deviation `scale`."""
        loc, scale = float(loc), _scale(scale)
        return self._make(size, layout, float, 2, lambda words: loc + scale * _normal(words))

    def exponential(self, scale: float = 1.0, size: Size = None, *, layout: Layout) -> DTensor:
        """Return exponentially distributed float64 numbers of mean `scale`."""
        scale = _scale(scale)
        return self._make(size, layout, float, 1, lambda words: -scale * np.log1p(-_unit(words[..., 0])))

    def integers(
        self,
        low: int,
        high: int | None = None,
        size: Size = None,
        dtype: DTypeLike = np.int64,
        endpoint: bool = False,
        *,
        layout: Layout,
    ) -> DTensor:
        """Return integers from low to high - 1, or from 0 to low - 1, evenly distributed up to 2**-64.

        Args:
            low: The smallest integer, or without `high` the end of the range.
            high: End of the range.
            size: Shape of the array; None is that of an array without dimensions.
            dtype: An integer type.
            endpoint: Whether the end belongs to the range.
            layout: Where the array lies.

        Raises:
            ValueError: The range is empty, or the dtype does not hold it.
        """
        first, end = (0, operator.index(low)) if high is None else (operator.index(low), operator.index(high))
        end += endpoint
        kind = np.dtype(dtype)
        info = np.iinfo(kind)
        if not (info.min <= first < end <= info.max + 1 and end - first < 1 << 64):
            raise ValueError(f"there is no {kind} from {first} to {end - 1}")

        def values(words: Words) -> NDArray[Any]:
            found = _high_product(words[..., 0], end - first)
            return (found + np.uint64(first % (1 << 64))).astype(kind)

        return self._make(size, layout, kind, 1, values)

    def permutation(self, x: int, *, layout: Layout) -> DTensor:
        """Return the integers from 0 to x - 1 in random order, as int64: `np.argsort` of random words.

        Args:
            x: How many. A sharded array `a` is permuted by `a[rng.permutation(len(a), layout=...)]`.
            layout: Where the array lies; of one dimension.
        """
        words = self._make(operator.index(x), layout, np.uint64, 1, lambda words: words[..., 0])
        found: DTensor = np.argsort(words, kind="stable")  # type: ignore[assignment]
        return found

    def _make(
        self, size: Size, layout: Layout, dtype: DTypeLike, each: int, values: Callable[[Words], Any]
    ) -> DTensor:
        shape = () if size is None else (size,) if isinstance(size, (int, np.integer)) else tuple(size)
        spec = spec_for(layout, shape, dtype)
        key = (self.seed, self.calls)
        self.calls += 1
        blocks = []
        for region, local in zip(spec.regions, spec.local_shapes, strict=True):
            block = np.empty(local, spec.dtype)
            _fill(block, key, spec.shape, region, each, values)
            blocks.append(block)
        return DTensor(spec, tuple(blocks))


def _float(dtype: DTypeLike) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind not in (np.float64, np.float32):
        raise TypeError(
            f"random numbers are made as float64 or float32, not {kind}: use .astype({str(kind)!r})"
        )
    return kind


def _scale(scale: float) -> float:
    found = float(scale)
    if not found >= 0:
        raise ValueError(f"scale is {scale}; it must not be negative")
    return found


def _unit(words: Words) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.multiply(words >> np.uint64(11), _SCALE, dtype=np.float64)
    return found


def _unit32(words: Words) -> NDArray[np.float32]:
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(1.0 / (1 << 24))


def _normal(words: Words) -> NDArray[np.float64]:
    """Return normally distributed numbers, each of two words, by the Box-Muller transform."""
    radius = np.sqrt(-2.0 * np.log1p(-_unit(words[..., 0])))
    found: NDArray[np.float64] = radius * np.cos(2.0 * math.pi * _unit(words[..., 1]))
    return found


def _high_product(words: Words, n: int) -> Words:
    """Return the high 64 bits of the product of each word and a number."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    n_low, n_high = np.uint64(n & 0xFFFFFFFF), np.uint64(n >> 32)
    w_low, w_high = words & low, words >> half
    middle = w_high * n_low + ((w_low * n_low) >> half)
    other = w_low * n_high + (middle & low)
    high: Words = w_high * n_high + (middle >> half) + (other >> half)
    return high


def stream(key: tuple[int, int], start: int, count: int) -> Words:
    """Return some words of a Philox stream."""
    bits = np.random.Philox(key=np.array(key, np.uint64))
    bits.advance(start // 4)  # a step of its counter makes four words
    return bits.random_raw(start % 4 + count)[start % 4 :]


def _fill(
    block: NDArray[Any], key: tuple[int, int], shape: tuple[int, ...], region: Bounds, each: int,
    values: Callable[[Words], Any],
) -> None:  # fmt: skip
    """Fill a block: generate whole rows of the array, and copy the block's part of them."""
    if not block.size:
        return
    if not region:
        block[...] = values(stream(key, 0, each).reshape(each))
        return
    (first, last), rest = region[0], region[1:]
    width = math.prod(shape[1:])
    rows = max(1, _AT_ONCE // max(1, width * each))
    part = tuple(slice(start, stop) for start, stop in rest)
    for row in range(first, last, rows):
        count = min(rows, last - row)
        words = stream(key, row * width * each, count * width * each).reshape(count, *shape[1:], each)
        block[row - first : row - first + count] = values(words[(slice(None), *part)])


__all__ = ["Generator"]
