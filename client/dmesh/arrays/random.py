"""Random arrays that do not depend on their layout: `dmesh.random`.

Element i of a call uses words i * k to (i + 1) * k - 1 of a Philox stream whose key is the seed and the
number of the call. Every client makes its own blocks, and nothing is sent.
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


class Generator:
    """Generator of random arrays: equal seeds give equal arrays, whatever the layout.

    All clients must make the same calls. `random` returns the same bits as
    `numpy.random.Generator(numpy.random.Philox(key=[seed, call]))`, with calls counted from 0.

    ```python
    x = dmesh.random.Generator(7).normal(shape=(8, 3), layout=dmesh.Layout(["x", "unsharded"], mesh))
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

    def random(self, shape: int | Sequence[int], *, layout: Layout) -> DTensor:
        """Return uniformly distributed numbers from [0, 1).

        Args:
            shape: Shape of the array.
            layout: Its layout.
        """
        return self._make(shape, layout, float, 1, lambda words: _unit(words[..., 0]))

    def uniform(
        self, low: float = 0.0, high: float = 1.0, *, shape: int | Sequence[int], layout: Layout
    ) -> DTensor:
        """Return uniformly distributed numbers from [low, high)."""
        return self._make(shape, layout, float, 1, lambda words: low + (high - low) * _unit(words[..., 0]))

    def normal(
        self, loc: float = 0.0, scale: float = 1.0, *, shape: int | Sequence[int], layout: Layout
    ) -> DTensor:
        """Return normally distributed numbers, by the Box-Muller transform: two words for each."""

        def values(words: Words) -> NDArray[Any]:
            radius = np.sqrt(-2.0 * np.log1p(-_unit(words[..., 0])))
            return loc + scale * (radius * np.cos(2.0 * math.pi * _unit(words[..., 1])))

        return self._make(shape, layout, float, 2, values)

    def integers(
        self,
        low: int,
        high: int | None = None,
        *,
        shape: int | Sequence[int],
        layout: Layout,
        dtype: DTypeLike = np.int64,
    ) -> DTensor:
        """Return integers from low to high - 1, or from 0 to low - 1, uniformly distributed up to 2**-64."""
        first, last = (0, low) if high is None else (low, high)
        kind = np.dtype(dtype)
        info = np.iinfo(kind)
        if not (info.min <= first < last <= info.max + 1 and last - first < 1 << 64):
            raise ValueError(f"no {kind} from {first} to {last - 1}")

        def values(words: Words) -> NDArray[Any]:
            found = _high_product(words[..., 0], last - first)
            return (found + np.uint64(first % (1 << 64))).astype(kind)

        return self._make(shape, layout, kind, 1, values)

    def _make(
        self,
        shape: int | Sequence[int],
        layout: Layout,
        dtype: DTypeLike,
        each: int,
        values: Callable[[Words], Any],
    ) -> DTensor:
        lengths = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        spec = spec_for(layout, lengths, dtype)
        key = (self.seed, self.calls)
        self.calls += 1
        blocks = []
        for region, local in zip(spec.regions, spec.local_shapes, strict=True):
            block = np.empty(local, spec.dtype)
            _fill(block, key, spec.shape, region, each, values)
            blocks.append(block)
        return DTensor(spec, tuple(blocks))


def _unit(words: Words) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.multiply(words >> np.uint64(11), _SCALE, dtype=np.float64)
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
