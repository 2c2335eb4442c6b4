"""Placement of an array on a mesh: shape, dtype, sharding and unreduced contributions.

Specs are interned: two specs of one client are equal only if they are the same object, so that plans can be
looked up by identity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike

from dmesh.arrays.grid import Grid, grid_of
from dmesh.errors import LayoutError, UnshardableError
from dmesh.layout import MATCH, UNSHARDED, Layout, LayoutType

Bounds = tuple[tuple[int, int], ...]
"""Begin and end of each shard along a dimension."""
WHOLE = -1
"""Mesh axis of an unsharded dimension."""
_SAME = {"q": np.dtype(np.int64), "Q": np.dtype(np.uint64)}
"""NumPy's two 8-byte types, which compare equal on many systems."""
_Key = tuple[Grid, tuple[int, ...], "np.dtype[Any]", tuple[int, ...], tuple[int, ...], str]
_known: WeakValueDictionary[_Key, Spec] = WeakValueDictionary()
_lock = Lock()


@lru_cache(maxsize=4096)
def bounds(length: int, shards: int) -> Bounds:
    """Return the bounds of a dimension's blocks: ceil(length / shards) each, the last ones shorter or empty.

    >>> bounds(5, 4)
    ((0, 2), (2, 4), (4, 5), (5, 5))
    """
    block = -(-length // shards)
    return tuple((min(at * block, length), min((at + 1) * block, length)) for at in range(shards))


class Spec:
    """Placement of an array; made by `spec_of`, once for equal arguments.

    A client's devices with the same block share it. Each client stores one NumPy array per distinct block,
    its *slots*.
    """

    __slots__ = ("__dict__", "__weakref__", "axes", "dtype", "grid", "ndim", "op", "partial", "shape")

    def __init__(
        self,
        grid: Grid,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        axes: tuple[int, ...],
        partial: tuple[int, ...],
        op: str,
    ) -> None:
        self.grid = grid
        self.shape = shape
        """Shape of the whole array."""
        self.dtype = dtype
        self.axes = axes
        """Mesh axis along which each dimension is sharded, or `WHOLE`."""
        self.partial = partial
        """Mesh axes along which the devices hold unreduced contributions."""
        self.op = op
        """Reduction of the contributions; empty if there are none."""
        self.ndim = len(shape)

    # Derived ------------------------------------------------------------------------------------------------

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def used(self) -> tuple[int, ...]:
        """Mesh axes along which devices have different data, in ascending order."""
        return tuple(sorted({axis for axis in self.axes if axis != WHOLE} | set(self.partial)))

    @cached_property
    def shards(self) -> int:
        """Number of different blocks of the array."""
        return math.prod(
            self.grid.sizes[axis]
            for axis, n in zip(self.axes, self.shape, strict=True)
            if axis != WHOLE and n > 1
        )

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest block."""
        longest = (self.cuts(dim)[0] for dim in range(self.ndim))
        return math.prod(stop - start for start, stop in longest) * self.dtype.itemsize

    @cached_property
    def is_whole(self) -> bool:
        """True if every device has the whole array, without unreduced contributions."""
        return not self.partial and all(axis == WHOLE or self.grid.sizes[axis] == 1 for axis in self.axes)

    def cuts(self, dim: int) -> Bounds:
        """Return begin and end of a dimension's blocks; one block if it is not sharded."""
        axis = self.axes[dim]
        return bounds(self.shape[dim], 1 if axis == WHOLE else self.grid.sizes[axis])

    @cached_property
    def all_slots(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Slots of each client: coordinates along the used axes."""
        grid, found = self.grid, {client: {} for client in self.grid.clients}  # type: ignore[var-annotated]
        for coords, owner in zip(grid.coords, grid.owners, strict=True):
            found[owner][tuple(coords[axis] for axis in self.used)] = None
        return {client: tuple(slots) for client, slots in found.items()}

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """Slots of this client."""
        return self.all_slots[self.grid.client]

    @cached_property
    def slot_of(self) -> tuple[int, ...]:
        """Slot of each of this client's devices, by index."""
        index = {slot: at for at, slot in enumerate(self.slots)}
        coords = self.grid.coords
        return tuple(index[tuple(coords[at][axis] for axis in self.used)] for at in self.grid.positions)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """For each slot, the index of the first of this client's devices that uses it."""
        return tuple(self.slot_of.index(slot) for slot in range(len(self.slots)))

    @cached_property
    def holders(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Positions of the devices with each block, by the block's position along each dimension."""
        found: dict[tuple[int, ...], list[int]] = {}
        for position, coords in enumerate(self.grid.coords):
            block = tuple(0 if axis == WHOLE else coords[axis] for axis in self.axes)
            found.setdefault(block, []).append(position)
        return {block: tuple(positions) for block, positions in found.items()}

    def region(self, slot: tuple[int, ...]) -> Bounds:
        """Return begin and end of a slot's block along each dimension."""
        place = dict(zip(self.used, slot, strict=True))
        return tuple(
            self.cuts(dim)[0 if axis == WHOLE else place[axis]] for dim, axis in enumerate(self.axes)
        )

    @cached_property
    def regions(self) -> tuple[Bounds, ...]:
        """Block of each of this client's slots."""
        return tuple(self.region(slot) for slot in self.slots)

    @cached_property
    def local_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of the block of each of this client's slots."""
        return tuple(tuple(stop - start for start, stop in region) for region in self.regions)

    @cached_property
    def layout(self) -> Layout:
        """The layout, without unreduced contributions."""
        names = self.grid.names
        specs = [UNSHARDED if axis == WHOLE else names[axis] for axis in self.axes]
        return Layout(specs, self.grid.mesh)

    # Other placements ---------------------------------------------------------------------------------------

    def replace(
        self,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: DTypeLike | None = None,
        axes: Sequence[int] | None = None,
        partial: Iterable[int] | None = None,
        op: str | None = None,
    ) -> Spec:
        """Return the placement with some fields replaced."""
        return spec_of(
            self.grid,
            self.shape if shape is None else shape,
            self.dtype if dtype is None else np.dtype(dtype),
            self.axes if axes is None else axes,
            self.partial if partial is None else partial,
            self.op if op is None else op,
        )

    def complete(self) -> Spec:
        """Return the placement without unreduced contributions."""
        return self if not self.partial else self.replace(partial=(), op="")

    def replicated(self) -> Spec:
        """Return the placement of the whole array on every device."""
        return self.replace(axes=(WHOLE,) * self.ndim, partial=(), op="")

    def __repr__(self) -> str:
        return f"<Spec {self.describe()}>"

    def describe(self) -> str:
        """Return the placement as text: `float64[8, 4] (x, -)`."""
        names = self.grid.names
        cut = ", ".join("-" if axis == WHOLE else names[axis] for axis in self.axes)
        text = f"{self.dtype}{list(self.shape)} ({cut})"
        if self.partial:
            text += f" partial {self.op} over {', '.join(names[axis] for axis in self.partial)}"
        return text


def spec_of(
    grid: Grid,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    axes: Sequence[int] | None = None,
    partial: Iterable[int] = (),
    op: str = "",
) -> Spec:
    """Return a placement; the same object for equal arguments.

    Args:
        grid: The mesh.
        shape: Shape of the whole array.
        dtype: Type of its elements.
        axes: Mesh axis of each dimension, or `WHOLE`; None for a replicated array.
        partial: Mesh axes of unreduced contributions; axes of length 1 are ignored.
        op: Their reduction.
    """
    cut = (WHOLE,) * len(shape) if axes is None else tuple(axes)
    dtype = _SAME.get(dtype.char, dtype)
    left = tuple(sorted({axis for axis in partial if grid.sizes[axis] > 1}))
    key = (grid, shape, dtype, cut, left, op if left else "")
    found = _known.get(key)
    if found is None:
        made = Spec(*key)
        with _lock:
            found = _known.setdefault(key, made)
    return found


def check_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype whose elements can be moved, in native byte order.

    Raises:
        UnshardableError: The elements are Python objects.
    """
    if dtype.hasobject:
        raise UnshardableError(
            f"arrays of dtype {dtype} cannot be sharded, because their elements are Python objects. Convert "
            "them to a dtype of fixed size"
        )
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def spec_for(
    layout: Layout,
    shape: Sequence[int],
    dtype: DTypeLike,
    current: Spec | None = None,
    *,
    uneven: bool = True,
) -> Spec:
    """Return the placement of an array in a layout.

    Args:
        layout: The layout; `MATCH` keeps the sharding of `current`.
        shape: Shape of the whole array.
        dtype: Type of its elements.
        current: Present placement of the array; None for a new one.
        uneven: Whether the last shards may be shorter.

    Raises:
        LayoutError: The layout does not fit the shape.
        UnshardableError: The layout is of a kind that sharded arrays cannot have.
    """
    if not isinstance(layout, Layout):
        raise LayoutError(f"expected a dmesh.Layout, got {type(layout).__name__}: {layout!r:.200}")
    if layout.type is not LayoutType.STATIC:
        raise UnshardableError(
            f"sharded arrays need a layout with sharding specs, got one of type {layout.type.value}"
        )
    grid, lengths = grid_of(layout.mesh), tuple(shape)
    if layout.rank != len(lengths):
        raise LayoutError(
            f"the layout {layout.sharding_specs} is for {layout.rank} dimensions, but the array has "
            f"{len(lengths)}: its shape is {lengths}"
        )
    axes: list[int] = []
    for dim, name in enumerate(layout.sharding_specs):
        if name == MATCH:
            if current is None:
                raise LayoutError(
                    f"{MATCH!r} for dimension {dim} keeps the present sharding, but a new array has none"
                )
            axes.append(current.axes[dim] if current.grid is grid else WHOLE)
        else:
            axes.append(WHOLE if name == UNSHARDED else grid.names.index(name))
    cut = [axis for axis in axes if axis != WHOLE]
    if len(set(cut)) != len(cut):
        twice = next(axis for axis in cut if cut.count(axis) > 1)
        raise LayoutError(
            f"the layout shards two dimensions along mesh dimension {grid.names[twice]!r}, which shards "
            "only one"
        )
    for dim, axis in enumerate(axes):
        shards = 1 if axis == WHOLE else grid.sizes[axis]
        if not uneven and lengths[dim] % shards:
            raise LayoutError(
                f"dimension {dim} of shape {lengths} has length {lengths[dim]}, which mesh dimension "
                f"{grid.names[axis]!r} of {shards} devices does not divide; with uneven=True the last "
                "shards are "
                "shorter"
            )
    return spec_of(grid, lengths, check_dtype(np.dtype(dtype)), axes)
