"""One direction of a proxied connection: what holds its bytes back, and the pump that moves them.

Bytes are never lost or reordered: a TCP connection through a bad network is slow or silent, not wrong. What a
lane holds back is bounded (see `_QUEUED`); beyond that the sender's own buffers fill up, as they would.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass

CHUNK = 64 << 10
"""Bytes that are read at once."""
_QUEUED = 64
"""Chunks that wait in one lane of one connection."""
_SLICES = 20
"""Parts of a second in which a throttled lane moves bytes."""

END = b""
"""Stands for the end of a stream in a lane."""


@dataclass
class Conditions:
    """Faults of one direction; shared by all connections of a proxy."""

    delay: float = 0.0
    """Seconds that everything comes later."""
    jitter: float = 0.0
    """Seconds by which the delay is longer or shorter, at random."""
    rate: float = 0.0
    """Bytes a second that get through; 0 for all."""
    dropped: bool = False
    """True if nothing gets through."""

    def __post_init__(self) -> None:
        self.changed = asyncio.Event()

    def change(self, **values: float | bool) -> None:
        """Sets some of them, and lets every pump look again."""
        for name, value in values.items():
            setattr(self, name, value)
        self.changed.set()
        self.changed = asyncio.Event()


class Lane:
    """Moves the bytes of one direction of one connection.

    Args:
        conditions: What is done to them.
        reader: Where they come from.
        writer: Where they go.
        chance: Draws the jitter.
    """

    def __init__(
        self,
        conditions: Conditions,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        chance: random.Random,
    ) -> None:
        self._conditions = conditions
        self._reader = reader
        self._writer = writer
        self._chance = chance
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED)
        self.moved = 0
        """Bytes that got through."""

    async def run(self) -> None:
        """Moves bytes until the stream ends.

        Raises:
            OSError: One of the two ends was reset.
        """
        reading = asyncio.create_task(self._read())
        try:
            while True:
                due, data = await self._queue.get()
                await self._until(due)
                while self._conditions.dropped:
                    await self._conditions.changed.wait()
                if data is END:
                    break
                await self._write(data)
            if self._writer.can_write_eof():
                with contextlib.suppress(OSError):
                    self._writer.write_eof()
            await reading  # for the error that ended it, if one did
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await reading

    async def _read(self) -> None:
        loop, last = asyncio.get_running_loop(), 0.0
        try:
            while data := await self._reader.read(CHUNK):
                wait = self._conditions.delay
                wait += self._conditions.jitter * (2 * self._chance.random() - 1)
                # Never before what came earlier: it is a stream.
                last = max(last, loop.time() + max(0.0, wait))
                await self._queue.put((last, data))
        finally:
            # The end takes its turn, too: a half-open connection is one whose end is not reported.
            await self._queue.put((last, END))

    async def _until(self, due: float) -> None:
        """Waits until the time has come, or the delay was taken away."""
        loop = asyncio.get_running_loop()
        while self._conditions.delay and (left := due - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._conditions.changed.wait(), left)

    async def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rate = self._conditions.rate
            part = rest[: max(1, int(rate / _SLICES))] if rate else rest
            self._writer.write(bytes(part))
            await self._writer.drain()
            self.moved += len(part)
            rest = rest[len(part) :]
            if rate:
                changed = self._conditions.changed
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), len(part) / rate)
            while rest and self._conditions.dropped:
                await self._conditions.changed.wait()
