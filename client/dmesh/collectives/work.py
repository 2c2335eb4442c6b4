"""Calls of a group from their number to their end: their order, their failure, their wait, their result.

A group has a new `Generation` whenever lost clients have been replaced. In it, the collectives and the
transfers of each pair of ranks are counted in a `Stream`, and each call under way is a `Work`.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dmesh.collectives.backends.base import Backend, EndpointOpener, Matcher, Operation, Search
from dmesh.collectives.control_messages import Position
from dmesh.collectives.failing import Failing, close_all
from dmesh.collectives.failure import Failure
from dmesh.collectives.futures import Future
from dmesh.collectives.position_query import PositionQuery
from dmesh.collectives.request import Buffers, Descriptor, Request, as_called, text_of
from dmesh.collectives.services import ANY_RANK, Members, Pair
from dmesh.collectives.tuning import SHIPPED, Tuning
from dmesh.collectives.wait import Attempt, Wait
from dmesh.coordination.waiting import Bell
from dmesh.native import Endpoint

_SENT = 64
"""Transfers whose descriptors are kept: the receiver may come to one when its sender is several further."""
Key = tuple[int, ...] | None
"""Stream of a group: None for its collectives, (sender, receiver) for the transfers without a tag of a pair,
(sender, receiver, 1) for those with one, () for receives that have not found what they take."""


def group_id(*parts: object) -> int:
    """Return the id of a group, which each member computes from the group's definition."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8, person=b"dmesh group").digest(), "big"
    )


class Stream:
    """Order of a group's collectives, or of the transfers from one rank to another; see `base.Stream`.

    In a group with native endpoints, calls from a certain number on go through an endpoint, one after the
    other: an endpoint carries one call at a time. Guarded by the generation's lock.
    """

    def __init__(self, number: int, pair: Pair | None, *, numbered: bool = True) -> None:
        self.number = number
        self.pair = pair
        self.numbered = numbered
        """True if its calls have the same numbers on all ranks, which can ask each other about them."""
        self.others = 0
        """Transfers with a tag from this rank to the same receiver."""
        self.endpoint: Endpoint | None = None
        self.calls: dict[int, Work] = {}
        """Calls under way that Python carries out, by number."""
        self.callers: set[int] = set()
        """Ids of the threads that have made calls; those of fast calls may be missing."""
        self._issued = 0
        # Numbers and descriptors of the last calls that Python has completed.
        self._over: deque[tuple[int, str]] = deque([(0, "")], maxlen=1 if pair is None else _SENT)
        self._first = 0  # number of the first call that goes through an endpoint; 0: none does
        self._open: Callable[[], Endpoint] | None = None
        self._allowed = 1 if pair is None else sys.maxsize  # last call that may begin before `settle`
        self._bell = Bell()
        self._waiting = 0
        self._listener: Callable[[], object] | None = None

    @property
    def issued(self) -> int:
        """Number of the last call that was made."""
        return self._issued if self.endpoint is None else self.endpoint.issued

    @property
    def completed(self) -> int:
        """Number of the last call that is over."""
        return self._over[-1][0] if self.endpoint is None else self.endpoint.completed

    def recorded(self, number: int) -> tuple[str, int]:
        """Return descriptor and bytes of a call that is over, or that the endpoint took.

        An empty text if it is forgotten, and 0 bytes if the endpoint did not take it.
        """
        recent = () if self.endpoint is None else self.endpoint.recent()
        return next(
            ((text_of(Descriptor(*found)), nbytes) for at, found, nbytes, *_ in recent if at == number),
            (dict(self._over).get(number, ""), 0),
        )

    def uses_endpoint(self, sequence: int) -> bool:
        """Return whether a call can go through the endpoint, or through MPI."""
        return 0 < self._first <= sequence

    def issue(self) -> int:
        """Count a call, and return its number."""
        self.open_next()
        if self.endpoint is not None:
            return self.endpoint.next_sequence()
        self._issued += 1
        return self._issued

    def issue_tagged(self, untagged: Stream) -> int:
        """Count a transfer with a tag; its number is its place among all transfers to the same receiver."""
        untagged.others += 1
        if untagged.endpoint is not None:
            untagged.endpoint.others = untagged.others
        self._issued = untagged.issued + untagged.others
        return self._issued

    def open_next(self) -> None:
        """Open the endpoint, if the next call goes through it."""
        if self._open is not None and self._first == self._issued + 1:
            self._open_endpoint()

    def complete(self, number: int, text: str) -> None:
        """Note that a call is over; to be followed by `wake`, without the lock."""
        if number > self._over[-1][0]:
            self._over.append((number, text))
            if self.endpoint is not None and number > self.endpoint.completed:
                self.endpoint.completed = number

    def freeze(self) -> int:
        """Let no later call begin before `settle`; return the number of the last one that may."""
        self._allowed = self._issued
        return self._issued

    def settle(self, first: int, open_: Callable[[], Endpoint] | None) -> None:
        """Let calls begin: from the `first` one on, if it is not 0, they go through an endpoint, or MPI."""
        self._first, self._open = first, open_
        if open_ is not None and self._issued >= first - 1:
            self._open_endpoint()
        self._allowed = sys.maxsize
        self.wake()

    def _open_endpoint(self) -> None:
        assert self._open is not None
        endpoint = self._open()
        endpoint.issued, endpoint.completed, endpoint.others = self._issued, self._first - 1, self.others
        self.endpoint, self._open = endpoint, None
        self._listen()

    def ready(self, number: int, *, alone: bool = False) -> bool:
        """Return whether a call may begin now; `alone`: only if all earlier calls are over."""
        if alone and min(tuple(self.calls), default=number) < number:
            return False
        if not self.uses_endpoint(number):
            return number <= self._allowed
        return self.completed >= number - 1

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds, looking whenever one of the calls is over; False if it does not."""
        self._waiting += 1
        try:
            self._listen()
            return self._bell.wait_for(condition, seconds)
        finally:
            self._waiting -= 1
            self._listen()

    def wake(self) -> None:
        """Make the calls that wait for their turn look again."""
        if self._waiting:
            self._bell.ring()

    def on_complete(self, listener: Callable[[], object]) -> None:
        """Call `listener` whenever the endpoint has completed a call that it took whole."""
        self._listener = listener
        self._listen()

    def _listen(self) -> None:
        if self.endpoint is not None:
            self.endpoint.on_complete = self._completed_natively if self._waiting else self._listener

    def _completed_natively(self) -> None:
        self._bell.ring()
        if self._listener is not None:
            self._listener()


@dataclass(frozen=True, slots=True)
class Connection:
    """Outcome of the capability exchange in a group's first call."""

    backends: tuple[Backend, ...] = ()
    """Backends that all members have, the preferred one first."""
    tuning: Tuning = SHIPPED
    endpoints: EndpointOpener | None = None
    inner: tuple[Endpoint, ...] = ()
    """Further native endpoints, of parts of the group."""
    sends_from: tuple[int, ...] = ()
    """For each member, the number of the first transfer to it that goes through an endpoint."""
    receives_from: tuple[int, ...] = ()
    reason: str = ""
    """The group's backend and the reason for it, as text: "exchanges messages. It shares no memory: ..."."""


class Generation(Failing):
    """A group in one generation: its streams, its backends, and its failure."""

    def __init__(self, members: Members, number: int, failure: Failure | None = None) -> None:
        super().__init__(members, number, failure)
        self.streams: dict[Key, Stream] = {None: Stream(members.group, None)}
        self.tuning = SHIPPED
        """Tuning of the group's first member; until `settle`, the tuning that all clients share."""
        self.connects: Callable[[str], Operation]
        """Begins to find out, before the first collective, which backends all have; takes its descriptor."""
        self.matcher: Matcher
        """Finds what receives with a tag, of any source or of unknown shape take."""
        # Native endpoints for collectives, and for transfers to and from each member: the fast path's.
        self.endpoint: Endpoint | None = None
        self.outgoing: list[Endpoint | None] = [None] * len(members.ranks)
        self.incoming: list[Endpoint | None] = [None] * len(members.ranks)
        self.connection: Connection | None = None
        """Outcome of the capability exchange; None before the group's first call."""
        self.shares_arrays = True
        """False once the members have found out that they cannot all map memory of one of them."""
        self._numbers: dict[Key, int] = {}
        self._frozen = False
        members.services.events.attach(self.streams[None], members.name, None)

    @property
    def endpoints(self) -> list[Endpoint]:
        """All native endpoints of the group on this client."""
        found = [s.endpoint for s in tuple(self.streams.values()) if s.endpoint is not None]
        return found if self.connection is None else [*found, *self.connection.inner]

    def all_calls(self) -> Iterable[Stream]:
        """Return the streams; with the lock held."""
        return self.streams.values()

    def stream_of(self, endpoint: Endpoint) -> Stream | None:
        """Return the stream of an endpoint; None if it is none of this generation's."""
        return next((s for s in tuple(self.streams.values()) if s.endpoint is endpoint), None)

    # -- streams and backends --------------------------------------------------------------------------------

    def stream(self, key: Key) -> Stream:
        """Return a stream; with the lock held."""
        stream = self.streams.get(key)
        if stream is not None:
            return stream
        assert key is not None  # the stream of collectives is there from the beginning
        members = self.members
        pair = self.pair_of(key)
        numbered = len(key) == len(pair) and pair[0] != pair[1]
        stream = self.streams[key] = Stream(self.number_of(key), pair, numbered=numbered)
        members.services.events.attach(stream, members.name, pair[0] == members.rank)
        if not numbered:
            stream.settle(0, None)
        elif self.connection is not None:
            self._settle(stream, self.connection)
        elif self._frozen:
            stream.freeze()
        return stream

    def issue(self, key: Key) -> int:
        """Count a call in its stream, and return its number; with the lock held."""
        stream = self.stream(key)
        if key is None or len(key) < 3:
            return stream.issue()
        return stream.issue_tagged(self.stream(self.pair_of(key)))

    def pair_of(self, key: tuple[int, ...]) -> Pair:
        """Return positions of sender and receiver in a stream of transfers."""
        return (key[0], key[1]) if key else (ANY_RANK, self.members.rank)

    def number_of(self, key: Key) -> int:
        """Return the id of a stream, the same on all ranks."""
        if key not in self._numbers:
            self._numbers[key] = group_id(self.members.group, "transfers", key)
        return self._numbers[key]

    def freeze(self) -> list[tuple[int, int]]:
        """Let no transfer begin before `settle`; return how many were made to and from each member."""
        with self.lock:
            self._frozen = True
            me, streams = self.members.rank, self.streams
            frozen = {s.pair: s.freeze() for s in streams.values() if s.pair is not None and s.numbered}
            others = range(len(self.members.ranks))
            return [(frozen.get((me, other), 0), frozen.get((other, me), 0)) for other in others]

    def settle(self, connection: Connection) -> None:
        """Install the results of the group's first call."""
        with self.lock:
            self.connection, self._frozen, self.tuning = connection, False, connection.tuning
            self.backends[:0] = connection.backends
            for stream in self.streams.values():
                if stream.numbered:
                    self._settle(stream, connection)
            has_failed = self.failure is not None
            if has_failed or self.departed:
                for endpoint in self.endpoints:
                    endpoint.close()
        if has_failed:
            close_all(connection.backends, orderly=False)

    def _settle(self, stream: Stream, connection: Connection) -> None:
        opener, pair = connection.endpoints, stream.pair
        if pair is None:
            stream.settle(
                1 if connection.backends else 0, None if opener is None else opener.open_collectives
            )
            self.endpoint = stream.endpoint  # the first call is under way, so it is open already
            return
        sends = pair[0] == self.members.rank
        counts, other = (connection.sends_from, pair[1]) if sends else (connection.receives_from, pair[0])
        first = counts[other] if counts else 0
        endpoints = self.outgoing if sends else self.incoming
        # Not a method: generations are to be freed without the garbage collector's help.
        open_ = None if opener is None else partial(_open_transfers, opener, pair, endpoints, other)
        stream.settle(first, open_)


def _open_transfers(
    opener: EndpointOpener, pair: Pair, endpoints: list[Endpoint | None], other: int
) -> Endpoint:
    endpoint = endpoints[other] = opener.open_transfers(*pair)
    return endpoint


@dataclass(eq=False, repr=False)
class Work(Future[Any]):
    """A collective or a transfer under way; the future of its result, if it is asynchronous.

    One thread carries it out; methods may be used by that thread alone unless they say otherwise.
    """

    generation: Generation
    """The group's generation in which it is made."""
    stream: Stream
    sequence: int
    request: Request | None
    """The call; None for one that a native endpoint has taken already."""
    text: str
    """Wire descriptor."""
    nbytes: int
    timeout: float
    """Seconds that it may take once it has begun."""

    def __post_init__(self) -> None:
        super().__init__()
        members, pair = self.generation.members, self.stream.pair
        self._services = members.services
        self.order = self.sequence + self.stream.others
        called = as_called(self.text, None if pair is None else pair[0] == members.rank)
        self.record = self._services.events.called(
            members.name, self.sequence, called, self.nbytes, self.stream.number
        )
        """Its entry in the event ring."""
        self._operation: Operation | None = None
        self._search: Search | None = None
        self._refusal: Exception | None = None
        self._begun: tuple[Operation, Buffers] | None = None
        self._complete = False  # what has begun
        self._deadline = 0.0
        self._query: PositionQuery | None = None

    def __str__(self) -> str:
        members, pair = self.generation.members, self.stream.pair
        call = members.call_text(pair, self._services.rank, self.text)
        return f"{call}, {members.call_label(pair, self.sequence)}"

    @property
    def agreed_text(self) -> str:
        """Descriptor that other ranks must have, too; empty while it is unknown here. Any thread."""
        request = self.request
        return "" if request is not None and request.pattern is not None else self.text

    @property
    def started(self) -> bool:
        """True if a backend carries it out already. Any thread."""
        return self._operation is not None

    def waits_for(self) -> tuple[int, ...]:
        """Return the ranks that it waits for. Any thread."""
        operation = self._operation
        return () if operation is None else operation.missing()

    def move(self, stream: Stream, number: int, text: str) -> None:
        """Go on in another stream, in which it has a number now."""
        self.stream, self.sequence, self.text, self._query = stream, number, text, None

    def abort(self, failure: Failure) -> None:
        """End it with the group's failure. Any thread."""
        if (operation := self._operation) is not None:
            operation.fail(failure.during(str(self)))

    def answered(self, rank: int, answer: Position) -> None:
        """Take another rank's answer to where it is. Any thread."""
        if (query := self._query) is not None:
            query.answered(rank, answer)

    def search(self, request: Request) -> Search:
        """Queue a receive behind those that already wait for an array."""
        self._operation = self._search = self.generation.matcher.match(self.generation, self, request)
        return self._search

    # -- carrying out ----------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Carry the call out with the first of the group's backends that supports it; return its result.

        Raises:
            CollectiveError: The group has failed.
        """
        if self._refusal is not None:
            raise self._refusal
        request = self.request
        assert request is not None
        if self.stream.numbered:
            self._await_turn(alone=request.device is not None)
        if self.sequence == 1 and self.stream.pair is None and len(self.generation.members.ranks) > 1:
            connecting = self.generation.connects(self.text)
            self.drive(connecting)
            connecting.revoke()
        if request.pattern is not None:
            matching = self._search or self.search(request)
            self.drive(matching)
            self._found(matching)
            if request.pattern.probes:
                return matching.status
            request = matching.request
        if self._begun is None:
            self._refuse_departed(request)
            if request.exchange is not None and request.resolve is not None:
                request = request.resolve(self._perform(request.exchange))
        return self._perform(request)

    def _found(self, search: Search) -> None:
        """Continue as the receive of the matched message."""
        search.revoke()
        self.request = search.request
        self.move(self.stream, self.sequence, search.request.text)

    def begin(self) -> bool:
        """Begin without waiting; return whether it is complete, or has failed, as `run` finds out."""
        return self._refusal is not None or self.attempt(self._begin)

    def _begin(self, seconds: float) -> bool:
        request = self.request
        assert request is not None
        self._refuse_departed(request)
        self._begun = self._start(request)
        self._complete = self._begun[0].progress(seconds)
        return self._complete

    def attempt(self, attempt: Attempt) -> bool:
        """Return whether an attempt, without waiting, succeeds, or fails: then `run` raises its error."""
        try:
            return attempt(0.0)
        except Exception as error:  # noqa: BLE001 -- raised by `run`
            self._refusal = error
            return True

    def _start(self, request: Request) -> tuple[Operation, Buffers]:
        stream, sequence = self.stream, self.sequence
        backend = next(b for b in self.generation.backends if b.supports(request, stream, sequence))
        buffers = request.allocate()
        return backend.start(request, buffers, self), buffers

    def _perform(self, request: Request) -> Any:
        """Carry out a request; a second one of the call may follow if it says so."""
        operation, buffers = self._begun or self._start(request)
        if not self._complete:
            self.drive(operation)
        if request.precedes:
            operation.revoke()
        return request.out if request.device is not None else request.finish(buffers)

    def _refuse_departed(self, request: Request) -> None:
        """Fail a send to a departed member: over TCP, the reset in reply would drop its last data."""
        pair, departed = self.stream.pair, self.generation.departed
        if departed and pair is not None and request.contributes:
            receiver = self.generation.members.ranks[pair[1]]
            if receiver in departed:
                self.generation.lose(receiver, departed[receiver])
                self.check()

    def _await_turn(self, *, alone: bool) -> None:
        """Wait until earlier calls of the stream are over, as far as that is necessary; the time runs."""
        if len(self.generation.members.ranks) == 1:
            return
        self._deadline = self._services.clock() + self.timeout
        is_ready = partial(self.stream.ready, self.sequence, alone=alone)
        if not is_ready():
            ends = lambda: self.generation.failure is not None or is_ready()  # noqa: E731
            self._until(partial(self.stream.wait_for, ends))
            self.check()

    def check(self) -> None:
        """Raise the group's failure, if it has failed."""
        failure = self.generation.failure
        if failure is not None:
            raise failure.during(str(self))

    def drive(self, operation: Operation) -> None:
        """Go on with a call that a backend has begun, until it is complete."""
        with self.generation.lock:
            self._operation = operation
            self._deadline = self._deadline or self._services.clock() + self.timeout
        self.check()  # a later failure of the group sees the operation
        self._until(operation.progress)

    def end(self) -> None:
        """Let go of the operation: no memory of the caller's is touched any more. Idempotent."""
        operation, self._operation = self._operation, None
        if self._begun is not None:
            operation = self._begun[0]
        # A future that the caller keeps must not keep the arrays; nor may a cycle keep the generation.
        self.request = self._query = self._begun = self._search = None
        if operation is not None:
            operation.revoke()

    # -- waiting ---------------------------------------------------------------------------------------------

    @property
    def query(self) -> PositionQuery:
        """Questions to the other ranks; made with the first one, as few calls ask any."""
        if self._query is None:
            generation, stream = self.generation, self.stream
            self._query = PositionQuery(
                generation.members, generation.number, stream.pair, self.sequence, self.text,
                self.waits_for, stream.numbered, bool(self.agreed_text),
            )  # fmt: skip
        return self._query

    def ask_everybody(self) -> None:
        """Ask all others where they are: one of them is not where this rank is."""
        self.query.ask(all_ranks=True)

    def _until(self, attempt: Attempt) -> None:
        """Repeat an attempt until it succeeds."""
        services, wait = self._services, None
        policy, began = services.wait_policy, services.clock()
        try:
            first = min((policy.look_every, *policy.ask_after[:1], self._deadline - began))
            if not attempt(max(first, 0.0)):
                wait = Wait(self, services, began, self._deadline)
                while not (wait.look(attempt) or attempt(wait.left)):
                    pass
        finally:
            if wait is None:
                self.record.waited += services.clock() - began
            else:
                wait.end()

    def begin_wait(self) -> Wait:
        """Begin to wait for a matching message, on a thread that also waits for other calls."""
        services = self._services
        began = services.clock()
        self._deadline = began + self.timeout
        services.events.awaits(self.record, self)
        return Wait(self, services, began, self._deadline)

    @property
    def polls(self) -> bool:
        """True if the message may arrive without a wake-up; see `Search.polls`."""
        return self._search is not None and self._search.polls

    def find(self, seconds: float) -> bool:
        """Look for a matching message, within a time limit; return whether there is one.

        Raises:
            CollectiveError: The group has failed.
        """
        search = self._search
        assert search is not None
        if not search.progress(seconds):
            return False
        self._found(search)
        return True

    def fail(self, failure: Failure) -> None:
        """Fail the group, and raise its failure."""
        self.generation.fail(failure)
        # Another rank's failure may have been first; either way the group has one, and it is raised here. If
        # it has none yet, another thread is failing it right now, and tells the other members.
        raise (self.generation.failure or failure).during(str(self))

    def look_for_departures(self) -> None:
        """Fail the group if the call waits for a rank that has left."""
        departed = self.generation.departed
        if not departed:
            return
        # Their messages were delivered, but data on other connections may still be in transit.
        operation = self._operation
        for rank in self.waits_for():
            if rank in departed and operation is not None and not operation.may_still_come(rank):
                self.generation.lose(rank, departed[rank])
                return
