"""Prefetching: an iterator in its own thread, with a bounded buffer."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from dmesh.data.cursors import ELEMENTS, Cursor
from dmesh.data.iterator import Reader
from dmesh.data.pipeline import Reading, Transform

__all__ = ["Prefetch", "Prefetcher"]

T = TypeVar("T")

_AHEAD = 2
"""Number of elements that `prefetch(AUTOTUNE)` reads ahead."""


class _Buffer(Generic[T]):
    """State shared by both threads, so that the filling one needs no reference to the reader."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.items: deque[T] = deque()
        self.changed = threading.Condition()
        self.stopped = False
        self.ended = False
        self.error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Waits for room and adds an item; returns False if the reader has ended."""
        with self.changed:
            while len(self.items) >= self.size and not self.stopped:
                self.changed.wait()
            if self.stopped:
                return False
            self.items.append(item)
            self.changed.notify_all()
            return True

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.items.clear()
            self.changed.notify_all()


def _fill(buffer: _Buffer[T], source: Callable[[], Iterator[T]]) -> None:
    try:
        iterator = source()
        try:
            for item in iterator:
                if not buffer.put(item):
                    return
        finally:
            if isinstance(iterator, Generator):
                iterator.close()
    except BaseException as error:  # noqa: BLE001 -- raised where the items are read
        buffer.end(error)
    else:
        buffer.end(None)


class Prefetcher(Iterator[T]):
    """Reads an iterator in a background thread, at most `size` items ahead.

    An exception of the iterator is raised here, after the preceding items. The thread ends after its current
    item when the iterator ends, on `close`, or when the prefetcher is freed.

    Args:
        source: Function that returns the iterator. The thread calls it and the iterator, with a copy of the
            caller's context variables.
        size: Maximum number of buffered items, at least 1.
        name: Name of the thread.
    """

    def __init__(self, source: Callable[[], Iterator[T]], size: int, name: str) -> None:
        self._buffer: _Buffer[T] = _Buffer(size)
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(_fill, self._buffer, source), name=name, daemon=True
        )
        self._finalizer = weakref.finalize(self, self._buffer.stop)
        self._thread.start()

    def __next__(self) -> T:
        buffer = self._buffer
        with buffer.changed:
            while not buffer.items and not buffer.ended and not buffer.stopped:
                buffer.changed.wait()
            if buffer.items:
                item = buffer.items.popleft()
                buffer.changed.notify_all()
                return item
            error, buffer.error = buffer.error, None
        if error is not None:
            raise error
        raise StopIteration

    def stop(self) -> None:
        """Tells the thread to end, without waiting for it."""
        self._finalizer()

    def close(self) -> None:
        """Ends the thread and waits until it has ended."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()


@dataclass(frozen=True, eq=False)
class Prefetch(Transform):
    """Prefetches elements in a thread."""

    buffer_size: int
    """Maximum number of elements read ahead; 0 for no thread, negative for AUTOTUNE."""

    def open(self, reading: Reading) -> Cursor:
        """Returns a cursor over elements that a thread makes."""
        source = self.source.open(reading)
        if self.buffer_size == 0:
            return source
        return _Prefetching(source, _AHEAD if self.buffer_size < 0 else self.buffer_size)


class _Prefetching(Cursor):
    """Cursor over elements that a thread makes. The thread starts with the first one."""

    table = ELEMENTS

    def __init__(self, source: Cursor, size: int) -> None:
        self._reader = Reader(source)
        self._size = size
        self._prefetcher: Prefetcher[tuple[Any, Any]] | None = None
        self._position: Any = None
        """Position of the reader after the last returned element."""

    def keys(self, count: int) -> list[Any]:
        """Returns the next element."""
        if self._prefetcher is None:
            self._position = self._reader.position()  # from now on, the thread moves it
            # The thread must not reference this object: it ends when the object is freed.
            self._prefetcher = Prefetcher(
                partial(_with_positions, self._reader), self._size, "dmesh-data-prefetch"
            )
        for element, position in self._prefetcher:
            self._position = position
            return [element]
        return []

    def state(self) -> Any:
        """Returns the position after the last returned element."""
        return self._reader.position() if self._position is None else self._position

    def restore(self, state: Any) -> None:
        """Moves the source."""
        self._reader.move(state)

    def close(self) -> None:
        """Tells the thread to end and close the source, without waiting for it."""
        if self._prefetcher is None:
            self._reader.close()
        else:
            self._prefetcher.stop()


def _with_positions(reader: Reader) -> Generator[tuple[Any, Any], None, None]:
    try:
        for element in reader:
            yield element, reader.position()
    finally:
        reader.close()
