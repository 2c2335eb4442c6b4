"""Writing to streams whose readers may be slow, gone, or never there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from dmesh_server.send_queue import SendQueue


async def until_first_done(
    send_queue: SendQueue[Any], writer: Coroutine[Any, Any, None], *others: Coroutine[Any, Any, None]
) -> None:
    """Run a stream's writer and its other tasks until one of them ends, and end the rest.

    A writer whose reader does not read hangs in a single write and would never look at its queue again: it
    is ended when the send queue overflows. The caller asks the send queue whether that was so.

    Args:
        send_queue: Source of `writer`.
        writer: Writes until the send queue is closed.
        others: Other tasks of the stream.

    Raises:
        Exception: The exception of the first task to fail.
    """
    tasks = [asyncio.create_task(part) for part in (writer, *others)]
    send_queue.on_overflow = tasks[0].cancel
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        # Nothing may be on its way to the stream any more when the call's status is sent.
        await asyncio.wait(tasks)
    for task in done:
        if not (task is tasks[0] and send_queue.overflowed):
            task.result()
