"""Lateness of the event loop: the first sign of an overloaded server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from dmesh_server.telemetry.measures import Histogram

_EVERY = 0.25


@contextlib.contextmanager
def watched(lag: Histogram) -> Iterator[None]:
    """Measure the running loop's lag, four times a second, until the block ends.

    Args:
        lag: Where it is counted.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def look(due: float) -> None:
        nonlocal timer
        now = loop.time()
        lag.observe(max(0.0, now - due))
        timer = loop.call_at(now + _EVERY, look, now + _EVERY)

    look(loop.time())
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
