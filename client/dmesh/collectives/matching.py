"""Matching of receives with the arrays that other ranks have sent: tags, any source, unknown shapes.

Transfers without a tag from one rank to another have the same numbers on both ranks, and go over the fastest
medium. Those with a tag, in a stream of their own, are messages; the number of each is its place among all
transfers of its pair, so that a receiver knows the order, over whatever media they come. What a rank sends to
itself stays in its memory.

A receive that names a tag, or no source, gets its number when it finds an array that no earlier receive
wants. From then on it is an ordinary one. A receive of unknown shape has its number from the beginning, and
waits for the sender's description of the array.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Iterator

from dmesh._locks import Lock
from dmesh.collectives.backends.base import Search
from dmesh.collectives.backends.loopback import LoopbackBackend
from dmesh.collectives.backends.tcp.messages import MessageBackend
from dmesh.collectives.envelope import Envelope, Status, is_synchronous, parse, tag_of
from dmesh.collectives.failure import Cause, Failure
from dmesh.collectives.receiver import Looks
from dmesh.collectives.request import SYNCHRONOUS, TRANSFER, Pattern, Request, as_called, describe
from dmesh.collectives.services import Members
from dmesh.collectives.work import Generation, Stream, Work
from dmesh.native import Endpoint

_MOST_CLAIMED = 1024
"""Received tagged transfers of a sender whose numbers are kept before needless ones are dropped."""
_ARRIVES_WITHIN = 5.0
"""Seconds in which data of a rank arrives on dedicated connections after the rank's goodbye."""


class Unfit(Exception):
    """A message does not match the call of its receiver."""


class Matcher:
    """Receives of one rank in a group that wait for an array, and the arrays that have been sent to it."""

    def __init__(self, members: Members, messages: MessageBackend, loopback: LoopbackBackend) -> None:
        self.members = members
        self.messages = messages
        self.loopback = loopback
        self.lock = Lock()
        self.posted: list[Matching] = []
        """Receives that have no number yet, in the order in which they were made."""
        self.bell = members.services.transport.message_queue.arrivals
        """Rings when a message has come, and when a receive has failed."""
        self._claimed: dict[int, list[int]] = {}  # numbers of received tagged transfers, by sender, in order
        self._forgotten: dict[int, int] = {}  # how many smaller ones were dropped, by sender
        self._taken: dict[int, set[int]] = {}  # numbers of claimed ones that still wait, by sender
        self._first = 0  # position at which the next receive from any source begins to look

    def positions(self, pattern: Pattern) -> list[int]:
        """Return the senders that a receive can match, another one first each time."""
        if pattern.source is not None:
            return [pattern.source]
        size = len(self.members.ranks)
        return [(self._first + at) % size for at in range(size)]

    def look(self, generation: Generation, pattern: Pattern) -> Status | None:
        """Return the message that a receive would match now; None if there is none."""
        with self.lock:
            for source in self.positions(pattern):
                if (found := self._first_of(generation, pattern, source, None)) is not None:
                    return status_of(found)
        return None

    def match(self, generation: Generation, work: Work, request: Request) -> Matching:
        """Begin to wait for the message of a receive."""
        return Matching(self, generation, work, request)

    def claim(self, generation: Generation, matching: Matching) -> Envelope | None:
        """Give a receive the first array that it wants, and no earlier receive; None if there is none."""
        pattern = matching.pattern
        with self.lock:
            for source in self.positions(pattern):
                incoming = self._open(generation, pattern, source)
                try:
                    if incoming is not None:
                        incoming.held = 1  # else the fast path could receive it in the meantime
                    found = self._first_of(generation, pattern, source, matching)
                    if found is None:
                        continue
                    if not pattern.probes:
                        self._first = source + 1
                        self.posted.remove(matching)
                        self._take(generation, matching.work, found)
                    return found
                finally:
                    if incoming is not None:
                        incoming.held = 0
        return None

    def _open(self, generation: Generation, pattern: Pattern, source: int) -> Endpoint | None:
        """Return the native endpoint by which transfers without a tag come, if they do."""
        if pattern.tag or source == self.members.rank:
            return None
        with generation.lock:
            generation.stream((source, self.members.rank)).open_next()
        return generation.incoming[source]

    def _take(self, generation: Generation, work: Work, found: Envelope) -> None:
        source, me = found.source, self.members.rank
        with generation.lock:
            stream = generation.stream((source, me) if source == me or not found.tag else (source, me, 1))
            if source == me or found.tag:
                self._taken.setdefault(source, set()).add(found.number)
                if source != me:
                    insort(self._claimed.setdefault(source, []), found.number)
                number = found.number
            else:
                number = stream.issue()
            work.stream.complete(work.sequence, work.text)
            work.stream.calls.pop(work.sequence, None)
            stream.calls[number] = work
            work.move(stream, number, found.text)
            untagged = stream.issued if not found.tag else generation.stream((source, me)).issued
        if len(self._claimed.get(source, ())) > _MOST_CLAIMED:
            self._forget(source, untagged, generation.number_of((source, me, 1)))

    def _forget(self, source: int, untagged: int, stream: int) -> None:
        """Drop numbers below which every transfer of a sender has been received, but for the latest ones."""
        claimed, before = self._claimed[source], self._forgotten.get(source, 0)
        waiting = self._untaken(source, self.messages.waiting(stream))
        first = waiting[0].number if waiting else claimed[-1]
        count = 0
        # Before the number at `count`, so many transfers have no tag: they must have been received, too.
        while (
            count < len(claimed) - _MOST_CLAIMED // 2
            and claimed[count] < first
            and claimed[count] - 1 - before - count <= untagged
        ):
            count += 1
        del claimed[:count]
        self._forgotten[source] = before + count

    def _claimed_before(self, source: int, number: int) -> int:
        """Return how many tagged transfers of a sender before a number have been received."""
        return self._forgotten.get(source, 0) + bisect_left(self._claimed.get(source, []), number)

    def _first_of(
        self, generation: Generation, pattern: Pattern, source: int, matching: Matching | None
    ) -> Envelope | None:
        """Return the first array of a sender that a receive may take."""
        earlier: list[Pattern] | None = None
        for found in self._offers(generation, pattern, source):
            if earlier is None:
                posted = self.posted if matching is None else self.posted[: self.posted.index(matching)]
                earlier = [one.pattern for one in posted if not one.pattern.probes]
            rival = next((one for one in earlier if fits(one, found)), None)
            if rival is not None:
                earlier.remove(rival)
            elif fits(pattern, found):
                return found
        return None

    def _offers(self, generation: Generation, pattern: Pattern, source: int) -> Iterator[Envelope]:
        """Return the arrays of a sender that have come, in the order in which they were sent."""
        me, tag = self.members.rank, pattern.tag
        if source == me:
            yield from self._untaken(source, self.loopback.waiting())
            return
        tagged = []
        if tag != 0:
            number = generation.number_of((source, me, 1))
            tagged = self._untaken(source, self.messages.waiting(number))
        if tag:
            yield from tagged
            return
        head, order, received = self._head(generation, source)
        if tag == 0:
            if head is not None:
                yield head
            return
        for at, found in enumerate(tagged):
            # Of the transfers before it, so many have no tag; all of them must have been received before.
            untagged = found.number - 1 - self._claimed_before(source, found.number) - at
            if head is not None and head.number <= untagged:
                yield head
                head = None
            if received < untagged:
                return
            yield found
        if head is not None and (
            not order or self._claimed_before(source, order) + len(tagged) >= order - head.number
        ):
            yield head

    def _untaken(self, source: int, waiting: list[tuple[int, str]]) -> list[Envelope]:
        """Return what waits but for what receives of other threads have claimed and not begun to receive."""
        taken = self._taken.setdefault(source, set())
        taken.intersection_update(number for number, _ in waiting)
        return [Envelope(source, tag_of(text), at, text) for at, text in waiting if at not in taken]

    def _head(self, generation: Generation, source: int) -> tuple[Envelope | None, int, int]:
        """Return the first transfer without a tag that no receive has claimed.

        Also its place among all transfers of the sender, 0 if that is unknown, and how many are claimed.
        """
        with generation.lock:
            stream = generation.stream((source, self.members.rank))
            issued = stream.issued
            is_idle = not stream.calls and issued == stream.completed
        if not is_idle:
            return None, 0, issued
        arrival = arrival_of(generation, stream, issued + 1, 0.0)
        if arrival is None:
            return None, 0, issued
        text, order = arrival
        return Envelope(source, 0, issued + 1, text), order, issued


class Matching(Search):
    """A receive that waits for a matching message."""

    def __init__(self, matcher: Matcher, generation: Generation, work: Work, request: Request) -> None:
        assert request.pattern is not None
        self.work = work
        self.pattern = request.pattern
        self.request = request
        self.found: Envelope | None = None
        self._generation = generation
        self._matcher = matcher
        self._error: BaseException | None = None
        self._goodbyes: dict[int, float] = {}
        self._looks = Looks(matcher.bell)
        if not work.stream.numbered:
            with self._matcher.lock:
                self._matcher.posted.append(self)

    def progress(self, seconds: float) -> bool:
        """Wait for an array; see `Operation.progress`."""
        if not self._try() and not self._wait(seconds):
            return False
        if not self.pattern.probes:
            self._complete()
        return True

    def _wait(self, seconds: float) -> bool:
        stream = self.work.stream
        if stream.numbered and stream.endpoint is not None and stream.uses_endpoint(self.work.sequence):
            return self._try(seconds)
        return self._looks.until(self._try, lambda: self.polls, seconds)

    @property
    def polls(self) -> bool:
        """See `Search.polls`."""
        if self.pattern.tag:
            return False
        if any(backend.polls for backend in self._generation.backends):
            return True
        incoming = self._generation.incoming
        return not self.work.stream.numbered and any(
            incoming[source] is not None for source in self._matcher.positions(self.pattern)
        )

    def _try(self, seconds: float = 0.0) -> bool:
        if self._error is not None:
            raise self._error
        if self.found is None:
            work = self.work
            if not work.stream.numbered:
                self.found = self._matcher.claim(self._generation, self)
            elif (arrival := arrival_of(self._generation, work.stream, work.sequence, seconds)) is not None:
                assert self.pattern.source is not None
                self.found = Envelope(self.pattern.source, 0, work.sequence, arrival[0])
            if self._error is not None:
                raise self._error
        return self.found is not None

    def _complete(self) -> None:
        found, mine = self.found, self.request.text
        assert found is not None
        try:
            self.request = complete(self.request, found)
        except Unfit:
            members, generation = self._matcher.members, self._generation
            source, me = members.ranks[found.source], members.services.rank
            message = (
                f"{members.call_label((found.source, members.rank), found.number)}: rank {source} called "
                f"{as_called(found.text, True)}, rank {me} called {as_called(mine, False)}. What is sent "
                "must be what its receiver expects."
            )
            generation.fail(Failure(Cause.MISMATCH, message, tuple(sorted({source, me}))))
            failure = generation.failure
            assert failure is not None
            raise failure.during(str(self.work)) from None

    @property
    def status(self) -> Status | None:
        """Description of the matched message."""
        return None if self.found is None else status_of(self.found)

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that may send the message: those that are present, or else all."""
        if self.found is not None:
            return ()
        members, departed = self._matcher.members, self._generation.departed
        ranks = sorted(
            members.ranks[at] for at in self._matcher.positions(self.pattern) if at != members.rank
        )
        return tuple(rank for rank in ranks if rank not in departed) or tuple(ranks)

    def fail(self, error: BaseException) -> None:
        """See `Operation.fail`."""
        self._error = self._error or error
        self._matcher.bell.ring()

    def may_still_come(self, rank: int) -> bool:
        """Return whether a dedicated connection may have more data, although the peer said goodbye."""
        endpoint = self._generation.incoming[self._matcher.members.ranks.index(rank)]
        if endpoint is None or not endpoint.over_tcp or endpoint.disconnected:
            return False
        now = time.monotonic()
        return now - self._goodbyes.setdefault(rank, now) < _ARRIVES_WITHIN

    def revoke(self) -> None:
        """Wait no more."""
        with self._matcher.lock:
            if self in self._matcher.posted:
                self._matcher.posted.remove(self)


def arrival_of(
    generation: Generation, stream: Stream, sequence: int, seconds: float
) -> tuple[str, int] | None:
    """Return descriptor and order of a transfer that its sender has begun; see `Backend.arrival`."""
    for backend in generation.backends:
        if (found := backend.arrival(stream, sequence, seconds)) is not None:
            return found
    return None


def fits(pattern: Pattern, found: Envelope) -> bool:
    """Return whether a receive takes an array."""
    return pattern.source in (None, found.source) and pattern.tag in (None, found.tag)


def status_of(found: Envelope) -> Status:
    """Return the description of an array for its receiver."""
    dtype, shape, tag = parse(found.text)
    return Status(found.source, tag, dtype, shape)


def complete(request: Request, found: Envelope) -> Request:
    """Return the request of a receive after its message was matched.

    Raises:
        CollectiveTypeError: Its dtype is not known here.
        Unfit: It is not what the receiver expects.
    """
    pattern, out = request.pattern, request.out
    assert pattern is not None
    synchronous = is_synchronous(found.text)
    if pattern.template is not None:
        dtype, shape = pattern.template
        where = f"tag={found.tag}" + SYNCHRONOUS * synchronous if found.tag else ""
        if describe(TRANSFER, dtype, shape, where=where)[0] != found.text:
            raise Unfit
    else:
        dtype, shape, _ = parse(found.text)
    size = math.prod(shape)
    if out is not None:
        if out.dtype != dtype or (out.shape != shape and (size > out.size or not out.flags.c_contiguous)):
            raise Unfit
        if out.shape != shape:
            out = out.reshape(-1)[:size].reshape(shape)
    if request.status is not None:
        request.status.fill(found.source, found.tag, dtype, shape)
    nbytes = size * dtype.itemsize
    return Request(
        TRANSFER,
        found.text,
        None if found.tag else describe(TRANSFER, dtype, shape)[1],
        nbytes_per_rank=nbytes,
        count=size if nbytes else 0,
        root=found.source,
        dtype=dtype,
        shape=shape,
        out=out,
        returns=request.returns if out is request.out else None,
        synchronous=synchronous,
    )
