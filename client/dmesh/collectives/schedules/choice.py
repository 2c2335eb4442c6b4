"""Choice of the schedule of a call.

Groups of up to `MOST_DIRECT` ranks exchange directly, in one or two hops: then every rank hears of a late one
itself, and the connections cost little. Larger ones take the schedule that the cost model says is fastest,
among those whose order of folding the group allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from dmesh.collectives.schedules import bruck, chain, direct, doubling, ring, scans, trees
from dmesh.collectives.schedules.blocks import Blocks
from dmesh.collectives.schedules.cost import Model, cost
from dmesh.collectives.schedules.program import Program, make

MOST_DIRECT = 16
"""Largest group whose calls all take direct schedules, or a broadcast's binomial tree."""
SMALLEST_PIECE = 4 * 1024
"""Least bytes of a piece of a pipelined schedule."""
MOST_PIECES = 256
"""Largest number of pieces of a pipelined schedule."""
MOST_STAGED = 64 * 1024 * 1024
"""Most bytes that a schedule for large groups may keep of other ranks' contributions."""
MOST_PEERS = 128
"""Most peers of a rank, where another schedule needs fewer: each takes a file descriptor on both sides."""
FLAT_TOTAL_LIMIT = 512 * 1024
"""Largest number of bytes that one rank receives for a flat reduction; a bound for large groups."""
_UNROOTED = {
    "all_gather": direct.all_gather,
    "all_to_all": direct.all_to_all,
    "reduce_scatter": direct.reduce_scatter_equal,
}
_ROOTED = {"gather": direct.gather, "scatter": direct.scatter}


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
    model: Model,
    pinned: bool,
    undivided: bool = False,
    blocks: Blocks | None = None,
) -> Program:
    """Return a rank's steps in a call; see `request.Request`.

    The choice depends on nothing but numbers that all ranks of a group share, or their schedules would not
    fit each other. `flat`, `tree` and `send_buffer`, which depend on the machines (`tuning`), are the most
    bytes for which a reduction takes one hop, a broadcast goes through a tree, and a sender does not wait for
    its receiver. `contributes` is a transfer's direction. `model` chooses for large groups, `pinned` among
    schedules that fold in the order of ranks. `undivided` says that arrays must be folded whole.
    """
    if kind == "transfer":
        return make(direct.transfer, size, rank, root, count, contributes, nbytes <= send_buffer)
    if not count:
        return make(direct.barrier, size, rank)  # nothing to send, but nobody may pass before all have come
    # With fewer elements than ranks some ranks would own nothing, and hear nothing of the others.
    is_flat = count < size or (nbytes <= flat and nbytes * (size - 1) <= FLAT_TOTAL_LIMIT)
    if kind in ("scan", "exscan"):
        if is_flat:
            return make(scans.scan_flat, size, rank, count, kind == "scan")
        pieces = 1 if undivided else scans.PIECES
        return make(scans.scan_chain, size, rank, count, kind == "scan", pieces)
    if undivided:
        everything = count * (size if kind == "reduce_scatter" else 1)
        parts = [_part(kind, at, count, root) for at in range(size)]
        return make(scans.reduce_chain, size, rank, everything, parts)
    if blocks is not None:
        if kind == "reduce_scatter":
            return make(direct.reduce_scatter, size, rank, blocks.sends, blocks.closes)
        return make(direct.exchange, size, rank, blocks.sends, blocks.receives, blocks.closes)
    if kind == "permute":
        return make(direct.permute, size, rank, pairs, count)
    if size > MOST_DIRECT and kind in SCHEDULES:
        schedule, arguments = choose(kind, size, count, nbytes, model, pinned)
        return make(schedule, size, rank, *((root,) if kind in _WITH_ROOT else ()), count, *arguments)
    if kind in _UNROOTED:
        return make(_UNROOTED[kind], size, rank, count)
    if kind in _ROOTED:
        return make(_ROOTED[kind], size, rank, root, count)
    if kind == "all_reduce":
        return make(direct.all_reduce_flat if is_flat else direct.all_reduce_scattered, size, rank, count)
    if kind == "reduce":
        return make(direct.reduce_flat if is_flat else direct.reduce_scattered, size, rank, root, count)
    if kind == "broadcast":
        is_tree = size <= 2 or nbytes <= tree or count < size
        return make(trees.broadcast_tree if is_tree else trees.broadcast_scattered, size, rank, root, count)
    return make(direct.barrier, size, rank)


def _part(kind: str, rank: int, count: int, root: int) -> tuple[int, int] | None:
    """Return the elements of a reduction's result that a rank gets."""
    if kind == "reduce_scatter":
        return rank * count, (rank + 1) * count
    return (0, count) if kind == "all_reduce" or rank == root else None


_WITH_ROOT = ("reduce", "broadcast", "gather", "scatter")
SCHEDULES: dict[str, tuple[Callable[..., None], ...]] = {
    "all_gather": (direct.all_gather, bruck.all_gather_bruck, ring.all_gather_ring),
    "all_to_all": (direct.all_to_all, bruck.all_to_all_bruck),
    "gather": (direct.gather, trees.gather_tree),
    "scatter": (direct.scatter, trees.scatter_tree),
    "broadcast": (trees.broadcast_tree, trees.broadcast_binary, chain.broadcast_chain),
    "all_reduce": (bruck.all_reduce_gathered, bruck.all_reduce_bruck, chain.all_reduce_chain),
    "reduce": (trees.reduce_gathered, chain.reduce_chain),
    "reduce_scatter": (direct.reduce_scatter_equal, bruck.reduce_scatter_bruck, chain.reduce_scatter_chain),
}
"""Schedules for large groups. Those that reduce fold in the order of ranks."""
OTHER_ORDERS: dict[str, tuple[Callable[..., None], ...]] = {
    "all_reduce": (doubling.all_reduce_doubling, doubling.all_reduce_halving, ring.all_reduce_ring),
    "reduce": (doubling.reduce_tree,),
    "reduce_scatter": (doubling.reduce_scatter_halving, ring.reduce_scatter_ring),
}
"""Schedules that fold in another order, which is documented with each."""
_PIPELINED = frozenset(
    (
        trees.broadcast_binary,
        chain.broadcast_chain,
        chain.all_reduce_chain,
        chain.reduce_chain,
        chain.reduce_scatter_chain,
    )
)
_STAGED = frozenset((bruck.all_reduce_gathered, trees.reduce_gathered))
"""Schedules that keep every rank's whole contribution."""


@lru_cache(maxsize=1024)
def choose(
    kind: str, size: int, count: int, nbytes: int, model: Model, pinned: bool
) -> tuple[Callable[..., None], tuple[int, ...]]:
    """Return the fastest schedule of a large group, and the number of pieces if it is pipelined.

    `nbytes` are those that a rank contributes, `pinned` tells whether contributions must be folded in the
    order of ranks. All ranks come to the same.
    """
    blocks = size if kind in ("all_to_all", "reduce_scatter", "scatter") else 1
    width = max(1, nbytes // (count * blocks))
    allowed = SCHEDULES[kind] + (() if pinned else OTHER_ORDERS.get(kind, ()))
    candidates = [
        (max(0, found.peers - MOST_PEERS), found.picoseconds(model, width), order, schedule, arguments)
        for order, schedule in enumerate(allowed)
        if schedule not in _STAGED or size * nbytes <= MOST_STAGED
        for arguments in pieces_of(schedule, count * width)
        for found in (cost(schedule, size, count, *arguments),)
    ]
    *_, schedule, arguments = min(candidates, key=lambda found: found[:3])
    return schedule, arguments


def pieces_of(schedule: Callable[..., None], nbytes: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of pieces for an array or block of so many bytes; () if the schedule has none."""
    if schedule not in _PIPELINED:
        yield ()
        return
    pieces = 1
    while pieces == 1 or (pieces <= MOST_PIECES and nbytes >= pieces * SMALLEST_PIECE):
        yield (pieces,)
        pieces *= 2
