"""Reduction schedules.

Every element is folded by one owner, or by everybody in the same way, always in the order of ranks: the same
inputs give the same bits on every rank, whatever the size of the array and however the messages happen to
arrive.

`count` is the number of elements of one rank's array, in `reduce_scatter` of one block. It must not be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from dmesh.collectives.schedules.program import (
    Buffer,
    Builder,
    Finish,
    Flush,
    Fold,
    Program,
    Slice,
    bounds,
    input_slice,
    output_slice,
    stage_slice,
)
from dmesh.collectives.schedules.synchronization import add_barrier


@lru_cache(maxsize=256)
def all_reduce_flat(size: int, rank: int, count: int) -> Program:
    """Everybody sends everything to everybody and folds for itself: one hop, for short arrays."""
    builder = Builder()
    _add_owner_fold(builder, size, rank, count, lambda peer: (0, count), sends_to=range(size))
    # The output may be the input's memory, which must stay as it is until it has been sent.
    builder.add(Flush())
    builder.add(Finish(_accumulator(count), output_slice(0, count)))
    return builder.build(input=count, stage=(size - 1) * count, accumulator=count, output=count)


@lru_cache(maxsize=256)
def all_reduce_scattered(size: int, rank: int, count: int) -> Program:
    """Every rank folds its part of the array and gives the result to all: least traffic, for long arrays."""
    builder = Builder()
    start, stop = bounds(count, size, rank)
    own = output_slice(start, stop)
    _add_owner_fold(builder, size, rank, count, lambda peer: bounds(count, size, peer), range(size))
    builder.add(Finish(_accumulator(stop - start), own))
    step = builder.steps()
    received: list[int] = []
    for distance in range(1, size):
        # If input and output are the same memory, a part is received over what was sent to its owner. The
        # owner has it by then: its result cannot come before it folded what we sent.
        source, target = (rank - distance) % size, (rank + distance) % size
        received += builder.receive(source, step, output_slice(*bounds(count, size, source)))
        builder.send(target, step, own)
    builder.wait(received)
    return builder.build(
        input=count, stage=(size - 1) * (stop - start), accumulator=stop - start, output=count
    )


@lru_cache(maxsize=256)
def reduce_scatter(size: int, rank: int, count: int) -> Program:
    """Every rank gets the fold of all ranks' blocks of its own number."""
    builder = Builder()
    _add_owner_fold(builder, size, rank, count, lambda peer: (peer * count, (peer + 1) * count), range(size))
    builder.add(Finish(_accumulator(count), output_slice(0, count)))
    return builder.build(input=size * count, stage=(size - 1) * count, accumulator=count, output=count)


@lru_cache(maxsize=256)
def reduce_flat(size: int, rank: int, root: int, count: int) -> Program:
    """Everybody sends everything to the root, which folds: one hop, for short arrays."""
    builder = Builder()
    _add_owner_fold(builder, size, rank, count, lambda peer: (0, count), sends_to=(root,))
    if rank == root:
        builder.add(Finish(_accumulator(count), output_slice(0, count)))
    add_barrier(builder, size, rank)
    if rank != root:
        return builder.build(input=count)
    return builder.build(input=count, stage=(size - 1) * count, accumulator=count, output=count)


@lru_cache(maxsize=256)
def reduce_scattered(size: int, rank: int, root: int, count: int) -> Program:
    """Every rank folds its part of the array and gives the result to the root. For long arrays.

    The output of the other ranks is room for their part alone.
    """
    builder = Builder()
    start, stop = bounds(count, size, rank)
    own = output_slice(start, stop) if rank == root else output_slice(0, stop - start)
    _add_owner_fold(builder, size, rank, count, lambda peer: bounds(count, size, peer), range(size))
    builder.add(Finish(_accumulator(stop - start), own))
    step = builder.steps()
    if rank == root:
        received: list[int] = []
        for source in range(size):
            if source != rank:
                received += builder.receive(source, step, output_slice(*bounds(count, size, source)))
        builder.wait(received)
    else:
        builder.send(root, step, own)
    add_barrier(builder, size, rank)
    return builder.build(
        input=count,
        stage=(size - 1) * (stop - start),
        accumulator=stop - start,
        output=count if rank == root else stop - start,
    )


def _accumulator(count: int) -> Slice:
    return Slice(Buffer.ACCUMULATOR, 0, count)


def _add_owner_fold(
    builder: Builder,
    size: int,
    rank: int,
    count: int,
    part_of: Callable[[int], tuple[int, int]],
    sends_to: range | tuple[int, ...],
) -> None:
    """Append: send each owner in `sends_to` its part, and fold the own part, if this rank owns one."""
    step = builder.steps()
    owns = rank in sends_to
    start, stop = part_of(rank)
    length = stop - start
    received: dict[int, tuple[int, ...]] = {}
    slots: dict[int, Slice] = {rank: input_slice(start, stop)}
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        if owns:
            slot = source if source < rank else source - 1
            slots[source] = stage_slice(slot * length, (slot + 1) * length)
            received[source] = builder.receive(source, step, slots[source])
        if target in sends_to:
            builder.send(target, step, input_slice(*part_of(target)))
    if owns:
        for source in range(size):
            builder.wait(received.get(source, ()))
            builder.add(Fold(slots[source], _accumulator(length), first=source == 0))
