"""Whether what clients were told of a lock can be true: one holder at every instant.

The journal of all changes says who was in the lock's queue at each revision: its holder is the one that came
first. Then:

- Whoever was told that it holds the lock was the holder at some revision.
- Every change of what the lock protects was made by the holder at that revision, and tokens only grow.
- The times in which clients held the lock, from being told so to giving it up, do not overlap.
- Every acknowledged change was made, and made once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "dmesh/lock/l/"


class Violation(Exception):
    """A history that no correct lock could have produced."""


@dataclass
class History:
    """What the clients wrote down."""

    journal: list[dict[str, Any]] = field(default_factory=list)
    """All changes, in order of revision."""
    told: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What each other client wrote."""


def load(paths: Iterable[Path]) -> History:
    """Reads the clients' files; a line that was cut short by a kill is the last of its file."""
    history = History()
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        events = [line for line in lines if line["what"] == "event"]
        if events:
            history.journal = events
        else:
            history.told[path.stem] = lines
    return history


def holders(journal: Iterable[dict[str, Any]]) -> dict[int, int]:
    """Returns the token of the lock's holder at each revision, 0 for nobody."""
    queue: dict[str, int] = {}
    found = {0: 0}
    for event in journal:
        key, revision = event["key"], event["revision"]
        if key.startswith(PREFIX):
            if event["value"] is None:
                queue.pop(key, None)
            else:
                queue.setdefault(key, revision)
        found[revision] = min(queue.values(), default=0)
    return found


def check(history: History) -> dict[str, int]:
    """Checks a history; returns how much there was of what.

    Raises:
        Violation: It cannot be true.
    """
    at = holders(history.journal)
    if sorted(at) != list(range(len(at))):
        raise Violation("the journal has gaps")
    held = set(at.values())
    latest, made, counted = 0, set(), 0
    for event in history.journal:
        if event["key"] == "guarded":
            token = int(event["value"].partition("/")[0])
            if at[event["revision"] - 1] != token:
                raise Violation(
                    f"revision {event['revision']} was made by {token}, which did not hold the lock"
                )
            if token < latest:
                raise Violation(f"the token {token} came after {latest}")
            latest = token
            made.add(event["revision"])
        elif event["key"] == "count":
            counted += 1
            if int(event["value"]) != counted:
                raise Violation(f"the count is {event['value']} at its change number {counted}")
    spans = []
    for name, lines in history.told.items():
        began: float | None = None
        for line in lines:
            match line["what"]:
                case "acquired":
                    began = line["at"]
                    if line["token"] not in held:
                        raise Violation(f"{name} was told that it holds the lock, which it never did: {line}")
                case "guarded" if line["succeeded"] and line["revision"] not in made:
                    raise Violation(f"a change that {name} was told of was not made: {line}")
                case "releasing":
                    end = line["at"]
                case "released":
                    assert began is not None
                    spans.append((began, end, name))
    spans.sort()
    for before, after in itertools.pairwise(spans):
        if after[0] < before[1]:
            raise Violation(f"two hold the lock at once: {before} and {after}")
    kinds = [line["what"] for lines in history.told.values() for line in lines]
    return {
        "locks taken": kinds.count("acquired"),
        "locks lost": kinds.count("lost"),
        "guarded changes": counted,
        "clients": len({name.rpartition("-")[0] for name in history.told}),
    }
