"""Tree schedules of calls with a root: binomial, for short arrays, and a pipelined binary tree.

Ranks are counted from the root: what follows calls that a rank's *place*. Reductions gather all contributions
at the root, which folds them in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from dmesh.collectives.schedules.bruck import fold_blocks
from dmesh.collectives.schedules.chain import forward
from dmesh.collectives.schedules.program import (
    INPUT,
    OUTPUT,
    Buffer,
    Builder,
    Copy,
    Slice,
    bounds,
    rotated,
    whole,
)

_STAGE = Buffer.STAGE


def broadcast_tree(builder: Builder, root: int, count: int) -> None:
    """Build a broadcast through a binomial tree: few hops, for short messages."""
    size, rank = builder.size, builder.rank
    data = whole(OUTPUT, count)
    # Seen from the root: rank r gets its copy from r without its highest bit, and serves r + 2**k above that
    # bit.
    relative = (rank - root) % size
    distance = 1 << relative.bit_length()
    if relative == 0:
        builder.add(Copy(whole(INPUT, count), data))
    else:
        builder.wait(builder.receive((rank - distance // 2) % size, data))
    while relative + distance < size:
        builder.send((rank + distance) % size, data)
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
        builder.add(Copy(whole(INPUT, count), whole(OUTPUT, count)))
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


def broadcast_binary(builder: Builder, root: int, count: int, pieces: int) -> None:
    """Build a broadcast of longer arrays: pieces go through a binary tree."""
    size, place = builder.size, (builder.rank - root) % builder.size
    children = [child for child in (2 * place + 1, 2 * place + 2) if child < size]
    source = ((place - 1) // 2 + root) % size if place else None
    forward(builder, source, [(child + root) % size for child in children], count, pieces)


def gather_tree(builder: Builder, root: int, count: int) -> None:
    """Build a gather of short arrays, in the order of ranks."""
    _collect(builder, root, count)
    if builder.rank == root:
        rotated(builder, _STAGE, OUTPUT, root, count, builder.size * count)
    builder.barrier()


def reduce_gathered(builder: Builder, root: int, count: int) -> None:
    """Build a reduce of short arrays: the root gathers them, and folds them in the order of ranks."""
    size = builder.size
    _collect(builder, root, count)
    if builder.rank == root:
        fold_blocks(builder, [(source - root) % size for source in range(size)], count, count)
        builder.finish(whole(OUTPUT, count))
    builder.barrier()


def scatter_tree(builder: Builder, root: int, count: int) -> None:
    """Build a scatter of short blocks: each rank receives its subtree's blocks, and passes them on."""
    size, rank = builder.size, builder.rank
    place = (rank - root) % size
    if place:
        above = (rank - (place & -place)) % size
        builder.wait(builder.receive(above, whole(_STAGE, _subtree(size, place) * count)))
    else:
        first = root * count
        for start, stop, to in ((first, size * count, 0), (0, first, size * count - first)):
            if stop > start:
                builder.add(Copy(Slice(INPUT, start, stop), Slice(_STAGE, to, to + stop - start)))
    for child in reversed(list(_children(size, place))):  # the largest subtree first
        start = (child - place) * count
        builder.send((child + root) % size, Slice(_STAGE, start, start + _subtree(size, child) * count))
    builder.add(Copy(whole(_STAGE, count), whole(OUTPUT, count)))
    builder.barrier()


def _collect(builder: Builder, root: int, count: int) -> None:
    """Add the way of all ranks' arrays to the root's stage, by place."""
    size, rank = builder.size, builder.rank
    place = (rank - root) % size
    builder.add(Copy(whole(INPUT, count), whole(_STAGE, count)))
    received = []
    for child in _children(size, place):
        start = (child - place) * count
        into = Slice(_STAGE, start, start + _subtree(size, child) * count)
        received.append(builder.receive((child + root) % size, into))
    builder.wait(*received)
    if place:
        builder.send((rank - (place & -place)) % size, whole(_STAGE, _subtree(size, place) * count))


def _children(size: int, place: int) -> Iterator[int]:
    """Yield the places below a place of the binomial tree, by rising size of their subtrees."""
    distance = 1
    while place + distance < size and not place & distance:
        yield place + distance
        distance *= 2


def _subtree(size: int, place: int) -> int:
    """Return the number of ranks in the subtree of a place."""
    return min(place & -place, size - place) if place else size
