"""Pipelined chains: arrays travel in pieces from rank to rank, in both directions. For long arrays.

Every rank has two peers, and sends every element once in each direction. Contributions are folded in the
order of ranks: a partial result goes from rank 0 up to the last rank, which has the result. So a chain has
the same bits as the direct schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dmesh.collectives.schedules.program import (
    ACCUMULATOR,
    INPUT,
    OUTPUT,
    Buffer,
    Builder,
    Copy,
    Finish,
    Fold,
    Slice,
    bounds,
    whole,
)


def all_reduce_chain(builder: Builder, count: int, pieces: int) -> None:
    """Build an all-reduce: up the chain pieces are folded, and down the chain go their results."""
    parts = _cut(count, pieces)
    _up_and_down(builder, parts, parts, lambda _: Buffer.OUTPUT, lambda _: 0)


def reduce_scatter_chain(builder: Builder, count: int, pieces: int) -> None:
    """Build a reduce-scatter: up the chain blocks are folded, and each goes down the chain to its rank."""
    size, rank = builder.size, builder.rank
    parts = [(owner, *part) for owner in range(size) for part in _cut(count, pieces)]
    blocks = [(owner * count + start, owner * count + stop) for owner, start, stop in parts]
    _up_and_down(
        builder,
        blocks,
        [part[1:] if part[0] == rank else at for part, at in zip(parts, blocks, strict=True)],
        lambda number: OUTPUT if parts[number][0] == rank else Buffer.RELAY,
        lambda number: parts[number][0],
    )


def _up_and_down(
    builder: Builder,
    inputs: Sequence[tuple[int, int]],
    results: Sequence[tuple[int, int]],
    place: Callable[[int], Buffer],
    target: Callable[[int], int],
) -> None:
    """Add the folds of pieces up the chain, and the ways of their results down to rank `target` of each."""
    rank, last = builder.rank, builder.size - 1
    numbers = range(len(inputs))
    partials = [Slice(ACCUMULATOR, *part) for part in inputs]
    outputs = [Slice(place(number), *results[number]) for number in numbers]
    lowered = [number for number in numbers if target(number) <= rank]
    raised = [builder.receive(rank - 1, part) if rank else () for part in partials]
    received = {number: builder.receive(rank + 1, outputs[number]) for number in lowered if rank < last}

    def down(number: int) -> None:
        if number in received:
            builder.wait(received[number])
        if target(number) < rank and (rank == last or number in received):
            builder.send(rank - 1, outputs[number])

    # The result of a piece is back after twice as many steps as there are ranks above this one.
    delay = 2 * (last - rank)
    for step in range(len(numbers) + delay):
        if step < len(numbers):
            builder.wait(raised[step])
            builder.add(Fold(Slice(INPUT, *inputs[step]), partials[step], first=rank == 0))
            if rank < last:
                builder.send(rank + 1, partials[step])
            else:
                builder.add(Finish(partials[step], outputs[step], builder.size))
        if step >= delay:
            down(step - delay)


def reduce_chain(builder: Builder, root: int, count: int, pieces: int) -> None:
    """Build a reduce: the last rank of the chain has the result, and sends it to the root."""
    rank, last = builder.rank, builder.size - 1
    parts = _cut(count, pieces)
    raised = [builder.receive(rank - 1, Slice(ACCUMULATOR, *part)) if rank else () for part in parts]
    result = [builder.receive(last, Slice(OUTPUT, *part)) for part in parts if rank == root != last]
    for part, received in zip(parts, raised, strict=True):
        builder.wait(received)
        builder.add(Fold(Slice(INPUT, *part), Slice(ACCUMULATOR, *part), first=rank == 0))
        if rank < last:
            builder.send(rank + 1, Slice(ACCUMULATOR, *part))
        else:
            builder.add(Finish(Slice(ACCUMULATOR, *part), Slice(OUTPUT, *part), builder.size))
            if root != last:
                builder.send(root, Slice(OUTPUT, *part))
    builder.wait(*result)
    builder.barrier()


def broadcast_chain(builder: Builder, root: int, count: int, pieces: int) -> None:
    """Build a broadcast: pieces go from the root through all ranks."""
    size, rank = builder.size, builder.rank
    relative = (rank - root) % size
    next_ranks = [(rank + 1) % size] if relative < size - 1 else []
    forward(builder, (rank - 1) % size if relative else None, next_ranks, count, pieces)


def forward(builder: Builder, source: int | None, targets: Sequence[int], count: int, pieces: int) -> None:
    """Add a broadcast's pieces from a rank (None: this one is the root) to some ranks, and its barrier."""
    parts = [Slice(OUTPUT, *part) for part in _cut(count, pieces)]
    received = [() if source is None else builder.receive(source, part) for part in parts]
    if source is None:
        builder.add(Copy(whole(INPUT, count), whole(OUTPUT, count)))
    for part, numbers in zip(parts, received, strict=True):
        builder.wait(numbers)
        for target in targets:
            builder.send(target, part)
    builder.barrier()


def _cut(count: int, pieces: int) -> list[tuple[int, int]]:
    """Return begin and end of nearly equal pieces, none of them empty."""
    pieces = min(pieces, count)
    return [bounds(count, pieces, index) for index in range(pieces)]
