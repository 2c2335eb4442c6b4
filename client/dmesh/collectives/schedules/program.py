"""Programs of collectives: what one rank sends, receives and folds, in which step; and how they are built.

A program names peers by their position in the group, memory by buffer and element range, and messages by
step; it knows nothing of arrays, dtypes, sockets or time. Executed on every rank of a group, the programs of
one collective bring every element where it belongs.

`count` is the number of elements that one rank contributes to one other: of the whole array, or of one block
in `scatter`, `all_to_all` and `reduce_scatter`. Only transfers may have 0: for empty arrays a barrier does.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any


class Buffer(enum.Enum):
    """A piece of memory of the rank that runs the program."""

    INPUT = "input"  # the caller's array; read only
    STAGE = "stage"  # room for what peers contribute, zeroed; elements of the dtype that travels
    ACCUMULATOR = "accumulator"  # of the fold; elements of the reduction's accumulator dtype
    PARTIAL = "partial"  # results of other ranks' folds, which go on here; of the same dtype
    RELAY = "relay"  # results for other ranks, zeroed; elements of the result's dtype
    OUTPUT = "output"  # the result
    TOKEN = "token"  # noqa: S105 - a byte without a meaning; only its arrival counts

    __hash__ = object.__hash__  # an enum's own is slow, and hashes its members' names


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` to `stop` of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Send:
    """Begin of a send. The slice must not change before a `Flush` or until the peer has answered."""

    peer: int
    step: int
    """Number of the message among those to that peer."""
    source: Slice


@dataclass(frozen=True, slots=True)
class Receive:
    """Begin of a receive into a slice."""

    peer: int
    step: int
    """Number of the message among that peer's messages."""
    into: Slice


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for receives to complete."""

    receives: tuple[int, ...]
    """Numbers of the program's `Receive` instructions, in their order, from 0."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait until the memory of all sends may be overwritten."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy of elements between buffers of the same dtype."""

    source: Slice
    into: Slice


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold of a contribution or a partial result into an accumulator, which is the left operand."""

    source: Slice
    into: Slice
    first: bool = False
    """True for the first contribution, which replaces the accumulator's contents."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Conversion of accumulated elements into the result: division of a mean, rounding of a short float."""

    source: Slice
    into: Slice
    contributions: int
    """Number of ranks whose contributions have been folded."""


Part = Callable[[int], Slice | None]
"""Returns what one peer is sent, or sends; None for nothing."""
Instruction = Send | Receive | Await | Flush | Copy | Fold | Finish


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions of one rank for one collective. When the last is executed, a final flush ends it."""

    instructions: tuple[Instruction, ...]
    sizes: dict[Buffer, int]
    """Number of elements of each buffer that the program uses; unused buffers are missing."""
    accumulates_into: Slice | None = None
    """The part of the output that the accumulator becomes, if there is one."""

    def size(self, buffer: Buffer) -> int:
        """Return the number of elements of a buffer that the program uses."""
        return self.sizes.get(buffer, 0)


INPUT, OUTPUT, ACCUMULATOR = Buffer.INPUT, Buffer.OUTPUT, Buffer.ACCUMULATOR
TOKEN = Slice(Buffer.TOKEN, 0, 1)
"""The byte that is sent and received as a token."""


def _nothing(_: int) -> None:
    return None


class Builder:
    """Builder of the program of one rank. It numbers the messages of each pair of ranks in their order."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank
        self._instructions: list[Instruction] = []
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._receives = 0

    def send(self, peer: int, source: Slice | None) -> None:
        """Add a `Send`; none if there is nothing to send."""
        if source:
            self.add(Send(peer, self._sent[peer], source))
            self._sent[peer] += 1

    def receive(self, peer: int, into: Slice | None) -> tuple[int, ...]:
        """Add a `Receive` and return what to await; nothing if there is nothing to receive."""
        if not into:
            return ()
        self.add(Receive(peer, self._received[peer], into))
        self._received[peer] += 1
        self._receives += 1
        return (self._receives - 1,)

    def wait(self, *receives: tuple[int, ...]) -> None:
        """Add an `Await`, if there is something to await."""
        if numbers := tuple(chain.from_iterable(receives)):
            self.add(Await(numbers))

    def add(self, instruction: Instruction) -> None:
        """Add an instruction."""
        self._instructions.append(instruction)

    def exchange(self, outgoing: Part = _nothing, incoming: Part = _nothing) -> dict[int, tuple[int, ...]]:
        """Add messages to and from each other rank; return what to await, by peer."""
        received = {}
        for distance in range(1, self.size):
            # Each rank begins with a different neighbor, or all would send to the same rank at once.
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            received[source] = self.receive(source, incoming(source))
            self.send(target, outgoing(target))
        return received

    def fold(self, part_of: Callable[[int], tuple[int, int]], owners: Collection[int]) -> None:
        """Add: send each owner its part of the input, and fold the own part, if this rank owns one.

        Each element is reduced by one owner, or by all ranks in the same way, always in the order of ranks:
        the same inputs give the same bits on every rank, whatever the size of the array and however the
        messages happen to arrive.
        """
        start, stop = part_of(self.rank)
        length = stop - start
        slots = {self.rank: Slice(INPUT, start, stop)}
        for slot, source in enumerate(rank for rank in range(self.size) if rank != self.rank):
            slots[source] = Slice(Buffer.STAGE, slot * length, (slot + 1) * length)
        owns = self.rank in owners
        received = self.exchange(
            lambda target: Slice(INPUT, *part_of(target)) if target in owners else None,
            lambda source: slots[source] if owns else None,
        )
        for source in range(self.size) if owns else ():
            self.wait(received.get(source, ()))
            self.add(Fold(slots[source], Slice(ACCUMULATOR, 0, length), first=source == 0))

    def finish(self, into: Slice, contributions: int = 0) -> None:
        """Add a `Finish` of the accumulator: of all ranks' contributions, or of some."""
        self.add(Finish(Slice(ACCUMULATOR, 0, len(into)), into, contributions or self.size))

    def barrier(self) -> None:
        """Add a dissemination barrier: in round k, every rank sends a token to the rank 2**k after it.

        It ends every collective in which some rank would not hear from all others otherwise. So no rank
        finishes a collective that another rank has not called, or that has failed there.
        """
        distance = 1
        while distance < self.size:
            received = self.receive((self.rank - distance) % self.size, TOKEN)
            self.send((self.rank + distance) % self.size, TOKEN)
            self.wait(received)
            distance *= 2

    def program(self) -> Program:
        """Return the program."""
        sizes: dict[Buffer, int] = {}
        for item in self._instructions:
            for part in (getattr(item, "source", None), getattr(item, "into", None)):
                if part is not None:
                    sizes[part.buffer] = max(sizes.get(part.buffer, 0), part.stop)
        return Program(tuple(self._instructions), sizes, self._accumulates_into(sizes))

    def _accumulates_into(self, sizes: Mapping[Buffer, int]) -> Slice | None:
        """Return the part of the output that the accumulator can be: all of it ends there, in its order."""
        ends = [item for item in self._instructions if isinstance(item, Finish)]
        shifts = {end.into.start - end.source.start for end in ends}
        if len(shifts) != 1 or any(end.source.buffer is not ACCUMULATOR for end in ends):
            return None
        start, length = shifts.pop(), sizes[ACCUMULATOR]
        fits = start >= 0 and start + length <= sizes.get(OUTPUT, 0)
        return Slice(OUTPUT, start, start + length) if fits else None


def make(schedule: Callable[..., None], size: int, rank: int, *arguments: Any) -> Program:
    """Return the program of one rank in a schedule."""
    builder = Builder(size, rank)
    schedule(builder, *arguments)
    return builder.program()


def bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return begin and end of part `index` of `count` elements that are cut into nearly equal parts."""
    return index * count // parts, (index + 1) * count // parts


def rotated(builder: Builder, source: Buffer, into: Buffer, first: int, each: int, count: int) -> None:
    """Add copies of blocks that are counted from rank `first`, to `count` elements in the order of ranks."""
    blocks = builder.size
    ahead = min((blocks - first) * each, max(0, count - first * each))
    behind = min(first * each, count)
    for start, length, to in ((0, ahead, first * each), ((blocks - first) * each, behind, 0)):
        if length:
            builder.add(Copy(Slice(source, start, start + length), Slice(into, to, to + length)))


def whole(buffer: Buffer, count: int) -> Slice:
    """Return the first `count` elements of a buffer."""
    return Slice(buffer, 0, count)


def block(buffer: Buffer, index: int, count: int) -> Slice:
    """Return block `index` of a buffer, in blocks of `count` elements."""
    return Slice(buffer, index * count, (index + 1) * count)
