"""Transaction of one event: the records and effects that its handlers collect."""

from __future__ import annotations

from collections.abc import Iterable

from dmesh_server.core.effects import (
    Answer,
    Effect,
    Encodable,
    LazyRecord,
    Message,
    Noted,
    Persist,
    Probe,
    Push,
    Record,
    Reply,
    WatchPush,
)
from dmesh_server.core.log_events import LogEvent


class Transaction:
    """Collects the effects of one `Core.apply`, at one moment."""

    def __init__(self, now: float) -> None:
        self.now = now
        """Seconds of the server's monotonic clock."""
        self.unsettled: set[str] = set()
        """Clusters in which something has happened from which conclusions are to be drawn."""
        self._records: dict[tuple[str, str, str], Record | LazyRecord] = {}
        self._lazy = True
        self._effects: list[Effect] = []

    def persist(
        self, cluster: str, kind: str, key: str, value: bytes | Encodable | None, *, lazy: bool = False
    ) -> None:
        """Keep `value` durably; the last word on one address counts.

        Effects wait for it unless it is `lazy`, and everything else of this event, too.
        """
        self._lazy = self._lazy and lazy
        address = (cluster, kind, key)
        if address in self._records:  # in the order of the last writes
            del self._records[address]
        if value is None or isinstance(value, bytes):
            self._records[address] = Record(cluster, kind, key, value)
        else:
            self._records[address] = LazyRecord(cluster, kind, key, value)

    def persist_all(self, records: dict[tuple[str, str, str], Record]) -> None:
        """Keep records durably, given by their addresses; this event has kept none of these yet."""
        self._lazy = False
        self._records |= records

    def reply(self, token: int, answer: Answer) -> None:
        """Answer a request."""
        self._effects.append(Reply(token, answer))

    def push(self, sessions: Iterable[int], message: Message) -> None:
        """Send a message to sessions; do nothing if there are none."""
        listed = tuple(sessions)
        if listed:
            self._effects.append(Push(listed, message))

    def watch_push(self, push: WatchPush) -> None:
        """Push changes to a watch."""
        self._effects.append(push)

    def probe(self, probe: Probe) -> None:
        """Have a suspected member's process looked for."""
        self._effects.append(probe)

    def note(self, log_event: LogEvent) -> None:
        """Add an event to the log."""
        self._effects.append(Noted(log_event))

    def effects(self) -> list[Effect]:
        """Return everything collected, the durable records first."""
        if not self._records:
            return self._effects
        return [Persist(tuple(self._records.values()), self._lazy), *self._effects]
