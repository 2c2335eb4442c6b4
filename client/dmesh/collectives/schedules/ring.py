"""Ring schedules: every rank receives from the rank before it and sends to the rank after it.

Every rank has two peers, and sends each block once, which is the least traffic, in as many steps as there are
other ranks. A block is folded from the rank after its owner around the ring to the owner: block b in the
order b + 1, b + 2, ..., b. So an element's bits depend on its place in the array.
"""

from __future__ import annotations

from collections.abc import Callable

from dmesh.collectives.schedules.program import (
    ACCUMULATOR,
    INPUT,
    OUTPUT,
    TOKEN,
    Builder,
    Copy,
    Finish,
    Fold,
    Slice,
    block,
    bounds,
    whole,
)


def all_gather_ring(builder: Builder, count: int) -> None:
    """Build an all-gather: the blocks go around."""
    builder.add(Copy(whole(INPUT, count), block(OUTPUT, builder.rank, count)))
    _circulate(builder, lambda index: block(OUTPUT, index, count))


def reduce_scatter_ring(builder: Builder, count: int) -> None:
    """Build a reduce-scatter: each block goes around, folded by all ranks, to its own."""
    _collect(builder, lambda index: (index * count, (index + 1) * count), whole(OUTPUT, count))


def all_reduce_ring(builder: Builder, count: int) -> None:
    """Build an all-reduce: a reduce-scatter of the array's parts, and an all-gather of their results."""
    parts = [bounds(count, builder.size, index) for index in range(builder.size)]
    _collect(builder, parts.__getitem__, Slice(OUTPUT, *parts[builder.rank]))
    _circulate(builder, lambda index: Slice(OUTPUT, *parts[index]))


def _circulate(builder: Builder, part_of: Callable[[int], Slice]) -> None:
    """Add the way of each rank's part around the ring; for an empty one a byte goes."""
    size, rank = builder.size, builder.rank
    parts = [part_of((rank - distance) % size) or TOKEN for distance in range(size)]
    received = [builder.receive((rank - 1) % size, part) for part in parts[1:]]
    for part, numbers in zip(parts, received, strict=False):
        builder.send((rank + 1) % size, part)
        builder.wait(numbers)


def _collect(builder: Builder, part_of: Callable[[int], tuple[int, int]], into: Slice) -> None:
    """Add the fold of each rank's part on its way around the ring."""
    size, rank = builder.size, builder.rank
    parts = [part_of((rank - distance) % size) for distance in (*range(1, size), 0)]
    partials = [Slice(ACCUMULATOR, *part) for part in parts]
    received = [builder.receive((rank - 1) % size, part or TOKEN) for part in partials[1:]]
    for number, (part, partial) in enumerate(zip(parts, partials, strict=True)):
        if number:
            builder.wait(received[number - 1])
        if partial:
            builder.add(Fold(Slice(INPUT, *part), partial, first=number == 0))
        if number < size - 1:
            builder.send((rank + 1) % size, partial or TOKEN)
    if into:
        builder.add(Finish(partials[-1], into, builder.size))
