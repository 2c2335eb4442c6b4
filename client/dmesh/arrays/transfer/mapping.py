"""Mappings of elements from a source to a target, and plans of the blocks to exchange. No IO.

A mapping pairs elements of a source with elements of a target, separately for each dimension: pair i of a
dimension has the index `start + i * step` on each side, or the i-th of a list of indices. Relayout, slices,
`take`, `concatenate`, reshape and halos are such mappings. `plan_exchange` computes the blocks that each
device receives from each other one, for all clients at once, so that all clients have the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmesh.arrays.grid import Grid
from dmesh.arrays.spec import WHOLE, Bounds, Spec

Selector = slice | NDArray[np.intp]
"""Selection of elements of a block along one dimension."""


class Run(NamedTuple):
    """Indices `start`, `start + step`, and so on; a step of 0 repeats one index."""

    start: int = 0
    step: int = 1


EVERY = Run()
"""All indices, in order."""
Indices = Run | NDArray[np.intp]
"""Index of each pair on one side of a mapping."""


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of a mapping along one dimension."""

    axis: int
    """Mesh axis along which the side is sharded, or `WHOLE`."""
    cuts: Bounds
    """Begin and end of each shard; those of a target may overlap."""
    at: Indices = EVERY
    """Index of each pair."""


@dataclass(frozen=True, slots=True, eq=False)
class Dim:
    """Mapping along one dimension."""

    count: int
    """Number of pairs."""
    source: Side
    target: Side
    parts: tuple[Part, ...] | None = None
    """The parts, if they are known beforehand; the indices of both sides are then ignored."""


class Part(NamedTuple):
    """Elements that target shard `target` gets from source shard `source` along one dimension."""

    source: int
    target: int
    take: Selector
    """Selection within the source's block."""
    put: Selector
    """Selection within the target's block."""
    taken: int
    """Number of elements."""


class Piece(NamedTuple):
    """Elements that one slot gets from another, of the same or another client."""

    source: int
    """Index of the slot on the sending client."""
    target: int
    """Index of the slot on the receiving client."""
    take: tuple[Selector, ...]
    put: tuple[Selector, ...]
    shape: tuple[int, ...]
    """Shape of the elements."""
    moves: bool = True
    """False if the target's device already has the elements."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Plan of one mapping for one client, and the counts that all clients share."""

    grid: Grid
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of this client's target blocks, by slot."""
    local: tuple[Piece, ...]
    """Pieces that stay on this client."""
    sends: tuple[tuple[Piece, ...], ...]
    """Pieces to send to each client of the mesh, in the clients' order."""
    receives: tuple[tuple[Piece, ...], ...]
    """Pieces to receive from each client of the mesh."""
    matrix: tuple[tuple[int, ...], ...]
    """Number of elements that each client sends to each other one."""
    moved: dict[int, int] = field(hash=False)
    """Number of elements that each client's devices receive from other devices."""
    communicates: bool
    """True if any client sends elements to another one."""


def _within(run: Run, count: int, start: int, stop: int) -> tuple[int, int]:
    """Return the range of the pairs whose index is in a block, as first and last + 1."""
    if start >= stop:
        return 0, 0
    first, step = run
    if step == 0:
        return (0, count) if start <= first < stop else (0, 0)
    if step > 0:
        begin, end = -((first - start) // step), -((first - stop) // step)
    else:
        begin, end = (stop - first) // step + 1, (start - first) // step + 1
        # With a negative step, pair i is in the block if start <= first + i * step < stop.
    begin, end = max(begin, 0), min(end, count)
    return (begin, end) if begin < end else (0, 0)


def _run_slice(run: Run, begin: int, end: int, origin: int) -> slice:
    first = run.start + run.step * begin - origin
    if run.step == 0:
        return slice(first, first + 1, 1)
    stop = first + run.step * (end - begin - 1) + (1 if run.step > 0 else -1)
    return slice(first, None if stop < 0 else stop, run.step)


def _parts(dim: Dim) -> Iterator[Part]:
    """Yield the parts of a dimension in the order of source and target."""
    source, target, count = dim.source, dim.target, dim.count
    if dim.parts is not None:
        yield from dim.parts
        return
    if isinstance(source.at, Run) and isinstance(target.at, Run):
        for k, (low, high) in enumerate(source.cuts):
            begin, end = _within(source.at, count, low, high)
            if begin >= end:
                continue
            for j, (lower, upper) in enumerate(target.cuts):
                first, last = _within(target.at, count, lower, upper)
                a, b = max(begin, first), min(end, last)
                if a < b:
                    take = _run_slice(source.at, a, b, low)
                    taken = 1 if source.at.step == 0 else b - a
                    yield Part(k, j, take, _run_slice(target.at, a, b, lower), taken)
        return
    pairs = np.arange(count)
    sources = _listed(source.at, pairs)
    targets = _listed(target.at, pairs)
    for k, (low, high) in enumerate(source.cuts):
        mine = (sources >= low) & (sources < high)
        for j, (lower, upper) in enumerate(target.cuts):
            chosen = pairs[mine & (targets >= lower) & (targets < upper)]
            if chosen.size:
                yield Part(k, j, sources[chosen] - low, targets[chosen] - lower, chosen.size)


def _listed(indices: Indices, pairs: NDArray[np.intp]) -> NDArray[np.intp]:
    return indices.start + indices.step * pairs if isinstance(indices, Run) else indices


def _selection(parts: Sequence[Part], attribute: str) -> tuple[Selector, ...]:
    """Return the selectors of a block, one for each dimension."""
    selectors: list[Any] = [getattr(part, attribute) for part in parts]
    lists = [at for at, one in enumerate(selectors) if isinstance(one, np.ndarray)]
    if len(lists) > 1 or (lists and len(selectors) > 1):
        # NumPy would move the dimensions of lists mixed with slices to the front, so all become lists.
        ranges = [
            one if isinstance(one, np.ndarray) else np.arange(one.start, _stop(one), one.step)
            for one in selectors
        ]
        return np.ix_(*ranges)
    return tuple(selectors)


def _stop(one: slice) -> int:
    return -1 if one.stop is None else int(one.stop)


def plan_exchange(
    source: Spec, dims: Sequence[Dim], used: Sequence[int], tied: Sequence[int] = ()
) -> Exchange:
    """Return the plan that moves the elements of a source to their targets.

    Args:
        source: Placement of the source; its blocks have the dimensions of `dims`.
        dims: The mapping.
        used: Mesh axes along which the target's devices have different data, in ascending order.
        tied: Mesh axes along which a device may receive only from devices with its own coordinate: those of
            unreduced contributions.
    """
    grid = source.grid
    tables: list[dict[int, list[Part]]] = []
    for dim in dims:
        table: dict[int, list[Part]] = {}
        for part in _parts(dim):
            table.setdefault(part.target, []).append(part)
        tables.append(table)
    index = {client: at for at, client in enumerate(grid.clients)}
    slots_of_source = {
        client: {slot: at for at, slot in enumerate(slots)} for client, slots in source.all_slots.items()
    }
    me = grid.client
    local: list[Piece] = []
    sends: list[list[Piece]] = [[] for _ in grid.clients]
    receives: list[list[Piece]] = [[] for _ in grid.clients]
    matrix = [[0] * len(grid.clients) for _ in grid.clients]
    moved = dict.fromkeys(grid.clients, 0)
    shapes: list[tuple[int, ...]] = []
    seen: dict[int, dict[tuple[int, ...], list[tuple[int, ...]]]] = {client: {} for client in grid.clients}
    for coords, owner in zip(grid.coords, grid.owners, strict=True):
        seen[owner].setdefault(tuple(coords[axis] for axis in used), []).append(coords)
    for client, targets in seen.items():
        for number, sharing in enumerate(targets.values()):
            coords = sharing[0]
            held = {tuple(device[axis] for axis in source.used) for device in sharing}
            places = [0 if dim.target.axis == WHOLE else coords[dim.target.axis] for dim in dims]
            if client == me:
                shapes.append(
                    tuple(
                        dim.target.cuts[at][1] - dim.target.cuts[at][0]
                        for dim, at in zip(dims, places, strict=True)
                    )
                )
            for parts in itertools.product(
                *(table.get(at, ()) for table, at in zip(tables, places, strict=True))
            ):
                wanted = {
                    dim.source.axis: part.source
                    for dim, part in zip(dims, parts, strict=True)
                    if dim.source.axis != WHOLE
                }
                wanted.update((axis, coords[axis]) for axis in tied)
                slot = tuple(wanted[axis] for axis in source.used)
                own = slots_of_source[client].get(slot)
                natural = tuple(wanted.get(axis, at) for axis, at in enumerate(coords))
                sender = client if own is not None else grid.owners[grid.position(natural)]
                taken = math.prod(part.taken for part in parts)
                if slot not in held:
                    moved[client] += taken
                if sender != client:
                    matrix[index[sender]][index[client]] += taken
                if me not in (client, sender):
                    continue
                at = slots_of_source[sender][slot]
                shape = tuple(part.taken for part in parts)
                piece = Piece(
                    at, number, _selection(parts, "take"), _selection(parts, "put"), shape, slot not in held
                )
                if sender == client:
                    local.append(piece)
                elif client == me:
                    receives[index[sender]].append(piece)
                else:
                    sends[index[client]].append(piece)
    return Exchange(
        grid, tuple(shapes), tuple(local), tuple(map(tuple, sends)), tuple(map(tuple, receives)),
        tuple(map(tuple, matrix)), moved, any(map(any, matrix)),
    )  # fmt: skip


def side(spec: Spec, dim: int, at: Indices = EVERY) -> Side:
    """Return one side of a mapping along a dimension of an array."""
    return Side(spec.axes[dim], spec.cuts(dim), at)


@lru_cache(maxsize=1024)
def plan_relayout(source: Spec, target: Spec) -> Exchange:
    """Return the plan that moves an array from one sharding to another, both complete."""
    dims = [Dim(n, side(source, d), side(target, d)) for d, n in enumerate(source.shape)]
    return plan_exchange(source, dims, target.used)
