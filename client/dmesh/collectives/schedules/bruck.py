"""Bruck's schedules: in round k every rank exchanges blocks with the ranks 2**k before and after it.

They need few rounds and connections, for any number of ranks, and are for short blocks, which travel up to
once a round. Reductions gather contributions so, and fold them in the order of ranks: they have the same
bits as the direct schedules.
"""

from __future__ import annotations

from collections.abc import Iterator

from dmesh.collectives.schedules.program import (
    ACCUMULATOR,
    INPUT,
    OUTPUT,
    Buffer,
    Builder,
    Copy,
    Finish,
    Flush,
    Fold,
    Slice,
    block,
    rotated,
    whole,
)

_STAGE, _RELAY = Buffer.STAGE, Buffer.RELAY


def all_gather_bruck(builder: Builder, count: int) -> None:
    """Build an all-gather, in the order of ranks."""
    builder.add(Copy(whole(INPUT, count), whole(_STAGE, count)))
    _gather(builder, _STAGE, count)
    rotated(builder, _STAGE, OUTPUT, builder.rank, count, builder.size * count)


def all_to_all_bruck(builder: Builder, count: int) -> None:
    """Build an all-to-all: block j of rank i becomes block i of rank j."""
    size, rank = builder.size, builder.rank
    _load(builder, count, size * count)
    _distribute(builder, count)
    for source in range(size):
        builder.add(Copy(block(_STAGE, (rank - source) % size, count), block(OUTPUT, source, count)))


def reduce_scatter_bruck(builder: Builder, count: int) -> None:
    """Build a reduce-scatter: an all-to-all of the blocks, which each rank folds."""
    _load(builder, count, builder.size * count)
    _distribute(builder, count)
    _fold_distributed(builder, count, count)
    builder.finish(whole(OUTPUT, count))


def all_reduce_gathered(builder: Builder, count: int) -> None:
    """Build an all-reduce of short arrays: an all-gather, which each rank folds."""
    size, rank = builder.size, builder.rank
    builder.add(Copy(whole(INPUT, count), whole(_STAGE, count)))
    _gather(builder, _STAGE, count)
    fold_blocks(builder, [(source - rank) % size for source in range(size)], count, count)
    builder.finish(whole(OUTPUT, count))


def all_reduce_bruck(builder: Builder, count: int) -> None:
    """Build an all-reduce of longer arrays: an all-to-all of parts, which each rank folds; an all-gather."""
    size, rank = builder.size, builder.rank
    each = -(-count // size)
    own = max(0, min(each, count - rank * each))
    _load(builder, each, count)
    _distribute(builder, each)
    if own:
        _fold_distributed(builder, each, own)
        builder.add(Finish(whole(ACCUMULATOR, own), whole(_RELAY, own), builder.size))
    _gather(builder, _RELAY, each)
    rotated(builder, _RELAY, OUTPUT, rank, each, count)


def fold_blocks(builder: Builder, order: list[int], each: int, count: int) -> None:
    """Add the fold of `count` elements of blocks of the stage, in some order."""
    for number, index in enumerate(order):
        source = Slice(_STAGE, index * each, index * each + count)
        builder.add(Fold(source, whole(ACCUMULATOR, count), first=number == 0))


def _fold_distributed(builder: Builder, each: int, count: int) -> None:
    size, rank = builder.size, builder.rank
    fold_blocks(builder, [(rank - source) % size for source in range(size)], each, count)


def _gather(builder: Builder, buffer: Buffer, each: int) -> None:
    """Add the rounds of an all-gather: block i of the buffer becomes that of the i-th rank after this one."""
    size, rank = builder.size, builder.rank
    held = 1
    while held < size:
        sent = min(held, size - held)
        into = Slice(buffer, held * each, (held + sent) * each)
        received = builder.receive((rank + held) % size, into)
        builder.send((rank - held) % size, whole(buffer, sent * each))
        builder.wait(received)
        held *= 2


def _load(builder: Builder, each: int, count: int) -> None:
    """Add copies of the input's blocks to the stage: block i is for the i-th rank after this one."""
    size, first = builder.size, builder.rank * each
    total = size * each
    for start, stop, to in ((first, min(total, count), 0), (0, min(first, count), total - first)):
        if stop > start:
            builder.add(Copy(Slice(INPUT, start, stop), Slice(_STAGE, to, to + stop - start)))


def _distribute(builder: Builder, each: int) -> None:
    """Add the rounds of an all-to-all: block i of the stage becomes that of the i-th rank before this one."""
    size, rank = builder.size, builder.rank
    distance = 1
    while distance < size:
        runs = list(_runs(size, distance))
        moved = sum(stop - start for start, stop in runs) * each
        packed = Slice(_STAGE, size * each, size * each + moved)
        arrived = Slice(_STAGE, packed.stop, packed.stop + moved)
        at = packed.start
        received = builder.receive((rank - distance) % size, arrived)
        for start, stop in runs:
            length = (stop - start) * each
            builder.add(Copy(Slice(_STAGE, start * each, stop * each), Slice(_STAGE, at, at + length)))
            at += length
        builder.send((rank + distance) % size, packed)
        builder.wait(received)
        at = arrived.start
        for start, stop in runs:
            length = (stop - start) * each
            builder.add(Copy(Slice(_STAGE, at, at + length), Slice(_STAGE, start * each, stop * each)))
            at += length
        builder.add(Flush())  # the room for packed blocks is used again
        distance *= 2


def _runs(size: int, distance: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the runs of blocks whose number has the bit of a distance."""
    for start in range(distance, size, 2 * distance):
        yield start, min(start + distance, size)
