"""A bounded memory of which sequence numbers of a group are over."""

from __future__ import annotations

from bisect import bisect_right


class ClosedSequences:
    """A set of integers that are mostly consecutive, kept as disjoint ranges.

    Collectives of a group close nearly in order, so a handful of ranges says it all. Sequence numbers that
    are never opened here leave gaps; when there are more ranges than `limit`, the two lowest become one: a
    number so long overtaken counts as closed.

    Args:
        limit: The most ranges that are kept.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._starts: list[int] = []
        self._ends: list[int] = []  # inclusive

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number <= self._ends[at]

    def add(self, number: int) -> bool:
        """Adds a number; returns True if others that were never added count as closed from now on, too."""
        at = bisect_right(self._starts, number)
        if at > 0 and number <= self._ends[at - 1]:
            return False
        joins_before = at > 0 and self._ends[at - 1] == number - 1
        joins_after = at < len(self._starts) and self._starts[at] == number + 1
        if joins_before and joins_after:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_before:
            self._ends[at - 1] = number
        elif joins_after:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._ends.insert(at, number)
        if len(self._starts) <= self._limit:
            return False
        self._starts.pop(1)
        self._ends.pop(0)
        return True
