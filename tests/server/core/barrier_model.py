"""What clients may be told of barriers: the reference that the state machine's histories are held against."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dmesh_server.core.effects import BarrierResult, Record
from dmesh_server.core.errors import ErrorKind
from dmesh_server.core.model import Liveness, PassedBarrier, Task


@dataclass(eq=False)
class Client:
    """A client as it sees itself."""

    index: int
    incarnation: int
    last_sign: float
    """In served time, as all times here: without those in which the server did not run."""
    born: int
    """Its place in the order of all registrations and first results."""
    rejoined: bool = False
    """Whether its task slot was another's before."""
    session: int | None = None
    closed_at: float | None = None
    vouched: bool = False
    """Whether its process is known to exist, since its session broke."""
    killed: bool = False
    """Whether its process is known to be gone."""
    speaks: bool = True
    """Whether the server, since its last crash, was told what this client knows; then or when it departed."""
    finished: dict[str, int] = field(default_factory=dict)
    """How many instances of a barrier it has finished; -1 if it does not know."""
    passed: dict[str, PassedBarrier] = field(default_factory=dict)
    """What it presents to a server that was restarted."""
    known_to: int = 0
    """Incarnation of the server that knows all of it; 0 before the first session."""
    waits: set[str] = field(default_factory=set)
    """Barriers that it waits in."""
    arrived: set[str] = field(default_factory=set)
    """Those that it told the present server of."""
    progress: int = 0
    asked: int | None = None
    """The last question."""
    troubled: dict[int, Liveness] = field(default_factory=dict)
    """Whom it takes to be blocked or stuck."""

    def count(self, name: str) -> int:
        """Returns the instance that it enters next."""
        return self.finished.get(name, -1 if self.rejoined else 0)


class BarrierHistory:
    """Everything that was told of barriers in one run of the state machine."""

    def __init__(self) -> None:
        self._clock = itertools.count()
        self._known: set[tuple[int, str, int]] = set()
        """Instances whose results the server has, or had before it forgot them in good order."""
        self._results: dict[tuple[int, str, int], BarrierResult] = {}
        self._first_told: dict[tuple[int, str, int], int] = {}
        self._witnesses: dict[tuple[int, str, int], list[Client]] = {}

    def now(self) -> int:
        """Returns the next place in the order of what happened."""
        return next(self._clock)

    def latest(self, generation: int, name: str) -> int | None:
        """Returns the latest instance that the server knows to be over."""
        return max((key[2] for key in self._known if key[:2] == (generation, name)), default=None)

    def kept(self, generation: int, record: Record, *, lazy: bool) -> None:
        """Notes that the server remembers a result."""
        if record.kind != "barrier" or record.value is None:
            return
        result = json.loads(record.value)
        assert not (lazy and "error" in result), "a failure was told before it was durable"
        key = (generation, record.key, result["number"])
        assert key not in self._known, "an instance ended twice"
        self._known.add(key)

    def lost(self, generation: int, records: Iterable[Record]) -> None:
        """Notes that a crash undid what was not durable yet."""
        for record in records:
            assert record.kind == "barrier", "only a barrier's success may be undone"
            if record.value is not None:
                self._known.discard((generation, record.key, json.loads(record.value)["number"]))

    def told(
        self, generation: int, client: Client, result: BarrierResult, participants: Iterable[Client]
    ) -> None:
        """Checks a result that a client is told, before the client takes note of it."""
        name, number = result.name, result.instance
        key = (generation, name, number)
        count = client.count(name)
        assert count in (-1, number), "a client was told the result of another instance than it is in"
        known = self._results.get(key)
        if known is None:
            self._results[key] = result
            self._first_told[key] = self.now()
            self._witnesses[key] = []
            if result.error is None:
                for other in participants:
                    there = name in other.waits or other.count(name) > number
                    assert there, "a barrier succeeded without one of its participants"
        elif words(known) != words(result):
            # All who were told are gone, or not back, since a crash undid it: the server cannot know of it.
            # It may have failed since, or succeeded with those who took the task slots of the gone.
            assert known.error is None, "a failure that was told was taken back"
            assert not any(witness.speaks for witness in self._witnesses[key]), (
                "two clients were told different results"
            )
            self._results[key] = result
            self._first_told[key] = self.now()
            self._witnesses[key] = []
        if result.error is None:
            assert self._first_told[key] > client.born, "a client was told of a success of others"
        if client.rejoined and result.error is None:
            missed = [
                other
                for other, told in self._results.items()
                if other[:2] == (generation, name) and other[2] < number and told.error is None
                if count < 0 and self._first_told[other] > client.born
            ]
            assert not missed, "an instance succeeded with a client that never heard of it"
        self._witnesses[key].append(client)


def refused(result: BarrierResult) -> bool:
    """Tells whether a result concerns only the caller, not the barrier."""
    return result.error is not None and result.error.kind is ErrorKind.BARRIER_MISMATCH


def words(result: BarrierResult) -> tuple[object, ...]:
    """Returns what must be alike for all participants.

    Ages are by the clock of the server that spoke; who is told again after its restart gets the same words.
    """
    error = result.error
    return (result.name, result.instance, result.epoch, error and (error.kind, error.message))


def passed(result: BarrierResult, participants: Collection[Task]) -> PassedBarrier:
    """Returns what a client presents of a success that it was told."""
    return PassedBarrier(result.name, result.instance, tuple(participants), result.epoch)
