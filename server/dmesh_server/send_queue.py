"""Send queue for one reader: bounded, it closes rather than grows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SendQueue(Generic[T]):
    """Items for one reader, in order.

    A reader that does not keep up must not cost others anything: a full queue drops its items and closes, and
    `overflowed` is True. All methods are called on the event loop's thread.
    """

    def __init__(self, limit: int, max_bytes: int | None = None) -> None:
        """Make an empty send queue.

        Args:
            limit: How many items it holds at most.
            max_bytes: How many bytes they may have together; None for any number. One alone may have more.
        """
        self._items: deque[tuple[T, int]] = deque()
        self._limit = limit
        self._max_bytes = max_bytes
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._mark = 0
        self.size = 0
        """Bytes of the queued items."""
        self.overflowed = False
        self.on_overflow: Callable[[], object] | None = None
        self.on_news: Callable[[], object] | None = None
        """Called when there is something to take, or the queue is closed; for readers that do not wait."""

    def put(self, item: T, size: int = 0) -> None:
        """Add an item of `size` bytes; ignored once the send queue is closed."""
        if self._closed:
            return
        too_large = self._max_bytes is not None and self.size > 0 and self.size + size > self._max_bytes
        if too_large or len(self._items) >= self._limit:
            self.overflowed = True
            self._items.clear()
            self.size = 0
            self.close()
            if self.on_overflow is not None:
                self.on_overflow()
            return
        self._items.append((item, size))
        self.size += size
        if self._waiter is not None or self.on_news is not None:
            self._wake()

    def close(self) -> None:
        """Take no further items; the reader still gets the queued ones."""
        self._closed = True
        self._wake()
        self._notify_drained()

    @property
    def closed(self) -> bool:
        """True if it takes nothing more."""
        return self._closed

    def take_all(self) -> list[T]:
        """Return all items that are queued, without waiting."""
        items = [item for item, _ in self._items]
        self._items.clear()
        self.size = 0
        if self._drained is not None:
            self._notify_drained()
        return items

    async def get(self) -> T | None:
        """Return the next item, or None when a closed send queue is empty. For one reader at a time."""
        while not self._items:
            if self._closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item, size = self._items.popleft()
        self.size -= size
        if self._drained is not None and self.size <= self._mark:
            self._notify_drained()
        return item

    async def drained(self, mark: int) -> None:
        """Wait until at most `mark` bytes are queued, or the queue is closed. For one waiter at a time."""
        while self.size > mark and not self._closed:
            self._mark = mark
            self._drained = asyncio.get_running_loop().create_future()
            try:
                await self._drained
            finally:
                self._drained = None

    def __len__(self) -> int:
        return len(self._items)

    def _wake(self) -> None:
        if self.on_news is not None:
            self.on_news()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _notify_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
