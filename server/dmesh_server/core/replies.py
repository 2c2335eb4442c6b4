"""Answers kept so that a retried request has one effect and the same answer.

Only answers of calls that changed something are kept: a call that changed nothing may be judged anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dmesh_server.core.effects import Done, KvCompared, KvDeleted, KvIncremented, KvRevision
from dmesh_server.core.errors import CoreError, ErrorKind
from dmesh_server.core.events import KvCompareAndSet, Mutation
from dmesh_server.core.messages import quote

RememberedAnswer = Done | KvRevision | KvDeleted | KvIncremented | KvCompared
"""The answers that are kept."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """One kept answer."""

    sequence: int
    """Counts the member's kept answers, from 0."""
    request_id: str
    call: str
    """Which call it answered."""
    answer: RememberedAnswer
    """The answer; a KvCompared without its value, which the retry brings along."""


class Replies:
    """The latest answers to one member, oldest forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = max(limit, 1)
        self._by_id: dict[str, Remembered] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, request_id: str, call: str) -> RememberedAnswer | None:
        """Returns the answer to an earlier request with this id.

        Raises:
            CoreError: The id belonged to another call.
        """
        known = self._by_id.get(request_id)
        if known is None:
            return None
        if known.call != call:
            raise CoreError(
                ErrorKind.INVALID_ARGUMENT,
                f"the request id {quote(request_id)} was used for {known.call} and cannot be used again for "
                f"{call}; draw a new one for every call",
            )
        return known.answer

    def add(self, request_id: str, call: str, answer: RememberedAnswer) -> Remembered:
        """Keeps an answer."""
        remembered = Remembered(self._sequence, request_id, call, answer)
        self.restore(remembered)
        return remembered

    def restore(self, remembered: Remembered) -> None:
        """Takes back an answer that was kept before; must be called in order of their sequence."""
        while len(self._by_id) >= self._limit:
            del self._by_id[next(iter(self._by_id))]
        self._by_id[remembered.request_id] = remembered
        self._sequence = remembered.sequence + 1

    def place(self, remembered: Remembered) -> int:
        """Returns where to keep it durably: an answer overwrites the one that it pushes out."""
        return remembered.sequence % self._limit

    def places(self) -> list[int]:
        """Returns the places that are in use."""
        return [self.place(remembered) for remembered in self._by_id.values()]


def had_effect(answer: RememberedAnswer) -> bool:
    """Tells whether a call that was answered so has changed something."""
    match answer:
        case KvCompared():
            return answer.succeeded
        case KvDeleted():
            return answer.deleted > 0
        case _:
            return True


def without_value(answer: RememberedAnswer) -> RememberedAnswer:
    """Drops what the retry brings along, so that remembered answers are small."""
    if isinstance(answer, KvCompared) and answer.current is not None:
        return replace(answer, current=replace(answer.current, value=b""))
    return answer


def completed(answer: RememberedAnswer, event: Mutation) -> RememberedAnswer:
    """Puts back what `without_value` has dropped."""
    if isinstance(answer, KvCompared) and answer.current is not None and isinstance(event, KvCompareAndSet):
        return replace(answer, current=replace(answer.current, value=event.value))
    return answer
