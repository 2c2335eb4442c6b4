"""Agreement of all replicas that they are at the same place, before they exchange anything.

Each client says where its replicas are; only if all say the same, the step goes on. So a replica that ended,
failed or took another way is an error on all clients that names it, and not a wait or a wrong sum. When all
is well this costs one all-gather of 16 bytes for each client.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from dmesh.collectives.group import Group
from dmesh.distribute.placement import Placement
from dmesh.errors import ReplicaError, ReplicaMismatchError, ReplicaTimeoutError

__all__ = ["Agreement", "Place"]

_DIGEST = 16
_LONGEST = 1000
"""Characters of each replica's place that people get to see."""
_MOST_BYTES = 200 + 12 * _LONGEST
"""Of a replica's place on its way: characters beyond the basic plane become twelve bytes each."""

Kind = Literal["computing", "waiting in", "returned", "raised", "missing from", "taking part in"]
_KINDS: tuple[Kind, ...] = ("computing", "waiting in", "returned", "raised", "missing from", "taking part in")


class Place(NamedTuple):
    """Place of a replica."""

    kind: Kind
    """Verb for its activity there."""
    text: str = ""
    """Name of the place: a call with all in which replicas must agree, or an exception."""

    def __str__(self) -> str:
        return f"{self.kind} {self.text}".rstrip()

    def clipped(self) -> Place:
        """Returns it with a text that is not too long, which still differs where the whole texts do."""
        if len(self.text) <= _LONGEST:
            return self
        return Place(self.kind, f"{self.text[:_LONGEST]} ... (#{_digest(self.text, 4).hex()})")


class Agreement:
    """Compares where the replicas are.

    Args:
        placement: All replicas.
        group: All clients, if there are several.
    """

    def __init__(self, placement: Placement, group: Group | None) -> None:
        self._placement = placement
        self._group = group

    def compare(self, places: Sequence[Place]) -> ReplicaError | None:
        """Returns None if all replicas of all clients are at the same place, otherwise what is wrong.

        All clients must call it, each with the places of its own replicas, and all get the same answer.

        Raises:
            CollectiveError: A client is lost, or did not come.
        """
        alike = len(set(places)) == 1 and places[0].kind not in ("raised", "missing from")
        if self._group is None:
            return None if alike else self._difference([[place.clipped() for place in places]])
        digest = bytes(_DIGEST)
        if alike:
            digest = _digest(str(places[0]), _DIGEST)
        everybody = self._group.all_gather(np.frombuffer(digest, np.uint8))
        if alike and (everybody == everybody[0]).all():
            return None
        return self._difference(self._exchange(self._group, places))

    def _exchange(self, group: Group, places: Sequence[Place]) -> list[tuple[Place, ...]]:
        """Tells all clients in full where the replicas are."""
        message = json.dumps([place.clipped() for place in places]).encode()
        lengths = group.all_gather(np.array(len(message)))
        most = len(places) * _MOST_BYTES
        if int(lengths.max()) > most:
            raise ReplicaError(f"a client says more than {most} bytes of where its replicas are")
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        rows = group.all_gather(padded)
        return [_read(row[:length].tobytes(), len(places)) for row, length in zip(rows, lengths, strict=True)]

    def _difference(self, clients: Sequence[Sequence[Place]]) -> ReplicaError:
        placement = self._placement
        where: dict[int, Place] = {}
        for client, places in enumerate(clients):
            own = placement.local if self._group is None else placement.of_client(client)
            where.update((replica.id, place) for replica, place in zip(own, places, strict=True))
        raised = [number for number in sorted(where) if where[number].kind == "raised"]
        if raised:
            first = where[raised[0]]
            more = f"; so did {placement.describe(raised[1:])}" if raised[1:] else ""
            return ReplicaError(
                f"{placement.describe(raised[:1])} raised {first.text}{more}. This ended the step of all "
                f"{placement.size} replicas{self._clients_of(raised)}",
                raised,
            )
        at = [
            (place, [n for n in sorted(where) if where[n] == place])
            for place in dict.fromkeys(where.values())
        ]
        picture = "; ".join(f"{placement.describe(ids)}: {place}" for place, ids in at)
        absent = [number for number in sorted(where) if where[number].kind == "missing from"]
        if absent:
            return ReplicaTimeoutError(
                f"{placement.describe(absent)} did not come in time to where the others wait: {picture}",
                absent,
            )
        [(usual, _)] = Counter(where[number] for number in sorted(where)).most_common(1)
        odd = [number for number in sorted(where) if where[number] != usual]
        return ReplicaMismatchError(
            f"the replicas are not at the same place: {picture}. All replicas must make the same calls with "
            f"the same shapes and dtypes in the same order, and return when the others do"
            f"{self._clients_of(odd)}",
            odd,
        )

    def _clients_of(self, ids: Sequence[int]) -> str:
        """Says where the clients of replicas run, for whoever looks for their logs."""
        if self._group is None:
            return ""
        clients = sorted({self._placement.replicas[number].client for number in ids})
        return "; see " + ", ".join(map(self._group.communicator.describe, clients))


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=size, person=b"places").digest()


def _read(message: bytes, count: int) -> tuple[Place, ...]:
    """Reads where the replicas of a client are, which it may have said wrongly."""
    try:
        places = tuple(Place(kind, text) for kind, text in json.loads(message))
    except (ValueError, TypeError, RecursionError) as error:
        raise ReplicaError(f"a client said something unreadable of its replicas: {message!r:.200}") from error
    if len(places) != count or any(
        place.kind not in _KINDS or not isinstance(place.text, str) for place in places
    ):
        raise ReplicaError(f"a client said something strange of its {count} replicas: {message!r:.200}")
    return places
