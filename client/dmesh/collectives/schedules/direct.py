"""Direct schedules: each pair of ranks that has data for each other exchanges it, in one or two hops.

Reductions fold in the order of ranks. They need the fewest hops, and connections between all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmesh.collectives.schedules.blocks import Span
from dmesh.collectives.schedules.program import (
    INPUT,
    OUTPUT,
    TOKEN,
    Builder,
    Copy,
    Flush,
    Part,
    Slice,
    block,
    bounds,
    whole,
)


def barrier(builder: Builder) -> None:
    """Build a barrier: no rank finishes before all have entered it."""
    builder.barrier()


def all_gather(builder: Builder, count: int) -> None:
    """Build an all-gather, in the order of ranks. Each pair exchanges directly."""
    _move(builder, lambda _: whole(INPUT, count), lambda source: block(OUTPUT, source, count))


def all_to_all(builder: Builder, count: int) -> None:
    """Build an all-to-all: block j of rank i becomes block i of rank j. Each pair exchanges directly."""
    _move(builder, lambda target: block(INPUT, target, count), lambda source: block(OUTPUT, source, count))


def gather(builder: Builder, root: int, count: int) -> None:
    """Build a gather, in the order of ranks."""
    rank = builder.rank
    _move(
        builder,
        lambda target: whole(INPUT, count) if target == root else None,
        lambda source: block(OUTPUT, source, count) if rank == root else None,
    )
    builder.barrier()


def scatter(builder: Builder, root: int, count: int) -> None:
    """Build a scatter: every rank gets its block of the root's elements."""
    rank = builder.rank
    _move(
        builder,
        lambda target: block(INPUT, target, count) if rank == root else None,
        lambda source: whole(OUTPUT, count) if source == root else None,
    )
    builder.barrier()


def permute(builder: Builder, pairs: Sequence[tuple[int, int]], count: int) -> None:
    """Build a permutation: each (source, target) pair moves elements. No rank is source or target twice."""
    rank, targets = builder.rank, dict(pairs)
    _move(
        builder,
        lambda target: whole(INPUT, count) if target == targets.get(rank) else None,
        lambda source: whole(OUTPUT, count) if targets.get(source) == rank else None,
    )
    builder.barrier()


def exchange(builder: Builder, sends: Sequence[Span], receives: Sequence[Span], closes: bool) -> None:
    """Build an exchange of blocks of any lengths between all pairs of ranks.

    `sends` and `receives` are the elements of the input for, and of the output from, each rank.
    """
    _move(builder, lambda peer: Slice(INPUT, *sends[peer]), lambda peer: Slice(OUTPUT, *receives[peer]))
    if closes:
        builder.barrier()


def _move(builder: Builder, outgoing: Part, incoming: Part) -> None:
    """Add an exchange, and the copy of the elements that stay on this rank."""
    received = builder.exchange(outgoing, incoming)
    source, into = outgoing(builder.rank), incoming(builder.rank)
    if source and into:
        builder.add(Copy(source, into))
    builder.wait(*received.values())


def transfer(builder: Builder, peer: int, count: int, sends: bool, buffered: bool) -> None:
    """Build one rank's half of a transfer; `buffered`: the receiver does not acknowledge the data."""
    # Without elements a byte goes, so that the receiver does not pass before the sender's call.
    data = whole(INPUT if sends else OUTPUT, count) or TOKEN
    if sends:
        accepted = () if buffered else builder.receive(peer, TOKEN)
        builder.send(peer, data)
        builder.wait(accepted)
    else:
        builder.wait(builder.receive(peer, data))
        builder.send(peer, None if buffered else TOKEN)


def all_reduce_flat(builder: Builder, count: int) -> None:
    """Build an all-reduce of short arrays: every rank sends its array to all others; one hop."""
    builder.fold(lambda peer: (0, count), range(builder.size))
    # The output may be the input's memory, which must stay as it is until it has been sent.
    builder.add(Flush())
    builder.finish(whole(OUTPUT, count))


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


def reduce_scatter(builder: Builder, parts: Sequence[Span], closes: bool = False) -> None:
    """Build a reduce-scatter: every rank folds all ranks' blocks of its own number."""
    owners = [peer for peer, (start, stop) in enumerate(parts) if stop > start]
    builder.fold(parts.__getitem__, owners)
    if builder.rank in owners:
        start, stop = parts[builder.rank]
        builder.finish(whole(OUTPUT, stop - start))
    if closes:
        builder.barrier()


def reduce_scatter_equal(builder: Builder, count: int) -> None:
    """Build a reduce-scatter of blocks of equal lengths."""
    reduce_scatter(builder, [(at * count, (at + 1) * count) for at in range(builder.size)])


def reduce_flat(builder: Builder, root: int, count: int) -> None:
    """Build a reduce of short arrays: every rank sends its array to the root, which folds; one hop."""
    builder.fold(lambda peer: (0, count), (root,))
    if builder.rank == root:
        builder.finish(whole(OUTPUT, count))
    builder.barrier()


def reduce_scattered(builder: Builder, root: int, count: int) -> None:
    """Build a reduce of long arrays: every rank folds its part for the root.

    The output of the other ranks is room for their part alone.
    """
    size, rank = builder.size, builder.rank
    parts = [bounds(count, size, index) for index in range(size)]
    builder.fold(parts.__getitem__, range(size))
    start, stop = parts[rank]
    own = Slice(OUTPUT, start, stop) if rank == root else whole(OUTPUT, stop - start)
    builder.finish(own)
    received = builder.exchange(
        lambda target: own if target == root else None,
        lambda source: Slice(OUTPUT, *parts[source]) if rank == root else None,
    )
    builder.wait(*received.values())
    builder.barrier()
