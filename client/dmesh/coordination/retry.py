"""Retries, limits and intervals of the client's calls to the coordinator, as values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The waits between attempts: each longer than the one before, none of them exactly predictable.

    The randomness keeps a thousand clients that lost the same server from coming back in step.
    """

    initial: float = 0.1
    """Wait after the first failure, seconds."""
    factor: float = 1.5
    """Factor by which each wait is longer than the one before."""
    maximum: float = 1.0
    """Longest wait, seconds; short, so that a restarted server has its clients back within seconds."""
    jitter: float = 0.2
    """Each wait is drawn between (1 - jitter) and (1 + jitter) times its nominal length."""

    def __post_init__(self) -> None:
        if not (0 < self.initial <= self.maximum and self.factor >= 1 and 0 <= self.jitter < 1):
            raise ValueError(f"not a usable retry policy: {self}")

    def delays(self, draw: Callable[[], float] = random.random) -> Iterator[float]:
        """Yield the waits in seconds, for ever. `draw` returns numbers in [0, 1)."""
        nominal = self.initial
        while True:
            yield nominal * (1 + self.jitter * (2 * draw() - 1))
            nominal = min(self.maximum, nominal * self.factor)


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits and intervals that an agent keeps to."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """The waits between attempts."""
    margin: float = 5.0
    """Seconds on top of the server's lease without any contact after which the coordinator counts as gone."""
    give_up: float | None = None
    """Seconds without any contact after which the coordinator counts as gone, instead of lease and margin."""
    attempt: float = 10.0
    """Seconds that one attempt of a call may take before it is made again (idempotent calls only)."""
    call: float = 60.0
    """Seconds after which a call that should be answered at once is given up although the server lives."""
    announce_interval: float = 10.0
    """Seconds between two lines that say whom a blocked call waits for."""
    slack: float = 1.0
    """Seconds that the server's word on a limit that has passed may be later than the caller's own clock."""

    ping_interval: float = 5.0
    """Seconds without a sign of life from a connection after which it is tried with a ping."""
    ping_timeout: float = 10.0
    """Seconds within which a ping must be answered; then the connection is given up for another."""

    @property
    def pings(self) -> tuple[float, float]:
        """Interval and timeout of pings, seconds; shorter for who gives up sooner."""
        if self.give_up is None:
            return self.ping_interval, self.ping_timeout
        return min(self.ping_interval, self.give_up / 4), min(self.ping_timeout, self.give_up / 2)

    def silence_allowed(self, lease: float) -> float:
        """Return the seconds without any contact after which the coordinator counts as gone."""
        return lease + self.margin if self.give_up is None else self.give_up


DEFAULT_PATIENCE = Patience()
"""Default of an agent."""
