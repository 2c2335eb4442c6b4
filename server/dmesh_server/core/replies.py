"""Remembered answers: a retried request takes effect once and gets the same answer.

Only answers of calls that changed something are kept: a call that changed nothing may be judged anew.

A call within a session names a *reply slot*, which its client uses for no other call until it has received
the answer or has given the call up. The answer is kept in that slot until another call uses it. So every call
that may be sent again finds its answer, and no more answers are kept than calls were in flight at once. For a
call outside of a session the server never learns whether its answer arrived: the latest of those are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dmesh_server.core.effects import Done, KvDeleted, KvIncremented, KvRead, KvRevision, KvTransacted
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.messages import quote

REPLY_SLOTS = 256
"""Reply slots of one member: calls of its session that may be unanswered at a time."""

RememberedAnswer = Done | KvRevision | KvDeleted | KvIncremented | KvTransacted
"""The answers that are kept."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """One kept answer."""

    reply_slot: int
    """From 1; 0 for a call outside of a session."""
    sequence: int
    """Counts the answers to calls outside of a session, from 0."""
    request_id: str
    call: str
    """Name of the call that it answered."""
    answer: RememberedAnswer


class Replies:
    """The answers kept for one member.

    Args:
        limit: Answers to calls outside of a session that are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(limit, 1)
        self._sequence = 0
        self._in_slots: dict[int, Remembered] = {}
        self._latest: dict[str, Remembered] = {}

    def find(self, request_id: str, call: str, reply_slot: int) -> RememberedAnswer | None:
        """Return the kept answer to a request with this id; None if there is none.

        Raises:
            CoreError: There is no such reply slot, or the id belonged to another call.
        """
        if not 0 <= reply_slot <= REPLY_SLOTS:
            raise CoreError(
                ErrorKind.LIMIT_EXCEEDED,
                f"there is no reply slot {reply_slot}: {REPLY_SLOTS} calls of a session may be unanswered at "
                "a time. Wait for some answers first.",
            )
        known = self._in_slots.get(reply_slot) if reply_slot else self._latest.get(request_id)
        if known is None or known.request_id != request_id:
            return None
        if known.call != call:
            raise CoreError(
                ErrorKind.INVALID_ARGUMENT,
                f"the request id {quote(request_id)} was used for {known.call} and cannot be used again for "
                f"{call}; draw a new one for every call",
            )
        return known.answer

    def add(self, request_id: str, call: str, reply_slot: int, answer: RememberedAnswer) -> Remembered:
        """Keep an answer, in place of the one before in its slot, or of the oldest outside of a session."""
        remembered = Remembered(reply_slot, 0 if reply_slot else self._sequence, request_id, call, answer)
        self._keep(remembered)
        return remembered

    def restore(self, kept: Iterable[Remembered]) -> None:
        """Restore answers from durable records."""
        for remembered in sorted(kept, key=lambda reply: reply.sequence):
            self._keep(remembered)

    def place(self, remembered: Remembered) -> int:
        """Return the key of an answer's durable record, which replaces the record in that place."""
        return remembered.reply_slot or -(remembered.sequence % self._limit)

    def places(self) -> list[int]:
        """Return the keys of all durable records."""
        return [*self._in_slots, *map(self.place, self._latest.values())]

    def _keep(self, remembered: Remembered) -> None:
        if remembered.reply_slot:
            self._in_slots[remembered.reply_slot] = remembered
            return
        while len(self._latest) >= self._limit:
            del self._latest[next(iter(self._latest))]
        self._latest[remembered.request_id] = remembered
        self._sequence = remembered.sequence + 1


def had_effect(answer: RememberedAnswer) -> bool:
    """Return whether a call with this answer has changed something."""
    match answer:
        case KvTransacted():
            return any(had_effect(result) for result in answer.results if not isinstance(result, KvRead))
        case KvDeleted():
            return answer.deleted > 0
        case _:
            return True
