"""Agreement of all replicas on their next call, before they exchange anything.

A call is described in words once, and the description compiled to a number. Each client gathers the numbers
of all others; only if they are equal, the call is carried out. So a replica that ended, failed or made
another call is an error on all clients that names it, not a wait or a wrong sum. When all is well this costs
one all-gather of 16 bytes from each client, and the group stays usable when they differ.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from dmesh.collectives.data_movement import all_gather
from dmesh.collectives.group import Group
from dmesh.collectives.persistent import plan
from dmesh.distribute.placement import Placement
from dmesh.errors import CollectiveError, ReplicaError, ReplicaMismatchError, ReplicaTimeoutError

__all__ = ["RETURNED", "Agreement", "Description", "ReplicaState", "call_in_replicas", "call_outside"]

_DIGEST = 16
_LONGEST = 1000
"""Characters of each replica's state in error messages."""
_MOST_BYTES = 200 + 12 * _LONGEST
"""Bytes of a replica's state in JSON: characters beyond the basic plane become twelve bytes each."""

Kind = Literal["computing", "waiting in", "returned", "raised", "missing from", "taking part in"]
_KINDS: tuple[Kind, ...] = ("computing", "waiting in", "returned", "raised", "missing from", "taking part in")


class ReplicaState(NamedTuple):
    """State of a replica in its step."""

    kind: Kind
    """Verb for its activity."""
    text: str = ""
    """Description of the call in which it waits, equal in all replicas; or its exception."""

    def __str__(self) -> str:
        return f"{self.kind} {self.text}".rstrip()

    def clipped(self) -> ReplicaState:
        """Return it with a shortened text, which has a digest of the whole text."""
        if len(self.text) <= _LONGEST:
            return self
        return ReplicaState(self.kind, f"{self.text[:_LONGEST]} ... (#{_digest(self.text, 4).hex()})")


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=size, person=b"replicas").digest()


class Description:
    """State that all replicas must share, compiled to a number.

    Args:
        state: The state in words.
    """

    __slots__ = ("digest", "number", "state")

    def __init__(self, state: ReplicaState) -> None:
        self.state = state
        """The state in words."""
        self.digest = _digest(str(state), _DIGEST)
        """The number as bytes."""
        self.number = np.frombuffer(self.digest, np.uint64)
        """The number as the array that clients gather."""


@lru_cache(maxsize=512)
def call_in_replicas(text: str) -> Description:
    """Return the description of a call that all replicas make in their functions."""
    return Description(ReplicaState("waiting in", text))


@lru_cache(maxsize=512)
def call_outside(text: str) -> Description:
    """Return the description of a call that all clients make outside of replicas."""
    return Description(ReplicaState("taking part in", text))


RETURNED = Description(ReplicaState("returned"))
"""Description of the end of a step."""
_UNLIKE = Description(ReplicaState("computing"))
"""Description of a client whose replicas differ or have failed: it equals no other description."""


class Agreement:
    """Comparison of the replicas' states.

    Args:
        placement: All replicas.
        group: All clients, if there are several.
        recover: Called on all clients when they differ, before the error is raised.
    """

    def __init__(
        self, placement: Placement, group: Group | None, recover: Callable[[], None] | None = None
    ) -> None:
        self._placement = placement
        self._group = group
        self._recover = recover
        self._gather: Any = None  # planned at the first comparison

    def check(self, description: Description) -> None:
        """Raise an error unless all replicas of all clients have the same description.

        All clients must call it or `compare`. The caller's replicas all have this description.

        Raises:
            ReplicaError: The replicas differ; all clients get the same error.
            CollectiveError: A client was lost, or did not arrive in time.
        """
        if self._group is not None and self._numbers(self._group, description) != (
            description.digest * self._group.size
        ):
            raise self._explain(self._group, [description.state] * len(self._placement.local))

    def compare(self, states: Sequence[ReplicaState]) -> ReplicaError | None:
        """Return None if all replicas of all clients are in the same state, otherwise the error.

        All clients must call it or `check`, each with its own replicas' states, and get the same answer.

        Raises:
            CollectiveError: A client was lost, or did not arrive in time.
        """
        alike = len(set(states)) == 1 and states[0].kind not in ("raised", "missing from")
        if alike:
            try:
                self.check(Description(states[0]))
            except ReplicaError as error:
                return error
            return None
        if self._group is None:
            return self._difference([[state.clipped() for state in states]])
        self._numbers(self._group, _UNLIKE)
        return self._explain(self._group, states)

    def _numbers(self, group: Group, description: Description) -> bytes:
        """Return the numbers of all clients."""
        if self._gather is None:
            self._gather = plan(all_gather, description.number, group=group)
        gathered: bytes = self._gather(description.number).tobytes()
        return gathered

    def _explain(self, group: Group, states: Sequence[ReplicaState]) -> ReplicaError:
        """Return the error of differing replicas, after all clients are ready to continue."""
        error = self._difference(self._exchange(group, states))
        if self._recover is not None:
            try:
                self._recover()
            except CollectiveError as obstacle:
                error.add_note(f"the next step may fail, too: {obstacle}")
        return error

    def _exchange(self, group: Group, states: Sequence[ReplicaState]) -> list[tuple[ReplicaState, ...]]:
        """Return the states of all clients' replicas as text."""
        message = json.dumps([state.clipped() for state in states]).encode()
        lengths = group.all_gather(np.array(len(message)))
        most = len(states) * _MOST_BYTES
        if int(lengths.max()) > most:
            raise ReplicaError(f"a client describes its replicas in more than {most} bytes")
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        rows = group.all_gather(padded)
        return [_read(row[:length].tobytes(), len(states)) for row, length in zip(rows, lengths, strict=True)]

    def _difference(self, clients: Sequence[Sequence[ReplicaState]]) -> ReplicaError:
        placement = self._placement
        found: dict[int, ReplicaState] = {}
        for client, states in enumerate(clients):
            own = placement.local if self._group is None else placement.of_client(client)
            found.update((replica.id, state) for replica, state in zip(own, states, strict=True))
        raised = [number for number in sorted(found) if found[number].kind == "raised"]
        if raised:
            first = found[raised[0]]
            more = f"; so did {placement.describe(raised[1:])}" if raised[1:] else ""
            return ReplicaError(
                f"{placement.describe(raised[:1])} raised {first.text}{more}. This ended the step of all "
                f"{placement.size} replicas{self._clients_of(raised)}",
                raised,
            )
        groups = [
            (state, [n for n in sorted(found) if found[n] == state])
            for state in dict.fromkeys(found.values())
        ]
        picture = "; ".join(f"{placement.describe(ids)}: {state}" for state, ids in groups)
        absent = [number for number in sorted(found) if found[number].kind == "missing from"]
        if absent:
            return ReplicaTimeoutError(
                f"{placement.describe(absent)} did not come in time to where the others wait: {picture}",
                absent,
            )
        [(usual, _)] = Counter(found[number] for number in sorted(found)).most_common(1)
        odd = [number for number in sorted(found) if found[number] != usual]
        return ReplicaMismatchError(
            f"the replicas made different calls: {picture}. All replicas must make the same calls with "
            f"the same shapes and dtypes in the same order, and return when the others do"
            f"{self._clients_of(odd)}",
            odd,
        )

    def _clients_of(self, ids: Sequence[int]) -> str:
        """Return hosts and pids of the replicas' clients, for finding their logs."""
        if self._group is None:
            return ""
        clients = sorted({self._placement.replicas[number].client for number in ids})
        return "; see " + ", ".join(map(self._group.communicator.describe, clients))


def _read(message: bytes, count: int) -> tuple[ReplicaState, ...]:
    """Return the (possibly invalid) states that a client sent."""
    try:
        states = tuple(ReplicaState(kind, text) for kind, text in json.loads(message))
    except (ValueError, TypeError, RecursionError) as error:
        raise ReplicaError(f"a client sent unreadable states of its replicas: {message!r:.200}") from error
    if len(states) != count or any(
        state.kind not in _KINDS or not isinstance(state.text, str) for state in states
    ):
        raise ReplicaError(f"a client sent strange states of its {count} replicas: {message!r:.200}")
    return states
