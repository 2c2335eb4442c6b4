"""Log lines about who was refused at the door: enough to find them, never so many that they fill the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from dmesh._log import logger

INTERVAL: Final = 10.0
"""Seconds in which there is at most one line about a host."""
_MOST_HOSTS: Final = 256
_MANY: Final = "many hosts"


class RefusalLog:
    """Writes at most one line per host in an interval, with the number of those left out before it.

    The coordination server has the same rule for those whom it refuses. Used by one thread at a time.

    Args:
        rank: This client's id, with which lines begin.
        interval: Seconds between two lines about the same host.
        clock: Monotonic seconds.
    """

    def __init__(
        self, rank: int, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._interval = interval
        self._clock = clock
        self._told: dict[str, float] = {}  # host -> when the last line was written, oldest first
        self._left_out: dict[str, int] = {}

    def note(self, host: str, message: str) -> None:
        """Notes what was wrong with a connection from a host; the message should name it."""
        now = self._clock()
        self._forget(now)
        if host not in self._told and len(self._told) >= _MOST_HOSTS:
            host = _MANY  # they share a line: neither the log nor memory is for strangers to fill
        if host in self._told:
            self._left_out[host] = self._left_out.get(host, 0) + 1
            return
        self._told[host] = now
        logger.warning("rank %d: %s", self._rank, message)

    def _forget(self, now: float) -> None:
        while self._told:
            host, when = next(iter(self._told.items()))
            if now - when < self._interval:
                return
            del self._told[host]
            count = self._left_out.pop(host, 0)
            if count:
                logger.warning("rank %d: refused %d more connections from %s", self._rank, count, host)
