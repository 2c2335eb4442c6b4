"""Schedules of collectives: the sends, receives and folds of each rank. Pure data, no IO.

The functions here choose the schedule that fits the size of the message. The choice depends on nothing but
numbers that all ranks of a group share, or they would run schedules that do not fit each other. The sizes at
which one schedule becomes faster than another depend on the machines; `dmesh.collectives.tuning` has them.
"""

from __future__ import annotations

from typing import Protocol

from dmesh.collectives.schedules.data_movement import (
    all_gather,
    all_to_all,
    broadcast_scattered,
    broadcast_tree,
    gather,
    permute,
    scatter,
    transfer_in,
    transfer_out,
)
from dmesh.collectives.schedules.program import Buffer, Program
from dmesh.collectives.schedules.reductions import (
    all_reduce_flat,
    all_reduce_scattered,
    reduce_flat,
    reduce_scatter,
    reduce_scattered,
)
from dmesh.collectives.schedules.synchronization import barrier


class Call(Protocol):
    """The numbers of a request that a schedule follows from; see `request.Request`."""

    @property
    def kind(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def nbytes_per_rank(self) -> int: ...
    @property
    def root(self) -> int: ...
    @property
    def pairs(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def contributes(self) -> bool: ...


FLAT_TOTAL_LIMIT = 512 * 1024
"""Largest number of bytes that one rank receives for a flat reduction; a bound for large groups."""


def all_reduce(size: int, rank: int, count: int, nbytes: int, flat: int) -> Program:
    """Return the schedule for an all-reduce of `count` elements, `nbytes` in all: one hop up to `flat`."""
    if _is_flat(size, count, nbytes, flat):
        return all_reduce_flat(size, rank, count)
    return all_reduce_scattered(size, rank, count)


def reduce(size: int, rank: int, root: int, count: int, nbytes: int, flat: int) -> Program:
    """Return the schedule for a reduction of as many to one rank: one hop up to `flat`."""
    if _is_flat(size, count, nbytes, flat):
        return reduce_flat(size, rank, root, count)
    return reduce_scattered(size, rank, root, count)


def broadcast(size: int, rank: int, root: int, count: int, nbytes: int, tree: int) -> Program:
    """Return the schedule for a broadcast of `count` elements, `nbytes` in all: a tree up to `tree`."""
    if size <= 2 or nbytes <= tree or count < size:
        return broadcast_tree(size, rank, root, count)
    return broadcast_scattered(size, rank, root, count)


def select(request: Call, size: int, rank: int, flat: int, tree: int, send_buffer: int = 0) -> Program:
    """Return what a rank does in a call.

    Args:
        request: The call.
        size: Number of ranks in the group.
        rank: Position of the rank.
        flat: Bytes up to which a reduction takes one hop.
        tree: Bytes up to which a broadcast goes through a tree.
        send_buffer: Bytes up to which a send does not wait for its receiver.
    """
    count, nbytes, root = request.count, request.nbytes_per_rank, request.root
    if request.kind == "transfer":
        transfer = transfer_out if request.contributes else transfer_in
        return transfer(root, count, buffered=nbytes <= send_buffer)
    if not count:
        return barrier(size, rank)  # nothing to send, but nobody may pass before all have come
    match request.kind:
        case "all_reduce":
            return all_reduce(size, rank, count, nbytes, flat)
        case "reduce":
            return reduce(size, rank, root, count, nbytes, flat)
        case "reduce_scatter":
            return reduce_scatter(size, rank, count)
        case "broadcast":
            return broadcast(size, rank, root, count, nbytes, tree)
        case "all_gather":
            return all_gather(size, rank, count)
        case "gather":
            return gather(size, rank, root, count)
        case "scatter":
            return scatter(size, rank, root, count)
        case "all_to_all":
            return all_to_all(size, rank, count)
        case "permute":
            return permute(size, rank, request.pairs, count)
    return barrier(size, rank)


def _is_flat(size: int, count: int, nbytes: int, flat: int) -> bool:
    # With fewer elements than ranks some ranks would own nothing, and hear nothing of the others.
    return count < size or (nbytes <= flat and nbytes * (size - 1) <= FLAT_TOTAL_LIMIT)


__all__ = [
    "Buffer",
    "Program",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "permute",
    "reduce",
    "reduce_scatter",
    "scatter",
    "select",
    "transfer_in",
    "transfer_out",
]
