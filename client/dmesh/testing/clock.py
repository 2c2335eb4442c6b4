"""Time that a test moves."""

from __future__ import annotations

import math
import threading

from dmesh.errors import ConfigurationError


class ManualClock:
    """Monotonic clock that advances only when a test advances it.

    Give it to whatever takes a `clock`: it is called without arguments and returns seconds.

    ```python
    clock = ManualClock()
    runtime = Runtime(store, limits, clock=clock)
    clock.advance(15)       # a lease
    runtime.tick()
    ```

    Args:
        now: What it shows at first, seconds. Not 0, so that a time that was never set is not taken for now.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self._now = float(now)
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Returns what it shows."""
        with self._lock:
            return self._now

    @property
    def now(self) -> float:
        """Time that it shows, seconds."""
        return self()

    def advance(self, seconds: float) -> float:
        """Goes on by `seconds`; returns what it shows then.

        Raises:
            ConfigurationError: It would go backwards, which a monotonic clock never does.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ConfigurationError(
                f"a monotonic clock goes on by a number of seconds from 0, not by {seconds!r}"
            )
        with self._lock:
            self._now += seconds
            return self._now
