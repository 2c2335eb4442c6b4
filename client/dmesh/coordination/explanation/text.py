"""Text about ranks, counts and durations."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_NAMED = 8
"""Runs of ranks that a sentence names one by one."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words, run shortened: `ranks 0-6, 9`."""
    if not ranks:
        return "nobody"
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    shown = ", ".join(parts[:_NAMED]) + (
        f" and {len(parts) - _NAMED} more runs" if len(parts) > _NAMED else ""
    )
    return f"rank{'s' if len(set(ranks)) > 1 else ''} {shown}"


def seconds_text(seconds: float) -> str:
    """Return a duration in words: `0.4 s`, `75 s`, `12 min`, `3.5 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def count_text(number: int, noun: str) -> str:
    """Return a number of things: `1 rank`, `5 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def be_text(many: Collection[object]) -> str:
    """Return `is` for one thing, else `are`."""
    return "is" if len(many) == 1 else "are"


def verb_text(many: Collection[object], verb: str) -> str:
    """Return a verb as it goes with so many things: `waits`, `wait`."""
    return f"{verb}s" if len(many) == 1 else verb
