"""Collectives by mesh dimension, for functions that `shard_map` runs on the blocks: `dmesh.axes`.

Each device's call meets those of the other devices; all must make the same calls in the same order, with
arrays of the same shape and dtype.
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
    """This client's devices in a `shard_map`, each in a thread, where they meet."""

    grid: Grid
    barrier: threading.Barrier
    calls: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None

    def meet(self, at: int, what: str, value: Array, act: Callable[[list[Array]], list[Array]]) -> Array:
        """Exchange values with the other devices: the first one acts for all."""
        self.calls[at] = (what, value)
        if self.barrier.wait() == 0:
            try:
                differing = {(call[0], call[1].shape, call[1].dtype) for call in self.calls}
                if len(differing) > 1:
                    sides = " and ".join(
                        sorted(f"{name} of {dtype}{list(shape)}" for name, shape, dtype in differing)
                    )
                    raise CollectiveMismatchError(
                        f"the devices of client {self.grid.client} called {sides} in shard_map"
                    )
                self.results = act([call[1] for call in self.calls])
            except BaseException as error:  # noqa: BLE001 -- raised on every device
                self.error = error
        self.barrier.wait()
        if self.error is not None:
            raise self.error
        return np.asarray(self.results[at])


device: ContextVar[tuple[Team, int] | None] = ContextVar("dmesh_shard_map_device", default=None)
"""Team and index of the device that this thread stands for."""


def _here(what: str) -> tuple[Team, int]:
    found = device.get()
    if found is None:
        raise UnshardableError(f"dmesh.axes.{what} is for functions that dmesh.shard_map runs")
    return found


def _axis(grid: Grid, name: str) -> int:
    return grid.names.index(grid.mesh[name].name)


def index(axis: str) -> int:
    """Return this device's place along a mesh dimension."""
    team, at = _here("index")
    return team.grid.coords[team.grid.positions[at]][_axis(team.grid, axis)]


def size(axis: str) -> int:
    """Return the number of devices along a mesh dimension."""
    team, _ = _here("size")
    return team.grid.sizes[_axis(team.grid, axis)]


def _joined(grid: Grid, values: list[Array]) -> DTensor:
    """Return the values of all devices as one array, cut along every mesh dimension."""
    ndim, shape = len(grid.sizes), values[0].shape
    spec = spec_of(grid, (*grid.sizes, *shape), values[0].dtype, [*range(ndim), *[WHOLE] * len(shape)])
    return DTensor(spec, tuple(value.reshape((1,) * ndim + shape) for value in values))


def _apart(x: DTensor, shape: tuple[int, ...]) -> list[Array]:
    whole = move(x, x.spec.complete())
    return [whole.blocks[slot].reshape(shape) for slot in whole.spec.slot_of]


def _reduced(ufunc: np.ufunc, what: str, x: ArrayLike, axis: str) -> Array:
    team, at = _here(what)
    value = np.asarray(x)
    number = _axis(team.grid, axis)

    def act(values: list[Array]) -> list[Array]:
        return _apart(reduce(ufunc, _joined(team.grid, values), number, value.dtype, None, True), value.shape)

    return team.meet(at, f"{what}({axis!r})", value, act)


def psum(x: ArrayLike, axis: str) -> Array:
    """Return the sum of the arrays of all devices along a mesh dimension.

    Args:
        x: This device's array.
        axis: The mesh dimension.
    """
    return _reduced(np.add, "psum", x, axis)


def pmax(x: ArrayLike, axis: str) -> Array:
    """Return the largest elements of the arrays of all devices along a mesh dimension."""
    return _reduced(np.maximum, "pmax", x, axis)


def pmin(x: ArrayLike, axis: str) -> Array:
    """Return the smallest elements of the arrays of all devices along a mesh dimension."""
    return _reduced(np.minimum, "pmin", x, axis)


def all_gather(x: ArrayLike, axis: str, *, concat_axis: int | None = None) -> Array:
    """Return the arrays of all devices along a mesh dimension.

    Args:
        x: This device's array, as long as those of the others.
        axis: The mesh dimension.
        concat_axis: Dimension along which they are joined; None to stack them along a new first one.
    """
    team, at = _here("all_gather")
    value = np.asarray(x)
    number = _axis(team.grid, axis)

    def act(values: list[Array]) -> list[Array]:
        joined = _joined(team.grid, values)
        axes = [WHOLE if d == number else a for d, a in enumerate(joined.spec.axes)]
        gathered = move(joined, joined.spec.replace(axes=axes))
        found = []
        for slot in gathered.spec.slot_of:
            block = gathered.blocks[slot]
            stacked = block.reshape(block.shape[number], *value.shape)
            found.append(stacked if concat_axis is None else np.concatenate(list(stacked), concat_axis))
        return found

    return team.meet(at, f"all_gather({axis!r})", value, act)


def _places(numbers: list[int]) -> NDArray[np.intp]:
    return np.array(numbers, np.intp)


def permute(x: ArrayLike, axis: str, pairs: Iterable[tuple[int, int]]) -> Array:
    """Return the array of another device along a mesh dimension, or zeros where none is sent here.

    Args:
        x: This device's array.
        axis: The mesh dimension.
        pairs: Places along it, (source, target); none may be twice a source or twice a target.
    """
    team, at = _here("permute")
    value, wanted = np.asarray(x), [(int(s), int(t)) for s, t in pairs]
    number = _axis(team.grid, axis)
    sources, targets = [s for s, _ in wanted], [t for _, t in wanted]
    n = team.grid.sizes[number]
    if (
        len(set(sources)) != len(wanted)
        or len(set(targets)) != len(wanted)
        or not all(0 <= i < n for i in sources + targets)
    ):
        raise ValueError(f"pairs must name different places from 0 to {n - 1}, got {wanted}")

    def act(values: list[Array]) -> list[Array]:
        joined = _joined(team.grid, values)
        spec = joined.spec
        into = DTensor(spec, tuple(np.zeros_like(block) for block in joined.blocks))
        dims = [
            Dim(len(wanted), side(spec, d, _places(sources)), side(spec, d, _places(targets)))
            if d == number else Dim(length, side(spec, d), side(spec, d))
            for d, length in enumerate(spec.shape)
        ]  # fmt: skip
        exchange(joined, plan_exchange(spec, dims, spec.used), spec, into=into)
        return _apart(into, value.shape)

    return team.meet(at, f"permute({axis!r}, {wanted})", value, act)


__all__ = ["all_gather", "index", "permute", "pmax", "pmin", "psum", "size"]
