"""Limits and retries of a resolver that looks its cluster up at a service."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dmesh._log import logger
from dmesh.coordination.retry import RetryPolicy
from dmesh.errors import ClusterLookupUnavailableError, ConfigurationError

T = TypeVar("T")

_LONGEST_PAUSE = 60.0
"""Seconds; a service that asks for more patience than this is taken to ask for this much."""


class Busy(Exception):
    """An attempt failed in a way that another one may not.

    Args:
        reason: What happened, as a clause.
        retry_after: Seconds that the service asked to be left alone; None if it said nothing.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class LookupPolicy:
    """Limits of a resolver's requests to a service over the network, and waits between attempts."""

    attempt: float = 10.0
    """Seconds that one request may take."""
    give_up: float = 60.0
    """Seconds after which no further attempt is made."""
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(initial=0.5, factor=2.0, maximum=10.0))
    """The waits between attempts, if the service does not say how long."""
    most_bytes: int = 64 * 2**20
    """Longest reply that is read, bytes."""
    clock: Callable[[], float] = time.monotonic
    """Clock, seconds."""
    sleep: Callable[[float], object] = time.sleep
    """Function that waits, seconds."""

    def __post_init__(self) -> None:
        """Refuse limits that nothing could keep to."""
        if not (0 < self.attempt < math.inf and 0 <= self.give_up < math.inf and self.most_bytes >= 1):
            raise ConfigurationError(
                f"attempt={self.attempt!r}, give_up={self.give_up!r} and most_bytes={self.most_bytes!r} are "
                "no limits of a request: expected seconds and bytes greater than 0"
            )

    def ask(self, question: str, attempt: Callable[[], T]) -> T:
        """Make attempts until one succeeds or time runs out.

        Args:
            question: What is asked of whom, as errors put it: `the nodes of X at HOST`.
            attempt: Makes one; raises `Busy` if it makes sense to try again.

        Returns:
            What `attempt` did.

        Raises:
            ClusterLookupUnavailableError: None succeeded.
        """
        began = self.clock()
        for attempts, wait in enumerate(self.retry.delays(), 1):
            try:
                return attempt()
            except Busy as busy:
                pause = max(wait, min(busy.retry_after or 0.0, _LONGEST_PAUSE))
                passed = self.clock() - began
                if passed + pause > self.give_up:
                    raise ClusterLookupUnavailableError(
                        f"cannot get {question}: {busy}. Gave up after {attempts} "
                        f"attempt{'s' if attempts > 1 else ''} in {passed:.1f} s; check that the service is "
                        "up and that this host reaches it, then try again"
                    ) from busy.__cause__
                logger.info("%s: %s; next attempt in %.1f s", question, busy, pause)
            self.sleep(pause)
        raise AssertionError("a retry policy has no end")


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header; None if there is none, or a date instead."""
    if value is None or not value.isascii() or not value.strip().isdecimal() or len(value.strip()) > 9:
        return None
    return float(value)
