"""Counts and durations that the server keeps of itself: plain numbers, at next to no cost.

Everything is counted on the event loop's thread, without locks; `exposition` shows it to Prometheus, if
installed. The embedded server counts as well: asking "are we measuring?" would cost the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

QUICK = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds in seconds for work of milliseconds."""
PATIENT = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""Upper bounds in seconds for waits."""


class Histogram:
    """Numbers of durations by upper bound."""

    __slots__ = ("bounds", "counts", "most", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Begin empty.

        Args:
            bounds: Upper bounds, ascending, seconds; larger durations are counted, too.
        """
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Numbers by bound; the last one is of durations above all bounds."""
        self.total = 0.0
        """Their sum, seconds."""
        self.most = 0.0
        """The longest."""

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds
        if seconds > self.most:
            self.most = seconds

    @property
    def count(self) -> int:
        """Number of durations observed."""
        return sum(self.counts)

    def quantile(self, part: float) -> float | None:
        """Return a bound that so great a part of them did not pass; None if there were none."""
        count = self.count
        if not count:
            return None
        seen = 0
        for bound, number in zip(self.bounds, self.counts, strict=False):
            seen += number
            if seen >= part * count:
                return min(bound, self.most)
        return self.most


class Measures:
    """Counts and durations of one server since its start."""

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self.rpcs: dict[tuple[str, str], Histogram] = {}
        """By method and way (`grpc` or `session`): time until the answer."""
        self.refused: Counter[str] = Counter()
        """Calls that were answered with an error, by its kind."""
        self.barriers = {"passed": Histogram(PATIENT), "failed": Histogram(PATIENT)}
        """By outcome: time from the first arrival to the end."""
        self.commits = Histogram(QUICK)
        """Commits of the store: the write and the sync to the disk. Stores in memory are not timed."""
        self.records = 0
        """Records in them."""
        self.lateness = Histogram(QUICK)
        """By how much heartbeats came later than agreed."""
        self.lag = Histogram(QUICK)
        """Lateness of the event loop."""
        self.sessions_dropped = 0
        """Sessions that were dropped because their clients did not read."""
        self.readers_dropped = 0
        """Streams of events that were ended because their readers did not read."""

    def rpc(self, method: str, way: str) -> Histogram:
        """Return where calls of a method are counted. For a bounded set of methods."""
        found = self.rpcs.get((method, way))
        if found is None:
            found = self.rpcs[method, way] = Histogram(QUICK)
        return found
