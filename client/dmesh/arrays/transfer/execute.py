"""Execution of plans on a client's shards: copies between its devices, one call for all other clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dmesh.arrays import ledger
from dmesh.arrays.grid import RECYCLED, Grid
from dmesh.arrays.transfer.mapping import Exchange, Piece
from dmesh.collectives.counts import known_exchange
from dmesh.collectives.group import Group
from dmesh.collectives.request import Request
from dmesh.collectives.shared_results import common_memory

_FRESH = 32 << 20
"""Bytes from which `malloc` returns fresh pages each time."""

Array = NDArray[Any]
Shards = tuple[Array, ...]


def run_exchange(
    plan: Exchange, shards: Sequence[Array], dtype: np.dtype[Any], into: Sequence[Array] | None = None
) -> Shards:
    """Carry out the exchange of a mapping.

    Args:
        plan: The plan.
        shards: This client's blocks of the source.
        dtype: Type of the elements.
        into: This client's blocks of the target, to write to; None for new ones, which are views of the
            source's blocks where possible.

    Returns:
        The target's blocks.
    """
    arrived: list[tuple[Piece, Array]] = []
    if plan.communicates:
        arrived = _communicate(plan, shards, dtype)
    targets: list[Array | None] = list(into) if into is not None else [None] * len(plan.shapes)
    ledger.count("exchange", sum(values.nbytes for _, values in arrived))
    by_target: dict[int, int] = {}
    for piece in (*plan.local, *(piece for piece, _ in arrived)):
        by_target[piece.target] = by_target.get(piece.target, 0) + 1
    for piece in plan.local:
        values = shards[piece.source][piece.take]
        if piece.moves:
            ledger.count("exchange", values.nbytes)
        target = targets[piece.target]
        shape = plan.shapes[piece.target]
        if target is None and by_target[piece.target] == 1 and values.shape == shape:
            targets[piece.target] = values
            continue
        if target is None:
            target = targets[piece.target] = plan.grid.empty(shape, dtype)
        target[piece.put] = values
    for piece, values in arrived:
        target = targets[piece.target]
        if target is None:
            if by_target[piece.target] == 1 and values.shape == plan.shapes[piece.target]:
                targets[piece.target] = values
                continue
            target = targets[piece.target] = plan.grid.empty(plan.shapes[piece.target], dtype)
        target[piece.put] = values
    return tuple(
        plan.grid.empty(shape, dtype) if target is None else target
        for target, shape in zip(targets, plan.shapes, strict=True)
    )


def _communicate(plan: Exchange, shards: Sequence[Array], dtype: np.dtype[Any]) -> list[tuple[Piece, Array]]:
    """Send all pieces for other clients in one call; return the received pieces."""
    group = plan.grid.group()
    total = sum(plan.matrix[group.rank])
    sent = [(piece.source, shards[piece.source][piece.take]) for pieces in plan.sends for piece in pieces]
    outgoing = _in_a_row(sent) if total * dtype.itemsize >= RECYCLED else None
    if outgoing is None:
        outgoing, at = plan.grid.empty((total,), dtype), 0
        for _, values in sent:
            outgoing[at : at + values.size].reshape(values.shape)[...] = values
            at += values.size
    incoming = plan.grid.empty((sum(row[group.rank] for row in plan.matrix),), dtype)
    incoming = call(group, known_exchange(group.size, group.rank, outgoing, plan.matrix, incoming))
    found, at = [], 0
    for pieces in plan.receives:
        for piece in pieces:
            size = math.prod(piece.shape)
            found.append((piece, incoming[at : at + size].reshape(piece.shape)))
            at += size
    return found


def _in_a_row(views: Sequence[tuple[int, Array]]) -> Array | None:
    """Return views of one block as a flat array, without a copy; None if they do not follow each other."""
    (block, first), *_ = views
    end = first.ctypes.data
    for source, values in views:
        if source != block or not values.flags.c_contiguous or values.ctypes.data != end:
            return None
        end += values.nbytes
    return as_strided(first, (sum(values.size for _, values in views),), (first.itemsize,), writeable=False)


def call(group: Group, request: Request) -> Array:
    """Make a collective call, with the name of the operation and the program's line in its descriptor."""
    labeled = request.labeled(ledger.current_operation("relayout"), ledger.place())
    result: Array = group.call(labeled, None, False)
    return result


def reduce_among(
    grid: Grid, axes: tuple[int, ...], array: Array, op: Any, counts: Sequence[int] | None = None
) -> Array:
    """Reduce a flat array along some dimensions of the mesh; with counts, each client gets its block."""
    group = grid.group(axes)
    size, least = (array.size, RECYCLED) if counts is None else (counts[group.rank], _FRESH)
    out = grid.empty((size,), array.dtype) if size * array.itemsize >= least else None
    if counts is None:
        reduced = call(group, group.requests.make("all_reduce", array, out, op=op, compress=None))
        ledger.count("all_reduce", 2 * array.nbytes * (group.size - 1) // group.size)
        return reduced
    lengths = None if len(set(counts)) == 1 else tuple(counts)
    request = group.requests.make("reduce_scatter", array, out, op=op, axis=0, counts=lengths)
    ledger.count("reduce_scatter", array.nbytes * (group.size - 1) // group.size)
    return call(group, request)


def gather_rows(group: Group, shards: Sequence[Array], counts: Sequence[int]) -> Array:
    """Return the concatenated rows of all clients of a group, in shared memory if possible."""
    first = shards[0]
    row, mine = math.prod(first.shape[1:]) * first.itemsize, sum(len(shard) for shard in shards)
    total = sum(counts)
    ledger.count("all_gather", (total - mine) * row)
    if total * row >= RECYCLED and group.size > 1 and group.current.shares_arrays:
        what = f"{total} rows of {first.dtype} {first.shape[1:]}"
        memory = common_memory(group, what, total * row, call=partial(call, group), spare=True)
        if memory is not None:
            gathered = memory.view(first.dtype).reshape(total, *first.shape[1:])
            begin = sum(counts[: group.rank])
            np.concatenate(shards, out=gathered[begin : begin + mine])
            call(group, group.requests.make("barrier"))
            gathered.flags.writeable = False
            return gathered
    lengths = None if len(set(counts)) == 1 else tuple(counts)
    rows = first if len(shards) == 1 else np.concatenate(shards)
    return call(group, group.requests.make("all_gather", rows, axis=0, counts=lengths))


def gather_counts(group: Group, numbers: Array) -> Array:
    """Return the numbers of all clients of a group, one row for each client."""
    gathered = call(group, group.requests.make("all_gather", numbers, axis=None, counts=None))
    ledger.count("counts", gathered.nbytes - numbers.nbytes)
    return gathered
