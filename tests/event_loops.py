"""Event loops on threads of their own, for tests whose own thread must not be one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from tests.waiting import PATIENCE

T = TypeVar("T")


@contextlib.contextmanager
def entered(block: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Keep an asynchronous block entered on a thread with an event loop of its own; yield what it yields."""
    ready, over = Future[T](), threading.Event()

    async def run() -> None:
        async with block as value:
            ready.set_result(value)
            await asyncio.to_thread(over.wait)

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield ready.result(PATIENCE)
    finally:
        over.set()
        thread.join(PATIENCE)
