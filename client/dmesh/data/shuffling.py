"""`Dataset.shuffle`: keys in random order, drawn from a buffer."""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.data.cursors import Cursor, Keys, Pass, as_array, as_list, read
from dmesh.data.pipeline import Order, Reading, Transform

__all__ = ["Shuffle"]

_DRAWS = 1024
"""Number of random numbers drawn at once."""


@dataclass(frozen=True, eq=False)
class Shuffle(Transform):
    """Draws each element at random from a buffer of the next elements."""

    buffer_size: int
    """Number of elements to draw from."""
    seed: int | None
    """Seed of the order; None for another order in each process."""
    reshuffle: bool
    """True if each reading has a different order."""
    entropy: int = field(default_factory=lambda: secrets.randbits(63))
    """Random seed that replaces a missing one."""
    shuffled: Order = field(init=False, repr=False)
    """Order of the elements."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shuffled", Order(self.entropy if self.seed is None else self.seed))

    def open(self, reading: Reading) -> Cursor:
        """Return a cursor that draws keys."""
        order = reading.order(self)
        numbers = (order.readings, *reading.repetitions) if self.reshuffle else (0,)
        entropy = [abs(order.entropy), int(order.entropy < 0), *numbers]
        return _Drawing(self.source.open(reading), self.buffer_size, np.random.default_rng(entropy))


class _Drawing(Pass):
    """Cursor of a shuffle.

    Each key drawn from the buffer is replaced by the source's next key. At the end of the source, the rest of
    the buffer follows in random order.
    """

    def __init__(self, source: Cursor, size: int, generator: np.random.Generator) -> None:
        super().__init__(source)
        self._size = size
        self._generator = generator
        self._start: Any = None
        """Initial position of the source."""
        self._given = 0
        self._buffer: Any = None
        self._draws: NDArray[np.int64] = np.empty(0, np.int64)
        self._rest: NDArray[np.int64] | deque[Any] | None = None
        """Keys that remain after the end of the source, in order."""

    def keys(self, count: int) -> Keys:
        """Draw keys."""
        if self._buffer is None:
            self._fill()
        if self._rest is None:
            drawn = self._exchange(min(count, _DRAWS))
            if len(drawn):
                self._given += len(drawn)
                return drawn
            order = self._generator.permutation(len(self._buffer))
            self._rest, self._buffer = _ordered(self._buffer, order), ()
        assert self._rest is not None
        block: Keys
        if isinstance(self._rest, deque):
            block = [self._rest.popleft() for _ in range(min(count, len(self._rest)))]
        else:
            block, self._rest = self._rest[:count], self._rest[count:]
        self._given += len(block)
        return block

    def skip(self, count: int) -> int:
        """Draw keys and drop them."""
        return Cursor.skip(self, count)

    def _fill(self) -> None:
        self._start = self.source.state()
        filled = read(self.source, self._size)
        # Only row numbers are exchanged many at a time; a span of them is an array from then on.
        self._buffer = filled.copy() if isinstance(filled, np.ndarray) else filled

    def _exchange(self, count: int) -> Keys:
        """Put the source's next keys into the buffer, and return the keys they replace."""
        if len(self._buffer) < self._size:
            return []  # the source has ended
        coming = self.source.keys(count)
        number = len(coming)
        if not number:
            return []
        while len(self._draws) < number:
            self._draws = np.concatenate([self._draws, self._generator.integers(self._size, size=_DRAWS)])
        places, self._draws = self._draws[:number], self._draws[number:]
        if isinstance(self._buffer, range):
            self._buffer = as_array(self._buffer)
        buffer = self._buffer
        if isinstance(buffer, np.ndarray) and not isinstance(coming, list):
            return _exchange_rows(buffer, as_array(coming), places)
        if isinstance(buffer, np.ndarray):
            buffer = self._buffer = buffer.tolist()
        drawn = []
        for place, key in zip(places.tolist(), as_list(coming), strict=True):
            drawn.append(buffer[place])
            buffer[place] = key
        return drawn

    def state(self) -> list[Any]:
        """Return the source's initial position and the number of keys drawn; `restore` repeats the draws."""
        return [self.source.state() if self._buffer is None else self._start, self._given]

    def restore(self, state: Any) -> None:
        """Draw all keys up to a position again."""
        start, given = state
        self.source.restore(start)
        self.skip(given)


def _ordered(keys: Keys, order: NDArray[np.int64]) -> NDArray[np.int64] | deque[Any]:
    """Returns keys in an order."""
    if isinstance(keys, range):
        return order if keys == range(len(keys)) else order * keys.step + keys.start
    return keys[order] if isinstance(keys, np.ndarray) else deque(keys[i] for i in order.tolist())


def _exchange_rows(
    buffer: NDArray[np.int64], coming: NDArray[np.int64], places: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Vectorized loop over `drawn = buffer[place]; buffer[place] = key`."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    drawn = buffer[places]
    # A place that is drawn repeatedly has the key that was put there last.
    again = np.nonzero(ordered[1:] == ordered[:-1])[0]
    drawn[order[again + 1]] = coming[order[again]]
    last = np.append(ordered[1:] != ordered[:-1], True)
    buffer[ordered[last]] = coming[order[last]]
    return drawn
