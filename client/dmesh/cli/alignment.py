"""Offsets between the clocks of several hosts, found from calls that all end together. No IO.

No rank can end an all-reduce before all ranks have begun it. So for two participating ranks, the call's end
on the one is not before its beginning on the other, and vice versa: each call bounds the difference of their
clocks from both sides. Within the bounds, the chosen difference is the one at which the calls end at the same
time, as they nearly do.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TOGETHER = frozenset({"barrier", "all_reduce", "all_gather", "all_to_all", "reduce_scatter"})
"""Calls that no rank ends before all ranks have begun them."""

Call = tuple[str, int]
"""Names one call on all ranks: lane and sequence number."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Correction to the times of one clock."""

    seconds: float
    """The difference to the clock of reference."""
    uncertainty: float
    """Seconds by which it may be wrong at most; infinite if nothing bounds it."""
    origin: str
    """Method that found it: `reference`, `calls`, or `wall clock`."""


def align(
    times: Mapping[str, Mapping[Call, Sequence[tuple[float, float]]]], walls: Mapping[str, float]
) -> dict[str, Offset]:
    """Finds the offsets of all clocks to the first one.

    Args:
        times: Of each clock, the calls that are ended together, with beginning and end on each of its ranks.
        walls: Of each clock, what the wall clock shows when it shows 0.

    Returns:
        The offset of each clock.
    """
    clocks = list(times)
    offsets = {clocks[0]: Offset(0.0, 0.0, "reference")} if clocks else {}
    spans = {clock: _spans(calls) for clock, calls in times.items()}
    # From clock to clock: not every host needs to have met the first one.
    while len(offsets) < len(clocks):
        found = [
            (candidate.uncertainty + offsets[known].uncertainty, other, known, candidate)
            for other in clocks
            if other not in offsets
            for known in offsets
            if (candidate := _between(spans[known], spans[other])) is not None
        ]
        if found:
            uncertainty, other, known, candidate = min(found, key=lambda item: item[0])
            offsets[other] = Offset(offsets[known].seconds + candidate.seconds, uncertainty, "calls")
            continue
        other = next(clock for clock in clocks if clock not in offsets)
        offsets[other] = Offset(walls[other] - walls[clocks[0]], float("inf"), "wall clock")
    return offsets


def _spans(calls: Mapping[Call, Sequence[tuple[float, float]]]) -> dict[Call, tuple[float, float, float]]:
    """Returns of each call the last beginning, the first end and the last end on a clock's ranks."""
    return {
        call: (
            max(begin for begin, _ in ranks),
            min(end for _, end in ranks),
            max(end for _, end in ranks),
        )
        for call, ranks in calls.items()
    }


def _between(
    reference: Mapping[Call, tuple[float, float, float]], other: Mapping[Call, tuple[float, float, float]]
) -> Offset | None:
    """Returns the offset to add to the other clock's times; None if the two have no common call."""
    lowest, highest = float("-inf"), float("inf")
    guesses: list[float] = []
    for call in reference.keys() & other.keys():
        (begin, first, last), (other_begin, other_first, other_last) = reference[call], other[call]
        lowest = max(lowest, begin - other_first)
        highest = min(highest, first - other_begin)
        guesses.append((last - other_last + first - other_first) / 2)
    if not guesses:
        return None
    guess = statistics.median(guesses)
    if lowest > highest:  # the clocks do not run equally fast, or one was set: no one offset is right
        return Offset(guess, lowest - highest, "calls")
    guess = min(max(guess, lowest), highest)
    return Offset(guess, max(guess - lowest, highest - guess), "calls")


def group_calls(
    events: Sequence[Mapping[str, object]],
) -> dict[Call, tuple[float, float]]:
    """Returns beginning and end, in seconds, of the calls of a trace that are ended together."""
    found: dict[Call, tuple[float, float]] = {}
    for event in events:
        arguments = event.get("args")
        if event.get("ph") != "X" or event.get("name") not in TOGETHER or not isinstance(arguments, dict):
            continue
        if arguments.get("error"):
            continue
        lane, number = arguments.get("lane"), arguments.get("sequence")
        begin, duration = event.get("ts"), event.get("dur")
        if event.get("cat") == "barrier":
            lane = arguments.get("call")
        if isinstance(lane, str) and isinstance(number, int) and number >= 0 and _are_times(begin, duration):
            assert isinstance(begin, int | float)
            assert isinstance(duration, int | float)
            found[lane, number] = begin / 1e6, (begin + duration) / 1e6
    return found


def _are_times(*values: object) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
