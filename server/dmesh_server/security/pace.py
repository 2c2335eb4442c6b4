"""Token bucket: limit on the rate of one peer's messages."""

from __future__ import annotations


class Pace:
    """Token bucket of one peer, which reads no clock.

    A message that finds the bucket empty makes a debt, and the peer is not read, or is refused, until time
    has paid it. The rate holds on average; a short burst is free.
    """

    def __init__(
        self, rate: float, now: float, *, burst: float = 1.0, most_debt: float | None = None
    ) -> None:
        """Make a full bucket.

        Args:
            rate: Messages per second.
            now: Seconds of any monotonic clock.
            burst: Size of the bucket, seconds of messages at that rate.
            most_debt: Largest debt, seconds of messages at that rate; None for no bound.
        """
        self._rate = rate
        self._most = rate * burst
        self._least = float("-inf") if most_debt is None else -rate * most_debt
        self._left = self._most
        self._at = now

    def spend(self, now: float) -> float:
        """Count one message at `now`; return the seconds to wait before the next one is read."""
        left = min(self._most, self._left + (now - self._at) * self._rate) - 1
        self._left, self._at = max(left, self._least), now
        return max(0.0, -left / self._rate)

    def debt(self, now: float) -> float:
        """Return the seconds from `now` until the debt is paid."""
        return max(0.0, -(self._left / self._rate + now - self._at))

    def take(self, now: float) -> bool:
        """Count one message at `now` if the bucket has room for it; return whether it has."""
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
