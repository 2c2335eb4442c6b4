"""Scans, and reductions whose operation must see whole arrays: the partial results go from rank to rank.

All of them fold in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmesh.collectives.schedules.program import (
    ACCUMULATOR,
    INPUT,
    OUTPUT,
    Buffer,
    Builder,
    Copy,
    Flush,
    Fold,
    Slice,
    block,
    bounds,
    whole,
)

PIECES = 8
"""Number of pieces of a long array that go along the chain of ranks one after the other."""


def scan_flat(builder: Builder, count: int, inclusive: bool) -> None:
    """Build a scan of short arrays: every rank sends its array to all later ones, which fold; one hop."""
    rank = builder.rank
    received = builder.exchange(
        lambda target: whole(INPUT, count) if target > rank else None,
        lambda source: block(Buffer.STAGE, source, count) if source < rank else None,
    )
    for source in range(rank):
        builder.wait(received[source])
        builder.add(Fold(block(Buffer.STAGE, source, count), whole(ACCUMULATOR, count), first=source == 0))
    if inclusive:
        builder.add(Fold(whole(INPUT, count), whole(ACCUMULATOR, count), first=rank == 0))
    if folded := rank + inclusive:
        builder.add(Flush())  # the output may be the input's memory, or what is folded in the output's
        builder.finish(whole(OUTPUT, count), folded)
    builder.barrier()


def scan_chain(builder: Builder, count: int, inclusive: bool, pieces: int) -> None:
    """Build a scan of long arrays: each rank reduces its array into the previous rank's result."""
    size, rank = builder.size, builder.rank
    # An exclusive scan keeps the received array, its result, besides the one that it passes on.
    folded = 0 if inclusive or not rank or rank == size - 1 else count
    pieces = min(pieces, count)
    parts = [bounds(count, pieces, index) for index in range(pieces)]
    received = [builder.receive(rank - 1, Slice(ACCUMULATOR, *part)) if rank else () for part in parts]
    for (start, stop), came in zip(parts, received, strict=True):
        builder.wait(came)
        into = Slice(ACCUMULATOR, folded + start, folded + stop)
        if folded:
            builder.add(Copy(Slice(ACCUMULATOR, start, stop), into))
        if inclusive or rank < size - 1:
            builder.add(Fold(Slice(INPUT, start, stop), into, first=rank == 0))
        if rank < size - 1:
            builder.send(rank + 1, into)
    if rank + inclusive:
        builder.add(Flush())
        builder.finish(whole(OUTPUT, count), rank + inclusive)
    builder.barrier()


def reduce_chain(builder: Builder, count: int, parts: Sequence[tuple[int, int] | None]) -> None:
    """Build a reduction along the chain of ranks: the last one sends the others their part of the result.

    `parts` has the elements that each rank gets, None for nothing.
    """
    rank, last = builder.rank, builder.size - 1
    accumulator, own = whole(ACCUMULATOR, count), parts[rank]
    result = None if own is None else whole(OUTPUT, own[1] - own[0])
    if rank:
        builder.wait(builder.receive(rank - 1, accumulator))
    builder.add(Fold(whole(INPUT, count), accumulator, first=rank == 0))
    if rank < last:
        builder.send(rank + 1, accumulator)
        builder.wait(builder.receive(last, result))
    else:
        for peer, part in enumerate(parts[:last]):
            builder.send(peer, None if part is None else Slice(ACCUMULATOR, *part))
        if own is not None and result:
            builder.add(Copy(Slice(ACCUMULATOR, *own), result))
    if None in parts:
        builder.barrier()
