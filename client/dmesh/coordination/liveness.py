"""Blocked and stuck members, reported to the user while this process waits for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dmesh._locks import Lock
from dmesh.coordination.activity import ActivityTracker
from dmesh.coordination.members import Liveness, Member, Task

_Known = tuple[Liveness, str, str]
"""State, operation and source line in the last report to the user."""


class LivenessBoard:
    """Announces each member that becomes blocked or stuck, or goes on after that, once per change.

    Only while this process waits for others: members that hold up no rank here are not reported. A
    member that was not announced for that reason is, when the server tells of it again.

    Args:
        own: Incarnation of this process.
        tracker: Knows whether this process waits.
        announce: Function that prints a line for the user.
    """

    def __init__(self, own: int, tracker: ActivityTracker, announce: Callable[[str], None]) -> None:
        self._own = own
        self._tracker = tracker
        self._announce = announce
        self._lock = Lock()
        self._reported: dict[tuple[Task, int], _Known] = {}

    def update(self, members: Iterable[Member]) -> None:
        """Take note of how members are now."""
        for member in members:
            line = self._news(member)
            if line:
                self._announce(line)

    def _news(self, member: Member) -> str:
        """Return a line about a member for the user; empty if there is nothing new."""
        key = (Task(member.job, member.index), member.incarnation)
        name = f"rank {member.rank}, {member.describe()},"
        with self._lock:
            if not member.trouble:
                reported = self._reported.pop(key, None)
                return f"{name} recovered: it was {reported[0].name.lower()}" if reported is not None else ""
            doing = member.activity
            known = (member.liveness, doing.operation if doing else "", doing.where if doing else "")
            if self._reported.get(key) == known:
                return ""
            if member.incarnation == self._own:
                self._reported[key] = known
                return f"other ranks are waiting for this process, which is {member.trouble}"
            if not self._tracker.waiting:
                return ""
            self._reported[key] = known
            return f"{name} is {member.trouble}"
