"""Consensus of a group's survivors on one decision, through the keys of the coordination service.

Each member writes its arrival. Once every member has arrived or is known to be gone, any of those that
arrived writes the decision, in a transaction that succeeds only if there is none yet. So the first decision
is the decision, however many members die meanwhile and whatever each of them believes about the others: a
member that was taken for lost, and arrives later, reads that the others went on without it.

Keys of a group, all of which begin with `dmesh/consensus/GROUP/GENERATION/`:

- `NUMBER/arrivals/RANK`: what a member brings; deleted with the decision.
- `NUMBER/decision`: the decision; deleted with the next one.
- `latest`: the number of the latest decision.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import and_
from typing import Any, Protocol

from dmesh._locks import Lock
from dmesh.collectives.control_messages import clean
from dmesh.collectives.failure import Cause
from dmesh.collectives.services import NAMED, Members, Services, ranks_text
from dmesh.collectives.work import Generation
from dmesh.coordination.transactions import Condition, Delete, Get, Operation, Put, TransactionResult
from dmesh.coordination.values import INT64, Snapshot
from dmesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CollectiveTypeError,
    CollectiveValueError,
    KeyWaitTimeoutError,
)

PREFIX = "dmesh/consensus/"
_LOOK = 0.05
"""Seconds between looks at which members are gone, while a decision is waited for."""
_READ_EVERY = 20
"""Looks after which the arrivals are read again, although no further member is gone."""


class Store(Protocol):
    """Key-value store of the coordination service, as a consensus uses it."""

    def transaction(
        self, compare: Iterable[Condition], then: Iterable[Operation], otherwise: Iterable[Operation]
    ) -> TransactionResult:
        """Change several keys at one revision, or none."""

    def key_value_get(self, key: str, timeout: float) -> bytes:
        """Read a key, waiting for it to exist; KeyWaitTimeoutError if it does not come in time."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Contribution of one member."""

    call: str
    """Function that it called: `agree` or `shrink`."""
    kind: str
    """Type of its flag: `bool`, `int`, or empty."""
    flag: int
    lost: tuple[int, ...]
    """Members that it has lost."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome of a consensus, the same on all members."""

    survivors: tuple[int, ...]
    """Ranks that participate from now on, in the group's order. After a timeout: the ranks that arrived."""
    flag: int = 0
    """Bitwise AND of the survivors' flags."""
    mismatch: str = ""
    """Text of the error, if the survivors called different functions."""
    timeout: float = 0.0
    """Limit in seconds, if time ran out; else 0."""


def flag_of(flag: object) -> tuple[str, int]:
    """Return type and value of a flag.

    Raises:
        CollectiveTypeError: It is neither a bool nor an integer.
        CollectiveValueError: It does not fit 64 bits.
    """
    if isinstance(flag, bool) or type(flag).__name__ == "bool":  # NumPy's is no subclass
        return "bool", int(bool(flag))
    try:
        number = int(flag.__index__())  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise CollectiveTypeError(f"agree needs a bool or an integer, got {type(flag).__name__}") from None
    if number not in INT64:
        raise CollectiveValueError(f"the flag of agree must fit a signed integer of 64 bits, got {number}")
    return "int", number


def survivors(came: Sequence[int], lost: Mapping[int, Iterable[int]], gone: Iterable[int]) -> tuple[int, ...]:
    """Return the members that can continue together: none of them has lost another one.

    Departed members are excluded first. Then, one after the other, the member with the most broken
    connections to the remaining ones is excluded; on a tie the one that most others have lost, and then the
    last one.

    Args:
        came: Ranks that have arrived, in the group's order.
        lost: The ranks that each of them has lost.
        gone: Ranks that are gone according to the coordination service.
    """
    left = [rank for rank in came if rank not in set(gone)]
    while True:
        pairs = {(rank, other) for rank in left for other in lost[rank] if other in left and other != rank}
        if not pairs:
            return tuple(left)
        links = {frozenset(pair) for pair in pairs}

        def blame(at: int) -> tuple[int, int, int]:
            rank = left[at]
            accused = sum(other == rank for _, other in pairs)  # noqa: B023
            return sum(rank in link for link in links), accused, at  # noqa: B023

        del left[max(range(len(left)), key=blame)]


def decide(
    members: Members, arrivals: Mapping[int, Arrival], gone: Iterable[int], timeout: float = 0.0
) -> Decision:
    """Return the decision for the arrivals that there are; `timeout`: the limit, if time ran out."""
    came = [rank for rank in members.ranks if rank in arrivals]
    if timeout:
        return Decision(tuple(came), timeout=timeout)
    found = survivors(came, {rank: arrivals[rank].lost for rank in came}, gone)
    calls = {rank: _call_text(arrivals[rank]) for rank in found}
    first = calls[found[0]]
    odd = next((rank for rank, call in calls.items() if call != first), None)
    if odd is not None:
        text = f"rank {found[0]} called {first}, rank {odd} called {calls[odd]}"
        return Decision(
            found,
            mismatch=f"{members.label}: {text}. All must make the same calls",
        )
    return Decision(found, reduce(and_, (arrivals[rank].flag for rank in found)))


def _call_text(arrival: Arrival) -> str:
    return f"{arrival.call}({arrival.kind})"


class Consensus:
    """Decisions of a group in one generation, which are counted: one member's part of them.

    Args:
        generation: The group's generation.
        store: Keys of the coordination service.
    """

    def __init__(self, generation: Generation, store: Store) -> None:
        self.generation = generation
        self.missing: tuple[int, ...] = ()
        """Members that took no part in the latest decision, the same on all that did."""
        self._members = generation.members
        self._services: Services = generation.members.services
        self._store = store
        self._prefix = f"{PREFIX}{self._members.group:016x}/{generation.number}/"
        self.count = 0
        """Number of decisions."""
        self._lock = Lock()

    def reach(self, call: str, flag: tuple[str, int], timeout: float) -> Decision:
        """Arrive, wait until all other members have arrived or are gone, and return the decision.

        A call that was interrupted can be made again: it takes part in the same decision.

        Args:
            call: The function, `agree` or `shrink`.
            flag: Type and value of its flag.
            timeout: Seconds that the others get.

        Raises:
            CollectiveMismatchError: The survivors called different functions.
            CollectiveTimeoutError: Members that are alive did not come in time.
            CollectiveError: The others went on without this member, or the collectives have ended.
            CoordinationError: The coordination service cannot be used.
        """
        label = f"{call}() of {self._members.label}"
        with self._lock:
            self._check()
            decision = self._reach(label, (call, *flag), timeout)
            self.count += 1
        missing = tuple(rank for rank in self._members.ranks if rank not in decision.survivors)
        if decision.timeout:
            raise CollectiveTimeoutError(
                f"{label} timed out after {decision.timeout:g} s: {ranks_text(missing)} did not call it, and "
                "no loss is known. Nothing was decided; all members can call it again",
                missing,
            )
        if self._services.rank not in decision.survivors:
            raise self._left_behind(label, f"{ranks_text(decision.survivors)} went on")
        self.missing = missing
        if decision.mismatch:
            raise CollectiveMismatchError(decision.mismatch)
        return decision

    def _check(self) -> None:
        """Raise the error for collectives that have ended, or have come to another generation."""
        generation = self.generation
        failure = generation.failure
        if failure is not None and failure.cause in (Cause.CLOSED, Cause.RENEWED, Cause.JOINING):
            raise failure.afterwards(self._members.label)
        if generation.number != self._services.generation:
            raise CollectiveError(
                f"generation {self._services.generation} of the collectives has begun, because the cluster's "
                f"members have changed: {self._members.label} begins anew, with all its members"
            )

    def _left_behind(self, label: str, text: str) -> CollectiveError:
        return CollectiveError(
            f"the others took rank {self._services.rank} for lost: {text} without it in {label}. End this "
            "process, or start it again: they do not wait for it any more"
        )

    def _gone(self) -> set[int]:
        """Return the other members that this one knows to be gone."""
        services = self._services
        others = (rank for rank in self._members.ranks if rank != services.rank)
        return {rank for rank in others if services.why_gone(rank) is not None}

    def _reach(self, label: str, mine: tuple[str, str, int], timeout: float) -> Decision:
        """Return the decision, which this member makes if it is the first that can."""
        services, number = self._services, self.count + 1
        policy = services.wait_policy
        began = services.clock()
        deadline, announce_at = began + timeout, began + policy.announce_every
        known, looks = self._gone(), 0
        arrivals = self._read(number, mine, known, arrive=True)
        while not isinstance(arrivals, Decision):
            gone, now = self._gone(), services.clock()
            awaited = [rank for rank in self._members.ranks if rank not in arrivals and rank not in gone]
            if not awaited or now >= deadline:
                return self._write(number, decide(self._members, arrivals, gone, timeout if awaited else 0.0))
            if now >= announce_at:
                announce_at += policy.announce_every
                names = "; ".join(map(services.describe, awaited[:NAMED]))
                policy.announce(f"still waiting in {label}, for {now - began:.0f} s; missing: {names}")
            try:
                limit = max(min(_LOOK, deadline - now), 0.001)
                return _decision(self._store.key_value_get(self._key(number, "decision"), timeout=limit))
            except KeyWaitTimeoutError:
                self._check()
            looks += 1
            gone = self._gone()
            if gone != known or looks % _READ_EVERY == 0 or services.clock() >= deadline:
                known = gone
                arrivals = self._read(number, mine, gone, arrive=False)
        return arrivals

    def _key(self, number: int, name: str) -> str:
        return f"{self._prefix}{number}/{name}"

    def _read(
        self, number: int, mine: tuple[str, str, int], gone: set[int], *, arrive: bool
    ) -> dict[int, Arrival] | Decision:
        """Return the arrivals that there are, this member's included, or the decision."""
        rank, latest, decided = self._services.rank, f"{self._prefix}latest", self._key(number, "decision")
        place, arrival = self._key(number, "arrivals/"), Arrival(*mine, tuple(sorted(gone)))
        put = [Put(f"{place}{rank}", json.dumps(asdict(arrival)))] if arrive else []
        reads = [Get(place, is_prefix=True), Get(latest)]
        result = self._store.transaction([Condition.absent(decided)], [*put, *reads], [Get(decided)])
        if not result:
            return _decision(_snapshot(result.results[0])[decided])
        found, last = map(_snapshot, result.results[-2:])
        if int(last.get(latest, b"0")) >= number:
            return self._catch_up(f"{place}{rank}", int(last[latest]))
        came = {int(key.rpartition("/")[2]): _arrival(value) for key, value in found.items()}
        return {**came, rank: arrival}

    def _catch_up(self, arrival: str, number: int) -> Decision:
        """Return the latest decision: the others have gone on, without this member or after a time-out."""
        latest = f"{self._prefix}latest"
        while True:
            decided = self._key(number, "decision")
            result = self._store.transaction([], [Delete(arrival), Get(latest), Get(decided)], [])
            newest, found = map(_snapshot, result.results[1:])
            if decided in found:
                self.count = number - 1
                return _decision(found[decided])
            number = int(newest[latest])

    def _write(self, number: int, decision: Decision) -> Decision:
        """Make a decision unless there is one; return the valid one."""
        decided = self._key(number, "decision")
        then: list[Operation] = [
            Put(decided, json.dumps(asdict(decision))),
            Put(f"{self._prefix}latest", str(number)),
            Delete(self._key(number, "arrivals/"), is_prefix=True),
            Delete(self._key(number - 1, "decision")),
        ]
        result = self._store.transaction([Condition.absent(decided)], then, [Get(decided)])
        return decision if result else _decision(_snapshot(result.results[0])[decided])


def _snapshot(result: int | Snapshot) -> Snapshot:
    assert isinstance(result, Snapshot)
    return result


def _arrival(value: bytes) -> Arrival:
    found = _object(value)
    return Arrival(
        clean(str(found["call"])),
        clean(str(found["kind"])),
        int(found["flag"]),
        tuple(map(int, found["lost"])),
    )


def _decision(value: bytes) -> Decision:
    found = _object(value)
    return Decision(
        tuple(map(int, found["survivors"])),
        int(found["flag"]),
        clean(str(found["mismatch"])),
        float(found["timeout"]),
    )


def _object(value: bytes) -> Mapping[str, Any]:
    found = json.loads(value)
    if not isinstance(found, dict):
        raise CollectiveError("a key of a consensus holds something else: the SDK's own keys were changed")
    return found
