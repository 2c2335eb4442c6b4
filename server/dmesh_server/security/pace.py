"""Token bucket: how fast one peer may speak."""

from __future__ import annotations


class Pace:
    """Counts what one peer says; sans-IO.

    What is said while the bucket is empty makes a debt, and the peer is not listened to, or is refused, until
    that is paid. So the rate holds on average, and a short burst costs nobody anything.
    """

    def __init__(
        self, rate: float, now: float, *, burst: float = 1.0, most_debt: float | None = None
    ) -> None:
        """Make a full bucket.

        Args:
            rate: Messages per second.
            now: Seconds of any monotonic clock.
            burst: Seconds' worth of messages that the bucket holds.
            most_debt: Seconds' worth of messages that it may be in debt; None for any number.
        """
        self._rate = rate
        self._most = rate * burst
        self._least = float("-inf") if most_debt is None else -rate * most_debt
        self._left = self._most
        self._at = now

    def spend(self, now: float) -> float:
        """Count one message; return for how many seconds not to listen to the next one."""
        left = min(self._most, self._left + (now - self._at) * self._rate) - 1
        self._left, self._at = max(left, self._least), now
        return max(0.0, -left / self._rate)

    def debt(self, now: float) -> float:
        """Return after how many seconds the bucket is not in debt any more."""
        return max(0.0, -(self._left / self._rate + now - self._at))

    def take(self, now: float) -> bool:
        """Count one message if it is within the rate; return whether it is."""
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
