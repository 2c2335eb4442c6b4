"""Whether what clients were told of a lock, a semaphore and an election can be true.

The journal of all changes says who was in each queue at each revision: those that came first hold its places.
Then, of each of the three:

- Whoever was told that it holds a place did hold one at some revision.
- Every change of what it protects was made by a holder at that revision; with one place, tokens only grow.
- At no time do more clients hold it than it has places, each from being told so to giving it up.
- Every acknowledged change was made, and made once.
- Whoever was seen to lead did lead, and no leader was seen after a later one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLACES = {"lock": 1, "semaphore": 2, "election": 1}
"""What there is, each under the name `x`, and how many may hold it."""


class Violation(Exception):
    """A history that no correct lock could have produced."""


@dataclass
class History:
    """What the clients wrote down."""

    journal: list[dict[str, Any]] = field(default_factory=list)
    """All changes, in order of revision."""
    told: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What each other client wrote."""
    leaders: list[int] = field(default_factory=list)
    """Tokens of the leaders that one client saw, in order."""


def load(paths: Iterable[Path]) -> History:
    """Reads the clients' files; a line that was cut short by a kill is the last of its file."""
    history = History()
    for path in paths:
        lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        events = [line for line in lines if line["what"] == "event"]
        if events:
            history.journal = events
            history.leaders = [line["token"] for line in lines if line["what"] == "leader"]
        else:
            history.told[path.stem] = lines
    return history


def holders(journal: Iterable[dict[str, Any]], kind: str) -> dict[int, list[int]]:
    """Returns the tokens of the holders at each revision."""
    queue: dict[str, int] = {}
    found: dict[int, list[int]] = {0: []}
    for event in journal:
        key, revision = event["key"], event["revision"]
        if key.startswith(f"dmesh/{kind}/x/"):
            if event["value"] is None:
                queue.pop(key, None)
            else:
                queue.setdefault(key, revision)
        found[revision] = sorted(queue.values())[: PLACES[kind]]
    return found


def check(history: History) -> dict[str, int]:
    """Checks a history; returns how much there was of what.

    Raises:
        Violation: It cannot be true.
    """
    found = {"clients": len({name.rpartition("-")[0] for name in history.told})}
    for kind in PLACES:
        at = holders(history.journal, kind)
        if sorted(at) != list(range(len(at))):
            raise Violation("the journal has gaps")
        held = {token for tokens in at.values() for token in tokens}
        made = _check_changes(history.journal, kind, at)
        spans = _check_told(history.told, kind, held, made)
        _check_spans(spans, kind)
        lines = [line for lines in history.told.values() for line in lines if line.get("kind") == kind]
        kinds = [line["what"] for line in lines]
        found |= {
            f"{kind} taken": kinds.count("acquired"),
            f"{kind} lost": kinds.count("lost"),
            f"{kind} changes": len(made),
        }
        if kind == "election":
            unknown = set(history.leaders) - held - {0}
            tokens = [token for token in history.leaders if token]
            if unknown or tokens != sorted(tokens):
                raise Violation(f"leaders were seen that never led, or too late: {history.leaders}")
    return found | {"leaders seen": len(history.leaders)}


def _check_changes(journal: list[dict[str, Any]], kind: str, at: dict[int, list[int]]) -> set[int]:
    """Checks who has changed what is protected; returns the revisions of these changes."""
    latest, made, counted = 0, set(), 0
    for event in journal:
        if event["key"] == f"guarded/{kind}":
            token = int(event["value"].partition("/")[0])
            if token not in at[event["revision"] - 1]:
                raise Violation(
                    f"revision {event['revision']} was made by {token}, which did not hold the {kind}"
                )
            if PLACES[kind] == 1 and token < latest:
                raise Violation(f"the token {token} came after {latest}")
            latest = token
            made.add(event["revision"])
        elif event["key"] == f"count/{kind}":
            counted += 1
            if int(event["value"]) != counted:
                raise Violation(f"the count is {event['value']} at its change number {counted}")
    return made


def _check_told(
    told: dict[str, list[dict[str, Any]]], kind: str, held: set[int], made: set[int]
) -> list[tuple[float, float, str]]:
    """Checks what clients were told; returns from when to when each held a place."""
    spans = []
    for name, lines in told.items():
        began: float | None = None
        for line in lines:
            if line.get("kind") != kind:
                continue
            match line["what"]:
                case "acquired":
                    began = line["at"]
                    if line["token"] not in held:
                        raise Violation(f"{name} was told that it holds the {kind}, but never did: {line}")
                case "guarded" if line["succeeded"] and line["revision"] not in made:
                    raise Violation(f"a change that {name} was told of was not made: {line}")
                case "releasing":
                    end = line["at"]
                case "released":
                    assert began is not None
                    spans.append((began, end, name))
    return spans


def _check_spans(spans: list[tuple[float, float, str]], kind: str) -> None:
    inside: list[tuple[float, float, str]] = []
    for span in sorted(spans):
        inside = [*(other for other in inside if other[1] > span[0]), span]
        if len(inside) > PLACES[kind]:
            raise Violation(f"{len(inside)} hold the {kind} at once: {inside}")
