"""Wording of an explanation: one paragraph for people, and the numbers in it."""

from __future__ import annotations

from collections.abc import Sequence

from dmesh.coordination.explanation.causes import Explanation, Suspect, Wait
from dmesh.coordination.explanation.picture import Picture

_NAMED = 8
"""Ranks that a sentence names one by one."""


def describe(explanation: Explanation, picture: Picture) -> str:
    """Words an explanation as one paragraph."""
    if not explanation.waits:
        there = sum(not member.state.departed for member in picture.state.members)
        return (
            f"Cluster {picture.cluster!r} waits for nothing: {_count(there, 'member')} there, and none is "
            "held up."
        )
    first, *others = explanation.waits
    sentences = [_lead(picture, first)]
    sentences += [_about(suspect) for suspect in first.suspects[:_NAMED]]
    if len(first.suspects) > _NAMED:
        sentences.append(f"{len(first.suspects) - _NAMED} more are missing.")
    if explanation.circle:
        chain = ", ".join(f"rank {rank}" for rank in explanation.circle)
        sentences.append(f"These wait for each other, in a circle that nothing will end: {chain}.")
    for wait in others[:_NAMED]:
        names = ranks_text([suspect.rank for suspect in wait.suspects])
        sentences.append(f"Also waited in, for {seconds_text(wait.since)}: {wait.what}, for {names}.")
    return " ".join(sentences)


def _lead(picture: Picture, wait: Wait) -> str:
    name, since = f"Cluster {picture.cluster!r}", seconds_text(wait.since)
    names = ranks_text([suspect.rank for suspect in wait.suspects])
    if wait.kind == "members" and wait.suspects and wait.suspects[0].state != "vacant":
        return f"{name} has lost {names}; work that needs them fails or waits for their successors."
    if wait.kind == "liveness":
        return f"{name} has {wait.what}: {names}."
    there = f"{ranks_text(wait.present)} {_is(wait.present)} there" if wait.present else "nobody is there yet"
    missing = f"{names} {_is(wait.suspects)} missing" if wait.suspects else "nobody is known to be missing"
    return f"{name} has waited for {since} in {wait.what}: {there}, {missing}."


def _about(suspect: Suspect) -> str:
    if suspect.state == "vacant":
        return f"Rank {suspect.rank} ({suspect.task}) has not registered."
    facts = []
    if suspect.state != "connected":
        facts.append(suspect.state + (f": {suspect.reason}" if suspect.reason else ""))
    if suspect.said is None:
        facts.append("no progress reported")
    elif suspect.last:
        facts.append(f"last call #{suspect.last_sequence}, {suspect.last}")
    if suspect.idle is not None:
        facts.append(f"last progress {seconds_text(suspect.idle)} ago")
    if suspect.operation:
        facts.append(f"in {suspect.operation}")
    if suspect.where:
        facts.append(f"main thread at {suspect.where}")
    reported = "" if suspect.said is None else f" (reported {seconds_text(suspect.said)} ago)"
    host = f"host {suspect.host or '?'}, pid {suspect.pid}"
    return f"Rank {suspect.rank} ({suspect.task}, {host}): {'; '.join(facts)}{reported}."


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


def _is(many: Sequence[object]) -> str:
    return "is" if len(many) == 1 else "are"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{' is' if number == 1 else 's are'}"
