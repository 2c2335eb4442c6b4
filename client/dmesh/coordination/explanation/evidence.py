"""Evidence of a verdict: facts about members and waits, in words."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dmesh.coordination.explanation.causes import Explanation, Suspect, Wait
from dmesh.coordination.explanation.text import be_text, ranks_text, seconds_text, verb_text

MOST_NAMED = 8
"""Culprits, reasons and further waits that are described one by one."""

_CALL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_SHAPE = re.compile(r"(?:.*, )?(\w+), shape (\(.*\))$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a verdict."""

    label: str
    """Kind of fact: `line`, `waits in`, `process`, `reason`, `last call`, `others`, `also` ..."""
    text: str
    """The fact."""
    brief: str = ""
    """The same in a few words, to stand beside the headline; empty for a detail."""


def line_of(where: str) -> str:
    """Return a position in a program in short: `late.py:8` for `/home/me/late.py:8 in train`."""
    return where.partition(" in ")[0].replace("\\", "/").rpartition("/")[2]


def what(wait: Wait) -> list[Evidence]:
    """Return what members wait in."""
    if wait.kind == "liveness":
        return []
    there = (
        f"{ranks_text(wait.present)} {be_text(wait.present)} there"
        if wait.present
        else "no rank has arrived yet"
    )
    brief = f"{wait.what}"
    if match := _CALL.fullmatch(wait.call):
        shape = _SHAPE.match(match[2])
        arguments = f"{shape[1]} {shape[2]}" if shape else match[2]
        brief = f"{match[1]} #{wait.sequence}" + (f" · {arguments}" if arguments else "")
    return [Evidence("waits in", f"{wait.what}: {there}", brief)]


def position(one: Suspect) -> list[Evidence]:
    """Return the position of a member's main thread, if it is known."""
    if not one.where:
        return []
    _, _, function = one.where.partition(" in ")
    return [Evidence("line", one.where, f"{line_of(one.where)} {function}".strip())]


def process(one: Suspect) -> list[Evidence]:
    """Return the process of a member, if there is one."""
    if one.state == "vacant":
        return []
    return [
        Evidence("process", f"host {one.host or '?'}, pid {one.pid}", f"pid {one.pid} · {one.host or '?'}")
    ]


def last_call(one: Suspect) -> list[Evidence]:
    """Return a member's last call, if it is known."""
    return [Evidence("last call", f"#{one.last_sequence}, {one.last}")] if one.last else []


def state(one: Suspect) -> list[Evidence]:
    """Return a member's state, unless it is merely connected."""
    if one.state == "connected":
        return []
    return [Evidence("state", one.state + (f": {one.reason}" if one.reason else ""))]


def progress(one: Suspect) -> list[Evidence]:
    """Return how long ago a member made progress."""
    if one.said is None or one.idle is None:
        return [] if one.state == "vacant" else [Evidence("last progress", "it has reported none")]
    shown = f"{seconds_text(one.idle)} ago (reported {seconds_text(one.said)} ago)"
    return [Evidence("last progress", shown + (f", in {one.operation}" if one.operation else ""))]


def also(explanation: Explanation, main: Wait) -> list[Evidence]:
    """Return the other waits of the cluster."""
    rest = [wait for wait in explanation.waits if wait is not main and wait.kind != "liveness"]
    return [
        Evidence(
            "also",
            f"{ranks_text(wait.present)} {verb_text(wait.present, 'wait')} in {wait.what} "
            f"for {ranks_text([one.rank for one in wait.suspects])}, {seconds_text(wait.since)}",
        )
        for wait in rest[:MOST_NAMED]
        if wait.present
    ]
