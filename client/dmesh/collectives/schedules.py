"""Schedules of collectives: which slice each rank sends, receives and folds, in which step. Pure data, no IO.

A program names peers by their position in the group, memory by buffer and element range, and messages by
step; it knows nothing of arrays, dtypes, sockets or time. Executed on every rank of a group, the programs of
one collective bring every element where it belongs.

`count` is the number of elements that one rank contributes to one other: of the whole array, or of one block
in `scatter`, `all_to_all` and `reduce_scatter`. Only transfers may have 0: for empty arrays a barrier does.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any


class Buffer(enum.Enum):
    """A piece of memory of the rank that runs the program."""

    INPUT = "input"  # the caller's array; read only
    STAGE = "stage"  # room for what peers contribute; elements of the dtype that travels
    ACCUMULATOR = "accumulator"  # of the fold; elements of the reduction's accumulator dtype
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
    """Number of the message among those of that peer."""
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
    """Fold of a rank's contribution into the accumulator. Contributions are folded in the order of ranks."""

    source: Slice
    into: Slice
    first: bool
    """True for the first contribution, which replaces what the accumulator held."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Conversion of the whole accumulator into the result: division of a mean, rounding of a short float."""

    source: Slice
    into: Slice


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
            # Everybody begins with another neighbor, or all would talk to the same rank at once.
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            received[source] = self.receive(source, incoming(source))
            self.send(target, outgoing(target))
        return received

    def fold(self, part_of: Callable[[int], tuple[int, int]], owners: Collection[int]) -> None:
        """Add: send each owner its part of the input, and fold the own part, if this rank owns one.

        Every element is folded by one owner, or by everybody in the same way, always in the order of ranks:
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

    def finish(self, into: Slice) -> None:
        """Add a `Finish` of the accumulator."""
        self.add(Finish(Slice(ACCUMULATOR, 0, len(into)), into))

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
        finish = next((item.into for item in self._instructions if isinstance(item, Finish)), None)
        return Program(tuple(self._instructions), sizes, finish)


def make(schedule: Callable[..., None], size: int, rank: int, *arguments: Any) -> Program:
    """Return the program of one rank in a schedule."""
    builder = Builder(size, rank)
    schedule(builder, *arguments)
    return builder.program()


def bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return begin and end of part `index` of `count` elements that are cut into nearly equal parts."""
    return index * count // parts, (index + 1) * count // parts


def _whole(buffer: Buffer, count: int) -> Slice:
    return Slice(buffer, 0, count)


def _block(buffer: Buffer, index: int, count: int) -> Slice:
    return Slice(buffer, index * count, (index + 1) * count)


# -- data movement: elements arrive as they were sent -------------------------------------------------


def barrier(builder: Builder) -> None:
    """Build a barrier: no rank finishes before all have entered it."""
    builder.barrier()


def all_gather(builder: Builder, count: int) -> None:
    """Build an all-gather, in the order of ranks. Each pair exchanges directly."""
    _move(builder, lambda _: _whole(INPUT, count), lambda source: _block(OUTPUT, source, count))


def all_to_all(builder: Builder, count: int) -> None:
    """Build an all-to-all: block j of rank i becomes block i of rank j. Each pair exchanges directly."""
    _move(builder, lambda target: _block(INPUT, target, count), lambda source: _block(OUTPUT, source, count))


def gather(builder: Builder, root: int, count: int) -> None:
    """Build a gather, in the order of ranks."""
    rank = builder.rank
    _move(
        builder,
        lambda target: _whole(INPUT, count) if target == root else None,
        lambda source: _block(OUTPUT, source, count) if rank == root else None,
    )
    builder.barrier()


def scatter(builder: Builder, root: int, count: int) -> None:
    """Build a scatter: every rank gets its block of the root's elements."""
    rank = builder.rank
    _move(
        builder,
        lambda target: _block(INPUT, target, count) if rank == root else None,
        lambda source: _whole(OUTPUT, count) if source == root else None,
    )
    builder.barrier()


def permute(builder: Builder, pairs: Sequence[tuple[int, int]], count: int) -> None:
    """Build a permutation: each (source, target) pair moves elements. No rank is source or target twice."""
    rank, targets = builder.rank, dict(pairs)
    _move(
        builder,
        lambda target: _whole(INPUT, count) if target == targets.get(rank) else None,
        lambda source: _whole(OUTPUT, count) if targets.get(source) == rank else None,
    )
    builder.barrier()


def _move(builder: Builder, outgoing: Part, incoming: Part) -> None:
    """Add an exchange, and the copy of the elements that stay on this rank."""
    received = builder.exchange(outgoing, incoming)
    source, into = outgoing(builder.rank), incoming(builder.rank)
    if source is not None and into is not None:
        builder.add(Copy(source, into))
    builder.wait(*received.values())


def broadcast_tree(builder: Builder, root: int, count: int) -> None:
    """Build a broadcast through a binomial tree: few hops, for short messages."""
    size, rank = builder.size, builder.rank
    whole = _whole(OUTPUT, count)
    # Seen from the root: rank r gets its copy from r without its highest bit, and serves r + 2**k above that
    # bit.
    relative = (rank - root) % size
    distance = 1 << relative.bit_length()
    if relative == 0:
        builder.add(Copy(_whole(INPUT, count), whole))
    else:
        builder.wait(builder.receive((rank - distance // 2) % size, whole))
    while relative + distance < size:
        builder.send((rank + distance) % size, whole)
        distance *= 2
    builder.barrier()


def broadcast_scattered(builder: Builder, root: int, count: int) -> None:
    """Build a broadcast of long messages: the root distributes parts, which the others exchange.

    The root sends every element once, where a tree would send the whole several times.
    """
    size, rank = builder.size, builder.rank

    def part_of(peer: int, buffer: Buffer) -> Slice:
        return Slice(buffer, *bounds(count, size - 1, (peer - root) % size - 1))

    if rank == root:
        builder.exchange(outgoing=lambda target: part_of(target, INPUT))
        builder.add(Copy(_whole(INPUT, count), _whole(OUTPUT, count)))
    else:
        own = part_of(rank, OUTPUT)
        dealt = builder.receive(root, own)
        # All other receives are posted before the own part is awaited and passed on.
        received = builder.exchange(
            incoming=lambda source: part_of(source, OUTPUT) if source != root else None
        )
        builder.wait(dealt)
        builder.exchange(outgoing=lambda target: own if target != root else None)
        builder.wait(*received.values())
    builder.barrier()


def transfer(builder: Builder, peer: int, count: int, sends: bool, buffered: bool) -> None:
    """Build one rank's half of a transfer; `buffered`: the receiver does not acknowledge the data."""
    # Without elements a byte goes, so that the receiver does not pass before the sender's call.
    data = _whole(INPUT if sends else OUTPUT, count) or (TOKEN if buffered else None)
    if sends:
        accepted = () if buffered else builder.receive(peer, TOKEN)
        builder.send(peer, data)
        builder.wait(accepted)
    else:
        builder.wait(builder.receive(peer, data))
        builder.send(peer, None if buffered else TOKEN)


# -- reductions ---------------------------------------------------------------------------------------


def all_reduce_flat(builder: Builder, count: int) -> None:
    """Build an all-reduce of short arrays: every rank sends its array to all others; one hop."""
    builder.fold(lambda peer: (0, count), range(builder.size))
    # The output may be the input's memory, which must stay as it is until it has been sent.
    builder.add(Flush())
    builder.finish(_whole(OUTPUT, count))


def all_reduce_scattered(builder: Builder, count: int) -> None:
    """Build an all-reduce of long arrays: every rank folds its part for all; least traffic."""
    size, rank = builder.size, builder.rank
    parts = [bounds(count, size, index) for index in range(size)]
    builder.fold(parts.__getitem__, range(size))
    own = Slice(OUTPUT, *parts[rank])
    builder.finish(own)
    # If input and output are the same memory, a part is received over what was sent to its owner. The owner
    # has it by then: its result cannot come before it folded what we sent.
    received = builder.exchange(lambda target: own, lambda source: Slice(OUTPUT, *parts[source]))
    builder.wait(*received.values())


def reduce_scatter(builder: Builder, count: int) -> None:
    """Build a reduce-scatter: every rank folds all ranks' blocks of its own number."""
    builder.fold(lambda peer: (peer * count, (peer + 1) * count), range(builder.size))
    builder.finish(_whole(OUTPUT, count))


def reduce_flat(builder: Builder, root: int, count: int) -> None:
    """Build a reduce of short arrays: every rank sends its array to the root, which folds; one hop."""
    builder.fold(lambda peer: (0, count), (root,))
    if builder.rank == root:
        builder.finish(_whole(OUTPUT, count))
    builder.barrier()


def reduce_scattered(builder: Builder, root: int, count: int) -> None:
    """Build a reduce of long arrays: every rank folds its part for the root.

    The output of the other ranks is room for their part alone.
    """
    size, rank = builder.size, builder.rank
    parts = [bounds(count, size, index) for index in range(size)]
    builder.fold(parts.__getitem__, range(size))
    start, stop = parts[rank]
    own = Slice(OUTPUT, start, stop) if rank == root else _whole(OUTPUT, stop - start)
    builder.finish(own)
    received = builder.exchange(
        lambda target: own if target == root else None,
        lambda source: Slice(OUTPUT, *parts[source]) if rank == root else None,
    )
    builder.wait(*received.values())
    builder.barrier()


# -- choice -------------------------------------------------------------------------------------------

FLAT_TOTAL_LIMIT = 512 * 1024
"""Largest number of bytes that one rank receives for a flat reduction; a bound for large groups."""
_UNROOTED = {"all_gather": all_gather, "all_to_all": all_to_all, "reduce_scatter": reduce_scatter}
_ROOTED = {"gather": gather, "scatter": scatter}


@lru_cache(maxsize=1024)
def select(
    kind: str,
    size: int,
    rank: int,
    count: int,
    nbytes: int,
    root: int,
    pairs: tuple[tuple[int, int], ...],
    contributes: bool,
    flat: int,
    tree: int,
    send_buffer: int,
) -> Program:
    """Return what a rank does in a call; see `request.Request`.

    The choice depends on nothing but numbers that all ranks of a group share, or their schedules would not
    fit each other. `flat`, `tree` and `send_buffer`, which depend on the machines (`tuning`), are the most
    bytes for which a reduction takes one hop, a broadcast goes through a tree, and a sender does not wait for
    its receiver. `contributes` is a transfer's direction.
    """
    if kind == "transfer":
        return make(transfer, size, rank, root, count, contributes, nbytes <= send_buffer)
    if not count:
        return make(barrier, size, rank)  # nothing to send, but nobody may pass before all have come
    # With fewer elements than ranks some ranks would own nothing, and hear nothing of the others.
    is_flat = count < size or (nbytes <= flat and nbytes * (size - 1) <= FLAT_TOTAL_LIMIT)
    if kind == "permute":
        return make(permute, size, rank, pairs, count)
    if kind in _UNROOTED:
        return make(_UNROOTED[kind], size, rank, count)
    if kind in _ROOTED:
        return make(_ROOTED[kind], size, rank, root, count)
    if kind == "all_reduce":
        return make(all_reduce_flat if is_flat else all_reduce_scattered, size, rank, count)
    if kind == "reduce":
        return make(reduce_flat if is_flat else reduce_scattered, size, rank, root, count)
    if kind == "broadcast":
        is_tree = size <= 2 or nbytes <= tree or count < size
        return make(broadcast_tree if is_tree else broadcast_scattered, size, rank, root, count)
    return make(barrier, size, rank)
