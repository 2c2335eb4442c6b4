"""Data-movement schedules: elements arrive as they were sent.

`count` is always the number of elements that one rank contributes to one other: of the whole array in
`broadcast`, `all_gather`, `gather` and `permute`, of one block in `scatter` and `all_to_all`. It must not be
0: for empty arrays a barrier does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from dmesh.collectives.schedules.program import (
    TOKEN,
    Builder,
    Copy,
    Program,
    bounds,
    input_slice,
    output_slice,
)
from dmesh.collectives.schedules.synchronization import add_barrier


@lru_cache(maxsize=256)
def all_gather(size: int, rank: int, count: int) -> Program:
    """Every rank gets every rank's elements, in the order of ranks. Each pair exchanges directly."""
    builder = Builder()
    step = builder.steps()
    received: list[int] = []
    for distance in range(1, size):
        # Everybody begins with another neighbor, or all would talk to the same rank at once.
        source, target = (rank - distance) % size, (rank + distance) % size
        received += builder.receive(source, step, output_slice(source * count, (source + 1) * count))
        builder.send(target, step, input_slice(0, count))
    builder.add(Copy(input_slice(0, count), output_slice(rank * count, (rank + 1) * count)))
    builder.wait(received)
    return builder.build(input=count, output=size * count)


@lru_cache(maxsize=256)
def all_to_all(size: int, rank: int, count: int) -> Program:
    """Block j of rank i becomes block i of rank j. Each pair exchanges directly."""
    builder = Builder()
    step = builder.steps()
    received: list[int] = []
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        received += builder.receive(source, step, output_slice(source * count, (source + 1) * count))
        builder.send(target, step, input_slice(target * count, (target + 1) * count))
    own = (rank * count, (rank + 1) * count)
    builder.add(Copy(input_slice(*own), output_slice(*own)))
    builder.wait(received)
    return builder.build(input=size * count, output=size * count)


@lru_cache(maxsize=256)
def broadcast_tree(size: int, rank: int, root: int, count: int) -> Program:
    """Every rank gets the root's elements, through a binomial tree: few hops, for short messages."""
    builder = Builder()
    whole = output_slice(0, count)
    step = builder.steps()
    # Seen from the root: rank r gets its copy from r without its highest bit, and serves r + 2**k above that
    # bit.
    relative = (rank - root) % size
    if relative == 0:
        builder.add(Copy(input_slice(0, count), whole))
        distance = 1
    else:
        distance = 1 << (relative.bit_length() - 1)
        parent = (relative - distance + root) % size
        builder.wait(builder.receive(parent, step, whole))
        distance *= 2
    while relative + distance < size:
        builder.send((relative + distance + root) % size, step, whole)
        distance *= 2
    add_barrier(builder, size, rank)
    return builder.build(input=count if rank == root else 0, output=count)


@lru_cache(maxsize=256)
def broadcast_scattered(size: int, rank: int, root: int, count: int) -> Program:
    """Every rank gets the root's elements: the root deals them out, the others exchange. For long messages.

    The root sends every element once, where a tree would send the whole several times.
    """
    builder = Builder()
    dealing, exchanging = builder.steps(), builder.steps()

    def part_of(relative: int) -> tuple[int, int]:
        return bounds(count, size - 1, relative - 1)

    relative = (rank - root) % size
    if relative == 0:
        for other in range(1, size):
            builder.send((other + root) % size, dealing, input_slice(*part_of(other)))
        builder.add(Copy(input_slice(0, count), output_slice(0, count)))
    else:
        own = output_slice(*part_of(relative))
        dealt = builder.receive(root, dealing, own)
        received: list[int] = []
        others = [1 + (relative - 1 + shift) % (size - 1) for shift in range(1, size - 1)]
        for other in others:
            received += builder.receive((other + root) % size, exchanging, output_slice(*part_of(other)))
        builder.wait(dealt)
        for other in others:
            builder.send((other + root) % size, exchanging, own)
        builder.wait(received)
    add_barrier(builder, size, rank)
    return builder.build(input=count if rank == root else 0, output=count)


@lru_cache(maxsize=256)
def gather(size: int, rank: int, root: int, count: int) -> Program:
    """The root gets every rank's elements, in the order of ranks."""
    builder = Builder()
    step = builder.steps()
    if rank == root:
        received: list[int] = []
        for source in range(size):
            if source != rank:
                into = output_slice(source * count, (source + 1) * count)
                received += builder.receive(source, step, into)
        builder.add(Copy(input_slice(0, count), output_slice(rank * count, (rank + 1) * count)))
        builder.wait(received)
    else:
        builder.send(root, step, input_slice(0, count))
    add_barrier(builder, size, rank)
    return builder.build(input=count, output=size * count if rank == root else 0)


@lru_cache(maxsize=256)
def scatter(size: int, rank: int, root: int, count: int) -> Program:
    """Every rank gets its block of the root's elements."""
    builder = Builder()
    step = builder.steps()
    whole = output_slice(0, count)
    if rank == root:
        for target in range(size):
            if target != rank:
                builder.send(target, step, input_slice(target * count, (target + 1) * count))
        builder.add(Copy(input_slice(rank * count, (rank + 1) * count), whole))
    else:
        builder.wait(builder.receive(root, step, whole))
    add_barrier(builder, size, rank)
    return builder.build(input=size * count if rank == root else 0, output=count)


def permute(size: int, rank: int, pairs: Sequence[tuple[int, int]], count: int) -> Program:
    """Each (source, target) pair moves the source's elements to the target. No rank is twice either."""
    builder = Builder()
    step = builder.steps()
    received: tuple[int, ...] = ()
    for source, target in pairs:
        if target == rank:
            if source == rank:
                builder.add(Copy(input_slice(0, count), output_slice(0, count)))
            else:
                received = builder.receive(source, step, output_slice(0, count))
    for source, target in pairs:
        if source == rank and target != rank:
            builder.send(target, step, input_slice(0, count))
    builder.wait(received)
    add_barrier(builder, size, rank)
    return builder.build(input=count, output=count)


@lru_cache(maxsize=64)
def transfer_out(peer: int, count: int, *, buffered: bool = False) -> Program:
    """Return the sender's half of a transfer between two ranks.

    Args:
        peer: The receiver.
        count: Elements.
        buffered: Whether the sender does not wait for the receiver, which acknowledges the data otherwise.
    """
    builder = Builder()
    if buffered:
        # Without elements a byte goes, so that the receiver does not pass before the sender's call.
        builder.send(peer, builder.steps(), input_slice(0, count) or TOKEN)
        return builder.build(input=count)
    step, acknowledgement = builder.steps(), builder.steps()
    accepted = builder.receive(peer, acknowledgement, builder.token())
    builder.send(peer, step, input_slice(0, count))
    builder.wait(accepted)
    return builder.build(input=count)


@lru_cache(maxsize=64)
def transfer_in(peer: int, count: int, *, buffered: bool = False) -> Program:
    """Return the receiver's half of a transfer between two ranks; see `transfer_out`."""
    builder = Builder()
    if buffered:
        into = output_slice(0, count) if count else builder.token()
        builder.wait(builder.receive(peer, builder.steps(), into))
        return builder.build(output=count)
    step, acknowledgement = builder.steps(), builder.steps()
    builder.wait(builder.receive(peer, step, output_slice(0, count)))
    builder.send(peer, acknowledgement, TOKEN)
    return builder.build(output=count)
