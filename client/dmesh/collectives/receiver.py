"""The thread that waits for the arrays of a group's asynchronous receives with a tag, or from any source."""

from __future__ import annotations

import time
from collections.abc import Callable

from dmesh._locks import Lock
from dmesh.collectives.wait import Wait
from dmesh.collectives.work import Work
from dmesh.coordination.waiting import Bell

_SPINNING = 200e-6
"""Seconds of looking at native endpoints without a nap."""
_NAPS = 50e-6, 1e-3
"""Shortest and longest nap between two looks, in seconds."""


class Looks:
    """Looks for arrays: whenever the bell rings and, if some may come without a ring, ever more rarely."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._began = time.monotonic()
        self._nap = _NAPS[0]

    def until(self, found: Callable[[], bool], polls: Callable[[], bool], seconds: float) -> bool:
        """Look for at most so long; return whether something was found. `polls`: no bell may ring."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if polls():
                if time.monotonic() - self._began < _SPINNING:
                    time.sleep(0)
                    if found():
                        return True
                    continue
                left, self._nap = min(left, self._nap), min(2 * self._nap, _NAPS[1])
            if self._bell.wait_for(found, left):
                return True
        return False


class Receiver:
    """Receives that wait, all on one thread: with one each, every array that comes would wake all of them."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._lock = Lock()
        self._added: list[Work] = []
        self._runs = False

    def add(self, work: Work) -> bool:
        """Have a receive waited for. Return True if no thread does that: one must call `run` then."""
        with self._lock:
            self._added.append(work)
            runs, self._runs = self._runs, True
        if runs:
            self._bell.ring()
        return not runs

    def run(self, finish: Callable[[Work], object]) -> None:
        """Wait until no receive is left; pass each to `finish` that has found its array, or has failed."""
        waits: dict[Work, Wait] = {}
        ready: list[Work] = []

        def found() -> bool:
            ready.extend(work for work in waits if work.attempt(work.find))
            return bool(ready or self._added)

        def polls() -> bool:
            return any(work.polls for work in waits)

        while self._take_added(waits):
            Looks(self._bell).until(found, polls, min(wait.left for wait in waits.values()))
            for work, wait in waits.items():
                if not wait.left and work not in ready and work.attempt(lambda _: wait.look(work.find)):  # noqa: B023
                    ready.append(work)
            while ready:
                work = ready.pop(0)
                waits.pop(work).end()
                finish(work)

    def _take_added(self, waits: dict[Work, Wait]) -> bool:
        """Begin to wait for the receives that were added; return False if there are none at all."""
        with self._lock:
            waits.update((work, work.begin_wait()) for work in self._added)
            self._added.clear()
            self._runs = bool(waits)
            return self._runs
