"""Iterators over the elements of a dataset, whose positions can be saved and restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from dmesh.data.cursors import Cursor, as_list
from dmesh.data.pipeline import Node, Reading, walk
from dmesh.errors import ArgumentTypeError, DatasetError

__all__ = ["DatasetIterator", "describe", "Reader"]

_BLOCK = 64
"""Number of keys that are read at once if they cost almost nothing."""


class Reader(Iterator[Any]):
    """Iterator over the elements of a cursor.

    Args:
        cursor: The cursor; it is closed at the end and on errors.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._read(cursor)

    def _read(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._get = cursor.table.get
        self._keys: Iterator[Any] = iter(())
        self._before: Any = None
        """Position before the block of keys that was read last, or before the key that is being read."""
        self._given = 0
        """Number of elements returned since that position."""
        self._pending: deque[tuple[Any, Callable[[], Any]]] = deque()
        """Elements in preparation, each with the position before it."""
        self._failed = False
        """True if the last of them is an error, which is raised after the others are returned."""

    def __next__(self) -> Any:
        try:
            for key in self._keys:
                element = self._get(key)
                self._given += 1
                return element
            return self._next()
        except BaseException:
            self.close()
            raise

    def _next(self) -> Any:
        """Reads keys, and returns the element of the first one."""
        cursor = self._cursor
        if cursor.table.parallel > 1:
            return self._next_of_several()
        if not cursor.lazy:
            self._before, self._given = cursor.state(), 0  # valid until the element is made, which may fail
            for key in cursor.keys(1):
                element = self._get(key)
                self._before = None
                return element
            self._before = None
            raise StopIteration
        self._before, self._given = cursor.state(), 0
        self._keys = iter(as_list(cursor.keys(_BLOCK)))
        for key in self._keys:
            element = self._get(key)
            self._given = 1
            return element
        raise StopIteration

    def _next_of_several(self) -> Any:
        """Keeps several elements in preparation, and returns the first of them."""
        cursor, pending = self._cursor, self._pending
        while len(pending) < cursor.table.parallel and not self._failed:
            self._before = before = cursor.state()
            try:
                block = cursor.keys(1)
                making = cursor.table.submit(block[0]) if len(block) else None
            except Exception as error:
                if not pending:
                    raise
                self._failed = True
                pending.append((before, partial(_raise, error)))
                break
            self._before = None
            if making is None:
                break
            pending.append((before, making))
        if not pending:
            raise StopIteration
        element = pending[0][1]()
        pending.popleft()
        return element

    def position(self) -> list[Any]:
        """Returns the position after the last element: one of the cursor's, and a number of elements."""
        if self._pending:
            return [self._pending[0][0], 0]
        if self._before is not None:
            return [self._before, self._given]
        return [self._cursor.state(), 0]

    def move(self, position: Any) -> None:
        """Moves to a position. Must be called before the first read."""
        before, given = position
        self._cursor.restore(before)
        self._cursor.skip(given)

    def close(self) -> None:
        """Ends the reading. Idempotent."""
        self._keys = iter(())
        self._cursor.close()


class DatasetIterator(Reader):
    """Iterator over a dataset, as `iter(dataset)` returns it.

    ```python
    iterator = iter(dmesh.data.Dataset.range(10).shuffle(10, seed=1))
    next(iterator)
    state = iterator.state()  # numbers, strings, lists and dicts: json.dumps takes it
    rest = list(iterator)
    iterator.restore(state)
    assert list(iterator) == rest
    ```

    Args:
        node: Last node of the pipeline.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._reading: Reading | None = None
        self._end: dict[str, Any] | None = None
        """State at the end of the reading, once it has ended."""
        self._keys = iter(())

    @property
    def element_spec(self) -> Any:
        """Structure of specs of all elements, as of the dataset."""
        return self._node.spec()

    def _next(self) -> Any:
        if self._end is not None:
            raise StopIteration
        if self._reading is None:
            self._open()
        return super()._next()

    def _open(self, orders: Sequence[Sequence[int]] | None = None) -> Reading:
        reading = Reading.begin(self._node)
        if orders is not None:
            reading.restore(orders)
        self._read(self._node.open(reading))
        self._reading = reading
        return reading

    def state(self) -> dict[str, Any]:
        """Returns the position after the last element.

        Returns:
            A dict for `json.dumps`. It determines the following elements, but has none of their data.
        """
        if self._end is not None:
            return self._end
        reading = self._reading or self._open()
        return {
            "dataset": describe(self._node),
            "orders": reading.state(),
            "position": self.position(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a position that `state` returned.

        If the source has random access, nothing is read again. Generators and compressed files are read
        again from the beginning up to the position.

        Args:
            state: Result of `state`, of an iterator over the same pipeline in this or another process.

        Raises:
            ArgumentTypeError: `state` is not the result of `state()`.
            DatasetError: `state` is of another pipeline.
        """
        if not isinstance(state, Mapping) or not {"dataset", "orders", "position"} <= set(state):
            raise ArgumentTypeError(f"state must be what an iterator's state() returned, got {state!r:.80}")
        if state["dataset"] != describe(self._node):
            raise DatasetError(
                f"this is the state of an iterator over {state['dataset']}, but the dataset is "
                f"{describe(self._node)}"
            )
        self.close()
        self._end = self._reading = None
        if state["position"] is not None:
            self._open(state["orders"])
            self.move(state["position"])

    def close(self) -> None:
        """Ends the reading and its threads. Idempotent."""
        if self._end is not None:
            return
        if self._reading is None:
            self._end = {"dataset": describe(self._node), "orders": [], "position": None}
            return
        self._end = self.state()
        super().close()
        self._reading.close()


def _raise(error: Exception) -> None:
    raise error


def describe(node: Node) -> str:
    """Returns the names of a pipeline's nodes, last one first."""
    return " <- ".join(below.name for below in walk(node))
