"""Collectives along a mesh dimension, for functions that `shard_map` runs on the blocks: `dmesh.axes`.

All devices must make the same calls in the same order, with arrays of the same shape and dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dmesh.arrays.dispatch.reduction import reduce
from dmesh.arrays.dtensor import DTensor, exchange, move
from dmesh.arrays.grid import Grid
from dmesh.arrays.spec import WHOLE, spec_of
from dmesh.arrays.transfer.mapping import Dim, plan_exchange, side
from dmesh.errors import CollectiveMismatchError, UnshardableError

Array = NDArray[Any]


@dataclass(slots=True)
class Team:
    """Threads of this client's devices in a `shard_map`, one each, and their exchange of values."""

    grid: Grid
    barrier: threading.Barrier
    calls: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None

    def exchange(
        self, at: int, what: str, value: Array, combine: Callable[[list[Array]], list[Array]]
    ) -> Array:
        """Return this device's result of a function of all devices' values, which one thread calls."""
        self.calls[at] = (what, value)
        if self.barrier.wait() == 0:
            try:
                differing = {(call[0], call[1].shape, call[1].dtype) for call in self.calls}
                if len(differing) > 1:
                    sides = " and ".join(
                        sorted(f"{name} of {dtype}{list(shape)}" for name, shape, dtype in differing)
                    )
                    raise CollectiveMismatchError(
                        f"in shard_map, the devices of client {self.grid.client} made different calls: "
                        f"{sides}. All devices must make the same calls in the same order"
                    )
                self.results = combine([call[1] for call in self.calls])
            except BaseException as error:  # noqa: BLE001 -- raised on every device
                self.error = error
        self.barrier.wait()
        if self.error is not None:
            raise self.error
        return np.asarray(self.results[at])


device: ContextVar[tuple[Team, int] | None] = ContextVar("dmesh_shard_map_device", default=None)
"""Team and index of this thread's device."""


def _current(what: str) -> tuple[Team, int]:
    found = device.get()
    if found is None:
        raise UnshardableError(f"dmesh.axes.{what} works only in functions that dmesh.shard_map runs")
    return found


def _axis(grid: Grid, name: str) -> int:
    return grid.names.index(grid.mesh[name].name)


def index(axis: str) -> int:
    """Return this device's index along a mesh dimension."""
    team, at = _current("index")
    return team.grid.coords[team.grid.positions[at]][_axis(team.grid, axis)]


def size(axis: str) -> int:
    """Return the number of devices along a mesh dimension."""
    team, _ = _current("size")
    return team.grid.sizes[_axis(team.grid, axis)]


def _joined(grid: Grid, values: list[Array]) -> DTensor:
    """Return the values of all devices as one array, sharded along every mesh dimension."""
    ndim, shape = len(grid.sizes), values[0].shape
    spec = spec_of(grid, (*grid.sizes, *shape), values[0].dtype, [*range(ndim), *[WHOLE] * len(shape)])
    return DTensor(spec, tuple(value.reshape((1,) * ndim + shape) for value in values))


def _split(x: DTensor, shape: tuple[int, ...]) -> list[Array]:
    whole = move(x, x.spec.complete())
    return [whole.blocks[slot].reshape(shape) for slot in whole.spec.slot_of]


def _reduced(ufunc: np.ufunc, what: str, x: ArrayLike, axis: str) -> Array:
    team, at = _current(what)
    value = np.asarray(x)
    number = _axis(team.grid, axis)

    def combine(values: list[Array]) -> list[Array]:
        return _split(reduce(ufunc, _joined(team.grid, values), number, value.dtype, None, True), value.shape)

    return team.exchange(at, f"{what}({axis!r})", value, combine)


def psum(x: ArrayLike, axis: str) -> Array:
    """Return the sum of the arrays of all devices along a mesh dimension.

    Args:
        x: This device's array.
        axis: The mesh dimension.
    """
    return _reduced(np.add, "psum", x, axis)


def pmax(x: ArrayLike, axis: str) -> Array:
    """Return the elementwise maximum of the arrays of all devices along a mesh dimension."""
    return _reduced(np.maximum, "pmax", x, axis)


def pmin(x: ArrayLike, axis: str) -> Array:
    """Return the elementwise minimum of the arrays of all devices along a mesh dimension."""
    return _reduced(np.minimum, "pmin", x, axis)


def all_gather(x: ArrayLike, axis: str, *, concat_axis: int | None = None) -> Array:
    """Return the arrays of all devices along a mesh dimension.

    Args:
        x: This device's array, of the same shape on all devices.
        axis: The mesh dimension.
        concat_axis: Dimension along which they are concatenated; None to stack them along a new first one.
    """
    team, at = _current("all_gather")
    value = np.asarray(x)
    number = _axis(team.grid, axis)

    def combine(values: list[Array]) -> list[Array]:
        joined = _joined(team.grid, values)
        axes = [WHOLE if d == number else a for d, a in enumerate(joined.spec.axes)]
        gathered = move(joined, joined.spec.replace(axes=axes))
        found = []
        for slot in gathered.spec.slot_of:
            block = gathered.blocks[slot]
            stacked = block.reshape(block.shape[number], *value.shape)
            found.append(stacked if concat_axis is None else np.concatenate(list(stacked), concat_axis))
        return found

    return team.exchange(at, f"all_gather({axis!r})", value, combine)


def _places(numbers: list[int]) -> NDArray[np.intp]:
    return np.array(numbers, np.intp)


def permute(x: ArrayLike, axis: str, pairs: Iterable[tuple[int, int]]) -> Array:
    """Return the array of another device along a mesh dimension, or zeros if no pair has this target.

    Args:
        x: This device's array.
        axis: The mesh dimension.
        pairs: Indices (source, target) along it; no two pairs may have the same source or target.
    """
    team, at = _current("permute")
    value, wanted = np.asarray(x), [(int(s), int(t)) for s, t in pairs]
    number = _axis(team.grid, axis)
    sources, targets = [s for s, _ in wanted], [t for _, t in wanted]
    n = team.grid.sizes[number]
    if (
        len(set(sources)) != len(wanted)
        or len(set(targets)) != len(wanted)
        or not all(0 <= i < n for i in sources + targets)
    ):
        raise ValueError(f"pairs must have distinct sources and targets from 0 to {n - 1}, got {wanted}")

    def combine(values: list[Array]) -> list[Array]:
        joined = _joined(team.grid, values)
        spec = joined.spec
        into = DTensor(spec, tuple(np.zeros_like(block) for block in joined.blocks))
        dims = [
            Dim(len(wanted), side(spec, d, _places(sources)), side(spec, d, _places(targets)))
            if d == number else Dim(length, side(spec, d), side(spec, d))
            for d, length in enumerate(spec.shape)
        ]  # fmt: skip
        exchange(joined, plan_exchange(spec, dims, spec.used), spec, into=into)
        return _split(into, value.shape)

    return team.exchange(at, f"permute({axis!r}, {wanted})", value, combine)


__all__ = ["all_gather", "index", "permute", "pmax", "pmin", "psum", "size"]
