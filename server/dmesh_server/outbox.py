"""What waits to be sent to one reader: a bounded queue that closes rather than grows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Items for one reader, in order.

    A reader that does not keep up must cost nobody else anything: when the queue is full the outbox drops
    what it holds and closes, and `overflowed` says so. All methods are called on the event loop's thread.
    """

    def __init__(self, limit: int) -> None:
        """Makes an empty outbox that holds at most `limit` items."""
        self._items: deque[T] = deque()
        self._limit = limit
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self.overflowed = False
        self.on_overflow: Callable[[], object] | None = None

    def put(self, item: T) -> None:
        """Adds an item; ignored once the outbox is closed."""
        if self._closed:
            return
        if len(self._items) >= self._limit:
            self.overflowed = True
            self._items.clear()
            self.close()
            if self.on_overflow is not None:
                self.on_overflow()
            return
        self._items.append(item)
        self._wake()

    def close(self) -> None:
        """Lets the reader have what is queued already, and nothing more."""
        self._closed = True
        self._wake()

    async def get(self) -> T | None:
        """Returns the next item, or None when a closed outbox is empty. For one reader at a time."""
        while not self._items:
            if self._closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()

    def __len__(self) -> int:
        return len(self._items)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
