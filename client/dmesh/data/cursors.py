"""Execution of a pipeline: cursors over the keys of elements, and tables that make elements from keys.

A cursor is one reading of a node. It yields *keys*: row numbers if the source has random access, else the
elements themselves. Transforms that select or reorder elements work on keys and copy no data. The cursor's
table makes an element from a key, or a batch from many keys, when it is needed.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmesh.data.elements import stack

__all__ = [
    "as_array",
    "as_list",
    "Count",
    "Cursor",
    "ELEMENTS",
    "Elements",
    "join",
    "Keys",
    "Pass",
    "read",
    "Streamed",
    "Table",
]

Keys = range | NDArray[np.int64] | list[Any]
"""Keys in order: a range or an array of row numbers, or a list of keys of any kind."""

_SKIPPED = 4096
"""Number of keys that a cursor reads at once when it skips."""


def join(blocks: list[Keys]) -> Keys:
    """Return the keys of several blocks as one."""
    if len(blocks) == 1:
        return blocks[0]
    if not blocks:
        return []
    if any(isinstance(block, list) for block in blocks):
        return list(itertools.chain.from_iterable(map(as_list, blocks)))
    first = blocks[0]
    if isinstance(first, range):
        end = first.start
        for block in blocks:
            if not isinstance(block, range) or block.step != first.step or block.start != end:
                break
            end += len(block) * first.step
        else:
            return range(first.start, end, first.step)
    return np.concatenate([as_array(block) for block in blocks])


def as_list(keys: Keys) -> list[Any] | range:
    """Return keys as Python objects, which are faster to iterate than an array's."""
    return keys.tolist() if isinstance(keys, np.ndarray) else keys


def as_array(keys: Keys) -> NDArray[np.int64]:
    """Return row numbers as an array."""
    if isinstance(keys, range):
        return np.arange(keys.start, keys.stop, keys.step, dtype=np.int64)
    return np.asarray(keys, np.int64)


class Table(ABC):
    """Random access to elements by key."""

    size: int | None = None
    """Number of rows, if the keys are row numbers from 0."""
    cheap = False
    """True if making an element costs almost nothing, as for views."""
    parallel = 1
    """Number of elements to make concurrently."""
    rows: Table | None = None
    """If each element is a batch: the table of its rows. A key is then the `Keys` of the rows."""

    @abstractmethod
    def get(self, key: Any) -> Any:
        """Return one element."""

    def submit(self, key: Any) -> Callable[[], Any]:
        """Start making an element, in the background if possible; return a function that waits for it."""
        return partial(self.get, key)

    def gather(self, keys: Keys) -> Any:
        """Return a batch, a copy: one element whose rows are the elements of several keys.

        Raises:
            DatasetError: The elements' structures, shapes or dtypes differ.
        """
        return stack([pending() for pending in [self.submit(key) for key in as_list(keys)]])


class Elements(Table):
    """Table of keys that are elements themselves."""

    cheap = True

    def get(self, key: Any) -> Any:
        """Return the key."""
        return key


ELEMENTS = Elements()


class Cursor(ABC):
    """Position in one reading of a node."""

    table: Table
    """Table of the keys."""
    lazy: bool = False
    """True if keys cost almost nothing and have no side effects, so that many may be read in advance."""

    @abstractmethod
    def keys(self, count: int) -> Keys:
        """Return the next keys: at least one and at most `count`; none at the end."""

    def skip(self, count: int) -> int:
        """Skip the next `count` keys; return the number of skipped keys, less at the end."""
        skipped = 0
        while skipped < count and (block := len(self.keys(min(count - skipped, _SKIPPED)))):
            skipped += block
        return skipped

    @abstractmethod
    def state(self) -> Any:
        """Return the position, made of numbers and lists."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """Move to a position that `state` returned. Must be called before the first read."""

    def close(self) -> None:  # noqa: B027 -- most cursors hold nothing
        """End the reading. Idempotent."""


def read(cursor: Cursor, count: int) -> Keys:
    """Return the next keys: exactly `count`, or fewer at the end."""
    blocks: list[Keys] = []
    while count > 0 and len(block := cursor.keys(count)):
        blocks.append(block)
        count -= len(block)
    return join(blocks)


class Count(Cursor):
    """Cursor over all rows of a table, in order."""

    lazy = True

    def __init__(self, table: Table, size: int) -> None:
        self.table = table
        self._size = size
        self._next = 0

    def keys(self, count: int) -> range:
        """Return the next span of rows."""
        start = self._next
        self._next = min(start + count, self._size)
        return range(start, self._next)

    def skip(self, count: int) -> int:
        """Move by a number of rows."""
        return len(self.keys(count))

    def state(self) -> int:
        """Return the number of the next row."""
        return self._next

    def restore(self, state: Any) -> None:
        """Move to a row."""
        self._next = int(state)


class Streamed(Cursor):
    """Cursor over an iterator, whose position is the number of its items so far.

    Args:
        start: Function that returns the iterable, called at the first use.
        table: Table whose keys the items are.
    """

    def __init__(self, start: Callable[[], Iterable[Any]], table: Table = ELEMENTS) -> None:
        self.table = table
        self._start = start
        self._iterator: Iterator[Any] | None = None
        self._count = 0

    def keys(self, count: int) -> list[Any]:
        """Return the next items."""
        if self._iterator is None:
            self._iterator = iter(self._start())
        block = list(itertools.islice(self._iterator, count))
        self._count += len(block)
        return block

    def state(self) -> int:
        """Return the number of items so far."""
        return self._count

    def restore(self, state: Any) -> None:
        """Read up to the position."""
        self.skip(int(state))

    def close(self) -> None:
        """Close the iterator."""
        close = getattr(self._iterator, "close", None)
        self._iterator = iter(())
        if close is not None:
            close()


class Pass(Cursor):
    """Cursor of a transform with one source. By default, all keys pass unchanged."""

    def __init__(self, source: Cursor) -> None:
        self.source = source
        self.table = source.table
        self.lazy = source.lazy

    def keys(self, count: int) -> Keys:
        """Return the source's next keys."""
        return self.source.keys(count)

    def skip(self, count: int) -> int:
        """Leave out keys of the source."""
        return self.source.skip(count)

    def state(self) -> Any:
        """Return the source's position."""
        return self.source.state()

    def restore(self, state: Any) -> None:
        """Move the source."""
        self.source.restore(state)

    def close(self) -> None:
        """End the source's reading."""
        self.source.close()
