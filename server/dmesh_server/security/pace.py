"""How fast one peer may speak: a bucket that fills at a rate and holds one second's worth."""

from __future__ import annotations


class Pace:
    """Counts what one peer says; sans-IO.

    What is said while the bucket is empty is not refused: it makes a debt, and the peer is not listened to
    until that is paid. So the rate holds on average, and a short burst costs nobody anything.
    """

    def __init__(self, rate: float, now: float) -> None:
        """Makes a full bucket.

        Args:
            rate: Messages per second.
            now: Seconds of any monotonic clock.
        """
        self._rate = rate
        self._left = rate
        self._at = now

    def spend(self, now: float) -> float:
        """Counts one message; returns for how many seconds not to listen to the next one."""
        left = min(self._rate, self._left + (now - self._at) * self._rate) - 1
        self._left, self._at = left, now
        return max(0.0, -left / self._rate)
