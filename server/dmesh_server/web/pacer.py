"""Scheduling of readers' requests in small steps, so that barriers never wait for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

BETWEEN = 0.003
"""Seconds from the beginning of a turn to that of the next: most barriers are passed in less."""
LONGEST = 5.0
"""Seconds: while turns are given out for so long already, no request is let in for another one."""
_STEP = 0.0005
"""Seconds after which a piece of work waits for its next turn."""


class Pacer:
    """Gives turns to requests and to pieces of long work: one after another, with time for others between.

    A page asks for several things at once, and all pages do when something happens: answered in a row they
    would hold up barriers for as long as all of them take.
    """

    def __init__(self) -> None:
        self._next_at = 0.0

    @property
    def crowded(self) -> bool:
        """True if a new turn would be too far off.

        Turns of callers that gave up are not returned: without a limit, a few callers that ask and go away
        would make everyone wait for minutes.
        """
        return self._next_at - asyncio.get_running_loop().time() >= LONGEST

    def take(self) -> float:
        """Take the next turn; return for how many seconds to wait for it, 0 for not at all."""
        now = asyncio.get_running_loop().time()
        at = max(now, self._next_at)
        self._next_at = at + BETWEEN
        return at - now

    async def wait(self) -> None:
        """Take the next turn and wait for it; go on at once if it is there."""
        seconds = self.take()
        if seconds > 0:
            await asyncio.sleep(seconds)


class Steps:
    """Divides one piece of work into steps, each of which has a turn."""

    def __init__(self, pacer: Pacer) -> None:
        """Begin the first step.

        Args:
            pacer: Gives the turns of the later steps.
        """
        self._pacer = pacer
        self._begin = time.perf_counter()

    async def pause(self) -> None:
        """Let others go on if this step was long enough; to be called often."""
        if time.perf_counter() - self._begin >= _STEP:
            await asyncio.sleep(self._pacer.take())
            self._begin = time.perf_counter()

    async def through(self, work: Generator[None, None, T]) -> T:
        """Run work that yields between its steps; return its result."""
        while True:
            try:
                next(work)
            except StopIteration as done:
                result: T = done.value
                return result
            await self.pause()
